"""Remove what dead owners left here: containers, cgroups, pid files, connections. Called at the start of every command.

A container normally ends with its owner (its stdin closes); this is for what a crash in the middle of creating one, a
reboot or a killed Podman leaves behind. Containers of living owners are never touched.
"""

import asyncio
import json
import shutil
from pathlib import Path

from legorl import paths
from legorl.sandbox import limits, owner
from legorl.sandbox.podman import pid_folder, podman


async def reap() -> list[str]:
    """Return the names of the containers removed. Raises SandboxError if Podman fails."""
    listed = await podman("ps", "-a", "--filter", "label=legorl=1", "--format", "json")
    dead = [row["Names"][0] for row in json.loads(listed.out or b"[]") if _is_dead(row.get("Labels") or {})]
    if dead:
        await podman("rm", "-f", "-t", "0", "--ignore", *dead, timeout_s=120)
    await asyncio.to_thread(_reap_files)
    return dead


def _is_dead(labels: dict[str, str]) -> bool:
    """Is nobody left to want this container? One that was opened from another machine is not ours to judge."""
    return labels.get("legorl.view") in (None, owner.view()) and not owner.is_alive(labels.get("legorl.owner", ""))


def _reap_files() -> None:
    for folder in limits.leftover_cgroups():
        if not _owned(folder):
            limits.remove_cgroup(folder)
    for file in pid_folder().glob("*.pid"):
        if not _owned(file):
            file.unlink(missing_ok=True)
    for folder in paths.private_dir().glob("ssh-*"):
        if not owner.is_alive(folder.name.removeprefix("ssh-").rpartition(".")[0]):
            shutil.rmtree(folder, ignore_errors=True)


def _owned(path: Path) -> bool:
    """Is the owner in a name OWNER.RANDOM[.pid] alive?"""
    return owner.is_alive(".".join(path.name.split(".")[:3]))
