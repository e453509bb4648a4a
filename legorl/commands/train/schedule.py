"""The learning rate of each step: constant, or falling in a line or along half a cosine, after a warm-up.

    schedule = Schedule(settings, optimizer, taken=3)     # the optimiser has the fourth step's rate now
    schedule.rate; schedule.advance(); schedule.state()

transformers' schedules; what they count is steps of lego-train that moved weights, whatever number of minibatches each
has. Of a schedule of T steps with W of warm-up, the n-th (from 1) has the rate

    lr n / (W + 1)                                   up to n = W
    lr (T + 1 - n) / (T - W)                         linear
    lr (1 + cos(pi (n - W - 1) / (T - W))) / 2       cosine

transformers counts from 0, where a warm-up has the rate 0; we begin at its place 1 of schedules that are one step
longer, for no round is worth a step of size 0.
"""

from collections.abc import Callable
from typing import Any

from legorl.commands.train.settings import Settings, SettingsError


class Schedule:
    """Sets the rate of `optimizer` before every step; `taken`: how many steps of the schedule lie behind.

    Raises SettingsError if none is left.
    """

    def __init__(self, settings: Settings, optimizer: Any, taken: int = 0):
        self._settings = settings
        for group in optimizer.param_groups:
            group["initial_lr"] = settings.lr  # what a schedule that is gone on with multiplies
        self._scheduler = _schedule(settings)(optimizer, last_epoch=taken)

    def state(self) -> dict[str, Any]:
        """What the next process needs to go on: `schedule`, its name, and how many of its steps are `taken`."""
        return {"schedule": self._settings.schedule, "taken": self.taken}

    @property
    def taken(self) -> int:
        return self._scheduler.last_epoch - 1

    @property
    def rate(self) -> float:
        """The rate of the next step."""
        return self._scheduler.get_last_lr()[0]

    def check(self) -> None:
        """Raise SettingsError if the schedule is over: what lies behind its end is no schedule's."""
        if self._settings.total is not None and self.taken >= self._settings.total:
            raise SettingsError(
                f"the {self._settings.schedule} schedule ended with step {self._settings.total}; give a larger --total "
                "to go on with it, or another --schedule to begin one"
            )

    def advance(self) -> None:
        """A step was taken: go to the next one's rate."""
        self._scheduler.step()


def _schedule(settings: Settings) -> Callable[..., Any]:
    """transformers' function for the schedule of `settings`, all but the optimiser and the place given."""
    from functools import partial

    from transformers import optimization

    warmup = settings.warmup + 1
    if settings.schedule == "constant":
        return partial(optimization.get_constant_schedule_with_warmup, num_warmup_steps=warmup)
    kinds: dict[str, Callable[..., Any]] = {
        "linear": optimization.get_linear_schedule_with_warmup,
        "cosine": optimization.get_cosine_schedule_with_warmup,
    }
    assert settings.total is not None
    return partial(kinds[settings.schedule], num_warmup_steps=warmup, num_training_steps=settings.total + 1)
