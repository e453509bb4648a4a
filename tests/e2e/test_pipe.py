"""rollout | grade | train as one pipe: a stage begins with the first finished shard; part of a round is no step."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from e2e.driving import BIN, PATIENCE_S, Run, harness, rows, script, until

pytestmark = pytest.mark.podman

PIPE = """
bin/lego-rollout {tasks} --out {run}/rollout --harness {harness} --run test_pipe -n 2 -c 2 --max-turns 3 |
    bin/lego-grade --out {run}/graded | bin/lego-train --model {model} --out {run}/checkpoint
echo "${{PIPESTATUS[@]}}"
"""


def test_a_killed_rollout_is_no_step_and_the_same_pipe_goes_on(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    made = run.do(BIN / "lego-tasks", "shell", "--out", tmp_path / "t", "--count", 2, "--kind", "create", "--level", 0)
    tasks = [Path(line) for line in made.stdout.split()]
    assert len(tasks) == 2, made.stderr
    words = {"run": run.folder, "harness": harness(tmp_path), "model": tiny_model, "tasks": " ".join(map(str, tasks))}
    pipe = PIPE.format(**words)

    def start(stall: Path | None) -> Any:
        answers = script(tmp_path / "script.jsonl", tasks, stall)
        argv = [BIN / "lego-serve", tiny_model, "--engine", "script", "--script", answers]
        return run.start(*argv, "--", "bash", "-c", pipe)

    process = start(stall=tasks[1])
    # The second task never ends, so the rollout goes on while the first task's shard is graded.
    graded = until(lambda: [*(run.folder / "graded").glob("*.parquet")], "the first graded shard")
    before = rows(graded[0])
    os.kill(run.the("lego-rollout"), signal.SIGKILL)
    codes, said = process.communicate(timeout=PATIENCE_S)
    assert codes.split() == ["137", "1", "1"]
    assert said.count("2 of 4 attempts of the plan arrived") == 2 and "no step was taken" in said, said
    assert not (run.folder / "checkpoint").exists()
    run.wait_gone()

    process = start(stall=None)
    out, said = process.communicate(timeout=PATIENCE_S)
    assert out.split()[-3:] == ["0", "0", "0"], said
    assert out.split()[0] == str(run.folder / "checkpoint")
    assert rows(graded[0]) == before  # neither made nor graded again
    planned = {f"test_pipe.0.loop.{task.name}.{n}": 1 for task in tasks for n in (0, 1)}
    for stage in ("rollout", "graded"):
        assert Counter(row["attempt_id"] for row in rows(run.folder / stage)) == planned
    assert run.sql("select count(distinct attempt_id) as n from updates") == [{"n": 4}]
    run.wait_gone()
    assert run.left() == []
