"""lego-tasks check: what it concludes from grades, and one real run through lego-grade over good and broken tasks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from legorl import options, schema, shards
from legorl.commands.tasks import shell, snippets
from legorl.commands.tasks.build import write_tasks
from legorl.commands.tasks.check import attempts_of, judge
from legorl.options import Failure
from legorl.task import TaskError, load_task

TASKS = str(Path(sys.executable).with_name("lego-tasks"))
NAMES = ("new", "gone", "kept")


def graded(*results: dict[str, str], reward: float | None = 0.0) -> list[dict]:
    """Rows of one task: results of empty and solution by turns."""
    return [
        {
            "attempt": number,
            "reward": reward,
            "detail": "no sandbox",
            "tests": [{"id": f"tests/t.py::{name}", "wanted": "pass", "got": got} for name, got in result.items()],
        }
        for number, result in enumerate(results)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    drafts = [shell.make(kind, level, "train", 0, 2) for kind, level in (("rename", 0), ("executable", 3), ("pack", 1))]
    some = [draft for draft in snippets.drafts() if draft.kind in ("off-by-one", "unicode")]
    return list(write_tasks([*drafts, *some], tmp_path_factory.mktemp("checked") / "set"))


@pytest.fixture
def task(tmp_path: Path):
    (path,) = write_tasks([shell.make("rename", 0, "train", 0, 2)], tmp_path / "one")
    toml = path / "task.toml"
    start, end = toml.read_text().split("fail_to_pass")[0], toml.read_text().split("timeout_s")[1]
    lists = 'fail_to_pass = ["tests/t.py::new", "tests/t.py::gone"]\npass_to_pass = ["tests/t.py::kept"]\ntimeout_s'
    toml.write_text(start + lists + end)
    return load_task(path)


BEFORE = {"new": "fail", "gone": "missing", "kept": "pass"}
AFTER = dict.fromkeys(NAMES, "pass")


@pytest.mark.parametrize(
    ("results", "empty", "solution"),
    [
        ((BEFORE, AFTER), None, None),
        ((BEFORE, AFTER, BEFORE, AFTER), None, None),
        ((BEFORE | {"gone": "pass"}, AFTER), "gone passes already", None),
        ((BEFORE | {"kept": "fail"}, AFTER), "kept: fail", None),
        ((BEFORE, AFTER | {"new": "fail", "kept": "skip"}), None, "new: fail; kept: skip"),
        ((BEFORE, AFTER, BEFORE, AFTER | {"kept": "fail"}), None, "runs disagree on kept: pass, fail"),
        ((BEFORE, AFTER, BEFORE | {"new": "error"}, AFTER), "runs disagree on new: fail, error", None),
        ((BEFORE, {"new": "pass", "gone": "pass"}), None, "kept: missing"),
    ],
)
def test_findings(task, results: tuple[dict[str, str], ...], empty: str | None, solution: str | None) -> None:
    finding = judge(task, graded(*results))
    assert (finding.empty, finding.solution) == (empty, solution)
    assert finding.ok == (empty is None and solution is None)


def test_what_counts_is_what_the_task_says_counts(task) -> None:
    rows = graded(BEFORE | {"kept": "skip"}, AFTER | {"kept": "skip", "gone": "xfail"})
    assert judge(task, rows).solution == "gone: xfail; kept: skip"
    kind = replace(task, grade=replace(task.grade, semantics="swe-bench"))
    assert judge(kind, rows).ok


def test_what_was_not_graded_is_no_finding(task) -> None:
    with pytest.raises(Failure, match="could not be graded \\(no sandbox\\)") as caught:
        judge(task, graded(BEFORE, AFTER, reward=None))
    assert caught.value.code == options.LOST


def test_attempts_are_rows_of_the_schema(task, tmp_path: Path) -> None:
    rows = attempts_of(task, runs=2)
    path = shards.write_shard(tmp_path / "a.parquet", rows, shards.make_meta())
    table = shards.open_shard(path).table()
    assert table.schema.remove_metadata() == schema.TRAJECTORY
    assert table.column("patch").to_pylist() == [b"", task.solution, b"", task.solution]
    assert table.column("outcome").to_pylist() == ["no_changes", "finished"] * 2


def test_a_task_without_a_solution_cannot_be_proved(task) -> None:
    (task.path / "solution.patch").unlink()
    with pytest.raises(TaskError, match=r"no solution\.patch"):
        attempts_of(task, runs=1)


@pytest.mark.podman
def test_good_and_broken_tasks(made: list[Path], tmp_path: Path) -> None:
    idle, spoiled = (
        next(write_tasks([shell.make(kind, 0, "train", 7, 2)], tmp_path / "set")) for kind in ("append", "copy")
    )
    (spoiled / "solution.patch").write_bytes((idle / "solution.patch").read_bytes())  # of another task: does not apply
    tests = idle / "tests" / "test_task.py"
    name = load_task(idle).grade.fail_to_pass[0].partition("::")[2]
    tests.write_text(tests.read_text() + f"\n\ndef {name}():\n    pass\n")
    arguments = ["check", "-", "--runs", "1", "-c", "3", "--out", str(tmp_path / "work"), "--json"]
    paths = "\n".join(map(str, [*made, idle, spoiled]))
    done = subprocess.run([TASKS, *arguments], input=paths, capture_output=True, text=True)
    assert done.returncode == options.CHECK, done.stderr
    found = {each["id"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert [found[path.name]["ok"] for path in made] == [True] * len(made)
    assert found[idle.name]["empty"] == f"{name} passes already"
    assert found[idle.name]["solution"] is None
    assert found[spoiled.name]["empty"] is None
    assert "missing" in found[spoiled.name]["solution"]
    assert f"{len(made)} of {len(found)} tasks hold" in done.stderr

    # Again: nothing is graded twice, and the same is found.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work" / "graded").glob("*.parquet")}
    again = subprocess.run([TASKS, *arguments], input=paths, capture_output=True, text=True)
    assert sorted(again.stdout.splitlines()) == sorted(done.stdout.splitlines())
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.podman
def test_a_table_for_people(made: list[Path]) -> None:
    done = subprocess.run([TASKS, "check", made[0], "--runs", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, line = done.stdout.splitlines()
    assert head.split() == ["task", "empty", "solution"]
    assert line.split() == [made[0].name, "ok", "ok"]
