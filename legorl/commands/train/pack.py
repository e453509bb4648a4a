"""Paths of a conversation tree as training samples, and micro-batches of them: forests, or rows.

    samples = samples_of(nodes, attempt, first, wanted)
    for micro in forests(samples, budget): ...      # tree packing: every shared prefix is read once
    for micro in rows(samples, budget): ...         # linear packing, one path a row: the reference

A sample is one root-to-leaf path and the targets on it. Every wanted token is a target on exactly one path, whatever
number of paths run through its turn: a turn's targets go with the path of its first child that extends it whole, and so
on down to a leaf. A path ends before its last target, because the last target is predicted, not read.

Tree packing sorts the paths by their tokens, so that what shares most lies side by side: a harness's system prompt over
the whole batch, a group's task, an attempt's common turns. A path then adds to its forest what differs from the path
before it. A forest holds at most `budget` distinct tokens; a larger tree is cut between two paths, and each part reads
the way to it again. A single path beyond the budget is a forest of its own.

With recorded experts two tokens are one only if their experts are too: each path is computed as it was sampled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from legorl import routing, tree
from legorl.attention import Forest, Segment
from legorl.tree import Node

PADDING = 0.2


@dataclass(frozen=True)
class Sample:
    """`ids` int32: the tokens to read. `positions` int32: where each target is predicted, one before it stands.

    `index` int64: the target's entry in the batch's token table. `attempt`: its row. `experts` [tokens, layers, topk]
    and `valid` bool [tokens]: the recorded experts of every token read; None where nothing is recorded.
    """

    attempt: int
    ids: np.ndarray
    positions: np.ndarray
    index: np.ndarray
    experts: np.ndarray | None = None
    valid: np.ndarray | None = None


@dataclass(frozen=True)
class Micro:
    """What one forward pass reads, and the targets in it.

    `ids` int64 [rows, length], padded on the right with 0; one row if there is a `forest`. `rows`, `positions` int64
    [N]: where each target is predicted; `index` int64 [N]: its entry in the batch's token table. `tokens`: how many are
    read, padding left out. `experts`, `valid`: as in Sample, over the flattened `ids`.
    """

    ids: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    index: np.ndarray
    tokens: int
    forest: Forest | None = None
    experts: np.ndarray | None = None
    valid: np.ndarray | None = None


def samples_of(
    nodes: Sequence[Node], attempt: int, first: int, wanted: np.ndarray,
    records: Sequence[dict[str, Any] | None] | None = None,
) -> list[Sample]:  # fmt: skip
    """Samples of one attempt. `wanted`: bool a sampled token, turn by turn; `first`: the table's entry of its first.

    `records`: the routing record of each turn (schema.ROUTING). Raises RoutingError if one does not fit its turn.
    """
    starts = np.cumsum([0, *(len(node.completion_ids) for node in nodes)])
    targets: dict[int, list[tuple[int, int]]] = {}
    for node, leaf in zip(nodes, tree.homes(nodes), strict=True):
        for k in np.flatnonzero(wanted[starts[node.index] : starts[node.index + 1]]):
            targets.setdefault(leaf, []).append((node.prompt_len + int(k), first + int(starts[node.index] + k)))
    samples = []
    for leaf in sorted(targets):
        places, index = np.array(sorted(targets[leaf]), np.int64).T
        ids = tree.path_ids(nodes, leaf, int(places[-1]))
        experts, valid = path_experts(nodes, records or [None] * len(nodes), leaf, len(ids))
        samples.append(Sample(attempt, ids, (places - 1).astype(np.int32), index, experts, valid))
    return samples


def path_experts(
    nodes: Sequence[Node], records: Sequence[dict[str, Any] | None], leaf: int, length: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Recorded experts of the first `length` tokens of `leaf`'s path, [length, layers, topk], and which are valid.

    The token that a turn shares last with its parent may be recorded by both; the turn's own record is taken. (None,
    None) if no turn on the path has a record.
    """
    experts: np.ndarray | None = None
    valid = np.zeros(length, bool)
    end = length
    while leaf != tree.ROOT:
        node, record = nodes[leaf], records[leaf]
        if record is not None:
            rows, known = routing.unpack(record)
            span = routing.positions(node.prefix_len, node.prompt_len, len(node.completion_ids))
            if len(rows) != len(span):
                raise routing.RoutingError(f"turn {leaf}: {len(rows)} routing rows for {len(span)} input positions")
            if experts is None:
                experts = np.zeros((length, *rows.shape[1:]), rows.dtype)
            if rows.shape[1:] != experts.shape[1:] or rows.dtype != experts.dtype:
                raise routing.RoutingError(f"turn {leaf}: its routing is of another shape than that of its children")
            stop = min(end, span.stop)
            if span.start < stop:
                here = slice(span.start, stop)
                new = known[: stop - span.start] & ~valid[here]
                experts[here][new] = rows[: stop - span.start][new]
                valid[here] |= new
        end = min(end, node.prefix_len)
        leaf = node.parent
    return (None, None) if experts is None else (experts, valid)


