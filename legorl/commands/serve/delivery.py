"""Between a turn and the protocols: which text may be shown while it is sampled, and what went wrong in common terms.

`events` feeds every protocol's stream with `parts`: reasoning and content as they are sampled, and a beat whenever
nothing came for a while, so that long waits (new weights, a long tool call) do not look like a dead server. From the
first sign of a tool call on, text is held back until the calls are parsed: what becomes a call must not be shown as
content.
"""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from legorl.commands.serve import tools as toolformat
from legorl.commands.serve.budgets import BudgetSpent
from legorl.commands.serve.detokenize import overlap
from legorl.commands.serve.engine import ContextOverflow, EngineError, Refused
from legorl.commands.serve.formats import Format
from legorl.commands.serve.messages import BadRequest
from legorl.commands.serve.session import SessionClosed, TooManyAtOnce
from legorl.commands.serve.turn import Turn

BEAT_S = 10.0
REASONING, TEXT, BEAT = "reasoning", "text", "beat"


@dataclass(frozen=True)
class Failure:
    """Why a request got no answer. `kind`: request, large, long, budget, busy, key, route or engine.

    All but `busy` (429) and `engine` (500) are 4xx that a retry cannot mend, so harnesses must not try.
    """

    status: int
    kind: str
    message: str
    code: str | None = None
    tokens: tuple[int | None, int | None] | None = None  # prompt and context, where the prompt is too long
    param: str | None = None  # the field of the request


def failure_of(error: Exception) -> Failure | None:
    """Say what `error` means to a client, None if it is none of ours."""
    if isinstance(error, BadRequest):
        return Failure(400, "request", str(error), error.code, param=error.param)
    if isinstance(error, RecursionError):
        return Failure(400, "request", "the body is nested too deeply", "invalid_value")
    if isinstance(error, ContextOverflow):
        return Failure(400, "long", str(error), "context_length_exceeded", (error.prompt, error.context))
    if isinstance(error, BudgetSpent):
        kind = "key" if error.status == 401 else "budget"
        return Failure(error.status, kind, str(error), "session_budget_spent")
    if isinstance(error, TooManyAtOnce):
        return Failure(429, "busy", str(error), "rate_limit_exceeded")
    if isinstance(error, Refused):
        kind, code = ("busy", "rate_limit_exceeded") if error.status == 429 else ("engine", "engine_error")
        return Failure(error.status, kind, str(error), code)
    if isinstance(error, SessionClosed):
        return Failure(401, "key", "this session is closed", "invalid_api_key")
    if isinstance(error, EngineError):
        return Failure(500, "engine", str(error), "engine_error")
    return None


async def events(
    turn: Turn,
    beat: bytes,
    push: Callable[[str, str], list[bytes]],
    failed: Callable[[Failure], bytes],
) -> AsyncIterator[bytes]:
    """Yield what a protocol's `push` makes of the parts, `beat` where nothing comes, and `failed` before it raises."""
    try:
        async for kind, piece in parts(turn):
            for event in [beat] if kind == BEAT else push(kind, piece):
                yield event
    except Exception as fault:
        if failure := failure_of(fault):
            yield failed(failure)
        raise


async def parts(turn: Turn) -> AsyncIterator[tuple[str, str]]:
    """Yield (REASONING or TEXT, piece) as it is sampled, or (BEAT, ""). The pieces add up to the turn's answer.

    Raises what ended the turn badly.
    """
    held = Held(turn.format if turn.request.tools else None, turn.thinking)
    async for piece in turn.follow(BEAT_S):
        if not piece:
            yield BEAT, ""
            continue
        for kind, new in held.push(piece):
            yield kind, new
    assert turn.answer is not None
    for kind, whole in ((REASONING, turn.answer.get("reasoning") or ""), (TEXT, turn.answer["content"])):
        if rest := whole[held.shown[kind] :]:
            yield kind, rest


class Held:
    """Text that may be shown while an answer that could hold reasoning and tool calls is still being sampled."""

    def __init__(self, format: Format | None, thinking: toolformat.Thinking | None = None):
        self._format, self._thinking = format, thinking
        self._text = ""
        self.shown = {REASONING: 0, TEXT: 0}  # characters shown so far

    def push(self, piece: str) -> list[tuple[str, str]]:
        """Take sampled text; return what may be shown of it, by kind."""
        self._text += piece
        if self._thinking and self._thinking.open.startswith(self._text.strip()):
            return []  # it may still become reasoning
        reasoning, content, closed = toolformat.split_reasoning(self._text, self._thinking)
        if self._thinking and not closed:
            return self._new(REASONING, reasoning[: len(reasoning) - overlap(reasoning, self._thinking.close)].rstrip())
        return self._new(REASONING, reasoning) + self._new(TEXT, self._safe(content))

    def _safe(self, content: str) -> str:
        """Cut content before what is, or could become, a tool call, and the white space in front of it."""
        return content[: self._format.safe(content)].rstrip() if self._format else content

    def _new(self, kind: str, whole: str) -> list[tuple[str, str]]:
        new = whole[self.shown[kind] :]
        self.shown[kind] = max(self.shown[kind], len(whole))
        return [(kind, new)] if new else []


def sse(data: dict[str, Any], event: str | None = None) -> bytes:
    """Encode one server-sent event."""
    head = f"event: {event}\n" if event else ""
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{head}data: {body}\n\n".encode("utf-8", "replace")
