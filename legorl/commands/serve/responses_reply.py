"""OpenAI Responses: a turn to the reply or its stream of events. The request is read in responses_api.

Replies and events are built with the `openai` package's own models. Reasoning is not summarised: an item of it holds
the reasoning itself, and, if the request includes `reasoning.encrypted_content`, the same once more as the opaque text
that clients keep where they drop everything else. A call leaves as one delta, once it has been read.
"""

import base64
import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from openai.types import responses as openai_responses
from openai.types.responses import Response

from legorl.commands.serve import delivery
from legorl.commands.serve.delivery import Failure, sse
from legorl.commands.serve.turn import Request, Turn

SEALED = "legorl:"
BEAT = b": waiting\n\n"


def reply(turn: Turn, asked: Request, model: str) -> dict[str, Any]:
    """The whole answer of a finished turn, as a Response."""
    whole = _response(turn, asked, model, _end(turn), _output(turn, asked))
    return Response.model_validate(whole).model_dump(mode="json", exclude_unset=True, by_alias=True)


async def stream(turn: Turn, asked: Request, model: str) -> AsyncIterator[bytes]:
    """The answer as server-sent events, text as it is sampled; raises after the event that says what failed."""
    items = _Events(turn, asked)

    def failed(failure: Failure) -> bytes:
        # Codex knows this code, which is in no list, and compacts its history.
        known = {"engine": "server_error", "busy": "rate_limit_exceeded", "long": "context_length_exceeded"}
        whole = _response(turn, asked, model, "failed", [])
        whole["error"] = {"code": known.get(failure.kind, "invalid_prompt"), "message": failure.message}
        return items.make("failed", None, response=whole)

    for name, model_type in (("created", "Created"), ("in_progress", "InProgress")):
        yield items.make(name, model_type, response=_response(turn, asked, model, "in_progress", []))
    async for event in delivery.events(turn, BEAT, items.push, failed):
        yield event
    for event in items.finish():
        yield event
    status = _end(turn)
    whole = _response(turn, asked, model, status, _output(turn, asked))
    yield items.make(status, status.capitalize(), response=whole)


def _usage(turn: Turn) -> dict[str, Any]:
    prompt, completion = turn.node.prompt_len, len(turn.ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
        "total_tokens": prompt + completion,
    }


def _response(turn: Turn, asked: Request, model: str, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "resp_" + turn.id,
        "object": "response",
        "created_at": int(turn.started_at.timestamp()),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": turn.sampling.max_tokens,
        "metadata": {},
        "model": model,
        "output": output,
        "parallel_tool_calls": asked.requested.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": turn.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": asked.requested.get("tool_choice", "auto"),
        "tools": [_tool(t["function"], asked) for t in asked.tools],
        "top_p": turn.sampling.top_p,
        "truncation": "disabled",
        "usage": _usage(turn) if status in ("completed", "incomplete") else None,
    }


def _tool(function: dict[str, Any], asked: Request) -> dict[str, Any]:
    """A tool as the model was shown it; a custom one by its own type."""
    form = asked.forms.get(function["name"])
    if form and form.custom:
        return {"type": "custom", "name": function["name"], "description": function.get("description")}
    return {"type": "function", "strict": False, "parameters": None, **function}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(turn: Turn, text: str, status: str) -> dict[str, Any]:
    content = [] if status == "in_progress" else [_part(text)]
    return {"id": "msg_" + turn.id, "type": "message", "role": "assistant", "status": status, "content": content}


def _reasoning_item(turn: Turn, asked: Request, text: str | None) -> dict[str, Any]:
    item: dict[str, Any] = {"id": "rs_" + turn.id, "type": "reasoning", "summary": []}
    if text is None:
        return item
    item["content"] = [{"type": "reasoning_text", "text": text}]
    if "reasoning.encrypted_content" in asked.requested.get("include", []):
        item["encrypted_content"] = SEALED + base64.b64encode(text.encode()).decode()
    return item


