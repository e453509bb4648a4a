"""Each protocol by its own official client, on a real socket: replies, streams, tool round trips, errors."""

import asyncio
import itertools
import json

import anthropic
import openai
import pytest

from legorl import tree
from legorl.control import SessionRequest

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run", "parameters": PARAMETERS}}]
TOOLS = [{"type": "function", "name": "bash", "description": "Run", "parameters": PARAMETERS, "strict": False}]
CLAUDE_TOOLS = [{"name": "bash", "description": "Run", "input_schema": PARAMETERS}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls  é", "timeout": "5"}}\n</tool_call>'
ARGUMENTS = {"command": "ls  é", "timeout": 5}
ECHOED = {"timeout": 5, "command": "ls  \u00e9"}  # as harnesses echo it: in another order
USER = {"role": "user", "content": "list the files"}
GO_ON = {"role": "user", "content": "go on"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def capture(run_server, steps, *lines, context=None, **request):
    """Run `steps(running, session)` in a session; check its tree and return its turns."""
    async with (
        run_server(*lines, context=context) as running,
        running.control.session(SessionRequest("a", **request)) as session,
    ):
        await steps(running, session)
        turns = (await session.close()).turns.to_pylist()[0]
    tree.check(turns)
    return turns


def extended(turns):
    """Every turn after the first extends the one before it by exactly what is new."""
    assert [t["cause"] for t in turns] == ["root"] + ["extend"] * (len(turns) - 1)
    for before, turn in itertools.pairwise(turns):
        assert turn["parent"] == before["index"]
    assert all(t["delivered"] for t in turns)
    return True


# -- Anthropic Messages --------------------------------------------------------------------------------------------


async def claude(client, messages, stream=False, **more):
    """One request; streamed or not, the client library builds the same Message."""
    asked = {"model": "m", "max_tokens": 400, "messages": messages, **more}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_messages_tool_round_trip(run_server, stream):
    marked = {"cache_control": {"type": "ephemeral"}}

    async def steps(running, session):
        client = running.anthropic(session.key)
        system = [{"type": "text", "text": "Be brief.", **marked}]
        reply = await claude(client, [USER], stream, system=system, tools=CLAUDE_TOOLS)
        text, use = reply.content
        assert (text.type, text.text) == ("text", "Looking.")
        assert (use.type, use.name, use.input) == ("tool_use", "bash", ARGUMENTS)
        assert reply.stop_reason == "tool_use" and reply.usage.output_tokens > 5
        # Keys in another order, blocks where a string was, the cache marker moved, the system a string now.
        history = [
            {"role": "user", "content": [{"type": "text", "text": USER["content"], **marked}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": use.id, "name": "bash", "input": ECHOED},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "a b"}]},
        ]
        counted = await client.messages.count_tokens(
            model="m", messages=history, system="Be brief.", tools=CLAUDE_TOOLS
        )
        reply = await claude(client, history, stream, system="Be brief.", tools=CLAUDE_TOOLS)
        usage = reply.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        assert [b.text for b in reply.content] == ["Done."] and reply.stop_reason == "end_turn"
        blocks = [
            {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "a b", **marked}]}
        ]
        history[2] = {"role": "user", "content": blocks}
        history += [{"role": "assistant", "content": "Done."}, {"role": "system", "content": "Two files."}, GO_ON]
        assert (await claude(client, history, stream, system=system, tools=CLAUDE_TOOLS)).content[0].text == "Bye."

    turns = run(capture(run_server, steps, "Looking.\n" + CALL, "Done.", "Bye."))
    assert extended(turns) and {t["protocol"] for t in turns} == {"anthropic"}
    assert [m["role"] for m in json.loads(turns[2]["messages"])] == ["system", "user"]


def test_messages_stream_in_the_protocols_own_order(run_server):
    async def steps(running, session):
        asked = {"model": "m", "max_tokens": 400, "messages": [USER], "tools": CLAUDE_TOOLS, "stream": True}
        async with running.harness(session.key) as http:
            reply = await http.post("/v1/messages?beta=true", json=asked)
        assert reply.headers["content-type"].startswith("text/event-stream") and reply.headers["request-id"]
        pairs = [event.split("\ndata: ") for event in reply.text.strip().split("\n\n")]
        seen = [json.loads(data) for _, data in pairs]
        assert [name for name, _ in pairs] == [f"event: {e['type']}" for e in seen]
        kinds = [e["type"] for e in seen]
        assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
        blocks = [
            (k, e["index"])
            for k, e in zip(kinds, seen, strict=True)
            if k in ("content_block_start", "content_block_stop")
        ]
        starts, stops = "content_block_start", "content_block_stop"
        assert blocks == [(s, i) for i in range(3) for s in (starts, stops)]
        deltas = [e["delta"] for e in seen if e["type"] == "content_block_delta"]
        assert "".join(d.get("text", "") for d in deltas) == "one two three" and len(deltas) > 4
        assert json.loads(deltas[-1]["partial_json"]) == ARGUMENTS
        assert seen[0]["message"]["usage"]["input_tokens"] == seen[-2]["usage"]["input_tokens"] > 0

    run(capture(run_server, steps, "one two three\n" + CALL + "\n" + CALL))


def test_messages_say_why_they_ended(run_server):
    async def steps(running, session):
        client = running.anthropic(session.key)
        reply = await claude(client, [USER], stop_sequences=["never", "three"])
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "three")
        reply = await claude(client, [USER, {"role": "assistant", "content": reply.content}, GO_ON], max_tokens=2)
        assert reply.stop_reason == "max_tokens" and reply.usage.output_tokens == 2

    run(capture(run_server, steps, "one two three four"))


def test_a_result_that_is_an_error_says_so_to_the_model(run_server):
    async def steps(running, session):
        client = running.anthropic(session.key)
        use = (await claude(client, [USER], tools=CLAUDE_TOOLS)).content[0]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "no such file", "is_error": True}
        texts = [result, {"type": "text", "text": "Try again."}]
        await claude(
            client,
            [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": texts}],
            tools=CLAUDE_TOOLS,
        )

    turns = run(capture(run_server, steps, CALL, "ok"))
    assert extended(turns)
    assert [m["content"] for m in json.loads(turns[1]["messages"])] == ["Error: no such file", "Try again."]


def test_the_billing_block_of_claude_code_is_not_part_of_the_prompt(run_server):
    async def steps(running, session):
        client = running.anthropic(session.key)
        system = {"type": "text", "text": "You are a coding agent."}
        messages = [USER]
        for number in range(2):
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={number};"}
            reply = await claude(client, messages, system=[billing, system])
            messages = [*messages, {"role": "assistant", "content": reply.content}, GO_ON]

    assert extended(run(capture(run_server, steps, "one", "two")))


# -- OpenAI Responses ----------------------------------------------------------------------------------------------


async def respond(client, items, stream=False, **more):
    asked = {"model": "m", "input": items, "store": False, "prompt_cache_key": "k", **more}
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_responses_tool_round_trip(run_server, stream):
    async def steps(running, session):
        client = running.openai(session.key)
        more = {
            "instructions": "Be brief.",
            "tools": TOOLS,
            "parallel_tool_calls": True,
            "include": ["reasoning.encrypted_content"],
        }
        reply = await respond(client, "list the files", stream, **more)
        message, call = reply.output
        assert reply.status == "completed" and reply.output_text == "Looking."
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "bash", ARGUMENTS)
        assert reply.usage.input_tokens + reply.usage.output_tokens == reply.usage.total_tokens
        # The input as items, the answer's without their ids, keys in another order; the result as a list of parts.
        items = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": message.content[0].text}],
            },
            {"type": "function_call", "call_id": call.call_id, "name": "bash", "arguments": json.dumps(ECHOED)},
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": [{"type": "input_text", "text": "a b"}],
            },
        ]
        more = {**more, "instructions": None}
        items.insert(0, {"role": "developer", "content": "Be brief."})
        reply = await respond(client, items, stream, **more)
        items[4]["output"] = "a b"
        items += [*(i.model_dump(exclude_none=True) for i in reply.output), GO_ON]
        assert (await respond(client, items, stream, **more)).output_text == "Bye."

    turns = run(capture(run_server, steps, "Looking.\n" + CALL, "Done.", "Bye."))
    assert extended(turns) and {t["protocol"] for t in turns} == {"openai-responses"}


