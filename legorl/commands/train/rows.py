"""Shards in, one row an attempt out: its last try, graded over ungraded, the newest grading first.

    tally = Tally(); rows = read_rows(open_shards(paths), tally); tally.complaint()

Two rows of one try of an attempt may differ in their grades, not in what was sampled: that is a CheckError.
"""

import datetime
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from legorl import schema
from legorl.options import CHECK
from legorl.shards import Shard, Tally

COLUMNS = (
    "attempt_id", "try", "group_id", "run", "step", "harness", "weights", "tokenizer_digest", "blame", "reward",
    "graded_at",
)  # fmt: skip
TURN_COLUMNS = (
    "index", "parent", "prefix_len", "cause", "context_ids", "completion_ids", "logprobs", "temperature", "support",
    "versions", "foreign", "drops",
)  # fmt: skip
# What two rows of one attempt must agree in.
TOKEN_COLUMNS = (
    "index", "parent", "prefix_len", "context_ids", "completion_ids", "logprobs", "temperature", "support", "versions",
)  # fmt: skip


class BatchError(Exception):
    """The rows cannot be made into a batch for this model; weights stay as they are."""


class CheckError(BatchError):
    """The rows contradict each other or the model: a check that did not hold."""

    code = CHECK


def read_rows(shards: Iterable[Shard], tally: Tally) -> list[dict[str, Any]]:
    """Read each shard as it arrives; return one row an attempt, by attempt_id, and tell `tally` what was seen.

    Only the columns that training needs are read. Raises ShardError, and CheckError for two rows of one try whose
    sampled tokens differ.
    """
    chosen: dict[str, dict[str, Any]] = {}
    first: dict[tuple[str, int], tuple[dict[str, Any], Shard]] = {}
    for shard in shards:
        rows = _rows(shard)
        for row in rows:
            row["turns"] = row["turns"] or []
            name = row["attempt_id"]
            other, source = first.setdefault((name, row["try"] or 0), (row, shard))
            if other is not row and _tokens(other) != _tokens(row):
                raise CheckError(
                    f"{name}: sampled tokens in {shard.path} differ from those in {source.path}; "
                    "two different attempts carry one name, so keep only one of the files"
                )
            if name not in chosen or _rank(row) > _rank(chosen[name]):
                chosen[name] = row
        tally.add(shard, [row["attempt_id"] for row in rows])
    return [chosen[name] for name in sorted(chosen)]


def _rows(shard: Shard) -> list[dict[str, Any]]:
    """The rows of one shard without the columns, and the fields of turns, that training does not need."""
    import pyarrow as pa

    table = shard.table([*COLUMNS, "turns"])
    narrow = pa.list_(pa.struct([schema.TURN.field(name) for name in TURN_COLUMNS]))
    place = table.schema.get_field_index("turns")
    return table.set_column(place, "turns", table["turns"].cast(narrow)).to_pylist()


def _rank(row: dict[str, Any]) -> tuple[int, bool, datetime.datetime]:
    """The later try, then graded over ungraded, then the newest grading."""
    never = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    return row["try"] or 0, row["graded_at"] is not None, row["graded_at"] or never


def _tokens(row: dict[str, Any]) -> str:
    # As text, because a record cut short may hold NaN, which equals nothing.
    return repr([[turn[name] for name in TOKEN_COLUMNS] for turn in row["turns"]])


def digest_of(rows: Iterable[dict[str, Any]]) -> str:
    """Digest of what a step learns from: the attempts, their verdicts and their sampled tokens."""
    total = hashlib.sha256()
    for row in rows:
        verdict = [row["attempt_id"], row["group_id"], row["blame"], row["reward"]]
        spans = [[turn["drops"], turn["foreign"]] for turn in row["turns"]]
        total.update(json.dumps([verdict, spans, _tokens(row)]).encode())
    return total.hexdigest()[:16]
