"""OpenAI Responses by its official client, on a real socket."""

import asyncio
import json

import openai
import pydantic
import pytest
from commands.serve.clients import (
    ARGUMENTS,
    CALL,
    ECHOED,
    GO_ON,
    PARAMETERS,
    TOOLS,
    USER,
    capture,
    extended,
    respond,
    run,
)

from legorl.commands.serve import tools


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


def test_tools_of_the_server_are_not_offered_and_named_in_the_record(run_server):
    async def steps(running, session):
        others = [{"type": "web_search"}, {"type": "mcp", "name": "x", "server_label": "x"}]
        reply = await respond(running.openai(session.key), "x", tools=[*others, *TOOLS])
        assert [t.name for t in reply.tools] == ["bash"]

    (turn,) = run(capture(run_server, steps, "one"))
    assert json.loads(turn["requested"])["skipped_tools"] == ["web_search", "mcp:x"]
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


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit", "format": GRAMMAR}
SPAWN = {"type": "function", "name": "spawn", "description": "Start", "parameters": PARAMETERS}
AGENTS = {"type": "namespace", "name": "agents", "description": "Sub-agents", "tools": [SPAWN, PATCH]}


@pytest.mark.parametrize("stream", [False, True])
def test_custom_and_namespaced_tools_are_functions_to_the_model(run_server, stream):
    wrote = [
        '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\né"}}</tool_call>',
        '<tool_call>{"name": "agents__spawn", "arguments": {"command": "x"}}</tool_call>',
        '<tool_call>{"name": "agents__apply_patch", "arguments": {"input": "y"}}</tool_call>',
    ]

    async def steps(running, session):
        client = running.openai(session.key)
        output = (await respond(client, "go", stream, tools=[PATCH, AGENTS])).output
        assert [(i.type, i.name, i.namespace) for i in output] == [
            ("custom_tool_call", "apply_patch", None),
            ("function_call", "spawn", "agents"),
            ("custom_tool_call", "apply_patch", "agents"),
        ]
        assert (output[0].input, json.loads(output[1].arguments)) == ("*** Begin\né", {"command": "x"})
        results = [
            {"type": "function_call_output", "call_id": output[1].call_id, "output": "b"},
            {"type": "custom_tool_call_output", "call_id": output[0].call_id, "output": "a"},
            {"type": "custom_tool_call_output", "call_id": output[2].call_id, "output": []},
        ]
        items = [{"role": "user", "content": "go"}, *(i.model_dump(exclude_none=True) for i in output), *results]
        await respond(client, items, stream, tools=[PATCH, AGENTS])
        chosen = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
        reply = await respond(client, "only", stream, tools=[PATCH, AGENTS], tool_choice=chosen)
        assert [(t.type, t.name) for t in reply.tools] == [("custom", "apply_patch")]

    turns = run(capture(run_server, steps, "".join(wrote), "ok", "ok"))
    assert extended(turns[:2])
    assert [m["content"] for m in json.loads(turns[1]["messages"])] == ["a", "b", ""]
    offered = [t["function"] for t in json.loads(turns[0]["tools"])]
    assert [f["name"] for f in offered] == ["apply_patch", "agents__spawn", "agents__apply_patch"]
    assert "start: /.+/" in offered[0]["description"]


def test_a_custom_call_streams_in_the_protocols_own_order(run_server):
    async def steps(running, session):
        asked = {"model": "m", "input": "go", "tools": [PATCH], "stream": True}
        events = [e async for e in await running.openai(session.key).responses.create(**asked)]
        kinds = [e.type.removeprefix("response.") for e in events]
        call = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
        assert kinds == ["created", "in_progress", *call, "completed"]
        assert events[2].item.input == "" and events[3].delta == events[4].input == events[5].item.input == "a"

    run(capture(run_server, steps, '<tool_call>{"name": "apply_patch", "arguments": {"input": "a"}}</tool_call>'))