def test_responses_stream_in_the_protocols_own_order(run_server):
    async def steps(running, session):
        stream = await running.openai(session.key).responses.create(model="m", input="x", tools=TOOLS, stream=True)
        events = [e async for e in stream]
        assert [e.sequence_number for e in events] == list(range(len(events)))
        kinds = [e.type.removeprefix("response.") for e in events]
        deltas = kinds.count("output_text.delta")
        assert deltas >= 2
        message = ["output_item.added", "content_part.added"] + ["output_text.delta"] * deltas
        message += ["output_text.done", "content_part.done", "output_item.done"]
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert kinds == ["created", "in_progress", *message, *call, *call, "completed"]
        assert [e.output_index for e in events if hasattr(e, "output_index")] == [0] * len(message) + [1] * 4 + [2] * 4
        done = [e.item for e in events if e.type == "response.output_item.done"]
        assert done == events[-1].response.output and done[1].call_id != done[2].call_id

    run(capture(run_server, steps, "one two three\n" + CALL + "\n" + CALL))


def test_a_response_cut_by_its_length_is_incomplete(run_server):
    async def steps(running, session):
        client = running.openai(session.key)
        reply = await respond(client, "x", max_output_tokens=3)
        *_, last = [
            e async for e in await client.responses.create(model="m", input="y", max_output_tokens=3, stream=True)
        ]
        assert last.type == "response.incomplete"
        for response in (reply, last.response):
            assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
            assert response.usage.output_tokens == 3 and response.output[0].status == "incomplete"

    run(capture(run_server, steps, "one two three four five six"))


