"""The losses written out in float64, an attempt at a time: what legorl.commands.train.objective is compared with."""

from typing import Any

import numpy as np


def plain_loss(s: Any, attempt_of: np.ndarray, theta: Any, values: dict[str, Any]) -> Any:
    """Loss of one optimiser step, differentiable in `theta` float64 [N].

    `attempt_of`: whose token each is; `values`: float64 tensors old, sampler, advantage, ref, [N]; `s`: the settings.
    """
    import torch

    total = 0.0
    attempts = np.unique(attempt_of)
    for one in attempts:
        mine = np.flatnonzero(attempt_of == one)
        t, (old, sampler, a, ref) = theta[mine], (values[n][mine] for n in ("old", "sampler", "advantage", "ref"))
        n = len(mine)
        if s.loss == "sft":
            total = total + (-t).sum() / len(theta)
            continue
        base, w, keep = old, torch.ones_like(old), torch.ones_like(old)
        if s.off_policy == "bypass":
            base = sampler
        else:
            w = torch.exp(old - sampler)
            if s.is_level == "sequence":
                w = torch.exp((old - sampler).sum()).expand(n)
            keep = ((w <= s.is_cap) & (w >= 1 / s.is_cap)).double() if s.is_mode == "mask" else keep
            w = torch.where(w > s.is_cap, torch.tensor(s.is_cap, dtype=torch.float64), w) * keep
        r = torch.exp(t - base)
        if s.loss == "gspo":
            r = torch.exp((t - base).mean().detach() + t - t.detach())
        if s.loss == "cispo":
            terms = -w * r.clamp(max=1 + s.clip_high).detach() * a * t
        elif s.loss in ("rloo", "reinforce"):
            terms = -w * a * t
        else:
            clipped = r.clamp(1 - s.clip_low, 1 + s.clip_high)
            terms = -w * torch.minimum(r * a, clipped * a)
        if s.kl == "k2":
            terms = terms + s.kl_coef * 0.5 * (t - ref) ** 2 * keep
        if s.kl == "k3":
            terms = terms + s.kl_coef * (torch.exp(ref - t) - (ref - t) - 1) * keep
        share = {
            "grpo": 1 / (n * len(attempts)), "gspo": 1 / (n * len(attempts)),
            "dr_grpo": 1 / (len(attempts) * (s.dr_constant or np.nan)),
            "dapo": 1 / len(theta), "cispo": 1 / len(theta),
            "rloo": 1 / len(attempts), "reinforce": 1 / len(attempts),
        }[s.loss]  # fmt: skip
        total = total + terms.sum() * share
    return total
