"""One sandbox: a rootless container with no network, and the conversation with the supervisor inside it.

    async with open_sandbox(Spec(name="a", run="r1", limits=task.limits)) as box:
        await box.put(pack(task.repo), "/ws/repo")
        await box.commit("/ws/repo")
        result = await box.run(["sh", "-c", "..."], env={}, cwd="/ws/repo")
        patch = await box.diff("/ws/repo")

`podman run -i` stays in the foreground: the supervisor's stdin and stdout are ours, and when this process dies, even by
kill -9, its end of the pipe closes, the supervisor ends and Podman removes the container.
"""

import asyncio
import contextlib
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from legorl.sandbox import limits, owner, podman
from legorl.sandbox.errors import PatchUnusable, SandboxError, SandboxLost
from legorl.sandbox.local import LocalSeat
from legorl.sandbox.seat import Seat, Spec

PATCH_LIMIT = 8 << 20
_OPEN_S = 90.0  # many containers starting at once on few cores
_CLOSE_S = 15.0
_GRACE_S = 60.0  # beyond a time limit that the supervisor itself enforces
_FILES_S = 600.0
_HEADER_LIMIT = 1 << 20

log = logging.getLogger("legorl.sandbox")


@dataclass(frozen=True)
class RunResult:
    """How a command ended.

    exit_code: 128 + signal if one killed it; None if it was stopped or out of time. log: the end of its stdout and
    stderr together. report: the beginning (8 MiB) of what it wrote to the descriptor LEGORL_REPORT_FD.
    """

    exit_code: int | None
    log: bytes
    timed_out: bool
    stopped: bool
    wall_s: float
    report: bytes


