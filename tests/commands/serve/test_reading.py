"""The readers of the three protocols: one conversation is the same canonical messages, whatever it came in by."""

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from legorl import tree
from legorl.commands.serve import chat, messages_api, reading, responses_api
from legorl.commands.serve.engine import Sampling
from legorl.commands.serve.messages import BadRequest, digest, message_key
from legorl.commands.serve.turn import Turn

WORDS = st.text("ab \né", max_size=8)
ARGUMENTS = st.dictionaries(st.sampled_from(["path", "n", "é"]), st.one_of(st.integers(), WORDS, st.none()), max_size=3)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {"name": "bash", "description": "Run", "parameters": SCHEMA}


@st.composite
def conversations(draw):
    """Canonical messages: a system message or none, then rounds of user texts, an answer, and its results in order."""
    messages = [{"role": "system", "content": draw(WORDS) + "."}] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(1, 4))):
        if not messages or messages[-1]["role"] != "tool" or draw(st.booleans()):
            messages.append({"role": draw(st.sampled_from(["user", "user", "system"])), "content": draw(WORDS) + "?"})
        calls = []
        for _ in range(draw(st.integers(0, 2))):
            number += 1
            calls.append({"id": f"call_{number}", "name": "bash", "arguments": json.dumps(draw(ARGUMENTS))})
        answer = {"role": "assistant", "content": draw(WORDS), "tool_calls": calls}
        if draw(st.booleans()):
            answer["reasoning"] = draw(WORDS) + "!"
        messages.append(answer)
        for call in calls:
            messages.append({"role": "tool", "content": draw(WORDS), "tool_call_id": call["id"]})
    messages.append({"role": "user", "content": draw(WORDS) + "?"})
    return messages


def shuffled(draw, text):
    """The same arguments as another client would write them."""
    items = list(json.loads(text).items())
    return json.dumps(dict(draw.draw(st.permutations(items))), ensure_ascii=draw.draw(st.booleans()))


def blocks(draw, text, kind="text"):
    """A string, or the same as one block."""
    if draw.draw(st.booleans()):
        return text
    return [{"type": kind, "text": text, "cache_control": {"type": "ephemeral"}}]


def as_chat(draw, messages):
    body = []
    for m in messages:
        role = draw.draw(st.sampled_from(["system", "developer"])) if m["role"] == "system" else m["role"]
        shaped = {"role": role, "content": blocks(draw, m["content"])}
        if m["role"] == "assistant":
            calls = [(c["id"], c["name"], shuffled(draw, c["arguments"])) for c in m["tool_calls"]]
            shaped["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls
            ]
            shaped["reasoning_content"] = m.get("reasoning")
        elif m["role"] == "tool":
            shaped["tool_call_id"] = m["tool_call_id"]
        body.append(shaped)
    return {"messages": body, "tools": [{"type": "function", "function": TOOL}]}


