"""OpenAI Responses: a request body to a Request, a turn to the reply or its stream of events.

Replies and events are built with the `openai` package's own models. Nothing is stored: a request carries its whole
conversation, as items; the items of one answer (reasoning, message, function calls) stand next to each other and are
put together again. Tools that the server would have to run (web search, code interpreter, ...) and those whose calls
are no JSON (custom grammars, namespaces) are not offered to the model; the turn's record names them.
"""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from openai.types import responses as openai_responses
from openai.types.responses import Response

from legorl.commands.serve import delivery, reading
from legorl.commands.serve.chat import error as error  # one shape on all of OpenAI's routes
from legorl.commands.serve.delivery import sse
from legorl.commands.serve.messages import BadRequest, Message, text_of
from legorl.commands.serve.turn import Request, Turn

SAMPLING_FIELDS = (
    "temperature", "top_p", "max_output_tokens", "max_tool_calls", "tool_choice", "parallel_tool_calls", "reasoning",
    "text", "truncation", "store", "include",
)  # fmt: skip
STORED = ("previous_response_id", "conversation", "prompt", "background")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
BEAT = b": waiting\n\n"


def read_request(body: dict[str, Any]) -> Request:
    """Turn the JSON body of POST /v1/responses into a Request; raise BadRequest for what it cannot mean."""
    for name in STORED:
        if body.get(name):
            raise BadRequest(f"'{name}' is not supported: responses are not stored, send the whole input")
    text = body.get("text")
    wanted = text.get("format") if isinstance(text, dict) else None
    if wanted is not None and (not isinstance(wanted, dict) or wanted.get("type") != "text"):
        raise BadRequest("'text.format' must be text: answers are not constrained by a grammar")
    if body.get("top_logprobs"):
        raise BadRequest("'top_logprobs' are not handed out; log-probabilities are in the recorded trajectory")
    tools, skipped = _tools(body)
    return Request(
        protocol="openai-responses",
        messages=reading.conversation(_messages(body)),
        tools=tools,
        requested=reading.asked_for(body, SAMPLING_FIELDS, skipped),
        max_tokens=reading.positive(body, "max_output_tokens"),
        streamed=bool(body.get("stream")),
    )


def _tools(body: dict[str, Any]) -> tuple[list[reading.Tool], list[str]]:
    """Return the tools offered to the model, and what was not offered."""
    tools, skipped = [], []
    for position, tool in enumerate(reading.listed(body, "tools")):
        where = f"tools[{position}]"
        kind = reading.text_field(tool, "type", where)
        if kind != "function":
            skipped.append(f"{kind}:{tool['name']}" if isinstance(tool.get("name"), str) else kind)
            continue
        tools.append(reading.function(tool.get("name"), tool.get("description"), tool.get("parameters"), where))
    choice = body.get("tool_choice")
    names = None
    if isinstance(choice, dict):
        named = reading.listed(choice, "tools") if choice.get("type") == "allowed_tools" else [choice]
        names = [reading.text_field(c, "name", "tool_choice") for c in named]
    return reading.chosen(tools, choice, names), skipped


def _messages(body: dict[str, Any]) -> list[Message]:
    instructions = body.get("instructions")
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": text_of(instructions)})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    reader = _Items(messages)
    for position, item in enumerate(reading.listed(body, "input")):
        reader.add(item, f"input[{position}]")
    return messages


