"""How models write tool calls: one class a format, each of which finds, reads and writes calls in plain text.

    format = BY_NAME["hermes"]
    format.start(text)        # where calls begin, or None
    format.safe(text)         # how many characters cannot belong to a call, whatever is sampled next
    format.read(text, tools)  # (where calls begin, the calls as written); never raises
    format.write(calls)       # calls as text, as the model's own template writes them

Named as vLLM names them: `hermes` (Hermes, Qwen2.5, Qwen3), `qwen3_coder` (Qwen3-Coder, Qwen3.5 and later, Nemotron 3),
`llama3_json` (Llama 3.x), `mistral`. `default` is hermes, shown to models whose template has no place for tools.

Why these are not read with vLLM's parsers: importing those takes 17 to 21 seconds in a process without vLLM, and a
record must not depend on which engine sampled it. Nor do they know where one bad call ends and the next begins, or
what a call cut off by the length limit is; they log what a model gets wrong instead of telling it.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from legorl.commands.serve.detokenize import overlap
from legorl.commands.serve.messages import arguments_key

_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class Written:
    """A call as the model wrote it: `arguments` is None where they could not be read, `body` is what stands there.

    `typed`: argument values have the types of JSON; else each is the text that stands for it.
    """

    body: str
    name: str = ""
    arguments: dict[str, Any] | None = None
    typed: bool = True
    ident: str = ""  # the id that the model itself gave the call


class Format(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]: ...  # what calls are marked with: special tokens among them stay in the text

    def start(self, text: str) -> int | None: ...

    def safe(self, text: str) -> int: ...

    def read(self, text: str, tools: list[dict[str, Any]]) -> tuple[int, list[Written]]: ...

    def write(self, calls: list[dict[str, Any]]) -> str: ...


class Marked:
    """What formats with an opening mark have in common."""

    openers: tuple[str, ...]

    def start(self, text: str) -> int | None:
        return min((at for mark in self.openers if (at := text.find(mark)) >= 0), default=None)

    def safe(self, text: str) -> int:
        at = self.start(text)
        return at if at is not None else len(text) - max(overlap(text, mark) for mark in self.openers)


class Hermes(Marked):
    """<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>, one block a call."""

    openers = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")

    def __init__(self, name: str):
        self.name = name

    def read(self, text: str, tools: list[dict[str, Any]]) -> tuple[int, list[Written]]:
        begin = at = self.start(text)
        calls = []
        while at is not None:
            call, at = self._one(text, at + len("<tool_call>"))
            calls.append(call)
            at = _find(text, "<tool_call>", at)
        return len(text) if begin is None else begin, calls

    @staticmethod
    def _one(text: str, at: int) -> tuple[Written, int]:
        """Read the call behind an opening mark; return it and where it ends."""
        # The decoder finds the end, so that an argument may contain the closing mark.
        data, end = _decode(text, at)
        if end is not None:
            close = _skip(text, end)
            # The closing mark may be missing in front of the next call or at the end.
            if close == len(text) or text.startswith(("<tool_call>", "</tool_call>"), close):
                return _from_json(data, text[at:end].strip()), close
        stop = _find(text, "</tool_call>", at)
        return Written(text[at:stop].strip()), len(text) if stop is None else stop

    def write(self, calls: list[dict[str, Any]]) -> str:
        return "\n".join(f"<tool_call>\n{_json(c, 'arguments')}\n</tool_call>" for c in calls)


class Qwen3Coder(Marked):
    """<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>.

    Models leave out the outer pair now and then; the inner one must be complete.
    """

    name = "qwen3_coder"
    openers = ("<tool_call>", "<function=")
    marks = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
    _HEAD = re.compile(r"(?:<tool_call>)?\s*<function=([^>\n]*)>")
    # A value ends where the next parameter or the end of the call follows: it may contain the closing mark itself.
    _PARAMETER = re.compile(
        r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
    )
    _TAIL = re.compile(r"\s*</function>(?:\s*</tool_call>)?")

    def read(self, text: str, tools: list[dict[str, Any]]) -> tuple[int, list[Written]]:
        begin = at = self.start(text)
        calls = []
        while at is not None:
            call, end = self._one(text, at)
            calls.append(call)
            rest = self.start(text[end:])
            at = None if rest is None else end + rest
        return len(text) if begin is None else begin, calls

    def _one(self, text: str, at: int) -> tuple[Written, int]:
        head = self._HEAD.match(text, at)
        if head:
            arguments, here = {}, head.end()
            while found := self._PARAMETER.match(text, here):
                arguments[found[1]] = found[2]
                here = found.end()
            if tail := self._TAIL.match(text, here):
                return Written(text[at : tail.end()], head[1], arguments, typed=False), tail.end()
        close = _find(text, "</tool_call>", at)
        end = len(text) if close is None else close + len("</tool_call>")
        return Written(text[at:end], head[1] if head else ""), end

    def write(self, calls: list[dict[str, Any]]) -> str:
        return "\n".join(
            f"<tool_call>\n<function={c['name']}>\n"
            + "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in _arguments(c).items())
            + "</function>\n</tool_call>"
            for c in calls
        )


class Llama3Json:
    """{"name": ..., "parameters": {...}}, alone or behind <|python_tag|>; several with `; ` or a new line between.

    Without the tag, an object counts as a call at the start of a line, if it has a name and parameters. Built-in tools
    are written <|python_tag|>NAME.call(KEY="VALUE").
    """

    name = "llama3_json"
    marks = ("<|python_tag|>",)
    _TAG = "<|python_tag|>"
    _OBJECT = re.compile(r'^[ \t]*(?=\{\s*"(?:name|type|parameters|arguments|function)"\s*:)', re.MULTILINE)
    _BUILTIN = re.compile(r'\s*([\w.-]+)\.call\(\s*(?:(\w+)="(.*)")?\s*\)\s*$', re.DOTALL)

    def start(self, text: str, at: int = 0) -> int | None:
        tag, plain = _find(text, self._TAG, at), self._OBJECT.search(text, at)
        return min((k for k in (tag, plain.start() if plain else None) if k is not None), default=None)

    def safe(self, text: str) -> int:
        at = self.start(text)
        if at is not None:
            return at
        line = text.rfind("\n") + 1
        # An object whose first key is not there yet may span lines.
        brace = re.search(r'^[ \t]*\{\s*(?:"\w*"?\s*)?\Z', text, re.MULTILINE)
        if brace:
            return brace.start()
        if not text[line:].strip():
            return line
        return len(text) - overlap(text, self._TAG)

    def read(self, text: str, tools: list[dict[str, Any]]) -> tuple[int, list[Written]]:
        calls: list[Written] = []
        begin, at = len(text), self.start(text)
        while at is not None:
            tagged = text.startswith(self._TAG, at)
            here = at + len(self._TAG) * tagged
            data, end = _decode(text, here)
            if end is None:
                call: Written | None = (tagged and self._builtin(text[here:])) or Written(text[at:])
                end = len(text)
            else:
                is_call = isinstance(data, dict) and "name" in data and ("parameters" in data or "arguments" in data)
                call = _from_json(data, text[here:end].strip()) if tagged or is_call else None
            if call:
                begin = min(begin, at)
                calls.append(call)
            while True:  # further calls on the same line
                after = _skip(text, end, " \t;\n")
                more, stop = _decode(text, after) if call and text.startswith("{", after) else (None, None)
                if stop is None or not isinstance(more, dict) or "name" not in more:
                    break
                calls.append(_from_json(more, text[after:stop]))
                end = stop
            at = self.start(text, end)
        return begin, calls

    def _builtin(self, text: str) -> Written | None:
        found = self._BUILTIN.match(text)
        if not found:
            return None
        name, key, rest = found.groups()
        if key is None:
            return Written(text, name, {})
        values = re.split(r'", (\w+)="', rest)
        keys = [key, *values[1::2]]
        return Written(text, name, dict(zip(keys, values[::2], strict=True)), typed=False)

    def write(self, calls: list[dict[str, Any]]) -> str:
        return "; ".join(_json(c, "parameters") for c in calls)


class Mistral(Marked):
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...], or [TOOL_CALLS]NAME[ARGS]{...} for each call.

    The second form may have [CALL_ID]ID in front of [ARGS]. Which one a model knows depends on its release.
    """

    name = "mistral"
    openers = ("[TOOL_CALLS]",)
    marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    _NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def read(self, text: str, tools: list[dict[str, Any]]) -> tuple[int, list[Written]]:
        begin = at = self.start(text)
        calls = []
        while at is not None:
            found, end = self._after(text, at + len("[TOOL_CALLS]"))
            calls += found
            at = _find(text, "[TOOL_CALLS]", end)
        return len(text) if begin is None else begin, calls

    def _after(self, text: str, at: int) -> tuple[list[Written], int]:
        named = self._NAMED.match(text, at)
        data, end = _decode(text, named.end() if named else at)
        if end is None:
            end = _find(text, "[TOOL_CALLS]", at) or len(text)
            return [Written(text[at:end].strip(), named[1] if named else "")], end
        if named:
            arguments = data if isinstance(data, dict) else None
            return [Written(text[at:end].strip(), named[1], arguments, ident=named[2] or "")], end
        listed = data if isinstance(data, list) and data else [data]
        return [_from_json(one, text[at:end].strip()) for one in listed], end

    def write(self, calls: list[dict[str, Any]]) -> str:
        return "[TOOL_CALLS] [" + ", ".join(_json(c, "arguments") for c in calls) + "]"


