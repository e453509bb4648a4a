"""Policy-gradient losses on token arrays, by their published names.

Per sampled token, with r = exp(theta - old), theta the policy being trained, old the policy at the step's start:

    loss_t = -w_t * min(r_t * A, clip(r_t, 1 - low, 1 + high) * A)        w_t = bounded exp(old - sampler), no gradient

Decoupled off-policy correction: w pays for the distance between sampler and trainer, the clip bounds the update. The
names differ in what loss_t is averaged over, and in the default clip:

    grpo   over an attempt's trained tokens (all its branches), then over attempts       (arXiv 2402.03300, eq. 3)
    dapo   over all trained tokens of the update; clip-higher: high 0.28                 (arXiv 2503.14476)

There is no KL term. Averages are over the whole update, whatever the micro-batches, and count tokens whose importance
weight is masked: a mask must not make the other tokens weigh more.
"""

from typing import Any, Literal

import numpy as np

LossName = Literal["grpo", "dapo"]
IsMode = Literal["truncate", "mask"]
CLIP_LOW = 0.2
CLIP_HIGH = {"grpo": 0.2, "dapo": 0.28}


def token_scales(loss: LossName, attempts: np.ndarray) -> np.ndarray:
    """What each token's loss is multiplied by before all are summed: float64, one a token, summing to 1.

    `attempts`: for each trained token of one update, the attempt it belongs to.
    """
    if loss == "dapo":
        return np.full(len(attempts), 1 / max(1, len(attempts)))
    _, member, lengths = np.unique(attempts, return_inverse=True, return_counts=True)
    return 1 / (len(lengths) * lengths[member].astype(np.float64))


def importance_weights(old: Any, sampler: Any, cap: float, mode: IsMode) -> tuple[Any, Any]:
    """Return (weight, masked) for tensors of log-probabilities: exp(old - sampler), at most `cap`.

    `truncate` sets larger weights to `cap`; `mask` sets weights outside [1 / cap, cap] to 0 (IcePop). Both detached.
    """
    import torch

    # exp(20) is far beyond any cap: held there, so that one broken token is no infinity.
    weight = torch.exp((old - sampler).detach().clamp(-20, 20))
    if mode == "truncate":
        return weight.clamp(max=cap), torch.zeros_like(weight, dtype=torch.bool)
    masked = (weight > cap) | (weight < 1 / cap)
    return weight.masked_fill(masked, 0.0), masked


def token_losses(
    theta: Any, old: Any, weight: Any, advantage: Any, clip_low: float, clip_high: float
) -> tuple[Any, Any, Any]:
    """Return (loss, ratio, clipped) of each token; `clipped`: the clip took this token's gradient away."""
    import torch

    ratio = torch.exp(theta - old.detach())
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * torch.minimum(ratio * advantage, held * advantage)
    clipped = (held * advantage) < (ratio * advantage)
    return loss, ratio.detach(), clipped.detach()
