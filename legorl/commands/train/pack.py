"""Paths of a conversation tree as training samples, and micro-batches of them (linear packing: one path a row).

A sample is one root-to-leaf path and the targets on it. Every wanted token is a target on exactly one path, whatever
number of paths run through its turn: a turn's targets go with the path of its first child that extends it whole, and so
on down to a leaf. A path ends before its last target, because the last target is predicted, not read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from legorl import tree
from legorl.tree import Node


@dataclass(frozen=True)
class Sample:
    """`ids` int32: the tokens to read. `positions` int32: where each target is predicted, one before it stands.

    `index` int64: the target's entry in the batch's token table. `attempt`: its row.
    """

    attempt: int
    ids: np.ndarray
    positions: np.ndarray
    index: np.ndarray


def homes(nodes: Sequence[Node]) -> list[int]:
    """For each turn, the leaf on whose path its tokens are targets."""
    home = list(range(len(nodes)))
    for node in reversed(nodes):
        if node.parent != tree.ROOT and node.prefix_len == nodes[node.parent].path_len:
            home[node.parent] = home[node.index]  # children come after their parents: the first one has the last word
    return home


def samples_of(nodes: Sequence[Node], attempt: int, first: int, wanted: np.ndarray) -> list[Sample]:
    """Samples of one attempt. `wanted`: bool a sampled token, turn by turn; `first`: the table's entry of its first."""
    starts = np.cumsum([0, *(len(node.completion_ids) for node in nodes)])
    targets: dict[int, list[tuple[int, int]]] = {}
    for node, leaf in zip(nodes, homes(nodes), strict=True):
        for k in np.flatnonzero(wanted[starts[node.index] : starts[node.index + 1]]):
            targets.setdefault(leaf, []).append((node.prompt_len + int(k), first + int(starts[node.index] + k)))
    samples = []
    for leaf in sorted(targets):
        places, index = np.array(sorted(targets[leaf]), np.int64).T
        ids = tree.path_ids(nodes, leaf, int(places[-1]))
        samples.append(Sample(attempt, ids, (places - 1).astype(np.int32), index))
    return samples


def micro_batches(samples: Iterable[Sample], budget: int) -> list[list[Sample]]:
    """Group samples of like length so that rows times the longest row stay within `budget` tokens.

    A sample longer than the budget gets a micro-batch of its own.
    """
    batches: list[list[Sample]] = []
    longest = 0
    for sample in sorted(samples, key=lambda s: (-len(s.ids), s.attempt, int(s.index[0]))):
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = len(sample.ids)
        batches[-1].append(sample)
    return batches


def padded(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (input ids [rows, length] padded on the right with 0; and of each target its row, position and index)."""
    ids = np.zeros((len(samples), max(len(sample.ids) for sample in samples)), np.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample.ids)] = sample.ids
    rows = np.repeat(np.arange(len(samples)), [len(sample.index) for sample in samples])
    positions = np.concatenate([sample.positions for sample in samples]).astype(np.int64)
    return ids, rows, positions, np.concatenate([sample.index for sample in samples])
