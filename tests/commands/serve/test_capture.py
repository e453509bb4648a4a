"""What a harness does to its history, and the tree that must come of it. Script engine: no model decides these."""

import asyncio
import json

import httpx
import pytest

from legorl import tree
from legorl.commands.serve.session import AT_ONCE
from legorl.control import ServeError, SessionRequest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
            },
        },
    }
]
CALL = 'Looking.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls  é", "timeout": "5"}}\n</tool_call>'
USER = {"role": "user", "content": "list the files"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def ask(http: httpx.AsyncClient, messages: list, **body) -> dict:
    reply = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages, **body})
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]


async def conversation(run_server, steps, *lines, **request):
    """Open a session, run `steps(http)`, close; check the tree and return its turns."""
    async with run_server(*lines) as running, running.control.session(SessionRequest("a", **request)) as session:
        async with running.harness(session.key) as http:
            await steps(http)
        turns = (await session.close()).turns.to_pylist()[0]
    tree.check(turns)
    return turns


def test_an_echoed_tool_call_continues_token_exactly(run_server):
    async def steps(http):
        answer = await ask(http, [USER], tools=TOOLS)
        (call,) = answer["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"command": "ls  é", "timeout": 5}
        # As harnesses send it back: other key order and spacing, ASCII escapes, blocks, an empty text, extra keys.
        echoed = {"timeout": 5, "command": "ls  \u00e9"}
        call = {**call, "function": {"name": "bash", "arguments": json.dumps(echoed, ensure_ascii=True)}}
        again = {"role": "assistant", "content": [{"type": "text", "text": "Looking. "}], "tool_calls": [call]}
        await ask(http, [{**USER, "content": [{"type": "text", "text": USER["content"]}]}, again,
                         {"role": "tool", "tool_call_id": call["id"], "content": "a b"}], tools=TOOLS)  # fmt: skip

    first, second = run(conversation(run_server, steps, CALL, "Done."))
    assert second["cause"] == "extend" and second["parent"] == 0
    assert second["prefix_len"] == len(first["context_ids"]) + len(first["completion_ids"])
    assert first["stop_token_sampled"] and json.loads(second["messages"])[0]["content"] == "a b"
    assert second["tools"] is None


def test_the_bridge_is_what_the_template_renders(run_server, tiny_model):
    from transformers import AutoTokenizer

    messages = [USER]

    async def steps(http):
        for text in ("go on", "and then?", "stop"):
            messages.append(await ask(http, messages))
            messages.append({"role": "user", "content": text})
        await ask(http, messages)

    turns = run(conversation(run_server, steps, "First.", "Second one.", "Third: ok", "End"))
    nodes = tree.nodes_of(turns)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(tree.prompt_ids(nodes, 3)) == rendered
    assert [t["cause"] for t in turns] == ["root", "extend", "extend", "extend"]


def test_a_missing_end_token_is_added_as_context(run_server):
    async def steps(http):
        answer = await ask(http, [USER], max_tokens=2)
        await ask(http, [USER, answer, {"role": "user", "content": "go on"}])

    first, second = run(conversation(run_server, steps, "one two three four five six", "ok"))
    assert first["finish_reason"] == "length" and not first["stop_token_sampled"] and len(first["completion_ids"]) == 2
    assert second["cause"] == "extend"
    assert second["context_ids"][0] == 2  # <|im_end|>: context of the next turn, never a target


def test_changed_history_is_a_branch_and_is_not_undone(run_server):
    async def steps(http):
        answer = await ask(http, [USER], tools=TOOLS)
        call = answer["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call, "content": "secret listing"}
        second = await ask(http, [USER, answer, result], tools=TOOLS)
        cleared = {**result, "content": "[cleared]"}
        await ask(http, [USER, answer, cleared, second, {"role": "user", "content": "more"}], tools=TOOLS)
        emptied = json.loads(json.dumps(answer))
        emptied["tool_calls"][0]["function"]["arguments"] = "{}"
        await ask(http, [USER, emptied, result], tools=TOOLS)

    turns = run(conversation(run_server, steps, CALL, "second", "third", "fourth"))
    assert [t["cause"] for t in turns] == ["root", "extend", "edited", "edited"]
    nodes = tree.nodes_of(turns)
    assert turns[2]["parent"] == 1 and turns[2]["prefix_len"] < nodes[1].prompt_len
    assert turns[3]["parent"] == 0 and turns[3]["prefix_len"] < nodes[0].path_len


def test_a_removed_answer_stays_a_sample(run_server):
    async def steps(http):
        await ask(http, [USER])
        await ask(http, [USER, {"role": "user", "content": "Format error, try again"}])

    first, second = run(conversation(run_server, steps, "no format", "better"))
    assert second["cause"] == "rewrite" and second["parent"] == 0 and second["prefix_len"] < len(first["context_ids"])
    assert first["drops"] == second["drops"] or all(d["reason"] == "support" for d in first["drops"])


def test_the_same_request_after_a_delivery_is_a_new_sample(run_server):
    async def steps(http):
        await ask(http, [USER])
        await ask(http, [USER])

    first, second = run(conversation(run_server, steps, "one", "two"))
    assert second["cause"] == "resample" and second["parent"] == 0
    assert json.loads(first["applied"])["seed"] != json.loads(second["applied"])["seed"]


def test_a_marked_retry_gets_the_recorded_answer(run_server):
    async def steps(http):
        first = await ask(http, [USER])
        http.headers["x-stainless-retry-count"] = "1"
        assert await ask(http, [USER]) == first

    assert len(run(conversation(run_server, steps, "one", "two"))) == 1


def test_an_answer_that_did_not_arrive_is_sent_again(run_server):
    async def steps(http):
        body = {"model": "m", "messages": [USER], "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            await anext(reply.aiter_bytes())  # and go away in the middle
        assert (await ask(http, [USER]))["content"] == "one two three " * 600

    (turn,) = run(conversation(run_server, steps, "one two three " * 600, "other", turn_tokens=4000))
    assert turn["delivered"]


def test_streaming_sends_text_then_calls_then_usage(run_server):
    async def steps(http):
        body = {
            "model": "m",
            "messages": [USER],
            "tools": TOOLS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = [line[6:] async for line in reply.aiter_lines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(x) for x in lines[:-1]]
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        assert "".join(d.get("content") or "" for d in deltas) == "Looking."
        calls = [c for d in deltas for c in d.get("tool_calls") or []]
        assert [c["function"]["name"] for c in calls] == ["bash"] and calls[0]["index"] == 0
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert chunks[-1]["usage"]["completion_tokens"] > 5

    run(conversation(run_server, steps, CALL))


def test_a_call_that_does_not_parse_stays_text_and_is_recorded_invalid(run_server):
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "l'

    async def steps(http):
        answer = await ask(http, [USER], tools=TOOLS)
        assert answer["content"] == broken and "tool_calls" not in answer

    (turn,) = run(conversation(run_server, steps, broken))
    assert [c["valid"] for c in turn["tool_calls"]] == [False]


def test_a_stop_string_is_cut_from_the_text_but_its_tokens_stay(run_server):
    async def steps(http):
        assert (await ask(http, [USER], stop=["three"]))["content"] == "one two "

    (turn,) = run(conversation(run_server, steps, "one two three four"))
    assert len(turn["completion_ids"]) == 3 and turn["finish_reason"] == "stop"


def test_budgets_end_the_session_without_a_retry(run_server):
    async def main():
        async with run_server("a b c d") as running:
            request = SessionRequest("a", max_turns=2, turn_tokens=3)
            async with running.control.session(request) as session, running.harness(session.key) as http:
                for text in "xy":
                    await ask(http, [{"role": "user", "content": text}])
                reply = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "z"}]})
                assert reply.status_code == 400 and reply.json()["error"]["code"] == "session_budget_spent"
                while session.state.budget is None:
                    session.changed.clear()
                    await session.changed.wait()
                assert session.state.budget == "turns" and session.state.tokens == 6

    run(main())


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "robot"}]}', "role"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "text only"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "'n'"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [1]}', "tool"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "last message"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_bad_requests_get_the_protocols_own_error(run_server, body, word):
    async def main():
        async with (
            run_server("fine") as running,
            running.control.session(SessionRequest("a")) as session,
            running.harness(session.key) as http,
        ):
            reply = await http.post("/v1/chat/completions", content=body)
            assert reply.status_code == 400 and word in reply.json()["error"]["message"]
            assert (await ask(http, [USER]))["content"] == "fine"

    run(main())


