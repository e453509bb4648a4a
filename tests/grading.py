"""What tests of lego-grade share: trees, patches of them, attempts, and running the command.

patch = make_patch(task, scratch, {"calc.py": "...", "gone.py": None, "link": "-> /etc"})
grade(shard(work / "g.parquet", [attempt(task, 0, patch)]), "--out", work / "graded")
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from builders import trajectory

from legorl import shards
from legorl.task import load_task

GRADE = [str(Path(sys.executable).with_name("lego-grade"))]


def write_tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


def make_patch(task: Path, scratch: Path, files: dict[str, str | bytes | None]) -> bytes:
    """The git diff that leaves `files` in the task's repository; None deletes, `-> x` is a link to x, #! a program."""
    tree = scratch / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(task / "repo", tree)

    def git(*argv: str) -> bytes:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        return subprocess.run(["git", *identity, *argv], cwd=tree, check=True, capture_output=True).stdout

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "base")
    for name, text in files.items():
        path = tree / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            path.write_bytes(text)
        elif text is not None and text.startswith("-> "):
            path.symlink_to(text[3:])
        elif text is not None:
            path.write_text(text)
            path.chmod(0o755 if text.startswith("#!") else 0o644)
    git("add", "-Af")
    return git("diff", "--cached", "--binary", "HEAD")


def attempt(task: Path, number: int, patch: bytes | None, **fields: object) -> dict:
    digest = load_task(task).digest
    return trajectory(task.name, number, task_path=str(task), task_digest=digest, patch=patch, **fields)


def grade(*argv: object, stdin: str = "", check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    done = subprocess.run([*GRADE, *map(str, argv)], input=stdin, capture_output=True, text=True, env=environment)
    assert not check or done.returncode == 0, done.stderr
    return done


def rows_of(path: Path | str) -> list[dict]:
    return shards.open_shard(path).rows()
