"""Anthropic Messages by its official client, on a real socket."""

import asyncio
import json

import anthropic
import pytest
from commands.serve.clients import ARGUMENTS, CALL, CLAUDE_TOOLS, ECHOED, GO_ON, USER, capture, claude, extended, run


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


def test_the_sync_client_accumulates_what_it_is_sent(run_server):
    def steps_sync(running, session):
        with running.anthropic_sync(session.key) as client:
            asked = {"model": "m", "max_tokens": 400, "messages": [USER], "tools": CLAUDE_TOOLS}
            with client.messages.stream(**asked) as stream:
                events = list(stream)
            texts = [e for e in events if e.type == "text"]
            assert "".join(e.text for e in texts) == texts[-1].snapshot == "Looking."
            assert [e.snapshot for e in events if e.type == "input_json"] == [ARGUMENTS, ARGUMENTS]
            blocks = [e.content_block for e in events if e.type == "content_block_stop"]
            message = stream.get_final_message()
            assert blocks == message.content and [b.type for b in blocks] == ["text", "tool_use", "tool_use"]
            whole = client.messages.create(**{**asked, "messages": [GO_ON]})
            assert [b.type for b in whole.content] == ["text", "tool_use", "tool_use"]
            assert (
                message.usage.model_dump(exclude_none=True).keys() == whole.usage.model_dump(exclude_none=True).keys()
            )

    async def steps(running, session):
        await asyncio.to_thread(steps_sync, running, session)

    run(capture(run_server, steps, f"Looking.\n{CALL}\n{CALL}"))


def test_the_beta_client_and_its_tool_runner_need_no_special_case(run_server):
    @anthropic.beta_async_tool
    async def bash(command: str, timeout: int) -> str:
        """Run"""
        return f"{command}: {timeout}"

    async def steps(running, session):
        client = running.anthropic(session.key)
        runner = client.beta.messages.tool_runner(
            model="m",
            max_tokens=400,
            messages=[USER],
            tools=[bash],
            betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
            thinking={"type": "enabled", "budget_tokens": 100},
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
            output_config={"effort": "high"},
            metadata={"user_id": "x"},
        )
        last = await runner.until_done()
        assert last.content[0].text == "Done."
        async with client.beta.messages.stream(model="m", max_tokens=9, messages=[GO_ON]) as stream:
            assert (await stream.get_final_message()).content[0].text == "Bye."

    turns = run(capture(run_server, steps, CALL + CALL, "Done.", "Bye."))
    assert [t["cause"] for t in turns[:2]] == ["root", "extend"]
    assert [m["content"] for m in json.loads(turns[1]["messages"])] == ["ls  é: 5"] * 2
    asked = json.loads(turns[0]["requested"])
    assert asked["thinking"]["budget_tokens"] == 100 and asked["ignored_fields"] == ["metadata"]


def test_results_and_thoughts_come_back_in_any_blocks(run_server):
    async def steps(running, session):
        client = running.anthropic(session.key)
        uses = (await claude(client, [USER], tools=CLAUDE_TOOLS)).content
        content = [{"type": "redacted_thinking", "data": "x"}, *(u.model_dump(exclude_none=True) for u in uses)]
        results = [{"type": "tool_result", "tool_use_id": u.id, "content": f"result {k}"} for k, u in enumerate(uses)]
        results[1]["content"] = [{"type": "text", "text": "result"}, {"type": "text", "text": "1"}]
        back = [*reversed(results), {"type": "text", "text": "Both ran."}]
        history = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": back}]
        await claude(client, history, tools=CLAUDE_TOOLS)
        # The same results in messages of their own.
        split = [{"role": "user", "content": [r]} for r in results] + [{"role": "user", "content": "Both ran."}]
        await claude(client, history[:2] + split + [{"role": "assistant", "content": "ok"}, GO_ON], tools=CLAUDE_TOOLS)

    turns = run(capture(run_server, steps, CALL + CALL, "ok", "bye"))
    assert extended(turns)
    assert [m["content"] for m in json.loads(turns[1]["messages"])] == ["result 0", "result\n1", "Both ran."]


REFUSED = [
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "grammar"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]}, "runs no tools"),
    ({"temperature": "hot"}, "'temperature' must be a number"),
    ({"system": {"text": "x"}}, "'system' must be a string or a list"),
    ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "none of the tools"),
    ({"tools": CLAUDE_TOOLS * 2}, "two tools named 'bash'"),
    ({"messages": [], "system": "x"}, "holds no messages"),
    ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
]


def test_messages_name_what_they_refuse(run_server):
    async def steps(running, session):
        client = running.anthropic(session.key)
        for fields, word in REFUSED:
            asked = {"model": "m", "max_tokens": 9, "messages": [USER], **fields}
            with pytest.raises(anthropic.BadRequestError, match=word) as refused:
                await client.post("/v1/messages", cast_to=object, body=asked)
            assert refused.value.body["error"]["type"] == "invalid_request_error"

    assert run(capture(run_server, steps, "never")) == []