class Sandbox:
    """An open sandbox; made by open_sandbox."""

    def __init__(self, spec: Spec, seat: Seat, unique: str) -> None:
        self._seat = seat
        self.name = f"legorl-{re.sub(r'[^A-Za-z0-9_.-]', '-', spec.name)[:80]}-{unique}"
        self.lost = False  # the container ended, unasked
        self._spec = spec
        self._lock = asyncio.Lock()
        self._in_step = True  # every request so far has had its reply read
        self._stderr = b""
        self._full_disks: tuple[str, ...] = ()
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None

    # Opening and closing

    async def _open(self) -> None:
        context = podman.context(self._seat.url)
        image = await self._seat.image()
        self._process = await asyncio.create_subprocess_exec(
            *podman.command(*await self._arguments(image), url=self._seat.url),
            **context,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_HEADER_LIMIT,
            start_new_session=True,  # an interrupt at the terminal is ours to handle, not Podman's
        )
        self._drain = asyncio.create_task(self._keep_stderr())
        what = f"podman run{self._seat.where}"
        try:
            await asyncio.wait_for(self._reply(), _OPEN_S)
        except TimeoutError:
            raise SandboxError(f"{what}: no answer from the container within {_OPEN_S:g} s") from None
        except SandboxLost:
            await asyncio.wait({self._drain}, timeout=5)
            raise podman.failure(what, self._stderr.decode(errors="replace")) from None
        self._seat.confine()
        await self._ask({"op": "start"})

    async def _arguments(self, image: str) -> list[str]:
        spec = self._spec
        disk = spec.limits.disk_mb
        tmpfs = {
            "/ws": f"size={disk}m,mode=1777",
            "/tmp": f"size={limits.TMP_MB}m,mode=1777",
            "/home/agent": f"size={limits.HOME_MB}m,mode=1777",
            "/run/keep": f"size={disk}m,mode=0700",
        }
        # fmt: off
        words = [
            "run", "-i", "--name", self.name,
            "--label", "legorl=1", "--label", f"legorl.run={spec.run}", "--label", f"legorl.owner={owner.mine()}",
            "--pull=never", "--log-driver", "none", "--network", "none", "--init", "--user", "0:0",
            "--cap-drop=all", "--cap-add=SETUID,SETGID,KILL", "--security-opt=no-new-privileges",
            "--security-opt", "label=disable", "--no-hosts",
            "--read-only", "--read-only-tmpfs=false", "--shm-size", f"{limits.SHM_MB}m", "--hostname", "sandbox",
            "--ulimit", "nofile=4096:4096", "--ulimit", "core=0:0",
            "--timeout", str(max(1, round(spec.lifetime_s))), "--stop-timeout", "0", "--workdir", "/",
        ]
        # fmt: on
        for path, options in tmpfs.items():
            words += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,{options}"]
        return [*words, *await self._seat.flags(), image, "python3", "-sEBS", "/lego/supervisor.py"]

    async def _keep_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._stderr = (self._stderr + data)[-8192:]

    async def _close(self) -> None:
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                code = await asyncio.wait_for(process.wait(), _CLOSE_S)
            except TimeoutError:
                code = None
            if code is None:  # first of all: it may hold the container's lock, and `podman rm` would wait for it
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    process.kill()
                await process.wait()
            await self._tidy(self._seat.remove(self.name, clean=code == 0))
            if self._drain is not None:
                await asyncio.wait({self._drain}, timeout=5)
        await self._tidy(self._seat.forget())

    async def _tidy(self, work: Awaitable[None]) -> None:
        """Do the `work` of removing something. If it fails, what was done in the sandbox stands; `reap` tries again."""
        try:
            await work
        except SandboxError as error:
            log.warning("%s: something of it is left for the next command to remove: %s", self.name, error)

    # The conversation

    async def _reply(self) -> tuple[dict[str, Any], bytes]:
        assert self._process is not None and self._process.stdout is not None
        try:
            header = json.loads(await self._process.stdout.readuntil(b"\n"))
            self._seat.told(header)
            return header, await self._process.stdout.readexactly(header["body"])
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._lost() from error

    async def _lost(self) -> SandboxLost:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):  # how Podman ends is evidence
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        self.lost = True
        await self._seat.look_back(self.name)
        seen = self.evidence()
        return SandboxLost(
            f"{self.name}{self._seat.where}: the container ended (lifetime {self._spec.lifetime_s:g} s, "
            f"{seen.oom_kills + seen.host_oom_kills} processes killed for memory, Podman's exit code {seen.exit_code})"
        )

    async def _send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**header, "body": len(body)}).encode() + b"\n")
            for start in range(0, len(body), 1 << 18):
                self._process.stdin.write(body[start : start + (1 << 18)])
                await self._process.stdin.drain()
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise await self._lost() from error

    @contextlib.asynccontextmanager
    async def _exchange(self) -> AsyncIterator[None]:
        """One request and its reply. Cut short (cancelled, lost), the next reply would be that of another request."""
        async with self._lock:
            if not self._in_step:
                raise SandboxLost(f"{self.name}: an earlier request was cut short; open a new sandbox")
            self._in_step = False
            yield
            self._in_step = True

    async def _ask(
        self, header: Mapping[str, Any], body: bytes = b"", timeout_s: float = _FILES_S
    ) -> tuple[dict, bytes]:
        """Send one request and return its reply. Raises SandboxError, SandboxLost, PatchUnusable."""
        async with self._exchange():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._send(header, body)
                    answer, data = await self._reply()
            except TimeoutError:
                raise SandboxLost(f"{self.name}: no answer to {header['op']} within {timeout_s:g} s") from None
        return _checked(header["op"], answer), data

    # What it can do

    async def put(self, tar: bytes, target: str) -> None:
        """Unpack an uncompressed tar below `target` as the agent's user; it replaces what is in the way."""
        await self._ask({"op": "put", "target": target}, tar)

    async def commit(self, repo: str) -> None:
        """Make `repo` a git repository with one root commit, and keep the same tree, privately, as the base of diff."""
        await self._ask({"op": "commit", "repo": repo})

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/ws",
        log_limit: int = 64_000,
        until: asyncio.Event | None = None,
        timeout_s: float | None = None,
    ) -> RunResult:
        """Run a command as the agent's user; when this returns, no process of that user is alive.

        `until`: stop the command when it is set. `timeout_s`: seconds. Raises SandboxLost if the container ended.
        Cancelled, it leaves the command running and the sandbox fit only to be closed: use `until` to go on.
        """
        header: dict[str, Any] = {"op": "run", "argv": list(argv), "env": dict(env or {}), "cwd": cwd}
        header |= {"log_limit": log_limit, "timeout_s": timeout_s}
        async with self._exchange():
            await self._send(header)
            reply = asyncio.ensure_future(self._reply())
            stop = asyncio.ensure_future(until.wait()) if until is not None else None
            patience = None if timeout_s is None else timeout_s + _GRACE_S
            try:
                waiting = {reply} if stop is None else {reply, stop}
                await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not reply.done() and stop is not None and stop.done():
                    await self._send({"op": "stop"})
                    await asyncio.wait({reply}, timeout=_GRACE_S)
                if not reply.done():
                    raise SandboxLost(f"{self.name}: the supervisor does not answer")
                answer, data = await reply
            finally:
                for task in (reply, stop):
                    if task is not None:
                        task.cancel()
        _checked("run", answer)
        self._full_disks = tuple(answer["full_disks"])
        return RunResult(
            exit_code=answer["exit_code"],
            log=data[: answer["log"]],
            timed_out=answer["timed_out"],
            stopped=answer["stopped"],
            wall_s=answer["wall_s"],
            report=data[answer["log"] :],
        )

    async def diff(self, repo: str, *, limit: int = PATCH_LIMIT, timeout_s: float = 120.0) -> bytes:
        """Return what changed in `repo` since commit as `git diff --binary`: untrusted bytes, at most `limit`.

        Raises PatchUnusable if git cannot collect the tree, within `timeout_s` seconds a step and `limit` bytes.
        """
        header = {"op": "diff", "repo": repo, "limit": limit, "seconds": timeout_s}
        return (await self._ask(header, timeout_s=2 * timeout_s + _GRACE_S))[1]

    async def apply(self, patch: bytes, repo: str) -> None:
        """Apply a git diff to the files of `repo`. Raises PatchUnusable with git's message."""
        if patch:
            await self._ask({"op": "apply", "repo": repo}, patch)

    def evidence(self) -> limits.Evidence:
        """Return what the kernel counted, out of the agent's reach; also after the container ended."""
        code = self._process.returncode if self._process is not None else None
        return replace(self._seat.evidence(), full_disks=self._full_disks, exit_code=code)


def _checked(op: str, answer: dict[str, Any]) -> dict[str, Any]:
    if "refused" in answer and op in ("diff", "apply"):
        raise PatchUnusable(answer["refused"])
    if not answer["ok"]:
        raise SandboxError(f"{op}: {answer['error']}")
    return answer


Opener = Callable[[Spec], contextlib.AbstractAsyncContextManager[Sandbox]]


@contextlib.asynccontextmanager
async def open_sandbox(spec: Spec, seat: Callable[[Spec, str], Seat] = LocalSeat) -> AsyncIterator[Sandbox]:
    """Start a container, give it over, and leave nothing of it behind.

    `seat`: makes its place on a machine from the spec and a word of its own. Raises SandboxError, or its kinds
    PodmanMissing, ImageMissing, LimitsError; ImageBroken.
    """
    unique = secrets.token_hex(4)
    box = Sandbox(spec, seat(spec, unique), unique)
    try:
        await box._open()
        yield box
    finally:
        closing = asyncio.ensure_future(box._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # cancelled while closing: close first, then be cancelled
            raise
