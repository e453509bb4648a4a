"""OpenAI Responses: a request body to a Request. The reply is in responses_reply.

Nothing is stored: a request carries its whole conversation, as items; the items of one answer (reasoning, message,
calls) stand next to each other and are put together again. Every tool that the client runs is a function to the model:
one in a namespace is called NAMESPACE__NAME, a custom one (whose input is free text, perhaps of a grammar) has one
argument `input`. `Form` says how such a tool is called on the wire. Tools that the server would have to run (web
search, code interpreter, ...) are not offered to the model; the turn's record names them.
"""

import base64
import json
from dataclasses import dataclass
from typing import Any

from legorl.commands.serve import reading
from legorl.commands.serve.chat import error as error  # one shape on all of OpenAI's routes
from legorl.commands.serve.messages import BadRequest, Message
from legorl.commands.serve.reading import ANY, NUMBER, unsupported
from legorl.commands.serve.responses_reply import SEALED
from legorl.commands.serve.responses_reply import reply as reply
from legorl.commands.serve.responses_reply import stream as stream
from legorl.commands.serve.turn import Request

SAMPLING_FIELDS = (
    "temperature", "top_p", "max_output_tokens", "max_tool_calls", "tool_choice", "parallel_tool_calls", "reasoning",
    "text", "truncation", "store", "include",
)  # fmt: skip
FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(SAMPLING_FIELDS, ANY),
    **dict.fromkeys(("tools", "include"), (list,)),
    **dict.fromkeys(("text", "reasoning", "metadata"), (dict,)),
    **dict.fromkeys(("temperature", "top_p"), NUMBER),
    **dict.fromkeys(("top_logprobs", "max_tool_calls"), (int,)),
    **dict.fromkeys(("stream", "store", "background", "parallel_tool_calls"), (bool,)),
    **dict.fromkeys(("model", "truncation"), (str,)),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ANY),
    "input": (str, list), "instructions": (str, list), "tool_choice": (str, dict),
}  # fmt: skip
NOT_GIVEN = {
    "previous_response_id": "is not supported: responses are not stored, send the whole input",
    "conversation": "is not supported: conversations are not stored, send the whole input",
    "prompt": "is not supported: prompts are not stored, send 'instructions' and 'input'",
    "background": "is not supported: responses are not stored",
    "top_logprobs": "are not handed out; they are in the recorded trajectory",
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True)
class Form:
    """How a client knows a tool that the model sees as a function of another name or shape."""

    name: str
    namespace: str | None
    custom: bool


def read_request(body: dict[str, Any]) -> Request:
    """Turn the JSON body of POST /v1/responses into a Request; raise BadRequest for what it cannot mean."""
    ignored = reading.check(body, FIELDS)
    for name, why in NOT_GIVEN.items():
        if body.get(name):
            raise unsupported(name, why)
    wanted = (body.get("text") or {}).get("format")
    if wanted is not None and (not isinstance(wanted, dict) or wanted.get("type") != "text"):
        raise unsupported("text.format", "must be text: answers are not constrained by a grammar")
    if "message.output_text.logprobs" in reading.listed(body, "include"):
        raise unsupported("include", "cannot be log-probabilities; they are in the recorded trajectory")
    forms: dict[str, Form] = {}
    tools, skipped = _tools(reading.listed(body, "tools"), forms)
    return Request(
        protocol="openai-responses",
        messages=reading.conversation(_messages(body), "input"),
        tools=_chosen(tools, forms, body.get("tool_choice")),
        requested=reading.asked_for(body, SAMPLING_FIELDS, skipped_tools=skipped, ignored_fields=ignored),
        max_tokens=reading.positive(body, "max_output_tokens"),
        streamed=bool(body.get("stream")),
        forms=forms,
    )


