"""The Slurm recipe without Slurm: a stand-in for `sbatch` runs each job at once, here; the commands are real."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from builders import small_task

from legorl.shards import open_shard

ROOT = Path(__file__).parents[2]
# Runs the jobs of an array one after the other, and says a job id. What --dependency waits for has ended already.
SBATCH = """#!/bin/bash
set -eu
from=1 to=1 array=no
while [[ $1 == --* ]]; do
    if [[ $1 == --array=* ]]; then array=yes range=${1#--array=} from=${range%-*} to=${range#*-}; fi
    shift
done
for id in $(seq "$from" "$to"); do
    if [ $array = yes ]; then export SLURM_ARRAY_TASK_ID=$id SLURM_ARRAY_TASK_COUNT=$((to - from + 1)); fi
    cp "$1" "$SPOOL/slurm_script"
    SLURM_SUBMIT_DIR=$PWD bash "$SPOOL/slurm_script" "${@:2}" >&2 || echo "job $id failed" >&2
done
echo "$RANDOM"
"""


@pytest.mark.podman
@pytest.mark.slow
def test_the_parts_of_a_round_are_the_round(tiny_model: Path, tmp_path: Path) -> None:
    step, own = tmp_path / "step", tmp_path / "bin"
    step.mkdir()
    own.mkdir()
    (own / "sbatch").write_text(SBATCH)
    (own / "sbatch").chmod(0o755)
    agent = tmp_path / "agent.sh"
    agent.write_text("#!/bin/sh\necho hi > hello.txt\n")
    agent.chmod(0o755)
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"match": "never", "text": "asked"}))
    tasks = [small_task(tmp_path / "tasks", f"t{k}") for k in range(3)]
    (step / "tasks.list").write_text("".join(f"{task}\n" for task in tasks))
    settings = {"ROLLOUT": f"--harness command:{agent} -n 2 -c 4", "GRADE": "-c 4", "PARTS": "2", "STEP": str(step)}
    environment = {**os.environ, **settings, "PATH": f"{own}:{os.environ['PATH']}", "SPOOL": str(tmp_path)}
    # One server for both rollout jobs: the second would only take time.
    serve = [ROOT / "bin" / "lego-serve", tiny_model, "--engine", "script", "--script", script, "--"]
    done = subprocess.run(
        [*serve, "recipes/slurm/round.sh", "--partition=any"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr, done.stderr

    parts = [(step / f"rollout.list.{part}").read_text().split() for part in (1, 2)]
    assert [len(part) for part in parts] == [2, 1]
    shards = [open_shard(path) for path in (step / "graded.list").read_text().split()]
    rows = [row for shard in shards for row in shard.rows()]
    wanted = [f"run.0.command-agent.sh.t{k}.{n}" for k in range(3) for n in range(2)]  # as without --shard
    assert sorted(row["attempt_id"] for row in rows) == wanted
    assert {row["reward"] for row in rows} == {1.0}
    # Every shard tells of the whole round: a part that is missing is missed.
    assert all(shard.plan is not None and shard.plan.attempt_ids == wanted for shard in shards)

    argv = ["recipes/slurm/gather.sh", "graded"]
    (step / "graded.list.2").unlink()
    gap = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert gap.returncode == 1 and "part 2 of graded is not done" in gap.stderr
    short = step / "short.list"
    short.write_text((step / "rollout.list.1").read_text())
    grade = [ROOT / "bin" / "lego-grade", "-", "--out", tmp_path / "short"]
    with short.open() as stdin:
        missed = subprocess.run(grade, stdin=stdin, env=environment, capture_output=True, text=True)
    assert missed.returncode == 1 and "4 of 6 attempts" in missed.stderr
