"""Images of tasks, made on first use: built from a Dockerfile, loaded from an archive, or pulled from a registry.

    await prepare([task.image for task in tasks], say)      # at the start of a command: two at once, with words
    name = await ready_image(task.image)                    # what `podman run` is told; open_sandbox asks for it

What is built or loaded is named by its content (localhost/legorl-built:DIGEST, localhost/legorl-loaded:DIGEST): tasks
with the same Dockerfile and context share an image, and a second use makes nothing. Nothing is pulled unless a task's
`image` says docker://, or somebody runs `python -m legorl.sandbox pull`: a Dockerfile may begin only from what the
store has. A build is rootless and not isolated as a sandbox is: its commands have the network, and write as the
containers' user. A failure is remembered until the command ends, so that retries of attempts cost nothing.
"""

import asyncio
import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from legorl import image_reference
from legorl.sandbox.errors import ImageBroken, ImageMissing, SandboxError
from legorl.sandbox.image import BASE_IMAGE
from legorl.sandbox.podman import Done, podman
from legorl.sandbox.pruning import mark_used
from legorl.task import pack

AT_ONCE = 2
TIME_S = 900.0  # for one image; LEGORL_IMAGE_TIMEOUT moves it
ASK_S = 300.0  # for a question to Podman: it waits while another process writes a big layer
TAIL_LINES = 12  # of a build's log, in its error
_RECIPE = "1"  # raise it whenever the same Dockerfile would give another image

Say = Callable[[str], None]


@dataclass
class _Makings:
    """What one event loop has made, or is making: references to names, and names to their making."""

    named: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    made: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


_makings: WeakKeyDictionary[asyncio.AbstractEventLoop, _Makings] = WeakKeyDictionary()


async def prepare(images: Iterable[str], say: Say) -> None:
    """Make what `images` (legorl.image_reference; "" is the base image) call for; say what is made, and what fails.

    A failure is only told: whoever opens a sandbox with that image gets it again, as an exception. Raises ImageMissing
    for the base image, without which this machine is not set up.
    """
    counts = Counter(image or BASE_IMAGE for image in images)
    names = list(counts)
    results = await asyncio.gather(*(_checked(name, say) for name in names), return_exceptions=True)
    for name, result in zip(names, results, strict=True):
        if isinstance(result, BaseException):
            if name == BASE_IMAGE or not isinstance(result, ImageMissing | ImageBroken):
                raise result
            tasks = "one task" if counts[name] == 1 else f"{counts[name]} tasks"
            say(f"no image for {tasks}: {result}")


async def _checked(image: str, say: Say) -> None:
    name = await ready_image(image, say)
    if name == image and not await _exists(name):
        hint = "run `make setup`" if name == BASE_IMAGE else "build, load or pull it, or say in task.toml how to get it"
        raise ImageMissing(f"{name}: not in Podman's store; {hint}")


async def ready_image(image: str, say: Say = lambda words: None) -> str:
    """Return the name in Podman's store of what `image` (legorl.image_reference) calls for, making it first if need be.

    A plain name is returned as it is, unseen. Raises ImageMissing, and ImageBroken for a Dockerfile that fails.
    """
    if image_reference.kind_of(image) == "name":
        return image
    makings = _makings.setdefault(asyncio.get_running_loop(), _Makings())
    if image not in makings.named:
        makings.named[image] = asyncio.ensure_future(_ready(image, say, makings))
    return await asyncio.shield(makings.named[image])  # who waits may be cancelled; the others still want it


async def _ready(image: str, say: Say, makings: _Makings) -> str:
    match image_reference.kind_of(image):
        case "build":
            tar, name = await _context(Path(image))
            make = partial(_build, Path(image), tar, name)
        case "archive":
            file = image_reference.archive_of(image)
            name = f"localhost/legorl-loaded:{await asyncio.to_thread(_digest_of, file)}"
            make = partial(_load, file, name, makings)
        case _:
            name = image_reference.name_to_pull(image)
            make = partial(_pull, image)
    if name not in makings.made:
        makings.made[name] = asyncio.ensure_future(_once(name, image, make, say, makings))
    await asyncio.shield(makings.made[name])
    return name


async def _once(name: str, image: str, make: Callable[[], Awaitable[None]], say: Say, makings: _Makings) -> None:
    """Call `make`, AT_ONCE of all at most, unless the store has `name`."""
    async with makings.gate:
        if not await _exists(name):
            say(f"making the image {name.rpartition('/')[2]} from {image}")
            await make()
    if name.startswith("localhost/legorl-"):
        mark_used(name)


async def _exists(name: str) -> bool:
    return (await podman("image", "exists", name, check=False, timeout_s=ASK_S)).code == 0


