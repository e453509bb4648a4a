"""The recipes as make sees them: what waits for what, what a killed loop does again, what setup says before it acts.

Small scripts stand for the stages here (the loop with the real ones is tests/e2e): they note what they were asked, and
can be told to fail or to meet, which no real stage can.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STAGE = """#!/bin/bash
# Notes its step and policy, then makes one path. FAIL names a step of this stage that fails once; MEET a fifo
# through which round 2's rollout and round 1's training must pass together.
set -eu
name=$(basename "$0")
step=$(sed -n 's,.*--out [^ ]*\\(step-[0-9]*/[a-z]*\\).*,\\1,p' <<<"$*")
policy=$(sed -n 's/.*--\\(policy\\|model\\) \\([^ ]*\\).*/\\2/p' <<<"$*")
echo "$name $step ${policy:+with $policy}" >>"$LOG"
if [ "$name" = lego-tasks ]; then
    [ "$1" = list ] && seq -f "$2/t%g" 5
    exit 0
fi
cat >/dev/null
if [ "${FAIL:-}" = "$step" ] && mkdir "$LOG.failed" 2>/dev/null; then echo "out of luck" >&2; exit 7; fi
if [ "${HANG:-}" = "$step" ]; then exec 9>"$MEET" sleep 1000; fi
if [ -n "${MEET:-}" ]; then
    case "$step" in
        step-0002/rollout) echo here >"$MEET";;
        step-0001/checkpoint) read -r _ <"$MEET";;
    esac
fi
echo "$step"
"""


class Loop:
    """A run folder, stand-ins for the stages, and make."""

    def __init__(self, folder: Path):
        self.run = folder / "run"
        self.log = folder / "log"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("tasks", "rollout", "grade", "train"):
            (self.bin / f"lego-{name}").write_text(STAGE)
            (self.bin / f"lego-{name}").chmod(0o755)

    def start(self, *argv: str, recipe: str = "grpo", rounds: int = 2, **env: str) -> subprocess.Popen[str]:
        settings = [f"RUN={self.run}", f"ROUNDS={rounds}", "MODEL=base", f"bin={self.bin}"]
        environment = {**os.environ, "LOG": str(self.log), **env}
        argv = ("make", "-f", f"recipes/{recipe}.mk", *settings, *argv)
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)

    def make(self, *argv: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        with self.start(*argv, **settings) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self) -> list[str]:
        return [line.strip() for line in self.log.read_text().splitlines() if not line.startswith("lego-tasks")]


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return Loop(tmp_path)


def test_each_round_uses_the_weights_of_the_one_before(loop: Loop) -> None:
    done = loop.make("-j4")
    assert done.returncode == 0, done.stderr
    assert loop.calls() == [
        "lego-rollout step-0001/rollout with base",
        "lego-grade step-0001/graded",
        "lego-train step-0001/checkpoint with base",
        "lego-rollout step-0002/rollout with step-0001/checkpoint",
        "lego-grade step-0002/graded",
        "lego-train step-0002/checkpoint with step-0001/checkpoint",
    ]
    assert (loop.run / "step-0002" / "train.list").read_text() == "step-0002/checkpoint\n"
    tasks = [(loop.run / f"step-000{k}" / "tasks.list").read_text().split() for k in (1, 2)]
    assert len(tasks[0]) == len(tasks[1]) == 16
    assert {Path(t).name for t in tasks[0][:5]} == {f"t{k}" for k in range(1, 6)}  # all five before any comes again
    assert tasks[0] != tasks[1]


def test_with_lag_rollouts_overlap_training(loop: Loop, tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    # Each of the two waits for the other: this ends only if they run at the same time.
    done = loop.make("-j2", "LAG=1", rounds=3, MEET=str(meeting))
    assert done.returncode == 0, done.stderr
    calls = loop.calls()
    assert "lego-rollout step-0002/rollout with base" in calls
    assert "lego-rollout step-0003/rollout with step-0001/checkpoint" in calls
    assert "lego-train step-0002/checkpoint with step-0001/checkpoint" in calls


def test_a_failed_loop_continues_where_it_was(loop: Loop) -> None:
    done = loop.make(FAIL="step-0002/graded")
    assert done.returncode == 2
    assert "failed, exit 7" in done.stderr
    assert "out of luck" in done.stderr
    assert not (loop.run / "step-0002" / "graded.list").exists()
    before = loop.calls()
    assert loop.make("-q", "loop").returncode == 1
    assert loop.make(FAIL="step-0002/graded").returncode == 0
    assert loop.calls()[len(before) :] == [
        "lego-grade step-0002/graded",
        "lego-train step-0002/checkpoint with step-0001/checkpoint",
    ]
    assert loop.make("-q", "loop").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stages_end_with_make(loop: Loop, tmp_path: Path, number: int) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = loop.start(HANG="step-0001/graded", MEET=str(pipe))
    with pipe.open() as held:  # the stage has the other end; its end is this pipe's
        process.send_signal(number)
        assert held.read() == ""
    process.communicate(timeout=60)
    assert loop.make().returncode == 0
    assert [c.split()[1] for c in loop.calls()].count("step-0001/rollout") == 1


def test_a_finished_loop_takes_more_rounds(loop: Loop) -> None:
    loop.make(rounds=1)
    before = loop.calls()
    loop.make(rounds=2)
    assert loop.calls()[len(before)] == "lego-rollout step-0002/rollout with step-0001/checkpoint"
    assert len(loop.calls()) == len(before) + 3


def test_the_plan_runs_nothing(loop: Loop) -> None:
    plan = loop.make("-n", recipe="demo").stdout
    assert plan.index("step-0001/rollout.log") < plan.index("step-0001/train.log") < plan.index("step-0002/rollout.log")
    assert "lego-inspect summary" in plan
    assert not loop.run.exists()


def test_a_phase_hands_on_data_and_exit_code(tmp_path: Path) -> None:
    argv = [ROOT / "recipes/phase", "a try", tmp_path / "a.log", "sh", "-c", "echo data; echo words >&2; exit 5"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, "data\n")
    assert done.stderr.startswith("a try")
    assert "words" in done.stderr
    assert (tmp_path / "a.log").read_text() == "words\n"


def test_setup_names_what_is_missing_where_it_may_not_install(tmp_path: Path) -> None:
    programs, checkout = tmp_path / "programs", tmp_path / "checkout"
    programs.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if program.name not in ("podman", "sudo") and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    for name in ("recipes/setup.sh", "recipes/phase", "pyproject.toml", "legorl/__init__.py", "legorl/paths.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((ROOT / name).read_bytes())
        (checkout / name).chmod(0o755)
    (checkout / "runs").mkdir()
    (checkout / "runs").chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    env = {"PATH": str(programs), "LEGORL_CACHE": str(checkout / "runs" / "cache")}
    done = subprocess.run(
        [checkout / "recipes/setup.sh"], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, **nobody
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("setup: not root and no sudo, but needs: podman")
    assert "apt-get install --no-install-recommends podman" in last
    assert not (checkout / ".venv").exists()
