"""A Podman host other than this machine's own Podman: how sandboxes are opened there, and what is known of them.

    host = await connect("ssh://me@host/run/user/1000/podman/podman.sock")
    async with open_sandbox(spec, host.seat) as box: ...

Everything goes through the service's API, by Podman's own client. The host's Podman sets the limits (the probe finds
out whether they act); what the kernel counts is read by the supervisor, as root of the container, which the agent can
neither be nor signal. A container that ends unasked is asked after: `OOMKilled` is Podman's word.
"""

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from legorl.sandbox import limits, owner, podman, supplies
from legorl.sandbox.errors import SandboxError
from legorl.sandbox.making import ready_image
from legorl.sandbox.seat import Spec
from legorl.sandbox.sent import Sent
from legorl.sandbox.tunnel import Tunnel

USERS = 2048  # user ids of one container on a rootful host; 0, 1000 and 1002 are used
_ANSWER_S = 20.0
_UPTIME = re.compile(r"(?:(\d+)h )?(?:(\d+)m )?([\d.]+)s")


class RemoteHost:
    """A Podman service that answers. `label`: the URL as it was given; `cpus`: of the host; `running`: sandboxes."""

    def __init__(self, label: str, url: str, tunnel: Tunnel | None, info: Mapping[str, Any]) -> None:
        self.label = label
        self.url = url
        self._tunnel = tunnel
        self._info = info
        self._sent = Sent(url)

    @property
    def cpus(self) -> int:
        return max(1, int(self._info["host"]["cpus"]))

    @property
    def memory_bytes(self) -> int:
        return int(self._info["host"]["memTotal"])

    @property
    def rootless(self) -> bool:
        return bool(self._info["host"]["security"]["rootless"])

    @property
    def identity(self) -> list[str]:
        """What a passed probe holds for: this URL, Podman, kernel and runtime, since this boot of the host."""
        host = self._info["host"]
        words = [self.label, host["hostname"], host["kernel"], host["ociRuntime"]["version"], str(self.rootless)]
        return [*words, host["cgroupVersion"], host["cgroupManager"], self._info["version"]["Version"]]

    @property
    def booted(self) -> float | None:
        """When the host was booted, in seconds since 1970, to a minute or so; None if it does not tell."""
        found = _UPTIME.match(str(self._info["host"].get("uptime", "")))
        if not found:
            return None
        hours, minutes, seconds = (float(part or 0) for part in found.groups())
        return time.time() - 3600 * hours - 60 * minutes - seconds

    def seat(self, spec: Spec, unique: str) -> "RemoteSeat":
        return RemoteSeat(self, spec)

    async def answers(self) -> bool:
        """Does the service answer?"""
        try:
            await podman.podman("info", url=self.url, timeout_s=_ANSWER_S)
        except SandboxError:
            return False
        return True

    async def image(self, spec: Spec) -> str:
        """Return the image there that `spec` calls for, sending what is missing."""
        mounts = (*spec.mounts, (supplies.folder(), "/lego"))
        return await self._sent.image(await ready_image(spec.image), spec.links, mounts)

    async def model_folder(self, folder: Path) -> str:
        """Return the folder there whose llm.sock is that of `folder` here."""
        return str(folder) if self._tunnel is None else await self._tunnel.carry(folder)

    async def reap(self) -> list[str]:
        """Remove containers of dead owners; return their names.

        Other machines' owners cannot be looked at: their containers go a day after they have ended.
        """
        ours = ("label=legorl=1", f"label=legorl.view={owner.view()}")
        filters = [word for each in ours for word in ("--filter", each)]
        listed = await podman.podman("ps", "-a", *filters, "--format", "json", url=self.url)
        dead = [
            row["Names"][0]
            for row in json.loads(listed.out or b"[]")
            if not owner.is_alive((row.get("Labels") or {}).get("legorl.owner", ""))
        ]
        if dead:
            await podman.podman("rm", "-f", "-t", "0", "--ignore", *dead, url=self.url, timeout_s=120)
        old = ("--filter", "label=legorl.view", "--filter", "until=24h")
        await podman.podman("container", "prune", "-f", *old, url=self.url, timeout_s=120)
        return dead

    async def close(self) -> None:
        if self._tunnel is not None:
            await self._tunnel.close()


