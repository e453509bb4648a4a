"""One LLM call as every protocol sees it: the request it answers, what is being sampled, and who waits for it.

A turn that has ended is spilled to a file, and once its answer has been handed over only its `Past` stays in memory.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from legorl import routing, tree
from legorl.commands.serve import tools as toolformat
from legorl.commands.serve.engine import EngineError, Sampling
from legorl.commands.serve.formats import BY_NAME, Format
from legorl.commands.serve.messages import BadRequest, Message
from legorl.routing import Shape


class Cut(Exception):
    """The connection is to be closed in the middle of the answer: a script asked for this fault."""


@dataclass(frozen=True)
class Request:
    """One model request, whatever protocol it came in by."""

    protocol: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    requested: dict[str, Any]  # sampling as the harness asked
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    streamed: bool = False
    retry: bool = False  # the client says that it sends this request again
    user_agent: str = ""
    include_usage: bool = False  # chat: a last chunk of the stream tells the usage
    forms: dict[str, Any] = field(default_factory=dict)  # Responses: tools that its clients call by other means


@dataclass
class Turn:
    """One LLM call: its place in the tree, what is being sampled, and who waits for it."""

    node: tree.Node
    cause: str
    request: Request
    digest: str
    sampling: Sampling
    new_messages: list[Message]
    tools_changed: bool
    foreign: bool
    thinking: toolformat.Thinking | None = None  # how the model marks its reasoning
    format: Format = BY_NAME["default"]  # how it writes calls
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[dict[str, int]] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    support: str = ""
    finish: str | None = None
    stopped: str | None = None  # the stop string that ended it
    error: Exception | None = None
    delivered: bool = False
    closed_itself: bool = False  # its last sampled token is the template's end token
    calls: list[toolformat.ToolCall] = field(default_factory=list)
    answer: Message | None = None
    queue_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int = 0  # of `ids`, up to the closing mark
    drops: list[dict[str, Any]] = field(default_factory=list)
    routing: dict[str, Any] | None = None  # schema.ROUTING
    cut_at: int | None = None  # who waits for this answer loses the connection behind so many pieces, once
    at: int | None = None  # where it is in the session's spill
    live: bool = False  # somebody follows the text as it is sampled
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)  # for any news
    _waiting_end: list[asyncio.Future[None]] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "live": False, "_waiting": [], "_waiting_end": []}

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def drop(self, reason: str) -> None:
        """Mark all that was sampled as not to be trained; the first reason stands."""
        if self.ids and not self.drops:
            self.drops.append({"start": 0, "length": len(self.ids), "reason": reason})

    def note_version(self, version: int, count: int) -> None:
        """Say that the last `count` tokens were sampled by `version`."""
        if not count:
            return
        if self.versions and self.versions[-1]["version"] == version:
            self.versions[-1]["length"] += count
        else:
            self.versions.append({"start": len(self.ids) - count, "length": count, "version": version})

    def route(self, shape: Shape | None, pieces: list[tuple[int, Any]]) -> None:
        """Record the experts that the engine delivered; positions of which it delivered none are not valid."""
        if shape:
            span = routing.positions(self.node.prefix_len, self.node.prompt_len, len(self.ids))
            self.routing = routing.pack(shape, span, pieces)

    def check_routing(self) -> None:
        """Raise EngineError unless the experts of every input position are recorded."""
        rows, valid = (self.routing or {}).get("rows", 0), routing.valid_rows(self.routing)
        if not rows or valid < rows:
            raise EngineError(
                f"turn {self.node.index}: the engine told the experts of {valid} of {rows} input positions, and "
                "--routing require wants them all"
            )

    def wake(self) -> None:
        """Tell those who follow that there is news."""
        waiting, self._waiting = self._waiting, []
        if self.done:
            waiting += self._waiting_end
            self._waiting_end = []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def end(self) -> None:
        """Wait until the answer is whole. Raises what ended the turn badly."""
        while not self.done:
            await self._news(self._waiting_end)
        if self.cut_at is not None:
            self.cut_at = None
            raise Cut
        if self.error:
            raise self.error

    async def follow(self, beat_s: float | None = None) -> AsyncIterator[str]:
        """Yield the answer's text as it is sampled, from its beginning; "" if nothing came for `beat_s` seconds.

        Raises what ended the turn badly.
        """
        self.live = True
        sent = 0
        while True:
            while sent < len(self.pieces) and sent != self.cut_at:
                yield self.pieces[sent]
                sent += 1
            if sent == self.cut_at:
                self.cut_at = None
                raise Cut
            if self.done:
                if self.error:
                    raise self.error
                return
            try:
                async with asyncio.timeout(beat_s):
                    await self._news(self._waiting)
            except TimeoutError:
                yield ""

    @staticmethod
    async def _news(waiting: list[asyncio.Future[None]]) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting.append(future)
        await future


@dataclass(slots=True)
class Past:
    """What stays in memory of a turn that was handed over, or failed. The whole turn is in the spill, at `at`."""

    node: tree.Node
    digest: str
    answer: Message | None
    closed_itself: bool
    error: bool
    delivered: bool
    at: int

    @property
    def done(self) -> bool:
        return True

    @classmethod
    def of(cls, turn: Turn) -> "Past":
        assert turn.at is not None
        return cls(turn.node, turn.digest, turn.answer, turn.closed_itself, bool(turn.error), turn.delivered, turn.at)


def row(turn: Turn) -> dict[str, Any]:
    """The turn as a row of schema.TURN."""
    request = turn.request
    return {
        "index": turn.node.index,
        "parent": turn.node.parent,
        "prefix_len": turn.node.prefix_len,
        "cause": turn.cause,
        "context_ids": turn.node.context_ids,
        "completion_ids": turn.ids,
        "logprobs": turn.logprobs,
        "temperature": turn.sampling.temperature,
        "support": turn.support or turn.sampling.support,
        "versions": turn.versions,
        "routing": turn.routing,
        "request_id": turn.id,
        "request_digest": turn.digest,
        "protocol": request.protocol,
        "streamed": request.streamed,
        "delivered": turn.delivered,
        "requested": json.dumps(request.requested, sort_keys=True),
        "applied": json.dumps(vars(turn.sampling), default=list, sort_keys=True),
        "finish_reason": turn.finish or "error",
        "stop_token_sampled": turn.closed_itself,
        "tool_calls": [vars(c) for c in turn.calls],
        "text": turn.text,
        "reasoning": (turn.answer or {}).get("reasoning") or None,
        "messages": json.dumps(turn.new_messages, ensure_ascii=False),
        "tools": json.dumps(request.tools, ensure_ascii=False) if turn.tools_changed else None,
        "started_at": turn.started_at,
        "queue_s": turn.queue_s,
        "prefill_s": turn.prefill_s,
        "decode_s": turn.decode_s,
        "cached_tokens": turn.cached_tokens,
        "foreign": turn.foreign,
        "drops": turn.drops,
    }


def reject_unanswerable(request: Request) -> None:
    """Raise BadRequest for a conversation that no model could answer."""
    if request.messages[-1]["role"] == "assistant":
        raise BadRequest(
            "the last message must not be the assistant's: continuing a given answer is not supported",
            "unsupported_value",
            "messages",
        )
