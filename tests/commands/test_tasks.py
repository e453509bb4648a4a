"""lego-tasks by its command: sets are made, continued, locked, listed; what is wrong gets one line and an exit code."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl import options
from legorl.commands.tasks import build
from legorl.commands.tasks.build import Draft, Node
from legorl.shards import OutDir
from legorl.task import TaskError, load_task

TASKS = str(Path(sys.executable).with_name("lego-tasks"))


def lego_tasks(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([TASKS, *map(str, arguments)], input=stdin, capture_output=True, text=True)


def lines(*arguments: str | Path, stdin: str = "") -> list[str]:
    done = lego_tasks(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sets."""
    folder = tmp_path_factory.mktemp("tasks")
    lines("shell", "--out", folder / "shell", "--count", "60", "--seed", "1", "--level", "0", "--level", "1")
    lines("snippets", "--out", folder / "snippets")
    return folder


def draft(**changes: object) -> Draft:
    def solve(folder: Path) -> None:
        (folder / "b.txt").write_text("b\n")

    fields = {
        "id": "t",
        "family": "f",
        "kind": "k",
        "level": 0,
        "split": "train",
        "instruction": "Do it.",
        "repo": {"a.txt": Node(b"a\n")},
        "test_source": "def test_b():\n    assert open('b.txt').read() == 'b\\n'\n",
        "fail_to_pass": ("test_b",),
        "pass_to_pass": (),
        "solve": solve,
    }
    return Draft(**{**fields, **changes})


# Making sets


def test_a_set_is_made_and_made_again(tmp_path: Path) -> None:
    arguments = ("shell", "--out", tmp_path / "set", "--seed", "4", "--kind", "sort", "--kind", "pack")
    first = lines(*arguments, "--count", "4")
    assert len(first) == 4
    before = {path: load_task(path).digest for path in first}
    assert lines(*arguments, "--count", "6")[:4] == first
    assert lines(*arguments, "--count", "4") == first
    assert {path: load_task(path).digest for path in first} == before


def test_what_a_killed_build_left_is_made_anew(tmp_path: Path) -> None:
    arguments = ("shell", "--out", tmp_path / "set", "--count", "2", "--kind", "rename")
    first = lines(*arguments)
    half = tmp_path / "set" / build.PARTIAL / Path(first[1]).name
    half.parent.mkdir()
    Path(first[1]).rename(half)
    (half / "task.toml").unlink()
    assert lines(*arguments) == first
    assert load_task(first[1]).kind == "rename"
    assert not half.exists()


def test_other_settings_are_refused(tasks: Path) -> None:
    done = lego_tasks("shell", "--out", tasks / "shell", "--count", "60", "--seed", "2", "--level", "0", "--level", "1")
    assert done.returncode == options.FAILED
    assert "seed: was 1, now 2" in done.stderr
    assert done.stdout == ""


