"""OpenAI Chat Completions: a request body to a Request, a turn to the reply or its stream of chunks.

Replies are built with the `openai` package's own models. Reasoning travels as `reasoning_content`, the field that
harnesses read and echo although the protocol does not name it.
"""

from collections.abc import AsyncIterator
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from legorl.commands.serve import delivery, reading
from legorl.commands.serve.delivery import Failure, sse
from legorl.commands.serve.messages import BadRequest, Message, text_of
from legorl.commands.serve.turn import Request, Turn

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "n", "response_format",
    "reasoning_effort", "parallel_tool_calls", "tool_choice",
)  # fmt: skip
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip
BEAT = b": waiting\n\n"


def read_request(body: dict[str, Any]) -> Request:
    """Turn the JSON body of POST /v1/chat/completions into a Request; raise BadRequest for what it cannot mean."""
    if body.get("n") not in (None, 1):
        raise BadRequest("'n' must be 1: one request is one sampled answer")
    if body.get("modalities") not in (None, ["text"]) or body.get("audio"):
        raise BadRequest("only text can be asked for")
    if body.get("logprobs") or body.get("top_logprobs"):
        raise BadRequest("'logprobs' are not handed out; they are in the recorded trajectory")
    response_format = body.get("response_format")
    if response_format is not None and (not isinstance(response_format, dict) or response_format.get("type") != "text"):
        raise BadRequest("'response_format' must be text: answers are not constrained by a grammar")
    options = body.get("stream_options")
    return Request(
        protocol="openai-chat",
        messages=reading.conversation([_message(m, k) for k, m in enumerate(reading.listed(body, "messages"))]),
        tools=_tools(body),
        requested=reading.asked_for(body, SAMPLING_FIELDS, []),
        stop=reading.stops(body, "stop"),
        max_tokens=reading.positive(body, "max_completion_tokens", "max_tokens"),
        streamed=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _tools(body: dict[str, Any]) -> list[reading.Tool]:
    tools = []
    for position, tool in enumerate(reading.listed(body, "tools")):
        where = f"tools[{position}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise BadRequest(f"{where}: each tool must be {{'type': 'function', 'function': {{'name': ...}}}}")
        tools.append(
            reading.function(function.get("name"), function.get("description"), function.get("parameters"), where)
        )
    choice = body.get("tool_choice")
    names = None
    if isinstance(choice, dict):
        allowed = choice.get("allowed_tools")
        named = reading.listed(allowed, "tools") if isinstance(allowed, dict) else [choice]
        names = [reading.text_field(c.get("function"), "name", "tool_choice") for c in named if isinstance(c, dict)]
    return reading.chosen(tools, choice, names)


def _message(message: Any, position: int) -> Message:
    where = f"messages[{position}]"
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{where}: 'role' must be one of {', '.join(ROLES)}")
    shaped: Message = {"role": ROLES[role], "content": text_of(message.get("content"))}
    if shaped["role"] == "assistant":
        shaped["tool_calls"] = [_call(c, where) for c in reading.listed(message, "tool_calls")]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            shaped["reasoning"] = reasoning
    if shaped["role"] == "tool":
        shaped["tool_call_id"] = str(message.get("tool_call_id") or message.get("name") or "")
    return shaped


def _call(call: Any, where: str) -> dict[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments", ""), str):
        raise BadRequest(f"{where}: a tool call must hold 'function' with 'name' and 'arguments' (a string)")
    return {
        "id": reading.text_field(call, "id", f"{where}: tool call"),
        "name": reading.text_field(function, "name", f"{where}: tool call"),
        "arguments": function.get("arguments") or "{}",
    }


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


def _head(turn: Turn, model: str, kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-" + turn.id, "object": kind, "created": int(turn.started_at.timestamp()), "model": model}


def reply(turn: Turn, _asked: Request, model: str) -> dict[str, Any]:
    """The whole answer of a finished turn, as a ChatCompletion."""
    assert turn.answer is not None
    calls = _calls(turn)
    content = turn.answer["content"]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
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

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def chunk(data: dict[str, Any]) -> bytes:
        return sse(ChatCompletionChunk.model_validate({**head, **data}).model_dump(mode="json", exclude_unset=True))

    yield event({"role": "assistant", "content": ""})
    try:
        async for kind, piece in delivery.parts(turn):
            if kind == delivery.BEAT:
                yield BEAT
            else:
                yield event({"content" if kind == delivery.TEXT else "reasoning_content": piece})
    except Exception as fault:
        if failure := delivery.failure_of(fault):
            yield sse(error(failure))
        raise
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
    return {"error": {"message": failure.message, "type": kind, "param": None, "code": failure.code}}
