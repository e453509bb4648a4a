"""Anthropic Messages: a request body to a Request, a turn to the reply or its stream of events.

Replies and events are built with the `anthropic` package's own models. Cache markers are dropped: they move from turn
to turn and mean nothing to the model. So is the billing block that Claude Code puts in front of its system prompt,
which changes with every request. A tool call leaves as one delta, once it has been read.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from anthropic import BaseModel
from anthropic.types import (
    Message as Reply,
)
from anthropic.types import (
    MessageTokensCount,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
)

from legorl.commands.serve import delivery, reading
from legorl.commands.serve.delivery import Failure, sse
from legorl.commands.serve.messages import BadRequest, Message
from legorl.commands.serve.reading import ANY, NUMBER, unsupported
from legorl.commands.serve.turn import Request, Turn

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "tool_choice", "thinking", "output_config",
    "context_management",
)  # fmt: skip
FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(SAMPLING_FIELDS, ANY),
    **dict.fromkeys(("messages", "tools", "mcp_servers"), (list,)),
    **dict.fromkeys(("thinking", "output_config", "tool_choice"), (dict,)),
    **dict.fromkeys(("temperature", "top_p"), NUMBER),
    "model": (str,), "system": (str, list), "top_k": (int,), "stream": (bool,),
    **dict.fromkeys(("container", "output_format", "compaction", "thread"), ANY),
}  # fmt: skip
NOT_GIVEN = {
    "output_format": "is not supported: answers are not constrained by a grammar",
    "mcp_servers": "is not supported: this server runs no tools",
    "container": "is not supported: this server runs no tools",
    "compaction": "is not supported: nothing is summarised here",
}
NO_THREADS = "thread_unsupported_request"  # at which the official client sends its whole history instead
BILLING = "x-anthropic-billing-header:"
BEAT = sse({"type": "ping"}, "ping")


def read_request(body: dict[str, Any]) -> Request:
    """Turn the JSON body of POST /v1/messages into a Request; raise BadRequest for what it cannot mean."""
    ignored = reading.check(body, FIELDS)
    for name, why in NOT_GIVEN.items():
        if body.get(name):
            raise unsupported(name, why)
    if body.get("thread"):
        raise BadRequest("'thread' is not supported: no conversation is held here, send all messages", NO_THREADS)
    if (body.get("output_config") or {}).get("format"):
        raise unsupported("output_config.format", "is not supported: answers are not constrained by a grammar")
    tools, skipped = _tools(body)
    messages = _system(body.get("system"))
    for position, message in enumerate(reading.listed(body, "messages")):
        messages += _messages(message, f"messages.{position}")
    if not body.get("messages"):
        messages = []
    return Request(
        protocol="anthropic",
        messages=reading.conversation(messages, "messages"),
        tools=tools,
        requested=reading.asked_for(body, SAMPLING_FIELDS, skipped_tools=skipped, ignored_fields=ignored),
        stop=reading.stops(body, "stop_sequences"),
        max_tokens=reading.positive(body, "max_tokens"),
        streamed=bool(body.get("stream")),
    )


def _system(system: Any) -> list[Message]:
    if isinstance(system, list):
        system = [b for b in system if not _is_billing(b)]
    text = reading.text(system, "system")
    return [{"role": "system", "content": text}] if text else []


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text", "")).startswith(BILLING)


def _tools(body: dict[str, Any]) -> tuple[list[reading.Tool], list[str]]:
    """Return the tools offered to the model, and the names of those whose schema only Anthropic's models know."""
    tools, skipped = [], []
    for position, tool in enumerate(reading.listed(body, "tools")):
        where = f"tools.{position}"
        if not isinstance(tool, dict):
            raise reading.wrong_type(where, "an object")
        if "input_schema" not in tool and tool.get("type") not in (None, "custom"):
            skipped.append(f"{tool['type']}:{tool.get('name')}")
            continue
        name, description, schema = (tool.get(f) for f in ("name", "description", "input_schema"))
        tools.append(reading.function(name, description, schema, where, "input_schema"))
    choice = body.get("tool_choice")
    if choice is None:
        return reading.chosen(tools, None), skipped
    kind = choice.get("type")
    reading.one_of(kind, ("auto", "any", "tool", "none"), "tool_choice.type")
    names = [reading.text_field(choice, "name", "tool_choice")] if kind == "tool" else None
    return reading.chosen(tools, kind, names), skipped


