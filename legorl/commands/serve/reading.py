"""What every protocol's reader needs: checked fields, tools in one shape, a conversation in one order.

Tools are OpenAI function dictionaries ({"type": "function", "function": {name, description, parameters}}) whatever
protocol they came in by. A wrong type raises BadRequest naming the field.
"""

from typing import Any

from legorl.commands.serve.messages import BadRequest, Message

Tool = dict[str, Any]
DEEPEST = 64  # levels of a schema or an option; what is read must be certain to be written again
MOST_STOPS = 64


def conversation(messages: list[Message]) -> list[Message]:
    """Put the results behind an answer into the order of its calls; raise BadRequest if there is no message.

    Chat templates render results without their ids, so a model can tell them apart only by their order. Harnesses send
    them in the order in which their tools ended.
    """
    if not messages:
        raise BadRequest("the request holds no messages")
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


def listed(body: dict[str, Any], name: str) -> list[Any]:
    """Return the list in a field, [] where it is absent or null."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"'{name}' must be a list")
    return value


def positive(body: dict[str, Any], *names: str) -> int | None:
    """Return the first of the fields that is set: a positive integer."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"'{name}' must be a positive integer")
        return value
    return None


def stops(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the stop strings in a field: a string, a list of strings, or nothing."""
    value = body.get(name)
    value = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(s, str) and s for s in value):
        raise BadRequest(f"'{name}' must be a string or a list of strings, none of them empty")
    if len(value) > MOST_STOPS:
        raise BadRequest(f"'{name}' must hold at most {MOST_STOPS} strings")
    return tuple(value)


def text_field(data: Any, name: str, where: str) -> str:
    """Return a field of an object in the request that must be a string."""
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, str):
        raise BadRequest(f"{where}: '{name}' must be a string")
    return value


def function(name: Any, description: Any, parameters: Any, where: str) -> Tool:
    """One tool in the common shape."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}: a tool needs a 'name'")
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"{where}: a tool's description must be a string")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadRequest(f"{where}: a tool's schema must be an object")
    _bound(parameters, f"{where}: a tool's schema")
    shaped = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in shaped.items() if v is not None}}


def chosen(tools: list[Tool], choice: Any, names: list[Any] | None = None) -> list[Tool]:
    """Return the tools that a `tool_choice` leaves: none for "none", those of `names` where it names some.

    That a call must be made ("required", "any") is a wish: it would take a grammar, and then the recorded
    log-probabilities would not be those of the policy.
    """
    if choice == "none":
        return []
    if names is None:
        return tools
    known = {t["function"]["name"] for t in tools}
    unknown = [n for n in names if n not in known]
    if unknown or not names:
        raise BadRequest(f"'tool_choice' names {unknown or 'no tool'}; the tools are {sorted(known)}")
    return [t for t in tools if t["function"]["name"] in names]


def asked_for(body: dict[str, Any], fields: tuple[str, ...], skipped: list[str]) -> dict[str, Any]:
    """Return the fields that are recorded as what the harness asked for, and the tools that are not offered."""
    wanted = {name: body[name] for name in fields if body.get(name) is not None}
    for name, value in wanted.items():
        _bound(value, f"'{name}'")
    return {**wanted, "skipped_tools": skipped} if skipped else wanted


def _bound(value: Any, what: str) -> None:
    """Raise BadRequest if `value` is nested more than DEEPEST levels."""
    level = [value]
    for _ in range(DEEPEST):
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level = [v for values in inner for v in values]
        if not level:
            return
    raise BadRequest(f"{what} is nested too deeply")