async def connect(label: str) -> RemoteHost:
    """Reach the Podman service at `label`, a URL unix:///PATH or ssh://[USER@]HOST[:PORT]/PATH.

    Raises SandboxError if it does not answer, ValueError for another URL.
    """
    parts = urlsplit(label)
    if parts.scheme not in ("unix", "ssh") or not parts.path or (parts.scheme == "ssh") != bool(parts.hostname):
        raise ValueError(f"{label!r}: neither unix:///PATH nor ssh://[USER@]HOST[:PORT]/PATH")
    tunnel = None
    url = label
    if parts.scheme == "ssh":
        tunnel = Tunnel(
            f"{parts.username}@{parts.hostname}" if parts.username else parts.hostname or "", parts.port, parts.path
        )
        url = tunnel.url
    try:
        if tunnel is not None:
            await tunnel.open()
        info = json.loads((await podman.podman("info", "--format", "json", url=url, timeout_s=_ANSWER_S)).out)
    except BaseException:
        if tunnel is not None:
            await tunnel.close()
        raise
    return RemoteHost(label, url, tunnel, info)


class RemoteSeat:
    """Where one sandbox runs on another host."""

    def __init__(self, host: RemoteHost, spec: Spec) -> None:
        self._host = host
        self._spec = spec
        self.url = host.url
        self.where = f" on {host.label}"
        self._texts: dict[str, str] = {}
        self._killed_for_memory = False

    async def image(self) -> str:
        return await self._host.image(self._spec)

    async def flags(self) -> list[str]:
        words = ["--label", f"legorl.view={owner.view()}", "--seccomp-policy=image", "--cgroupns=private"]
        words += limits.Native(self._spec.limits).flags()
        if not self._host.rootless:
            # Without a limit of ours Podman raises this one to what root may not have in every container of its own.
            words += [f"--userns=auto:size={USERS}", "--ulimit", "nproc=4096:4096"]
        if self._spec.llm_dir is not None:
            folder = await self._host.model_folder(self._spec.llm_dir)
            words += ["--mount", f"type=bind,src={folder},dst=/run/llm,ro=true"]
        return words

    def confine(self) -> None:
        """The host's Podman has."""

    def told(self, answer: Mapping[str, Any]) -> None:
        self._texts = answer.get("counters") or self._texts

    def evidence(self) -> limits.Evidence:
        """Return the counters as the supervisor last read them, and what Podman said of a container that was lost."""
        # A container without a cgroup of its own sees others' files, but never all of these.
        known = "pids.events" in self._texts and {"memory.events", "memory.oom_control"} & self._texts.keys()
        seen = limits.evidence_in(cast(Path, _Cgroup(self._texts))) if known else limits.Evidence()
        if self._killed_for_memory and not (seen.oom_kills or seen.host_oom_kills):
            seen = replace(seen, oom_kills=1)  # at least one, since the supervisor last looked
        return seen

    async def look_back(self, name: str) -> None:
        ask = ("inspect", "--type", "container", "--format", "{{.State.OOMKilled}}", name)
        with contextlib.suppress(SandboxError):  # a host that is gone tells nothing
            done = await podman.podman(*ask, url=self.url, check=False, timeout_s=_ANSWER_S)
            self._killed_for_memory = done.out.strip() == b"true"

    async def remove(self, name: str, clean: bool) -> None:
        with contextlib.suppress(SandboxError):  # a host that is gone: reaped when it is there again
            await podman.podman("rm", "-f", "-t", "0", "--ignore", name, url=self.url, check=False)

    async def forget(self) -> None:
        """Nothing of it is here."""


class _Cgroup:
    """What the supervisor read of the container's cgroup, to be asked as the folder would be."""

    def __init__(self, texts: Mapping[str, str], name: str = "") -> None:
        self._texts, self._name = texts, name

    def __truediv__(self, name: str) -> "_Cgroup":
        return _Cgroup(self._texts, name)

    def exists(self) -> bool:
        return self._name in self._texts

    def read_text(self) -> str:
        return self._texts[self._name]
