"""From messages to prompt tokens: whole renders, and the bridge that continues a sampled turn token-exactly.

The chat template is the model's own. The bridge is what the template puts between the end of one answer and the start
of the next: rendered with a marker in place of the answer and cut behind the marker, so that the answer's own tokens
are never rendered again. A sampled end token belongs to the answer; where it is missing, the bridge adds it.
"""

import hashlib
from typing import Any

from legorl.commands.serve import tools as toolformat
from legorl.commands.serve.messages import BadRequest, Message, arguments_key

MARKER = "\u2402legorl-answer\u2403"


class Template:
    """The chat template of a tokenizer. `native_tools`: it has a place for tools and their results."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.source: str = tokenizer.chat_template or ""
        if not self.source:
            raise BadRequest("the model folder has no chat template (tokenizer_config.json or chat_template.jinja)")
        self.native_tools = "tools" in self.source
        self.thinking = self._thinking()
        self.digest = hashlib.sha256(self.source.encode()).hexdigest()[:32]
        self.fault = self._fault()

    def full(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Render the whole conversation up to the generation prompt."""
        return self._ids(self._text(messages, tools, prompt=True))

    def bridge(self, messages: list[Message], at: int, tools: list[dict[str, Any]], ended: bool) -> list[int]:
        """Tokens from behind the assistant message at index `at` up to the next generation prompt.

        `ended`: the sampled answer closed itself with the template's end token, so that token is not added again.
        """
        marked = {"role": "assistant", "content": MARKER}
        text = self._text([*messages[:at], marked, *messages[at + 1 :]], tools, prompt=True)
        ids = self._ids(text[text.rindex(MARKER) + len(MARKER) :])
        return ids[1:] if ended and ids[:1] == [self.end_id] else ids

    @property
    def end_id(self) -> int:
        """The token that closes an assistant message."""
        text = self._text(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARKER}], [], prompt=False
        )
        tail = self._ids(text[text.rindex(MARKER) + len(MARKER) :])
        return tail[0] if tail else self._tokenizer.eos_token_id

    def _thinking(self) -> toolformat.Thinking | None:
        """How the model marks its reasoning, by its template and vocabulary; None if it does not."""
        begin, close = "<think>", "</think>"
        if close not in self.source and close not in self._tokenizer.get_vocab():
            return None
        prompt = self._text([{"role": "user", "content": "a"}], [], prompt=True)
        return toolformat.Thinking(begin, close, prompt.rstrip().endswith(begin))

    def _text(self, messages: list[Message], tools: list[dict[str, Any]], prompt: bool) -> str:
        if self.native_tools:
            shaped = [_openai(m) for m in messages]
            offered = tools or None
        else:
            shaped = [toolformat.as_text(m) for m in messages]
            offered = None
            if tools:
                text = toolformat.guide(tools)
                if shaped and shaped[0]["role"] == "system":
                    shaped[0] = {"role": "system", "content": shaped[0]["content"].rstrip() + "\n\n" + text}
                else:
                    shaped.insert(0, {"role": "system", "content": text})
        fault: Exception | None = None
        for attempt in (shaped, _one_system(shaped)):
            try:
                return self._tokenizer.apply_chat_template(
                    attempt, tools=offered, tokenize=False, add_generation_prompt=prompt
                )
            except Exception as error:  # whatever the template's own code raises
                fault = fault or error
        raise BadRequest(f"the model's chat template refuses this conversation: {fault}") from fault

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _fault(self) -> str | None:
        """Why token-exact continuation is not possible with this template, or None. Tried on a small conversation."""
        first = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
        whole = [*first, {"role": "assistant", "content": "b c"}, {"role": "user", "content": "d"}]
        try:
            exact = self.full(first, []) + self._ids("b c") + self.bridge(whole, 2, [], ended=False)
        except (BadRequest, ValueError) as error:
            return f"it cannot be continued: {error}"
        if exact != self.full(whole, []):
            return "its rendering of an answer differs from the answer's own tokens"
        return None


def _one_system(messages: list[Message]) -> list[Message]:
    """For templates that take one system message, in front: join the leading ones, show later ones as the user's."""
    lead = next((k for k, m in enumerate(messages) if m["role"] != "system"), len(messages))
    joined = "\n\n".join(m["content"] for m in messages[:lead])
    rest = [{**m, "role": "user"} if m["role"] == "system" else m for m in messages[lead:]]
    return [{"role": "system", "content": joined}, *rest] if lead else rest


def _openai(message: Message) -> Message:
    shaped: Message = {"role": message["role"], "content": message["content"]}
    if message.get("tool_calls"):
        shaped["tool_calls"] = [
            {
                "type": "function",
                "id": c["id"],
                "function": {"name": c["name"], "arguments": arguments_key(c["arguments"])},
            }
            for c in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        shaped["tool_call_id"] = message["tool_call_id"]
    if message.get("reasoning"):
        shaped["reasoning_content"] = message["reasoning"]
    return shaped
