"""What a chat template does, learnt from what it renders: small conversations with marks, at start-up.

    found = examine(template)   # found.fault: why an answer cannot be continued token-exactly, or None

Nothing here reads the template's source: two releases of one model differ in it, and people write their own.
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from legorl.commands.serve.formats import recognise as recognise_format
from legorl.commands.serve.messages import BadRequest, Message

if TYPE_CHECKING:
    from legorl.commands.serve.render import Template

# Words that nothing escapes, trims or splits, and that no message can contain: they are new in every process.
MARK, ARGUMENT, RESULT, NEXT = (
    f"legorl{kind}{secrets.token_hex(8)}" for kind in ("Answer", "Argument", "Result", "Next")
)
ASK: Message = {"role": "user", "content": "Question"}
SYSTEM: Message = {"role": "system", "content": "System"}
NAME, KEY = "legorl_probe", "word"
_PARAMETERS = {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]}
TOOL = {"type": "function", "function": {"name": NAME, "description": "A probe.", "parameters": _PARAMETERS}}


@dataclass(frozen=True)
class Closing:
    """How to find the end of a message behind the mark in its last call: `end` if it is said, else behind `literal`."""

    end: str = ""
    literal: str = ""

    def cut(self, tail: str) -> str | None:
        """`tail` from the end of the answer on, None if it is not there."""
        if self.end:
            at = tail.find(self.end)
            return tail[at:] if at >= 0 else None
        return tail[len(self.literal) :] if tail.startswith(self.literal) else None


@dataclass
class Found:
    """`lean`: what follows an answer does not depend on the system message and the tools."""

    fault: str | None = None
    lean: bool = True
    closing: Closing = Closing()
    end_id: int | None = None  # the token that closes an answer
    end_ids: set[int] = field(default_factory=set)


def call(number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}_legorlid{number}", "name": NAME, "arguments": json.dumps({KEY: "word"})}


def result(number: int = 0) -> Message:
    return {"role": "tool", "content": RESULT, "tool_call_id": call(number)["id"]}


def marked(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls, with the mark as the last argument of the last one."""
    return [*calls[:-1], {**calls[-1], "arguments": json.dumps({KEY: ARGUMENT})}] if calls else []


def say_call(template: "Template") -> str:
    """How the template renders a call; "" if it shows no calls, or not their results."""
    ask: Message = {"role": "user", "content": NEXT}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": marked([call()])}
    try:
        said = template.text([ask, answer], [TOOL], prompt=False)
        answered = template.text([ask, answer, result()], [TOOL], prompt=True)
    except BadRequest:
        return ""
    said = said.rpartition(NEXT)[2]
    return said if ARGUMENT in said and RESULT in answered else ""


def recognise(said: str) -> str | None:
    """The name of the format in which a template wrote the probe's call."""
    return recognise_format(said, NAME, {KEY: ARGUMENT})


def examine(template: "Template") -> Found:
    """Try whether answers can be continued: with a question, results of one and two calls, results and a question."""
    found = Found()
    plain: Message = {"role": "assistant", "content": MARK}
    following = {"role": "user", "content": NEXT}
    last = template.tail([ASK], plain, [], [], found.closing, prompt=False)
    behind = template.tail([ASK], plain, [following], [], found.closing)
    if last is None or behind is None:
        found.fault = "it does not show an answer as it was given"
        return found
    _ends(template, found, last, behind)
    one, two = ({"role": "assistant", "content": MARK, "tool_calls": [call(k) for k in range(n)]} for n in (1, 2))
    cases: list[tuple[Message, list[Message]]] = [
        (plain, [following]),
        (one, [result()]),
        (one, [result(), following]),
        (two, [result(0), result(1)]),
    ]
    history = [SYSTEM, ASK, {"role": "assistant", "content": "b c"}, ASK]
    for answer, rest in cases:
        long = template.tail(history, answer, rest, [TOOL], found.closing)
        if long is None:
            found.fault = (
                f"it cannot render an answer with {len(answer.get('tool_calls') or [])} calls and what follows"
            )
        elif any(m["content"] not in long for m in rest):
            found.fault = "it does not put new messages behind the answer"
        elif template.tail([SYSTEM, ASK], answer, rest, [TOOL], found.closing) != long:
            found.fault = "what it puts behind an answer depends on earlier messages"
        elif not _joins(template, long):
            found.fault = "its text between two answers has no tokens of its own"
        if found.fault:
            return found
        found.lean &= template.tail([ASK], answer, rest, [], found.closing) == long
    return found


def _ends(template: "Template", found: Found, last: str, behind: str) -> None:
    """Find how answers end. `last`, `behind`: what follows an answer at the end of a conversation and inside one."""
    tokenizer = template._tokenizer
    known = tokenizer.added_tokens_decoder
    first = template.ids(behind)[:1]
    if last.strip() and first and (first[0] in known or first[0] == tokenizer.eos_token_id):
        found.end_id = first[0]
        found.end_ids.add(first[0])
    if not template.native_tools:
        return
    one = {"role": "assistant", "content": MARK, "tool_calls": [call()]}
    closed = template.tail([ASK], one, [], [TOOL], Closing(), prompt=False)
    if closed is None:
        return
    if last.strip():
        # The special token that ends it: an answer with calls may end otherwise than one without.
        ended = closed.rstrip()
        ends = [i for i, token in known.items() if token.special and ended.endswith(token.content)]
        if ends:
            end = max(ends, key=lambda i: len(known[i].content))
            found.end_ids.add(end)
            found.closing = Closing(end=known[end].content)
            return
    found.closing = Closing(literal=closed.removesuffix(last))


def _joins(template: "Template", tail: str) -> bool:
    """Whether tokens of an answer and tokens of what follows it say the same as the two texts joined."""
    decode = template._tokenizer.decode
    answer = template.text([ASK], [], prompt=True) + "b c"
    apart = decode(template.ids(answer) + template.ids(tail), skip_special_tokens=False)
    return apart == decode(template.ids(answer + tail), skip_special_tokens=False)
