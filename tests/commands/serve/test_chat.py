"""OpenAI Chat Completions by its official client, on a real socket."""

import asyncio
import json

import openai
import pydantic
import pytest
from commands.serve.clients import ARGUMENTS, CALL, CHAT_TOOLS, ECHOED, GO_ON, USER, capture, extended, run


async def chat(client, messages, stream=False, **more):
    """One request; streamed or not, the client library builds the same ChatCompletion."""
    asked = {"model": "m", "messages": messages, **more}
    if not stream:
        return await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
        return await events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
def test_chat_tool_round_trip(run_server, stream):
    async def steps(running, session):
        client = running.openai(session.key)
        messages = [{"role": "developer", "content": "Be brief."}, USER]
        reply = await chat(client, messages, stream, tools=CHAT_TOOLS, tool_choice="auto", parallel_tool_calls=True)
        answer = reply.choices[0].message
        first, second = answer.tool_calls
        assert answer.content == "Looking." and reply.choices[0].finish_reason == "tool_calls"
        assert first.id != second.id and first.type == "function" and first.function.name == "bash"
        assert json.loads(first.function.arguments) == json.loads(second.function.arguments) == ARGUMENTS
        usage = reply.usage
        assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens > usage.completion_tokens > 10
        calls = [c.model_dump(include={"id", "type", "function"}) for c in answer.tool_calls]
        calls[0]["function"] = {"name": "bash", "arguments": json.dumps(ECHOED)}
        calls[1]["function"] = {"name": "bash", "arguments": json.dumps(ECHOED, ensure_ascii=False, indent=1)}
        # The results in another order, one as blocks, then a message of the system in mid-conversation.
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            USER,
            {"role": "assistant", "content": "Looking. \n", "tool_calls": calls},
            {"role": "tool", "tool_call_id": second.id, "content": [{"type": "text", "text": "two"}]},
            {"role": "tool", "tool_call_id": first.id, "content": "one"},
        ]
        reply = await chat(client, messages, stream, tools=CHAT_TOOLS)
        assert reply.choices[0].message.content == "Done." and reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].message.tool_calls is None
        messages += [{"role": "assistant", "content": "Done."}, {"role": "system", "content": "Stop now."}]
        assert (await chat(client, messages, stream, tools=CHAT_TOOLS)).choices[0].message.content == "Bye."

    turns = run(capture(run_server, steps, f"Looking.\n{CALL}\n{CALL}", "Done.", "Bye."))
    assert extended(turns) and {t["protocol"] for t in turns} == {"openai-chat"}
    assert [m["content"] for m in json.loads(turns[1]["messages"])] == ["one", "two"]
    assert [m["role"] for m in json.loads(turns[2]["messages"])] == ["system"]


def test_a_missing_result_stays_missing(run_server):
    async def steps(running, session):
        client = running.openai(session.key)
        answer = (await chat(client, [USER], tools=CHAT_TOOLS)).choices[0].message
        result = {"role": "tool", "tool_call_id": answer.tool_calls[1].id, "content": "two"}
        await chat(client, [USER, answer.model_dump(exclude_none=True), result, GO_ON], tools=CHAT_TOOLS)

    turns = run(capture(run_server, steps, CALL + CALL, "ok"))
    assert extended(turns) and [m["content"] for m in json.loads(turns[1]["messages"])] == ["two", "go on"]


