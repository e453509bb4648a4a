"""From rewards to advantages: one an attempt, whatever number of turns and branches it has.

    advantages, reasons = advantages_of("grpo", groups, rewards)

    scaled         (reward - mean) / (std + 1e-4)      over the valid attempts of the group    grpo, dapo, gspo, cispo
    centred        reward - mean                                                               dr_grpo
    leave_one_out  reward - mean of the others                                                 rloo
    reward         reward, without a baseline                                                  reinforce
    solved         none; only attempts with reward 1 are learned from                          sft

The standard deviation is the sample's (n - 1), as TRL and verl compute it. Where siblings make the baseline, a group
whose rewards are all equal gives none (`no_variance`) and neither does a lone attempt (`alone`). Without a baseline
neither matters; there an attempt has nothing to say where sft finds it unsolved, and where no reward of the whole batch
differs from 0 (`unrewarded`): a step of size 0 would still move weights by AdamW's momentum.
"""

from collections.abc import Sequence

import numpy as np

from legorl.commands.train.loss import LOSSES, LossName

STD_EPS = 1e-4
TRAINED = "trained"


def shaped(rewards: np.ndarray, lengths: np.ndarray, maximum: int, cache: int) -> np.ndarray:
    """Rewards plus DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), float64.

    0 up to maximum - cache sampled tokens, from there falling in a line to -1 at `maximum`, and -1 beyond.
    """
    return rewards + np.clip((maximum - cache - lengths) / cache, -1.0, 0.0)


def advantages_of(loss: LossName, groups: Sequence[str | None], rewards: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Return (advantages float64, NaN where there is none; `trained` or the reason why an attempt has none).

    `groups`: the group of each attempt, None for one that is not valid; `rewards` [attempts], read where valid.
    """
    kind = LOSSES[loss].advantage
    advantages, reasons = np.full(len(groups), np.nan), [TRAINED] * len(groups)
    members: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(number)
    valid = [number for numbers in members.values() for number in numbers]
    if kind in ("reward", "solved"):
        speaks = rewards == 1 if kind == "solved" else np.full(len(groups), bool(np.any(rewards[valid])))
        for number in valid:
            if not speaks[number]:
                reasons[number] = "unrewarded"
            elif kind == "reward":
                advantages[number] = rewards[number]
        return advantages, reasons
    for numbers in members.values():
        own = rewards[numbers]
        if len(own) == 1 or own.max() == own.min():
            for number in numbers:
                reasons[number] = "alone" if len(own) == 1 else "no_variance"
            continue
        if kind == "leave_one_out":
            advantages[numbers] = own - (own.sum() - own) / (len(own) - 1)
        elif kind == "centred":
            advantages[numbers] = own - own.mean()
        else:
            advantages[numbers] = (own - own.mean()) / (own.std(ddof=1) + STD_EPS)
    return advantages, reasons
