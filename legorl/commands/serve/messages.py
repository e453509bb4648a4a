"""Messages as every protocol's conversation is reduced to, and what counts as the same message.

A canonical message is a dictionary: role (system, user, assistant, tool), content (text), and for assistants
`reasoning` and `tool_calls` [{id, name, arguments (JSON text)}], for tools `tool_call_id`. Harnesses echo our answers
after harmless transformations: key order, compact JSON, ASCII escapes, a string or a list of blocks, moved cache
markers, stripped white space, dropped reasoning, calls shown as text. Those are the same message; anything else is
another one.
"""

import ast
import hashlib
import json
from typing import Any

Message = dict[str, Any]


class BadRequest(Exception):
    """The request is not one this server can answer. `code` and `param` (the field) are those of OpenAI's errors."""

    def __init__(self, message: str, code: str = "invalid_value", param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


def text_of(content: Any) -> str:
    """Flatten a string, None or a list of text blocks (a line each); raise BadRequest for images, audio and files."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise BadRequest("message content must be a string or a list of blocks")
    parts = []
    for block in content:
        if isinstance(block, str):
            parts.append(block)
        elif isinstance(block, dict) and isinstance(block.get("text"), str):
            parts.append(block["text"])
        elif isinstance(block, dict) and isinstance(block.get("refusal"), str):
            parts.append(block["refusal"])
        else:
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            why = f"content of type {kind!r} is not supported: this model reads text only"
            raise BadRequest(why, "unsupported_value")
    return "\n".join(p for p in parts if p)


def mend(text: str) -> str:
    """Put U+FFFD in place of half a surrogate pair: JSON can say it ("\\ud83d"), UTF-8 cannot hold it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_canonical = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def digest(*parts: Any) -> str:
    """Digest of JSON-able values, independent of key order."""
    return hashlib.sha256(_canonical(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def arguments_key(arguments: str) -> Any:
    """Parsed JSON where it parses (so key order, spacing and escapes do not matter), else the text itself."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError, TypeError):
        return arguments


def message_key(message: Message) -> list[Any]:
    """What must agree for two messages to be the same: reasoning and outer white space do not count."""
    calls = [[c["id"], c["name"], arguments_key(c["arguments"])] for c in message.get("tool_calls") or []]
    return [message["role"], message["content"].strip(), calls, message.get("tool_call_id")]


def same_answer(echo: Message, answer: Message) -> bool:
    """True if `echo` is `answer` after harmless transformations only."""
    if echo["role"] != "assistant":
        return False
    if echo["content"].strip() != answer["content"].strip():
        return _calls_as_text(echo, answer)
    if echo.get("tool_calls") != answer.get("tool_calls") and message_key(echo) != message_key(answer):
        return False
    reasoning = (echo.get("reasoning") or "").strip()
    return not reasoning or reasoning == (answer.get("reasoning") or "").strip()


def _calls_as_text(echo: Message, answer: Message) -> bool:
    """Does `echo` show the calls of `answer` behind its text in Python's notation, as smolagents keeps them?"""
    text, mark, shown = echo["content"].rpartition("Calling tools:")
    if not mark or echo.get("tool_calls") or text.strip() != answer["content"].strip():
        return False
    try:
        calls = [[c["id"], c["function"]["name"], c["function"]["arguments"]] for c in ast.literal_eval(shown.strip())]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        return False
    return calls == [[c["id"], c["name"], arguments_key(c["arguments"])] for c in answer.get("tool_calls") or []]


def call_ids(message: Message) -> set[str]:
    return {c["id"] for c in message.get("tool_calls") or []}
