"""The base image `localhost/legorl-base:1`: a small Debian with git, Python and pytest, made without any registry.

    await ensure_image(say)     # nothing to do if the store has it; else from the cached tar; else built (about 90 s)

mmdebstrap installs it from the host's own apt sources of the distribution (third-party sources are left out), with all
maintainer scripts run, so Python's modules are byte-compiled. The root file system stays in the cache as a tar: a wiped
Podman store gets it back in seconds. Inside, uid 1000 is `agent`.
"""

import asyncio
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from legorl import paths
from legorl.sandbox.errors import SandboxError
from legorl.sandbox.podman import podman

BASE_IMAGE = "localhost/legorl-base:1"  # raise the number whenever the recipe changes
PACKAGES = "python3,python3-pytest,git,libstdc++6,patch,procps,mawk,less,file"
_HOOK = """
echo 'agent:x:1000:1000::/home/agent:/bin/bash' >>"$1/etc/passwd"
echo 'agent:x:1000:' >>"$1/etc/group"
mkdir -p "$1/ws" "$1/home/agent" "$1/lego" "$1/opt"
echo '127.0.0.1 localhost' >"$1/etc/hosts"
echo sandbox >"$1/etc/hostname"
: >"$1/etc/resolv.conf"
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/* "$1"/usr/share/doc
"""
_CHANGES = ("ENV HOME=/home/agent LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin", "WORKDIR /ws", 'CMD ["/bin/bash"]')


async def ensure_image(say: Callable[[str], None]) -> None:
    """Put the base image into the Podman store. Raises SandboxError with the tail of the builder's log."""
    if (await podman("image", "exists", BASE_IMAGE, check=False)).code == 0:
        return
    rootfs = paths.cache_dir() / "images" / (BASE_IMAGE.rpartition("/")[2].replace(":", "-") + ".tar")
    if not rootfs.exists():
        say("building the base image from the apt sources (about 90 s, 210 MB)")
        rootfs.parent.mkdir(parents=True, exist_ok=True)
        await _bootstrap(rootfs)
    say("loading the base image into Podman's store (about 15 s)")
    changes = [word for change in _CHANGES for word in ("--change", change)]
    with rootfs.open("rb") as file:
        await podman("import", *changes, "-", BASE_IMAGE, stdin=file.fileno(), timeout_s=600)


async def _bootstrap(rootfs: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise SandboxError("mmdebstrap is not installed: run `make setup` (or apt-get install mmdebstrap)")
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    sources = distribution_sources(suite, apt_texts())
    if not sources:
        raise SandboxError(f"/etc/apt has no distribution source for {suite!r} to build the base image from")
    with tempfile.TemporaryDirectory(prefix="legorl-image-") as scratch:
        listing = Path(scratch, "distribution.list")
        listing.write_text("".join(f"{source}\n" for source in sources))
        part = rootfs.with_suffix(".part")
        excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "info", "locale")]
        # fmt: off
        argv = ["mmdebstrap", "--variant=essential", "--format=tar", f"--include={PACKAGES}", *excluded,
                *(f"--aptopt={option}" for option in await _apt_options()),
                f"--customize-hook={_HOOK}", suite, str(part), str(listing)]
        # fmt: on
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        log, _ = await process.communicate()
        if process.returncode:
            part.unlink(missing_ok=True)
            tail = log.decode(errors="replace").strip().splitlines()[-5:]
            raise SandboxError("mmdebstrap could not build the base image: " + " | ".join(tail))
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.rename(rootfs)


def apt_texts() -> list[tuple[str, str]]:
    folder = Path("/etc/apt/sources.list.d")
    files = [Path("/etc/apt/sources.list"), *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]
    return [(file.suffix, file.read_text()) for file in files if file.exists()]


def distribution_sources(suite: str, texts: list[tuple[str, str]]) -> list[str]:
    """Return one-line apt sources of the distribution itself: its suites, an archive's usual last path part, main.

    `texts`: (".sources" for the deb822 format, else the one-line format; content).
    """
    entries: list[tuple[str, str, str, list[str]]] = []
    for suffix, text in texts:
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        if suffix == ".sources":
            for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
                fields = {
                    k.lower(): v.split() for k, v in re.findall(r"^([\w-]+):((?:.*\n?)(?:[ \t].*\n?)*)", stanza, re.M)
                }
                if "deb" not in fields.get("types", ()) or fields.get("enabled") == ["no"]:
                    continue
                signed = fields.get("signed-by", [])
                options = f"[signed-by={signed[0]}] " if len(signed) == 1 and signed[0].startswith("/") else ""
                for uri in fields.get("uris", ()):
                    entries += [(options, uri, name, fields.get("components", [])) for name in fields.get("suites", ())]
        else:
            for match in re.finditer(r"^deb\s+(\[[^\]]*\]\s+)?(\S+)\s+(\S+)\s+(.+)$", "\n".join(lines), re.M):
                entries.append((match[1] or "", match[2], match[3], match[4].split()))
    return [
        f"deb {options}{uri} {name} {' '.join(components)}"
        for options, uri, name, components in entries
        if re.fullmatch(rf"{re.escape(suite)}(-updates|-security)?", name)
        and uri.rstrip("/").rpartition("/")[2] in ("debian", "debian-security", "ubuntu")
        and "main" in components
    ]


async def _apt_options() -> list[str]:
    """The host's proxy and date-check settings: without them a host behind a proxy or a snapshot could not build."""
    process = await asyncio.create_subprocess_exec("apt-config", "dump", stdout=asyncio.subprocess.PIPE)
    text, _ = await process.communicate()
    wanted = re.compile(r"^Acquire::(https?::Proxy|Check-Valid-Until|Check-Date) (\".+\");$", re.M)
    return [f"Acquire::{name} {value}" for name, value in wanted.findall(text.decode())]
