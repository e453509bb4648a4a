"""lego-grade, driven as a command on hand-made tasks. What attacks get is in tests/attacks."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attacks.arena import FIXED, WRONG, make_task
from builders import shard
from grading import GRADE, attempt, grade, make_patch, rows_of

from legorl import shards
from legorl.sandbox.podman import podman

pytestmark = pytest.mark.podman

NEW_FILE = "diff --git a/%s b/%s\nnew file mode 100644\n--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("tasks") / "mend-add")


def test_hidden_tests_win_over_a_link_and_a_slow_attempt_is_late(task: Path, tmp_path: Path) -> None:
    quick = make_task(tmp_path / "quick", timeout_s=6)
    hang = {"calc.py": "import time\n" + WRONG.replace("return a - b", "time.sleep(999)")}
    rows = [
        attempt(quick, 0, make_patch(quick, tmp_path, {"calc.py": FIXED, "tests": "-> /tmp", "evil": "-> /etc"})),
        attempt(quick, 1, make_patch(quick, tmp_path, hang)),
        attempt(quick, 2, b"this is no patch\n"),
        attempt(quick, 3, None, outcome="patch_unusable"),
        attempt(quick, 4, b"", outcome="engine_lost"),
        attempt(quick, 5, NEW_FILE.replace("%s", "../escape").encode()),
        attempt(quick, 6, NEW_FILE.replace("%s", ".git/hooks/post-commit").encode()),
    ]
    done = grade(shard(tmp_path / "g.parquet", rows), "--out", tmp_path / "out")
    linked, late, no_patch, none, lost, *bad = rows_of(tmp_path / "out" / "g.parquet")
    assert (linked["reward"], linked["flags"]) == (1.0, ["leaves_tree", "tests_touched"])
    assert late["reward"] == 0.0
    assert [t["got"] for t in late["tests"]] == ["timeout"] * 5
    assert (no_patch["outcome"], no_patch["blame"], no_patch["reward"]) == ("patch_unusable", "model", 0.0)
    for row in bad:
        assert (row["outcome"], row["blame"], row["reward"]) == ("patch_unusable", "model", 0.0)
    assert none["reward"] == 0.0
    assert (lost["outcome"], lost["reward"], lost["graded_at"]) == ("engine_lost", None, None)
    assert "graded 6: 1 resolved; 1 take no grade, 0 lost" in done.stderr


def test_turns_and_plan_come_through_and_a_rerun_does_nothing(task: Path, tmp_path: Path) -> None:
    source = shard(tmp_path / "g.parquet", [attempt(task, 0, b"")])
    argv = ("-", "--out", tmp_path / "out")
    first = grade(*argv, stdin=f"{source}\n")
    target = tmp_path / "out" / "g.parquet"
    before, after = shards.open_shard(source), shards.open_shard(target)
    assert after.plan == before.plan
    kept = [name for name in before.table().column_names if name not in ("detail",)]
    ungraded = [n for n in kept if before.rows()[0][n] is not None]
    assert after.table(ungraded).equals(before.table(ungraded))
    stamp = target.stat().st_ino, target.stat().st_mtime_ns
    # Without Podman on PATH nothing could be graded: the rerun must not need it.
    again = grade(*argv, stdin=f"{source}\n", PATH="/nonexistent")
    assert again.stdout == first.stdout == f"{target}\n"
    assert (target.stat().st_ino, target.stat().st_mtime_ns) == stamp


def test_an_attempt_that_was_tried_again_is_graded_again(task: Path, tmp_path: Path) -> None:
    solution = make_patch(task, tmp_path, {"calc.py": FIXED})
    lost = shard(tmp_path / "g.parquet", [attempt(task, 0, b"", outcome="engine_lost")])
    grade(lost, "--out", tmp_path / "out")
    shard(tmp_path / "g.parquet", [attempt(task, 0, solution) | {"try": 1}])
    grade(lost, "--out", tmp_path / "out")
    (row,) = rows_of(tmp_path / "out" / "g.parquet")
    assert (row["try"], row["reward"]) == (1, 1.0)


def test_several_graders_work_at_once_on_an_archive(task: Path, tmp_path: Path) -> None:
    rows = [attempt(task, n, make_patch(task, tmp_path, {"calc.py": text})) for n, text in enumerate((FIXED, WRONG))]
    archive = shard(tmp_path / "g.parquet", rows)
    before = archive.read_bytes()
    argv = [[*GRADE, str(archive), "--out", str(tmp_path / name)] for name in ("one", "two")]
    graders = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in argv]
    for grader in graders:
        _, words = grader.communicate(timeout=300)
        assert grader.returncode == 0, words
    found = [[row["reward"] for row in rows_of(tmp_path / name / "g.parquet")] for name in ("one", "two")]
    assert found == [[1.0, 0.0], [1.0, 0.0]]
    assert archive.read_bytes() == before


def test_a_cut_round_is_finished_and_reported(task: Path, tmp_path: Path) -> None:
    row = attempt(task, 0, b"")
    plan = shards.Plan(row["run"], row["step"], (row["group_id"], "r1.0.h.other"), 2)
    source = shard(tmp_path / "g.parquet", [row], plan=plan)
    done = grade(source, "--out", tmp_path / "out", check=False)
    assert done.returncode == 1
    assert "1 of 4 attempts" in done.stderr
    assert done.stdout == f"{tmp_path}/out/g.parquet\n"
    assert rows_of(tmp_path / "out" / "g.parquet")[0]["reward"] == 0.0


def refused(*argv: object, code: int = 1, stdin: str = "", **env: str) -> str:
    """Run a command that must fail with `code` and one line on stderr; return that line."""
    done = grade(*argv, stdin=stdin, check=False, **env)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    return line


def test_bad_input_gets_one_line(task: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    good = shard(tmp_path / "good.parquet", [attempt(task, 0, b"")])
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-20])
    assert "cut.parquet: not a whole Parquet file" in refused(cut, "--out", out)
    assert "no such file" in refused(tmp_path / "none.parquet", "--out", out)
    assert "lies in --out" in refused(good, "--out", tmp_path)
    assert "no shard arrived" in refused("-", "--out", out)
    assert "podman is not installed" in refused(good, "--out", out, PATH="/nonexistent")
    changed = attempt(task, 0, b"") | {"task_digest": "0" * 32}
    assert "has changed since the rollout" in refused(shard(tmp_path / "c.parquet", [changed]), "--out", out)
    assert [p.name for p in out.glob("*.parquet")] == []
    with shards.OutDir(tmp_path / "held", {"grader": "x"}):
        assert "is writing here" in refused(good, "--out", tmp_path / "held")
    assert "made with other settings" in refused(good, "--out", tmp_path / "held")


async def _container_of(run: str) -> str:
    """Wait for the container of `run` and return its name."""
    while True:
        listed = await podman("ps", "--filter", f"label=legorl.run={run}", "--format", "{{.Names}}")
        if names := listed.out.split():
            return names[0].decode()


def _process(program: str, container: str) -> int:
    """The pid of podman or conmon that holds `container`."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().decode(errors="replace").split("\0")
            if Path(words[0]).name == program and container in words:
                return int(entry.parent.name)
    raise AssertionError(f"no {program} holds {container}")


