"""Flipped routes: where a sparse model's recorded experts are others than the trainer's routers choose by themselves.

    with watching(routers, micro, flipped) as counts: model(...)        # fills `flipped` of the micro-batch's targets

A target is flipped if any position on its path up to the one that predicts it has, in any layer, recorded experts that
differ from the router's own choice, as sets. Within `replaying` the choice compared is that which the record replaces,
so each row stands for itself; without it the choices in deeper layers and later positions follow from the earlier ones.
Positions without a valid record say nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from legorl.commands.train.pack import Micro

UNKNOWN = -1


@dataclass
class Counts:
    """Input positions with recorded experts, and how many of them the model routes otherwise in any layer."""

    compared: int = 0
    flipped: int = 0


@contextmanager
def watching(routers: Any, micro: Micro, experts: Any, valid: Any, flipped: np.ndarray) -> Iterator[Counts]:
    """Within, the model reads `micro`; afterwards its targets that were UNKNOWN in `flipped` are 1 or 0.

    `flipped` int8, an entry a sampled token of the batch; a target stays UNKNOWN if no position on its path is
    recorded. `experts` int64 [tokens, layers, topk] and `valid` bool [tokens] are the record as tensors. The counts
    are set at the end. Enter it before `replaying`: the hooks of a router run in the order of their registration.
    """
    counts = Counts()
    differ = (~valid).clone().zero_()

    def see(layer: int, _logits: Any, chosen: Any) -> None:
        differ.logical_or_((experts[:, layer].sort(dim=1).values != chosen.sort(dim=1).values).any(dim=1))

    with routers.watched(see):
        yield counts
    known = valid.cpu().numpy()
    found = differ.cpu().numpy() & known
    counts.compared, counts.flipped = int(known.sum()), int(found.sum())
    places = micro.positions if micro.forest else micro.rows * micro.ids.shape[1] + micro.positions
    values = np.where(on_path(known, micro), on_path(found, micro), UNKNOWN).astype(np.int8)[places]
    unknown = flipped[micro.index] == UNKNOWN
    flipped[micro.index[unknown]] = values[unknown]


def on_path(flags: np.ndarray, micro: Micro) -> np.ndarray:
    """Of each place of the flattened `ids`: whether a flag (bool, a place) is set there or before it on its path."""
    if micro.forest is None:
        return np.logical_or.accumulate(flags.reshape(micro.ids.shape), axis=1).ravel()
    found = np.zeros_like(flags)
    for segment in micro.forest.segments:  # ancestors stand further left in the row
        before = bool(segment.ancestors) and found[segment.ancestors[-1][1] - 1]
        found[segment.start : segment.stop] = before | np.logical_or.accumulate(flags[segment.start : segment.stop])
    return found
