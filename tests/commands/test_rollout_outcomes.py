"""Every outcome in the table, caused for real: the real commands, sandboxes and server, and a script for a model.

BY_ROLLOUT are brought about in one round, by what the "model" does (its command) or by what happens to the attempt from
outside (a deed at a turn); docs/outcomes.md names the tests that bring about the rest.
"""

import ast
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import small_task
from e2e.acting import Acting, processes_of, sandbox_of, write_script
from grading import grade

from legorl import tree
from legorl.commands.grade import grading
from legorl.outcomes import BLAME
from legorl.sandbox import container
from legorl.shards import open_shard
from legorl.task import load_task

BIN = Path(__file__).parents[2] / "bin"
TESTS = Path(__file__).parents[1]

# A harness of the standard library: it runs what the model says until that is DONE. A task that begins with "tools"
# offers a tool that no answer calls: the harness ends with it, or asks again where the task says "again".
LOOP = """
import json, subprocess, sys, urllib.request
base, key, model, task = sys.argv[1:]
messages = [{"role": "user", "content": task}]
tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
while True:
    body = {"model": model, "messages": messages, **({"tools": tools} if task.startswith("tools") else {})}
    headers = {"authorization": "Bearer " + key, "content-type": "application/json", "user-agent": "loop/1"}
    reply = json.load(urllib.request.urlopen(urllib.request.Request(
        base + "/v1/chat/completions", json.dumps(body).encode(), headers)))
    answer = reply["choices"][0]["message"]["content"]
    if answer == "DONE" or task == "tools":
        break
    if task.startswith("tools"):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
        continue
    done = subprocess.run(["bash", "-c", answer], capture_output=True, text=True)
    print(done.stdout[-4000:], done.stderr[-4000:], flush=True)
    said = "rc %d %s" % (done.returncode, done.stdout if "say" in task else "")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
"""

CRASH = "kill -9 $PPID"
# Memory that belongs to no process: what holds it is dead, and the sandbox is full to the brim all the same.
BRIM = """for k in 1 2 3 4; do python3 -c '
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
while True:
    at = libc.shmat(libc.shmget(0, 1 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 1 << 20)
    libc.shmdt(ctypes.c_void_p(at))
'; done"""
# The forwarder belongs to another user; what is left is to flood it.
FORWARDER = f"""pkill -9 -f forward; pkill -9 -f supervisor; kill -9 -1; python3 -c '
import socket
kept = []
for _ in range(3000):
    kept.append(socket.socket())
    kept[-1].connect(("127.0.0.1", 8400))
'; {CRASH}"""

# What each task's first answer is; it begins the regular expression of its instruction.
COMMANDS = {
    "time_limit": "echo hi > hello.txt; sleep 1000",
    "slow_engine": "echo hi > hello.txt",  # no outcome, but what may seem to be one
    "finished": "echo hi > hello.txt; printf '\\x1b[31m%s' $KEY; env > /ws/repo/env.txt",
    "no_changes": "true",
    "text_only": "I think that nothing is to be done.",
    "step_limit": "echo hi >> hello.txt; echo more",
    "token_limit": "echo " + "word " * 300,
    "context_overflow": "seq 3000",
    "no_tool_loop": "Let me think about it.",
    "harness_crash": CRASH,
    "out_of_memory": f"python3 -c 'x = bytearray(1 << 30)'; {CRASH}",
    "disk_full": f"cat /dev/zero >/tmp/zeros; {CRASH}",
    "too_many_processes": f"python3 /lego/bombs.py processes 500; {CRASH}",
    "patch_unusable": "head -c 9000000 /dev/urandom > big; true",
    "sandbox_setup_failed": "true",
    "sandbox_lost": "sleep 1000",
    "capture_incomplete": "true",
    # No outcomes, but what may seem to be a way out.
    "brim": f"{BRIM}; {CRASH}",
    "forwarder": FORWARDER,
}  # engine_lost: no line fits
INSTRUCTIONS = {
    **{"text_only": "tools", "no_tool_loop": "tools, again"},
    **{"context_overflow": "say: count", "step_limit": "say: more"},
}
TURNS, TOKENS, IDLE, SECONDS = 4, 280, 2, 20.0
LIMITS = ["--max-turns", TURNS, "--max-tokens", TOKENS, "--max-idle-turns", IDLE, "--time-limit", SECONDS]

BY_ROLLOUT = {name for name in COMMANDS if name in BLAME} | {"engine_lost"}


def harness(folder: Path) -> Path:
    path = folder / "loop.toml"
    argv = '["python3", "{home}/loop.py", "{base_url}", "{key}", "{model}", "{task}"]'
    head = 'name = "loop"\nversion = "1"\nprotocol = "openai-chat"\nuser_agent = "^loop/"\n'
    run = f'[run]\nargv = {argv}\nenv = {{ KEY = "{{key}}" }}\n[run.files]\n'
    path.write_text(f"{head}{run}\"{{home}}/loop.py\" = '''{LOOP}'''\n")
    return path


def rollout(*argv: Any, serve: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "LEGORL_SERVE": serve}
    words = [str(BIN / "lego-rollout"), *map(str, argv)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)


