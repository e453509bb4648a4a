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
from legorl.commands.tasks.check import Finding, attempts_of, judge
from legorl.commands.tasks.check_cli import MOST_LINES, _table
from legorl.task import load_task

TASKS = str(Path(sys.executable).with_name("lego-tasks"))
NAMES = ("new", "gone", "kept")


def graded(*results: dict[str, str], reward: float | None = 0.0) -> list[dict]:
    """Rows of one task: results of empty and solution by turns."""
    return [
        {
            "attempt": number,
            "outcome": "finished",
            "blame": "model",
            "reward": reward,
            "flags": [],
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
        ((BEFORE | {"gone": "both_ways"}, AFTER | {"gone": "both_ways"}), "gone passes already", "gone: both_ways"),
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


def test_what_was_not_graded_is_lost_and_what_the_task_broke_is_its_own_fault(task) -> None:
    rows = graded(BEFORE, AFTER, reward=None)
    lost = judge(task, [row | {"outcome": "image_missing", "blame": "infra"} for row in rows])
    assert not lost.ok and lost.lost == "could not be graded: image_missing, no sandbox" and lost.empty is None
    broken = judge(task, [row | {"outcome": "task_broken", "blame": "task"} for row in rows])
    assert not broken.ok and (broken.task, broken.lost) == ("no sandbox", None)


def test_a_solution_that_does_not_apply_is_named_with_the_reason(task) -> None:
    rows = graded(BEFORE, dict.fromkeys(NAMES, "missing"))
    rows[1] |= {"outcome": "patch_unusable", "detail": "error: a.txt: No such file; b"}
    assert judge(task, rows).faults() == [("solution", "solution.patch does not apply: error: a.txt: No such file, b")]


def test_a_canary_holds_if_only_its_own_test_fails_with_the_solution(task) -> None:
    canary = replace(task, labels={"canary": "tests/t.py::new"})
    assert judge(task, graded(BEFORE, AFTER)).ok
    assert judge(canary, graded(BEFORE, AFTER | {"new": "fail"})).ok
    assert judge(canary, graded(BEFORE | {"new": "pass"}, AFTER | {"new": "fail"})).ok
    assert judge(canary, graded(BEFORE, AFTER)).solution == "new makes it no canary: pass"
    assert judge(canary, graded(BEFORE, AFTER | {"new": "fail", "gone": "fail"})).solution == "gone: fail"
    rows = graded(BEFORE, AFTER | {"new": "fail"})
    rows[0]["flags"] = ["canary", "canary_passed"]
    assert judge(canary, rows).empty == "the canary passes"


def test_the_table_names_each_fault_once_and_the_first_ones_only(task) -> None:
    many = Finding("long", "p", empty="; ".join(f"t{n} passes already" for n in range(9)), solution="x: fail")
    lines = list(_table([Finding("a", "p", lost="no disk"), many]))
    assert [line.split()[0] for line in lines[:3]] == ["task", "a", "long"]
    assert lines[1].endswith("lost          no disk") and len(lines) == 3 + MOST_LINES
    assert lines[-1].strip() == "... and 4 more"
    assert list(_table([])) == []


def test_attempts_are_rows_of_the_schema(task, tmp_path: Path) -> None:
    rows = attempts_of(task, runs=2)
    path = shards.write_shard(tmp_path / "a.parquet", rows, shards.make_meta())
    table = shards.open_shard(path).table()
    assert table.schema.remove_metadata() == schema.TRAJECTORY
    assert table.column("patch").to_pylist() == [b"", task.solution, b"", task.solution]
    assert table.column("outcome").to_pylist() == ["no_changes", "finished"] * 2


@pytest.mark.podman
def test_good_and_broken_tasks_and_canaries(made: list[Path], tmp_path: Path) -> None:
    def one(kind: str) -> Path:
        return next(write_tasks([shell.make(kind, 0, "train", 7, 2)], tmp_path / "set"))

    idle, spoiled, unsolved, unbuilt, absent, false = map(one, ("append", "copy", "move", "sort", "unique", "create"))
    (spoiled / "solution.patch").write_bytes((idle / "solution.patch").read_bytes())  # of another task: does not apply
    tests = idle / "tests" / "test_task.py"
    name = load_task(idle).grade.fail_to_pass[0].partition("::")[2]
    tests.write_text(tests.read_text() + f"\n\ndef {name}():\n    pass\n")
    (unsolved / "solution.patch").unlink()
    (unbuilt / "environment").mkdir()
    (unbuilt / "environment" / "Dockerfile").write_text("FROM localhost/legorl-base:1\nRUN echo whoops >&2; exit 3\n")
    for task, line in ((unbuilt, 'image = "environment/Dockerfile"'), (absent, 'image = "localhost/legorl-absent:1"')):
        toml = (task / "task.toml").read_text()
        (task / "task.toml").write_text(toml + ("" if "[sandbox]" in toml else "[sandbox]\n") + line + "\n")
    toml = (false / "task.toml").read_text()
    only = load_task(false).grade.fail_to_pass[0]
    assert "[labels]\n" in toml
    (false / "task.toml").write_text(toml.replace("[labels]\n", f'[labels]\ncanary = "{only}"\n'))
    folder = tmp_path / "set" / "no-task"
    folder.mkdir()
    (folder / "task.toml").write_text("format = 1\n")

    broken = [idle, spoiled, unsolved, unbuilt, absent, false, folder]
    arguments = ["check", "-", "--runs", "1", "-c", "4", "--out", str(tmp_path / "work"), "--canary", "0.1"]
    paths = "\n".join(map(str, [*made, *broken]))
    done = subprocess.run([TASKS, *arguments], input=paths, capture_output=True, text=True)
    assert done.returncode == options.CHECK, done.stderr
    canaries = sorted(set(done.stdout.splitlines()) - set(map(str, made)))
    assert sorted([*map(str, made), *canaries]) == sorted(done.stdout.splitlines()), done.stderr
    assert len(canaries) == 1 and canaries[0].startswith(str(tmp_path / "work" / "canaries"))
    assert load_task(canaries[0]).canary.endswith("_2")
    assert f"{len(made) + 1} of {len(made) + len(broken) + 1} tasks hold" in done.stderr
    assert "1 of 2 canaries are impossible" in done.stderr

    found = {json.loads(line)["id"]: json.loads(line) for line in _again(arguments, paths)}
    assert [found[path.name]["ok"] for path in made] == [True] * len(made)
    assert (found[idle.name]["empty"], found[idle.name]["solution"]) == (f"{name} passes already", f"{name}: both_ways")
    assert found[spoiled.name]["solution"].startswith("solution.patch does not apply: grading: error: ")
    assert found[unsolved.name]["task"].startswith("no solution.patch")
    assert "whoops" in found[unbuilt.name]["task"] and "exit status 3" in found[unbuilt.name]["task"]
    assert "image_missing" in found[absent.name]["lost"] and "localhost/legorl-absent:1" in found[absent.name]["lost"]
    assert found[false.name]["empty"] == found[false.name]["solution"] == "the canary passes"
    assert "format 1" in found[folder.name]["task"]
    for task in broken:
        assert task.name in done.stderr.splitlines()[-1] or task == absent
    flags = {row["attempt"]: (row["reward"], row["resolved"], row["flags"]) for row in _rows(tmp_path / "work", false)}
    assert flags == {0: (0.0, False, ["canary"]), 1: (0.0, False, ["canary", "canary_passed"])}


def _again(arguments: list[str], paths: str) -> list[str]:
    """Check again, for JSON: what was graded is not graded twice, and the same is found."""
    graded = Path(arguments[arguments.index("--out") + 1]) / "graded"
    shards_of = {path: shards.open_shard(path).rows(["reward"]) for path in graded.glob("*.parquet")}
    before = {path: path.stat().st_mtime_ns for path, rows in shards_of.items() if rows[0]["reward"] is not None}
    assert len(before) == len(shards_of) - 2
    done = subprocess.run([TASKS, *arguments, "--json"], input=paths, capture_output=True, text=True)
    assert done.returncode == options.CHECK, done.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    return done.stdout.splitlines()


def _rows(work: Path, task: Path) -> list[dict]:
    return shards.open_shard(work / "graded" / f"check.0.check.{task.name}.parquet").rows()


def test_canaries_need_a_place_to_stay(tmp_path: Path) -> None:
    done = subprocess.run([TASKS, "check", str(tmp_path), "--canary", "0.1"], capture_output=True, text=True)
    assert done.returncode == options.USAGE and "--out" in done.stderr