def test_two_writers(tmp_path: Path) -> None:
    with OutDir(tmp_path / "set", {}):
        done = lego_tasks("snippets", "--out", tmp_path / "set")
    assert done.returncode == options.FAILED
    assert "is writing here" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("shell", "--count", "1"), options.USAGE, "--out"),
        (("shell", "--out", "x", "--count", "0"), options.USAGE, "--count"),
        (
            ("shell", "--out", "x", "--count", "1", "--kind", "sorting"),
            options.USAGE,
            "no kind 'sorting'; there are: create,",
        ),
        (("shell", "--out", "x", "--count", "1", "--level", "4"), options.USAGE, "no level 4"),
        (("shell", "--out", "x", "--count", "1", "--split", "test"), options.USAGE, "'test'"),
        (
            ("shell", "--out", "x", "--count", "1", "--kind", "tally", "--split", "train"),
            options.FAILED,
            "nothing to make",
        ),
        (("list", "nowhere"), options.FAILED, "nowhere: no such folder"),
        (("check", "nowhere"), options.FAILED, "nowhere: no such folder"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = lego_tasks(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# Listing


def test_list_selects(tasks: Path) -> None:
    everything = lines("list", tasks)
    assert len(everything) == 60 + len(list((tasks / "snippets").glob("*/task.toml")))
    assert {load_task(path).level for path in lines("list", tasks, "--level", "1")} == {1}
    assert {load_task(path).family for path in lines("list", tasks, "--family", "snippets")} == {"snippets"}
    both = lines("list", tasks, "--split", "train", "--split", "unseen", "--family", "shell")
    assert {load_task(path).split for path in both} == {"train", "unseen"}
    assert len(lines("list", tasks / "shell", "--kind", "no-such-kind")) == 0


def test_list_reads_paths_from_stdin(tasks: Path) -> None:
    chosen = lines("list", tasks, "--split", "heldout")[:3]
    assert lines("list", "-", stdin="\n".join(chosen)) == chosen
    assert lines("list", stdin="\n".join(chosen)) == chosen


def test_list_as_json(tasks: Path) -> None:
    found = [json.loads(line) for line in lines("list", tasks / "snippets", "--json")]
    one = next(each for each in found if each["kind"] == "off-by-one")
    assert one["id"] == "snippets-page-count"
    assert load_task(one["path"]).instruction == one["instruction"]
    assert (one["level"], one["split"], one["fail_to_pass"], one["pass_to_pass"]) == (0, "train", 2, 2)


def test_list_stops_with_its_reader(tasks: Path) -> None:
    done = subprocess.run(
        f"set -o pipefail; {TASKS} list {tasks} | head -n 1",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_an_unusable_task_is_named(tmp_path: Path) -> None:
    (path,) = build.write_tasks([draft()], tmp_path / "set")
    (path / "tests" / "test_task.py").unlink()
    done = lego_tasks("list", tmp_path)
    assert done.returncode == options.FAILED
    assert "a task with no tests cannot be graded" in done.stderr


# Writing tasks


def test_a_task_is_written(tmp_path: Path) -> None:
    repo = {
        "a.txt": Node(b"a\n"),
        "bin/run me": Node(b"#!/bin/sh\n", executable=True),
        "link": Node(link="a.txt"),
        "ü\t.txt": Node(b"\r\n\x00"),
        ".gitignore": Node(b"*.log\n"),
        "old.log": Node(b"old\n"),
    }

    def solve(folder: Path) -> None:
        for name in ("new.log", "old.log", "b.txt"):
            (folder / name).write_text("new\n")

    (path,) = build.write_tasks([draft(repo=repo, solve=solve)], tmp_path / "set")
    task = load_task(path)
    assert (task.repo / "bin/run me").stat().st_mode & 0o111
    assert (task.repo / "link").readlink() == Path("a.txt")
    assert (task.repo / "ü\t.txt").read_bytes() == b"\r\n\x00"
    # As git has it for an agent: a tracked file counts though it is ignored, a new one does not.
    assert [line for line in task.solution.decode().splitlines() if line.startswith("diff")] == [
        "diff --git a/b.txt b/b.txt",
        "diff --git a/old.log b/old.log",
    ]


def test_a_solution_that_fails_or_changes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="t: its solution changes nothing"):
        list(build.write_tasks([draft(solve=lambda folder: None)], tmp_path / "a"))
    with pytest.raises(TaskError, match="t: solution exits 3: 'echo oh no >&2; exit 3': oh no"):
        list(build.write_tasks([draft(solve=lambda f: build.run_command("echo oh no >&2; exit 3", f))], tmp_path / "b"))
    assert list(tmp_path.glob("*/t")) == []


def test_the_user_s_git_configuration_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".gitconfig").write_text(
        "[diff]\n\tnoprefix = true\n[core]\n\tautocrlf = true\n\texcludesFile = ~/ignore\n"
    )
    (tmp_path / "ignore").write_text("*\n")
    (one,) = build.write_tasks([draft()], tmp_path / "one")
    monkeypatch.setenv("HOME", str(tmp_path))
    (two,) = build.write_tasks([draft()], tmp_path / "two")
    assert load_task(one).solution == load_task(two).solution != b""


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_label_survives_task_toml(text: str) -> None:
    data = tomllib.loads(build._toml(draft(labels={"solution_command": text})))
    assert data["labels"]["solution_command"] == text
    assert data["grade"]["fail_to_pass"] == ["tests/test_task.py::test_b"]