def test_what_happens_to_the_sandbox_from_outside_is_not_the_agents_doing(task: Path, tmp_path: Path) -> None:
    """Its container, the process that watches it, and the one that started it are killed: three ways to lose it."""
    hang = make_patch(task, tmp_path, {"calc.py": "import time\ntime.sleep(999)\n"})
    runs = [f"killed-{how}-{os.getpid()}" for how in ("container", "conmon", "podman")]
    paths = [shard(tmp_path / f"{run}.parquet", [attempt(task, 0, hang, run=run)]) for run in runs]
    argv = [*GRADE, *map(str, paths), "--out", str(tmp_path / "out"), "--retries", "0", "-c", "3"]

    async def kill() -> None:
        names = await asyncio.gather(*map(_container_of, runs))
        await podman("kill", "--signal", "KILL", names[0])
        os.kill(_process("conmon", names[1]), signal.SIGKILL)
        os.kill(_process("podman", names[2]), signal.SIGKILL)

    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        asyncio.run(asyncio.wait_for(kill(), 120))
        _, words = process.communicate(timeout=120)
    assert process.returncode == 3, words
    for path in paths:
        (row,) = rows_of(tmp_path / "out" / path.name)
        assert (row["outcome"], row["blame"], row["reward"]) == ("grader_crash", "infra", None)

    # The rerun tries them again; asked to stop, it leaves no container behind.
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        asyncio.run(asyncio.wait_for(_container_of(runs[0]), 120))
        process.terminate()
        _, words = process.communicate(timeout=120)
    assert process.returncode == 143, words
    for run in runs:
        listed = asyncio.run(podman("ps", "-a", "--filter", f"label=legorl.run={run}", "--format", "{{.Names}}"))
        assert listed.out.split() == []


def test_usage_needs_no_heavy_import() -> None:
    code = "import sys; sys.argv = ['lego-grade', '--help']; from legorl.commands.grade.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\nprint({'torch', 'vllm', 'transformers', 'duckdb'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("set()")
    assert "Examples:" in done.stdout
