"""kill -9 anything, run the same command again: the loop finishes, and no attempt is doubled or lost.

One loop of two rounds with the script engine and the real make, sandboxes, grader and trainer is killed five times: in
a rollout, in a grading, in a training step, then its server, then make itself. Where a stage must be in the middle of
its work, it is made to wait: an attempt whose command does not end, a grader whose second path does not come.
"""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from e2e.driving import BIN, PATIENCE_S, Run, harness, rows, script, until

pytestmark = pytest.mark.podman

# Hands on the first path and keeps the second to itself. It ends with the stage that it becomes.
WAITING_GRADE = f"""#!/bin/bash
exec {BIN}/lego-grade "$@" < <(head -n 1; exec setpriv --pdeathsig KILL sleep 1000)
"""


class Loop:
    """recipes/demo.mk under lego-serve, with the script engine; TASKS x ATTEMPTS = 2 x 2 a round."""

    def __init__(self, run: Run, folder: Path, model: Path):
        self.run = run
        self.folder = folder
        self.model = model
        self.bin = folder / "bin"
        self.bin.mkdir()
        for command in BIN.glob("lego*"):
            (self.bin / command.name).symlink_to(command)
        self.settings = [
            "ROUNDS=2", "TASKS=2", "ATTEMPTS=2",
            "TASK_SET=shell --count 4 --seed 1 --level 0 --kind create --split train",
            f"RUN={self.run.folder}", f"MODEL={model}", f"HARNESS={harness(folder)}", f"bin={self.bin}",
            "ROLLOUT=-c 2 --max-turns 3 --turn-tokens 64", "GRADE=-c 1",
        ]  # fmt: skip
        done = self.run.do(*self._make(), self.run.folder / "tasks.list")
        assert done.returncode == 0, done.stderr
        self.tasks = [Path(line) for line in (self.run.folder / "tasks.list").read_text().split()]

    def _make(self) -> list[Any]:
        return ["make", "-f", "recipes/demo.mk", *self.settings]

    def start(self, stall: Path | None = None) -> Any:
        answers = script(self.folder / "script.jsonl", self.tasks, stall)
        serve = [BIN / "lego-serve", self.model, "--engine", "script", "--script", answers]
        return self.run.start(*serve, "--", *self._make())

    def step(self, k: int) -> Path:
        return self.run.folder / f"step-{k:04d}"

    def kill(self, process: Any, victim: int) -> str:
        """Kill `victim`; the whole loop must end by itself. Returns what was said."""
        os.kill(victim, signal.SIGKILL)
        _, words = process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0
        self.run.wait_gone()
        return words


def test_a_loop_killed_in_every_place_finishes(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    loop = Loop(run, tmp_path, tiny_model)
    first, second = loop.step(1), loop.step(2)

    # A rollout, when the first of its tasks is whole and the second hangs.
    process = loop.start(stall=loop.tasks[1])
    shard = until(lambda: [*(first / "rollout").glob("*.parquet")], "the first shard of round 1")[0]
    before = rows(shard)
    words = loop.kill(process, run.the("lego-rollout"))
    assert "failed, exit 137" in words
    assert not (first / "rollout.list").exists()

    # A grading, when one of its two shards is graded.
    (loop.bin / "lego-grade").unlink()
    (loop.bin / "lego-grade").write_text(WAITING_GRADE)
    (loop.bin / "lego-grade").chmod(0o755)
    process = loop.start()
    until(lambda: [*(first / "graded").glob("*.parquet")], "the first graded shard of round 1")
    assert rows(shard) == before  # what stood was not made again
    graded = rows(first / "graded")
    loop.kill(process, run.the("lego-grade"))
    assert rows(first / "graded") == graded and not (first / "graded.list").exists()

    # A training step, before its checkpoint is there.
    (loop.bin / "lego-grade").unlink()
    (loop.bin / "lego-grade").symlink_to(BIN / "lego-grade")
    process = loop.start()
    until((first / ".checkpoint.partial").exists, "training to begin")
    loop.kill(process, run.the("lego-train"))
    assert not (first / "checkpoint").exists() and not (first / "train.list").exists()
    assert [row for row in rows(first / "graded") if row["attempt_id"] in {g["attempt_id"] for g in graded}] == graded

    # The server, when round 2 is half made.
    process = loop.start(stall=loop.tasks[3])
    until(lambda: [*(second / "rollout").glob("*.parquet")], "the first shard of round 2")
    trained = (first / "checkpoint" / "legorl.json").read_text()
    loop.kill(process, process.pid)

    # make.
    half = rows(second / "rollout")
    process = loop.start(stall=loop.tasks[3])
    until(lambda: run.processes("loop.py") or run.processes("lego-rollout"), "round 2 to go on")
    loop.kill(process, run.the("make"))
    assert all(row in rows(second / "rollout") for row in half)

    # Nothing.
    process = loop.start()
    out, words = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, words + run.logs()
    run.wait_gone()
    assert run.left() == []
    assert "Try next" in out

    planned = {
        k: {f"test_kill.{k}.loop.{task.name}.{n}": 1 for task in loop.tasks[2 * k - 2 : 2 * k] for n in (0, 1)}
        for k in (1, 2)
    }
    for k in (1, 2):
        for stage in ("rollout", "graded"):
            assert Counter(row["attempt_id"] for row in rows(loop.step(k) / stage)) == planned[k]
    assert rows(shard) == before and (first / "checkpoint" / "legorl.json").read_text() == trained
    made = run.sql("select step, outcome, reward, count(*) as attempts from trajectories group by all order by step")
    assert made == [{"step": k, "outcome": "finished", "reward": 1.0, "attempts": 4} for k in (1, 2)]
    # The script engine's tokens are not drawn from the policy: every one of them stands under that reason, once.
    counts = "count(*) as n, count(distinct (attempt_id, turn, position)) as distinct_n, max(reason) as reason"
    assert run.sql(f"select step, {counts} from updates group by all order by step") == [
        {"step": k, "n": n, "distinct_n": n, "reason": "support"}
        for k in (1, 2)
        for n in [run.sql(f"select count(*) as n from tokens where step = {k}")[0]["n"]]
    ]
