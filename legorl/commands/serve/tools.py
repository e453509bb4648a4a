"""Tool calls in text: how tools are shown to a model whose template has no place for them, and how calls are read.

The default format is that of Hermes and Qwen models, in plain text, so that any model can learn it:

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

Results come back as a user message: <tool_response> ... </tool_response>. Arguments are coerced by the tool's JSON
schema (the string "5" for an integer parameter becomes 5). What cannot be parsed stays text and is recorded as invalid.

Reasoning between a model's own markers (`<think> ... </think>`) is split off first; calls inside it are not calls.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from legorl.commands.serve.messages import Message, arguments_key, mend

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)

GUIDE = """You can call these tools. To call one, write

<tool_call>
{"name": NAME, "arguments": {...}}
</tool_call>

Tools (JSON schemas):
"""


@dataclass(frozen=True)
class ToolCall:
    """`valid`: it parsed, names a tool of the request, and its arguments are an object. Invalid ones stay text."""

    id: str
    name: str
    arguments: str
    valid: bool


@dataclass(frozen=True)
class Thinking:
    """How a model marks its reasoning. `begun`: the generation prompt ends with the opening mark."""

    open: str
    close: str
    begun: bool


def split_reasoning(text: str, thinking: Thinking | None) -> tuple[str, str, bool]:
    """Split sampled text into (reasoning, the rest, whether the reasoning is over). Outer white space is not kept."""
    if thinking is None:
        return "", text, True
    begun = text.lstrip()
    if begun.startswith(thinking.open):
        begun = begun[len(thinking.open) :]
    elif not thinking.begun:
        return "", text, True
    reasoning, close, rest = begun.partition(thinking.close)
    return (reasoning.strip(), rest.lstrip(), True) if close else (reasoning.lstrip(), "", False)


def guide(tools: list[dict[str, Any]]) -> str:
    """System text that shows `tools` (OpenAI function dictionaries) in the default format."""
    return GUIDE + "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)


def as_text(message: Message) -> Message:
    """Render a canonical message for a template that knows only role and content."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    content = message["content"]
    for call in message.get("tool_calls") or []:
        body = json.dumps({"name": call["name"], "arguments": arguments_key(call["arguments"])}, ensure_ascii=False)
        content += ("\n" if content else "") + f"{OPEN}\n{body}\n{CLOSE}"
    return {"role": message["role"], "content": content}


def parse(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Split sampled text into what the harness sees as content and the tool calls in it.

    Without tools in the request the text is content as it stands. If any call is invalid, all of the text is content:
    half an answer would hide from the harness what the policy did.
    """
    if not tools or OPEN not in text:
        return text, []
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
    calls = [_read(body, schemas) for body in _CALL.findall(text)]
    if not all(c.valid for c in calls):
        return text, calls
    return text[: text.index(OPEN)].rstrip(), calls


def _read(body: str, schemas: dict[str, dict[str, Any]]) -> ToolCall:
    ident = "call_" + secrets.token_hex(12)
    try:
        data = json.loads(body)
        name, arguments = data["name"], data.get("arguments", data.get("parameters", {}))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return ToolCall(ident, "", body, False)
    if not isinstance(name, str) or name not in schemas or not isinstance(arguments, dict):
        return ToolCall(ident, mend(str(name)), mend(json.dumps(arguments, ensure_ascii=False)), False)
    try:
        typed = json.dumps(coerce(arguments, schemas[name]), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # Infinity and NaN are no JSON
        return ToolCall(ident, name, body, False)
    return ToolCall(ident, name, mend(typed), True)


def coerce(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Give each argument the type its schema names, where the text says it without doubt; else leave it."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    kinds = {name: p.get("type") for name, p in properties.items() if isinstance(p, dict)}
    return {name: _typed(value, kinds.get(name)) for name, value in arguments.items()}


def _typed(value: Any, kind: Any) -> Any:
    if isinstance(value, str) and kind in ("integer", "number", "boolean", "array", "object"):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return value
        wanted: Any = {"integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}[kind]
        plain_bool = isinstance(read, bool) and kind != "boolean"
        return read if isinstance(read, wanted) and not plain_bool else value
    if kind == "string" and not isinstance(value, str) and isinstance(value, (int, float, bool)):
        return json.dumps(value)
    return value
