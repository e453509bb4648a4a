"""Sandboxes opened before they are wanted, and closed after nobody waits for it any more.

    async with Spares(hosts.open) as spares:
        async with spares.open(spec) as box: ...        # fresh, and perhaps ready at once

To start a container takes as long as many a test. An attempt that passes needs a second sandbox, the next attempt
needs one, too: whenever one is taken, the next like it is begun, one for each kind of spec. A spare is as fresh as any:
nothing has been put into it. One that has waited for long is not used, since its lifetime runs.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from types import TracebackType

from legorl.sandbox import Sandbox, SandboxError, Spec
from legorl.sandbox.container import Opener

log = logging.getLogger("legorl.grade")

WAITED_S = 20.0  # a spare that is older is closed; a small part of what a lifetime has to spare
_Entered = tuple[contextlib.AbstractAsyncContextManager[Sandbox], Sandbox]


@dataclass
class _Held:
    opening: "asyncio.Task[_Entered]"
    since: float = field(default_factory=time.monotonic)


class Spares:
    """Opens sandboxes with `opener`. As a context: at its end every sandbox is closed."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._waiting: dict[Spec, _Held] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Spares":
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for held in self._waiting.values():
            self._let_go(held)
        self._waiting.clear()
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def open(self, spec: Spec) -> AsyncIterator[Sandbox]:
        """Give a sandbox of `spec`, but for its name. Raises what the opener raises."""
        kind = replace(spec, name="", run="")
        held = self._waiting.pop(kind, None)
        if held is not None and time.monotonic() - held.since > WAITED_S:
            self._let_go(held)
            held = None
        spare, held = held is not None, held or self._begin(spec)
        try:
            try:
                _, box = await held.opening
            except SandboxError:
                if not spare:
                    raise
                self._let_go(held)  # what came in its way may be over
                held = self._begin(spec)
                _, box = await held.opening
            if kind not in self._waiting:
                self._waiting[kind] = self._begin(replace(spec, name=f"grade-{secrets.token_hex(6)}", run="spare"))
            yield box
        finally:
            self._let_go(held)

    def _begin(self, spec: Spec) -> _Held:
        async def enter() -> _Entered:
            manager = self._opener(spec)
            return manager, await manager.__aenter__()

        return _Held(asyncio.create_task(enter()))

    def _let_go(self, held: _Held) -> None:
        """Close a sandbox, or end its opening; nobody waits for it before the end of the context."""

        async def close() -> None:
            held.opening.cancel()
            await asyncio.wait({held.opening})
            if held.opening.cancelled() or held.opening.exception():  # whoever wanted it has been told
                return
            manager, box = held.opening.result()
            try:
                await manager.__aexit__(None, None, None)
            except SandboxError as error:
                log.warning("%s: %s", box.name, error)

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
