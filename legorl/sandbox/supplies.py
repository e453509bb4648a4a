"""The helper programs that every container sees at /lego, and its seccomp profile, where Podman's user can read them.

A checkout may lie in a folder that the service user cannot enter, so they are copied to a folder named by their digest.
"""

import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

from legorl import paths

_HERE = Path(__file__).parent
FILES = (*sorted((_HERE / "inside").glob("*.py")), _HERE / "seccomp.json")


@cache
def digest() -> str:
    """sha256 (16 hex digits) of the helper programs and the profile."""
    total = hashlib.sha256()
    for file in FILES:
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def folder() -> Path:
    """Return the folder that holds them, made on first use."""
    target = paths.mounts_dir() / f"lego-{digest()}"
    if target.is_dir():
        return target
    part = Path(tempfile.mkdtemp(prefix="part-", dir=target.parent))
    for file in FILES:
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
