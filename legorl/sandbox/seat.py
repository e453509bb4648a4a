"""What one sandbox shall be (Spec), and what the machine it runs on does for it (Seat).

Two seats: legorl.sandbox.local, on this machine, and legorl.sandbox.remote, on another Podman host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from legorl.sandbox.image import BASE_IMAGE
from legorl.sandbox.limits import Evidence
from legorl.sandbox.links import Links
from legorl.task import Limits


@dataclass(frozen=True)
class Spec:
    """What one sandbox shall be.

    image: as legorl.image_reference has it. mounts: (host folder or file, path inside), all read-only. links: (path,
    target) of symbolic links that its file system has beside what the image has. llm_dir: the folder that holds
    llm.sock; then 127.0.0.1:8400 inside leads to it. lifetime_s: the container is killed after that, whoever still
    wants it. cpus_allowed: the cores its processes may use, if it runs on this machine.
    """

    name: str
    run: str
    limits: Limits
    image: str = BASE_IMAGE
    mounts: tuple[tuple[Path | str, str], ...] = ()
    links: Links = ()
    llm_dir: Path | None = None
    lifetime_s: float = 3600.0
    cpus_allowed: tuple[int, ...] | None = None


class Seat(Protocol):
    """Where one sandbox runs. `url`: of the Podman service, None for this machine; `where`: " on HOST" for messages."""

    @property
    def url(self) -> str | None: ...

    @property
    def where(self) -> str: ...

    async def image(self) -> str:
        """Return the image to run, making it first if need be. Raises SandboxError."""

    async def flags(self) -> list[str]:
        """Return the flags of `podman run` for limits, system call filter and mounts. Raises SandboxError."""

    def confine(self) -> None:
        """Called when only init and the supervisor run: put in force what flags cannot."""

    def told(self, answer: Mapping[str, Any]) -> None:
        """Take note of an answer of the supervisor's."""

    def evidence(self) -> Evidence:
        """Return what was counted so far."""

    async def look_back(self, name: str) -> None:
        """The container has ended unasked: find out what can still be found out."""

    async def remove(self, name: str, clean: bool) -> None:
        """Podman has ended, or will not: leave no container behind. `clean`: it ended as it was asked to."""

    async def forget(self) -> None:
        """Remove whatever else there is."""
