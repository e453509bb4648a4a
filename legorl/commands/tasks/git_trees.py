"""Trees of a git clone as plain files, and patches between trees, without a checkout.

    with Trees(clone) as trees:
        base = trees.tree("1e26d14")
        fixed = trees.apply(base, patch)
        trees.write(base, Path("task/repo"))
        solution = trees.diff(base, fixed)

The clone is only read: a scratch git directory borrows its objects, and nothing of the clone's configuration, hooks,
attributes or filters takes part, so bytes come out as they were committed. No history comes along.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LINK, SUBMODULE, EXECUTABLE = "120000", "160000", "100755"
_CONFIG = "core.autocrlf=false", "core.symlinks=true", "core.fileMode=true", "core.protectHFS=false", "gc.auto=0"


class GitError(Exception):
    """Git could not do it; the message is git's own, or says which object is not there."""


class SubmoduleMissing(GitError):
    """A submodule's content is in none of the clones at hand."""


@dataclass(frozen=True)
class Entry:
    """One entry of a tree. `path` is bytes, as git has it."""

    mode: str
    digest: str
    path: bytes

    @property
    def name(self) -> str:
        return os.fsdecode(self.path)


def git_dir_of(folder: Path) -> Path | None:
    """Return the git directory of a clone (with a work tree, bare, or linked by a .git file), None if it is none."""
    inner = folder / ".git"
    if inner.is_file() and (match := re.match(r"gitdir: (.+)", inner.read_text())):
        inner = folder / match[1].strip()
    for path in (inner, folder):
        if (path / "objects").is_dir() and (path / "HEAD").is_file():
            return path.resolve()
    return None


def find_clone(repos: Path, name: str) -> Path | None:
    """Return the git directory of the clone of `owner/name` in the folder `repos`, None if there is none.

    It may be called owner__name, owner/name, owner-name or name, each also with .git at the end.
    """
    owner, _, short = name.rpartition("/")
    candidates = [f"{owner}__{short}", f"{owner}/{short}", f"{owner}-{short}"] if owner else []
    for candidate in (*candidates, short):
        for folder in (repos / candidate, repos / f"{candidate}.git"):
            if folder.is_dir() and (found := git_dir_of(folder)):
                return found
    return None


