"""What a rollout leaves on disk: one file an attempt as soon as it ends, one shard as soon as its groups are whole.

    OUT/.partial/ATTEMPT.parquet    attempts of groups that are not whole yet
    OUT/GROUP.parquet               whole groups, named by the first

Rerun, both are read back: an attempt that stands stays, one lost to infrastructure is made again and its earlier tries
go into `history`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from legorl.commands.rollout.attempt import Job, as_try
from legorl.shards import Plan, ShardError, make_meta, open_shard, write_shard
from legorl.task import Task


@dataclass(frozen=True)
class Length:
    """How long a try was: turns, sampled tokens, seconds of wall time."""

    turns: float
    tokens: float
    seconds: float


class Store:
    """The rows of one round in the folder `out`: attempts that stand, by id, and the shards that they make up.

    `groups`: those of the plan that are made here, all of them unless others make the rest.
    """

    def __init__(
        self, out: Path, plan: Plan, per_shard: int, meta: dict[str, Any], groups: Sequence[str] | None = None
    ):
        self._plan, self._meta, self._out = plan, meta, out
        self._partial = out / ".partial"
        self._groups = groups = plan.groups if groups is None else groups
        self._chunks = [groups[k : k + per_shard] for k in range(0, len(groups), per_shard)]
        self._chunk_of = {group: k for k, chunk in enumerate(self._chunks) for group in chunk}
        self._stands: dict[str, str] = {}  # attempt_id -> blame
        self._tries: dict[str, list[tuple[bool, Length]]] = {}  # attempt_id -> of each try: lost? and its length
        self._partial.mkdir(parents=True, exist_ok=True)
        for left in self._partial.glob(".*.tmp"):
            left.unlink()
        for chunk in range(len(self._chunks)):
            for file in self._files(chunk):
                for row in open_shard(file).rows(["attempt_id", "blame", "budgets", "wall_s", "history"]):
                    self._stands[row["attempt_id"]] = row["blame"]
                    self._tries[row["attempt_id"]] = _tries_of(row)

    def left(self, tasks: Sequence[Task]) -> list[Job]:
        """What is to be made, in the groups' order: attempts never made, and those lost to infrastructure once more.

        `tasks`: of each group.
        """
        jobs = []
        for task, group in zip(tasks, self._groups, strict=True):
            for n in range(self._plan.attempts):
                job = Job(task, group, n)
                if self._stands.get(job.attempt_id, "infra") == "infra":
                    lost = self._stands.pop(job.attempt_id, None)
                    jobs.append(replace(job, history=self._history(job)) if lost else job)
        return jobs

    def keep(self, row: dict[str, Any], again: bool = False) -> Path | None:
        """Write the row of a try that has ended; return the shard's path if that made its groups whole.

        `again`: the attempt will be tried once more; the row is there in case we do not come to it.
        """
        write_shard(self._file(row["attempt_id"]), [row], make_meta(plan=self._plan, **self._meta))
        self._tries[row["attempt_id"]] = _tries_of(row)
        if again:
            return None
        self._stands[row["attempt_id"]] = row["blame"]
        return self._gather(self._chunk_of[row["group_id"]])

    def whole(self) -> Iterator[Path]:
        """Paths of the shards whose attempts all stand, in order; makes those that were not written yet."""
        for chunk in range(len(self._chunks)):
            if path := self._gather(chunk):
                yield path

    @property
    def lost(self) -> int:
        """How many attempts that stand were lost to infrastructure."""
        return sum(blame == "infra" for blame in self._stands.values())

    def lengths(self) -> tuple[list[Length], list[Length]]:
        """Lengths of the attempts that were kept, and of the tries that were lost, over the whole round so far."""
        tries = [each for rows in self._tries.values() for each in rows]
        return [length for lost, length in tries if not lost], [length for lost, length in tries if lost]

    def _ids(self, chunk: int) -> list[str]:
        return [f"{group}.{n}" for group in self._chunks[chunk] for n in range(self._plan.attempts)]

    def _shard(self, chunk: int) -> Path:
        return self._out / f"{self._chunks[chunk][0]}.parquet"

    def _file(self, attempt_id: str) -> Path:
        return self._partial / f"{attempt_id}.parquet"

    def _files(self, chunk: int) -> list[Path]:
        """Files with rows of the chunk: its shard, then the attempts made since, which take precedence."""
        files = [self._shard(chunk), *(self._file(a) for a in self._ids(chunk))]
        return [file for file in files if file.exists()]

    def _history(self, job: Job) -> tuple[dict[str, Any], ...]:
        for file in reversed(self._files(self._chunk_of[job.group_id])):
            for row in open_shard(file).rows():
                if row["attempt_id"] == job.attempt_id:
                    return (*row["history"], as_try(row))
        raise ShardError(f"{self._out}: the row of {job.attempt_id} is gone; give another --out")

    def _gather(self, chunk: int) -> Path | None:
        wanted, files, path = self._ids(chunk), self._files(chunk), self._shard(chunk)
        if any(a not in self._stands for a in wanted):
            return None
        if files == [path]:
            return path
        rows: dict[str, pa.Table] = {}
        for file in files:
            table = open_shard(file).table()
            rows |= {attempt: table.slice(k, 1) for k, attempt in enumerate(table.column("attempt_id").to_pylist())}
        table = pa.concat_tables([rows[a] for a in wanted])
        write_shard(path, table, make_meta(plan=self._plan, **self._meta))
        for attempt in wanted:
            self._file(attempt).unlink(missing_ok=True)
        return path


def _tries_of(row: Mapping[str, Any]) -> list[tuple[bool, Length]]:
    used = {name: budget["used"] for name, budget in row["budgets"].items()}
    tries = [(t["blame"] == "infra", Length(t["turns"], t["tokens"], t["wall_s"])) for t in row["history"]]
    return [*tries, (row["blame"] == "infra", Length(used["turns"], used["tokens"], row["wall_s"]))]
