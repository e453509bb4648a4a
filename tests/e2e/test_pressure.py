"""A machine under pressure: every attempt ends with the true outcome, and nothing is left behind.

Real commands and sandboxes; the pressure is put on at a turn of an attempt (e2e.acting), so that it comes when it
should, however busy the machine is.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import shard, small_task
from e2e.acting import Acting, Deed, processes_of, sandbox_of, write_script
from e2e.driving import BIN, Run, harness, rows, until
from grading import attempt as attempt_at

from legorl.sandbox import limits

pytestmark = [
    pytest.mark.podman,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can put a cgroup around sandboxes"),
]

# A harness that holds HELD bytes itself, and otherwise does what the model says.
HOLDING = """
import json, subprocess, sys, urllib.request
base, key, model, task = sys.argv[1:]
held = bytearray(int(task.partition("holds ")[2] or 0))
messages = [{"role": "user", "content": task}]
while True:
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json", "user-agent": "loop/1"}
    reply = json.load(urllib.request.urlopen(urllib.request.Request(base + "/v1/chat/completions", body, headers)))
    answer = reply["choices"][0]["message"]["content"]
    if answer == "DONE":
        break
    done = subprocess.run(["bash", "-c", answer], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "rc %d" % done.returncode}]
"""
SOLUTION = "echo hi > hello.txt"
ROOMY = {"memory_mb = 256": "memory_mb = 64", "disk_mb = 32": "disk_mb = 256"}
# Takes every process that it can get, keeps them, and says so.
HOG = """python3 -c '
import os, signal, time
while True:
    try:
        if not os.fork():
            signal.pause()
    except OSError:
        open("/tmp/full", "w").close()
        time.sleep(0.001)
' & until [ -e /tmp/full ]; do :; done; echo hi > hello.txt"""


def rollout(run: Run, serve: Acting, tasks: list[Path], *argv: Any, **env: str) -> "subprocess.CompletedProcess[str]":
    common = ["--out", run.folder / "out", "--harness", harness(run.folder, HOLDING), "--run", run.folder.name]
    words = [BIN / "lego-rollout", *tasks, *common, "--serve", serve.control, "-n", 1, *argv]
    return run.do("env", *(f"{name}={value}" for name, value in env.items()), *words)


def attempt(run: Run, task: str) -> str:
    return f"{run.folder.name}.0.loop.{task}.0"


def endings(run: Run) -> dict[str, tuple[str, str, list[tuple[str, str]]]]:
    """Of each task's attempt: outcome, blame, and those of its earlier tries."""
    return {
        row["task_id"]: (row["outcome"], row["blame"], [(t["outcome"], t["blame"]) for t in row["history"]])
        for row in rows(run.folder / "out")
    }


@contextlib.contextmanager
def cgroup_around(**most: int) -> Iterator[str]:
    """A cgroup around all sandboxes that are told its name; `most`: its limits, {file of cgroup v1: value}."""
    if (limits.CGROUPS / "cgroup.controllers").exists():
        pytest.skip("written for cgroup v1")
    name = f"legorl-test-{os.getpid()}"
    folders = [limits.CGROUPS / controller / name for controller in ("memory", "pids", "cpu")]
    for folder in folders:
        folder.mkdir()
    try:
        for file, value in most.items():
            path = file.replace("_", ".", 1)
            (limits.CGROUPS / path.partition(".")[0] / name / path).write_text(str(value))
        yield name
    finally:
        for folder in folders:
            limits.remove_cgroup(folder)