def _call_items(turn: Turn, asked: Request) -> list[dict[str, Any]]:
    """The calls of the answer, each in the form in which the client knows its tool."""
    items = []
    for position, call in enumerate((turn.answer or {}).get("tool_calls", [])):
        form = asked.forms.get(call["name"])
        item = {"call_id": call["id"], "name": form.name if form else call["name"]}
        if form and form.namespace:
            item["namespace"] = form.namespace
        if form and form.custom:
            given = json.loads(call["arguments"]).get("input")
            given = given if isinstance(given, str) else call["arguments"]
            items.append({"type": "custom_tool_call", "id": f"ctc_{turn.id}_{position}", **item, "input": given})
        else:
            ident = f"fc_{turn.id}_{position}"
            arguments = {"arguments": call["arguments"], "status": "completed"}
            items.append({"type": "function_call", "id": ident, **item, **arguments})
    return items


def _end(turn: Turn) -> str:
    return "incomplete" if turn.finish == "length" else "completed"


def _output(turn: Turn, asked: Request) -> list[dict[str, Any]]:
    assert turn.answer is not None
    output = []
    if turn.answer["reasoning"]:
        output.append(_reasoning_item(turn, asked, turn.answer["reasoning"]))
    calls = _call_items(turn, asked)
    if turn.answer["content"] or not calls:
        output.append(_message_item(turn, turn.answer["content"], _end(turn)))
    return output + calls


class _Events:
    """The numbered events of one stream: which item is open, and what it holds so far."""

    def __init__(self, turn: Turn, asked: Request):
        self._turn, self._asked = turn, asked
        self._numbers = count()
        self._index = -1
        self._open: str | None = None
        self._text = ""

    def make(self, name: str, model: str | None, /, **data: Any) -> bytes:
        """One event, checked against the package's `model`."""
        data = {"type": f"response.{name}", "sequence_number": next(self._numbers), **data}
        if model:
            event = getattr(openai_responses, f"Response{model}Event").model_validate(data)
            data = event.model_dump(mode="json", exclude_unset=True, by_alias=True)
        return sse(data, data["type"])

    def push(self, kind: str, piece: str) -> list[bytes]:
        events = [] if kind == self._open else [*self._close(), *self._begin(kind)]
        self._text += piece
        if kind == delivery.REASONING:
            return [*events, self.make("reasoning_text.delta", "ReasoningTextDelta", **self._place(), delta=piece)]
        return [*events, self.make("output_text.delta", "TextDelta", **self._place(), delta=piece, logprobs=[])]

    def finish(self) -> list[bytes]:
        """Close what is open, and add the tool calls; an answer without text or calls is an empty message."""
        calls = _call_items(self._turn, self._asked)
        events = [] if self._open == delivery.TEXT or calls else [*self._close(), *self._begin(delivery.TEXT)]
        events += self._close()
        for item in calls:
            field, name, model = "arguments", "function_call_arguments", "FunctionCallArguments"
            begun = {**item, "arguments": "", "status": "in_progress"}
            if item["type"] == "custom_tool_call":
                field, name, model = "input", "custom_tool_call_input", "CustomToolCallInput"
                begun = {**item, "input": ""}
            whole = {field: item[field]} if field == "input" else {field: item[field], "name": item["name"]}
            events.append(self._added(begun))
            place = {"item_id": item["id"], "output_index": self._index}
            events.append(self.make(f"{name}.delta", f"{model}Delta", **place, delta=item[field]))
            events.append(self.make(f"{name}.done", f"{model}Done", **place, **whole))
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
            item, part = _reasoning_item(self._turn, self._asked, None), {"type": "reasoning_text", "text": ""}
        else:
            item, part = _message_item(self._turn, "", "in_progress"), _part("")
        return [self._added(item), self.make("content_part.added", "ContentPartAdded", **self._place(), part=part)]

    def _close(self) -> list[bytes]:
        kind, text, place = self._open, self._text, self._place()
        self._open = None
        if kind is None:
            return []
        if kind == delivery.REASONING:
            done = self.make("reasoning_text.done", "ReasoningTextDone", **place, text=text)
            item, part = _reasoning_item(self._turn, self._asked, text), {"type": "reasoning_text", "text": text}
        else:
            done = self.make("output_text.done", "TextDone", **place, text=text, logprobs=[])
            item, part = _message_item(self._turn, text, _end(self._turn)), _part(text)
        return [done, self.make("content_part.done", "ContentPartDone", **place, part=part), self._done(item)]
