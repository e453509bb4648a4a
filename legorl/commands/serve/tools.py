"""Tool calls and reasoning in sampled text: split off, given the types of the tools' schemas, checked.

    reasoning, rest, over = split_reasoning(text, Thinking("<think>", "</think>", begun=False))
    content, calls = parse(rest, request.tools, formats.BY_NAME["hermes"])

Arguments are coerced by the tool's JSON schema (the string "5" for an integer parameter becomes 5), where the text says
the value without doubt. What cannot be parsed stays text and is recorded as invalid. Reasoning between a model's own
markers is split off first; calls inside it are not calls.

The default format, for models whose template has no place for tools, is that of Hermes and Qwen models in plain text,
so that any model can learn it. Results come back as a user message: <tool_response> ... </tool_response>.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from legorl.commands.serve.formats import BY_NAME, Format, Written
from legorl.commands.serve.messages import Message, mend

GUIDE = """You can call these tools. To call one, write

{example}

Tools (JSON schemas):
{tools}"""
EXAMPLE = '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'


@dataclass(frozen=True)
class ToolCall:
    """`valid`: it parsed, names a tool of the request, and its arguments are an object. Invalid ones stay text.

    `id` is ours, so that it is unique; an id of nine letters that the model wrote itself (Mistral) ends it.
    """

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


def guide(tools: list[dict[str, Any]], format: Format = BY_NAME["default"]) -> str:
    """System text that shows `tools` (OpenAI function dictionaries) and how to call them."""
    example = EXAMPLE
    if format.name not in ("default", "hermes"):
        example = format.write([{"name": "NAME", "arguments": '{"ARGUMENT": "VALUE"}'}])
    shown = "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)
    return GUIDE.format(example=example, tools=shown)


def as_text(message: Message, format: Format = BY_NAME["default"]) -> Message:
    """Render a canonical message for a template that knows only role and content."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return {"role": message["role"], "content": with_calls(message, format)}


def with_calls(message: Message, format: Format) -> str:
    """The content of a message with its calls written behind it, as the model would."""
    content, calls = message["content"], message.get("tool_calls") or []
    return content + ("\n" if content and calls else "") + (format.write(calls) if calls else "")


def parse(text: str, tools: list[dict[str, Any]], format: Format) -> tuple[str, list[ToolCall]]:
    """Split sampled text into what the harness sees as content and the tool calls in it.

    Without tools in the request the text is content as it stands. If any call is invalid, all of the text is content:
    half an answer would hide from the harness what the policy did.
    """
    if not tools:
        return text, []
    begin, written = format.read(text, tools)
    if not written:
        return text, []
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
    calls = [_checked(w, schemas) for w in written]
    if not all(c.valid for c in calls):
        return text, calls
    return text[:begin].rstrip(), calls


def _checked(call: Written, schemas: dict[str, dict[str, Any]]) -> ToolCall:
    ident = "call_" + secrets.token_hex(12)
    if re.fullmatch("[a-zA-Z0-9]{9}", call.ident):
        ident += "_" + call.ident
    if call.arguments is None:
        return ToolCall(ident, mend(call.name), mend(call.body), False)
    known = call.name in schemas
    arguments = coerce(call.arguments, schemas[call.name], call.typed) if known else call.arguments
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # Infinity and NaN are no JSON
        return ToolCall(ident, mend(call.name), mend(call.body), False)
    return ToolCall(ident, mend(call.name), mend(text), known)


KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def coerce(arguments: dict[str, Any], schema: dict[str, Any], typed: bool = True) -> dict[str, Any]:
    """Give each argument the type its schema names, where the text says it without doubt; else leave it.

    `typed` is false where every value is the text that stands for it: then `True` and `None` mean what they mean in
    Python, since that is how templates print them.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    return {name: _typed(value, kinds(properties.get(name), schema), typed) for name, value in arguments.items()}


def kinds(schema: Any, root: Any = None, depth: int = 8) -> set[str]:
    """The JSON types that a schema allows, as far as it says: type, enum, const, anyOf, oneOf, allOf, a local $ref."""
    if not isinstance(schema, dict) or not depth:
        return set()
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    found = {k for k in listed if isinstance(k, str)}
    if found:
        return found
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    found = {KINDS[type(v)] for v in values}
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema[key] if isinstance(schema.get(key), list) else []:
            found |= kinds(part, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        found |= kinds(target, root, depth - 1)
    return found


def _typed(value: Any, wanted: set[str], typed: bool) -> Any:
    if not isinstance(value, str):
        # Not for a list or an object: what string was meant is not said.
        return json.dumps(value) if wanted == {"string"} and isinstance(value, (int, float, bool)) else value
    if not typed and "null" in wanted and value.strip() in ("null", "None"):
        return None
    if not wanted or "string" in wanted:
        return value
    if not typed and "boolean" in wanted and value.strip() in ("True", "False"):
        return value.strip() == "True"
    try:
        read = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return value
    kind = KINDS[type(read)]
    return read if kind in wanted or (kind == "integer" and "number" in wanted) else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
