"""From three trees of a repository to a task folder: what importers of rows and of commits have in common.

The agent gets `repo`. `fixed` is the same with the solution, `tested` the same with the hidden tests. The files by
which `tested` differs go to tests/, laid over the repository's root; whatever else lies in the folders of tests that
they belong to is put back by lego-grade from the pristine repository.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from legorl.commands.tasks.folders import Skip, sandbox_limits, to_toml
from legorl.commands.tasks.git_trees import SUBMODULE, GitError, SubmoduleMissing, Trees
from legorl.task import TASK_FORMAT

TEST_FOLDERS = ("tests", "test", "testing", "e2e")  # as SWE-bench tells test files from others
SOURCE_FOLDERS = ("src", "lib")


@dataclass(frozen=True)
class Options:
    """What an importer is told. image: for the sandboxes, "" the base image, "row" what the row names; python in it."""

    family: str = "swe-bench"
    split: str = "heldout"
    semantics: str = "swe-bench"
    image: str = ""
    memory_mb: int = 1024
    timeout_s: float = 300.0
    python: str = ""


@dataclass(frozen=True)
class Triple:
    """Tree ids: the repository, the same with the solution, the same with the hidden tests."""

    repo: str
    fixed: str
    tested: str


def write_trees(
    three: Triple, trees: Trees, folder: Path, tests: Sequence[str], options: Options, fields: dict[str, Any]
) -> None:
    """Fill `folder` with the task of `three`; `tests` are the ids it lists. Raises Skip.

    fields: id, kind, instruction, image, python, grade (runner, fail_to_pass, pass_to_pass, and more), labels.
    """
    try:
        solution = trees.diff(three.repo, three.fixed)
        changed = trees.changed(three.repo, three.tested)
        gold = {path for _, path in trees.changed(three.repo, three.fixed)}
        modes = {entry.path: entry.mode for tree in (three.fixed, three.tested) for entry in trees.entries(tree)}
        hidden = {path for status, path in changed if status != "D"}
        touched = gold | {path for _, path in changed}
        if moved := [path for path in touched if modes.get(path) == SUBMODULE]:
            raise Skip("moves a submodule", repr(moved[0]))
        if not solution:
            raise Skip("its solution changes nothing")
        if not hidden:
            raise Skip("it has no hidden tests")
        size = trees.write(three.repo, folder / "repo")
        size += trees.write(three.tested, folder / "tests", hidden)
        names = {entry.name for entry in trees.entries(three.tested)}
    except SubmoduleMissing as error:
        raise Skip("a submodule has no clone", str(error)) from error
    except GitError as error:
        raise Skip("git could not", str(error)) from error
    grade = {
        "runner": "pytest",
        "semantics": options.semantics,
        "timeout_s": options.timeout_s,
        "files": sorted({name for name in (test.partition("::")[0] for test in tests) if name in names}),
        "test_paths": test_paths({_text(path) for _, path in changed}, {_text(path, "replace") for path in gold}),
        "tests_at": ".",
        "removed": sorted(_text(path) for status, path in changed if status == "D"),
        "python_path": python_path(names),
        **fields["grade"],
    }
    if grade["runner"] == "pytest" and not grade["files"]:
        raise Skip("none of its tests' files is in the tree", repr(tests[0]))
    places = {name: fields[name] for name in ("image", "python") if fields.get(name)}
    sandbox = {**sandbox_limits(size, options.memory_mb), **places}
    table = {
        "format": TASK_FORMAT,
        "id": fields["id"],
        "family": options.family,
        "kind": fields["kind"],
        "level": 0,
        "split": options.split,
        "grade": grade,
        "sandbox": sandbox,
        "labels": fields["labels"],
    }
    (folder / "task.toml").write_text(to_toml(table), encoding="utf-8")
    statement = fields["instruction"].strip() + "\n"
    (folder / "instruction.md").write_text(statement, encoding="utf-8", errors="backslashreplace", newline="")
    (folder / "solution.patch").write_bytes(solution)


def _text(path: bytes, errors: str = "strict") -> str:
    try:
        return path.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise Skip("a test file's name is not UTF-8", repr(path)) from error


def is_test(path: str) -> bool:
    """Does `path` belong to the tests, by its folder or by its name?"""
    *folders, name = path.split("/")
    named = name.startswith("test_") or name.endswith(("_test.py", "_tests.py")) or name in ("conftest.py", "tests.py")
    return named or any(folder in TEST_FOLDERS for folder in folders)


def test_paths(changed: set[str], gold: set[str]) -> list[str]:
    """Return the folders of tests that hold `changed`, or, where the solution works in such a folder, the files."""
    found = set()
    for path in changed:
        parts = PurePosixPath(path).parts
        places = [k for k, part in enumerate(parts[:-1]) if part in TEST_FOLDERS]
        folder = "/".join(parts[: places[0] + 1]) if places else path
        found.add(path if any(other.startswith(f"{folder}/") for other in gold) else folder)
    return sorted(name for name in found if not any(name.startswith(f"{other}/") for other in found))


def python_path(names: set[str]) -> list[str]:
    """Return the folders that the repository's modules are imported from: src or lib where it keeps them, the root."""
    sources = [s for s in SOURCE_FOLDERS if any(n.startswith(f"{s}/") and n.endswith(".py") for n in names)]
    plain = [s for s in sources if f"{s}/__init__.py" not in names]
    return [*plain, "."]
