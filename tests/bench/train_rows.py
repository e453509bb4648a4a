"""Token rows for the training benchmark, and graded attempts made of them.

rows = ragged(8, 512, padding=0.4)
batch = batch_of(rows, vocabulary=49152)
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from builders import trajectory, turn

from legorl import tree
from legorl.commands.train.batch import Batch, make_batch
from legorl.commands.train.fit import ModelFacts

WORDS = 1000  # token ids are drawn below this
DIGEST = "2" * 32


@dataclass(frozen=True)
class Row:
    """A prompt and what was sampled after it."""

    prompt: list[int]
    completion: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def _ids(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(3, WORDS, count).tolist()


def ragged(count: int, longest: int, padding: float) -> list[Row]:
    """Rows up to `longest` tokens of which nothing is shared; `padding`: of a rectangle of them, this much is empty.

    A third of each row is its prompt. Lengths fall in equal steps from the longest row on.
    """
    rng = np.random.default_rng(0)
    shortest = longest * (1 - 2 * padding)
    lengths = np.linspace(longest, shortest, count).round().astype(int)
    return [Row(_ids(rng, length // 3), _ids(rng, length - length // 3)) for length in lengths.tolist()]


def sharing(count: int, length: int, shared: float, seed: int = 0) -> list[Row]:
    """Rows of `length` tokens whose prompt, `shared` of them, is the same."""
    rng = np.random.default_rng(seed)
    prompt = _ids(rng, round(length * shared))
    return [Row(prompt, _ids(rng, length - len(prompt))) for _ in range(count)]


def compacted(turns: int, every: int, system: int, observed: int, sampled: int) -> list[Row]:
    """The turns of one attempt: each goes on from the last one; every so many, the history becomes a summary."""
    rng = np.random.default_rng(0)
    head = _ids(rng, system)
    path, rows = head, []
    for number in range(turns):
        if number and number % every == 0:
            path = head
        prompt = path + _ids(rng, observed)
        rows.append(Row(prompt, _ids(rng, sampled)))
        path = prompt + rows[-1].completion
    return rows


def batch_of(rows: Sequence[Row], vocabulary: int, one: bool = False) -> Batch:
    """A batch in which all that was sampled is trained: each row an attempt, or (`one`) all of them turns of one."""
    made = [list(rows), [Row([1, 2], [3])]] if one else [[row] for row in rows]
    graded = [
        trajectory(attempt=number, turns=_tree(own), reward=float(number % 2), seed=number)
        for number, own in enumerate(made)
    ]
    longest = max(map(len, rows))
    return make_batch(graded, ModelFacts(0, DIGEST, vocabulary, longest, None), max_lag=4)


def _tree(rows: Sequence[Row]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        parent, shared = tree.place(tree.nodes_of(turns), tree.ids(row.prompt))
        logprobs = [-7.0] * len(row.completion)
        turns.append(turn(index, parent, shared, row.prompt[shared:], row.completion, logprobs))
    return turns
