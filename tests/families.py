"""Model families as the tests know them: the chat template, the tokens it needs, what its models can write.

Templates are those that trl 1.16 ships, byte by byte the models' own (trl/chat_templates/README.md names the releases);
SmolLM2's is in the test model's folder; Mistral's is written here after what mistral_common writes, which a test
compares. Tokenizers are SmolLM2's with the family's special tokens added: what is shown is the text of the templates.
"""

import copy
import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHATML = ("<tool_call>", "</tool_call>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[THINK]", "[/THINK]",
)  # fmt: skip

# Mistral-Nemo-Instruct-2407 (tekken, instruct version 3): tools stand before the last question, the system message in
# it, ids of calls have nine letters, roles alternate. Not the release's own text, which no package ships.
MISTRAL_V3 = """
{%- set system = messages[0].content if messages[0].role == "system" else "" %}
{%- set talk = messages[1:] if system else messages %}
{%- set asked = talk | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for m in talk if m.role != "tool" and not m.tool_calls %}
    {%- if (m.role == "user") != (ns.index % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in talk %}
    {%- if m.role == "user" %}
        {%- if tools and m == asked[-1] %}{{ "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}{% endif %}
        {{- "[INST]" + (system + "\\n\\n" if system and loop.last else "") + m.content + "[/INST]" }}
    {%- elif m.tool_calls %}
        {{- "[TOOL_CALLS][" }}
        {%- for c in m.tool_calls %}
            {%- if c.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
            {{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + ("" if loop.last else ", ") }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif m.role == "assistant" %}
        {{- m.content + eos_token }}
    {%- elif m.role == "tool" %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("only user and assistant roles") }}
    {%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    """`native`: the format that its template is recognised by. `closing`: what stands behind the last argument.

    What its template can say at all: `parallel` calls, `mixed` (text in front of calls), `thinks`.
    """

    name: str
    file: str
    tokens: tuple[str, ...]
    end: str
    native: str
    closing: str
    parallel: bool = True
    mixed: bool = True
    thinks: bool = False

    def tokenizer(self, base: Any) -> Any:
        """`base`: SmolLM2's tokenizer; it is copied."""
        from tokenizers import Regex, pre_tokenizers

        tokenizer = copy.deepcopy(base)
        known = tokenizer.get_vocab()
        tokenizer.add_special_tokens({"extra_special_tokens": [t for t in self.tokens if t not in known]})
        tokenizer.eos_token = self.end
        tokenizer.bos_token = self.tokens[0]
        if self.tokens is LLAMA:
            # Llama 3's own splitting: SmolLM2's takes two new lines at the end of a prompt for one token, else for two.
            split = pre_tokenizers.Split(Regex(LLAMA_SPLIT), "isolated")
            bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
        if self.file:
            tokenizer.chat_template = MISTRAL_V3 if self.file == "mistral" else trl_template(self.file)
        return tokenizer


def trl_template(name: str) -> str:
    spec = find_spec("trl")  # found, not imported: it would load all of transformers
    assert spec and spec.submodule_search_locations, "trl is in the test extra; run `make setup`"
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


HERMES_END, XML_END = '"}}\n</tool_call>', "\n</parameter>\n</function>\n</tool_call>"
SMOLLM2 = Family("SmolLM2", "", CHATML, "<|im_end|>", "default", HERMES_END)
QWEN25 = Family("Qwen2.5", "qwen2_5", CHATML, "<|im_end|>", "hermes", HERMES_END)
# Qwen3-8B and Qwen3-30B-A3B (MoE) ship the same one.
QWEN3 = Family("Qwen3", "qwen3", CHATML, "<|im_end|>", "hermes", HERMES_END, thinks=True)
# Qwen3-30B-A3B-Instruct-2507 (MoE)
QWEN3_2507 = Family("Qwen3-2507", "qwen3_instruct_2507", CHATML, "<|im_end|>", "hermes", HERMES_END)
# Qwen3.5-4B and larger: the generation prompt opens the reasoning; calls as Qwen3-Coder writes them.
QWEN35 = Family("Qwen3.5", "qwen3_5_think", CHATML, "<|im_end|>", "qwen3_coder", XML_END, thinks=True)
QWEN36 = replace(QWEN35, name="Qwen3.6-MoE", file="qwen3_6")  # Qwen3.6-35B-A3B
LLAMA31 = Family("Llama-3.1", "llama3_1", LLAMA, "<|eot_id|>", "llama3_json", '"}}', parallel=False, mixed=False)
LLAMA32 = replace(LLAMA31, name="Llama-3.2", file="llama3_2")  # prints today's date
MISTRAL3 = Family("Mistral", "mistral", MISTRAL, "</s>", "mistral", "", mixed=False)
FAMILIES = [SMOLLM2, QWEN25, QWEN3, QWEN3_2507, QWEN35, QWEN36, LLAMA31, LLAMA32, MISTRAL3]

SYSTEM = {"role": "system", "content": "You fix bugs."}
_PROPERTIES = {
    "command": {"type": "string"},
    "timeout": {"type": "integer"},
    "ratio": {"type": "number"},
    "force": {"type": "boolean"},
    "env": {"type": "object"},
    "paths": {"type": "array", "items": {"type": "string"}},
}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["command"]},
    },
}


def call(arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """A canonical call whose id is one that every family's template takes."""
    return {"id": f"call_{number:024x}_id{number:07d}", "name": "bash", "arguments": json.dumps(arguments)}


def as_harness(messages: list[dict[str, Any]], family: Family) -> list[dict[str, Any]]:
    """Canonical messages as transformers documents them: the tests' own reading, apart from the server's."""
    shown = []
    for message in messages:
        one = {k: v for k, v in message.items() if k in ("role", "content")}
        if message.get("reasoning"):
            one["reasoning_content"] = message["reasoning"]
        if message.get("tool_calls"):
            one["tool_calls"] = [
                {
                    "type": "function",
                    "id": c["id"][-9:],
                    "function": {"name": c["name"], "arguments": json.loads(c["arguments"])},
                }
                for c in message["tool_calls"]
            ]
        if "tool_call_id" in message:
            one["tool_call_id"] = message["tool_call_id"][-9:]
        shown.append(one)
    return shown
