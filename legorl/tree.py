"""The conversation tree of one attempt: turns, parents, paths, invariants.

Each turn is one LLM call. A turn stores only what is new: `context_ids` (prompt tokens after the prefix it shares with
its parent's path) and `completion_ids` (what was sampled). Its prompt is the first `prefix_len` tokens of its parent's
path followed by `context_ids`; its path is that prompt followed by `completion_ids`. lego-serve builds the tree,
lego-train walks it, lego-inspect verifies it; all three work on anything with the attributes of `Node`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROOT = -1


class TreeError(Exception):
    """The recorded turns do not form a valid tree."""


@dataclass
class Node:
    """One turn as the tree sees it. Ids are int32 arrays."""

    index: int
    parent: int
    prefix_len: int
    context_ids: np.ndarray
    completion_ids: np.ndarray

    @property
    def prompt_len(self) -> int:
        return self.prefix_len + len(self.context_ids)

    @property
    def path_len(self) -> int:
        return self.prompt_len + len(self.completion_ids)


def ids(values: Iterable[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def nodes_of(turns: Iterable[dict[str, Any]]) -> list[Node]:
    """Make nodes from the `turns` column of one row (dictionaries)."""
    return [
        Node(t["index"], t["parent"], t["prefix_len"], ids(t["context_ids"]), ids(t["completion_ids"])) for t in turns
    ]


def path_ids(nodes: Sequence[Node], index: int, length: int | None = None) -> np.ndarray:
    """Return the first `length` token ids of turn `index`'s path (default: all of it), int32."""
    pieces: list[np.ndarray] = []
    want = nodes[index].path_len if length is None else length
    while index != ROOT and want > 0:
        node = nodes[index]
        if want > node.prompt_len:
            pieces.append(node.completion_ids[: want - node.prompt_len])
        if want > node.prefix_len:
            pieces.append(node.context_ids[: want - node.prefix_len])
            want = node.prefix_len
        index = node.parent
    return np.concatenate(pieces[::-1]) if pieces else ids([])


def prompt_ids(nodes: Sequence[Node], index: int) -> np.ndarray:
    """Return the prompt of turn `index`: what was fed to the engine, int32."""
    return path_ids(nodes, index, nodes[index].prompt_len)


def place(nodes: Sequence[Node], prompt: np.ndarray, base: int | None = None) -> tuple[int, int]:
    """Return (parent, prefix_len) for a new prompt: the earlier turn whose path shares the longest prefix with it.

    Ties go to the earliest turn. (-1, 0) is a root. Walks down from the roots, so only turns on a matching path are
    looked at: time is linear in the prompt plus the number of turns. `base`: a turn whose whole path begins the prompt;
    what leads to it is not compared again.
    """
    known = _leading_to(nodes, base)
    children: dict[int, list[Node]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    best = (ROOT, 0)
    frontier = [(node, 0) for node in children.get(ROOT, [])]
    while frontier:
        node, start = frontier.pop()
        matched = known.get(node.index, -1)
        if matched < 0:
            own = np.concatenate([node.context_ids, node.completion_ids])
            ahead = prompt[start : start + len(own)]
            differ = np.nonzero(own[: len(ahead)] != ahead)[0]
            matched = start + (int(differ[0]) if len(differ) else len(ahead))
        if matched > best[1] or (matched == best[1] and matched > start and node.index < best[0]):
            best = (node.index, matched)
        frontier += [(c, c.prefix_len) for c in children.get(node.index, []) if c.prefix_len <= matched]
    return best


def _leading_to(nodes: Sequence[Node], base: int | None) -> dict[int, int]:
    """For turns on the way to `base`: how much of their path begins the path of `base`.

    Where a turn leaves its parent's path, its first token of context differs from the parent's next: that is what the
    longest shared prefix means. A turn without context may go on like its parent, which is then left out here.
    """
    if base is None:
        return {}
    shared = {base: nodes[base].path_len}
    while (parent := nodes[base].parent) != ROOT:
        if len(nodes[base].context_ids):
            shared[parent] = nodes[base].prefix_len
        base = parent
    return shared


def cause_of(nodes: Sequence[Node], parent: int, prefix_len: int) -> str:
    """Return the structural cause of a turn placed at (parent, prefix_len): root, extend or rewrite.

    `edited`, `resample`, `retry` and `side` need the request as well: lego-serve decides those.
    """
    if parent == ROOT:
        return "root"
    return "extend" if prefix_len == nodes[parent].path_len else "rewrite"


def homes(nodes: Sequence[Node]) -> list[int]:
    """For each turn, one leaf whose path holds all of it: each turn's tokens have one home, however many paths.

    That of its first child which extends it whole, and so on down to a leaf.
    """
    home = list(range(len(nodes)))
    for node in reversed(nodes):
        if node.parent != ROOT and node.prefix_len == nodes[node.parent].path_len:
            home[node.parent] = home[node.index]  # children come after their parents: the first one has the last word
    return home


def check(turns: Sequence[dict[str, Any]]) -> None:
    """Raise TreeError unless the turns of one row form a valid tree and their token columns agree in length."""
    nodes = nodes_of(turns)
    for position, (turn, node) in enumerate(zip(turns, nodes, strict=True)):
        where = f"turn {position}"
        if node.index != position:
            raise TreeError(f"{where}: index is {node.index}")
        if not ROOT <= node.parent < position:
            raise TreeError(f"{where}: parent {node.parent} is not an earlier turn")
        limit = 0 if node.parent == ROOT else nodes[node.parent].path_len
        if not 0 <= node.prefix_len <= limit:
            raise TreeError(f"{where}: prefix_len {node.prefix_len} is outside its parent's {limit} tokens")
        count = len(node.completion_ids)
        if len(turn["logprobs"]) != count:
            raise TreeError(f"{where}: {len(turn['logprobs'])} log-probabilities for {count} sampled tokens")
        if sum(v["length"] for v in turn["versions"]) != count or any(v["length"] < 0 for v in turn["versions"]):
            raise TreeError(f"{where}: version spans do not cover its {count} sampled tokens")
        if any(d["start"] < 0 or d["length"] < 0 or d["start"] + d["length"] > count for d in turn["drops"] or []):
            raise TreeError(f"{where}: a drop lies outside its {count} sampled tokens")
        if not np.all(np.isfinite(turn["logprobs"])) or any(p > 1e-4 for p in turn["logprobs"]):
            raise TreeError(f"{where}: a log-probability is not a finite number at most 0")
    expected = [place(nodes[:k], prompt_ids(nodes, k))[1] for k in range(len(nodes))]
    for node, want in zip(nodes, expected, strict=True):
        if node.prefix_len < want:
            raise TreeError(
                f"turn {node.index}: shares {want} tokens with an earlier turn but stores {node.prefix_len}"
            )


def drop_reasons(turn: dict[str, Any]) -> list[str | None]:
    """Return, per sampled token of the turn, the reason it must not be trained, or None."""
    reasons: list[str | None] = [None] * len(turn["completion_ids"])
    for span in turn["drops"] or []:
        for k in range(span["start"], span["start"] + span["length"]):
            reasons[k] = reasons[k] or span["reason"]
    return reasons
