"""lego-rollout as a command, with real sandboxes and the script engine.

Most runs use a small harness of our own (LOOP: Python's standard library, no start-up cost); the real harnesses run in
tests/test_harness_runs.py, and every ending of an attempt is in test_rollout_outcomes.py.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builders
import pytest
from builders import small_task

from legorl.commands.rollout.cli import _Progress
from legorl.shards import open_shard

BIN = Path(__file__).parents[2] / "bin"


# -- the command -------------------------------------------------------------------------------------------------------

LOOP = """
import json, os, subprocess, sys, urllib.request
base, key, model, task = sys.argv[1:]
messages = [{"role": "user", "content": task}]
while True:
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = urllib.request.Request(base + "/v1/chat/completions", body, {
        "authorization": "Bearer " + key, "content-type": "application/json", "user-agent": "loop/1"})
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if answer == "DONE":
        break
    done = subprocess.run(["bash", "-c", answer], capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "rc %d" % done.returncode}]
"""

# One conversation a task: the first message is the task's instruction, the later ones are "rc N" of our loop.
SCRIPT = [
    {"match": "^make", "text": "echo hi > hello.txt"},
    {"match": "^slow", "text": "echo hi > hello.txt; sleep 1000"},
    {"match": "^import", "text": "cd / && python3 -c 'import json, inner; print(inner.OK, json.dumps([1]))'"},
    {"match": "^rc [0-9]+$", "text": "DONE"},
]


def loop_harness(folder: Path) -> Path:
    path = folder / "loop.toml"
    path.write_text(
        'name = "loop"\nversion = "1"\nprotocol = "openai-chat"\nuser_agent = "^loop/"\n'
        '[run]\nargv = ["python3", "{home}/loop.py", "{base_url}", "{key}", "{model}", "{task}"]\n'
        f"env = {{ KEY = \"{{key}}\" }}\n[run.files]\n\"{{home}}/loop.py\" = '''{LOOP}'''\n"
    )
    return path


@pytest.fixture(scope="module")
def lego_serve(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The control socket of one running lego-serve that all tests share."""
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, SCRIPT)))
    with serving(tiny_model, script) as (socket, _process):
        yield socket


