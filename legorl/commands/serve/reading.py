"""What every protocol's reader needs: checked fields, tools in one shape, a conversation in one order.

Tools are OpenAI function dictionaries ({"type": "function", "function": {name, description, parameters}}) whatever
protocol they came in by. What has a wrong type or asks for what is not given raises BadRequest naming the field; fields
that nobody here knows are accepted, since harnesses send their vendors' own, and recorded by name.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from legorl.commands.serve.messages import BadRequest, Message, text_of

Tool = dict[str, Any]
DEEPEST = 64  # levels of a schema or an option; what is read must be certain to be written again
MOST_STOPS = 64
MOST_NAMES = 64  # unknown fields that are recorded
ANY: tuple[type, ...] = (object,)
NUMBER: tuple[type, ...] = (int, float)
WORDS = {str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}


def wrong_type(name: str, wanted: str) -> BadRequest:
    """The error for a field of another type than it must have."""
    return BadRequest(f"'{name}' must be {wanted}", "invalid_type", name)


def unsupported(name: str, why: str) -> BadRequest:
    """The error for what the protocol has and this server does not."""
    return BadRequest(f"'{name}' {why}", "unsupported_value", name)


def check(body: dict[str, Any], fields: Mapping[str, tuple[type, ...]]) -> list[str]:
    """Raise BadRequest where a field has another type than `fields` says (null always passes); return unknown names."""
    for name, kinds in fields.items():
        value = body.get(name)
        if value is None or kinds is ANY:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise wrong_type(name, "a number" if kinds == NUMBER else " or ".join(WORDS[k] for k in kinds))
    return sorted(set(body) - set(fields))[:MOST_NAMES]


def conversation(messages: list[Message], param: str) -> list[Message]:
    """Put the results behind an answer into the order of its calls; raise BadRequest if there is no message.

    Chat templates render results without their ids, so a model can tell them apart only by their order. Harnesses send
    them in the order in which their tools ended. What is missing stays missing.
    """
    if not messages:
        raise BadRequest(f"'{param}' holds no messages", "missing_required_parameter", param)
    ordered: list[Message] = []
    rank: dict[str, int] = {}
    at = 0
    while at < len(messages):
        end = at + 1
        if messages[at]["role"] == "tool":
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
        else:
            rank = {call["id"]: k for k, call in enumerate(messages[at].get("tool_calls") or [])}
        ordered += sorted(messages[at:end], key=lambda m: rank.get(m.get("tool_call_id", ""), len(rank)))
        at = end
    return ordered


def listed(body: dict[str, Any], name: str, where: str = "") -> list[Any]:
    """Return the list in a field, [] where it is absent or null. `where` leads to the object that holds the field."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(f"{where}.{name}" if where else name, "a list")
    return value


def text(content: Any, where: str) -> str:
    """Flatten a message's content; `where` names it in the error."""
    try:
        return text_of(content)
    except BadRequest as error:
        raise BadRequest(f"{where}: {error}", error.code, where) from error


def positive(body: dict[str, Any], *names: str) -> int | None:
    """Return the first of the fields that is set: a positive integer."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong_type(name, "a positive integer")
        return value
    return None


def stops(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the stop strings in a field: a string, a list of strings, or nothing."""
    value = body.get(name)
    value = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(s, str) and s for s in value):
        raise wrong_type(name, "a string or a list of strings, none of them empty")
    if len(value) > MOST_STOPS:
        raise BadRequest(f"'{name}' must hold at most {MOST_STOPS} strings", param=name)
    return tuple(value)


def text_field(data: Any, name: str, where: str) -> str:
    """Return a field of an object in the request that must be a string."""
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, str):
        raise BadRequest(f"{where}: '{name}' must be a string", "invalid_type", f"{where}.{name}")
    return value


def function(name: Any, description: Any, parameters: Any, where: str, field: str = "parameters") -> Tool:
    """One tool in the common shape. `field` is what its protocol calls the schema."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}: a tool needs a 'name'", "missing_required_parameter", f"{where}.name")
    if description is not None and not isinstance(description, str):
        raise wrong_type(f"{where}.description", "a string")
    if parameters is not None:
        _check_schema(parameters, f"{where}.{field}")
    shaped = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in shaped.items() if v is not None}}


def _check_schema(schema: Any, where: str) -> None:
    """Raise BadRequest unless `schema` describes an object; nothing is resolved, so a $ref to itself does no harm."""
    code = "invalid_function_parameters"
    if not isinstance(schema, dict):
        raise BadRequest(f"'{where}' must be a JSON schema, an object", code, where)
    _bound(schema, where)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadRequest(f"'{where}' must be the schema of an object, not of {str(kind)[:40]!r}", code, where)
    for name, wanted in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(name), (wanted, type(None))):
            raise BadRequest(f"'{where}': '{name}' must be {WORDS[wanted]}", code, where)


def chosen(tools: list[Tool], choice: Any, names: list[str] | None = None) -> list[Tool]:
    """Return the tools that a `tool_choice` leaves: none for "none", those of `names` where it names some.

    That a call must be made ("required", "any") is a wish: it would take a grammar, and then the recorded
    log-probabilities would not be those of the policy.
    """
    known = [t["function"]["name"] for t in tools]
    if len(set(known)) < len(known):
        [(twice, _)] = Counter(known).most_common(1)
        raise BadRequest(f"'tools' holds two tools named {twice!r}", param="tools")
    if choice == "none":
        return []
    if names is None:
        return tools
    wanted = set(names)
    if unknown := sorted(wanted - set(known)):
        raise BadRequest(f"'tool_choice' names {unknown[0]!r}, which is none of the tools", param="tool_choice")
    if not wanted:
        raise BadRequest("'tool_choice' names no tool", param="tool_choice")
    return [t for t in tools if t["function"]["name"] in wanted]


def one_of(value: Any, allowed: tuple[str, ...], name: str) -> None:
    """Raise BadRequest unless `value` is one of `allowed`."""
    if value not in allowed:
        raise BadRequest(f"'{name}' must be one of {', '.join(allowed)}", param=name)


def asked_for(body: dict[str, Any], fields: tuple[str, ...], **noted: list[str]) -> dict[str, Any]:
    """Return what is recorded as asked for: the set ones of `fields`, and names `noted` that had no effect."""
    wanted = {name: body[name] for name in fields if body.get(name) is not None}
    for name, value in wanted.items():
        _bound(value, name)
    return {**wanted, **{name: values for name, values in noted.items() if values}}


def _bound(value: Any, name: str) -> None:
    """Raise BadRequest if `value` is nested more than DEEPEST levels."""
    level = [value]
    for _ in range(DEEPEST):
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level = [v for values in inner for v in values]
        if not level:
            return
    raise BadRequest(f"'{name}' is nested too deeply", param=name)