class _Items:
    """Puts the items of an input together into messages.

    A reasoning item without the rest of its answer is left out: Codex keeps those of answers that were cut off.
    """

    def __init__(self, messages: list[Message]):
        self._messages = messages
        self._answer: Message | None = None  # the answer that the next item may belong to
        self._thought: str | None = None

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise BadRequest(f"{where}: an item must be an object")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            self._answer, self._thought = None, _thought(item)
        elif kind == "function_call":
            self._continue(False)["tool_calls"].append(
                {
                    "id": reading.text_field(item, "call_id", where),
                    "name": reading.text_field(item, "name", where),
                    "arguments": reading.text_field(item, "arguments", where) or "{}",
                }
            )
        elif kind == "message" and item.get("role") == "assistant":
            self._continue(True)["content"] = text_of(item.get("content"))
        elif kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in ROLES:
                raise BadRequest(f"{where}: 'role' must be one of {', '.join(ROLES)}")
            self._other({"role": ROLES[role], "content": text_of(item.get("content"))})
        elif kind == "function_call_output":
            ident = reading.text_field(item, "call_id", where)
            self._other({"role": "tool", "content": text_of(item.get("output")), "tool_call_id": ident})
        elif kind == "item_reference":
            raise BadRequest(f"{where}: items are not stored, send the item itself")
        else:
            raise BadRequest(f"{where}: items of type {kind!r} are not supported")

    def _continue(self, text: bool) -> Message:
        """Return the answer that an item belongs to; a text begins a new one."""
        if self._answer is None or text:
            self._answer = {"role": "assistant", "content": "", "tool_calls": []}
            if self._thought:
                self._answer["reasoning"] = self._thought
            self._thought = None
            self._messages.append(self._answer)
        return self._answer

    def _other(self, message: Message) -> None:
        self._answer = self._thought = None
        self._messages.append(message)


def _thought(item: dict[str, Any]) -> str:
    return text_of(item.get("content") or item.get("summary") or "")


