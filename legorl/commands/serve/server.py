"""The state of a running lego-serve: engine, sessions, and the gate between turns and new weights.

New weights: new turns wait at the gate, running ones finish, the weights load, every cache is cleared, the version
moves. So a turn has one policy version.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from legorl import checkpoint
from legorl.commands.serve.engine import Engine, EngineError
from legorl.commands.serve.render import Template, end_tokens
from legorl.commands.serve.session import Session
from legorl.control import Health, SessionRequest


class Server:
    """One engine and its sessions. Lives in one event loop."""

    def __init__(
        self,
        engine: Engine,
        model: checkpoint.Checkpoint,
        llm_dir: Path,
        free_cores: list[int],
        require_routing: bool = False,
        *,
        tool_format: str = "auto",
        history: str = "exact",
    ):
        self.require_routing = require_routing  # a turn without all its experts ends its session
        self.engine = engine
        self.model = model
        self.weights = model
        self.version = model.version
        self.name = model.name
        self.template = Template(engine.tokenizer, tool_format, history, end_tokens(model.folder))
        self.llm_dir = llm_dir
        self.free_cores = free_cores
        self.started = time.time()
        self._failed: str | None = None
        self._sessions: dict[str, Session] = {}
        self._keys: dict[str, Session] = {}
        self._running = 0
        self._loading = False
        self._moved = asyncio.Condition()
        self.counters = {"turns": 0, "tokens": 0, "sessions": 0, "weight_loads": 0}

    @property
    def failed(self) -> str | None:
        """Why this server can go on no longer, or None."""
        return self._failed or self.engine.failure

    def health(self) -> Health:
        info = self.engine.info()
        return Health(
            model=str(self.model.path),
            name=self.name,
            engine=info.name,
            version=self.version,
            digest=self.weights.digest,
            weights_path=str(self.weights.path),
            tokenizer_digest=self.model.tokenizer_digest,
            template_digest=self.template.digest,
            context=info.context,
            llm_dir=str(self.llm_dir),
            routing="recorded" if info.routing else info.unrouted,
            engine_cores=info.cores,
            free_cores=self.free_cores,
        )

    # -- sessions --------------------------------------------------------------------------------------------------

    def open_session(self, request: SessionRequest) -> Session:
        session = _Gated(request, self)
        self._sessions[session.id] = session
        self._keys[session.key] = session
        self.counters["sessions"] += 1
        return session

    def session(self, ident: str) -> Session | None:
        return self._sessions.get(ident)

    def session_by_key(self, key: str) -> Session | None:
        return self._keys.get(key)

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    def held(self) -> dict[str, int]:
        """What the open sessions hold: turns and sampled tokens so far, and bytes of turns spilled to disk."""
        sessions = self._sessions.values()
        return {
            "turns": sum(len(s.turns) for s in sessions),
            "tokens": sum(s.tokens for s in sessions),
            "spilled_bytes": sum(s.spilled for s in sessions),
        }

    async def end_session(self, session: Session) -> None:
        """Close and forget it; its key is dead from here on."""
        self._sessions.pop(session.id, None)
        if self._keys.pop(session.key, None):
            await session.close()
            self.counters["turns"] += len(session.turns)
            self.counters["tokens"] += session.tokens

    # -- turns and weights -----------------------------------------------------------------------------------------

    async def enter(self) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: not self._loading)
            self._running += 1

    def leave(self) -> None:
        self._running -= 1
        self._waking = asyncio.ensure_future(self._wake())  # kept: the loop holds tasks weakly

    async def _wake(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def load_weights(self, path: Path, version: int | None) -> dict[str, Any]:
        """Serve the checkpoint at `path` from the next turn on.

        Raises ModelError (nothing changed), or EngineError: the engine then holds no known weights and must stop.
        """
        new = checkpoint.open_checkpoint(path)
        if new.tokenizer_digest != self.model.tokenizer_digest:
            raise checkpoint.ModelError(
                f"{path}: its tokenizer is not that of the model being served ({self.model.path})"
            )
        async with self._moved:
            await self._moved.wait_for(lambda: not self._loading)
            self._loading = True
            try:
                await self._moved.wait_for(lambda: self._running == 0)
            except BaseException:
                self._loading = False
                self._moved.notify_all()
                raise
        try:
            digest = await asyncio.to_thread(lambda: new.digest)
            await self.engine.load_weights(new.folder, new.version if version is None else version)
            self.weights, self.version = new, new.version if version is None else version
            self.counters["weight_loads"] += 1
        except EngineError as error:
            self._failed = str(error)
            raise
        finally:
            async with self._moved:
                self._loading = False
                self._moved.notify_all()
        return {"version": self.version, "digest": digest}


class _Gated(Session):
    """A session whose turns pass the server's gate, and which notes the weights that it was served by."""

    def __init__(self, request: SessionRequest, server: Server):
        super().__init__(request, server.engine, server.template)
        self._server = server
        self.require_routing = server.require_routing
        self.weights: dict[int, dict[str, Any]] = {}

    async def gate(self) -> None:
        await self._server.enter()
        if recorded := self._server.engine.info().recorded:
            self.weights = recorded
            return
        held = self._server.weights
        self.weights[self._server.version] = {
            "version": self._server.version,
            "digest": held.digest,
            "path": str(held.path),
        }

    def leave(self) -> None:
        self._server.leave()
