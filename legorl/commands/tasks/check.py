"""Prove tasks both ways: unsolved, what must fail fails and the rest passes; with the solution everything passes.

Each task becomes one shard of attempts that nobody made: their patch is nothing, or the solution. `lego-grade`, run as
a process, grades them exactly as it grades a policy's attempts; what it says is compared here. Several runs have to
agree test by test. A canary (see canary.py) is proved never to pass: with the solution everything does but the one test
that makes it impossible.

    for finding in check([task, ...], Path("work"), runs=3, concurrency=2): print(finding.task_id, finding.ok)
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from legorl import schema
from legorl.options import FAILED, LOST, Failure
from legorl.shards import Plan, make_meta, open_shard, write_shard
from legorl.task import Task

RUN = "check"
VOID = "both_ways"  # what a test gets that passed with a wrong assertion, too: it checks nothing
COLUMNS = ["attempt", "outcome", "blame", "reward", "detail", "tests", "flags"]


@dataclass(frozen=True)
class Finding:
    """What was found of one task. Each of these says what is wrong, and is None where nothing is.

    task: with the folder itself, so that nothing was tried. empty, solution: with the attempts without a patch, and
    those with the solution. lost: with the machine, so that nothing was found out.
    """

    task_id: str
    path: str
    empty: str | None = None
    solution: str | None = None
    task: str | None = None
    lost: str | None = None
    canary: bool = False

    @property
    def ok(self) -> bool:
        return not any((self.empty, self.solution, self.task, self.lost))

    def to_json(self) -> dict[str, Any]:
        ways = {"empty": self.empty, "solution": self.solution, "task": self.task, "lost": self.lost}
        return {"id": self.task_id, "path": self.path, "ok": self.ok, "canary": self.canary, **ways}

    def faults(self) -> list[tuple[str, str]]:
        """What is wrong, line by line: the way it shows (nothing, the solution, ...), and what."""
        ways = {"task": self.task, "nothing done": self.empty, "solution": self.solution, "lost": self.lost}
        return [(way, line) for way, text in ways.items() if text for line in text.split("; ")]


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


def check(
    tasks: Sequence[Task], work: Path, runs: int, concurrency: int, verbose: bool = False, podman: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yield the finding on each task as its grades arrive. Shards go to `work`/attempts and `work`/graded.

    verbose: what the tests print goes to stderr. podman: the hosts whose sandboxes lego-grade uses. Tasks without a
    solution come first. Raises Failure if two tasks have the same id or if lego-grade fails.
    """
    by_group = {group_of(task): task for task in tasks}
    if len(by_group) < len(tasks):
        seen: dict[str, Task] = {}
        first, second = next((seen[t.id], t) for t in tasks if seen.setdefault(t.id, t) is not t)
        raise Failure(f"{second.path}: has the same id as {first.path}; check them one after the other")
    for group, task in list(by_group.items()):
        if not (task.path / "solution.patch").is_file():
            yield Finding(task.id, str(task.path), task="no solution.patch: nothing shows that it can be solved")
            del by_group[group]
    if not by_group:
        return
    plan = Plan(RUN, 0, tuple(by_group), 2 * runs)
    shards = []
    for group, task in by_group.items():
        path = work / "attempts" / f"{group}.parquet"
        shards.append(write_shard(path, attempts_of(task, runs), make_meta(plan=plan, harness="check")))
    paths = work / "attempts.list"
    paths.write_text("".join(f"{path}\n" for path in shards))
    for graded in _grade(paths, work / "graded", concurrency, verbose, podman):
        yield judge(by_group[graded.stem], open_shard(graded).rows(COLUMNS))


def _grade(paths: Path, out: Path, concurrency: int, verbose: bool, podman: Sequence[str]) -> Iterator[Path]:
    """Run lego-grade over the shards named in `paths`; yield each graded shard's path as it prints it."""
    program = Path(sys.executable).with_name("lego-grade")
    if not program.exists():
        raise Failure(f"{program}: not there; install the package again (make setup)")
    argv = [str(program), "-", "--out", str(out), "-c", str(concurrency), "--max-lost", "0"]
    argv += [word for url in podman for word in ("--podman", url)]
    with paths.open() as stdin, subprocess.Popen(
        [*argv, "-v" if verbose else "-q"], stdin=stdin, stdout=subprocess.PIPE, text=True
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
    """Return what the graded rows of one task show."""
    found = Finding(task.id, str(task.path), canary=bool(task.canary))
    for row in rows:
        if row["blame"] == "task":
            return replace(found, task=row["detail"])
        if row["reward"] is None:
            return replace(found, lost=f"could not be graded: {row['outcome']}, {row['detail']}")
    passed = task.canary and any("canary_passed" in row["flags"] for row in rows)
    empty, solution = ([row for row in rows if row["attempt"] % 2 == odd] for odd in (0, 1))
    return replace(
        found,
        empty="the canary passes" if passed else _complaint(task, empty, solved=False),
        solution="the canary passes" if passed else _complaint(task, solution, solved=True),
    )


def _complaint(task: Task, rows: Sequence[dict[str, Any]], solved: bool) -> str | None:
    """Return why the rows of one way, one a run, do not hold, or None."""
    if solved and (unusable := {row["detail"] for row in rows if row["outcome"] == "patch_unusable"}):
        return f"solution.patch does not apply: {' / '.join(sorted(unusable))}".replace("; ", ", ")
    grade = task.grade
    results = [{test["id"]: test["got"] for test in row["tests"]} for row in rows]
    faults = []
    for test in (*grade.fail_to_pass, *grade.pass_to_pass):
        got = [result.get(test, "missing") for result in results]
        if test == task.canary:
            # Without a solution it may pass: then those that it excludes do not.
            if solved and any(grade.holds(each, forward=True) for each in got):
                faults.append(f"{_short(test)} makes it no canary: {', '.join(got)}")
            continue
        must_pass = solved or test in grade.pass_to_pass
        if len(set(got)) > 1:
            faults.append(f"runs disagree on {_short(test)}: {', '.join(got)}")
        elif (grade.holds(got[0], forward=test in grade.fail_to_pass) or (got[0] == VOID and not solved)) != must_pass:
            faults.append(f"{_short(test)}: {got[0]}" if must_pass else f"{_short(test)} passes already")
    return "; ".join(faults) or None


def _short(test: str) -> str:
    return test.rpartition("::")[2]
