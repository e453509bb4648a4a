"""What sandboxes have left on this machine: everything that came since, less what belongs to containers of the living.

    watch = await watching()             # before
    ...                                  # run commands that open sandboxes, and wait for their end
    left = await watch.left()            # {"containers": [...], "mounts": [...], ...}: all is well if each is empty

Others may use Podman meanwhile: what names a container whose owner lives, or an image, is theirs. Podman and conmon
tidy up for about two seconds after a container's end, so `left` waits a while for things to go.
"""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from legorl import paths
from legorl.sandbox import limits, owner
from legorl.sandbox.podman import pid_folder, podman

_MARK = re.compile(r"[0-9a-f]{8}\.\d+\.\d+")  # as legorl.sandbox.owner makes it

# One for each version of legorl or content of a folder, each lego-serve, each program that is a harness.
_EXPECTED = re.compile(r"/probe-[0-9a-f]+\.json|/serve-\d+\.log$|/harness/command-[0-9a-f]+$|/[a-z]+-[0-9a-f]{16}$")

Things = dict[str, set[str]]


@dataclass(frozen=True)
class Places:
    """Where Podman keeps its store (on disk) and its state of this boot."""

    store: Path
    state: Path


async def places() -> Places:
    told = await podman("info", "--format", "{{.Store.GraphRoot}}\n{{.Store.RunRoot}}")
    store, state = told.out.decode().split()
    return Places(Path(store), Path(state))


class Watch:
    """What was there in the beginning."""

    def __init__(self, where: Places) -> None:
        self._places = where
        self._before = things(where)
        self._bytes = disk_bytes(where)

    async def left(self, patience_s: float = 60.0) -> dict[str, list[str]]:
        """Return by kind what came since and is still there after `patience_s`, except what others have."""
        deadline = asyncio.get_running_loop().time() + patience_s
        new = _without(things(self._places), self._before)
        while True:
            own = await _owned_by_the_living(self._places)
            now = things(self._places)
            new = {
                kind: {name for name in names & now[kind] if not _names_any(name, own)} for kind, names in new.items()
            }
            if not any(new.values()) or asyncio.get_running_loop().time() > deadline:
                return {kind: sorted(names) for kind, names in new.items()}
            await asyncio.sleep(0.5)

    def grown_bytes(self) -> int:
        """Return by how many bytes the store and the caches have grown; others' containers and images count, too."""
        return disk_bytes(self._places) - self._bytes


async def watching() -> Watch:
    """Note what is there. Podman must have run before, so that its pause process is no news."""
    return Watch(await places())


def things(where: Places) -> Things:
    """Return what there is now, by kind, named so that the name of its container or its owner is in it."""
    runtime = pid_folder()
    folders = (where.store, where.state, runtime, paths.private_dir(), paths.mounts_dir())
    return {
        "containers": _children(where.store / "overlay-containers") | _children(where.state / "overlay-containers"),
        "layers": _children(where.store / "overlay") | _links(where.store / "overlay" / "l"),
        "mounts": {name for name in _mounts(runtime) if name.startswith(tuple(f"{folder}/" for folder in folders))},
        "cgroups": {str(folder) for folder in limits.leftover_cgroups()},
        "processes": set(_processes()),
        "sockets": {name for name in _sockets() if name.startswith(tuple(f"{folder}/" for folder in folders))},
        "files": _children(runtime)
        | _children(runtime / "crun")
        | _children(runtime / "libpod" / "tmp" / "exits")
        | {path for path in _children(paths.private_dir()) if not _EXPECTED.search(path)}
        | _children(paths.mounts_dir())
        | {str(path) for path in paths.cache_dir().glob("*/*") if not _EXPECTED.search(str(path))},
    }


def disk_bytes(where: Places) -> int:
    """Bytes on disk in Podman's store and in the caches; what vanishes meanwhile does not count."""
    total = 0
    for top in (where.store, paths.cache_dir()):
        for folder, _, names in os.walk(top, onerror=lambda error: None):
            for name in names:
                try:
                    total += Path(folder, name).lstat().st_blocks * 512
                except FileNotFoundError:
                    pass
    return total


async def _owned_by_the_living(where: Places) -> set[str]:
    """Names of containers whose owner lives (or that are not ours at all), of their layers, and of images' layers."""
    listed = await podman("ps", "-a", "--external", "--no-trunc", "--format", "json")
    rows = [row for row in json.loads(listed.out or b"[]") if _is_others(row.get("Labels") or {})]
    living = {row["Id"] for row in rows} | {row["Names"][0] for row in rows}
    containers = json.loads((where.store / "overlay-containers" / "containers.json").read_text())
    layers = {layer["id"]: layer for layer in json.loads((where.store / "overlay-layers" / "layers.json").read_text())}
    own = {one["layer"] for one in containers if one["id"] in living}
    for image in json.loads((where.store / "overlay-images" / "images.json").read_text()):
        layer = image.get("layer")
        while layer:
            own.add(layer)
            layer = layers.get(layer, {}).get("parent")
    return living | own


def _is_others(labels: dict[str, str]) -> bool:
    return labels.get("legorl") != "1" or owner.is_alive(labels.get("legorl.owner", ""))


def _names_any(name: str, own: set[str]) -> bool:
    """Does `name` speak of one of `own`, or of an owner BOOT.PID.START that lives?"""
    return any(one in name for one in own) or any(owner.is_alive(mark) for mark in _MARK.findall(name))


def _without(now: Things, before: Things) -> Things:
    return {kind: names - before[kind] for kind, names in now.items()}


def _children(folder: Path) -> set[str]:
    try:
        return {str(path) for path in folder.iterdir()}
    except FileNotFoundError:
        return set()


def _links(folder: Path) -> set[str]:
    """Links with their targets."""
    found = set()
    for path in _children(folder):
        try:
            found.add(f"{path} -> {Path(path).readlink()}")
        except FileNotFoundError:
            pass
    return found


def _mounts(runtime: Path) -> Iterator[str]:
    """Mount points here and in the namespace that Podman's pause process keeps."""
    places = [Path("/proc/self/mountinfo")]
    pause = runtime / "libpod" / "tmp" / "pause.pid"
    if pause.exists():
        places.append(Path(f"/proc/{pause.read_text().strip()}/mountinfo"))
    for place in places:
        yield from (line.split()[4] for line in place.read_text().splitlines())


def _sockets() -> Iterator[str]:
    """Paths of Unix sockets, listening or not."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        path = line.split(maxsplit=7)[7:]
        yield from path


def _processes() -> Iterator[str]:
    """Podman's processes and those in sandboxes' cgroups: `PID COMMAND CGROUP`, of which one tells whose they are."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            groups = [line.rpartition(":")[2] for line in (folder / "cgroup").read_text().splitlines()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        boxes = {group for group in groups if f"/{limits.PARENT}/" in group}
        if (
            words
            and (boxes or re.match(r"\S*(podman|conmon|crun|catatonit)", words))
            and " system service " not in words
        ):
            yield f"{folder.name} {words} {' '.join(sorted(boxes))}"
