"""What a Podman host is sent: images, and folders as images, each once and named by its content.

    sent = Sent(url)
    name = await sent.image("localhost/legorl-base:1", links, ((Path("/cache/harness/pi-1"), "/opt/harness"),))

A sandbox on another host can mount nothing of this machine. So its image there is made of three kinds of parts: the
image as this machine's store has it (`podman save | podman load`), each folder that would be mounted here, as an image
of its own, and a last one that copies the folders into the first and has the links. What is copied is the host's own:
only what a host has not got yet travels.

The system call filter is a file here. A service would look for it on its own disk, so the last image carries it as
the label io.containers.seccomp.profile, and `--seccomp-policy=image` puts it in force.
"""

import asyncio
import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from legorl import paths
from legorl.sandbox import podman, supplies
from legorl.sandbox.errors import SandboxError
from legorl.sandbox.links import Links, pack_links

_SEND_S = 3600.0  # gigabytes over a slow line
_FORMAT = "1"  # raise it whenever the same parts would make another image

Mounts = Sequence[tuple[Path | str, str]]


class Sent:
    """What one host has, as far as this process knows."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._has: dict[object, str] = {}
        self._sending = asyncio.Lock()  # one thing at a time: whoever waits mostly wants the same

    async def image(self, image: str, links: Links, mounts: Mounts) -> str:
        """Return the name, on the host, of `image` (a name in the store here) with `links` and with `mounts` in it.

        Raises ImageMissing if the store here has no such image, SandboxError if it cannot be sent.
        """
        key = (image, links, tuple(mounts))
        async with self._sending:
            if key not in self._has:
                self._has[key] = await self._assemble(image, links, mounts)
        return self._has[key]

    async def _assemble(self, image: str, links: Links, mounts: Mounts) -> str:
        parts = [(await self._folder(Path(source)), target) for source, target in mounts]
        base = await self._base(image)
        profile = json.dumps(json.loads(supplies.SECCOMP.read_text()), separators=(",", ":"))
        name = f"localhost/legorl-sandbox:{_digest([_FORMAT, base, parts, links, profile])}"
        if await self._there(name):
            return name
        lines = [f"FROM {base}", *(f"COPY --from={part} / {target}/" for part, target in parts)]
        if links:
            lines.append("ADD links.tar /")
        lines.append(f"LABEL legorl.image=1 io.containers.seccomp.profile={json.dumps(profile)}")
        context = Path(tempfile.mkdtemp(prefix="image-", dir=paths.private_dir()))
        try:
            (context / "Containerfile").write_text("\n".join([*lines, ""]))
            if links:
                (context / "links.tar").write_bytes(pack_links(links))
            build = ("build", "--pull=never", "--layers=false", "-q", "-t", name, str(context))
            await podman.podman(*build, url=self._url, timeout_s=_SEND_S)
        finally:
            shutil.rmtree(context)
        return name

    async def _there(self, name: str) -> bool:
        return (await podman.podman("image", "exists", name, url=self._url, check=False)).code == 0

    async def _base(self, image: str) -> str:
        """Send the image `image` of the store here. Return its name there, which holds its id."""
        seen = await podman.podman("image", "inspect", "--format", "{{.Id}}", image)
        identity = seen.out.decode().strip().removeprefix("sha256:")
        name = f"localhost/legorl-sent:{identity[:16]}"
        if await self._there(name):
            return name
        if await self._there(identity):  # it was pulled there, say
            await podman.podman("tag", identity, name, url=self._url)
            return name
        with tempfile.TemporaryFile(dir=paths.cache_dir()) as file:
            await podman.podman("save", identity, stdout=file.fileno(), timeout_s=_SEND_S)
            file.seek(0)
            loaded = await podman.podman("load", "-q", url=self._url, stdin=file.fileno(), timeout_s=_SEND_S)
        # Saved by its id it has no name, and takes none from an image of the host's.
        await podman.podman("tag", loaded.out.decode().rpartition(": ")[2].strip(), name, url=self._url)
        return name

    async def _folder(self, folder: Path) -> str:
        """Send a folder as an image. Return its name there, which holds the digest of its content."""
        name = f"localhost/legorl-files:{await asyncio.to_thread(_digest_of, folder)}"
        if await self._there(name):
            return name
        with tempfile.TemporaryFile(dir=paths.cache_dir()) as file:
            await asyncio.to_thread(_pack, folder, file)
            file.seek(0)
            label = ("--change", "LABEL legorl.image=1")
            await podman.podman("import", *label, "-", name, url=self._url, stdin=file.fileno(), timeout_s=_SEND_S)
        return name


def _entries(folder: Path) -> list[Path]:
    """Everything below `folder`, in one order; links are not followed. Raises SandboxError if it is no folder."""
    if not folder.is_dir():
        raise SandboxError(f"{folder}: not a folder, so it cannot be sent to another host")
    return sorted(folder.rglob("*"))


def _digest_of(folder: Path) -> str:
    """Digest of names, kinds, executable bits and contents; not of times and owners."""
    rows: list[tuple[str, str, str]] = []
    for path in _entries(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            rows.append((name, "link", str(path.readlink())))
        elif path.is_file():
            with path.open("rb") as file:
                body = hashlib.file_digest(file, "sha256").hexdigest()
            rows.append((name, "program" if path.stat().st_mode & 0o111 else "file", body))
        else:
            rows.append((name, "folder", ""))
    return _digest(rows)


def _pack(folder: Path, target: IO[bytes]) -> None:
    """Write the folder to `target` as a tar, for everybody to read. Times stay: compiled Python goes by them."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _entries(folder):
            info = tar.gettarinfo(path, path.relative_to(folder).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mode = 0o755 if info.isdir() or info.mode & 0o111 else 0o644
            if info.islnk():  # a second name of one file: content once more
                info.type, info.size = tarfile.REGTYPE, path.stat().st_size
            if info.isreg():
                with path.open("rb") as body:
                    tar.addfile(info, body)
            else:
                tar.addfile(info)


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