def test_reasoning_that_a_client_keeps_only_sealed_is_read_again(run_server):
    async def steps(running, session):
        running.server.template.thinking = tools.Thinking("<think>", "</think>", False)
        client = running.openai(session.key)
        more = {"include": ["reasoning.encrypted_content"], "tools": TOOLS, "reasoning": {"effort": "low"}}
        events = [e async for e in await client.responses.create(model="m", input="go", stream=True, **more)]
        kinds = [e.type.removeprefix("response.") for e in events]
        deltas = kinds.count("reasoning_text.delta")
        begin, end = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
        thought = [*begin, *["reasoning_text.delta"] * deltas, "reasoning_text.done", *end]
        assert kinds[2 : 2 + len(thought)] == thought
        usage = events[-1].response.usage
        assert 2 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        items = [i.model_dump(exclude_none=True) for i in events[-1].response.output]
        assert items[0].pop("content")[0]["text"] == "let me see" and items[0]["encrypted_content"]
        result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "a b"}
        # An edited conversation is rendered in full: there the reasoning is needed again.
        await respond(client, [{"role": "user", "content": "go!"}, *items, result], **more)
        items[0]["encrypted_content"] = "gAAAA-of-another-server"
        await respond(client, [{"role": "user", "content": "go!!"}, *items, result], **more)
        with pytest.raises(openai.BadRequestError, match="encrypted_content"):
            await respond(client, [USER, {**items[0], "encrypted_content": "legorl:%"}, GO_ON])

    turns = run(capture(run_server, steps, "<think>\nlet me see\n</think>\n\n" + CALL, "Done."))
    thoughts = [[m.get("reasoning") for m in json.loads(t["messages"]) if m["role"] == "assistant"] for t in turns]
    assert thoughts == [[], ["let me see"], [None]]


def test_the_parse_helper_parses_calls(run_server):
    class bash(pydantic.BaseModel):
        """Run"""

        command: str
        timeout: int

    def steps_sync(running, session):
        with running.openai_sync(session.key) as client:
            tool = openai.pydantic_function_tool(bash)["function"]
            reply = client.responses.parse(model="m", input="x", tools=[{"type": "function", **tool}])
            assert reply.output[0].parsed_arguments == ARGUMENTS
            with client.responses.stream(model="m", input="y", tools=TOOLS, instructions="Be brief.") as stream:
                snapshots = [e.snapshot for e in stream if e.type == "response.function_call_arguments.delta"]
            assert [json.loads(s) for s in snapshots] == [ARGUMENTS]
            with pytest.raises(openai.BadRequestError, match="grammar") as refused:
                client.responses.parse(model="m", input="x", text_format=bash)
            assert refused.value.param == "text.format"

    async def steps(running, session):
        await asyncio.to_thread(steps_sync, running, session)

    run(capture(run_server, steps, CALL))


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_value"),
    ({"background": True}, "background", "unsupported_value"),
    ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_value"),
    ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0]", "unsupported_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content",
     "unsupported_value"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "invalid_value"),
    ({"tools": [{"type": "function", "name": "x", "parameters": {"type": "string"}}]}, "tools[0].parameters",
     "invalid_function_parameters"),
    ({"tools": [AGENTS, {**SPAWN, "name": "agents__spawn"}]}, "tools", "invalid_value"),
    ({"reasoning": "high"}, "reasoning", "invalid_type"),
    ({"input": [], "instructions": "x"}, "input", "missing_required_parameter"),
]  # fmt: skip


def test_responses_name_the_field_that_they_refuse(run_server):
    async def steps(running, session):
        client = running.openai(session.key)
        for fields, param, code in REFUSED:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="m", **{"input": "x", **fields})
            error = refused.value
            assert (error.type, error.param, error.code) == ("invalid_request_error", param, code), (fields, error.body)
        assert (await respond(client, "x", store=True)).store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")

    assert len(run(capture(run_server, steps, "stored nowhere"))) == 1
