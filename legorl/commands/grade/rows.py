"""Grading a shard without touching what is in it: its table, the jobs in it, and the same table with grades."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl import outcomes, schema
from legorl.commands.grade.actions import actions
from legorl.commands.grade.grading import Job
from legorl.commands.grade.verdict import Verdict
from legorl.options import Failure
from legorl.shards import ShardError, open_shard
from legorl.task import Task, TaskError, load_task

FACTS = ["attempt_id", "run", "task_path", "task_digest", "blame", "patch", "try", "started_at"]
CHANGED = ("outcome", "blame", "detail", *schema.GRADE_COLUMNS)


class Tasks:
    """Task folders by path, each read and digested once."""

    def __init__(self) -> None:
        self._known: dict[str, Task] = {}

    def get(self, row: Mapping[str, Any]) -> Task:
        """Return the task of `row`. Raises Failure unless the folder still holds what was rolled out."""
        path = row["task_path"]
        if path not in self._known:
            try:
                self._known[path] = load_task(path)
                _ = self._known[path].digest
            except TaskError as error:
                raise Failure(f"{row['attempt_id']}: its task cannot be read: {error}") from error
        task = self._known[path]
        if task.digest != row["task_digest"]:
            raise Failure(
                f"{row['attempt_id']}: {path} has changed since the rollout (digest {task.digest}, the row says "
                f"{row['task_digest']}); restore the task or roll out again"
            )
        return task


def facts_of(table: Any) -> list[dict[str, Any]]:
    """The columns that decide how a row is graded, as dictionaries; `flags` has those of what the agent did."""
    rows = table.select(FACTS).to_pylist()
    for row, flags in zip(rows, _flags_of(table), strict=True):
        row["flags"] = flags
    return rows


def _flags_of(table: Any) -> list[tuple[str, ...]]:
    """The flags of each row's turns; only their text leaves Arrow, not their tokens."""
    found: list[tuple[str, ...]] = []
    for turns in table.column("turns"):
        if turns.values is None:
            found.append(())
            continue
        texts = [text or "" for text in turns.values.field("text").to_pylist()]
        calls = [call["arguments"] or "" for one in turns.values.field("tool_calls").to_pylist() for call in one or ()]
        foreign = any(turns.values.field("foreign").to_pylist())
        found.append(tuple(sorted(actions([*texts, *calls], foreign))))
    return found


def job_of(row: Mapping[str, Any], tasks: Tasks) -> Job | None:
    """Return the job that `row` is, or None for a row that no grade can be given to (blame infra or task)."""
    if row["blame"] != "model":
        return None
    return Job(row["attempt_id"], row["run"], tasks.get(row), row["patch"], row["flags"])


@dataclass(frozen=True)
class Earlier:
    """What an earlier run of the same grader wrote: the keys of its rows in order, and the columns of graded ones."""

    keys: tuple[tuple, ...] = ()
    changes: Mapping[tuple, dict[str, Any]] = field(default_factory=dict)


def earlier_grades(path: Path, grader: str) -> Earlier:
    """Read `path`, if an earlier run wrote it. A broken or foreign file there counts as none: it is written again."""
    try:
        rows = open_shard(path).rows([*dict.fromkeys((*FACTS, *CHANGED))]) if path.exists() else []
    except ShardError:
        return Earlier()
    graded = {key_of(r): {n: r[n] for n in CHANGED} for r in rows if r["reward"] is not None and r["grader"] == grader}
    return Earlier(tuple(key_of(row) for row in rows), graded)


def key_of(row: Mapping[str, Any]) -> tuple:
    """What makes two rows the same attempt with the same work: a lost attempt that was tried again is another one."""
    return row["attempt_id"], row["try"], row["started_at"], row["task_digest"], row["patch"]


def changes_of(verdict: Verdict, grader: str) -> dict[str, Any]:
    """The columns that `verdict` changes in its row."""
    columns = verdict.columns(grader)
    if verdict.outcome:
        columns |= {"outcome": verdict.outcome, "blame": outcomes.blame_of(verdict.outcome)}
    if verdict.detail:
        columns["detail"] = verdict.detail
    return columns


def with_grades(table: Any, changes: Sequence[Mapping[str, Any]]) -> Any:
    """Return `table` with each row's `changes` in it; grade columns without one are null, all else is as it was."""
    import pyarrow as pa

    for name in CHANGED:
        index = table.schema.get_field_index(name)
        kept = [None] * len(changes) if name in schema.GRADE_COLUMNS else table.column(name).to_pylist()
        values = [change.get(name, old) for change, old in zip(changes, kept, strict=True)]
        column = schema.TRAJECTORY.field(name)
        table = table.set_column(index, column, pa.array(values, type=column.type))
    return table