def test_tools_that_are_no_functions_are_not_offered_and_named_in_the_record(run_server):
    async def steps(running, session):
        others = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "description": "", "tools": []}]
        reply = await respond(running.openai(session.key), "x", tools=[*others, *TOOLS])
        assert [t.name for t in reply.tools] == ["bash"]

    (turn,) = run(capture(run_server, steps, "one"))
    assert json.loads(turn["requested"])["skipped_tools"] == ["web_search", "namespace:agents"]
    assert "web_search" not in turn["tools"]


def test_reasoning_kept_from_an_answer_that_was_cut_off_is_no_message(run_server):
    async def steps(running, session):
        client = running.openai(session.key)
        orphan = {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        }
        reply = await respond(client, [USER, orphan])
        await respond(client, [USER, orphan, *(i.model_dump(exclude_none=True) for i in reply.output), GO_ON])

    assert extended(run(capture(run_server, steps, "one", "two")))


# -- all of them ---------------------------------------------------------------------------------------------------


def test_one_conversation_may_change_its_protocol(run_server):
    async def steps(running, session):
        first = await running.openai(session.key).chat.completions.create(model="m", messages=[USER], tools=CHAT_TOOLS)
        call = first.choices[0].message.tool_calls[0]
        use = {"type": "tool_use", "id": call.id, "name": "bash", "input": json.loads(call.function.arguments)}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a b"}
        history = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        await claude(running.anthropic(session.key), history, tools=CLAUDE_TOOLS)
        items = [
            USER,
            {"type": "function_call", "call_id": call.id, "name": "bash", "arguments": call.function.arguments},
            {"type": "function_call_output", "call_id": call.id, "output": "a b"},
            {"role": "assistant", "content": "Done."},
            GO_ON,
        ]
        await respond(running.openai(session.key), items, tools=TOOLS)

    turns = run(capture(run_server, steps, CALL, "Done.", "Bye."))
    assert extended(turns) and len({t["protocol"] for t in turns}) == 3


