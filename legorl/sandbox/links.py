"""Images with symbolic links: a sandbox's file system is read-only, yet some tasks name folders like /app or /tests.

image = await linked_image(BASE_IMAGE, (("/app", "/ws/repo"),))     # made on first use, then found by its name
"""

import asyncio
import hashlib
import io
import shutil
import tarfile
import tempfile
from pathlib import Path
from weakref import WeakKeyDictionary

from legorl import paths
from legorl.sandbox.errors import SandboxError
from legorl.sandbox.podman import podman
from legorl.sandbox.pruning import mark_used

Links = tuple[tuple[str, str], ...]

_made: dict[tuple[str, Links], str] = {}
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
_BUILD_S = 300.0


async def linked_image(image: str, links: Links) -> str:
    """Return an image that is `image` with each link (path, target). Raises SandboxError (ImageMissing).

    It is named by the content of `image` and by the links. Only a layer with the links is stored.
    """
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        if (image, links) not in _made:
            _made[image, links] = await _ensure(image, links)
            mark_used(_made[image, links])
    return _made[image, links]


async def _ensure(image: str, links: Links) -> str:
    seen = await podman("image", "inspect", "--format", "{{.Id}}", image)
    digest = hashlib.sha256(repr((seen.out.strip(), links)).encode()).hexdigest()[:16]
    name = f"localhost/legorl-linked:{digest}"
    if (await podman("image", "exists", name, check=False)).code == 0:
        return name
    context = Path(tempfile.mkdtemp(prefix="links-", dir=paths.mounts_dir()))
    try:
        context.chmod(0o755)
        (context / "links.tar").write_bytes(pack_links(links))
        (context / "Containerfile").write_text(f"FROM {image}\nADD links.tar /\n")
        await podman("build", "--pull=never", "-q", "-t", name, str(context), timeout_s=_BUILD_S)
    finally:
        shutil.rmtree(context)
    return name


def pack_links(links: Links) -> bytes:
    """Return the links as a tar of the root folder. Raises SandboxError for a path that cannot be one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, target in links:
            if not path.startswith("/") or ".." in path.split("/") or path.strip("/") == "":
                raise SandboxError(f"no link can be made at {path!r}: it must be an absolute path")
            info = tarfile.TarInfo(path.strip("/"))
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return buffer.getvalue()
