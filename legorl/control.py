"""Client of lego-serve's control socket: sessions, weights, health. HTTP over a Unix socket (mode 0600).

    POST /sessions            body SessionRequest; the reply streams NDJSON events and stays open: the session lives
                              as long as this connection. First event: {"event": "open", "session", "key"}.
                              Then {"event": "begin"} when a turn begins to wait or run, {"event": "turn", "turns",
                              "tokens", "engine_s", "queue_s"} when it has ended, well or badly,
                              {"event": "budget", "which"} when a budget is spent, {"event": "lost", "detail"} when the
                              engine failed.
    POST /sessions/ID/close   the session's turns as an Arrow IPC stream: one row, column `turns` (schema.TURN), and
                              JSON under the metadata key `legorl` (see Closed).
    POST /weights             {"path", "version"}: load a checkpoint; answers when it serves. Refused while loading.
    GET  /health              see Health.

Usage:
    async with Control(socket) as control:
        async with control.session(request) as session:
            session.key; session.state; closed = await session.close()
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx


class ServeError(Exception):
    """lego-serve cannot be reached, or refused."""


@dataclass(frozen=True)
class Health:
    """What a running lego-serve says of itself."""

    model: str  # path of the folder first loaded
    name: str  # the model name that the API shows
    engine: str
    version: int
    digest: str
    weights_path: str
    tokenizer_digest: str
    template_digest: str
    context: int  # tokens, prompt and completion together
    llm_dir: str  # folder to mount: holds llm.sock, the harness side
    routing: str | None  # `recorded`, or why the experts of a sparse model are not; None: there are none
    engine_cores: list[int]  # cores the engine keeps for itself; [] = none
    free_cores: list[int]  # cores for sandboxes


@dataclass(frozen=True)
class SessionRequest:
    attempt_id: str
    seed: int = 0
    harness: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    turn_tokens: int = 512  # most sampled tokens of one turn
    max_turns: int | None = None
    max_tokens: int | None = None  # most sampled tokens of the session
    max_seconds: float | None = None  # of the harness's own time, from its first request on; engine and queue excluded
    max_idle_turns: int | None = None  # main turns in a row that are offered tools and call none
    spent_status: int = 400  # HTTP status of the answer when a budget is spent: one that the harness does not retry
    side_patterns: tuple[str, ...] = ()  # regular expressions on the first system text that mark side requests
    user_agent: str = ""  # regular expression of the harness's own user agent; others are foreign


@dataclass
class SessionState:
    """Kept up to date by events while the session is open. Seconds are summed over turns."""

    turns: int = 0
    tokens: int = 0
    engine_s: float = 0.0
    queue_s: float = 0.0
    running: int = 0  # turns that wait for the engine or run now
    busy_since: float | None = None  # time.monotonic() since when at least one does
    busy_s: float = 0.0  # seconds in which at least one did, the present stretch left out
    budget: str | None = None  # `turns`, `tokens`, `seconds`, `idle_turns` once that budget is spent
    lost: str | None = None  # why the engine cannot serve this session any more


@dataclass(frozen=True)
class Closed:
    """A closed session: its turns as an Arrow array of one list<TURN>, and the summary."""

    turns: Any  # pyarrow.ListArray of length 1
    weights: list[dict[str, Any]]
    tokenizer_digest: str
    template_digest: str
    engine_s: float
    queue_s: float
    tokens: int
    count: int
    text_only: bool  # the last answer carried no tool call
    overflow: bool  # the last request did not fit the context
    budget: str | None  # the budget that a request was refused for
    lost: str | None  # why the engine could not serve the session any more
    notes: dict[str, int] = field(default_factory=dict)


class Session:
    """One open session. `state` changes as events arrive; `changed` is set on every event."""

    def __init__(self, client: httpx.AsyncClient, ident: str, key: str):
        self._client = client
        self.id = ident
        self.key = key
        self.state = SessionState()
        self.changed = asyncio.Event()
        self._closing = False

    async def close(self) -> Closed:
        """Close the session and return what it recorded. Raises ServeError if the server is gone."""
        import pyarrow as pa

        self._closing = True
        try:
            reply = await self._client.post(f"/sessions/{self.id}/close", timeout=120)
        except httpx.HTTPError as error:
            raise ServeError(f"lego-serve went away while closing session {self.id}: {error!r}") from error
        if reply.status_code != 200:
            raise ServeError(f"closing session {self.id}: {reply.text}")
        table = pa.ipc.open_stream(reply.content).read_all()
        summary = json.loads(table.schema.metadata[b"legorl"])
        return Closed(turns=table.column("turns").combine_chunks(), **summary)

    async def _follow(self, lines: AsyncIterator[str]) -> None:
        try:
            async for line in lines:
                event = json.loads(line)
                state = self.state
                if event["event"] == "begin":
                    state.running += 1
                    state.busy_since = state.busy_since or time.monotonic()
                elif event["event"] == "turn":
                    state.running -= 1
                    if not state.running and state.busy_since is not None:
                        state.busy_s += time.monotonic() - state.busy_since
                        state.busy_since = None
                    state.turns, state.tokens = event["turns"], event["tokens"]
                    state.engine_s, state.queue_s = event["engine_s"], event["queue_s"]
                elif event["event"] == "budget":
                    state.budget = event["which"]
                elif event["event"] == "lost":
                    state.lost = event["detail"]
                self.changed.set()
        except httpx.HTTPError as error:
            self._ended(f"the control connection broke: {error!r}")
        else:
            self._ended("lego-serve ended the session")

    def _ended(self, detail: str) -> None:
        if not self._closing:
            self.state.lost = self.state.lost or detail
            self.changed.set()


class Control:
    """Connection to a control socket. Raises ServeError where nobody listens."""

    def __init__(self, socket: Path | str):
        self.socket = Path(socket)
        transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=None))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://serve", timeout=30)

    async def __aenter__(self) -> "Control":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            reply = await self._client.request(method, path, **kwargs)
        except (httpx.HTTPError, OSError) as error:
            raise self._unanswered(error) from error
        if reply.status_code != 200:
            raise ServeError(f"lego-serve refused {method} {path}: {reply.text}")
        return reply.json()

    def _unanswered(self, error: Exception) -> ServeError:
        if isinstance(error, httpx.ReadTimeout):  # somebody listens
            seconds = error.request.extensions["timeout"]["read"]
            return ServeError(
                f"lego-serve on {self.socket} has not answered {error.request.method} {error.request.url.path} in "
                f"{seconds:g} s; it is busy or hangs, as its log may tell, and may yet do it"
            )
        return ServeError(
            f"no lego-serve answers on {self.socket} ({str(error) or repr(error)}); start one with `lego-serve MODEL` "
            "and give its socket with --serve or LEGORL_SERVE"
        )

    async def health(self) -> Health:
        return Health(**await self._call("GET", "/health"))

    async def load_weights(self, path: Path, version: int) -> dict[str, Any]:
        """Make the engine serve the checkpoint at `path` from the next turn on. Returns {"version", "digest"}."""
        return await self._call("POST", "/weights", json={"path": str(path), "version": version}, timeout=600)

    @contextlib.asynccontextmanager
    async def session(self, request: SessionRequest) -> AsyncIterator[Session]:
        """Open a session; it ends with this block, closed or not. Raises ServeError if it cannot be had."""
        async with contextlib.AsyncExitStack() as stack:
            opening = self._client.stream("POST", "/sessions", json=asdict(request), timeout=None)
            try:
                reply = await stack.enter_async_context(opening)
                if reply.status_code != 200:
                    raise ServeError(f"lego-serve refused a session: {(await reply.aread()).decode()}")
                lines = reply.aiter_lines()
                first = json.loads(await anext(lines))
            except (httpx.HTTPError, StopAsyncIteration) as error:
                raise self._unanswered(error) from error
            session = Session(self._client, first["session"], first["key"])
            follower = asyncio.create_task(session._follow(lines))
            try:
                yield session
            finally:
                follower.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await follower
