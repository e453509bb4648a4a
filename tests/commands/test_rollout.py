"""lego-rollout: verdicts, durable rows, scheduling; then the real command with real sandboxes and the script engine.

Most runs use a small harness of our own (LOOP: Python's standard library, no start-up cost) so that every ending of an
attempt is cheap to bring about; the real harnesses run in tests/test_harness_runs.py.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builders
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl import tree
from legorl.commands.rollout.attempt import HOME, Job, own_seconds, pack_home, patched_files
from legorl.commands.rollout.cli import _Progress
from legorl.commands.rollout.durable import Store
from legorl.commands.rollout.schedule import make_all
from legorl.commands.rollout.verdict import STOPS, Seen, decide
from legorl.control import Session
from legorl.harness import HarnessError
from legorl.outcomes import blame_of
from legorl.shards import Plan, open_shard
from legorl.task import load_task

BIN = Path(__file__).parents[2] / "bin"


# -- verdicts ----------------------------------------------------------------------------------------------------------

GOOD = {"exit_code": 0, "patch": b"diff", "turns": 2}


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        ({}, "finished"),
        ({"patch": b""}, "no_changes"),
        ({"patch": b"", "tools_offered": True}, "text_only"),
        ({"patch": b"", "tools_offered": True, "tools_called": True}, "no_changes"),
        ({"stopped": "turns", "exit_code": None}, "step_limit"),
        ({"stopped": "tokens", "exit_code": None}, "token_limit"),
        ({"stopped": "time", "exit_code": None}, "time_limit"),
        ({"stopped": "seconds", "exit_code": 1}, "time_limit"),
        ({"stopped": "idle_turns", "exit_code": 1}, "no_tool_loop"),
        ({"overflow": True, "exit_code": 1}, "context_overflow"),
        ({"exit_code": 1}, "harness_crash"),
        ({"exit_code": 137, "oom_kills": 1}, "out_of_memory"),
        ({"patch": b"", "oom_kills": 1}, "out_of_memory"),
        ({"oom_kills": 1}, "finished"),  # a command of its was killed; it went on and changed something
        ({"process_refusals": 3, "patch": b""}, "too_many_processes"),
        ({"process_refusals": 3}, "finished"),
        ({"full_disks": ("/tmp",), "exit_code": 1}, "disk_full"),
        ({"full_disks": ("/ws", "/tmp"), "patch": b""}, "disk_full"),
        ({"full_disks": ("/ws",)}, "finished"),
        ({"patch": None, "patch_error": "8 MiB"}, "patch_unusable"),
        ({"sandbox_lost": "gone", "patch": None, "exit_code": None}, "sandbox_lost"),
        ({"sandbox_lost": "gone", "oom_kills": 1, "patch": None, "exit_code": None}, "out_of_memory"),
        ({"lost": "engine died", "exit_code": 1}, "engine_lost"),
        ({"broken_capture": "turn 1"}, "capture_incomplete"),
        ({"wrong_weights": "x"}, "weights_lost"),
    ],
)
def test_outcome(seen: dict[str, Any], outcome: str) -> None:
    assert decide(Seen(**{**GOOD, **seen}))[0] == outcome


@given(
    st.builds(
        Seen,
        exit_code=st.sampled_from([None, 0, 1, 137]),
        stopped=st.sampled_from(["", *STOPS]),
        patch=st.sampled_from([None, b"", b"diff"]),
        patch_error=st.sampled_from([None, "too large"]),
        overflow=st.booleans(),
        tools_offered=st.booleans(),
        tools_called=st.booleans(),
        oom_kills=st.integers(0, 2),
        process_refusals=st.integers(0, 2),
        full_disks=st.sampled_from([(), ("/ws",)]),
    )
)
def test_nothing_that_a_container_can_bring_about_is_blamed_on_infrastructure(seen: Seen) -> None:
    assert blame_of(decide(seen)[0]) == "model"


def test_the_clock_stands_while_a_turn_waits_or_runs() -> None:
    session = Session(None, "id", "key")  # type: ignore[arg-type]

    async def events() -> Any:
        for event in (
            {"event": "begin"},
            {"event": "begin"},
            {"event": "turn", "turns": 1, "tokens": 1, "engine_s": 0, "queue_s": 0},
        ):
            yield json.dumps(event)

    asyncio.run(session._follow(events()))
    assert session.state.running == 1 and session.state.busy_since is not None
    session.state.busy_since, session.state.busy_s = time.monotonic() - 5, 3.0
    assert own_seconds(session, 10.0) == pytest.approx(2.0, abs=0.5)
    assert own_seconds(session, 1.0) == 0.0


def test_harness_files_stay_in_the_home_folder() -> None:
    assert pack_home({HOME + "/.pi/agent/models.json": "{}"})
    for path in ("/etc/passwd", HOME + "/../../etc/x", HOME + "x/y"):
        with pytest.raises(HarnessError, match="only below"):
            pack_home({path: ""})


def test_patched_files() -> None:
    patch = b"diff --git a/x b/x\n+diff --git a/fake b/fake\n"
    patch += b'diff --git "a/\\303\\266" "b/\\303\\266"\ndiff --git a/p b/q b/p b/q\n'
    assert patched_files(patch) == ["x", "ö", "p b/q"]


# -- durable rows and scheduling ---------------------------------------------------------------------------------------

PLAN = Plan("r1", 0, ("r1.0.mini-swe-agent.a", "r1.0.mini-swe-agent.b"), 2)


def task(folder: Path, ident: str, instruction: str = "do it") -> Path:
    root = folder / ident
    (root / "repo").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "repo" / "a.txt").write_text("hello\n")
    (root / "instruction.md").write_text(instruction + "\n")
    (root / "tests" / "test_task.py").write_text("def test_it():\n    assert open('hello.txt').read() == 'hi\\n'\n")
    (root / "task.toml").write_text(
        f'format = "task/1"\nid = "{ident}"\nfamily = "shell"\nkind = "create"\nsplit = "train"\n'
        '[grade]\nrunner = "pytest"\nfail_to_pass = ["tests/test_task.py::test_it"]\n'
        "[sandbox]\nmemory_mb = 256\ndisk_mb = 32\nprocesses = 64\n"
    )
    return root


def test_store_continues_where_a_killed_rollout_stopped(tmp_path: Path) -> None:
    tasks = [load_task(task(tmp_path / "t", x)) for x in "ab"]
    out = tmp_path / "out"
    out.mkdir()
    store = Store(out, PLAN, 1, {})
    assert [j.attempt_id for j in store.left(tasks)] == PLAN.attempt_ids
    assert store.keep(builders.trajectory("a", 0)) is None
    assert store.keep(builders.trajectory("b", 1, outcome="engine_lost"), again=True) is None
    # Killed here, and begun anew:
    store = Store(out, PLAN, 1, {})
    left = store.left(tasks)
    assert [(j.attempt_id[-3:], [t["outcome"] for t in j.history]) for j in left] == [
        ("a.1", []),
        ("b.0", []),
        ("b.1", ["engine_lost"]),
    ]
    assert list(store.whole()) == []
    path = store.keep(builders.trajectory("a", 1))
    assert path == out / f"{PLAN.groups[0]}.parquet"
    shard = open_shard(path)
    assert [r["attempt"] for r in shard.rows()] == [0, 1] and shard.plan == PLAN
    assert [p.name for p in (out / ".partial").iterdir()] == ["r1.0.mini-swe-agent.b.1.parquet"]
    # An attempt lost for good makes its group whole, and a rerun takes it up again, in the shard's place.
    store.keep(builders.trajectory("b", 0))
    assert store.keep(builders.trajectory("b", 1, outcome="engine_lost")) and store.lost == 1
    store = Store(out, PLAN, 1, {})
    assert [j.attempt_id[-3:] for j in store.left(tasks)] == ["b.1"]
    assert list(store.whole()) == [path]
    store.keep(builders.trajectory("b", 1, patch=b"now"))
    assert len(list(store.whole())) == 2 and store.lost == 0 and not list((out / ".partial").iterdir())
    assert [r["patch"] for r in open_shard(out / f"{PLAN.groups[1]}.parquet").rows()] == [b"", b"now"]
    assert Store(out, PLAN, 1, {}).left(tasks) == []


def test_several_groups_in_one_shard_named_by_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path, PLAN, 2, {})
    made = [store.keep(builders.trajectory(t, n)) for t in "ba" for n in (1, 0)]
    assert made == [None, None, None, tmp_path / f"{PLAN.groups[0]}.parquet"]
    assert [r["attempt_id"] for r in open_shard(made[-1]).rows()] == PLAN.attempt_ids


class Scripted:
    """Outcomes by attempt, in order; the last one repeats. Counts how many run at once."""

    def __init__(self, **outcomes: list[str]):
        self.outcomes, self.running, self.most = outcomes, 0, 0
        self.cancelled: list[str] = []

    async def make(self, job: Job) -> dict[str, Any]:
        name = job.attempt_id.removeprefix("r1.0.mini-swe-agent.").replace(".", "")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            planned = self.outcomes.get(name, ["finished"])
            outcome = planned[min(len(job.history), len(planned) - 1)]
            if outcome == "hang":
                await asyncio.Event().wait()
            if outcome == "raise":
                raise RuntimeError(name)
            row = builders.trajectory(job.task.id, job.n, outcome=outcome, history=list(job.history))
            return {**row, "try": len(job.history)}
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            self.running -= 1


def scheduled(tmp_path: Path, scripted: Scripted, check: Any = None) -> tuple[Store, list[tuple[str, str, bool]]]:
    tasks = [load_task(task(tmp_path / "t", x)) for x in "ab"]
    out = tmp_path / "out"
    out.mkdir()
    store, ended = Store(out, PLAN, 1, {}), []

    async def fine() -> None:
        pass

    def note(row: dict[str, Any], again: bool, _path: Path | None) -> None:
        ended.append((row["attempt_id"][-3:], row["outcome"], again))

    work = make_all(
        store.left(tasks), scripted.make, store, concurrency=2, retries=2, check_engine=check or fine, ended=note
    )
    try:
        asyncio.run(work)
    finally:
        scripted.left = [p.name for p in (out / ".partial").iterdir()]  # type: ignore[attr-defined]
    return store, ended


def test_lost_attempts_are_tried_again_at_the_end_up_to_the_limit(tmp_path: Path) -> None:
    scripted = Scripted(a0=["engine_lost", "finished"], b1=["sandbox_lost"], b0=["harness_crash"])
    store, ended = scheduled(tmp_path, scripted)
    assert scripted.most == 2
    assert [e for e in ended if e[0] == "a.0"] == [("a.0", "engine_lost", True), ("a.0", "finished", False)]
    assert [e[2] for e in ended if e[0] == "b.1"] == [True, True, False]
    assert [e for e in ended if e[0] == "b.0"] == [("b.0", "harness_crash", False)]  # the model's own doing stands
    assert store.lost == 1
    rows = {r["attempt_id"][-3:]: r for path in store.whole() for r in open_shard(path).rows()}
    assert [(t["try"], t["outcome"]) for t in rows["b.1"]["history"]] == [(0, "sandbox_lost"), (1, "sandbox_lost")]
    assert rows["a.0"]["try"] == 1 and len(rows) == 4


def test_an_error_stops_the_round_and_keeps_what_ended(tmp_path: Path) -> None:
    scripted = Scripted(a1=["hang"], b0=["raise"])
    with pytest.raises(RuntimeError, match="b0"):
        scheduled(tmp_path, scripted)
    assert scripted.cancelled == ["a1"] and scripted.running == 0
    assert scripted.left == ["r1.0.mini-swe-agent.a.0.parquet"]  # type: ignore[attr-defined]


def test_a_lost_engine_that_does_not_answer_ends_the_round(tmp_path: Path) -> None:
    async def gone() -> None:
        raise ConnectionError("nobody there")

    scripted = Scripted(a0=["engine_lost"], a1=["hang"])
    with pytest.raises(ConnectionError):
        scheduled(tmp_path, scripted, gone)
    assert scripted.left == ["r1.0.mini-swe-agent.a.0.parquet"]  # type: ignore[attr-defined]


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
    {"match": "^make", "text": "echo hi > hello.txt; printf '\\x1b[31m%s' $KEY; env > /ws/repo/env.txt"},
    {"match": "^idle", "text": "true"},
    {"match": "^crash", "text": "kill -9 $PPID"},
    {"match": "^slow", "text": "echo hi > hello.txt; sleep 1000"},
    {"match": "^eat", "text": "python3 -c 'x = bytearray(1 << 30)'; kill -9 $PPID"},
    {"match": "^fill", "text": "cat /dev/zero >/tmp/zeros; kill -9 $PPID"},
    {"match": "^flood", "text": "head -c 9000000 /dev/urandom > big; true"},
    {"match": "^loop", "text": "echo hi >> hello.txt"},
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
    out, harness, good = tmp_path / "out", loop_harness(tmp_path), task(tmp_path / "t", "good")
    untested = task(tmp_path / "t", "untested")
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
        task(tmp_path, "t"),
        *("--out", tmp_path / "out", "--harness", loop_harness(tmp_path)),
        serve=lego_serve,
        env={"PATH": str(path)},
    )
    one_line(done, 1, "podman is not installed", "make setup")
    assert not (tmp_path / "out").exists()


@pytest.mark.podman
def test_every_ending_of_an_attempt(tmp_path: Path, lego_serve: str) -> None:
    """Each task's script brings about one outcome; all run in one round, blamed on the model."""
    folder = tmp_path / "t"
    wanted = {
        "make": "finished",
        "idle": "no_changes",
        "crash": "harness_crash",
        "slow": "time_limit",
        "eat": "out_of_memory",
        "fill": "disk_full",
        "flood": "patch_unusable",
    }
    paths = "\n".join(str(task(folder, name, f"{name} it")) for name in wanted)
    done = rollout(
        *("--out", tmp_path / "out", "--harness", loop_harness(tmp_path), "-n", 1, "-c", 3, "--time-limit", 20),
        serve=lego_serve,
        input=paths,
    )
    assert done.returncode == 0, done.stderr
    rows = {r["task_id"]: r for r in rows_of(done)}
    assert {t: r["outcome"] for t, r in rows.items()} == wanted
    assert {r["blame"] for r in rows.values()} == {"model"}
    made = rows["make"]
    assert made["patch_files"] == ["env.txt", "hello.txt"] and b"+hi\n" in made["patch"]
    # The key and control characters do not reach the row; the caller's environment does not reach the container.
    assert "\\x1b[31m***" in made["log_tail"]
    assert b"+HOME=/home/agent\n" in made["patch"] and b"LEGORL_SERVE" not in made["patch"]
    assert made["attempt_id"] == "run.0.loop.make.0" and made["group_id"] == "run.0.loop.make"
    assert [t["cause"] for t in made["turns"]] == ["root", "extend"] and not made["turns"][0]["foreign"]
    tree.check(made["turns"])
    assert made["weights"][0]["version"] == 0 and made["budgets"]["turns"] == {"limit": 16.0, "used": 2.0}
    assert rows["slow"]["budgets"]["seconds"]["used"] >= 20 and b"+hi\n" in rows["slow"]["patch"]
    assert len({r["seed"] for r in rows.values()}) == len(rows)
    assert done.stderr.count(" of 7 attempts") == 8  # one line a group, and one in all


