"""Prove tasks both ways: unsolved, what must fail fails and the rest passes; with the solution everything passes.

Each task becomes one shard of attempts that nobody made: their patch is nothing, or the solution. `lego-grade`, run as
a process, grades them exactly as it grades a policy's attempts; what it says is compared here. Several runs have to
agree test by test.

    for finding in check([task, ...], Path("work"), runs=3, concurrency=2): print(finding.task_id, finding.ok)
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl import schema
from legorl.options import FAILED, LOST, Failure
from legorl.shards import Plan, make_meta, open_shard, write_shard
from legorl.task import Grade, Task

RUN = "check"
COLUMNS = ["attempt", "reward", "detail", "tests"]


@dataclass(frozen=True)
class Finding:
    """What was found of one task; `empty` and `solution` say why that way does not hold, None if it does."""

    task_id: str
    path: str
    empty: str | None
    solution: str | None

    @property
    def ok(self) -> bool:
        return self.empty is None and self.solution is None

    def to_json(self) -> dict[str, Any]:
        return {"id": self.task_id, "path": self.path, "ok": self.ok, "empty": self.empty, "solution": self.solution}


def group_of(task: Task) -> str:
    return f"{RUN}.0.check.{task.id}"


def attempts_of(task: Task, runs: int) -> list[dict[str, Any]]:
    """Return the rows of one task: for each run an attempt without a patch (even) and one with the solution (odd).

    Raises TaskError if the task has no solution.
    """
    blank = dict.fromkeys(schema.TRAJECTORY.names)
    rows = []
    for attempt in range(2 * runs):
        solved = attempt % 2 == 1
        rows.append(
            blank
            | {
                "attempt_id": f"{group_of(task)}.{attempt}",
                "group_id": group_of(task),
                "run": RUN,
                "step": 0,
                "task_id": task.id,
                "task_path": str(task.path),
                "task_digest": task.digest,
                "split": task.split,
                "attempt": attempt,
                "try": 0,
                "harness": "check",
                "outcome": "finished" if solved else "no_changes",
                "blame": "model",
                "patch": task.solution if solved else b"",
                "turns": [],
            }
        )
    return rows


def check(tasks: Sequence[Task], work: Path, runs: int, concurrency: int, quiet: bool = False) -> Iterator[Finding]:
    """Yield the finding on each task as its grades arrive. Shards go to `work`/attempts and `work`/graded.

    Raises TaskError for a task without a solution, Failure if two tasks have the same id or if lego-grade fails.
    """
    by_group = {group_of(task): task for task in tasks}
    if len(by_group) < len(tasks):
        seen: dict[str, Task] = {}
        first, second = next((seen[t.id], t) for t in tasks if seen.setdefault(t.id, t) is not t)
        raise Failure(f"{second.path}: has the same id as {first.path}; check them one after the other")
    plan = Plan(RUN, 0, tuple(by_group), 2 * runs)
    shards = []
    for group, task in by_group.items():
        path = work / "attempts" / f"{group}.parquet"
        shards.append(write_shard(path, attempts_of(task, runs), make_meta(plan=plan, harness="check")))
    paths = work / "attempts.list"
    paths.write_text("".join(f"{path}\n" for path in shards))
    for graded in _grade(paths, work / "graded", concurrency, quiet):
        yield judge(by_group[graded.stem], open_shard(graded).rows(COLUMNS))


def _grade(paths: Path, out: Path, concurrency: int, quiet: bool) -> Iterator[Path]:
    """Run lego-grade over the shards named in `paths`; yield each graded shard's path as it prints it."""
    program = Path(sys.executable).with_name("lego-grade")
    if not program.exists():
        raise Failure(f"{program}: not there; install the package again (make setup)")
    argv = [str(program), "-", "--out", str(out), "-c", str(concurrency), "--max-lost", "0"]
    with paths.open() as stdin, subprocess.Popen(
        [*argv, *(["-q"] if quiet else [])], stdin=stdin, stdout=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield Path(line.rstrip("\n"))
            code = process.wait()
        finally:
            process.terminate()
    if code not in (0, LOST):
        raise Failure(f"lego-grade ended with exit code {code}; its own message stands above", FAILED)


def judge(task: Task, rows: Sequence[dict[str, Any]]) -> Finding:
    """Return what the graded rows of one task show. Raises Failure if a row has no grade (infrastructure)."""
    for row in rows:
        if row["reward"] is None:
            raise Failure(f"{task.id}: could not be graded ({row['detail']}); run the check again", LOST)
    ways = []
    for remainder in (0, 1):
        results = [{t["id"]: t["got"] for t in row["tests"]} for row in rows if row["attempt"] % 2 == remainder]
        ways.append(_complaint(task.grade, results, solved=remainder == 1))
    return Finding(task.id, str(task.path), *ways)


def _complaint(grade: Grade, results: list[dict[str, str]], solved: bool) -> str | None:
    """Return why the results of one way (a dictionary a run: test id to what it got) do not hold, or None."""
    faults = []
    for test in (*grade.fail_to_pass, *grade.pass_to_pass):
        got = [result.get(test, "missing") for result in results]
        must_pass = solved or test in grade.pass_to_pass
        short = test.rpartition("::")[2]
        if len(set(got)) > 1:
            faults.append(f"runs disagree on {short}: {', '.join(got)}")
        elif grade.holds(got[0], forward=test in grade.fail_to_pass) != must_pass:
            faults.append(f"{short}: {got[0]}" if must_pass else f"{short} passes already")
    return "; ".join(faults) or None
