"""Shards as attempts that a model can read, and what is wrong with them before it does.

    found = read(shards); found.attempts; found.turns; found.faults

Rows are taken as they stand in the files, not one an attempt: one too many is a fault. Only a graded copy of a row, in
another file and with the same tokens, is passed by and counted.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from legorl import routing, schema, tree
from legorl.commands.inspect import invariants
from legorl.rows import TOKEN_FIELDS
from legorl.shards import Shard

if TYPE_CHECKING:
    from legorl.commands.inspect.routes import Routes

UNKNOWN = -1  # the version of a token whose record is damaged
Weights = tuple[int, str]  # version, digest


@dataclass(frozen=True)
class Fault:
    """What does not hold, and where; no attempt: over all."""

    attempt_id: str | None
    turn: int | None
    text: str

    @property
    def line(self) -> str:
        where = [self.attempt_id or "", "" if self.turn is None else f"turn {self.turn}"]
        return ": ".join([*filter(None, [", ".join(filter(None, where))]), self.text])


@dataclass
class Turn:
    """One recorded turn. Arrays have one entry a sampled token.

    `recorded`, `reference`: float64 log-probabilities, NaN where there is none; `versions`: int64; `scored`: bool,
    whether the reference was asked. `span`: input positions of its path whose experts belong to the turn; `routing`:
    their record, None if there is none; `routes`: how it compares with the reference, None where it was not compared.
    """

    attempt_id: str
    index: int
    ids: np.ndarray
    recorded: np.ndarray
    versions: np.ndarray
    temperature: float
    comparable: bool
    prompt_len: int
    span: range
    routing: dict[str, Any] | None
    reference: np.ndarray = field(init=False)
    scored: np.ndarray = field(init=False)
    sparse: bool = False
    routes: "Routes | None" = None

    def __post_init__(self) -> None:
        self.reference = np.full(len(self.ids), np.nan)
        self.scored = np.zeros(len(self.ids), bool)

    @property
    def gaps(self) -> np.ndarray:
        """|Δ log p| of every token; NaN where it was not compared."""
        return np.abs(self.reference - self.recorded)


@dataclass
class Attempt:
    """One row whose tokens are in order. `weights`: of each version the digest and the path that was recorded."""

    id: str
    nodes: list[tree.Node]
    turns: list[Turn]
    weights: dict[int, tuple[str, str | None]]

    def wanted(self, weights: Weights) -> list[int]:
        """Indices of the turns with something to compare that these weights sampled: log-probabilities or experts."""
        version, digest = weights
        if self.weights.get(version, ("", None))[0] != digest:
            return []
        return [
            turn.index
            for turn in self.turns
            if (turn.comparable or turn.routing is not None) and (turn.versions == version).any()
        ]


@dataclass
class Recorded:
    """All that the shards hold. `turns` has those of damaged rows as well, `attempts` has not.

    `copies`: rows that are graded copies of others.
    """

    attempts: list[Attempt] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    copies: int = 0


def read(shards: Iterable[Shard]) -> Recorded:
    """Read every row of `shards`. Raises ShardError."""
    recorded = Recorded()
    graded: dict[tuple, Path] = {}
    tokens: dict[tuple, tuple[bytes, Path]] = {}
    for shard in shards:
        here: set[str] = set()
        for row in _rows(shard):
            attempt_id, key = row["attempt_id"], (row["attempt_id"], row["try"])
            digest = hashlib.sha256(repr([[turn[n] for n in TOKEN_FIELDS] for turn in row["turns"]]).encode()).digest()
            first, where = tokens.setdefault(key, (digest, shard.path))
            other = graded.setdefault((*key, row["grader"], row["graded_at"]), shard.path)
            if attempt_id in here:
                recorded.faults.append(Fault(attempt_id, None, f"two rows of it in {shard.path}"))
            elif other != shard.path:
                recorded.faults.append(Fault(attempt_id, None, f"the same row in {other} and in {shard.path}"))
            elif first != digest:
                recorded.faults.append(Fault(attempt_id, None, f"other tokens in {shard.path} than in {where}"))
            elif where != shard.path:
                recorded.copies += 1
            seen = first == digest and (attempt_id in here or where != shard.path)
            here.add(attempt_id)
            if not seen:
                _add(row, recorded)
    return recorded


def _rows(shard: Shard) -> list[dict[str, Any]]:
    """The rows without what is not verified (texts, messages, patches); turns never None."""
    import pyarrow as pa

    table = shard.table([*invariants.COLUMNS, "turns"])
    narrow = pa.list_(pa.struct([schema.TURN.field(name) for name in invariants.TURN_COLUMNS]))
    place = table.schema.get_field_index("turns")
    rows = table.set_column(place, "turns", table["turns"].cast(narrow)).to_pylist()
    return [row | {"turns": row["turns"] or []} for row in rows]


def _add(row: dict[str, Any], recorded: Recorded) -> None:
    broken = invariants.shape_faults(row)
    recorded.faults += [Fault(row["attempt_id"], *fault) for fault in [*invariants.record_faults(row), *broken]]
    weights = {one["version"]: (one["digest"], one["path"]) for one in row["weights"] or []}
    turns = [_turn(row["attempt_id"], number, turn, bool(broken)) for number, turn in enumerate(row["turns"])]
    recorded.turns += turns
    if broken:
        return
    for turn in turns:
        for version in sorted({int(v) for v in turn.versions} - set(weights)):
            fault = f"sampled by version {version}, of which the attempt's weights say nothing"
            recorded.faults.append(Fault(turn.attempt_id, turn.index, fault))
    recorded.attempts.append(Attempt(row["attempt_id"], tree.nodes_of(row["turns"]), turns, weights))


def _turn(attempt_id: str, number: int, turn: dict[str, Any], broken: bool) -> Turn:
    ids = tree.ids(turn["completion_ids"] or [])
    versions = np.full(len(ids), UNKNOWN, np.int64)
    logprobs = np.full(len(ids), np.nan)
    if not broken:
        logprobs[:] = turn["logprobs"]
        versions[:] = np.repeat([v["version"] for v in turn["versions"]], [v["length"] for v in turn["versions"]])
    prompt_len = (turn["prefix_len"] or 0) + len(turn["context_ids"] or [])
    return Turn(
        attempt_id=attempt_id,
        index=number,
        ids=ids,
        recorded=logprobs,
        versions=versions,
        temperature=turn["temperature"] or 0.0,
        comparable=turn["support"] == "full" and (turn["temperature"] or 0) > 0,
        prompt_len=prompt_len,
        span=range(0) if broken else routing.positions(turn["prefix_len"], prompt_len, len(ids)),
        routing=turn["routing"],
    )
