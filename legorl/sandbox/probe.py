"""Find out whether this machine enforces what the flags ask for; where it does not, refuse to run.

    await ensure_ready()      # at the start of a command: reap leftovers, probe once per boot and configuration
    checks = await probe()    # {"memory": Check(ok=True, detail="killed at its limit"), ...}

Podman ignores a limit that it cannot set, often without a word, so each one is tried: one container, a few seconds.
A passed probe is remembered by boot, Podman, kernel and the code that sets the limits.
"""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from legorl import paths
from legorl.sandbox import container, limits, local, owner, podman, remote, seat, supplies
from legorl.sandbox.container import Sandbox, open_sandbox
from legorl.sandbox.errors import LimitsError, SandboxError
from legorl.sandbox.leftovers import reap
from legorl.sandbox.remote import RemoteHost
from legorl.sandbox.seat import Seat, Spec
from legorl.task import Limits

_LIMITS = Limits(memory_mb=32, disk_mb=16, processes=24, cpus=0.25)
_CPU_S = 1.5
_BOOTED_S = 120.0  # how far off the time of a host's boot may be: two clocks, and a busy service


@dataclass(frozen=True)
class Check:
    """One thing that was tried, and what came of it."""

    ok: bool
    detail: str


async def ensure_ready(wanted: Limits | None = None, host: RemoteHost | None = None) -> None:
    """Reap what dead owners left; raise LimitsError unless every limit is enforced and `wanted` fits the machine.

    `host`: another Podman host instead of this machine.
    """
    podman.command()
    if host is None:
        podman.context()
        limits.chosen()
    if wanted is not None:
        total = host.memory_bytes if host else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if limits.memory_bytes(wanted) > total:
            need = limits.memory_bytes(wanted) >> 20
            whose = "this machine's" if host is None else f"the Podman host {host.label} with"
            raise LimitsError(f"a sandbox of {need} MB does not fit {whose} {total >> 20} MB: lower memory_mb, disk_mb")
    await (reap() if host is None else host.reap())
    memory = paths.private_dir() / f"probe-{_key(host)}.json"
    if _remembered(memory, host):
        return
    checks = await (probe() if host is None else probe(host.seat))
    failed = [f"{name} ({check.detail})" for name, check in checks.items() if not check.ok]
    if failed:
        where = "this machine" if host is None else host.label
        raise LimitsError(f"not enforced on {where}: {'; '.join(failed)}. {_remedy(host)}")
    part = memory.with_suffix(f".{os.getpid()}")
    booted = host.booted if host else None
    part.write_text(json.dumps({"booted": booted, **{name: check.detail for name, check in checks.items()}}))
    part.rename(memory)


def cores() -> int:
    return os.cpu_count() or 1


def _remembered(memory: Path, host: RemoteHost | None) -> bool:
    """Has the probe been passed since the last boot? Of another host all that is known is about when that was."""
    if not memory.exists():
        return False
    if host is None:
        return True
    then, now = json.loads(memory.read_text())["booted"], host.booted
    return then is not None and now is not None and abs(then - now) < _BOOTED_S


def _remedy(host: RemoteHost | None) -> str:
    if host is not None:
        return (
            "Podman there must set them itself: a rootless service needs cgroup v2 with cpu, memory and pids delegated "
            "(Delegate= in user@.service); with cgroup v1 only a service of root's can"
        )
    if limits.chosen() == "native":
        return (
            "Podman's own limits do not act here: run as root (LEGORL_LIMITS unset), or have systemd delegate "
            "cpu, memory and pids to your user (Delegate= in user@.service)"
        )
    return f"Root sets them in {limits.CGROUPS}: see that the controllers memory, pids and cpu are mounted and writable"


def _key(host: RemoteHost | None) -> str:
    modules: tuple[ModuleType, ...] = (limits, container, podman, seat)
    if host is None:
        programs = [Path(path).stat() for path in map(shutil.which, ("podman", "crun")) if path]
        stamps = [f"{info.st_size}:{info.st_mtime_ns}" for info in programs]
        machine = [owner.boot(), platform.release(), limits.chosen(), *stamps]
        modules += (local,)
    else:
        machine = host.identity
        modules += (remote,)
    code = [Path(module.__file__).read_text() for module in modules if module.__file__]
    return hashlib.sha256("\0".join([*machine, supplies.digest(), *code]).encode()).hexdigest()[:16]


async def probe(place: Callable[[Spec, str], Seat] = local.LocalSeat) -> dict[str, Check]:
    """Try every wall and limit in one container. Raises SandboxError if the container cannot be had."""
    spec = Spec(name="probe", run="probe", limits=_LIMITS, lifetime_s=120)
    async with open_sandbox(spec, place) as box:
        checks = _walls(await _bomb(box, "walls"))
        checks["disk"] = _disk(await _bomb(box, "disk", "/ws", str(64 << 20)))
        checks["cpu"] = _cpu(await _bomb(box, "cpu", str(_CPU_S)))
        started = (await _bomb(box, "processes", str(10 * _LIMITS.processes)))["started"]
        refusals = box.evidence().process_refusals
        checks["processes"] = Check(
            started <= limits.process_count(_LIMITS) and refusals > 0, f"{started} started, {refusals} refused"
        )
        size = limits.memory_bytes(_LIMITS) * 3 // 2
        result = await box.run(["python3", "/lego/bombs.py", "memory", str(size)], timeout_s=60)
        kills = box.evidence().oom_kills
        checks["memory"] = Check(
            result.exit_code == 137 and kills > 0,
            f"exit code {result.exit_code} on touching {size >> 20} MB, {kills} killed",
        )
        after = await box.run(["true"], timeout_s=20)
        checks["supervisor"] = Check(after.exit_code == 0, "survives the bombs")
    return checks


async def _bomb(box: Sandbox, *arguments: str) -> dict[str, Any]:
    result = await box.run(["python3", "/lego/bombs.py", *arguments], timeout_s=60)
    try:
        return json.loads(result.log)
    except ValueError:
        text = result.log.decode(errors="replace").strip()
        raise SandboxError(f"the probe {arguments[0]!r} ended with {result.exit_code}: {text[-300:]}") from None


def _walls(seen: dict[str, Any]) -> dict[str, Check]:
    privileges = [*seen["capabilities"], seen["no_new_privs"], seen["seccomp"], *seen["uids"]]
    expected = [*["0" * 16] * 4, "1", "2", *["1000"] * 4]
    return {
        "network": Check(seen["interfaces"] == ["lo"], f"interfaces {' '.join(seen['interfaces'])}"),
        "vsock": Check(seen["vsock"] == "ENOSYS", seen["vsock"] or "a vsock can be made"),
        "packet": Check(seen["packet"] != "", seen["packet"] or "a packet socket can be made"),
        "read-only": Check(not seen["writable"], f"writable: {' '.join(seen['writable']) or 'nothing'}"),
        "privileges": Check(privileges == expected, "none" if privileges == expected else f"{privileges}"),
    }


def _disk(seen: dict[str, Any]) -> Check:
    full = seen["errno"] == "ENOSPC" and seen["bytes"] <= _LIMITS.disk_mb << 20
    return Check(full, f"{seen['errno'] or 'no refusal'} after {seen['bytes'] >> 20} MB of {_LIMITS.disk_mb}")


def _cpu(seen: dict[str, Any]) -> Check:
    # So small a quota that even on a busy machine two spinning processes would pass it.
    share = seen["cpu_s"] / _CPU_S
    return Check(share < 0.4, f"{share:.2f} cores of {_LIMITS.cpus}")
