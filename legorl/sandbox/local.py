"""A sandbox's seat on this machine: limits as cgroups or Podman's flags, and folders of the host as bind mounts.

seat = LocalSeat(spec, unique)      # see legorl.sandbox.seat for what a seat is
"""

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legorl import paths
from legorl.sandbox import limits, owner, podman, supplies
from legorl.sandbox.errors import LimitsError, SandboxError, SandboxLost
from legorl.sandbox.links import linked_image
from legorl.sandbox.making import ready_image
from legorl.sandbox.seat import Spec


class LocalSeat:
    """Where one sandbox runs here."""

    url = None
    where = ""

    def __init__(self, spec: Spec, unique: str) -> None:
        mark = f"{owner.mine()}.{unique}"
        self._spec = spec
        self._limiter = limits.limiter(mark, spec.limits)
        self._pidfile = podman.pid_folder() / f"{mark}.pid"

    async def image(self) -> str:
        image = await ready_image(self._spec.image)
        return await linked_image(image, self._spec.links) if self._spec.links else image

    async def flags(self) -> list[str]:
        spec, supply = self._spec, supplies.folder()
        mounts = [*spec.mounts, (supply, "/lego")]
        if spec.llm_dir is not None:
            mounts.append((spec.llm_dir, "/run/llm"))
        words = ["--rm", "--pidfile", str(self._pidfile), "--security-opt", f"seccomp={supply}/seccomp.json"]
        words += ["--security-opt", "mask=/sys/fs/cgroup", *self._limiter.flags()]
        for source, target in mounts:
            if re.search(r'[,"\n]', f"{source}{target}"):
                raise SandboxError(f"cannot mount {source}: a comma or quote in its path")
            words += ["--mount", f"type=bind,src={Path(source).absolute()},dst={target},ro=true"]
        return words

    def confine(self) -> None:
        """Put the container's processes under its limits and on its cores. Raises LimitsError, SandboxLost."""
        try:
            pids = self._pids()
            self._limiter.attach(pids)
            if self._spec.cpus_allowed is not None:
                self._keep_on_cores(pids, self._spec.cpus_allowed)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise SandboxLost(f"{self._spec.name}: ended before its limits were set") from error

    def _keep_on_cores(self, pids: list[int], cores: tuple[int, ...]) -> None:
        try:
            for pid in pids:
                os.sched_setaffinity(pid, cores)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise LimitsError(f"cannot keep a sandbox on the cores {cores}: {error}") from error

    def _pids(self) -> list[int]:
        """The container's init and the supervisor, as the host numbers them."""
        init = int(self._pidfile.read_text())
        expected = podman.service_account().pw_uid if paths.is_root() else os.getuid()
        if Path(f"/proc/{init}").stat().st_uid != expected:
            raise SandboxError(f"{self._pidfile}: process {init} is not the container's")
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        return [init, *map(int, children)]

    def told(self, answer: Mapping[str, Any]) -> None:
        """The counters are read from outside: what the supervisor says is not needed."""

    def evidence(self) -> limits.Evidence:
        return self._limiter.evidence()

    async def look_back(self, name: str) -> None:
        """The cgroup outlives the container: there is nothing more to ask."""

    async def remove(self, name: str, clean: bool) -> None:
        if not clean:
            await podman.podman("rm", "-f", "-t", "0", "--ignore", name, check=False)

    async def forget(self) -> None:
        await asyncio.to_thread(self._limiter.remove)
        self._pidfile.unlink(missing_ok=True)
