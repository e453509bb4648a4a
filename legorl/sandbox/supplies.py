"""Programs that containers see at a mount: copied to folders named by their content, where Podman's user can read them.

A checkout may lie in a folder that the service user cannot enter.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from legorl import paths

_HERE = Path(__file__).parent
SECCOMP = _HERE / "seccomp.json"
FILES = (*sorted((_HERE / "inside").glob("*.py")), SECCOMP)


def digest_of(files: Sequence[Path]) -> str:
    """sha256 (16 hex digits) of the names and contents of `files`."""
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def mountable(name: str, files: Sequence[Path]) -> Path:
    """Return the folder NAME-DIGEST that holds copies of `files`, made on first use."""
    target = paths.mounts_dir() / f"{name}-{digest_of(files)}"
    if target.is_dir():
        return target
    part = Path(tempfile.mkdtemp(prefix="part-", dir=target.parent))
    for file in files:
        shutil.copyfile(file, part / file.name)
        (part / file.name).chmod(0o644)
    part.chmod(0o755)
    try:
        part.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(part)
        if not target.is_dir():
            raise
    return target


@cache
def digest() -> str:
    """Digest of the sandbox's own helper programs and its seccomp profile."""
    return digest_of(FILES)


def folder() -> Path:
    """Return the folder that every container sees at /lego."""
    return mountable("lego", FILES)
