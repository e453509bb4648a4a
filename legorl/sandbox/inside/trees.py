"""Inside the container: unpack, commit, collect and patch a tree of files, always as the agent's user.

Every function here runs in a forked child of the supervisor that has already become the agent's uid, while no process
of the agent is alive: what it can reach is what the agent could reach. Standard library only.
"""

import os
import shutil
import stat
import tarfile
from typing import BinaryIO

from processes import AGENT

EXCLUDED = "__pycache__/\n*.pyc\n.pytest_cache/\n"
# The highest-ranking attributes: whatever a .gitattributes in the tree says, bytes go in and out as they are.
ATTRIBUTES = "* -text -ident -filter -working-tree-encoding !eol !diff !whitespace\n"
_CONFIG = """[core]
 bare = false
 autocrlf = false
 fileMode = true
 symlinks = true
 ignoreCase = false
 hooksPath = /dev/null
 protectNTFS = false
 protectHFS = false
 logAllRefUpdates = false
[gc]
 auto = 0
[maintenance]
 auto = false
"""


def git_environment(repo: str, git_dir: str | None) -> dict[str, str]:
    """Return an environment in which git believes nothing but its arguments and `git_dir`."""
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LC_ALL": "C",
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": "legorl",
        "GIT_AUTHOR_EMAIL": "legorl@localhost",
        "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
        "GIT_COMMITTER_NAME": "legorl",
        "GIT_COMMITTER_EMAIL": "legorl@localhost",
        "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
    }
    if git_dir is not None:
        env |= {"GIT_DIR": git_dir, "GIT_WORK_TREE": repo, "GIT_INDEX_FILE": f"{git_dir}/index"}
    return env


def make_git_dir(path: str) -> None:
    """Write a git directory by hand: no templates, no hooks, the attributes and configuration above."""
    for name in ("objects/info", "objects/pack", "refs/heads", "info"):
        os.makedirs(f"{path}/{name}")
    for name, text in (
        ("HEAD", "ref: refs/heads/main\n"),
        ("config", _CONFIG),
        ("info/exclude", EXCLUDED),
        ("info/attributes", ATTRIBUTES),
    ):
        with open(f"{path}/{name}", "w") as file:
            file.write(text)


def furnish(repo: str, git_dir: str) -> None:
    """Give the agent's own repository copies of the objects in `git_dir`, and let the agent commit without more ado."""
    shutil.copytree(f"{git_dir}/objects", f"{repo}/.git/objects", dirs_exist_ok=True)
    with open(f"{repo}/.git/config", "a") as file:
        file.write("[user]\n\tname = agent\n\temail = agent@localhost\n")


def unpack(source: BinaryIO, target: str) -> None:
    """Unpack an uncompressed tar stream under `target`. What it brings replaces what is in the way, links included.

    Nothing is ever written through a symbolic link below `target`, so files land where the tar says.
    Raises ValueError for a name that leaves `target`.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    _folder(target)
    with tarfile.open(fileobj=source, mode="r|") as tar:
        for member in tar:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if ".." in parts or member.name.startswith("/"):
                raise ValueError(f"the tar names a path outside: {member.name!r}")
            if not parts:
                continue
            path = target
            for part in parts[:-1]:
                path = f"{path}/{part}"
                _folder(path)
            path = f"{path}/{parts[-1]}"
            if member.isdir():
                _folder(path)
                os.chmod(path, member.mode & 0o777 | 0o700)
                continue
            _clear(path)
            if member.issym():
                os.symlink(member.linkname, path)
            elif member.isreg():
                body = tar.extractfile(member)
                assert body is not None
                with open(path, "xb") as file:
                    shutil.copyfileobj(body, file, 1 << 20)
                    os.fchmod(file.fileno(), member.mode & 0o777)
            else:
                raise ValueError(
                    f"the tar holds something else than files, folders and symbolic links: {member.name!r}"
                )


def _folder(path: str) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return
        os.unlink(path)
    except FileNotFoundError:
        pass
    os.mkdir(path)


def _clear(path: str) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass


def is_plain_folder(path: str) -> bool:
    """Is `path` a directory (not a link to one) that belongs to the agent?"""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == AGENT


def sweep(repo: str) -> None:
    """Make a tree that an agent left readable for git: nothing is followed, contents are not touched.

    Folders and files become readable to their owner; fifos, sockets and devices go, git has no place for them; nested
    repositories lose their .git, so that their files are collected instead of a commit id. Names that differ from .git
    in case only go as well: git refuses to add them and would give up on the whole tree. Raises ValueError for a file
    with more bytes than its disk has room for: it is all holes, and git would read them for minutes.
    """
    disk = os.statvfs(repo)
    room = disk.f_frsize * disk.f_blocks
    pending = [(repo, True)]
    while pending:
        folder, top = pending.pop()
        try:
            os.chmod(folder, stat.S_IMODE(os.lstat(folder).st_mode) | 0o700)
            with os.scandir(folder) as entries:
                found = [(entry.name, entry.path, entry.stat(follow_symlinks=False)) for entry in entries]
        except OSError:  # deeper than a path may be long: git cannot see it either
            continue
        for name, path, info in found:
            mode = info.st_mode
            if name.lower() == ".git":
                if not (top and name == ".git"):
                    _remove(path, mode)
            elif stat.S_ISDIR(mode):
                pending.append((path, False))
            elif stat.S_ISREG(mode):
                if info.st_size > room:
                    raise ValueError(f"{name!r} has {info.st_size} bytes, more than its disk")
                if not mode & 0o400:
                    os.chmod(path, stat.S_IMODE(mode) | 0o400)
            elif not stat.S_ISLNK(mode):
                os.unlink(path)


def _remove(path: str, mode: int) -> None:
    if not stat.S_ISDIR(mode):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    for folder, names, _ in os.walk(path):  # rmtree needs every folder writable; walk descends after this body
        for name in names:
            inner = os.path.join(folder, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(path)
