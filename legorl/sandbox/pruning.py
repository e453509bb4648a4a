"""Images that legorl made and nobody uses any more: when each was used last, and the removal of the old ones.

    mark_used("localhost/legorl-built:0123456789abcdef")
    gone, kept = await prune(30 * 86400)      # seconds since the last use

Podman keeps no time of use, so it is the time of an empty file in the cache. Images that legorl did not make (pulled
ones, and what people built or loaded themselves) are never touched, and neither is an image of an open sandbox.
"""

import json
import time
from pathlib import Path

from legorl import paths
from legorl.sandbox.podman import podman

MADE = ("legorl-built", "legorl-loaded", "legorl-linked")
LEFT_S = 3600.0  # longer than any build takes: what is younger may be one's that runs


def _mark(name: str) -> Path:
    return paths.cache_dir() / "images" / "used" / name.rpartition("/")[2].replace(":", "-")


def mark_used(name: str) -> None:
    """Note that the image `name`, one of those that legorl makes, is used now."""
    file = _mark(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


async def prune(unused_s: float) -> tuple[list[str], list[str]]:
    """Remove the images that legorl made and that were not used for `unused_s` seconds (0: all of them).

    Return the names of the removed ones, and of those that an open sandbox or another image still needs. As root, where
    the store is the service user's, what failed builds left goes, too. Raises SandboxError if Podman fails.
    """
    listed = json.loads((await podman("images", "--format", "json", timeout_s=300)).out or b"[]")
    gone: list[str] = []
    kept: list[str] = []
    # An image is listed once for each of its names, with all of them.
    created = {name: float(row["Created"]) for row in listed for name in row.get("Names") or ()}
    for name in created:
        if name.removeprefix("localhost/").partition(":")[0] not in MADE:
            continue
        mark = _mark(name)
        used = mark.stat().st_mtime if mark.exists() else created[name]
        if time.time() - used < unused_s:
            continue
        done = await podman("rmi", name, check=False, timeout_s=300)  # refused for an image that a container has
        (kept if done.code else gone).append(name)
        if not done.code:
            mark.unlink(missing_ok=True)
    if paths.is_root():
        await _prune_builds(max(unused_s, LEFT_S))
    return sorted(gone), sorted(kept)


async def _prune_builds(older_s: float) -> None:
    """Remove what builds that failed or were killed left: layers without a name, and working containers."""
    listed = await podman("ps", "-a", "--external", "--filter", "name=-working-container", "--format", "json")
    old = [row["Id"] for row in json.loads(listed.out or b"[]") if time.time() - row["Created"] > older_s]
    if old:
        await podman("rm", "-f", "-t", "0", "--ignore", *old, timeout_s=300)
    await podman("image", "prune", "-f", "--filter", f"until={round(older_s)}s", timeout_s=300)