def test_an_overlong_prompt_is_a_400_that_says_so(run_server):
    async def main():
        async with run_server("x", context=64) as running, running.control.session(SessionRequest("a")) as session:
            async with running.harness(session.key) as http:
                body = {"messages": [{"role": "user", "content": "word " * 100}]}
                reply = await http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
            assert (await session.close()).overflow

    run(main())


def test_a_flood_of_requests_is_held_off_and_nothing_is_lost(run_server):
    async def main():
        async with run_server("word " * 400) as running, running.control.session(SessionRequest("a")) as session:
            async with running.harness(session.key) as http:

                async def one(k):
                    body = {"messages": [{"role": "user", "content": f"request {k}"}]}
                    return (await http.post("/v1/chat/completions", json=body)).status_code

                codes = await asyncio.gather(*[one(k) for k in range(40)])
                assert set(codes) <= {200, 429} and codes.count(200) >= AT_ONCE
                assert (await one(99)) == 200
            closed = await session.close()
        assert closed.count == codes.count(200) + 1

    run(main())


def test_only_the_key_of_a_live_session_opens_the_door(run_server):
    async def main():
        async with run_server("x") as running:
            async with running.control.session(SessionRequest("a")) as session:
                key = session.key
                async with running.harness("wrong") as http:
                    assert (await http.get("/v1/models")).status_code == 401
                    assert (await http.get(f"/k/{key}/v1/models")).status_code == 200
                    assert (await http.get("/v1/models", headers={"x-api-key": key})).status_code == 200
                    for route in ("/sessions", "/health", "/weights", "/metrics"):
                        assert (await http.get(route)).status_code == 404
                await session.close()
                async with running.harness(key) as http:
                    assert (await http.get("/v1/models")).status_code == 401
                with pytest.raises(ServeError):
                    await session.close()
            async with running.control.session(SessionRequest("b")) as session:
                left = session.key
            async with running.harness(left) as http:
                for _ in range(200):  # the server notices the lost control connection on its own
                    if (await http.get("/v1/models")).status_code == 401:
                        return
                    await asyncio.sleep(0.01)
            raise AssertionError("a session outlived its control connection")

    run(main())


def test_another_client_in_the_sandbox_is_marked_foreign(run_server):
    async def steps(http):
        http.headers["user-agent"] = "harness/1.0"
        await ask(http, [USER])
        http.headers["user-agent"] = "curl/8"
        await ask(http, [{"role": "user", "content": "the answer, please"}])

    turns = run(conversation(run_server, steps, "one", "two", user_agent="^harness/"))
    assert [t["foreign"] for t in turns] == [False, True]
