"""Shards in, one row an attempt out: its last try, graded over ungraded, the newest grading first.

    tally = Tally(); rows = read_rows(open_shards(paths), tally); tally.complaint()

legorl.rows says which row of an attempt stands.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from legorl import schema
from legorl.options import CHECK
from legorl.rows import TOKEN_FIELDS, standing
from legorl.shards import Plan, Shard, Tally

COLUMNS = (
    "attempt_id", "group_id", "run", "step", "harness", "weights", "tokenizer_digest", "blame", "reward", "budgets",
    "flags",
)  # fmt: skip
TURN_COLUMNS = (
    "index", "parent", "prefix_len", "cause", "context_ids", "completion_ids", "logprobs", "temperature", "support",
    "versions", "request_id", "foreign", "drops", "routing",
)  # fmt: skip


class BatchError(Exception):
    """The rows cannot be made into a batch for this model; weights stay as they are."""


class CheckError(BatchError):
    """The rows contradict each other or the model: a check that did not hold."""

    code = CHECK


def read_rows(shards: Iterable[Shard], tally: Tally) -> list[dict[str, Any]]:
    """Return one row an attempt, by attempt_id, and tell `tally` what each shard holds as it arrives.

    Only the columns that training needs are read. Raises ShardError; ConflictError for two rows of one try whose
    sampled tokens differ; CheckError for an attempt that the plan of its shard knows nothing of.
    """
    found = []
    for shard in shards:
        attempts = shard.table(["attempt_id"]).column("attempt_id").to_pylist()
        if strange := _unplanned(shard.plan, attempts):
            raise CheckError(f"{shard.path}: holds {strange}, which the plan of its round does not; it was changed")
        tally.add(shard, attempts)
        found.append(shard)
    kept = [row for shard, numbers in zip(found, standing(found), strict=True) for row in _rows(shard, numbers)]
    return sorted(kept, key=lambda row: row["attempt_id"])


def _unplanned(plan: Plan | None, attempts: Iterable[str]) -> str | None:
    """The first of `attempts` that `plan` does not have."""
    if not plan:
        return None
    groups, numbers = set(plan.groups), {str(n) for n in range(plan.attempts)}
    parts = ((attempt, *attempt.rpartition(".")[::2]) for attempt in attempts)
    return next((attempt for attempt, group, number in parts if group not in groups or number not in numbers), None)


def _rows(shard: Shard, numbers: list[int]) -> list[dict[str, Any]]:
    """Rows of one shard without the columns, and the fields of turns, that training does not need; turns never None.

    `planned` in each: how many attempts its group should have, None where no plan says so.
    """
    import pyarrow as pa

    if not numbers:
        return []
    table = shard.table([*COLUMNS, "turns"]).take(numbers)
    narrow = pa.list_(pa.struct([schema.TURN.field(name) for name in TURN_COLUMNS]))
    place = table.schema.get_field_index("turns")
    rows = table.set_column(place, "turns", table["turns"].cast(narrow)).to_pylist()
    planned = shard.plan.attempts if shard.plan else None
    return [row | {"turns": row["turns"] or [], "planned": planned} for row in rows]


def digest_of(rows: Iterable[dict[str, Any]]) -> str:
    """Digest of what a step learns from: the attempts, their verdicts, their sampled tokens and experts."""
    total = hashlib.sha256()
    for row in rows:
        verdict = [row["attempt_id"], row["group_id"], row["blame"], row["reward"]]
        spans = [[turn["drops"], turn["foreign"]] for turn in row["turns"]]
        # repr: a record cut short may hold NaN.
        tokens = repr([[turn[name] for name in TOKEN_FIELDS] for turn in row["turns"]])
        total.update(json.dumps([verdict, spans, tokens]).encode())
        for record in (turn["routing"] for turn in row["turns"] if turn["routing"]):
            total.update(record["valid"] + record["data"])
    return total.hexdigest()[:16]