def rows_of(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    return [row for path in done.stdout.split() for row in open_shard(path).rows()]


@contextlib.contextmanager
def acting(model: Path, folder: Path, commands: dict[str, str]) -> Iterator[Acting]:
    lines = {f"^{INSTRUCTIONS.get(name, name)}$": text for name, text in commands.items()}
    answers = {"^go on$": "Yet more.", "^rc 0 more": commands.get("step_limit", ""), r"^rc \d+\s*$": "DONE"}
    script = write_script(folder / "script.jsonl", {**lines, **answers})
    with Acting(model, script) as served:
        yield served


def kill(*who: str, container: str) -> None:
    """Kill some processes of a container, waiting for the first of them."""
    while who[0] not in (found := processes_of(container)):
        pass
    for name in who:
        os.kill(found[name], signal.SIGKILL)


@pytest.mark.podman
def test_every_outcome_of_an_attempt(tmp_path: Path, tiny_model: Path) -> None:
    names = [*COMMANDS, "engine_lost"]
    tasks = {name: small_task(tmp_path / "t", name, INSTRUCTIONS.get(name, name)) for name in names}
    attempt = {name: f"all.0.loop.{name}.0" for name in names}
    early = threading.Thread(
        target=kill, args=("podman",), kwargs={"container": sandbox_of(attempt["sandbox_setup_failed"])}, daemon=True
    )
    for name in ("out_of_memory", "brim"):  # less to fill
        settings = tasks[name] / "task.toml"
        settings.write_text(settings.read_text().replace("memory_mb = 256", "memory_mb = 64"))
    with acting(tiny_model, tmp_path, COMMANDS) as served:

        async def lose() -> None:
            kill("podman", container=sandbox_of(attempt["sandbox_lost"]))

        served.acts[attempt["sandbox_lost"], 0] = lose
        served.acts[attempt["slow_engine"], 0] = lambda: asyncio.sleep(SECONDS + 2)
        served.engine.forgetful.add(attempt["capture_incomplete"])
        early.start()
        done = rollout(
            *(*tasks.values(), "--out", tmp_path / "out", "--harness", harness(tmp_path), "--run", "all"),
            *("-n", 1, "-c", 5, "--retries", 0, *LIMITS),
            serve=served.control,
        )
    early.join(1)
    rows = {row["task_id"]: row for row in rows_of(done)}
    wanted = {**{name: name for name in BY_ROLLOUT}, "brim": "out_of_memory", "forwarder": "harness_crash"}
    wanted["slow_engine"] = "finished"
    told = {name: (row["outcome"], row["detail"]) for name, row in rows.items()}
    assert {name: outcome for name, (outcome, _) in told.items()} == wanted, told
    assert {name: row["blame"] for name, row in rows.items()} == {n: BLAME[o] for n, o in wanted.items()}
    assert done.returncode == 0, done.stderr  # 4 of 20 lost: no more than --max-lost

    made = rows["finished"]
    assert made["patch_files"] == ["env.txt", "hello.txt"] and b"+hi\n" in made["patch"]
    # The key and control characters do not reach the row; the caller's environment does not reach the container.
    assert "\\x1b[31m***" in made["log_tail"]
    assert b"+HOME=/home/agent\n" in made["patch"] and b"LEGORL_SERVE" not in made["patch"]
    assert made["attempt_id"] == attempt["finished"] and made["group_id"] == "all.0.loop.finished"
    assert [t["cause"] for t in made["turns"]] == ["root", "extend"] and not made["turns"][0]["foreign"]
    tree.check(made["turns"])
    assert made["weights"][0]["version"] == 0 and made["budgets"]["turns"] == {"limit": float(TURNS), "used": 2.0}
    assert len({row["seed"] for row in rows.values()}) == len(rows)
    assert done.stderr.count(f" of {len(rows)} attempts") == len(rows) + 2  # one line a group, two in all
    # A limit keeps what was done until then.
    assert rows["step_limit"]["patch_files"] == ["hello.txt"] and len(rows["step_limit"]["turns"]) == TURNS
    assert rows["token_limit"]["budgets"]["tokens"]["used"] == TOKENS
    assert rows["time_limit"]["budgets"]["seconds"]["used"] >= SECONDS and b"+hi\n" in rows["time_limit"]["patch"]
    # The engine's time is not the harness's.
    slow = rows["slow_engine"]
    assert slow["wall_s"] > SECONDS + 2 and slow["budgets"]["seconds"]["used"] < SECONDS and b"+hi\n" in slow["patch"]
    lost = [row for row in rows.values() if row["blame"] == "infra"]
    length = sum(len(row["turns"]) for row in lost) / len(lost)
    assert f"{len(lost)} tries of the round were lost to infrastructure: {length:.1f} turns" in done.stderr

    # Whoever breaks its harness, its sandbox or its way to the model gains nothing by it: no other try, and no reward.
    broken = ["harness_crash", "out_of_memory", "disk_full", "too_many_processes", "brim", "forwarder"]
    assert all(not rows[name]["history"] for name in broken)
    shards = [tmp_path / "out" / f"all.0.loop.{name}.parquet" for name in (*broken, "finished", "sandbox_lost")]
    graded = grade(*shards, "--out", tmp_path / "graded", "-c", 4, check=False)
    assert graded.returncode == 1 and "8 of 20 attempts of the plan" in graded.stderr  # no others were handed on
    rewards = {row["task_id"]: row["reward"] for row in rows_of(graded)}
    assert rewards == {**dict.fromkeys(broken, 0.0), "finished": 1.0, "sandbox_lost": None}


def test_the_table_in_the_docs_has_every_outcome_its_blame_and_the_test_that_causes_it() -> None:
    lines = (TESTS.parent / "docs" / "outcomes.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert {name: blame for name, blame, *_ in cells} == BLAME
    assert {name for name, *_, test in cells if test == "its own task"} == BY_ROLLOUT
    for test in {test for *_, test in cells} - {"its own task"}:
        file, _, name = f"{Path(__file__).name}::{test}".rpartition("::")
        tree_of = ast.parse((TESTS / "commands" / file.rpartition("::")[2]).read_text())
        assert name in {node.name for node in tree_of.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.podman
def test_other_weights_than_the_policy_s_are_told(tmp_path: Path, tiny_model: Path) -> None:
    """Somebody has other weights loaded in the middle of an attempt. That the turn waits for them is not its time."""
    other = shutil.copytree(tiny_model, tmp_path / "other")
    (other / "model.safetensors").rename(other / "weights.safetensors")  # the digest is over names, too
    task = small_task(tmp_path / "t", "make", "make it")
    with acting(tiny_model, tmp_path, {"make it": "echo hi > hello.txt"}) as served:
        served.acts["run.0.loop.make.0", 0] = served.load_soon(other, 1)
        served.engine.loading = lambda: asyncio.sleep(7)
        common = ("--harness", harness(tmp_path), "-n", 1, "--time-limit", 5, "--retries", 0)
        done = rollout(task, "--out", tmp_path / "out", *common, "--policy", tiny_model, serve=served.control)
    (row,) = rows_of(done)
    assert (row["outcome"], row["blame"], done.returncode) == ("weights_lost", "infra", 3), done.stderr
    assert [w["version"] for w in row["weights"]] == [0, 1] and len(row["turns"]) == 2
    assert row["queue_s"] > 5 > row["budgets"]["seconds"]["used"]


@pytest.mark.podman
def test_an_interrupted_round_keeps_what_ran_and_makes_it_again(tmp_path: Path, tiny_model: Path) -> None:
    tasks = [small_task(tmp_path / "t", name) for name in ("one", "two")]
    argv = [BIN / "lego-rollout", *tasks, "--out", tmp_path / "out", "--harness", harness(tmp_path), "-n", 1]
    with acting(tiny_model, tmp_path, {"do it": "echo hi > hello.txt"}) as served:
        asked = threading.Barrier(3)

        async def hold() -> None:
            await asyncio.to_thread(asked.wait)
            await asyncio.Event().wait()

        for name in ("one", "two"):
            served.acts[f"run.0.loop.{name}.0", 1] = hold
        argv = [*map(str, argv), "--serve", served.control]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            asked.wait(60)
            process.send_signal(signal.SIGINT)
            out, words = process.communicate(timeout=60)
        assert process.returncode == 130 and out == "" and words.strip().endswith("interrupted")
        assert "2 tries of the round were lost to infrastructure: 2.0 turns" in words
        cut = [row for file in (tmp_path / "out" / ".partial").glob("*.parquet") for row in open_shard(file).rows()]
        assert [(row["outcome"], row["blame"], len(row["turns"])) for row in cut] == [("interrupted", "infra", 2)] * 2
        again = rollout(*argv[1:], serve=served.control)
    assert again.returncode == 0, again.stderr
    for row in rows_of(again):
        assert (row["outcome"], row["try"]) == ("finished", 1)
        assert [(t["outcome"], t["blame"], t["turns"]) for t in row["history"]] == [("interrupted", "infra", 2)]


@pytest.mark.podman
def test_a_grading_sandbox_that_does_not_answer_is_given_up(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman stands still, so that not even the end of the container's lifetime shows; the real patience is minutes."""
    monkeypatch.setattr(grading, "OUR_TIME_S", 0.5)
    monkeypatch.setattr(container, "_CLOSE_S", 1.0)
    task = load_task(small_task(tmp_path, "quick"))
    task = replace(task, grade=replace(task.grade, timeout_s=1.0))
    run = f"frozen-{os.getpid()}"

    def freeze() -> None:
        while "podman" not in (found := processes_of("legorl-grade-", run)):
            pass
        os.kill(found["podman"], signal.SIGSTOP)

    async def judge() -> grading.Verdict:
        freezing = asyncio.create_task(asyncio.to_thread(freeze))
        verdict = await grading.grade(grading.Job("a", run, task, b""), grading.programs_dir(), retries=0)
        await freezing
        return verdict

    verdict = asyncio.run(judge())
    assert (verdict.outcome, verdict.reward) == ("grader_timeout", None), verdict
    assert processes_of("legorl-grade-", run) == {}