def test_chat_stream_in_the_protocols_own_order(run_server):
    async def steps(running, session):
        asked = {"messages": [USER], "tools": CHAT_TOOLS, "stream": True}
        async with running.harness(session.key) as http:
            plain = await http.post("/v1/chat/completions", json=asked)
            asked = {"messages": [GO_ON], "stream": True, "stream_options": {"include_usage": True}}
            counted = await http.post("/v1/chat/completions", json=asked)
        assert plain.headers["content-type"].startswith("text/event-stream")
        for reply in (plain, counted):
            *events, end, rest = reply.text.split("\n\n")
            assert (end, rest) == ("data: [DONE]", "") and all(e.startswith("data: {") for e in events)
        chunks = [json.loads(e[6:]) for e in plain.text.split("\n\n")[:-2]]
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        assert all("usage" not in c and len(c["choices"]) == 1 for c in chunks)
        choices = [c["choices"][0] for c in chunks]
        assert all(c["index"] == 0 for c in choices)
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
        first, *texts, one, two, last = [c["delta"] for c in choices]
        assert first == {"role": "assistant", "content": ""} and last == {}
        assert len(texts) > 2 and "".join(t["content"] for t in texts) == "one two three"
        assert [c["index"] for d in (one, two) for c in d["tool_calls"]] == [0, 1]
        assert all(c["id"] and c["type"] == "function" for d in (one, two) for c in d["tool_calls"])
        chunks = [json.loads(e[6:]) for e in counted.text.split("\n\n")[:-2]]
        assert [c["usage"] is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 2

    run(capture(run_server, steps, f"one two three\n{CALL}\n{CALL}", "one two three"))


class bash(pydantic.BaseModel):
    """Run"""

    command: str
    timeout: int


def test_the_parse_helpers_parse_calls(run_server):
    def steps_sync(running, session):
        with running.openai_sync(session.key) as client:
            tools = [openai.pydantic_function_tool(bash)]
            reply = client.chat.completions.parse(model="m", messages=[USER], tools=tools)
            assert reply.choices[0].message.tool_calls[0].function.parsed_arguments == bash(**ARGUMENTS)
            with client.chat.completions.stream(model="m", messages=[GO_ON], tools=tools) as stream:
                events = list(stream)
            done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
            assert [e.parsed_arguments for e in done] == [bash(**ARGUMENTS)]
            assert [e.content for e in events if e.type == "content.done"] == ["Looking."]
            with pytest.raises(openai.BadRequestError, match="grammar") as refused:
                client.chat.completions.parse(model="m", messages=[USER], response_format=bash)
            assert refused.value.param == "response_format" and refused.value.code == "unsupported_value"

    async def steps(running, session):
        await asyncio.to_thread(steps_sync, running, session)

    assert len(run(capture(run_server, steps, "Looking.\n" + CALL))) == 2


def test_chat_says_why_it_ended(run_server):
    async def steps(running, session):
        client = running.openai(session.key)
        for stream in (False, True):
            reply = await chat(client, [USER], stream, stop=["never", "three"], n=1)
            assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("stop", "one two ")
        for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 9}):
            reply = await chat(client, [GO_ON], **limit)
            assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 2
            cut = await client.chat.completions.create(model="m", messages=[GO_ON], stream=True, **limit)
            assert [c.choices[0].finish_reason async for c in cut][-1] == "length"

    run(capture(run_server, steps, "one two three four"))


REFUSED = [
    ({"n": 2}, "n", "unsupported_value"),
    ({"logprobs": True}, "logprobs", "unsupported_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    ({"modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}}, "audio", "unsupported_value"),
    ({"functions": [{"name": "f", "parameters": {}}]}, "functions", "unsupported_value"),
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options", "unsupported_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]", "invalid_value"),
    ({"tools": CHAT_TOOLS * 2}, "tools", "invalid_value"),
    ({"messages": []}, "messages", "missing_required_parameter"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content", "unsupported_value"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
     "messages[0].content", "unsupported_value"),
]  # fmt: skip


def test_chat_names_the_field_that_it_refuses(run_server):
    async def steps(running, session):
        client = running.openai(session.key)
        for fields, param, code in REFUSED:
            asked = {"messages": [USER], **fields}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", **asked)
            error = refused.value
            assert (error.type, error.param, error.code) == ("invalid_request_error", param, code), (fields, error.body)

    assert run(capture(run_server, steps, "never")) == []
