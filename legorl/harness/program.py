"""A user's own program as a harness (`--harness command:./agent.sh`): find it, copy it to where sandboxes can read it.

It is copied to the cache, not mounted from where it lies: the user that containers run as may not be able to get there,
and what an attempt ran must not change while others run it. The copy's name holds the digest of its content.
"""

import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

RUN = "run"  # what is started in a folder


class ProgramError(Exception):
    """It cannot be run; the message says what is wrong with it."""


@dataclass(frozen=True)
class Program:
    """An executable file, or a folder with an executable `run`. digest: of names, contents and executable bits."""

    path: Path
    digest: str

    @property
    def start(self) -> str:
        """What to start, as a path relative to the folder of the copy."""
        return f"{self.path.name}/{RUN}" if self.path.is_dir() else self.path.name


def find_program(path: Path) -> Program:
    """Read the program at `path`. Raises ProgramError where there is none that could be started."""
    path = path.absolute()
    start = path / RUN if path.is_dir() else path
    if not start.is_file():
        wanted = f"no executable file {RUN!r} in this folder" if path.is_dir() else "no such file or folder"
        raise ProgramError(f"{path}: {wanted}")
    if not os.access(start, os.X_OK):
        raise ProgramError(f"{start}: not executable; run: chmod +x {start}")
    return Program(path, _digest(path))


def copy_program(program: Program, folder: Path) -> None:
    """Put a copy of it below `folder`, which appears whole or not at all. What is there already stays."""
    if folder.is_dir():
        return
    making = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.making")
    making.mkdir(parents=True)
    try:
        copy = making / program.path.name
        if program.path.is_dir():
            shutil.copytree(program.path, copy, symlinks=True)
        else:
            shutil.copy(program.path, copy)
        for made in [making, copy, *copy.rglob("*")]:
            if not made.is_symlink():
                executable = made.is_dir() or made.stat().st_mode & 0o111
                made.chmod(0o755 if executable else 0o644)
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    for file in sorted([path, *path.rglob("*")]):
        if file.is_symlink() and file != path:
            content = os.fsencode(file.readlink())
        else:
            content = file.read_bytes() if file.is_file() else b""
        kind = f"{file.relative_to(path.parent)}\0{file.is_symlink()}{os.access(file, os.X_OK)}{len(content)}\0"
        whole.update(kind.encode(errors="surrogateescape"))
        whole.update(content)
    return whole.hexdigest()[:16]