BY_NAME: dict[str, Format] = {
    f.name: f for f in (Hermes("default"), Hermes("hermes"), Qwen3Coder(), Llama3Json(), Mistral())
}


def recognise(text: str, name: str, arguments: dict[str, str]) -> str | None:
    """The format in which `text`, rendered by a template, holds exactly the call of `name` with `arguments`."""
    for candidate in ("qwen3_coder", "mistral", "hermes", "llama3_json"):
        _begin, calls = BY_NAME[candidate].read(text, [])
        if [(c.name, c.arguments) for c in calls] == [(name, arguments)]:
            return candidate
    return None


def _from_json(data: Any, body: str) -> Written:
    """A call that is one JSON object; its arguments may be under either name, or JSON in a string."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return Written(body)
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = arguments_key(arguments)
    ident = data.get("id")
    return Written(
        body,
        data["name"],
        arguments if isinstance(arguments, dict) else None,
        ident=ident if isinstance(ident, str) else "",
    )


def _decode(text: str, at: int) -> tuple[Any, int | None]:
    """(the JSON value at `at` behind white space, where it ends), or (None, None)."""
    try:
        return _JSON.raw_decode(text, _skip(text, at))
    except (ValueError, RecursionError):
        return None, None


def _skip(text: str, at: int, blank: str = " \t\r\n") -> int:
    while at < len(text) and text[at] in blank:
        at += 1
    return at


def _find(text: str, what: str, at: int) -> int | None:
    found = text.find(what, at)
    return None if found < 0 else found


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    read = arguments_key(call["arguments"])
    return read if isinstance(read, dict) else {}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(call: dict[str, Any], key: str) -> str:
    return json.dumps({"name": call["name"], key: arguments_key(call["arguments"])}, ensure_ascii=False)
