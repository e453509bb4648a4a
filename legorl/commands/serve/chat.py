"""OpenAI Chat Completions: a request body to a Request, a turn to the reply or its stream of chunks.

Replies are built with the `openai` package's own models. Reasoning travels as `reasoning_content`, the field that
harnesses read and echo although the protocol does not name it. A tool call leaves as one delta, once it has been read.
"""

from collections.abc import AsyncIterator
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from legorl.commands.serve import delivery, reading
from legorl.commands.serve.delivery import Failure, sse
from legorl.commands.serve.messages import BadRequest, Message
from legorl.commands.serve.reading import ANY, NUMBER, unsupported, wrong_type
from legorl.commands.serve.turn import Request, Turn

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "n", "response_format",
    "reasoning_effort", "parallel_tool_calls", "tool_choice",
)  # fmt: skip
FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(SAMPLING_FIELDS, ANY),
    **dict.fromkeys(("messages", "tools", "modalities", "functions"), (list,)),
    **dict.fromkeys(("stream_options", "response_format", "logit_bias", "audio"), (dict,)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), NUMBER),
    **dict.fromkeys(("n", "seed", "top_k", "top_logprobs"), (int,)),
    **dict.fromkeys(("stream", "logprobs", "parallel_tool_calls"), (bool,)),
    "model": (str,), "reasoning_effort": (str,), "tool_choice": (str, dict), "function_call": ANY,
    "prediction": ANY, "web_search_options": ANY,
}  # fmt: skip
NOT_GIVEN = {
    "audio": "is not supported: this model reads and writes text",
    "logprobs": "are not handed out; they are in the recorded trajectory",
    "top_logprobs": "are not handed out; they are in the recorded trajectory",
    "functions": "is not supported: use 'tools'",
    "function_call": "is not supported: use 'tool_choice'",
    "prediction": "is not supported",
    "web_search_options": "is not supported: this server runs no tools",
}
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip
BEAT = b": waiting\n\n"


def read_request(body: dict[str, Any]) -> Request:
    """Turn the JSON body of POST /v1/chat/completions into a Request; raise BadRequest for what it cannot mean."""
    ignored = reading.check(body, FIELDS)
    for name, why in NOT_GIVEN.items():
        if body.get(name):
            raise unsupported(name, why)
    if body.get("n") not in (None, 1):
        raise unsupported("n", "must be 1: one request is one sampled answer")
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "must be ['text']")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise unsupported("response_format", "must be text: answers are not constrained by a grammar")
    options = body.get("stream_options") or {}
    if not isinstance(options.get("include_usage"), (bool, type(None))):
        raise wrong_type("stream_options.include_usage", "true or false")
    messages = [_message(m, f"messages[{k}]") for k, m in enumerate(reading.listed(body, "messages"))]
    return Request(
        protocol="openai-chat",
        messages=reading.conversation(messages, "messages"),
        tools=_tools(body),
        requested=reading.asked_for(body, SAMPLING_FIELDS, ignored_fields=ignored),
        stop=reading.stops(body, "stop"),
        max_tokens=reading.positive(body, "max_completion_tokens", "max_tokens"),
        streamed=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
    )


def _tools(body: dict[str, Any]) -> list[reading.Tool]:
    tools = []
    for position, tool in enumerate(reading.listed(body, "tools")):
        where = f"tools[{position}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") not in (None, "function"):
            raise BadRequest(
                f"{where}: each tool must be {{'type': 'function', 'function': {{'name': ...}}}}", param=where
            )
        name, description, schema = (function.get(f) for f in ("name", "description", "parameters"))
        tools.append(reading.function(name, description, schema, f"{where}.function"))
    choice = body.get("tool_choice")
    names = None
    if isinstance(choice, dict):
        allowed = choice.get("allowed_tools")
        named = reading.listed(allowed, "tools", "allowed_tools") if isinstance(allowed, dict) else [choice]
        names = [
            reading.text_field(c.get("function") if isinstance(c, dict) else None, "name", "tool_choice.function")
            for c in named
        ]
    elif choice is not None:
        reading.one_of(choice, ("auto", "none", "required"), "tool_choice")
    return reading.chosen(tools, choice, names)


