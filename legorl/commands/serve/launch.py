"""Run a Server: sockets, the two HTTP apps, and the command that it serves.

The command (if any) and the server live and die together: the command gets a by-hand session in its environment and
is killed with us; we stop when it ends.
"""

import asyncio
import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn

from legorl import paths
from legorl.commands.serve.app import harness_app
from legorl.commands.serve.control_app import control_app
from legorl.commands.serve.server import Server
from legorl.control import SessionRequest
from legorl.sandbox import owner

BACKLOG = 512
PR_SET_PDEATHSIG = 1


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: lego-serve decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def make_llm_dir() -> Path:
    """A fresh folder for llm.sock that sandboxes may mount: they can connect to it, not list or change it."""
    _remove_leftovers()
    path = paths.mounts_dir() / _name("llm")
    path.mkdir(mode=0o711)
    path.chmod(0o711)
    return path


def _name(kind: str) -> str:
    """KIND-OWNER.RANDOM: whoever finds the folder can tell whether the process that made it still runs."""
    return f"{kind}-{owner.mine()}.{secrets.token_hex(4)}"


def _remove_leftovers() -> None:
    """Remove the folders of servers that were killed before they could."""
    for path in [*paths.mounts_dir().glob("llm-*.*.*.*"), *paths.private_dir().glob("serve-*.*.*.*")]:
        if not owner.is_alive(path.name.partition("-")[2].rpartition(".")[0]):
            shutil.rmtree(path, ignore_errors=True)


def _unix_socket(path: Path, mode: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    path.chmod(mode)
    return sock


@contextlib.asynccontextmanager
async def serving(server: Server, port: int | None) -> AsyncIterator[tuple[Path, int | None]]:
    """Serve both sides; yields (control socket, TCP port of the harness side or None)."""
    folder = paths.private_dir() / _name("serve")
    folder.mkdir(mode=0o700)
    control = folder / "control.sock"
    harness = [_unix_socket(server.llm_dir / "llm.sock", 0o666)]
    bound = None
    if port is not None:
        tcp = socket.socket(socket.AF_INET)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind(("127.0.0.1", port))
        bound = tcp.getsockname()[1]
        harness.append(tcp)
    servers = [
        _Uvicorn(_config(harness_app(server))),
        _Uvicorn(_config(control_app(server))),
    ]
    sockets = [harness, [_unix_socket(control, 0o600)]]
    tasks = [asyncio.create_task(s.serve(sockets=k)) for s, k in zip(servers, sockets, strict=True)]
    try:
        while not all(s.started for s in servers):
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
        yield control, bound
    finally:
        for s in servers:
            s.should_exit = s.force_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(server.llm_dir, ignore_errors=True)


def _config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=_http(),
        ws="none",
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        limit_concurrency=2048,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=64 << 10,
    )


def _http() -> Any:
    try:
        from legorl.commands.serve.guard import Guarded
    except ModuleNotFoundError:  # without httptools; h11 is slower, and bounds heads itself
        return "h11"
    return Guarded


async def run_command(server: Server, argv: list[str], control: Path, port: int, stdout: int, stderr: int) -> int:
    """Run `argv` with this server in its environment; return its exit code. It dies with this process."""
    session = server.open_session(SessionRequest(attempt_id="by-hand", turn_tokens=1024))
    base = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "LEGORL_SERVE": str(control),
        "LEGORL_MODEL": str(server.model.path),
        "OPENAI_BASE_URL": base + "/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session.key,
    }
    child = await asyncio.create_subprocess_exec(
        *argv, env=environment, stdout=stdout, stderr=stderr, preexec_fn=_die_with_parent()
    )
    try:
        return _code(await _until_failed(server, child))
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                await asyncio.wait_for(child.wait(), 15)
            except TimeoutError:
                child.kill()
                await child.wait()


async def _until_failed(server: Server, child: asyncio.subprocess.Process) -> int:
    ended = asyncio.create_task(child.wait())
    while not ended.done():
        await asyncio.wait([ended], timeout=0.5)
        if server.failed:
            return 1
    return ended.result()


def _code(returned: int) -> int:
    return 128 - returned if returned < 0 else returned


def _die_with_parent() -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def set_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return set_signal