class Hunger:
    """A hungry attempt beside a steady one: it eats when that is at work, and stays until that has ended."""

    def __init__(self, steady: str):
        self._at_work, self._eaten = threading.Event(), threading.Event()
        self._steady = steady

    async def begin_steady(self) -> None:
        self._at_work.set()
        await asyncio.to_thread(self._eaten.wait, 60)

    async def begin_hungry(self) -> None:
        await asyncio.to_thread(self._at_work.wait, 60)

    async def end_hungry(self) -> None:
        self._eaten.set()
        while processes_of(self._steady):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("food", "around", "meal", "outcome"),
    [
        ("memory", {"memory_limit_in_bytes": 400 << 20}, f"cat /dev/zero > /ws/fill; {SOLUTION}", "out_of_memory"),
        pytest.param("processes", {"pids_max": 40}, HOG, "too_many_processes", marks=pytest.mark.slow),
    ],
    ids=["memory", "processes"],
)
def test_a_neighbour_s_hunger_is_not_the_doing_of_an_innocent_attempt(
    run: Run, tmp_path: Path, tiny_model: Path, food: str, around: dict[str, int], meal: str, outcome: str
) -> None:
    """Both stay within their own limits; there is not enough for both. The kernel kills the largest process."""
    steady, hungry = (attempt(run, name) for name in ("steady", "hungry"))
    tasks = [
        small_task(tmp_path, "steady", f"steady, holds {200 << 20 if food == 'memory' else 0}"),
        small_task(tmp_path, "hungry", "hungry"),
    ]
    settings = (tasks[1] / "task.toml").read_text()
    for old, new in ROOMY.items():
        settings = settings.replace(old, new)
    (tasks[1] / "task.toml").write_text(settings)
    script = write_script(tmp_path / "s.jsonl", {"^steady": SOLUTION, "^hungry": meal, "^rc": "DONE"})
    with Acting(tiny_model, script) as serve, cgroup_around(**around) as name:
        hunger = Hunger(sandbox_of(steady))
        serve.acts |= {
            (steady, 0): hunger.begin_steady,
            (hungry, 0): hunger.begin_hungry,
            (hungry, 1): hunger.end_hungry,
        }
        done = rollout(run, serve, tasks, "-c", 2, "--retries", 5, LEGORL_CGROUP=name)
    assert done.returncode == 0, done.stderr
    found = endings(run)
    assert found["steady"][:2] == found["hungry"][:2] == ("finished", "model"), done.stderr
    assert found["steady"][2][0] == (outcome, "infra"), done.stderr
    # What is killed takes a while to give back its memory, so the kernel may go on and kill the hungry one as well.
    assert {blame for _, blame in (*found["steady"][2], *found["hungry"][2])} == {"infra"}
    assert run.left() == []


def test_tests_that_a_neighbour_s_hunger_ends_are_not_failed(run: Run, tmp_path: Path) -> None:
    task = small_task(tmp_path, "big")
    test = task / "tests" / "test_task.py"
    test.write_text(test.read_text().replace("    assert", "    held = bytearray(200 << 20)\n    assert"))
    patch = b"diff --git a/hello.txt b/hello.txt\nnew file mode 100644\n"
    patch += b"--- /dev/null\n+++ b/hello.txt\n@@ -0,0 +1 @@\n+hi\n"
    source = shard(tmp_path / "a.parquet", [attempt_at(task, 0, patch)])
    argv = [BIN / "lego-grade", source, "--out", run.folder / "graded", "--retries", 0, "--max-lost", 1]
    with cgroup_around(memory_limit_in_bytes=150 << 20) as name:
        done = run.do("env", f"LEGORL_CGROUP={name}", *argv)
    assert done.returncode == 0, done.stderr
    (row,) = rows(run.folder / "graded")
    assert (row["outcome"], row["blame"], row["reward"]) == ("grader_crash", "infra", None)
    assert "the host had no memory left" in row["detail"]
    assert run.do(*argv).returncode == 0
    assert [row["reward"] for row in rows(run.folder / "graded")] == [1.0]


def killer(run: Run, task: str, who: str) -> Deed:
    async def kill() -> None:
        found = processes_of(sandbox_of(attempt(run, task)))
        os.kill(found[who], signal.SIGKILL)

    return kill