def _usage(turn: Turn) -> dict[str, Any]:
    prompt, completion = turn.node.prompt_len, len(turn.ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        # Tokens are not split at the end of the reasoning: text is.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _response(turn: Turn, asked: Request, model: str, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "resp_" + turn.id,
        "object": "response",
        "created_at": turn.started_at.timestamp(),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": turn.sampling.max_tokens,
        "metadata": {},
        "model": model,
        "output": output,
        "parallel_tool_calls": asked.requested.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "store": False,
        "temperature": turn.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": asked.requested.get("tool_choice", "auto"),
        "tools": [{"type": "function", "strict": False, "parameters": None, **t["function"]} for t in asked.tools],
        "top_p": turn.sampling.top_p,
        "truncation": "disabled",
        "usage": _usage(turn) if status in ("completed", "incomplete") else None,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(turn: Turn, text: str, status: str) -> dict[str, Any]:
    content = [] if status == "in_progress" else [_part(text)]
    return {"id": "msg_" + turn.id, "type": "message", "role": "assistant", "status": status, "content": content}


def _reasoning_item(turn: Turn, text: str | None) -> dict[str, Any]:
    item: dict[str, Any] = {"id": "rs_" + turn.id, "type": "reasoning", "summary": []}
    return item if text is None else {**item, "content": [{"type": "reasoning_text", "text": text}]}


def _call_items(turn: Turn) -> list[dict[str, Any]]:
    return [
        {
            "id": f"fc_{turn.id}_{position}",
            "type": "function_call",
            "call_id": call["id"],
            "name": call["name"],
            "arguments": call["arguments"],
            "status": "completed",
        }
        for position, call in enumerate((turn.answer or {}).get("tool_calls", []))
    ]


def _end(turn: Turn) -> str:
    return "incomplete" if turn.finish == "length" else "completed"


def _output(turn: Turn) -> list[dict[str, Any]]:
    assert turn.answer is not None
    output = []
    if turn.answer["reasoning"]:
        output.append(_reasoning_item(turn, turn.answer["reasoning"]))
    calls = _call_items(turn)
    if turn.answer["content"] or not calls:
        output.append(_message_item(turn, turn.answer["content"], _end(turn)))
    return output + calls


def reply(turn: Turn, asked: Request, model: str) -> dict[str, Any]:
    """The whole answer of a finished turn, as a Response."""
    whole = _response(turn, asked, model, _end(turn), _output(turn))
    return Response.model_validate(whole).model_dump(mode="json", exclude_unset=True)


async def stream(turn: Turn, asked: Request, model: str) -> AsyncIterator[bytes]:
    """The answer as server-sent events, text as it is sampled; raises after the event that says what failed."""
    events = _Events(turn)
    for name, model_type in (("created", "Created"), ("in_progress", "InProgress")):
        yield events.make(name, model_type, response=_response(turn, asked, model, "in_progress", []))
    try:
        async for kind, piece in delivery.parts(turn):
            if kind == delivery.BEAT:
                yield BEAT
            else:
                for event in events.push(kind, piece):
                    yield event
    except Exception as fault:
        if failure := delivery.failure_of(fault):
            code = "server_error" if failure.kind == "engine" else "invalid_prompt"
            failed = _response(turn, asked, model, "failed", [])
            failed["error"] = {"code": code, "message": failure.message}
            yield events.make("failed", "Failed", response=failed)
        raise
    for event in events.finish():
        yield event
    status = _end(turn)
    yield events.make(status, status.capitalize(), response=_response(turn, asked, model, status, _output(turn)))


class _Events:
    """The numbered events of one stream: which item is open, and what it holds so far."""

    def __init__(self, turn: Turn):
        self._turn = turn
        self._numbers = count()
        self._index = -1
        self._open: str | None = None
        self._text = ""

    def make(self, name: str, model: str, **data: Any) -> bytes:
        data = {"type": f"response.{name}", "sequence_number": next(self._numbers), **data}
        event = getattr(openai_responses, f"Response{model}Event").model_validate(data)
        return sse(event.model_dump(mode="json", exclude_unset=True), data["type"])

    def push(self, kind: str, piece: str) -> list[bytes]:
        events = [] if kind == self._open else [*self._close(), *self._begin(kind)]
        self._text += piece
        if kind == delivery.REASONING:
            return [*events, self.make("reasoning_text.delta", "ReasoningTextDelta", **self._place(), delta=piece)]
        return [*events, self.make("output_text.delta", "TextDelta", **self._place(), delta=piece, logprobs=[])]

    def finish(self) -> list[bytes]:
        """Close what is open, and add the tool calls; an answer without text or calls is an empty message."""
        calls = _call_items(self._turn)
        events = [] if self._open == delivery.TEXT or calls else [*self._close(), *self._begin(delivery.TEXT)]
        events += self._close()
        for item in calls:
            events.append(self._added({**item, "arguments": "", "status": "in_progress"}))
            place = {"item_id": item["id"], "output_index": self._index}
            arguments = item["arguments"]
            name = "function_call_arguments"
            events.append(self.make(f"{name}.delta", "FunctionCallArgumentsDelta", **place, delta=arguments))
            events.append(self.make(f"{name}.done", "FunctionCallArgumentsDone", **place, arguments=arguments))
            events.append(self._done(item))
        return events

    def _place(self) -> dict[str, Any]:
        prefix = "rs_" if self._open == delivery.REASONING else "msg_"
        return {"item_id": prefix + self._turn.id, "output_index": self._index, "content_index": 0}

    def _added(self, item: dict[str, Any]) -> bytes:
        self._index += 1
        return self.make("output_item.added", "OutputItemAdded", output_index=self._index, item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        return self.make("output_item.done", "OutputItemDone", output_index=self._index, item=item)

    def _begin(self, kind: str) -> list[bytes]:
        self._open, self._text = kind, ""
        if kind == delivery.REASONING:
            return [self._added(_reasoning_item(self._turn, None))]
        added = self._added(_message_item(self._turn, "", "in_progress"))
        return [added, self.make("content_part.added", "ContentPartAdded", **self._place(), part=_part(""))]

    def _close(self) -> list[bytes]:
        kind, text, place = self._open, self._text, self._place()
        self._open = None
        if kind is None:
            return []
        if kind == delivery.REASONING:
            done = self.make("reasoning_text.done", "ReasoningTextDone", **place, text=text)
            return [done, self._done(_reasoning_item(self._turn, text))]
        return [
            self.make("output_text.done", "TextDone", **place, text=text, logprobs=[]),
            self.make("content_part.done", "ContentPartDone", **place, part=_part(text)),
            self._done(_message_item(self._turn, text, _end(self._turn))),
        ]
