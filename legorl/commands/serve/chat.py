"""OpenAI Chat Completions: a request body to a Request, a turn to the reply or its stream of chunks.

Replies are built with the `openai` package's own models. Streaming sends text as it is sampled; from the first sign of
a tool call on, text is held back until the calls are parsed, since what becomes a call must not be shown as content.
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from legorl.commands.serve import tools as toolformat
from legorl.commands.serve.messages import BadRequest, Message, text_of
from legorl.commands.serve.session import Request, Turn

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "n", "response_format",
    "reasoning_effort", "parallel_tool_calls", "tool_choice",
)  # fmt: skip
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_request(body: dict[str, Any], user_agent: str = "", retry: bool = False) -> Request:
    """Turn the JSON body of POST /v1/chat/completions into a Request; raise BadRequest for what it cannot mean."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a list with at least one message")
    if body.get("n") not in (None, 1):
        raise BadRequest("'n' must be 1: one request is one sampled answer")
    if body.get("modalities") not in (None, ["text"]) or body.get("audio"):
        raise BadRequest("only text can be asked for")
    choice = body.get("tool_choice")
    tools = [_tool(t) for t in body.get("tools") or []] if choice != "none" else []
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stop):
        raise BadRequest("'stop' must be a string or a list of strings")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise BadRequest("'max_tokens' must be a positive integer")
    return Request(
        protocol="openai-chat",
        messages=[_message(m, k) for k, m in enumerate(messages)],
        tools=tools,
        requested={name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None},
        stop=stop,
        max_tokens=limit,
        streamed=bool(body.get("stream")),
        retry=retry,
        user_agent=user_agent,
    )


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("each tool must be {'type': 'function', 'function': {'name': ...}}")
    return {
        "type": "function",
        "function": {k: function[k] for k in ("name", "description", "parameters") if k in function},
    }


def _message(message: Any, position: int) -> Message:
    where = f"messages[{position}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadRequest(f"{where}: 'role' must be one of {', '.join(ROLES)}")
    shaped: Message = {"role": ROLES[message["role"]], "content": text_of(message.get("content"))}
    if shaped["role"] == "assistant":
        calls = message.get("tool_calls") or []
        try:
            shaped["tool_calls"] = [
                {"id": c["id"], "name": c["function"]["name"], "arguments": c["function"]["arguments"] or "{}"}
                for c in calls
            ]
        except (KeyError, TypeError) as error:
            raise BadRequest(f"{where}: a tool call lacks {error}") from error
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            shaped["reasoning"] = reasoning
    if shaped["role"] == "tool":
        shaped["tool_call_id"] = message.get("tool_call_id") or message.get("name") or ""
    return shaped


def usage(turn: Turn) -> dict[str, Any]:
    prompt, completion = turn.node.prompt_len, len(turn.ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens or 0},
    }


def finish_reason(turn: Turn) -> str:
    if turn.answer and turn.answer["tool_calls"]:
        return "tool_calls"
    return {"stop": "stop", "length": "length"}.get(turn.finish or "", "stop")


def _calls(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
        for c in (turn.answer or {}).get("tool_calls", [])
    ]


def reply(turn: Turn, model: str) -> dict[str, Any]:
    """The whole answer of a finished turn, as a ChatCompletion."""
    assert turn.answer is not None
    calls = _calls(turn)
    content = turn.answer["content"]
    message = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        message["tool_calls"] = calls
    completion = ChatCompletion.model_validate(
        {
            "id": "chatcmpl-" + turn.id,
            "object": "chat.completion",
            "created": int(turn.started_at.timestamp()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason(turn), "logprobs": None}],
            "usage": usage(turn),
        }
    )
    return completion.model_dump(mode="json", exclude_unset=True)


async def stream(turn: Turn, model: str, with_usage: bool) -> AsyncIterator[bytes]:
    """The answer of a turn as server-sent events, text as it is sampled."""
    head = {"id": "chatcmpl-" + turn.id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}

    def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
        return _event(ChatCompletionChunk.model_validate(chunk).model_dump(mode="json", exclude_unset=True))

    yield event({"role": "assistant", "content": ""})
    held = Held(bool(turn.request.tools))
    async for piece in turn.follow():
        shown = held.push(piece)
        if shown:
            yield event({"content": shown})
    assert turn.answer is not None
    rest = turn.answer["content"][held.shown :]
    if rest:
        yield event({"content": rest})
    for position, call in enumerate(_calls(turn)):
        yield event({"tool_calls": [{"index": position, **call}]})
    yield event({}, finish_reason(turn))
    if with_usage:
        last = {**head, "choices": [], "usage": usage(turn)}
        yield _event(ChatCompletionChunk.model_validate(last).model_dump(mode="json", exclude_unset=True))
    yield b"data: [DONE]\n\n"


class Held:
    """Text that may be shown while an answer that could hold tool calls is still being sampled."""

    def __init__(self, tools: bool):
        self._tools = tools
        self._text = ""
        self.shown = 0  # characters shown so far

    def push(self, piece: str) -> str:
        self._text += piece
        end = len(self._text)
        if self._tools:
            opener = self._text.find(toolformat.OPEN)
            safe = self._text[:opener] if opener >= 0 else self._text
            overlap = next((n for n in range(len(toolformat.OPEN) - 1, 0, -1) if safe.endswith(toolformat.OPEN[:n])), 0)
            # White space before a call is not part of the content, so it waits as well.
            end = len(safe[: len(safe) - (overlap if opener < 0 else 0)].rstrip())
        new = self._text[self.shown : end]
        self.shown = max(self.shown, end)
        return new


def error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error body of this protocol."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
