"""One ssh connection to a Podman host: its service's socket comes here, the model's socket goes there.

    tunnel = Tunnel("me@host", 22, "/run/user/1000/podman/podman.sock")
    await tunnel.open()                     # tunnel.url: the service, as a socket on this machine
    folder = await tunnel.carry(llm_dir)    # a folder on the host in which llm.sock is ours

It is the user's own `ssh`, so keys, agents, host names and jumps are those of ~/.ssh/config; it must not have to ask
for anything. On the host it needs a shell and a writable XDG_RUNTIME_DIR or /tmp. A shell there waits for the end of
our line: whatever ends us, by kill -9 too, ends it, and it removes its folder.
"""

import asyncio
import contextlib
import secrets
import shlex
import shutil
from pathlib import Path

from legorl import paths
from legorl.sandbox import owner
from legorl.sandbox.errors import SandboxError

_CONNECT_S = 30.0
_ALIVE_S = 5  # three of them without a sign of life end the connection
# The folder is for its owner alone; the socket in it is for everybody, because a container's user is anybody.
_THERE = """
umask 077
d=$(mktemp -d "${XDG_RUNTIME_DIR:-/tmp}/legorl-XXXXXXXX") && mkdir -m 711 "$d/llm" || exit 1
trap 'rm -rf "$d"' EXIT HUP TERM INT
echo "legorl: $d/llm"
while read -r _; do chmod 666 "$d/llm/llm.sock" && echo "legorl: ok" || echo "legorl: no"; done
"""


class Tunnel:
    """A connection to `destination` (user@host or host). `socket`: the service's, a path on the host."""

    def __init__(self, destination: str, port: int | None, socket: str) -> None:
        self._folder = paths.private_dir() / f"ssh-{owner.mine()}.{secrets.token_hex(4)}"
        self._to = [*(["-p", str(port)] if port else []), destination]
        self._socket = socket
        self._process: asyncio.subprocess.Process | None = None
        self._there = ""
        self._carried: dict[Path, str] = {}
        self._lock = asyncio.Lock()

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/api"

    async def open(self) -> None:
        """Connect. Raises SandboxError with ssh's own words."""
        self._folder.mkdir(mode=0o700)
        options = [
            *("BatchMode=yes", "ExitOnForwardFailure=yes", "ControlPersist=no", f"ConnectTimeout={round(_CONNECT_S)}"),
            *(f"ServerAliveInterval={_ALIVE_S}", "ServerAliveCountMax=3", "ClearAllForwardings=no"),
        ]
        # fmt: off
        argv = ["ssh", "-M", "-S", str(self._folder / "control"), "-L", f"{self._folder}/api:{self._socket}",
                *(word for option in options for word in ("-o", option)), *self._to, f"sh -c {shlex.quote(_THERE)}"]
        # fmt: on
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise SandboxError("ssh is not installed; run: apt-get install openssh-client") from None
        self._there = await self._line()

    async def carry(self, folder: Path) -> str:
        """Have the host's processes reach `folder`/llm.sock; return the folder there that holds its like."""
        async with self._lock:
            if folder not in self._carried:
                if self._carried:
                    raise SandboxError("one connection carries the socket of one model")
                await self._forward(folder)
                self._carried[folder] = self._there
        return self._carried[folder]

    async def _forward(self, folder: Path) -> None:
        assert self._process is not None and self._process.stdin is not None
        # fmt: off
        argv = ["ssh", "-S", str(self._folder / "control"), "-O", "forward", "-R",
                f"{self._there}/llm.sock:{folder}/llm.sock", *self._to]
        # fmt: on
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
        _, said = await process.communicate()
        if process.returncode:
            raise SandboxError(f"ssh -R: {said.decode(errors='replace').strip()}")
        with contextlib.suppress(ConnectionError):  # then the line that we wait for does not come
            self._process.stdin.write(b"\n")
            await self._process.stdin.drain()
        if await self._line() != "ok":
            raise SandboxError("ssh -R: the host has made no socket; see AllowStreamLocalForwarding in its sshd_config")

    async def _line(self) -> str:
        """What our shell there says next; what its start-up files say is passed over.

        Raises SandboxError if the connection ended or nothing comes.
        """
        process = self._process
        assert process is not None and process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(_CONNECT_S):
                while line := await process.stdout.readline():
                    if line.startswith(b"legorl: "):
                        return line.decode().removeprefix("legorl: ").rstrip("\n")
                said = (await process.stderr.read(4096)).decode(errors="replace").strip().splitlines()
        except TimeoutError:
            raise SandboxError(f"ssh: no answer within {_CONNECT_S:g} s") from None
        raise SandboxError(f"ssh: {said[-1] if said else 'the connection ended without a word'}")

    async def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), 10)
            except TimeoutError:  # the network is gone, or somebody still uses the service's socket
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
