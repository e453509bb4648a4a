"""Limits on memory, processes and CPU of one sandbox, and the evidence of who ran into them, read from outside.

Rootless Podman silently ignores its limit flags on cgroup v1, and a service user has no delegated cgroups on v2, so
root makes the cgroups itself ("outer"): Podman starts the container, and before any code of an agent runs in it, its
processes (init and supervisor) are moved into LEGORL/NAME; what they start later is born there. Conmon and the Podman
client stay outside, so the figures are the container's own. A plain user on cgroup v2 uses Podman's flags ("native").

The memory limit is the task's memory plus the size of every tmpfs, because tmpfs pages are charged to the cgroup too:
a full disk then never looks like a full memory.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from legorl import paths
from legorl.sandbox.errors import LimitsError
from legorl.task import Limits

CGROUPS = Path("/sys/fs/cgroup")
PARENT = os.environ.get("LEGORL_CGROUP", "legorl")  # around all sandboxes; another name can have limits of its own
TMP_MB = 64  # /tmp
HOME_MB = 64  # /home/agent
SHM_MB = 16  # /dev/shm
_SERVICE_MB = 48  # the same three
_SERVICE_PROCESSES = 3  # supervisor, forwarder, init
_PERIOD_US = 100_000
_STEP = 1 << 20  # bytes; the kernel refuses single pages only, but counts them in larger batches


@dataclass(frozen=True)
class Evidence:
    """What the kernel and Podman say of one sandbox, out of the agent's reach.

    oom_kills: processes killed for memory where the sandbox has reached its own limit; process_refusals: forks refused
    where it has reached its own limit. host_oom_kills, host_refusals: the same where it never did, so that the host, or
    a cgroup around several sandboxes, had run out. memory_peak: bytes, None where the kernel does not tell; full_disks:
    the folders without room when the last command had ended (the supervisor looks, once nothing of the agent's lives).
    exit_code: Podman's, once it has ended: 0 as we asked, 137 if the container was killed, negative if Podman was.
    """

    oom_kills: int = 0
    process_refusals: int = 0
    host_oom_kills: int = 0
    host_refusals: int = 0
    memory_peak: int | None = None
    full_disks: tuple[str, ...] = ()
    exit_code: int | None = None

    @property
    def filled_up(self) -> bool:
        """Has a sandbox that failed us failed because its own content filled its memory or its process table?

        Not if Podman came to harm, which gives it another exit code. A full process table kills nobody.
        """
        unharmed = self.exit_code in (None, 0)
        killed = self.exit_code == 128 + signal.SIGKILL
        return (self.oom_kills > 0 and (unharmed or killed)) or (self.process_refusals > 0 and unharmed)


class Limiter(Protocol):
    """How one sandbox's limits are set."""

    def flags(self) -> list[str]:
        """Return the flags for `podman run`."""

    def attach(self, pids: list[int]) -> None:
        """Put the container's first processes under the limits. Raises LimitsError, ProcessLookupError."""

    def evidence(self) -> Evidence:
        """Return the counters; after `remove`, their last values."""

    def remove(self) -> None:
        """Kill what is left and remove the cgroups."""


def memory_bytes(limits: Limits) -> int:
    """Return the memory limit of a sandbox in bytes: the task's memory and everything that a tmpfs may hold."""
    return (limits.memory_mb + limits.disk_mb + TMP_MB + HOME_MB + SHM_MB + _SERVICE_MB) << 20


def process_count(limits: Limits) -> int:
    return limits.processes + _SERVICE_PROCESSES


def chosen() -> str:
    """Return how limits are set on this machine, "outer" or "native" (LEGORL_LIMITS overrides). Raises LimitsError."""
    forced = os.environ.get("LEGORL_LIMITS")
    if forced:
        if forced not in ("outer", "native"):
            raise LimitsError(f"LEGORL_LIMITS={forced}: neither 'outer' nor 'native'")
        return forced
    if paths.is_root():
        return "outer"
    if _unified():
        return "native"
    raise LimitsError(
        "this machine has cgroup v1, where only root can limit a sandbox: run as root, or boot with cgroup v2"
    )


def limiter(name: str, limits: Limits) -> Limiter:
    """Return the limiter for a new sandbox whose cgroup shall be called `name`. Raises LimitsError."""
    if chosen() == "native":
        return Native(limits)
    return OuterV2(name, limits) if _unified() else OuterV1(name, limits)


def _unified() -> bool:
    return (CGROUPS / "cgroup.controllers").exists()


def _write(file: Path, value: int | str) -> None:
    try:
        file.write_text(f"{value}\n")
    except ProcessLookupError:  # the process to be moved has ended: no matter of limits
        raise
    except OSError as error:
        raise LimitsError(f"{file}: cannot write {value}: {error.strerror}") from error


def _count(file: Path, key: str) -> int:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


class _Outer:
    """Cgroups that root makes and removes itself."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._last = Evidence()
        self._removed = False

    def flags(self) -> list[str]:
        return ["--cgroups=disabled"]

    def attach(self, pids: list[int]) -> None:
        try:
            for folder in self._folders:
                folder.mkdir(parents=True, exist_ok=True)
            self._limit()
        except OSError as error:
            raise LimitsError(f"cannot make a cgroup: {error}") from error
        for folder in self._folders:
            for pid in pids:
                _write(folder / "cgroup.procs", pid)

    def _limit(self) -> None:
        raise NotImplementedError

    def _read(self) -> Evidence:
        raise NotImplementedError

    def evidence(self) -> Evidence:
        if not self._removed and self._folders[0].is_dir():
            self._last = self._read()
        return self._last

    def remove(self) -> None:
        self.evidence()
        self._removed = True
        for folder in self._folders:
            remove_cgroup(folder)


class OuterV1(_Outer):
    """One folder in each v1 hierarchy."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._limits = limits
        self._memory, self._pids, self._cpu = (CGROUPS / c / PARENT / name for c in ("memory", "pids", "cpu"))
        super().__init__([self._memory, self._pids, self._cpu])

    def _limit(self) -> None:
        size = memory_bytes(self._limits)
        _write(self._memory / "memory.limit_in_bytes", size)
        if (self._memory / "memory.memsw.limit_in_bytes").exists():
            _write(self._memory / "memory.memsw.limit_in_bytes", size)
        _write(self._pids / "pids.max", process_count(self._limits))
        _write(self._cpu / "cpu.cfs_period_us", _PERIOD_US)
        _write(self._cpu / "cpu.cfs_quota_us", int(self._limits.cpus * _PERIOD_US))

    def _read(self) -> Evidence:
        return _read_v1(self._memory, self._pids)


class OuterV2(_Outer):
    """One folder in the unified hierarchy."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._limits = limits
        self._folder = CGROUPS / PARENT / name
        super().__init__([self._folder])

    def _limit(self) -> None:
        for parent in (CGROUPS, CGROUPS / PARENT):
            _write(parent / "cgroup.subtree_control", "+memory +pids +cpu")
        _write(self._folder / "memory.max", memory_bytes(self._limits))
        if (self._folder / "memory.swap.max").exists():
            _write(self._folder / "memory.swap.max", 0)
        _write(self._folder / "pids.max", process_count(self._limits))
        _write(self._folder / "cpu.max", f"{int(self._limits.cpus * _PERIOD_US)} {_PERIOD_US}")

    def _read(self) -> Evidence:
        return _read_v2(self._folder)


class Native:
    """Podman's own flags; the probe finds out whether they act."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._folder: Path | None = None
        self._last = Evidence()

    def flags(self) -> list[str]:
        size = str(memory_bytes(self._limits))
        pids = str(process_count(self._limits))
        return [f"--memory={size}", f"--memory-swap={size}", f"--pids-limit={pids}", f"--cpus={self._limits.cpus:g}"]

    def attach(self, pids: list[int]) -> None:
        rows = Path(f"/proc/{pids[0]}/cgroup").read_text().splitlines()
        path = next((row[3:] for row in rows if row.startswith("0::")), "")
        folder = CGROUPS / path.lstrip("/")
        if (folder / "memory.events").exists():
            self._folder = folder

    def evidence(self) -> Evidence:
        if self._folder is not None and self._folder.is_dir():
            try:
                self._last = _read_v2(self._folder)
            except FileNotFoundError:  # the container ended between the two calls: the last values stand
                pass
        return self._last

    def remove(self) -> None:
        self.evidence()
        self._folder = None


def evidence_in(folder: Path) -> Evidence:
    """Return what is counted in `folder`, a cgroup of v2, or all the files of one of v1."""
    return _read_v1(folder, folder) if (folder / "memory.oom_control").exists() else _read_v2(folder)


def _read_v1(memory: Path, pids: Path) -> Evidence:
    peak, limit = (_number(memory / f"memory.{n}_in_bytes") for n in ("max_usage", "limit"))
    return _evidence(
        kills=_count(memory / "memory.oom_control", "oom_kill"),
        # memory.failcnt would say it, but stays 0 on newer kernels.
        limit_met=peak is None or limit is None or peak > limit - _STEP,
        pids=pids,
        memory_peak=peak,
    )


def _read_v2(folder: Path) -> Evidence:
    return _evidence(
        kills=_count(folder / "memory.events", "oom_kill"),
        limit_met=_count(folder / "memory.events", "oom") > 0,
        pids=folder,
        memory_peak=_number(folder / "memory.peak"),
    )


def _evidence(kills: int, limit_met: bool, pids: Path, memory_peak: int | None) -> Evidence:
    """Tell the sandbox's own doing from what came from further up.

    A fork that is refused further up counts in the sandbox's pids.events, too (on cgroup v2 only before Linux 6.11);
    that the sandbox's own limit did not refuse it shows in its peak.
    """
    refusals, peak, limit = _count(pids / "pids.events", "max"), _number(pids / "pids.peak"), _number(pids / "pids.max")
    own = peak is None or limit is None or peak >= limit
    return Evidence(
        oom_kills=kills if limit_met else 0,
        host_oom_kills=0 if limit_met else kills,
        process_refusals=refusals if own else 0,
        host_refusals=0 if own else refusals,
        memory_peak=memory_peak,
    )


def _number(file: Path) -> int | None:
    """The number in `file`; None if this kernel has no such file, or it says `max`."""
    text = file.read_text().strip() if file.exists() else "max"
    return None if text == "max" else int(text)


def remove_cgroup(folder: Path, patience_s: float = 5.0) -> None:
    """Kill every process in `folder` and remove it; a cgroup stays busy until its last process is reaped.

    Raises LimitsError if it is still busy after `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while folder.is_dir():
        try:
            folder.rmdir()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LimitsError(f"{folder}: cannot remove the cgroup: {error.strerror}") from error
        try:
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):  # gone meanwhile, the cgroup or one of its processes
            pass
        time.sleep(0.02)


def leftover_cgroups() -> list[Path]:
    """Return every sandbox cgroup on this machine, of whatever owner."""
    parents = [CGROUPS / PARENT] if _unified() else [CGROUPS / c / PARENT for c in ("memory", "pids", "cpu")]
    return [folder for parent in parents if parent.is_dir() for folder in parent.iterdir() if folder.is_dir()]