def test_results_reach_the_model_in_the_order_of_their_calls(run_server):
    async def steps(running, session):
        client = running.openai(session.key)
        first = await client.chat.completions.create(model="m", messages=[USER], tools=CHAT_TOOLS)
        answer = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": c.id, "content": f"result {k}"} for k, c in enumerate(answer.tool_calls)
        ]
        await client.chat.completions.create(
            model="m", messages=[USER, answer.model_dump(exclude_none=True), *reversed(results)], tools=CHAT_TOOLS
        )

    turns = run(capture(run_server, steps, CALL + CALL, "ok"))
    assert extended(turns)
    assert [m["content"] for m in json.loads(turns[1]["messages"])] == ["result 0", "result 1"]


def test_tool_choice_leaves_what_it_names(run_server):
    other = [{"type": "function", "name": "other", "parameters": PARAMETERS}]

    async def steps(running, session):
        client = running.openai(session.key)
        await respond(client, "1", tools=TOOLS + other, tool_choice={"type": "function", "name": "other"})
        await claude(running.anthropic(session.key), [USER], tools=CLAUDE_TOOLS, tool_choice={"type": "none"})
        await respond(client, "3", tools=TOOLS, tool_choice="required")

    turns = run(capture(run_server, steps, "one"))
    names = [[t["function"]["name"] for t in json.loads(turn["tools"])] for turn in turns]
    assert names == [["other"], [], ["bash"]]
    assert json.loads(turns[2]["requested"])["tool_choice"] == "required"


def test_reasoning_goes_out_and_comes_back_in_every_protocol(run_server):
    from legorl.commands.serve import tools

    async def steps(running, session):
        running.server.template.thinking = tools.Thinking("<think>", "</think>", False)
        client = running.openai(session.key)
        answer = (await client.chat.completions.create(model="m", messages=[USER])).choices[0].message
        assert (answer.reasoning_content, answer.content) == ("let me see", "Hello 0.")
        messages = [USER, answer.model_dump(exclude_none=True), GO_ON]
        pieces = [
            c.choices[0].delta
            async for c in await client.chat.completions.create(model="m", messages=messages, stream=True)
        ]
        assert "".join(getattr(p, "reasoning_content", "") for p in pieces) == "let me see"
        assert "".join(p.content or "" for p in pieces) == "Hello 1."
        messages = [
            USER,
            {"role": "assistant", "content": "Hello 0."},
            GO_ON,
            {"role": "assistant", "content": "Hello 1."},
            GO_ON,
        ]
        for stream in (False, True):
            content = (await claude(running.anthropic(session.key), messages, stream)).content
            assert [b.type for b in content] == ["thinking", "text"] and content[0].signature
            assert (content[0].thinking, content[1].text) == ("let me see", f"Hello {2 + stream}.")
            messages = [*messages, {"role": "assistant", "content": [b.model_dump() for b in content]}, GO_ON]
        items = [m if isinstance(m["content"], str) else {**m, "content": m["content"][1]["text"]} for m in messages]
        for stream in (False, True):
            output = (await respond(client, items, stream)).output
            assert [i.type for i in output] == ["reasoning", "message"]
            assert (output[0].content[0].text, output[1].content[0].text) == ("let me see", f"Hello {4 + stream}.")
            items = [*items, *(i.model_dump(exclude_none=True) for i in output), GO_ON]

    lines = [f"<think>\nlet me see\n</think>\n\nHello {k}." for k in range(6)]
    turns = run(capture(run_server, steps, *lines))
    assert extended(turns) and {t["reasoning"] for t in turns} == {"let me see"}
    assert [t["text"] for t in turns] == lines


