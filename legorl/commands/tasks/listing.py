"""Find the task folders under a path and select among them by their labels."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.task import Task, TaskError, load_task


def task_folders(path: Path) -> Iterator[Path]:
    """Yield the task folders at or under `path`, sorted by name at every depth; hidden folders are passed over.

    Raises TaskError if there is none.
    """
    if not path.is_dir():
        raise TaskError(f"{path}: no such folder; give a task folder, or a set made with `lego-tasks shell --out SET`")
    found = False
    for folder in _walk(path):
        found = True
        yield folder
    if not found:
        raise TaskError(f"{path}: holds no task (no task.toml in it or below)")


def _walk(folder: Path) -> Iterator[Path]:
    if (folder / "task.toml").is_file():
        yield folder
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from _walk(child)


@dataclass(frozen=True)
class Selection:
    """Labels that a task must have; an empty tuple allows every value."""

    splits: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()

    def allows(self, task: Task) -> bool:
        pairs = (
            (task.split, self.splits),
            (task.family, self.families),
            (task.kind, self.kinds),
            (task.level, self.levels),
        )
        return all(value in wanted for value, wanted in pairs if wanted)


def select(path: Path, selection: Selection) -> Iterator[tuple[Path, Task]]:
    """Yield the tasks at or under `path` that `selection` allows, with their folders as reached from `path`.

    Raises TaskError for a folder that is not a usable task.
    """
    for folder in task_folders(path):
        task = load_task(folder)
        if selection.allows(task):
            yield folder, task


def describe(folder: Path, task: Task) -> dict[str, Any]:
    """Return what `lego-tasks list --json` says of a task."""
    return {
        "id": task.id,
        "path": str(folder),
        "family": task.family,
        "kind": task.kind,
        "level": task.level,
        "split": task.split,
        "canary": bool(task.canary),
        "fail_to_pass": len(task.grade.fail_to_pass),
        "pass_to_pass": len(task.grade.pass_to_pass),
        "instruction": task.instruction,
    }