async def _podman(what: str, *words: str, stdin: int = asyncio.subprocess.DEVNULL) -> Done:
    """Run Podman to its end, whatever that is. Raises ImageMissing, beginning with `what`, if it takes too long."""
    limit_s = float(os.environ.get("LEGORL_IMAGE_TIMEOUT") or TIME_S)
    try:
        return await podman(*words, stdin=stdin, timeout_s=limit_s, check=False)
    except SandboxError as error:
        raise ImageMissing(f"{what}: {error}; LEGORL_IMAGE_TIMEOUT gives it other seconds") from error


# Building


async def _context(dockerfile: Path) -> tuple[bytes, str]:
    """Return what is sent to the build, as a tar, and the name of the image that comes of it."""
    try:
        text = dockerfile.read_text(errors="replace")
        tar = await asyncio.to_thread(pack, dockerfile.parent)
    except OSError as error:
        raise ImageMissing(f"{dockerfile}: cannot be read: {error}") from error
    froms = [await _id_of(name) for name in begins_from(text)]
    facts = json.dumps([_RECIPE, dockerfile.name, hashlib.sha256(tar).hexdigest(), froms])
    return tar, f"localhost/legorl-built:{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def begins_from(dockerfile: str) -> list[str]:
    """Return the images that a Dockerfile's stages begin from, as it writes them."""
    return re.findall(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)", dockerfile, re.M | re.I)


async def _id_of(name: str) -> str:
    """The id that `name` has in the store, so that a newer base makes another image; "" where there is none."""
    done = await podman("image", "inspect", "--format", "{{.Id}}", name, check=False, timeout_s=ASK_S)
    return done.out.decode().strip()


async def _build(dockerfile: Path, tar: bytes, name: str) -> None:
    # fmt: off
    words = ["build", "--pull=never", "--isolation", "chroot", "--network", "host", "--layers", "--force-rm",
             "--label", "legorl.image=1", "-t", name, "-f", dockerfile.name, "-"]
    # fmt: on
    with tempfile.TemporaryFile() as file:
        file.write(tar)
        file.seek(0)
        done = await _podman(f"{dockerfile}: not built", *words, stdin=file.fileno())
    if not done.code:
        return
    if lost := re.search(r"creating build container: (\S+): image not known", done.err):
        raise ImageMissing(
            f"{dockerfile}: begins from {lost[1]}, which is not in Podman's store; nothing is pulled unasked: run "
            f"`python -m legorl.sandbox pull {lost[1]}`"
        )
    tail = tail_of(done)
    if "no space left on device" in tail.lower():
        raise ImageMissing(f"{dockerfile}: not built, for this machine's disk is full; make room: {tail}")
    raise ImageBroken(f"{dockerfile}: cannot be built: {tail}")


def tail_of(done: Done) -> str:
    """The last lines of what a build, or another of Podman's doings, printed, on one line."""
    lines = [*done.out.decode(errors="replace").splitlines(), *dict.fromkeys(done.err.splitlines())]
    wanted = [line.strip() for line in lines if line.strip() and not line.startswith(("-->", "time="))]
    return " | ".join(wanted[-TAIL_LINES:])[-2000:]


# Archives and registries


def _digest_of(file: Path) -> str:
    try:
        with file.open("rb") as body:
            return hashlib.file_digest(body, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ImageMissing(f"{file}: the archive cannot be read: {error.strerror}") from error


async def _load(file: Path, name: str, makings: _Makings) -> None:
    """Load an archive as `name`. The names that it brings are not taken over: one could be the base image's."""
    async with makings.loading:
        before = await _names()
        with file.open("rb") as body:
            done = await _podman(f"{file}: not loaded", "load", "-q", stdin=body.fileno())
        if done.code:
            raise ImageMissing(f"{file}: not loaded: {tail_of(done)}")
        brought = re.findall(r"^Loaded images?(?:\(s\))?: (.+)$", done.out.decode(), re.M)
        brought = [each for line in brought for each in re.split(r"[,\s]+", line.strip()) if each]
        try:
            if len(ids := {await _id_of(each) for each in brought}) != 1:
                raise ImageMissing(f"{file}: holds {len(ids)} images; make an archive of just one")
            await podman("tag", *ids, name, timeout_s=ASK_S)
        finally:
            for each in brought:
                if each in before:
                    await podman("tag", before[each], each, timeout_s=ASK_S)
                elif not each.startswith("sha256:"):
                    await podman("untag", each, each, timeout_s=ASK_S)


async def _names() -> dict[str, str]:
    """Every name in the store and the id of its image."""
    listed = json.loads((await podman("images", "--format", "json", timeout_s=ASK_S)).out or b"[]")
    return {name: row["Id"] for row in listed for name in row.get("Names") or ()}


async def _pull(image: str) -> None:
    """Pull docker://NAME. A registry on loopback may speak plain HTTP."""
    plain = ["--tls-verify=false"] if image_reference.is_loopback(image) else []
    done = await _podman(f"{image}: not pulled", "pull", "-q", *plain, image)
    if done.code:
        raise ImageMissing(f"{image}: not pulled: {tail_of(done)}")