REFUSED = [
    ("messages", b"{", "not JSON"),
    ("messages", b'{"messages": []}', "no messages"),
    ("messages", b'{"messages": 5}', "must be a list"),
    ("messages", b'{"messages": [{"role": "tool"}]}', "role"),
    ("messages", b'{"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}', "text only"),
    ("messages", b'{"messages": [{"role": "user", "content": [{"type": "document"}]}]}', "text only"),
    ("messages", b'{"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}', "tool_use_id"),
    ("messages", b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 1}]}]}', "input"),
    ("messages", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "name"),
    ("messages", b'{"messages": [{"role": "user", "content": "x"}], "stop_sequences": [1]}', "stop_sequences"),
    ("messages", b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "auto"}', "tool_choice"),
    ("messages", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', "max_tokens"),
    ("messages", b'{"messages": [{"role": "assistant", "content": "x"}]}', "last message"),
    ("messages", b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}", "not JSON"),
    ("messages/count_tokens", b'{"messages": []}', "no messages"),
    ("responses", b"[1]", "JSON object"),
    ("responses", b"{}", "no messages"),
    ("responses", b'{"input": 5}', "must be a list"),
    ("responses", b'{"input": [5]}', "object"),
    ("responses", b'{"input": [{"role": "robot", "content": ""}]}', "role"),
    ("responses", b'{"input": [{"type": "item_reference", "id": "x"}]}', "stored"),
    ("responses", b'{"input": [{"type": "local_shell_call"}]}', "local_shell_call"),
    ("responses", b'{"input": [{"type": "function_call", "name": "x"}]}', "call_id"),
    ("responses", b'{"input": [{"role": "user", "content": [{"type": "input_image"}]}]}', "text only"),
    ("responses", b'{"input": "x", "previous_response_id": "resp_1"}', "previous_response_id"),
    ("responses", b'{"input": "x", "tools": [{"name": "y"}]}', "type"),
    ("responses", b'{"input": "x", "tool_choice": {"type": "function", "name": "y"}}', "tool_choice"),
    ("responses", b'{"input": "x", "text": {"format": {"type": "json_object"}}}', "text.format"),
    ("responses", b'{"input": "x", "max_output_tokens": 0.5}', "max_output_tokens"),
    ("chat/completions", b'{"messages": [{"role": {}, "content": "x"}]}', "role"),
    ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": 1}', "tools"),
    ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true}', "logprobs"),
    ("chat/completions", b'{"messages": [], "response_format": {"type": "json_object"}}', "response_format"),
    ("chat/completions", b'{"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}', "tool call"),
]  # fmt: skip


def test_what_cannot_be_answered_gets_the_protocols_own_error(run_server):
    async def steps(running, session):
        async with running.harness(session.key) as http:
            for path, body, word in REFUSED:
                reply = await http.post(f"/v1/{path}", content=body)
                assert reply.status_code == 400, (path, body, reply.text)
                data = reply.json()
                assert data["error"]["type"] == "invalid_request_error", (path, body, data)
                assert word in data["error"]["message"], (path, body, data)
                assert (data.get("type") == "error") == path.startswith("messages")
            reply = await http.post("/v1/responses", json={"input": "still here?"})
            assert reply.json()["output"][0]["content"][0]["text"] == "fine"

    assert len(run(capture(run_server, steps, "fine"))) == 1


def test_the_official_clients_know_these_errors(run_server):
    async def main():
        async with run_server("x y z", context=64) as running:
            async with running.control.session(SessionRequest("a", max_turns=1)) as session:
                long = [{"role": "user", "content": "word " * 100}]
                theirs, ours = running.anthropic(session.key), running.openai(session.key)
                with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 64 maximum"):
                    await claude(theirs, long)
                assert (await theirs.messages.count_tokens(model="m", messages=long)).input_tokens > 64
                with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens") as error:
                    await respond(ours, "word " * 100)
                assert error.value.code == "context_length_exceeded"
                await claude(theirs, [USER])
                with pytest.raises(anthropic.BadRequestError, match="budget of turns"):
                    await claude(theirs, [GO_ON])
                with pytest.raises(openai.BadRequestError, match="budget of turns"):
                    await respond(ours, "more", stream=True)
                (model,) = [m async for m in await ours.models.list()]
                (same,) = [m async for m in theirs.models.list()]
                assert model.id == same.id == running.server.name
                assert await ours.models.retrieve(model.id) == model and await theirs.models.retrieve(model.id) == same
                with pytest.raises(openai.NotFoundError):
                    await ours.models.retrieve("another")
            with pytest.raises(anthropic.AuthenticationError):
                await claude(running.anthropic("wrong"), [USER])
            with pytest.raises(openai.AuthenticationError):
                await respond(running.openai("wrong"), "x")
            with pytest.raises(anthropic.NotFoundError):
                await theirs.messages.batches.list()
            async with running.harness("none") as http:
                assert (await http.head("/")).status_code == 200

    run(main())


