"""Task folders: read, refused with the part that is wrong, digested and packed without owners or times."""

import io
import os
import tarfile

import pytest

from legorl import task
from legorl.task import TaskError, load_task, pack

TOML = """
format = "task/1"
id = "shell-0001-rename"
family = "shell"
kind = "rename"
level = 2
split = "train"
[grade]
runner = "pytest"
fail_to_pass = ["tests/test_task.py::test_renamed"]
timeout_s = 30
[sandbox]
memory_mb = 256
"""


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "task"
    (path / "repo" / "src").mkdir(parents=True)
    (path / "tests").mkdir()
    (path / "task.toml").write_text(TOML)
    (path / "instruction.md").write_text("Rename a to b.\n")
    (path / "repo" / "src" / "a.txt").write_text("a\n")
    (path / "tests" / "test_task.py").write_text("def test_renamed(): assert False\n")
    (path / "solution.patch").write_bytes(b"diff --git a/a b/b\n")
    return path


def test_a_task_is_read_with_its_defaults(folder):
    one = load_task(folder)
    assert (one.id, one.family, one.kind, one.level, one.split) == ("shell-0001-rename", "shell", "rename", 2, "train")
    assert one.instruction == "Rename a to b."
    assert one.solution == b"diff --git a/a b/b\n"
    assert one.grade == task.Grade("pytest", ("tests/test_task.py::test_renamed",), (), 30.0)
    assert one.limits == task.Limits(memory_mb=256)
    assert one.path.is_absolute()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('format = "task/1"', 'format = "task/9"', "task/9"),
        ('id = "shell-0001-rename"', 'id = "../up"', "'../up'"),
        ('id = "shell-0001-rename"', "", "no key 'id'"),
        ('split = "train"', 'split = "exam"', "'exam'"),
        ('runner = "pytest"', 'runner = "make"', "'make'"),
        ('runner = "pytest"', 'runner = "script"', "needs grade.command"),
        ('runner = "pytest"', 'runner = "log"\ncommand = ["x"]\nparser = "parse_log_cobol"', "parse_log_cobol"),
        ('runner = "pytest"', 'runner = "pytest"\nsemantics = "kind"', "'kind'"),
        ('runner = "pytest"', 'runner = "pytest"\ntest_paths = ["../up"]', "leaves the repository"),
        ('runner = "pytest"', 'runner = "pytest"\ntests_at = "/a/../b"', "no plain path"),
        ('runner = "pytest"', 'runner = "pytest"\nlikes = 1', "likes"),
        ('["tests/test_task.py::test_renamed"]', "[]", "no tests"),
        ("memory_mb = 256", "memory = 256", "memory"),
        ("[grade]", "[grade", "task.toml"),
    ],
)
def test_a_wrong_task_file_is_refused_with_what_is_wrong(folder, old, new, says):
    assert old in TOML
    (folder / "task.toml").write_text(TOML.replace(old, new))
    with pytest.raises(TaskError) as error:
        load_task(folder)
    assert says in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "repo", "tests"])
def test_a_missing_part_is_named(folder, name):
    (folder / name).rename(folder / f"{name}.away")
    with pytest.raises(TaskError, match=rf"{name}|no tests"):
        load_task(folder)


def test_a_task_without_a_solution_can_be_read_but_not_solved(folder):
    (folder / "solution.patch").unlink()
    with pytest.raises(TaskError, match=r"no solution\.patch"):
        _ = load_task(folder).solution


def change_content(folder):
    (folder / "repo/src/a.txt").write_text("b\n")


def change_name(folder):
    (folder / "repo/src/a.txt").rename(folder / "repo/src/b.txt")


def change_mode(folder):
    (folder / "repo/src/a.txt").chmod(0o755)


def change_hidden_test(folder):
    (folder / "tests/test_task.py").write_text("def test_renamed(): pass\n")


def change_to_link(folder):
    (folder / "repo/src/a.txt").unlink()
    (folder / "repo/src/a.txt").symlink_to("a\n")


def change_boundary(folder):
    """The same bytes in a row, cut into name and content at another place."""
    (folder / "repo/src/a.txt").unlink()
    (folder / "repo/src/a.txta").write_text("\n")


CHANGES = [value for name, value in list(globals().items()) if name.startswith("change_")]


def test_what_counts_as_kept_depends_on_the_semantics():
    strict, kind = (task.Grade("pytest", ("f",), ("p",), 1.0, semantics=s) for s in task.SEMANTICS)
    assert [strict.holds(got, forward) for got in ("pass", "xfail", "skip") for forward in (True, False)] == [
        *(True, True),
        *(False,) * 4,
    ]
    assert kind.holds("xfail", forward=True)
    assert [kind.holds("skip", forward) for forward in (True, False)] == [False, True]
    assert not any(kind.holds(got, forward=False) for got in ("fail", "error", "missing", "xpass", "timeout"))


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_every_change_changes_the_digest(folder, change):
    before = load_task(folder).digest
    assert load_task(folder).digest == before
    change(folder)
    assert load_task(folder).digest != before


def test_the_digest_ignores_times_and_place(folder, tmp_path):
    before = load_task(folder).digest
    os.utime(folder / "repo/src/a.txt", (0, 0))
    folder.rename(tmp_path / "elsewhere")
    assert load_task(tmp_path / "elsewhere").digest == before


def test_a_pack_holds_both_names_of_a_hard_link(tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    with tarfile.open(fileobj=io.BytesIO(pack(tmp_path))) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == {"a": b"one", "b": b"one"}


def test_a_pack_is_deterministic_and_holds_no_owner_or_time(folder):
    repo = folder / "repo"
    (repo / "run.sh").write_text("#!/bin/sh\n")
    (repo / "run.sh").chmod(0o750)
    (repo / "link").symlink_to("src/a.txt")
    os.mkfifo(repo / "pipe")
    packed = pack(repo)
    os.utime(repo / "run.sh", (0, 0))
    assert pack(repo) == packed
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = {m.name: m for m in tar.getmembers()}
        assert {name: m.mode for name, m in members.items() if not m.issym()} == {
            "run.sh": 0o755,
            "src": 0o755,
            "src/a.txt": 0o644,
        }
        assert members["link"].linkname == "src/a.txt"
        assert tar.extractfile("src/a.txt").read() == b"a\n"
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members.values()} == {(0, 0, "", "", 0)}