def canonical(name: str, namespace: Any) -> str:
    """The name by which the model knows a tool."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def _tools(listed: list[Any], forms: dict[str, Form]) -> tuple[list[reading.Tool], list[str]]:
    """Return the tools offered to the model, and what was not offered; note in `forms` those of a special form."""
    tools: list[reading.Tool] = []
    skipped: list[str] = []

    def add(tool: Any, where: str, namespace: str | None) -> None:
        kind = reading.text_field(tool, "type", where)
        if kind not in ("function", "custom"):
            skipped.append(f"{kind}:{tool['name']}" if isinstance(tool.get("name"), str) else kind)
            return
        name, description, schema = (tool.get(f) for f in ("name", "description", "parameters"))
        if kind == "custom":
            description, schema = _with_grammar(description, tool.get("format")), CUSTOM
        if isinstance(name, str) and name and (namespace or kind == "custom"):
            form = Form(name, namespace, kind == "custom")
            name = canonical(name, namespace)
            forms[name] = form
        tools.append(reading.function(name, description, schema, where))

    for position, tool in enumerate(listed):
        where = f"tools[{position}]"
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            namespace = reading.text_field(tool, "name", where)
            for place, inner in enumerate(reading.listed(tool, "tools", where)):
                add(inner, f"{where}.tools[{place}]", namespace)
        else:
            add(tool, where, None)
    return tools, skipped


def _with_grammar(description: Any, form: Any) -> Any:
    """Show the model the grammar that a custom tool's input is to have; nothing enforces it."""
    if not isinstance(form, dict) or not isinstance(form.get("definition"), str):
        return description
    return (
        f"{description or ''}\n\nThe input must follow this {form.get('syntax')} grammar:\n{form['definition']}".strip()
    )


def _chosen(tools: list[reading.Tool], forms: dict[str, Form], choice: Any) -> list[reading.Tool]:
    if isinstance(choice, str):
        reading.one_of(choice, ("auto", "none", "required"), "tool_choice")
    if not isinstance(choice, dict):
        return reading.chosen(tools, choice)
    reading.one_of(choice.get("type"), ("function", "custom", "allowed_tools"), "tool_choice.type")
    named = [choice]
    if choice["type"] == "allowed_tools":
        reading.one_of(choice.get("mode"), ("auto", "required"), "tool_choice.mode")
        named = reading.listed(choice, "tools", "tool_choice")
    names = []
    for one in named:
        name = reading.text_field(one, "name", "tool_choice")
        if one.get("type") == "namespace":
            names += [known for known, form in forms.items() if form.namespace == name]
        else:
            names.append(canonical(name, one.get("namespace")))
    return reading.chosen(tools, choice, names)


def _messages(body: dict[str, Any]) -> list[Message]:
    instructions, items = body.get("instructions"), body.get("input")
    messages: list[Message] = []
    reader = _Items(messages)
    if isinstance(instructions, list):  # items, as a stored response would give them
        for position, item in enumerate(instructions):
            reader.add(item, f"instructions[{position}]")
    elif instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for position, item in enumerate(items or []):
        reader.add(item, f"input[{position}]")
    return messages if items else []


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
            raise reading.wrong_type(where, "an object")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            self._answer, self._thought = None, _thought(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            ident = reading.text_field(item, "call_id", where)
            given = reading.text_field(item, "arguments" if kind == "function_call" else "input", where)
            custom = json.dumps({"input": given}, ensure_ascii=False)
            self._continue(False)["tool_calls"].append(
                {
                    "id": ident,
                    "name": canonical(reading.text_field(item, "name", where), item.get("namespace")),
                    "arguments": (given or "{}") if kind == "function_call" else custom,
                }
            )
        elif kind == "message" and item.get("role") == "assistant":
            self._continue(True)["content"] = reading.text(item.get("content"), f"{where}.content")
        elif kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in ROLES:
                raise BadRequest(f"{where}: 'role' must be one of {', '.join(ROLES)}", param=f"{where}.role")
            self._other({"role": ROLES[role], "content": reading.text(item.get("content"), f"{where}.content")})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            ident = reading.text_field(item, "call_id", where)
            result = reading.text(item.get("output"), f"{where}.output")
            self._other({"role": "tool", "content": result, "tool_call_id": ident})
        elif kind == "item_reference":
            why = f"{where}: items are not stored, send the item itself (clients: set 'store' to false)"
            raise BadRequest(why, "unsupported_value", where)
        else:
            raise BadRequest(f"{where}: items of type {kind!r} are not supported", "unsupported_value", where)

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


def _thought(item: dict[str, Any], where: str) -> str:
    """The text of a reasoning item; of one that holds only what this server sealed, that; of others nothing."""
    sealed = item.get("encrypted_content")
    if not item.get("content") and isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
        except ValueError as error:
            raise BadRequest(f"{where}: 'encrypted_content' is damaged", param=f"{where}.encrypted_content") from error
    return reading.text(item.get("content") or item.get("summary"), where)