def as_anthropic(draw, messages):
    tool = {"name": "bash", "description": "Run", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    body: dict = {"messages": [], "tools": [tool]}
    rest = messages
    if messages[0]["role"] == "system" and messages[1]["role"] != "system":
        body["system"], rest = blocks(draw, messages[0]["content"]), messages[1:]
    for m in rest:
        if m["role"] == "assistant":
            content = [{"type": "text", "text": m["content"]}] if m["content"] else []
            if "reasoning" in m:
                content.insert(0, {"type": "thinking", "thinking": m["reasoning"], "signature": "s"})
            for c in m["tool_calls"]:
                arguments = json.loads(shuffled(draw, c["arguments"]))
                content.append({"type": "tool_use", "id": c["id"], "name": c["name"], "input": arguments})
            body["messages"].append({"role": "assistant", "content": content})
        elif m["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": blocks(draw, m["content"])}
            last = body["messages"][-1]
            if last["role"] == "user":
                last["content"].append(block)
            else:
                body["messages"].append({"role": "user", "content": [block]})
        else:
            body["messages"].append({"role": m["role"], "content": blocks(draw, m["content"])})
    return body


def as_responses(draw, messages):
    items: list[dict] = []
    for m in messages:
        if m["role"] == "assistant":
            if "reasoning" in m:
                text = [{"type": "reasoning_text", "text": m["reasoning"]}]
                items.append({"type": "reasoning", "id": "rs", "summary": [], "content": text})
            if m["content"] or not m["tool_calls"]:
                content = blocks(draw, m["content"], "output_text")
                items.append({"type": "message", "role": "assistant", "content": content})
            for c in m["tool_calls"]:
                arguments = shuffled(draw, c["arguments"])
                items.append({"type": "function_call", "call_id": c["id"], "name": c["name"], "arguments": arguments})
        elif m["role"] == "tool":
            output = blocks(draw, m["content"], "input_text")
            items.append({"type": "function_call_output", "call_id": m["tool_call_id"], "output": output})
        else:
            items.append({"role": m["role"], "content": blocks(draw, m["content"], "input_text")})
    return {"input": items, "tools": [{"type": "function", **TOOL, "strict": True}]}


@given(conversations(), st.data())
def test_three_protocols_read_one_conversation_alike(messages, draw):
    readers = ((chat, as_chat), (messages_api, as_anthropic), (responses_api, as_responses))
    for module, written in readers:
        read = module.read_request(written(draw, messages))
        assert [message_key(m) for m in read.messages] == [message_key(m) for m in messages], module.__name__
        assert [m["content"] for m in read.messages] == [m["content"] for m in messages]
        assert [m.get("reasoning") or None for m in read.messages] == [m.get("reasoning") for m in messages]
        assert digest(read.tools) == digest([{"type": "function", "function": TOOL}])


@given(conversations(), st.data())
def test_results_stand_in_the_order_of_their_calls(messages, draw):
    mixed = []
    for message in messages:
        if message["role"] == "tool" and mixed[-1]["role"] == "tool" and draw.draw(st.booleans()):
            mixed.insert(-1, message)
        else:
            mixed.append(message)
    assert reading.conversation(mixed, "messages") == messages


KEYS = [
    "role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "parameters",
    "input_schema", "namespace", "input", "call_id", "output", "tools", "mode", "summary", "custom", "format",
    "definition", "include_usage",
]  # fmt: skip
STRINGS = [
    "", "x", "user", "assistant", "text", "function", "custom", "namespace", "tool", "auto", "allowed_tools",
    "reasoning", "message", "function_call", "custom_tool_call", "tool_result", "tool_use", "thinking", "object",
]  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from(STRINGS)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=12,
)
FIELDS = [
    "messages", "input", "tools", "tool_choice", "system", "instructions", "stop", "stop_sequences", "max_tokens",
    "stream_options", "text", "output_config", "response_format", "include", "parallel_tool_calls", "reasoning",
    "store",
]  # fmt: skip
ASKED = {
    chat: {"messages": [{"role": "user", "content": "x"}]},
    messages_api: {"messages": [{"role": "user", "content": "x"}]},
    responses_api: {"input": "x"},
}


def answered(request):
    """A finished turn that calls every tool of the request."""
    calls = [{"id": "c", "name": t["function"]["name"], "arguments": "{}"} for t in request.tools]
    return Turn(
        node=tree.Node(0, tree.ROOT, 0, tree.ids([1]), tree.ids([2])),
        cause="root",
        request=request,
        digest="",
        sampling=Sampling(),
        new_messages=[],
        tools_changed=True,
        foreign=False,
        ids=[2],
        finish="stop",
        answer={"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": calls},
    )


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5), st.booleans())
def test_a_body_of_any_shape_is_refused_or_read_and_answered(body, whole):
    async def events(module, read):
        return [event async for event in module.stream(answered(read), read, "m")]

    for module, asked in ASKED.items():
        try:
            read = module.read_request(body | asked if whole else body)
        except BadRequest:
            continue
        digest("tools", read.tools, [message_key(m) for m in read.messages])
        assert all(isinstance(m["content"], str) for m in read.messages)
        json.dumps(module.reply(answered(read), read, "m"))
        assert asyncio.run(events(module, read))