class Trees:
    """Reads trees of the clone whose git directory is `git_dir` and makes new ones in a scratch directory.

    `submodule(url, commit)` returns the git directory that holds a submodule's commit, or None.
    """

    def __init__(self, git_dir: Path, submodule: Callable[[str, str], Path | None] = lambda url, commit: None) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="legorl-git-"))
        self._submodule = submodule
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "GIT_DIR": str(self._scratch),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "LC_ALL": "C",
            "HOME": str(self._scratch),
        }
        self._git("init", "--quiet", "--bare", "--template=", str(self._scratch))
        (self._scratch / "objects" / "info").mkdir(exist_ok=True)
        (self._scratch / "objects" / "info" / "alternates").write_text(f"{git_dir / 'objects'}\n")

    def __enter__(self) -> "Trees":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._scratch)

    def _git(self, *arguments: str, feed: bytes = b"", index: str = "index") -> bytes:
        configuration = [word for item in _CONFIG for word in ("-c", item)]
        environment = {**self._environment, "GIT_INDEX_FILE": str(self._scratch / index)}
        command = ["git", *configuration, *arguments]
        done = subprocess.run(command, input=feed, env=environment, cwd=self._scratch, capture_output=True)
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip().splitlines()
            raise GitError(words[0] if words else f"git {arguments[0]} ended with {done.returncode}")
        return done.stdout

    def tree(self, commit: str) -> str:
        """Return the tree of `commit` (a full or shortened id). Raises GitError if the clone does not hold it."""
        if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise GitError(f"{commit!r} is no commit id")
        return self._git("rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}").decode().strip()

    def apply(self, tree: str, patch: bytes, reverse: bool = False) -> str:
        """Return the tree that `patch` (a git diff) makes of `tree`. Raises GitError with git's words."""
        self._git("read-tree", tree)
        if patch.strip():
            words = ["apply", "--cached", "--binary", "--whitespace=nowarn", *(["-R"] if reverse else []), "-"]
            self._git(*words, feed=patch if patch.endswith(b"\n") else patch + b"\n")
        return self._git("write-tree").decode().strip()

    def without(self, tree: str, paths: list[bytes]) -> str:
        """Return `tree` without the files `paths`."""
        self._git("read-tree", tree)
        gone = b"".join(b"0 " + b"0" * 40 + b"\t" + path + b"\0" for path in paths)
        self._git("update-index", "-z", "--index-info", feed=gone)
        return self._git("write-tree").decode().strip()

    def diff(self, before: str, after: str, paths: list[bytes] | None = None) -> bytes:
        """Return a git diff that `git apply --binary` takes, whatever the bytes; of `paths` only if given."""
        flags = ["--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color"]
        limits = ["--", *(f":(literal,top){os.fsdecode(path)}" for path in paths)] if paths is not None else []
        return self._git("diff-tree", "-p", "--src-prefix=a/", "--dst-prefix=b/", *flags, before, after, *limits)

    def changed(self, before: str, after: str) -> list[tuple[str, bytes]]:
        """Return (A, M, D or T; path) of every file that differs."""
        fields = self._git("diff-tree", "-r", "-z", "--name-status", "--no-renames", before, after).split(b"\0")[:-1]
        return [(status.decode(), path) for status, path in zip(fields[::2], fields[1::2], strict=True)]

    def entries(self, tree: str) -> list[Entry]:
        """Return every entry of `tree`, folders opened. Raises GitError for a path that could leave the folder."""
        found = []
        for line in self._git("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0")[:-1]:
            facts, _, path = line.partition(b"\t")
            mode, _, digest = facts.decode().split(" ")
            if any(part.lower() in (b"", b".", b"..", b".git") for part in path.split(b"/")):
                raise GitError(f"a path that no repository may hold: {path!r}")
            found.append(Entry(mode, digest, path))
        return found

    def read(self, entries: list[Entry]) -> Iterator[tuple[Entry, bytes]]:
        """Yield each file or link with its content. Raises GitError if the clone lacks one (a partial clone)."""
        with tempfile.TemporaryFile() as wanted:
            wanted.write(b"".join(f"{entry.digest}\n".encode() for entry in entries))
            wanted.seek(0)
            command = ["git", "cat-file", "--batch"]
            with subprocess.Popen(command, env=self._environment, stdin=wanted, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                try:
                    for entry in entries:
                        yield entry, _blob(process.stdout, entry)
                finally:
                    process.kill()

    def write(self, tree: str, folder: Path, paths: set[bytes] | None = None) -> int:
        """Write `tree` (or of it only `paths`) as plain files under `folder`; return the bytes written.

        Submodules become their content. Raises SubmoduleMissing, GitError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        entries = [entry for entry in self.entries(tree) if paths is None or entry.path in paths]
        links = {entry.path for entry in entries if entry.mode == LINK}
        size = 0
        for entry, body in self.read([entry for entry in entries if entry.mode != SUBMODULE]):
            parents = [entry.path.rsplit(b"/", n)[0] for n in range(1, entry.path.count(b"/") + 1)]
            if links.intersection(parents):
                raise GitError(f"{entry.name!r} lies below a link")
            file = folder / entry.name
            file.parent.mkdir(parents=True, exist_ok=True)
            if entry.mode == LINK:
                file.symlink_to(os.fsdecode(body))
                continue
            with file.open("xb") as out:
                out.write(body)
            file.chmod(0o755 if entry.mode == EXECUTABLE else 0o644)
            size += len(body)
        for entry in (entry for entry in entries if entry.mode == SUBMODULE):
            size += self._write_submodule(tree, entry, folder / entry.name)
        return size

    def _write_submodule(self, tree: str, entry: Entry, folder: Path) -> int:
        url = self._submodule_urls(tree).get(entry.name, "")
        git_dir = self._submodule(url, entry.digest) if url else None
        if git_dir is None:
            raise SubmoduleMissing(f"submodule {entry.name} ({url or 'no URL'}) has no clone at hand")
        with Trees(git_dir, self._submodule) as inner:
            return inner.write(inner.tree(entry.digest), folder)

    def _submodule_urls(self, tree: str) -> dict[str, str]:
        blob = next((entry.digest for entry in self.entries(tree) if entry.path == b".gitmodules"), None)
        if blob is None:
            return {}
        listed = self._git("config", "--blob", blob, "-z", "--list").decode(errors="surrogateescape")
        values = dict(item.partition("\n")[::2] for item in listed.split("\0") if item)
        sections = {key.rpartition(".")[0] for key in values if key.startswith("submodule.")}
        return {values.get(f"{s}.path", ""): values.get(f"{s}.url", "") for s in sections}

    def log(self, *arguments: str) -> bytes:
        """Return `git log ARGUMENTS` over the clone's objects."""
        return self._git("log", *arguments)


def _blob(stream: IO[bytes], entry: Entry) -> bytes:
    head = stream.readline().split()
    if len(head) != 3 or head[1] != b"blob":
        raise GitError(f"{entry.name}: its content is not in the clone (a partial or broken one); clone it again")
    body = stream.read(int(head[2]))
    if stream.read(1) != b"\n":
        raise GitError(f"{entry.name}: git ended early")
    return body
