"""The update: old log-probabilities, the gate, then one optimiser step a minibatch.

    trainer = Trainer(settings, model)
    figures = trainer.run(batch, gate)     # fills batch.tokens; moves the weights if there is something to train

With one minibatch the policy at the step's start is the policy being trained, so its log-probabilities are those of the
training forward pass itself and no separate pass is made for them; `gate` is called after the first backward pass and
before the first optimiser step either way. Minibatches are random sets of whole attempts; the averages of a loss are
those of its minibatch.

Weights and optimiser state are always float32: in bfloat16 a step of 1e-5 would round to nothing. dtype `bf16` is that
of the forward pass (autocast).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from legorl.attention import enable, why_not
from legorl.commands.train.batch import TRAINED, Batch
from legorl.commands.train.flipped import watching
from legorl.commands.train.objective import Objective, needs_old
from legorl.commands.train.pack import Micro, Sample, forests, rows
from legorl.commands.train.ranks import Ranks
from legorl.commands.train.rows import BatchError, CheckError
from legorl.commands.train.settings import Settings
from legorl.model import find_routers


class Trainer:
    """A model, its AdamW optimiser, and the processes and devices that they live on.

    `progress` is called with the number of tokens that a pass of this process over a micro-batch has read.
    """

    def __init__(self, settings: Settings, model: Any):
        import torch

        self.settings = settings
        self.progress: Callable[[int], object] = lambda tokens: None
        self.ranks = Ranks(settings.dtype)
        self.model = model.to(self.ranks.device)
        self.pack = self._packing()
        self.routers = find_routers(self.model)
        self.scorer = self.ranks.spread(self.model)
        # Input positions whose experts were replayed, all of sparse models, recorded ones, and those of them that the
        # model routes otherwise by itself.
        self.replayed, self.routed, self.compared, self.flipped = 0, 0, 0, 0
        self.trained = [p for p in model.parameters() if p.requires_grad]  # all, or an adapter's (lora.py)
        self.optimizer = torch.optim.AdamW(self.trained, lr=settings.lr, weight_decay=settings.weight_decay)

    def run(self, batch: Batch, gate: Callable[[], object]) -> dict[str, float]:
        """Take one step on `batch`; return its figures. Without a trained token only the gate runs.

        `gate` raises to keep the weights as they are. With k1 in the reward, advantages are made anew here. Raises
        BatchError if a log-probability or a gradient is not a finite number; the weights have not moved then, unless an
        earlier minibatch moved them.
        """
        settings = self.settings
        self.replayed, self.routed, self.compared, self.flipped = 0, 0, 0, 0
        self._check_routing(batch)
        if settings.kl == "k1-reward":
            assert settings.kl_coef is not None
            self.score(batch, batch.samples)
            batch.judge(settings.loss, settings.kl_coef * batch.kl_to_reference())
        trained, others = _split(batch)
        if settings.loss != "sft":
            self.score(batch, _unscored(batch, self.some(others)))
        parts = self._minibatches(trained)
        if needs_old(settings, len(parts)):
            for part in parts:  # in the micro-batches of its update, so that rounding is the same in both
                self.score(batch, _unscored(batch, part))
        if not parts:
            gate()
        losses, norms = [], []
        for number, part in enumerate(parts):
            current = batch.tokens.old
            if number and settings.loss == "gspo":
                current = np.full_like(current, np.nan)
                self.score(batch, part, current)
            losses.append(self.backward(batch, part, current))
            if number == 0:
                gate()
            norms.append(self._move())
        counts = self.ranks.total(self.replayed, self.routed, self.compared, self.flipped)
        figures = {"routing/replayed": counts[0] / counts[1]} if counts[1] else {}
        if counts[2]:
            figures["routing/flipped"] = counts[3] / counts[2]
        if not parts:
            return figures
        return figures | {
            "loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            "minibatches": float(len(parts)),
        }

    def _check_routing(self, batch: Batch) -> None:
        """Raise CheckError if experts are recorded that this model cannot have chosen."""
        shape = self.routers.shape if self.routers else None
        for sample in batch.samples:
            if sample.experts is None:
                continue
            name = batch.rows[sample.attempt]["attempt_id"]
            held = "{} layers x {} experts".format(*sample.experts.shape[1:])
            if shape is None:
                raise CheckError(f"{name}: {held} are recorded, but the model to train has no experts")
            if sample.experts.shape[1:] != (shape.layers, shape.topk) or int(sample.experts.max()) >= shape.experts:
                raise CheckError(
                    f"{name}: {held} are recorded, but the model to train has {shape.layers} x {shape.topk} out of "
                    f"{shape.experts}; give --model the model that sampled it"
                )

    @contextmanager
    def _replaying(self, micro: Micro, flipped: np.ndarray | None = None) -> Iterator[None]:
        """Within, recorded experts take the place of the model's choice; the backward pass belongs within, too.

        `flipped`, Tokens.flipped, gets the targets that have no value there yet.
        """
        import torch

        self.routed += micro.tokens if self.routers else 0
        if self.routers is None or micro.experts is None or micro.valid is None:
            yield
            return
        experts, valid = (torch.as_tensor(a, device=self.ranks.device) for a in (micro.experts, micro.valid))
        recorded = experts.long(), valid
        with (
            nullcontext() if flipped is None else watching(self.routers, micro, *recorded, flipped) as counts,
            self.routers.replaying(*recorded) if self.settings.replay else nullcontext(),
        ):
            yield
        self.replayed += int(micro.valid.sum()) if self.settings.replay else 0
        if counts:
            self.compared += counts.compared
            self.flipped += counts.flipped

    def _packing(self) -> Callable[[Iterable[Sample], int], list[Micro]]:
        """How samples become micro-batches: as trees, unless that was not asked for or the model's layers cannot."""
        if self.settings.packing == "rows" or (self.settings.packing == "auto" and why_not(self.model.config)):
            return rows
        enable(self.model)
        return forests

    def _reads(self, samples: Iterable[Sample]) -> int:
        """How many tokens this process reads in one pass over `samples`."""
        return sum(micro.tokens for micro, _ in self.ranks.deal(self.pack(samples, self.settings.tokens_per_batch)))

    def planned(self, batch: Batch) -> int:
        """How many tokens `run` will read in this process; an estimate where it may change the advantages."""
        trained, others = _split(batch)
        parts = self._minibatches(trained)
        reads = [self._reads(part) for part in parts]
        total = sum(reads) + (sum(reads[1:]) if self.settings.loss == "gspo" else 0)
        if self.settings.kl == "k1-reward":
            return total + self._reads(batch.samples)
        if self.settings.loss != "sft":
            total += self._reads(self.some(others))
        return total + (sum(reads) if needs_old(self.settings, len(parts)) else 0)

    def score(self, batch: Batch, samples: Sequence[Sample], into: np.ndarray | None = None) -> None:
        """Fill `into`, by default `old`, for the targets of `samples`, without gradients."""
        import torch

        into = batch.tokens.old if into is None else into
        flipped = batch.tokens.flipped if into is batch.tokens.old else None  # else other weights choose
        done = [np.empty(0, np.int64)]
        with torch.no_grad():
            for micro, _ in self.ranks.deal(self.pack(samples, self.settings.tokens_per_batch)):
                with self._replaying(micro, flipped):
                    logprobs, index = self._logprobs(batch, micro)
                into[index] = logprobs.float().cpu().numpy()
                done.append(index)
        self.ranks.collect([into] if flipped is None else [into, flipped], np.concatenate(done))

    def some(self, samples: list[Sample]) -> list[Sample]:
        """A random part of `samples` that reads at most `gate_tokens` tokens."""
        order = np.random.default_rng(self.settings.seed).permutation(len(samples))
        spent = np.cumsum([len(samples[k].ids) for k in order])
        return [samples[k] for k, total in zip(order, spent, strict=True) if total <= self.settings.gate_tokens]

    def _minibatches(self, samples: Iterable[Sample]) -> list[list[Sample]]:
        by_attempt: dict[int, list[Sample]] = {}
        for sample in samples:
            by_attempt.setdefault(sample.attempt, []).append(sample)
        order = np.random.default_rng(self.settings.seed).permutation(sorted(by_attempt))
        parts = np.array_split(order, min(self.settings.minibatches, max(1, len(order))))
        return [[sample for attempt in part for sample in by_attempt[attempt]] for part in parts if len(part)]

    def backward(self, batch: Batch, samples: list[Sample], current: np.ndarray) -> float:
        """Add the gradient of one minibatch's loss, and let it write down what it did; return the loss."""
        entries = np.concatenate([sample.index for sample in samples])
        objective = Objective(self.settings, batch.tokens, entries, current)
        total, done = 0.0, [np.empty(0, np.int64)]
        for micro, ours in self.ranks.deal(self.pack(samples, self.settings.tokens_per_batch)):
            with self._replaying(micro, batch.tokens.flipped if ours else None):
                theta, index = self._logprobs(batch, micro)
                loss = objective(theta, index) if ours else 0.0 * theta.sum()
                self.ranks.backward(loss)
            if ours:
                total += float(loss.detach())
                done.append(index)
        tokens, index = batch.tokens, np.concatenate(done)
        masked = (tokens.reason == "masked").astype(np.int8)
        columns = (tokens.train, tokens.old, tokens.ratio, tokens.weight, tokens.clipped, tokens.flipped)
        self.ranks.collect([*columns, masked], index)
        tokens.reason[masked == 1] = "masked"
        return self.ranks.total(total)[0]

    def _logprobs(self, batch: Batch, micro: Micro) -> tuple[Any, np.ndarray]:
        """Log-probabilities of one micro-batch's targets, and their entries in the token table.

        A path longer than the token budget recomputes its activations layer by layer, so that its memory stays bounded.
        """
        import torch

        index = micro.index
        recompute = self.settings.gradient_checkpointing or micro.ids.size > self.settings.tokens_per_batch
        if recompute and torch.is_grad_enabled():
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        places = (
            micro.ids, micro.rows, micro.positions, batch.tokens.token[index], batch.tokens.temperature[index]
        )  # fmt: skip
        tensors = [torch.as_tensor(a, device=self.ranks.device) for a in places]
        tensors[3] = tensors[3].long()
        with self.ranks.accelerator.autocast():
            logprobs = self.scorer(*tensors, forest=micro.forest)
        self.model.eval()
        self.progress(micro.tokens)
        broken = torch.nonzero(~torch.isfinite(logprobs.detach())).flatten()
        if len(broken):
            entry = index[int(broken[0])]
            tokens = batch.tokens
            raise BatchError(
                f"{batch.rows[tokens.attempt[entry]]['attempt_id']}, turn {tokens.turn[entry]}, position "
                f"{tokens.position[entry]}: the model gives a log-probability that is not a finite number; "
                "its weights are damaged or overflow in this dtype"
            )
        return logprobs, index

    def _move(self) -> float:
        """One optimiser step; returns the gradient's norm before it was clipped."""
        norm = self.ranks.clip(self.trained, self.settings.grad_clip)
        if not np.isfinite(norm):
            raise BatchError("the gradient is not a finite number; no step was taken")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def _split(batch: Batch) -> tuple[list[Sample], list[Sample]]:
    """The samples to train, and those that are only compared: all targets of a sample are of one kind."""
    trained = [sample for sample in batch.samples if batch.tokens.reason[sample.index[0]] == TRAINED]
    others = [sample for sample in batch.samples if batch.tokens.reason[sample.index[0]] != TRAINED]
    return trained, others


def _unscored(batch: Batch, samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if np.isnan(batch.tokens.old[sample.index]).any()]
