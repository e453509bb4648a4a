"""A server whose script goes with deeds: what else happens at a turn of an attempt, before the turn is answered.

    with Acting(model, lines) as serving:
        serving.acts["run.0.loop.task.0", 1] = deed          # async; called once, when that attempt asks its turn 1
        rollout(..., serve=serving.control)

The server runs in this process, on a thread, with real sockets; the commands that use it are real, too.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from legorl.checkpoint import open_checkpoint
from legorl.commands.rollout.attempt import Job
from legorl.commands.serve.engine import Ask, Delta
from legorl.commands.serve.launch import make_llm_dir, serving
from legorl.commands.serve.script_engine import ScriptEngine, read_script
from legorl.commands.serve.server import Server

Deed = Callable[[], Awaitable[Any]]


class ActingEngine(ScriptEngine):
    """`forgetful`: attempts of whose tokens it gives no log-probabilities."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.acts: dict[tuple[str, int], Deed] = {}
        self.loading: Deed | None = None
        self.forgetful: set[str] = set()
        self._turns: dict[str, tuple[str, int]] = {}

    def admit(self, ask: Ask) -> None:
        super().admit(ask)
        self._turns[ask.request_id] = ask.attempt_id, ask.node.index

    async def generate(self, request_id: str, *rest: Any) -> AsyncIterator[Delta]:
        attempt, _ = turn = self._turns.pop(request_id)
        if deed := self.acts.pop(turn, None):
            await deed()
        async for delta in super().generate(request_id, *rest):
            if attempt in self.forgetful:
                delta.logprobs = []
            yield delta

    async def load_weights(self, folder: Path, version: int) -> None:
        if self.loading:
            await self.loading()
        await super().load_weights(folder, version)


class Acting:
    """One running server. `control`: its socket; `acts`, `engine`: see ActingEngine; `loop`: where deeds run."""

    def __init__(self, model: Path, script: Path, context: int | None = None):
        self._model, self._script, self._context = model, script, context
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "Acting":
        self._thread.start()
        assert self._up.wait(60), "the server does not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        held = open_checkpoint(self._model)
        self.engine = ActingEngine(held.folder, held.version, read_script(self._script), self._context)
        self.acts = self.engine.acts
        self.server = Server(self.engine, held, make_llm_dir(), [])
        async with serving(self.server, None) as (control, _port):
            self.control = str(control)
            self._up.set()
            await self._stop.wait()

    def load_soon(self, path: Path, version: int) -> Deed:
        """A deed: somebody else has other weights loaded; they are in place before the attempt's next turn."""

        async def deed() -> None:
            self._load = asyncio.create_task(self.server.load_weights(path, version))
            while not self.server._loading:  # from then on new turns wait
                await asyncio.sleep(0)

        return deed


def write_script(path: Path, lines: dict[str, str]) -> Path:
    """Write a script: regular expression on the last message -> answer."""
    path.write_text("\n".join(json.dumps({"match": match, "text": text}) for match, text in lines.items()))
    return path


def sandbox_of(attempt_id: str, tried: int = 0) -> str:
    """How the name of the container begins in which an attempt of lego-rollout runs."""
    group, _, n = attempt_id.rpartition(".")
    return f"legorl-{Job(None, group, int(n), tuple({} for _ in range(tried))).sandbox}-"  # type: ignore[arg-type]


def processes_of(container: str, run: str = "") -> dict[str, int]:
    """Process ids of the container (of `run`) whose name begins so: podman, conmon, init, supervisor, if they live."""
    found: dict[str, int] = {}
    for pid, words in _commands():
        wanted = words[0].endswith(b"podman") and b"run" in words and _named(words, b"--name", container)
        if wanted and (not run or f"legorl.run={run}".encode() in words):
            found["podman"] = pid
            container = words[words.index(b"--name") + 1].decode()
    for pid, words in _commands():
        if words[0].endswith(b"conmon") and _named(words, b"-n", container) and (not run or "podman" in found):
            found["conmon"] = pid
    for pid, words in _commands():
        parent = _parent(pid)
        if parent == found.get("conmon") and not words[0].endswith(b"conmon"):
            found["init"] = pid
    for pid, words in _commands():
        if _parent(pid) == found.get("init") and words[-1].endswith(b"supervisor.py"):
            found["supervisor"] = pid
    return found


def _named(words: list[bytes], option: bytes, beginning: str) -> bool:
    return option in words and words[words.index(option) + 1].startswith(beginning.encode())


def _commands() -> Iterator[tuple[int, list[bytes]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if words := (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0"):
                yield int(entry.name), words


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
