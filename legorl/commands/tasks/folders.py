"""Write task folders whose files come from elsewhere: a new folder appears by one rename, with a task.toml.

with new_folder(out, "owner__name-12") as folder:      # None if it is there already
    ...fill folder / "repo", folder / "tests"...
    (folder / "task.toml").write_text(to_toml({...}))
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from legorl.shards import sync_folder, sync_tree

PARTIAL = ".partial"


class Skip(Exception):
    """One source cannot become a task. `reason` is counted; the message says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def task_id(name: str) -> str:
    """Return `name` as a task id: what ids may not hold becomes '-'."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("-._") or "task"


@contextlib.contextmanager
def new_folder(out: Path, name: str) -> Iterator[Path]:
    """Give a folder to fill, which becomes `out`/`name` durably if the block ends well and vanishes if it does not."""
    folder = out / PARTIAL / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        sync_tree(folder)
        folder.rename(out / name)
        sync_folder(out)
    finally:
        shutil.rmtree(out / PARTIAL, ignore_errors=True)


def to_toml(table: Mapping[str, Any]) -> str:
    """Return `table` as TOML: strings, numbers, booleans, lists of strings, and one level of tables. None is left out.

    Surrogates (bytes of a name that are not UTF-8) cannot stand in TOML: raises Skip.
    """
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict | None)]
    for name, inner in table.items():
        if isinstance(inner, dict) and inner:
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_value(value)}" for key, value in inner.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(item: object) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, list | tuple):
        return "[" + "".join(f"\n  {_value(each)}," for each in item) + ("\n]" if item else "]")
    text = json.dumps(item, ensure_ascii=False)
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise Skip("a name of a test or file that is not UTF-8", repr(item))
    return text.replace("\x7f", "\\u007f")


def size_of(folder: Path) -> int:
    """Return the bytes in `folder`'s files, links not followed."""
    total = 0
    for root, _, names in os.walk(folder):
        total += sum(Path(root, name).lstat().st_size for name in names)
    return total


def sandbox_limits(size: int, memory_mb: int) -> dict[str, int]:
    """Return [sandbox] for a repository of `size` bytes: room for it, its git directory, its tests and the work."""
    return {"memory_mb": memory_mb, "disk_mb": max(128, 4 * (size >> 20) + 64), "processes": 256}