def _messages(message: Any, where: str) -> list[Message]:
    """One message of this protocol is one answer, or any row of tool results and texts."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant"):
        raise BadRequest(f"{where}: 'role' must be one of user, assistant, system")
    content, where = message.get("content"), f"{where}.content"
    if role == "assistant":
        return [_answer(content, where)]
    if role == "system" or not isinstance(content, list):
        return [{"role": role, "content": reading.text(content, where)}]
    shaped: list[Message] = []
    texts: list[Any] = []

    def close() -> None:
        if texts:
            shaped.append({"role": "user", "content": reading.text(texts, where)})
            texts.clear()

    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            close()
            shaped.append(_result(block, where))
        else:
            texts.append(block)
    close()
    return shaped or [{"role": "user", "content": ""}]


def _result(block: dict[str, Any], where: str) -> Message:
    text = reading.text(block.get("content"), f"{where}: tool_result")
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": reading.text_field(block, "tool_use_id", where)}


def _answer(content: Any, where: str) -> Message:
    answer: Message = {"role": "assistant", "tool_calls": []}
    texts, thoughts = [], []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise BadRequest(f"{where}: the 'input' of a tool_use block must be an object")
            answer["tool_calls"].append(
                {
                    "id": reading.text_field(block, "id", f"{where}: tool_use"),
                    "name": reading.text_field(block, "name", f"{where}: tool_use"),
                    "arguments": json.dumps(block["input"], ensure_ascii=False),
                }
            )
        elif kind == "thinking":
            thoughts.append(reading.text_field(block, "thinking", f"{where}: thinking"))
        elif kind != "redacted_thinking":  # unreadable to any other model
            texts.append(block)
    answer["content"] = reading.text([t for t in texts if t is not None], where)
    if thoughts:
        answer["reasoning"] = "\n".join(thoughts)
    return answer


def _head(turn: Turn, model: str) -> dict[str, Any]:
    return {"id": "msg_" + turn.id, "type": "message", "role": "assistant", "model": model}


def _usage(turn: Turn) -> dict[str, Any]:
    cached = turn.cached_tokens or 0
    return {
        "input_tokens": turn.node.prompt_len - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": len(turn.ids),
        "output_tokens_details": {"thinking_tokens": turn.reasoning_tokens},
    }


def _stop(turn: Turn) -> dict[str, Any]:
    if turn.answer and turn.answer["tool_calls"]:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if turn.stopped is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stopped}
    return {"stop_reason": "max_tokens" if turn.finish == "length" else "end_turn", "stop_sequence": None}


def _uses(turn: Turn) -> list[dict[str, Any]]:
    calls = (turn.answer or {}).get("tool_calls", [])
    return [{"type": "tool_use", "id": c["id"], "name": c["name"], "input": json.loads(c["arguments"])} for c in calls]


def reply(turn: Turn, _asked: Request, model: str) -> dict[str, Any]:
    """The whole answer of a finished turn, as a Message."""
    assert turn.answer is not None
    content: list[dict[str, Any]] = []
    if turn.answer["reasoning"]:
        content.append({"type": "thinking", "thinking": turn.answer["reasoning"], "signature": turn.id})
    if turn.answer["content"]:
        content.append({"type": "text", "text": turn.answer["content"]})
    content += _uses(turn)
    whole = {**_head(turn, model), "content": content, **_stop(turn), "usage": _usage(turn)}
    return Reply.model_validate(whole).model_dump(mode="json", exclude_unset=True)


def count(tokens: int) -> dict[str, Any]:
    """The body that answers POST /v1/messages/count_tokens."""
    return MessageTokensCount(input_tokens=tokens).model_dump(mode="json")


async def stream(turn: Turn, _asked: Request, model: str) -> AsyncIterator[bytes]:
    """The answer as server-sent events, text as it is sampled; raises after the event that says what failed."""
    usage = {**_usage(turn), "input_tokens": turn.node.prompt_len, "cache_read_input_tokens": 0, "output_tokens": 0}
    del usage["output_tokens_details"]
    start = {**_head(turn, model), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event(RawMessageStartEvent, type="message_start", message=start)
    yield BEAT
    blocks = _Blocks(turn.id)
    async for event in delivery.events(turn, BEAT, blocks.push, lambda failure: sse(error(failure), "error")):
        yield event
    for event in blocks.close():
        yield event
    for use in _uses(turn):
        yield blocks.open({**use, "input": {}})
        yield blocks.delta({"type": "input_json_delta", "partial_json": json.dumps(use["input"], ensure_ascii=False)})
        for event in blocks.close():
            yield event
    yield _event(RawMessageDeltaEvent, type="message_delta", delta=_stop(turn), usage=_usage(turn))
    yield _event(RawMessageStopEvent, type="message_stop")


class _Blocks:
    """The content blocks of a stream: at most one is open, and a text follows the reasoning in a block of its own."""

    def __init__(self, signature: str):
        self._signature = signature
        self._index = -1
        self._open: str | None = None

    def push(self, kind: str, piece: str) -> list[bytes]:
        events = []
        if kind != self._open:
            events += self.close()
            empty = {"type": "text", "text": ""}
            if kind == delivery.REASONING:
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            events.append(self.open(empty))
            self._open = kind
        thinking = {"type": "thinking_delta", "thinking": piece}
        events.append(self.delta(thinking if kind == delivery.REASONING else {"type": "text_delta", "text": piece}))
        return events

    def open(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = block["type"]
        return _event(RawContentBlockStartEvent, type="content_block_start", index=self._index, content_block=block)

    def delta(self, delta: dict[str, Any]) -> bytes:
        return _event(RawContentBlockDeltaEvent, type="content_block_delta", index=self._index, delta=delta)

    def close(self) -> list[bytes]:
        if self._open is None:
            return []
        sign = self._open == delivery.REASONING
        self._open = None
        stop = _event(RawContentBlockStopEvent, type="content_block_stop", index=self._index)
        return [self.delta({"type": "signature_delta", "signature": self._signature}), stop] if sign else [stop]


def _event(model: type[BaseModel], **data: Any) -> bytes:
    return sse(model.model_validate(data).model_dump(mode="json", exclude_unset=True), data["type"])


def error(failure: Failure) -> dict[str, Any]:
    """An error body of this protocol."""
    kinds = {
        "key": "authentication_error",
        "route": "not_found_error",
        "large": "request_too_large",
        "busy": "rate_limit_error",
    }
    kind = "api_error" if failure.kind == "engine" else kinds.get(failure.kind, "invalid_request_error")
    message = failure.message
    if failure.tokens:
        message = "prompt is too long: {} tokens > {} maximum".format(*failure.tokens)
    whole: dict[str, Any] = {"type": kind, "message": message}
    if failure.code == NO_THREADS:
        whole["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": whole}