def _message(message: Any, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{where}: 'role' must be one of {', '.join(ROLES)}", param=f"{where}.role")
    shaped: Message = {"role": ROLES[role], "content": reading.text(message.get("content"), f"{where}.content")}
    if role == "assistant":
        if message.get("function_call") or message.get("audio"):
            raise unsupported(f"{where}", "may hold text, reasoning and 'tool_calls'; not 'function_call' or 'audio'")
        shaped["content"] = shaped["content"] or reading.text(message.get("refusal"), f"{where}.refusal")
        shaped["tool_calls"] = [_call(c, where) for c in reading.listed(message, "tool_calls", where)]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:
            shaped["reasoning"] = reading.text(reasoning, f"{where}.reasoning_content")
    elif shaped["role"] == "tool":
        shaped["tool_call_id"] = reading.text_field(message, "tool_call_id" if role == "tool" else "name", where)
    return shaped


def _call(call: Any, where: str) -> dict[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments", ""), str):
        raise BadRequest(
            f"{where}: a tool call must hold 'function' with 'name' and 'arguments' (a string)",
            "invalid_type",
            f"{where}.tool_calls",
        )
    return {
        "id": reading.text_field(call, "id", f"{where}.tool_calls"),
        "name": reading.text_field(function, "name", f"{where}.tool_calls"),
        "arguments": function.get("arguments") or "{}",
    }


def usage(turn: Turn) -> dict[str, Any]:
    """Counts of tokens; those read from the prefix cache only where the engine tells."""
    prompt, completion = turn.node.prompt_len, len(turn.ids)
    cached = None if turn.cached_tokens is None else {"cached_tokens": turn.cached_tokens}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": cached,
        "completion_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
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


def _head(turn: Turn, model: str, kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-" + turn.id, "object": kind, "created": int(turn.started_at.timestamp()), "model": model}


def reply(turn: Turn, _asked: Request, model: str) -> dict[str, Any]:
    """The whole answer of a finished turn, as a ChatCompletion."""
    assert turn.answer is not None
    calls = _calls(turn)
    content = turn.answer["content"]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    message["refusal"] = None
    if turn.answer["reasoning"]:
        message["reasoning_content"] = turn.answer["reasoning"]
    if calls:
        message["tool_calls"] = calls
    completion = ChatCompletion.model_validate(
        {
            **_head(turn, model, "chat.completion"),
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason(turn), "logprobs": None}],
            "usage": usage(turn),
        }
    )
    return completion.model_dump(mode="json", exclude_unset=True)


async def stream(turn: Turn, asked: Request, model: str) -> AsyncIterator[bytes]:
    """The answer as server-sent events, text as it is sampled; raises after the event that says what failed."""
    head = _head(turn, model, "chat.completion.chunk")
    if asked.include_usage:
        head["usage"] = None  # null in every chunk but the last

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return chunk({"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    def chunk(data: dict[str, Any]) -> bytes:
        return sse(ChatCompletionChunk.model_validate({**head, **data}).model_dump(mode="json", exclude_unset=True))

    def piece(kind: str, text: str) -> list[bytes]:
        return [event({"content" if kind == delivery.TEXT else "reasoning_content": text})]

    yield event({"role": "assistant", "content": ""})
    async for data in delivery.events(turn, BEAT, piece, lambda failure: sse(error(failure))):
        yield data
    for position, call in enumerate(_calls(turn)):
        yield event({"tool_calls": [{"index": position, **call}]})
    yield event({}, finish_reason(turn))
    if asked.include_usage:
        yield chunk({"choices": [], "usage": usage(turn)})
    yield b"data: [DONE]\n\n"


def error(failure: Failure) -> dict[str, Any]:
    """An error body of this protocol, which is that of every OpenAI route."""
    kind = {"key": "authentication_error", "engine": "server_error", "busy": "rate_limit_error"}.get(
        failure.kind, "invalid_request_error"
    )
    return {"error": {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code}}