def test_an_engine_that_fails_is_a_server_error_in_every_protocol(run_server):
    async def main():
        async with (
            run_server({"match": "never", "text": ""}) as running,
            running.control.session(SessionRequest("a")) as session,
        ):
            theirs, ours = running.anthropic(session.key), running.openai(session.key)
            for stream in (False, True):
                with pytest.raises(anthropic.APIError, match="no script line matches"):
                    await claude(theirs, [USER], stream)
            with pytest.raises(openai.InternalServerError, match="no script line"):
                await respond(ours, "x")
            last = [e async for e in await ours.responses.create(model="m", input="y", stream=True)][-1]
            assert last.type == "response.failed" and last.response.error.code == "server_error"
            with pytest.raises(openai.APIError, match="no script line"):
                async for _ in await ours.chat.completions.create(model="m", messages=[USER], stream=True):
                    pass

    run(main())


def test_half_a_character_from_javascript_does_not_break_the_conversation(run_server):
    async def steps(running, session):
        async with running.harness(session.key) as http:
            body = rb'{"messages": [{"role": "user", "content": "cut \ud83d here, whole \ud83d\ude00"}]}'
            assert (await http.post("/v1/messages", content=body)).status_code == 200

    (turn,) = run(capture(run_server, steps, "ok"))
    assert json.loads(turn["messages"])[0]["content"] == "cut \ufffd here, whole \U0001f600"


def test_half_a_character_from_the_model_does_not_lose_the_record(run_server):
    body = r"""<tool_call>{"name": "%s", "arguments": {"command": "a \ud83d b", "timeout": %s}}</tool_call>"""

    async def steps(running, session):
        for text in "12":
            message = {"role": "user", "content": text}
            await claude(running.anthropic(session.key), [message], tools=CLAUDE_TOOLS)

    turns = run(capture(run_server, steps, body % ("bash", "5"), body % (r"\ude00", r'"\ud83d"')))
    calls = [c for t in turns for c in t["tool_calls"]]
    assert [c["valid"] for c in calls] == [True, False] and calls[1]["name"] == "\ufffd"
    assert json.loads(calls[0]["arguments"])["command"] == "a \ufffd b"


def test_what_is_nested_deeply_is_refused_before_it_is_recorded(run_server):
    async def steps(running, session):
        async with running.harness(session.key) as http:
            for depth, status in ((40, 200), (80, 400), (900, 400)):
                nested = "[" * depth + "]" * depth
                for field in (
                    f'"thinking": {nested}',
                    f'"tools": [{{"name": "x", "input_schema": {{"a": {nested}}}}}]',
                ):
                    body = f'{{"messages": [{{"role": "user", "content": "x"}}], {field}}}'
                    assert (await http.post("/v1/messages", content=body)).status_code == status, (depth, field[:20])

    assert len(run(capture(run_server, steps, "ok"))) == 2


def test_a_waiting_stream_is_kept_alive(run_server, monkeypatch):
    from legorl.commands.serve import delivery

    monkeypatch.setattr(delivery, "BEAT_S", 0.01)

    async def steps(running, session):
        release = asyncio.Event()
        gate = running.server.enter

        async def slow():
            await release.wait()
            await gate()

        running.server.enter = slow
        async with running.harness(session.key) as http:
            for path, body, beat in (
                ("messages", {"messages": [USER]}, "event: ping"),
                ("responses", {"input": "x"}, ": waiting"),
                ("chat/completions", {"messages": [GO_ON]}, ": waiting"),
            ):
                release.clear()
                beats = 0
                async with http.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as reply:
                    async for line in reply.aiter_lines():
                        beats += line == beat
                        if beats == 3:
                            release.set()
                assert beats >= 3

    assert all(t["delivered"] for t in run(capture(run_server, steps, "one", "two", "three")))
