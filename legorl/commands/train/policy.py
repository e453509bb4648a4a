"""The policy that is trained: its weights and AdamW in memory, and the checkpoint that holds the same.

    policy = Policy(open_checkpoint(model))
    train(rows, policy, out, settings)                 # policy.checkpoint is `out` then
    train(more, policy, other, settings)               # goes on from memory, with the results of a fresh process

Nothing is loaded before a step needs it, so that finding steps taken costs no time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legorl.checkpoint import Checkpoint, open_checkpoint
from legorl.commands.train import save
from legorl.commands.train.schedule import Schedule
from legorl.commands.train.settings import Settings

if TYPE_CHECKING:
    from legorl.commands.train.lora import Adapter
    from legorl.commands.train.step import Trainer


class Policy:
    """Stands at `checkpoint`; `tell` gets words for the user. `schedule` is there once `trainer` was called.

    `adapter`: the one that is trained in place of the weights, None without --lora.
    """

    schedule: Schedule
    adapter: "Adapter | None" = None

    def __init__(self, checkpoint: Checkpoint, tell: Callable[[str], object] = lambda words: None):
        self.checkpoint = checkpoint
        self.tell = tell
        self._trainer: Trainer | None = None

    def trainer(self, settings: Settings) -> "Trainer":
        """The model and its optimiser, loaded if they are not, for a step with `settings`.

        Of these, those that a batch decides (dr_grpo's constant) may change from call to call. Raises ModelError.
        """
        if self._trainer is None:
            from legorl.commands.train.lora import load_policy, same_kind
            from legorl.commands.train.step import Trainer

            goes_on = same_kind(self.checkpoint, settings)
            model, self.adapter = load_policy(self.checkpoint, settings, self.tell)
            trainer = Trainer(settings, model)
            if self.adapter and settings.dtype == "bf16":
                self.adapter.halve()  # only now: a trainer tries its model out in float32
            restored = goes_on and save.load_optimizer(self.checkpoint, trainer.model, trainer.optimizer)
            if goes_on and self.checkpoint.version and not restored:
                self.tell(f"{self.checkpoint.path}: no optimizer state there; AdamW starts afresh")
            self._trainer = trainer
            self.schedule = self._schedule(settings, trainer.optimizer, goes_on)
        self._trainer.settings = settings
        return self._trainer

    def _schedule(self, settings: Settings, optimizer: Any, goes_on: bool) -> Schedule:
        """The checkpoint's schedule, gone on with; one of another name, or for other weights, begins at its start."""
        state = save.load_schedule(self.checkpoint) if goes_on else {}
        if state.get("schedule") == settings.schedule:
            return Schedule(settings, optimizer, state["taken"])
        if state:
            self.tell(f"{self.checkpoint.path}: had a {state['schedule']} schedule; the {settings.schedule} one begins")
        return Schedule(settings, optimizer)

    def moved_to(self, out: Path, digest: str | None = None) -> None:
        """The step just taken was written to `out`, with that digest: what is in memory is what stands there."""
        self.checkpoint = open_checkpoint(out, digest)

    def stand_at(self, out: Path) -> None:
        """Go to the finished checkpoint at `out`, which something else wrote; what is in memory is let go."""
        self._trainer = None
        self.checkpoint = open_checkpoint(out)
