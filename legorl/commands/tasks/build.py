"""Write task folders: lay out the repository, run the solution, take its git diff, rename into place.

A family makes drafts (what the task holds, and how to solve it); this module turns drafts into folders of the format
that `legorl.task` reads. Solutions run here, at build time, as plain processes: they are our own and trusted. One git
call a task, and three a batch, make the diffs. A folder appears by one rename, so a killed build leaves whole tasks.

    for path in write_tasks(drafts, Path("set")): ...
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from legorl.shards import sync_folder, sync_tree
from legorl.task import TASK_FORMAT, TaskError

BATCH = 50
PARTIAL = ".partial"
TEST_FILE = "tests/test_task.py"


@dataclass(frozen=True)
class Node:
    """One entry of a repository: a file's bytes, or a symbolic link."""

    body: bytes = b""
    executable: bool = False
    link: str | None = None


@dataclass(frozen=True)
class Draft:
    """A task before it is written. `solve` changes the repository in the folder that it is given."""

    id: str
    family: str
    kind: str
    level: int
    split: str
    instruction: str
    repo: dict[str, Node]
    test_source: str
    fail_to_pass: tuple[str, ...]  # names of test functions in tests/test_task.py
    pass_to_pass: tuple[str, ...]
    solve: Callable[[Path], None]
    labels: dict[str, str] = field(default_factory=dict)


def write_tasks(drafts: Iterable[Draft], out: Path) -> Iterator[Path]:
    """Write each draft to `out`/<id>, yielding the folders in the drafts' order; folders that exist are left alone.

    Raises TaskError if a solution fails or changes nothing, OSError if the folder cannot be written.
    """
    shutil.rmtree(out / PARTIAL, ignore_errors=True)
    source = iter(drafts)
    while batch := list(islice(source, BATCH)):
        missing = [draft for draft in batch if not (out / draft.id / "task.toml").exists()]
        if missing:
            for draft, patch in zip(missing, _solutions(missing), strict=True):
                _write_task(draft, patch, out / PARTIAL / draft.id)
                sync_tree(out / PARTIAL / draft.id)
            for draft in missing:
                (out / PARTIAL / draft.id).rename(out / draft.id)
            sync_folder(out)
            shutil.rmtree(out / PARTIAL)
        yield from (out / draft.id for draft in batch)


def run_command(command: str, folder: Path) -> None:
    """Run a solution command in `folder`, in a fixed environment that makes archives reproducible.

    Raises TaskError with what it printed if it fails.
    """
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TAR_OPTIONS": "--mtime=@0 --owner=0 --group=0 --numeric-owner --sort=name --mode=u+rw,go=r,+X",
    }
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, timeout=60, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise TaskError(
            f"solution exits {done.returncode}: {command!r}: {done.stderr.decode(errors='replace').strip()}"
        )


def lay_out(repo: dict[str, Node], folder: Path) -> None:
    """Write the entries of `repo` under `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, node in repo.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if node.link is not None:
            file.unlink(missing_ok=True)
            file.symlink_to(node.link)
        else:
            file.write_bytes(node.body)
            file.chmod(0o755 if node.executable else 0o644)


def _solutions(drafts: list[Draft]) -> list[bytes]:
    """Return each draft's solution as a git diff of its repository."""
    with tempfile.TemporaryDirectory(prefix="legorl-build-") as name:
        work = Path(name) / "work"
        git = Git(Path(name) / "git", work)
        for draft in drafts:
            lay_out(draft.repo, work / draft.id)
        git("add", "-A", "--force")  # all is tracked at first; later, its own .gitignore counts, as for agents
        base = git("write-tree").decode().strip()
        for draft in drafts:
            try:
                draft.solve(work / draft.id)
            except TaskError as error:
                raise TaskError(f"{draft.id}: {error}") from error
        git("add", "-A")
        patches = [
            git("diff", "--cached", "--binary", "--no-renames", f"--relative={draft.id}", base, "--", draft.id)
            for draft in drafts
        ]
    for draft, patch in zip(drafts, patches, strict=True):
        if not patch:
            raise TaskError(f"{draft.id}: its solution changes nothing")
    return patches


class Git:
    """Git over one working tree, blind to the user's configuration and ignore files."""

    def __init__(self, git_dir: Path, work: Path):
        work.mkdir(parents=True)
        self._work = work
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "GIT_DIR": str(git_dir),
            "GIT_WORK_TREE": str(work),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "HOME": str(work.parent),
        }
        self("init", "--quiet", "--template=")

    def __call__(self, *arguments: str) -> bytes:
        done = subprocess.run(["git", *arguments], cwd=self._work, env=self._environment, capture_output=True)
        if done.returncode:
            raise TaskError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout


def _write_task(draft: Draft, patch: bytes, folder: Path) -> None:
    lay_out(draft.repo, folder / "repo")
    files = {
        "instruction.md": draft.instruction.strip() + "\n",
        TEST_FILE: draft.test_source,
        "task.toml": _toml(draft),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="")
    (folder / "solution.patch").write_bytes(patch)


def _toml(draft: Draft) -> str:
    def value(item: object) -> str:
        # A JSON string is a TOML basic string, but for surrogate pairs as escapes, and DEL, which TOML wants escaped.
        return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")

    def ids(names: tuple[str, ...]) -> str:
        return "[" + "".join(f"\n  {value(f'{TEST_FILE}::{name}')}," for name in names) + ("\n]" if names else "]")

    lines = [
        f"format = {value(TASK_FORMAT)}",
        *(f"{key} = {value(getattr(draft, key))}" for key in ("id", "family", "kind", "level", "split")),
        "",
        "[grade]",
        'runner = "pytest"',
        f"fail_to_pass = {ids(draft.fail_to_pass)}",
        f"pass_to_pass = {ids(draft.pass_to_pass)}",
        "timeout_s = 60",
    ]
    if draft.labels:
        lines += ["", "[labels]", *(f"{key} = {value(text)}" for key, text in draft.labels.items())]
    return "\n".join(lines) + "\n"