@pytest.mark.slow
def test_whatever_of_a_sandbox_is_killed_from_outside_the_attempt_is_tried_again(
    run: Run, tmp_path: Path, tiny_model: Path
) -> None:
    """One of them had a process killed for its memory before: that was its own doing, its end is not."""
    who = ["podman", "conmon", "init", "supervisor"]
    tasks = [small_task(tmp_path, name, name) for name in (*who, "greedy")]
    eat = "python3 -c 'x = bytearray(1 << 30)'"
    lines = {"^greedy": eat, "^rc 137": f"{SOLUTION}; sleep 1000", "^rc": "DONE"}
    script = write_script(tmp_path / "s.jsonl", lines | {f"^{name}$": f"{SOLUTION}; sleep 1000" for name in who})
    with Acting(tiny_model, script) as serve:
        for name in who:
            serve.acts[attempt(run, name), 0] = killer(run, name, name)
        serve.acts[attempt(run, "greedy"), 1] = killer(run, "greedy", "podman")
        done = rollout(run, serve, tasks, "-c", 5, "--retries", 0, "--max-lost", 1)
        assert done.returncode == 0, done.stderr
        assert endings(run) == {name: ("sandbox_lost", "infra", []) for name in (*who, "greedy")}, done.stderr
        run.wait_gone()
        assert run.left() == []


@pytest.mark.slow
def test_thirty_two_at_once_some_of_them_bombs(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    crash = "kill -9 $PPID"
    meals = {
        "memory": (f"python3 -c 'x = bytearray(1 << 30)'; {crash}", "out_of_memory"),
        "forks": (f"f() {{ f | f & }}; f; sleep 5; {crash}", "too_many_processes"),
        "disk": (f"cat /dev/zero > /tmp/zeros; {crash}", "disk_full"),
    }
    kinds = [*meals, *["work"] * 5] * 4
    names = [f"{kind}-{k}" for k, kind in enumerate(kinds)]
    tasks = [small_task(tmp_path, name, name) for name in names]
    lines = {f"^{kind}": meal for kind, (meal, _) in meals.items()} | {"^work": SOLUTION, "^rc": "DONE"}
    with Acting(tiny_model, write_script(tmp_path / "s.jsonl", lines)) as serve:
        done = rollout(run, serve, tasks, "-c", 32, "--time-limit", 400)
    assert done.returncode == 0, done.stderr
    wanted = {name: meals[kind][1] if kind in meals else "finished" for name, kind in zip(names, kinds, strict=True)}
    found = endings(run)
    assert {name: (outcome, blame) for name, (outcome, blame, _) in found.items()} == {
        name: (outcome, "model") for name, outcome in wanted.items()
    }
    run.wait_gone()
    assert run.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rollout_that_is_ended_with_many_at_work_goes_on_where_it_was(
    run: Run, tmp_path: Path, tiny_model: Path, number: signal.Signals
) -> None:
    names = [f"task-{k}" for k in range(8)]
    tasks = [small_task(tmp_path, name, name) for name in names]
    script = write_script(tmp_path / "s.jsonl", {"^task": f"{SOLUTION}; sleep 1000", "^rc": "DONE"})
    argv = [BIN / "lego-rollout", *tasks, "--out", run.folder / "out", "--harness", harness(run.folder, HOLDING)]
    argv += ["--run", run.folder.name, "-n", 1, "-c", 8]
    with Acting(tiny_model, script) as serve:
        process = run.start(*argv, "--serve", serve.control)
        until(lambda: all("supervisor" in processes_of(sandbox_of(attempt(run, name))) for name in names), "all to run")
        process.send_signal(number)
        process.communicate(timeout=100)
        run.wait_gone()
        # Nobody has to clean up after it: a container ends with its owner.
        until(lambda: not any(processes_of(sandbox_of(attempt(run, name))) for name in names), "the containers to end")
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    with Acting(tiny_model, write_script(tmp_path / "s.jsonl", {"^task": SOLUTION, "^rc": "DONE"})) as serve:
        done = run.do(*argv, "--serve", serve.control)
    assert done.returncode == 0, done.stderr
    earlier = [("interrupted", "infra")] if number == signal.SIGTERM else []
    assert endings(run) == dict.fromkeys(names, ("finished", "model", earlier))
    run.wait_gone()
    assert run.left() == []
