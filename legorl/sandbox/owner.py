"""Who owns a container: a process, by pid, start time and boot, so that a reused pid is not mistaken for it."""

import os
from functools import cache
from pathlib import Path


@cache
def boot() -> str:
    """The first 8 digits of this boot's random id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


@cache
def view() -> str:
    """Name the processes that this one can look at: this boot of this machine, and this namespace of process ids."""
    return f"{boot()}.{Path('/proc/self/ns/pid').stat().st_ino}"


def _start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it does not exist (or is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def mine() -> str:
    """Return the mark of this process, fit for a label or a folder's name."""
    return f"{boot()}.{os.getpid()}.{_start(os.getpid())}"


def is_alive(mark: str) -> bool:
    """Does the process that made `mark` still run? A mark of another shape is nobody's."""
    try:
        booted, pid, start = mark.split(".")
        return booted == boot() and _start(int(pid)) == int(start)
    except ValueError:
        return False