@pytest.mark.podman
def test_budgets_stop_the_harness_and_its_patch_is_kept(tmp_path: Path, lego_serve: str) -> None:
    one = task(tmp_path / "t", "loop", "loop it")
    common = (one, "--harness", loop_harness(tmp_path), "-n", 1)
    turns = rollout(*common, "--out", tmp_path / "a", "--max-turns", 1, serve=lego_serve)
    tokens = rollout(*common, "--out", tmp_path / "b", "--max-tokens", 5, serve=lego_serve)
    (a,), (b,) = rows_of(turns), rows_of(tokens)
    assert (a["outcome"], len(a["turns"]), a["patch_files"]) == ("step_limit", 1, ["hello.txt"])
    assert (b["outcome"], b["budgets"]["tokens"]["used"]) == ("token_limit", 5)


@pytest.mark.podman
def test_a_lost_engine_is_retried_counted_and_taken_up_by_a_rerun(tmp_path: Path, lego_serve: str) -> None:
    """No script line fits this task: the engine fails it."""
    lost, good = task(tmp_path / "t", "lost", "unheard of"), task(tmp_path / "t", "good", "make it")
    argv = (lost, good, "--out", tmp_path / "out", "--harness", loop_harness(tmp_path), "-n", 1, "--retries", 1)
    first = rollout(*argv, serve=lego_serve)
    assert first.returncode == 3 and "1 of 2 attempts were lost" in first.stderr
    rows = {r["task_id"]: r for r in rows_of(first)}
    assert (rows["lost"]["outcome"], rows["lost"]["blame"], len(rows["lost"]["history"])) == ("engine_lost", "infra", 1)
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
    one = task(tmp_path / "t", "make", "make it")
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
    paths = [task(folder, "make", "make it"), task(folder, "slow", "slow it")]
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
    paths = [task(tmp_path / "t", "make", "make it"), task(tmp_path / "t", "slow", "slow it")]
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
