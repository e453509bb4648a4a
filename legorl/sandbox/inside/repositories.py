"""Inside the container: commit, collect and patch a repository with git, out of the agent's reach.

Standard library only. Git runs as the agent's user while no process of the agent is alive, with a git directory that
the agent never saw, so what it left in .git, .gitattributes or any configuration does not matter.
"""

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator

import trees
from processes import AGENT, MESSAGE_LIMIT, as_agent, slay, spawn

KEEP = "/run/keep"


class Refused(Exception):
    """A request that cannot be done because of what lies in the tree or in the patch: the host's PatchUnusable."""


class Head:
    """The first `limit` bytes of a stream; the rest is read and counted as lost."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()
        self.over = False

    def add(self, data: bytes) -> None:
        room = self._limit - len(self._data)
        self._data += data[:room]
        self.over = self.over or len(data) > room

    def value(self) -> bytes:
        return bytes(self._data)


def git(
    arguments: list[str],
    env: dict[str, str],
    cwd: str,
    seconds: float,
    limit: int = 1 << 16,
    feed: int = subprocess.DEVNULL,
) -> bytes:
    """Run git as the agent's user; return its stdout. Raises Refused: git's words, or the limit it passed."""
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    child = spawn(["git", *arguments], env, cwd, feed, out_w, err_w)
    os.close(out_w)
    os.close(err_w)
    sinks = {out_r: Head(limit), err_r: Head(MESSAGE_LIMIT)}
    deadline = time.monotonic() + seconds
    trouble = ""
    open_fds = set(sinks)
    try:
        while open_fds and not trouble:
            left = deadline - time.monotonic()
            if left <= 0:
                trouble = f"git {arguments[0]} took longer than {seconds:g} s"
                break
            for fd in select.select(list(open_fds), [], [], left)[0]:
                data = os.read(fd, 1 << 16)
                sinks[fd].add(data)
                if not data:
                    open_fds.discard(fd)
            if sinks[out_r].over:
                trouble = f"git {arguments[0]} wrote more than {limit} bytes"
    finally:
        if trouble or open_fds:
            child.kill()
        code = child.wait()
        for fd in sinks:
            os.close(fd)
    if trouble:
        raise Refused(trouble)
    if code:
        words = sinks[err_r].value().decode("utf-8", "backslashreplace").strip()
        raise Refused(words or f"git {arguments[0]} ended with {code}")
    return sinks[out_r].value()


class Repositories:
    """The private git directories: out of the agent's reach while it lives, base trees known only to this process."""

    def __init__(self) -> None:
        self._bases: dict[str, str] = {}

    @contextlib.contextmanager
    def _open(self, repo: str) -> Iterator[str]:
        slay(AGENT)
        os.chmod(KEEP, 0o777)
        try:
            git_dir = f"{KEEP}/{hashlib.sha256(repo.encode()).hexdigest()[:16]}"
            if not os.path.isdir(git_dir) and (trouble := as_agent(lambda: trees.make_git_dir(git_dir))):
                raise RuntimeError(f"cannot make the private git directory: {trouble}")
            yield git_dir
        finally:
            slay(AGENT)
            os.chmod(KEEP, 0o700)

    def commit(self, repo: str) -> dict[str, str]:
        """Make `repo` a git repository with one root commit of every file; remember the same tree privately."""
        with self._open(repo) as git_dir:
            private = trees.git_environment(repo, git_dir)
            git(["add", "-A", "-f"], private, repo, 300)
            self._bases[repo] = git(["write-tree"], private, repo, 60).decode().strip()
            env = trees.git_environment(repo, None)
            git(["init", "-q", "-b", "main", "--template=", "."], env, repo, 60)
            # Git compresses no object that it has already, and compressing is most of the work.
            if trouble := as_agent(lambda: trees.furnish(repo, git_dir)):
                raise RuntimeError(f"cannot configure git in {repo}: {trouble}")
            git(["add", "-A", "-f"], env, repo, 300)
            git(["commit", "-q", "--allow-empty", "--no-verify", "-m", "Initial commit"], env, repo, 300)
            if git(["rev-parse", "HEAD^{tree}"], env, repo, 60).decode().strip() != self._bases[repo]:
                # Attributes in the tree made git store some files another way: no object may be left without a name.
                git(["prune", "--expire=now"], env, repo, 300)
            return {"tree": self._bases[repo]}

    def diff(self, repo: str, limit: int, seconds: float) -> bytes:
        """Return what changed in `repo` since commit, as a binary git diff. Raises Refused."""
        base = self._bases[repo]
        with self._open(repo) as git_dir:
            if not trees.is_plain_folder(repo):
                raise Refused(f"{repo} is no longer a folder")
            if trouble := as_agent(lambda: (signal.alarm(max(1, round(seconds))), trees.sweep(repo))[1]):
                raise Refused(f"{repo} cannot be read: {trouble}")
            env = trees.git_environment(repo, git_dir)
            git(["add", "-A"], env, repo, seconds)
            flags = "--cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color"
            command = ["diff", *flags.split(), "--src-prefix=a/", "--dst-prefix=b/", base]
            return git(command, env, repo, seconds, limit)

    def apply(self, repo: str, patch: Iterator[bytes]) -> None:
        """Apply a git diff to the files of `repo`. Raises Refused with git's words."""
        data = b"".join(patch)
        with self._open(repo) as git_dir:
            fd = os.memfd_create("patch")
            try:
                with open(fd, "wb", closefd=False) as file:
                    file.write(data)
                os.lseek(fd, 0, os.SEEK_SET)
                env = trees.git_environment(repo, git_dir)
                git(["apply", "--binary", "--whitespace=nowarn", "-"], env, repo, 300, feed=fd)
            finally:
                os.close(fd)
