"""From messages to prompt tokens: whole renders, and the bridge that continues a sampled turn token-exactly.

    template = Template(tokenizer, tool_format="auto", history="exact")
    template.full(messages, tools)                    # every token, up to the generation prompt
    template.bridge(messages, at, tools, last=end_id) # tokens behind the answer at index `at`; None: render in full
    template.fault                                    # why no answer can be continued, or None
    template.describe()                               # the same and the formats, in one line

The chat template is the model's own. The bridge is what the template puts between the end of one answer and the start
of the next: rendered with a mark in place of the answer and cut behind the mark, so that the answer's own tokens are
never rendered again. A sampled end token belongs to the answer; where it is missing, the bridge adds it.

`history`: `exact` keeps what was sampled as it was, also where the template would strip earlier reasoning or move the
tools to a later message; `template` renders in full whenever the template says that. What a template does is learnt by
rendering small conversations at start-up (probe.py), not by reading its source: in which format it writes calls,
whether the bridge depends on what stands far in front of it, how answers end.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from legorl.commands.serve import probe
from legorl.commands.serve import tools as toolformat
from legorl.commands.serve.detokenize import hidden_tokens
from legorl.commands.serve.formats import BY_NAME, Format
from legorl.commands.serve.messages import BadRequest, Message, arguments_key

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class Template:
    """The chat template of a tokenizer, for one kind of history, and what is known about it.

    `native_tools`: it has a place for tools and their results. `ends`: ids that end an answer, besides the tokenizer's
    own. `hidden`: ids that are no text. Dates that it prints are those of `started`: a conversation has one date.
    """

    def __init__(self, tokenizer: Any, tool_format: str = "auto", history: str = "exact", ends: tuple[int, ...] = ()):
        self._tokenizer = tokenizer
        self.source: str = tokenizer.chat_template or ""
        if not self.source:
            raise BadRequest("the model folder has no chat template (tokenizer_config.json or chat_template.jinja)")
        self.digest = hashlib.sha256(self.source.encode()).hexdigest()[:32]
        self.history = history
        self.started = datetime.now()
        self._strings, self._blocks = False, False  # arguments are JSON text; reasoning is a block of the content
        self.native_tools, self.format = self._choose(tool_format)
        if probe.MARK.lower() not in self.text([{"role": "user", "content": probe.MARK}], [], prompt=True).lower():
            raise BadRequest(
                "the model's chat template leaves out what a message says; it is made for content in blocks"
            )
        self.thinking = self._thinking()
        marks = self.format.marks + ((self.thinking.open, self.thinking.close) if self.thinking else ())
        self.hidden = hidden_tokens(tokenizer, marks)
        self.strips = self._strips()
        found = probe.examine(self)
        self.fault, self._lean, self._closing = found.fault, found.lean, found.closing
        self.end_id = found.end_id
        self.end_ids = frozenset({tokenizer.eos_token_id, *ends, *found.end_ids} - {None})

    def full(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Render the whole conversation up to the generation prompt. Raises BadRequest where the template refuses."""
        return self.ids(self.text(messages, tools, prompt=True))

    def bridge(
        self, messages: list[Message], at: int, tools: list[dict[str, Any]], last: int | None
    ) -> list[int] | None:
        """Tokens from behind the assistant message at index `at` up to the next generation prompt.

        `last`: the end token that was sampled, None where the answer was cut: the end that the template writes is then
        part of the bridge. None: this conversation has to be rendered in full, by what the template or `history` says.
        """
        if self.fault or (self.history == "template" and not self._keeps(messages, at, tools)):
            return None
        system = [] if self._lean else list(takewhile(lambda m: m["role"] == "system", messages))
        lead = [*system, probe.ASK]
        tail = self.tail(lead, messages[at], messages[at + 1 :], [] if self._lean else tools, self._closing)
        if tail is None:
            return None
        ids = self.ids(tail)
        return ids[1:] if last is not None and ids and ids[0] in (last, self.end_id) else ids

    def tail(
        self,
        lead: list[Message],
        answer: Message,
        rest: list[Message],
        tools: list[dict[str, Any]],
        closing: "probe.Closing",
        prompt: bool = True,
    ) -> str | None:
        """What the template writes behind `answer`, or None if that cannot be told."""
        calls = (answer.get("tool_calls") or []) if self.native_tools else []
        marked = {"role": "assistant", "content": probe.MARK, "tool_calls": probe.marked(calls)}
        try:
            text = self.text([*lead, marked, *rest], tools, prompt)
        except BadRequest:
            return None
        mark = probe.ARGUMENT if calls else probe.MARK
        if text.count(mark) != 1:
            return None
        tail = text[text.index(mark) + len(mark) :]
        return closing.cut(tail) if calls else tail

    def describe(self) -> str:
        """One line: how calls and reasoning are read, and whether answers are continued token by token."""
        shown = self.format.name + ("" if self.native_tools else ", shown in the system prompt")
        if self.unread:
            shown += ", since the template's own form is not read here"
        thinking = f"reasoning {self.thinking.open}...{self.thinking.close}" if self.thinking else "no reasoning marks"
        if self.fault:
            bridge = f"this chat template cannot be bridged ({self.fault}): every turn is rendered in full"
        elif self.history == "template":
            bridge = "answers are continued token by token where the template keeps them (history template)"
        else:
            bridge = "answers are continued token by token (history exact" + (
                "; the template alone would strip earlier reasoning)" if self.strips else ")"
            )
        return f"tool calls: {shown}; {thinking}; {bridge}"

    # -- rendering -------------------------------------------------------------------------------------------------

    def text(self, messages: list[Message], tools: list[dict[str, Any]], prompt: bool) -> str:
        """Render, in the first shape that the template takes. Raises BadRequest with what it said to the first."""
        fault: Exception | None = None
        for shaped, offered in self._shapes(messages, tools):
            try:
                return self._tokenizer.apply_chat_template(
                    shaped,
                    tools=offered,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    strftime_now=self.started.strftime,
                )
            except Exception as error:  # whatever the template's own code raises
                fault = fault or error
        raise BadRequest(f"the model's chat template refuses this conversation: {fault}") from fault

    def ids(self, text: str) -> list[int]:
        """Tokens of `text`, with no others around them."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return fast.encode(text, add_special_tokens=False).ids  # half the cost of going through transformers

    def _shapes(self, messages: list[Message], tools: list[dict[str, Any]]) -> Iterator[tuple[list[Message], Any]]:
        """The conversation for the template: as it is, then in shapes for templates that refuse something in it."""
        if self.native_tools:
            names = {c["id"]: c["name"] for m in messages for c in m.get("tool_calls") or []}
            shaped = [self._openai(m, names) for m in messages]
            offered = tools or None
            yield shaped, offered
            yield _one_system(shaped), offered
            # Llama 3.x takes one call a message: several are written as the model writes them, in the text.
            several = [
                {**m, "content": toolformat.with_calls(m, self.format), "tool_calls": []}
                if len(m.get("tool_calls") or []) > 1
                else m
                for m in messages
            ]
            shaped = _one_system([self._openai(m, names) for m in several])
        else:
            shaped = [self._reasoned(toolformat.as_text(m, self.format), m) for m in messages]
            offered = None
            if tools:
                text = toolformat.guide(tools, self.format)
                if shaped and shaped[0]["role"] == "system":
                    shaped[0] = {"role": "system", "content": shaped[0]["content"].rstrip() + "\n\n" + text}
                else:
                    shaped.insert(0, {"role": "system", "content": text})
            yield shaped, None
            shaped = _one_system(shaped)
        yield shaped, offered
        yield _alternating(shaped), offered
        yield _alternating([{**m, "role": "user"} if m["role"] == "system" else m for m in shaped]), offered

    def _openai(self, message: Message, names: dict[str, str]) -> Message:
        """A canonical message as transformers documents it. `names`: of every call, for results to repeat."""
        shaped: Message = {"role": message["role"], "content": message["content"]}
        if message.get("tool_calls"):
            shaped["tool_calls"] = [
                {
                    "type": "function",
                    "id": self._ident(c["id"]),
                    "function": {
                        "name": c["name"],
                        "arguments": c["arguments"] if self._strings else arguments_key(c["arguments"]),
                    },
                }
                for c in message["tool_calls"]
            ]
        if ident := message.get("tool_call_id"):
            shaped["tool_call_id"] = self._ident(ident)
            if ident in names:
                shaped["name"] = names[ident]
        return self._reasoned(shaped, message)

    def _reasoned(self, shaped: Message, message: Message) -> Message:
        """`shaped` with the reasoning of `message`, where the template looks for it."""
        reasoning = message.get("reasoning")
        if not reasoning:
            return shaped
        if not self._blocks:
            return {**shaped, "reasoning_content": reasoning}
        blocks = [{"type": "thinking", "thinking": reasoning, "closed": True}]
        return {**shaped, "content": blocks + ([{"type": "text", "text": c}] if (c := shaped["content"]) else [])}

    def _ident(self, ident: str) -> str:
        """The id of a call as the template wants it: Mistral's are nine letters, the model's own where it wrote one."""
        if self.format.name != "mistral":
            return ident
        own = re.search(r"(?:^|_)([a-zA-Z0-9]{9})$", ident)
        return own[1] if own else hashlib.sha256(ident.encode("utf-8", "replace")).hexdigest()[:9]

    # -- what the template does ------------------------------------------------------------------------------------

    def _choose(self, wanted: str) -> tuple[bool, Format]:
        """Return (whether the template has a place for tools, the format in which calls are read)."""
        self.native_tools, self.format = True, BY_NAME["mistral"]  # strict about ids: no template minds those
        said, self.unread = "", False
        if "tool" in self.source and wanted != "default":
            for self._strings in (False, True):
                said = probe.say_call(self)
                if said:
                    break
        if wanted == "auto":
            wanted = probe.recognise(said) or "default"
            self.unread = bool(said) and wanted == "default"
        return bool(said) and wanted != "default", BY_NAME[wanted]

    def _thinking(self) -> toolformat.Thinking | None:
        """How the model marks its reasoning, by its template and vocabulary; None if it does not."""
        for begin, close in THINKING:
            known = self._tokenizer.convert_tokens_to_ids(close)
            if close in self.source or (known is not None and self._tokenizer.convert_ids_to_tokens(known) == close):
                prompt = self.text([probe.ASK], [], prompt=True)
                return toolformat.Thinking(begin, close, prompt.rstrip().endswith(begin))
        return None

    def _strips(self) -> bool:
        """Whether the template leaves out reasoning of earlier turns. Finds the shape in which it takes reasoning."""
        if not self.thinking:
            return False
        thought = {"role": "assistant", "content": "b c", "reasoning": probe.MARK}
        for self._blocks in (False, True):
            try:
                said = self.text([probe.ASK, thought], [], prompt=False)
            except BadRequest:
                continue
            if probe.MARK in said and "'type'" not in said:  # a template that knows no blocks prints the list
                break
        else:
            self._blocks = False
        return probe.MARK not in self.text([probe.ASK, thought, probe.ASK], [], prompt=True)

    def _keeps(self, messages: list[Message], at: int, tools: list[dict[str, Any]]) -> bool:
        """Whether the template still says of the messages before `at` what it said when they were the prompt."""
        before, now = self.text(messages[:at], tools, prompt=True), self.text(messages, tools, prompt=True)
        return now.startswith(before) and (messages[at].get("reasoning") or "") in now[len(before) :]


def end_tokens(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer by a model folder's generation_config.json; none if it does not say."""
    file = folder / "generation_config.json"
    ends = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)


def _one_system(messages: list[Message]) -> list[Message]:
    """For templates that take one system message, in front: join the leading ones, show later ones as the user's."""
    lead = next((k for k, m in enumerate(messages) if m["role"] != "system"), len(messages))
    joined = "\n\n".join(m["content"] for m in messages[:lead])
    rest = [{**m, "role": "user"} if m["role"] == "system" else m for m in messages[lead:]]
    return [{"role": "system", "content": joined}, *rest] if lead else rest


def _alternating(messages: list[Message]) -> list[Message]:
    """For templates whose roles must alternate: join neighbours of one role, and a question to the result before it."""
    joined: list[Message] = []
    for message in messages:
        pair = (joined[-1], message) if joined else ()
        roles = tuple(m["role"] for m in pair)
        plain = not any("tool_calls" in m for m in pair) and all(isinstance(m["content"], str) for m in pair)
        if plain and roles in (("user", "user"), ("assistant", "assistant"), ("tool", "user")):
            joined[-1] = {**joined[-1], "content": "\n".join(m["content"] for m in pair if m["content"])}
        else:
            joined.append(message)
    return joined
