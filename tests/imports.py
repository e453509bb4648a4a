"""What tests of lego-tasks import share: clones made object by object, files of rows, and running the command.

clone = Clone(folder / "own__calc")
base = clone.commit({b"calc.py": b"..."}, "base")
done = lego_import("swe-bench", write_rows(folder / "r.jsonl", [row]), "--repos", folder, "--out", folder / "out")
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TASKS = str(Path(sys.executable).with_name("lego-tasks"))


def git(folder: Path, *argv: str, feed: bytes | None = None) -> bytes:
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "t@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    done = subprocess.run(["git", *argv], cwd=folder, env=environment, input=feed, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(b"\n")


class Clone:
    """A repository made object by object, so that nothing converts what goes in."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        git(folder, "init", "-q", "--template=", "-b", "main")

    def commit(
        self,
        files: dict[bytes, bytes],
        message: str = "m",
        parent: str = "",
        links: Sequence[tuple] = (),
        sub: str = "",
    ) -> str:
        """Commit exactly `files`, `links` (path, target), an executable run.sh, and a submodule `sub` at vendored/."""
        git(self.folder, "read-tree", "--empty")
        for path, body in files.items():
            digest = git(self.folder, "hash-object", "-w", "--stdin", "--no-filters", feed=body)
            self._add("100755" if path == b"run.sh" else "100644", digest, path)
        for path, target in links:
            self._add("120000", git(self.folder, "hash-object", "-w", "--stdin", feed=target), path)
        if sub:
            self._add("160000", sub.encode(), b"vendored")
        tree = git(self.folder, "write-tree").decode()
        parents = ["-p", parent] if parent else []
        commit = git(self.folder, "commit-tree", tree, *parents, "-F", "-", feed=message.encode()).decode()
        git(self.folder, "update-ref", "refs/heads/main", commit)
        return commit

    def _add(self, mode: str, digest: bytes, path: bytes) -> None:
        entry = mode.encode() + b" " + digest + b"\t" + path + b"\0"
        git(self.folder, "update-index", "-z", "--index-info", feed=entry)

    def diff(self, before: str, after: str, *paths: str) -> str:
        return git(self.folder, "diff", "--binary", before, after, "--", *paths).decode() + "\n"


def lego_import(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TASKS, "import", *map(str, arguments)], capture_output=True, text=True)


def write_rows(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def tree(folder: Path) -> dict[bytes, bytes]:
    """Every file and link of a folder: path to content, or b"-> target"."""
    found = {}
    for file in folder.rglob("*"):
        if file.is_symlink() or file.is_file():
            body = b"-> " + os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
            found[os.fsencode(file.relative_to(folder))] = body
    return found
