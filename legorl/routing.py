"""The routing record of a turn (schema.ROUTING): which experts a sparse mixture-of-experts model chose, and where.

    span = positions(prefix_len, prompt_len, sampled)          # input positions of the path that the turn stores
    record = pack(shape, span, [(start, rows), ...])            # rows as an engine delivers them
    experts, valid = unpack(record)                             # [rows, layers, topk], bool [rows]

A row belongs to an input position: the experts that every sparse layer chose for the token fed there. The
log-probability of the token at position t rests on the rows up to t - 1. A turn stores one row for its parent's last
shared token, each token of its context and each sampled token but the last, so row k is position `span.start + k`, and
along a path from the root every position but the very last has a row: the last sampled token of a turn gets its row
from whoever extends it. A row that no engine delivered is not valid; nothing is made up in its place.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

ITEM_SIZE = {"uint8": 1, "uint16": 2}


class RoutingError(Exception):
    """A routing record contradicts itself, its turn or its model."""


@dataclass(frozen=True)
class Shape:
    """What every row of one model has in common: `topk` experts out of `experts` in each of `layers` sparse layers."""

    layers: int
    topk: int
    experts: int

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds an expert's id."""
        return "uint8" if self.experts <= 1 << 8 else "uint16"


def positions(prefix_len: int, prompt_len: int, sampled: int) -> range:
    """Input positions of its path that a turn stores rows for.

    From its parent's last shared token (position prefix_len - 1; none at a root) to the last sampled token but one.
    """
    return range(max(0, prefix_len - 1), max(prompt_len, prompt_len + sampled - 1))


def pack(shape: Shape, span: range, pieces: Iterable[tuple[int, np.ndarray]]) -> dict[str, Any]:
    """Return the record (schema.ROUTING) over `span` of what was delivered.

    `pieces`: (input position of the first row, expert ids [n, layers, topk]); what lies outside `span` is left out, and
    what of `span` is in no piece is marked as not valid. Raises RoutingError for rows of another shape or expert ids
    that the model does not have.
    """
    data = np.zeros((len(span), shape.layers, shape.topk), shape.dtype)
    valid = np.zeros(len(span), np.uint8)
    pieces = list(pieces)
    for shapes in {rows.shape[1:] for _, rows in pieces} - {data.shape[1:]}:
        raise RoutingError(f"rows of {shapes} experts from a model of {data.shape[1:]}")
    every = np.concatenate([rows for _, rows in pieces]) if pieces else data
    if every.size and not 0 <= int(every.min()) <= int(every.max()) < shape.experts:
        raise RoutingError(f"an expert outside 0 to {shape.experts - 1} from the engine")
    for start, rows in pieces:
        first, last = max(start, span.start), min(start + len(rows), span.stop)
        if first < last:
            data[first - span.start : last - span.start] = rows[first - start : last - start]
            valid[first - span.start : last - span.start] = 1
    return {
        "data": data.tobytes(),
        "dtype": shape.dtype,
        "rows": len(span),
        "layers": shape.layers,
        "topk": shape.topk,
        "valid": valid.tobytes(),
    }


def unpack(record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return (expert ids [rows, layers, topk] as recorded, bool [rows]: whether the row was). Raises RoutingError."""
    size = ITEM_SIZE.get(record["dtype"])
    if not size:
        raise RoutingError(f"routing of dtype {record['dtype']!r}; known: {', '.join(ITEM_SIZE)}")
    shape = (record["rows"] or 0, record["layers"] or 0, record["topk"] or 0)
    wanted = shape[0] * shape[1] * shape[2] * size
    if not wanted or len(record["data"] or b"") != wanted or len(record["valid"] or b"") != shape[0]:
        raise RoutingError("its routing record is not rows x layers x topk experts and a validity byte a row")
    return (
        np.frombuffer(record["data"], record["dtype"]).reshape(shape),
        np.frombuffer(record["valid"], np.uint8).astype(bool),
    )


def wanted_rows(turn: dict[str, Any]) -> int:
    """Rows that a whole record of `turn` (a row of schema.TURN) has."""
    prompt_len = turn["prefix_len"] + len(turn["context_ids"] or [])
    return len(positions(turn["prefix_len"], prompt_len, len(turn["completion_ids"] or [])))


def valid_rows(record: dict[str, Any] | None) -> int:
    """Rows of a record whose experts were recorded; 0 where there is no record."""
    return sum(map(bool, (record or {}).get("valid") or b""))
