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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from legorl.commands.train.batch import TRAINED, Batch
from legorl.commands.train.loss import importance_weights, token_losses, token_scales
from legorl.commands.train.pack import Sample, micro_batches, padded
from legorl.commands.train.rows import BatchError
from legorl.commands.train.settings import Settings
from legorl.model import target_logprobs


class Trainer:
    """A model, its AdamW optimiser and the device they live on (accelerate's choice).

    `progress` is called with the number of tokens that a pass over a micro-batch has read.
    """

    def __init__(self, settings: Settings, model: Any):
        import torch
        from accelerate import Accelerator

        self.settings = settings
        self.progress: Callable[[int], object] = lambda tokens: None
        self.accelerator = Accelerator(mixed_precision="bf16" if settings.dtype == "bf16" else "no")
        self.model = model.to(self.accelerator.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)

    def run(self, batch: Batch, gate: Callable[[], object]) -> dict[str, float]:
        """Take one step on `batch`; return its figures. Without a trained token only the gate runs.

        `gate` raises to keep the weights as they are. Raises BatchError if a log-probability or a gradient is not a
        finite number; the weights have not moved then, unless an earlier minibatch moved them.
        """
        trained, others = _split(batch)
        self.score(batch, self.some(others))
        parts = self._minibatches(trained)
        if len(parts) > 1:
            self.score(batch, trained)
        if not parts:
            gate()
        losses, norms = [], []
        for number, part in enumerate(parts):
            losses.append(self._backward(batch, part))
            if number == 0:
                gate()
            norms.append(self._move())
        if not parts:
            return {}
        return {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms)), "minibatches": float(len(parts))}

    def planned(self, batch: Batch) -> int:
        """How many tokens `run` will read."""
        trained, others = _split(batch)
        passes = 2 if len(self._minibatches(trained)) > 1 else 1
        return passes * _length(trained) + _length(self.some(others))

    def score(self, batch: Batch, samples: Sequence[Sample]) -> None:
        """Fill `old` for the targets of `samples`, without gradients."""
        import torch

        with torch.no_grad():
            for micro in micro_batches(samples, self.settings.tokens_per_batch):
                logprobs, index = self._logprobs(batch, micro)
                batch.tokens.old[index] = logprobs.float().cpu().numpy()

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

    def _backward(self, batch: Batch, samples: list[Sample]) -> float:
        """Add the gradient of one minibatch's loss; fill train, ratio, weight, clipped, and old where it is not yet."""
        import torch

        tokens, settings = batch.tokens, self.settings
        entries = np.concatenate([sample.index for sample in samples])
        scales = np.zeros(len(tokens))
        scales[entries] = token_scales(settings.loss, tokens.attempt[entries])
        total = 0.0
        for micro in micro_batches(samples, settings.tokens_per_batch):
            theta, index = self._logprobs(batch, micro)
            old, sampler, advantage, scale = (
                torch.as_tensor(column[index], dtype=theta.dtype, device=theta.device)
                for column in (tokens.old, tokens.sampler, tokens.advantage, scales)
            )
            old = torch.where(old.isnan(), theta.detach(), old)
            weight, masked = importance_weights(old, sampler, settings.is_cap, settings.is_mode)
            losses, ratio, clipped = token_losses(theta, old, weight, advantage, settings.clip_low, settings.clip_high)
            loss = (losses * scale).sum()
            self.accelerator.backward(loss)
            total += float(loss.detach())
            for column, values in (
                (tokens.old, old), (tokens.train, theta), (tokens.ratio, ratio),
                (tokens.weight, weight), (tokens.clipped, clipped),
            ):  # fmt: skip
                column[index] = values.detach().float().cpu().numpy()
            tokens.reason[index[masked.cpu().numpy()]] = "masked"
        return total

    def _logprobs(self, batch: Batch, micro: list[Sample]) -> tuple[Any, np.ndarray]:
        """Log-probabilities of one micro-batch's targets, and their entries in the token table.

        A path longer than the token budget recomputes its activations layer by layer, so that its memory stays bounded.
        """
        import torch

        ids, rows, positions, index = padded(micro)
        recompute = self.settings.gradient_checkpointing or ids.size > self.settings.tokens_per_batch
        if recompute and torch.is_grad_enabled():
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        places = (ids, rows, positions, batch.tokens.token[index], batch.tokens.temperature[index])
        tensors = [torch.as_tensor(a, device=self.accelerator.device) for a in places]
        tensors[3] = tensors[3].long()
        with self.accelerator.autocast():
            logprobs = target_logprobs(self.model, *tensors)
        self.model.eval()
        self.progress(_length(micro))
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
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip))
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


def _length(samples: Iterable[Sample]) -> int:
    return sum(len(sample.ids) for sample in samples)
