"""The loss of one optimiser step, micro-batch by micro-batch, and what it did to every token.

    objective = Objective(settings, batch.tokens, entries)      # entries: all trained tokens of the step
    objective(theta, index).backward()                          # theta: log-probabilities of some of them, any order

The sum over any split of `entries` is the loss of the step: denominators, and what is taken over a whole attempt, are
made from `entries` beforehand. Two ways to be off-policy, never both:

    decoupled   r = exp(theta - old)       w = bounded exp(old - sampler), a token's or its attempt's
    bypass      r = exp(theta - sampler)   w = 1

old is the trainer at the step's start. sft has neither: whoever wrote its tokens need not be a policy at all.
"""

from typing import Any

import numpy as np

from legorl.commands.train.batch import Tokens
from legorl.commands.train.loss import importance_weights, kl_losses, token_losses, token_scales
from legorl.commands.train.settings import Settings


def needs_old(settings: Settings, minibatches: int) -> bool:
    """Whether `old` of all tokens must be known before the first backward pass.

    Otherwise, with one minibatch, it is the training pass itself that gives it.
    """
    if settings.loss == "sft":
        return False
    whole = settings.loss == "gspo" if settings.off_policy == "bypass" else settings.is_level == "sequence"
    return minibatches > 1 or whole


class Objective:
    """The loss over `entries`; a call fills train, ratio, weight, clipped, reason, and old where it is not yet."""

    def __init__(self, settings: Settings, tokens: Tokens, entries: np.ndarray, current: np.ndarray | None = None):
        """`current`: log-probabilities under the weights of this optimiser step, for gspo; default: they are `old`.

        float, one a token of the table, as `old` is. `old` must be filled where `needs_old` says so.
        """
        self.settings, self.tokens = settings, tokens
        attempts = tokens.attempt[entries]
        self.scale = np.zeros(len(tokens))
        self.scale[entries] = token_scales(settings.loss, attempts, settings.dr_constant)
        self.log_ratio = np.zeros(len(tokens))  # gspo's, one value an attempt
        self.log_weight = np.zeros(len(tokens))  # with sequence weights, one value an attempt
        bypass = settings.off_policy == "bypass"
        current = tokens.old if current is None else current
        if settings.loss == "gspo" and (bypass or current is not tokens.old):
            base = tokens.sampler if bypass else tokens.old
            total, length = _of_attempt(attempts, current[entries].astype(np.float64) - base[entries])
            self.log_ratio[entries] = total / length
        if settings.is_level == "sequence":
            gap = tokens.old[entries].astype(np.float64) - tokens.sampler[entries]
            self.log_weight[entries] = _of_attempt(attempts, gap)[0]

    def __call__(self, theta: Any, index: np.ndarray) -> Any:
        """The part of the loss that `theta` [N] carries: a scalar, differentiable. `index` int64 [N]: its entries."""
        import torch

        tokens, settings = self.tokens, self.settings

        def column(values: np.ndarray) -> Any:
            return torch.as_tensor(values[index], dtype=theta.dtype, device=theta.device)

        now = theta.detach()
        if settings.loss == "sft":
            self._fill(index, train=now)
            return -(theta * column(self.scale)).sum()
        old, sampler = column(tokens.old), column(tokens.sampler)
        old = torch.where(old.isnan(), now, old)
        if settings.off_policy == "bypass":
            base, weight, masked = sampler, torch.ones_like(now), torch.zeros_like(now, dtype=torch.bool)
        else:
            assert settings.is_cap is not None and settings.is_mode is not None
            log_weight = column(self.log_weight) if settings.is_level == "sequence" else old - sampler
            base = old
            weight, masked = importance_weights(log_weight, settings.is_cap, settings.is_mode)
        log_ratio = column(self.log_ratio) + theta - now if settings.loss == "gspo" else theta - base
        losses, ratio, clipped = token_losses(
            settings.loss, theta, log_ratio, weight, column(tokens.advantage), settings.clip_low, settings.clip_high
        )
        if settings.kl in ("k2", "k3"):
            term = kl_losses(settings.kl, theta, column(tokens.ref))
            losses = losses + settings.kl_coef * term.masked_fill(masked, 0.0)
        self._fill(index, train=now, old=old, ratio=ratio, weight=weight)
        if clipped is not None:
            self._fill(index, clipped=clipped)
        tokens.reason[index[masked.cpu().numpy()]] = "masked"
        return (losses * column(self.scale)).sum()

    def _fill(self, index: np.ndarray, **columns: Any) -> None:
        for name, values in columns.items():
            getattr(self.tokens, name)[index] = values.float().cpu().numpy()


def _of_attempt(attempts: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each token, the sum of `values` over its attempt and the number of them; float64, int64."""
    _, member, lengths = np.unique(attempts, return_inverse=True, return_counts=True)
    return np.bincount(member, weights=values)[member], lengths[member]
