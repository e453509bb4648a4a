"""Losses of a policy update on token arrays, by their published names.

Per sampled token, with theta its log-probability under the policy being trained, A the advantage of its attempt, r the
importance ratio and w the importance weight (no gradient; what they are to is `objective`'s matter):

    grpo, dr_grpo, dapo, gspo    -w * min(r * A, clip(r, 1 - low, 1 + high) * A)
    cispo                        -w * sg(min(r, 1 + high)) * A * theta
    rloo, reinforce              -w * A * theta
    sft                          -theta

sg: no gradient. r = exp(theta - old), but gspo's is that of the attempt: exp(mean of theta - old over its trained
tokens). It is written as GSPO-token, exp(sg(mean) + theta - sg(theta)), which has GSPO's value, and its gradient when
summed over the attempt, so that the tokens of one attempt may lie in several micro-batches.

    name       summed, then divided by                            clip         advantage         paper
    grpo       tokens of the attempt, then attempts               0.2, 0.2     scaled            arXiv 2402.03300, eq. 3
    dr_grpo    attempts x a constant                              0.2, 0.2     centred           arXiv 2503.20783
    dapo       tokens of the update                               0.2, 0.28    scaled            arXiv 2503.14476, eq. 8
    gspo       tokens of the attempt, then attempts               3e-4, 4e-4   scaled            arXiv 2507.18071
    cispo      tokens of the update                               -, 4         scaled            arXiv 2506.13585
    rloo       attempts                                           none         leave-one-out     arXiv 2402.14740
    reinforce  attempts                                           none         the reward        Williams 1992
    sft        tokens of the update                               none         attempts of reward 1

An attempt's tokens are its trained ones over all its branches; an attempt counts if it has one. The update is one
optimiser step, whatever its micro-batches. Masked tokens stay counted: a mask must not make the others weigh more.

Departures: cispo's upper bound is ScaleRL's (arXiv 2510.13786), because its own paper names none. rloo is the plain
gradient of its paper, without the PPO clip that TRL adds.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

LossName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "sft"]
IsMode = Literal["truncate", "mask"]
IsLevel = Literal["token", "sequence"]
OffPolicy = Literal["decoupled", "bypass"]
Kl = Literal["none", "k1-reward", "k2", "k3"]


@dataclass(frozen=True)
class Facts:
    """`average`: what sums are divided by; `advantage`: how rewards become one; clip bounds, None where none is."""

    average: Literal["attempt", "constant", "token", "sum"]
    advantage: Literal["scaled", "centred", "leave_one_out", "reward", "solved"]
    clip_low: float | None = None
    clip_high: float | None = None


LOSSES: dict[LossName, Facts] = {
    "grpo": Facts("attempt", "scaled", 0.2, 0.2),
    "dr_grpo": Facts("constant", "centred", 0.2, 0.2),
    "dapo": Facts("token", "scaled", 0.2, 0.28),
    "gspo": Facts("attempt", "scaled", 3e-4, 4e-4),
    "cispo": Facts("token", "scaled", None, 4.0),
    "rloo": Facts("sum", "leave_one_out"),
    "reinforce": Facts("sum", "reward"),
    "sft": Facts("token", "solved"),
}


def token_scales(loss: LossName, attempts: np.ndarray, constant: float | None = None) -> np.ndarray:
    """What each token's loss is multiplied by before all are summed: float64, one a token.

    `attempts`: for each trained token of one update, the attempt it belongs to. `constant`: dr_grpo's, in tokens.
    """
    _, member, lengths = np.unique(attempts, return_inverse=True, return_counts=True)
    average = LOSSES[loss].average
    if average == "token":
        return np.full(len(attempts), 1 / max(1, len(attempts)))
    divisor: Any = lengths[member].astype(np.float64) if average == "attempt" else 1.0
    if average == "constant":
        if not constant:
            raise ValueError(f"{loss} needs its constant")
        divisor = constant
    return np.ones(len(attempts)) / (divisor * max(1, len(lengths)))


def importance_weights(log_weight: Any, cap: float, mode: IsMode) -> tuple[Any, Any]:
    """Return (weight, masked) for a tensor of log weights, old policy over sampler. Both detached.

    `truncate` sets weights above `cap` to it; `mask` sets weights outside [1 / cap, cap] to 0 (IcePop).
    """
    import torch

    # exp(20) is far beyond any cap: held there, so that one broken token is no infinity.
    weight = torch.exp(log_weight.detach().clamp(-20, 20))
    if mode == "truncate":
        return weight.clamp(max=cap), torch.zeros_like(weight, dtype=torch.bool)
    masked = (weight > cap) | (weight < 1 / cap)
    return weight.masked_fill(masked, 0.0), masked


def token_losses(
    loss: LossName, theta: Any, log_ratio: Any, weight: Any, advantage: Any,
    clip_low: float | None = None, clip_high: float | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return (loss, ratio, clipped) of each token, for every loss but sft; see the module.

    `log_ratio`: differentiable, theta minus the log-probability it is compared with, or gspo's of the attempt.
    `clipped`, bool: the clip took this token's gradient away (cispo: held its ratio); None where the loss has no clip.
    """
    import torch

    ratio = torch.exp(log_ratio)
    if loss == "cispo":
        assert clip_high is not None
        held = ratio.detach().clamp(max=1 + clip_high)
        return -weight * held * advantage * theta, ratio.detach(), (ratio > held).detach()
    if clip_low is None or clip_high is None:
        return -weight * advantage * theta, ratio.detach(), None
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    value = torch.minimum(ratio * advantage, held * advantage)
    clipped = (held * advantage) < (ratio * advantage)
    return -weight * value, ratio.detach(), clipped.detach()


def kl_losses(kind: Kl, theta: Any, ref: Any) -> Any:
    """Schulman's estimators of KL(policy || reference) a token, to be added to the loss: k2 or k3, differentiable.

    k2 = (theta - ref)^2 / 2, whose gradient is that of this KL where the tokens are the policy's own;
    k3 = exp(ref - theta) - (ref - theta) - 1, GRPO's, whose gradient is that of KL(reference || policy).
    """
    gap = ref - theta
    if kind == "k2":
        return gap.square() / 2
    if kind == "k3":
        return gap.exp() - gap - 1
    raise ValueError(f"{kind} is no loss term")