def rows(samples: Iterable[Sample], budget: int) -> list[Micro]:
    """Samples of like length, a row each, so that rows times the longest row stay within `budget` tokens.

    No row is padded by more than PADDING of the longest. A sample longer than the budget gets a micro-batch of its own.
    """
    batches: list[list[Sample]] = []
    longest = 0
    for sample in sorted(samples, key=lambda s: (-len(s.ids), s.attempt, int(s.index[0]))):
        unlike = len(sample.ids) < (1 - PADDING) * longest
        if not batches or unlike or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = len(sample.ids)
        batches[-1].append(sample)
    return [_padded(batch) for batch in batches]


def _padded(samples: Sequence[Sample]) -> Micro:
    length = max(len(sample.ids) for sample in samples)
    ids = np.zeros((len(samples), length), np.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample.ids)] = sample.ids
    experts, valid = _experts(samples, [(k * length, 0, len(sample.ids)) for k, sample in enumerate(samples)], ids.size)
    return Micro(
        ids,
        np.repeat(np.arange(len(samples)), [len(sample.index) for sample in samples]),
        np.concatenate([sample.positions for sample in samples]).astype(np.int64),
        np.concatenate([sample.index for sample in samples]),
        sum(len(sample.ids) for sample in samples),
        None,
        experts,
        valid,
    )


def forests(samples: Iterable[Sample], budget: int) -> list[Micro]:
    """Samples in forests of at most `budget` distinct tokens, or of one path that is longer."""
    ordered = sorted(samples, key=lambda s: (_letters(s).tobytes(), s.attempt, int(s.index[0])))
    batches: list[tuple[list[Sample], list[int]]] = []
    size = 0
    for k, sample in enumerate(ordered):
        shared = _shared(ordered[k - 1], sample) if k else 0
        if not batches or size + len(sample.ids) - shared > budget:
            batches.append(([], []))
            size = shared = 0
        batches[-1][0].append(sample)
        batches[-1][1].append(shared)
        size += len(sample.ids) - shared
    return [_forest(*batch) for batch in batches]


def _letters(sample: Sample) -> np.ndarray:
    """What tells the tokens of a path apart, uint8 [tokens, bytes]; its bytes sort as the tokens do."""
    ids = np.ascontiguousarray(sample.ids, dtype=">i4").view(np.uint8).reshape(len(sample.ids), 4)
    if sample.experts is None or sample.valid is None:
        return ids
    experts = np.ascontiguousarray(sample.experts).view(np.uint8).reshape(len(ids), -1)
    return np.hstack([ids, sample.valid[:, None].astype(np.uint8), experts])


def _shared(one: Sample, other: Sample) -> int:
    """Length of the prefix that two paths share."""
    a, b = _letters(one), _letters(other)
    if a.shape[1] != b.shape[1]:
        return 0
    count = min(len(a), len(b))
    differ = np.flatnonzero((a[:count] != b[:count]).any(axis=1))
    return int(differ[0]) if len(differ) else count


def _forest(samples: Sequence[Sample], shared: Sequence[int]) -> Micro:
    """One row of what is new in each path, in order. `shared`: how much of its path is that of the sample before."""
    segments: list[Segment] = []
    spans: list[tuple[int, int]] = []  # of the row: the path of the sample at hand
    pieces, depths, positions, sources = [], [], [], []
    size = 0
    for sample, prefix in zip(samples, shared, strict=True):
        spans = _first(spans, prefix)
        new = len(sample.ids) - prefix
        if new:
            segments.append(Segment(size, size + new, tuple(spans)))
            pieces.append(sample.ids[prefix:])
            depths.append(np.arange(prefix, len(sample.ids)))
            sources.append((size, prefix, len(sample.ids)))
            spans = [*spans, (size, size + new)]
            size += new
        else:
            sources.append((size, prefix, prefix))
        place_of = np.concatenate([np.arange(start, stop) for start, stop in spans])
        positions.append(place_of[sample.positions])
    experts, valid = _experts(samples, sources, size)
    places = np.concatenate(positions)
    return Micro(
        np.concatenate(pieces).astype(np.int64)[None],
        np.zeros_like(places),
        places,
        np.concatenate([sample.index for sample in samples]),
        size,
        Forest(np.concatenate(depths), tuple(segments)),
        experts,
        valid,
    )


def _first(spans: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The first `length` tokens of a path that lies in `spans`."""
    kept = []
    for start, stop in spans:
        if length <= 0:
            break
        kept.append((start, min(stop, start + length)))
        length -= stop - start
    return kept


def _experts(
    samples: Sequence[Sample], sources: Sequence[tuple[int, int, int]], size: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The recorded experts of a micro-batch of `size` places. `sources`: (first place, from, to of the path), each."""
    known = [sample for sample in samples if sample.experts is not None]
    if not known or known[0].experts is None:
        return None, None
    experts = np.zeros((size, *known[0].experts.shape[1:]), known[0].experts.dtype)
    valid = np.zeros(size, bool)
    for sample, (place, start, stop) in zip(samples, sources, strict=True):
        if sample.experts is not None and sample.valid is not None:
            experts[place : place + stop - start] = sample.experts[start:stop]
            valid[place : place + stop - start] = sample.valid[start:stop]
    return experts, valid
