"""What holds in every protocol, by the official clients, on real sockets."""

import asyncio
import json

import anthropic
import openai
import pytest
from commands.serve.clients import (
    CALL,
    CHAT_TOOLS,
    CLAUDE_TOOLS,
    GO_ON,
    PARAMETERS,
    TOOLS,
    USER,
    capture,
    claude,
    extended,
    respond,
    run,
)

from legorl.control import SessionRequest


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


def test_text_leaves_while_the_rest_is_still_being_sampled(run_server):
    async def steps(running, session):
        release, generate = asyncio.Event(), running.server.engine.generate

        async def halting(*asked):
            number = 0
            async for delta in generate(*asked):
                if number == 2:
                    await release.wait()
                number += 1
                yield delta

        running.server.engine.generate = halting
        async with running.harness(session.key) as http:
            for path, body in (
                ("messages", {"messages": [USER], "tools": CLAUDE_TOOLS}),
                ("responses", {"input": "x", "tools": TOOLS}),
                ("chat/completions", {"messages": [GO_ON], "tools": CHAT_TOOLS}),
            ):
                release.clear()
                async with http.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as reply:
                    seen = ""
                    async for piece in reply.aiter_text():
                        seen += piece
                        if "one" in seen and not release.is_set():
                            assert "three" not in seen
                            release.set()
                assert release.is_set() and "three" in seen

    assert all(t["delivered"] for t in run(capture(run_server, steps, "one two three")))


def test_the_sync_clients_see_failures_of_a_stream_as_their_own_errors(run_server):
    def steps_sync(running, session):
        with running.anthropic_sync(session.key) as theirs, running.openai_sync(session.key) as ours:
            with pytest.raises(anthropic.APIStatusError, match="no script line matches"):
                theirs.messages.stream(model="m", max_tokens=9, messages=[USER]).__enter__().get_final_message()
            with pytest.raises(openai.APIError, match="no script line matches"):
                list(ours.chat.completions.create(model="m", messages=[USER], stream=True))
            with ours.responses.stream(model="m", input="x") as stream:
                last = [e.type for e in stream][-1]
            assert last == "response.failed"
            assert [m.id for m in theirs.beta.models.list()] == [m.id for m in ours.models.list()]

    async def main():
        async with (
            run_server({"match": "never", "text": ""}) as running,
            running.control.session(SessionRequest("a")) as session,
        ):
            await asyncio.to_thread(steps_sync, running, session)

    run(main())