@contextlib.contextmanager
def serving(model: Path, script: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    argv = [BIN / "lego-serve", model, "--engine", "script", "--script", script]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.terminate()
        process.wait(30)


def rollout(*argv: Any, serve: str | None = None, env: dict[str, str] | None = None, **kwargs: Any) -> Any:
    environment = {**os.environ, **(env or {})}
    environment.pop("LEGORL_SERVE", None)
    if serve:
        environment["LEGORL_SERVE"] = serve
    return subprocess.run(
        [str(BIN / "lego-rollout"), *map(str, argv)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )


def rows_of(done: Any) -> list[dict[str, Any]]:
    return [row for path in done.stdout.split() for row in open_shard(path).rows()]


def containers() -> list[str]:
    """Names of legorl's containers whose Podman runs, whoever owns them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if words[0].endswith(b"podman") and b"--name" in words:
                found.append(words[words.index(b"--name") + 1].decode())
    return found


def one_line(done: Any, code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_help_has_examples_and_loads_nothing_heavy() -> None:
    code = "import sys; from legorl.commands.rollout.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'vllm', 'transformers', 'duckdb', 'pyarrow'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Examples:\n    lego-serve MODEL -- lego-rollout TASK" in done.stdout and done.stderr.strip() == "[]"


def test_the_summary_counts_input_positions_with_recorded_experts(capsys: pytest.CaptureFixture[str]) -> None:
    def row(n: int, *routing: dict[str, Any] | None) -> dict[str, Any]:
        return builders.trajectory("t", n, turns=[builders.turn(k, k - 1, routing=r) for k, r in enumerate(routing)])

    progress = _Progress(3, 0)
    progress.ended(row(0, {"valid": b"\1\1\0\1"}, {"valid": b"\1\1\1\1\1"}), False, None)
    progress.ended(row(1, {"valid": b"\1\1\1\1"}, None), True, None)  # to be tried again: not counted
    progress.ended(row(2, None, None), False, None)  # a dense model: nothing to record
    progress.tell_all()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "lego-rollout: experts recorded for 8 of 9 input positions (88.89%)"
    )
    dense = _Progress(1, 0)
    dense.ended(row(0, None), False, None)
    dense.tell_all()
    assert "experts" not in capsys.readouterr().err


def test_explain_prints_the_settings_and_does_nothing(tmp_path: Path) -> None:
    done = rollout("--out", tmp_path / "out", "--harness", "pi", "--explain", "-n", 3)
    config = json.loads(done.stdout)
    assert (config["attempts"], config["harness"], config["harness_version"]) == (3, "pi", "0.73.1")
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    out, harness, good = tmp_path / "out", loop_harness(tmp_path), small_task(tmp_path / "t", "good")
    untested = small_task(tmp_path / "t", "untested")
    (untested / "tests" / "test_task.py").unlink()
    same = shutil.copytree(good, tmp_path / "same")
    base = ("--out", out, "--harness")
    nobody = str(tmp_path / "nobody.sock")
    one_line(rollout(good, *base, harness, serve=nobody), 1, "no lego-serve answers on", nobody, "lego-serve MODEL")
    one_line(rollout(good, *base, harness), 1, "lego-serve MODEL -- ...", "--serve")
    one_line(rollout(untested, *base, harness, serve=nobody), 1, "untested", "no tests")
    one_line(rollout(tmp_path, *base, harness, serve=nobody), 1, "not a task folder")
    one_line(rollout(good, same, *base, harness, serve=nobody), 1, "'good'", str(good))
    one_line(rollout("-", *base, harness, serve=nobody, input=""), 1, "no task")
    one_line(rollout(good, *base, "nobody", serve=nobody), 1, "no harness 'nobody'")
    cold = {"LEGORL_CACHE": str(tmp_path / "empty")}
    one_line(rollout(good, *base, "pi", serve=nobody, env=cold), 1, "not installed", "make setup")
    one_line(rollout(good, *base, harness, "--run", "x" * 250, serve=nobody), 1, "shorten --run")
    assert rollout(good, *base, harness, "--run", "a/b", serve=nobody).returncode == 2
    assert rollout(good, "--out", out, serve=nobody).returncode == 2
    assert not out.exists()


def test_podman_missing(tmp_path: Path, lego_serve: str) -> None:
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("sh", "dirname", "readlink", "basename", "sed"):
        (path / name).symlink_to(shutil.which(name) or name)
    done = rollout(
        small_task(tmp_path, "t"),
        *("--out", tmp_path / "out", "--harness", loop_harness(tmp_path)),
        serve=lego_serve,
        env={"PATH": str(path)},
    )
    one_line(done, 1, "podman is not installed", "make setup")
    assert not (tmp_path / "out").exists()


@pytest.mark.podman
def test_a_lost_engine_is_retried_counted_and_taken_up_by_a_rerun(tmp_path: Path, lego_serve: str) -> None:
    """No script line fits the task `lost`: the engine fails it."""
    lost, good = small_task(tmp_path / "t", "lost", "unheard of"), small_task(tmp_path / "t", "good", "import it")
    table = (
        (good / "task.toml").read_text().replace('runner = "pytest"', 'runner = "pytest"\npython_path = ["src", "."]')
    )
    (good / "task.toml").write_text(table)
    (good / "repo" / "src").mkdir()
    (good / "repo" / "src" / "inner.py").write_text("OK = 'found'\n")
    (good / "repo" / "json.py").write_text("raise SystemExit('the standard library comes first')\n")
    argv = (lost, good, "--out", tmp_path / "out", "--harness", loop_harness(tmp_path), "-n", 1, "--retries", 1)
    first = rollout(*argv, serve=lego_serve)
    assert first.returncode == 3 and "1 of 2 attempts were lost" in first.stderr
    rows = {r["task_id"]: r for r in rows_of(first)}
    assert (rows["lost"]["outcome"], rows["lost"]["blame"], len(rows["lost"]["history"])) == ("engine_lost", "infra", 1)
    assert "found [1]" in rows["good"]["log_tail"]  # the agent can import what the task's tests can
    again = rollout(*argv, "--max-lost", 0.5, serve=lego_serve)
    assert again.returncode == 0
    assert sorted(again.stdout.split()) == sorted(first.stdout.split())
    rerun = {r["task_id"]: r for r in rows_of(again)}
    assert len(rerun["lost"]["history"]) == 3
    assert rerun["good"] == rows["good"]
    changed = rollout(*argv, "--temperature", 0.5, serve=lego_serve)
    one_line(changed, 1, "other settings", "temperature: was 1.0, now 0.5")


@pytest.mark.podman
def test_policy_is_loaded_by_digest_before_the_first_attempt(tmp_path: Path, tiny_model: Path, lego_serve: str) -> None:
    new = tmp_path / "step-7"
    shutil.copytree(tiny_model, new / "model")
    (new / "legorl.json").write_text(json.dumps({"version": 7}))
    one = small_task(tmp_path / "t", "make", "make it")
    argv = (one, "--harness", loop_harness(tmp_path), "-n", 1)
    done = rollout(*argv, "--out", tmp_path / "a", "--policy", new, serve=lego_serve)
    (row,) = rows_of(done)
    assert [w["version"] for w in row["weights"]] == [7] and "loading" in done.stderr
    assert row["turns"][0]["versions"][0]["version"] == 7
    back = rollout(*argv, "--out", tmp_path / "b", "--policy", tiny_model, serve=lego_serve)
    assert [w["version"] for w in rows_of(back)[0]["weights"]] == [0]
    missing = rollout(*argv, "--out", tmp_path / "c", "--policy", tmp_path / "none", serve=lego_serve)
    one_line(missing, 1, "no such model folder")


@pytest.mark.podman
def test_terminated_it_leaves_no_container_and_a_rerun_continues(tmp_path: Path, lego_serve: str) -> None:
    folder = tmp_path / "t"
    paths = [small_task(folder, "make", "make it"), small_task(folder, "slow", "slow it")]
    argv = [BIN / "lego-rollout", *paths, "--out", tmp_path / "out", "--harness", loop_harness(tmp_path)]
    argv += ["-n", "1", "--serve", lego_serve, "--run", "stop", "--time-limit", "15"]
    process = subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline().strip()  # the quick group; the slow one is still running
    # A second writer is refused, and names the first.
    one_line(rollout(*argv[1:]), 1, f"process {process.pid} is writing here")
    before = open_shard(first).rows()
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 143 and words.strip().endswith("terminated")
    listed = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=300)
    assert listed.returncode == 0 and listed.stdout.split()[0] == first
    assert open_shard(first).rows() == before
    assert {r["outcome"] for r in rows_of(listed)} == {"finished", "time_limit"}
    assert not [name for name in containers() if "stop" in name]


@pytest.mark.podman
def test_a_dead_lego_serve_ends_the_round_with_one_line(tmp_path: Path, tiny_model: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, SCRIPT)))
    paths = [small_task(tmp_path / "t", "make", "make it"), small_task(tmp_path / "t", "slow", "slow it")]
    with serving(tiny_model, script) as (socket, server):
        argv = [BIN / "lego-rollout", *paths, "--out", tmp_path / "out", "--harness", loop_harness(tmp_path)]
        process = subprocess.Popen(
            [*map(str, argv), "-n", "1", "--serve", socket], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        server.kill()
        _, words = process.communicate(timeout=60)
    assert process.returncode == 1 and "no lego-serve answers" in words.strip().splitlines()[-1]
