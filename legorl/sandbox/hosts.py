"""The Podman hosts that a command opens its sandboxes on.

    async with open_hosts(urls) as hosts:           # none: this machine's own Podman
        await hosts.ensure_ready({task.limits})     # reap, and probe each host once per boot
        async with hosts.open(spec) as box: ...     # on the host with the fewest sandboxes a core

`local` among the URLs is this machine's own Podman. A host that no longer answers, or on which FAILURES sandboxes in a
row could not be opened, is set aside, with a word in the log; its sandboxes end as lost, and what is tried again goes
to the others. The last one's end is HostsGone.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

from legorl.sandbox import probe
from legorl.sandbox.container import Sandbox, open_sandbox
from legorl.sandbox.errors import HostsGone, ImageMissing, LimitsError, PodmanMissing, SandboxError
from legorl.sandbox.limits import memory_bytes
from legorl.sandbox.local import LocalSeat
from legorl.sandbox.remote import RemoteHost, connect
from legorl.sandbox.seat import Seat, Spec
from legorl.task import Limits

LOCAL = "local"
FAILURES = 3

log = logging.getLogger("legorl.sandbox")


@dataclass
class Place:
    """A host and how it fares. `host` is None for this machine's own Podman."""

    host: RemoteHost | None
    running: int = 0
    failures: int = 0  # to open a sandbox, in a row
    gone: bool = False

    @property
    def label(self) -> str:
        return self.host.label if self.host else LOCAL

    @property
    def load(self) -> float:
        return self.running / (self.host.cpus if self.host else probe.cores())

    @property
    def seat(self) -> Callable[[Spec, str], Seat]:
        return self.host.seat if self.host else LocalSeat


class Hosts:
    """Made by open_hosts."""

    def __init__(self, places: Sequence[Place], alone: bool) -> None:
        self.places = places
        self._alone = alone  # this machine's own Podman and no other: what fails there, fails

    async def ensure_ready(self, wanted: Collection[Limits]) -> None:
        """Reap what dead owners left, and find out, once per boot of a host, whether every limit is enforced on it.

        Raises LimitsError where one is not, or where one of `wanted` is more than a host has.
        """
        await asyncio.gather(*(self._ready(place, wanted) for place in self.places if not place.gone))
        self._left()

    async def _ready(self, place: Place, wanted: Collection[Limits]) -> None:
        try:
            await probe.ensure_ready(max(wanted, key=memory_bytes, default=None), place.host)
        except (LimitsError, ImageMissing, PodmanMissing):
            raise
        except SandboxError as error:
            if self._alone:
                raise
            self._set_aside(place, str(error))

    @contextlib.asynccontextmanager
    async def open(self, spec: Spec) -> AsyncIterator[Sandbox]:
        """Open a sandbox on the host with the least load. Raises what open_sandbox raises, and HostsGone."""
        place = min(self._left(), key=lambda place: place.load)
        place.running += 1
        box: Sandbox | None = None
        try:
            async with open_sandbox(spec, place.seat) as box:
                place.failures = 0
                yield box
        except SandboxError as error:
            if box is None and not isinstance(error, ImageMissing):  # that is the task's, on every host
                place.failures += 1
                await self._judge(place, error)
            raise
        finally:
            place.running -= 1
            if box is not None and box.lost:
                await self._judge(place)

    async def _judge(self, place: Place, error: SandboxError | None = None) -> None:
        """A sandbox was lost, or could not be opened: is it the host?"""
        if self._alone or place.gone:
            return
        if place.host is not None and not await place.host.answers():
            self._set_aside(place, "it does not answer any more")
        elif place.failures >= FAILURES:
            self._set_aside(place, f"{FAILURES} sandboxes in a row could not be opened, the last for: {error}")

    def _set_aside(self, place: Place, why: str) -> None:
        if not place.gone:
            place.gone = True
            left = sum(not each.gone for each in self.places)
            log.warning(
                "going on without the Podman host %s: %s (%d of %d left)", place.label, why, left, len(self.places)
            )

    def _left(self) -> list[Place]:
        left = [place for place in self.places if not place.gone]
        if not left:
            names = ", ".join(place.label for place in self.places)
            raise HostsGone(f"no Podman host is left of {names}; see to them and run this again, it continues")
        return left


@contextlib.asynccontextmanager
async def open_hosts(urls: Sequence[str] = ()) -> AsyncIterator[Hosts]:
    """Reach every host of `urls`, or this machine's own Podman where there are none.

    A host that does not answer is left out. Raises HostsGone if none answers, ValueError for what is no URL.
    """
    names = list(dict.fromkeys(urls)) or [LOCAL]
    found = await asyncio.gather(*(_reach(name) for name in names), return_exceptions=True)
    async with contextlib.AsyncExitStack() as stack:
        for place in found:
            if isinstance(place, Place) and place.host is not None:
                stack.push_async_callback(place.host.close)
        places = []
        for name, place in zip(names, found, strict=True):
            if isinstance(place, Place):
                places.append(place)
            elif isinstance(place, SandboxError) and not isinstance(place, PodmanMissing):
                log.warning("going on without the Podman host %s: %s", name, place)
            else:
                raise place
        if not places:
            raise HostsGone(f"no Podman host answers of {', '.join(names)}; see to them and run this again")
        yield Hosts(places, alone=names == [LOCAL])


async def probe_hosts(urls: Sequence[str] = ()) -> dict[str, dict[str, probe.Check]]:
    """Return what the probe of each host finds now, by its URL. Raises SandboxError for one that opens no sandbox."""
    async with open_hosts(urls) as hosts:
        places = hosts.places
        found = await asyncio.gather(*(probe.probe(place.seat) for place in places))
    return {place.label: checks for place, checks in zip(places, found, strict=True)}


async def _reach(name: str) -> Place:
    return Place(None if name == LOCAL else await connect(name))
