"""Budgets end a session so that its harness stops; a session costs memory and disk by its tokens."""

import asyncio
import gc
import json
import keyword
import sys
import types
from pathlib import Path

import builders
import numpy as np
import pytest

from legorl.control import SessionRequest

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
VOCABULARY = sorted(set(Path(asyncio.base_events.__file__).read_text().split()) - set(keyword.kwlist))
TURNS = 200
SPENT = "session_budget_spent"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def ask(http, text, path="/v1/chat/completions", **body):
    body = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": text}], **body}
    return await http.post(path, json=body)


async def budget_of(session):
    """The budget that the control side is told of."""
    while session.state.budget is None:
        session.changed.clear()
        await session.changed.wait()
    return session.state.budget


@pytest.mark.parametrize(
    ("limits", "spent", "answered"),
    [
        ({"max_turns": 2, "turn_tokens": 3}, "turns", 2),
        ({"max_tokens": 5, "turn_tokens": 3}, "tokens", 2),
        ({"max_seconds": 0.0}, "seconds", 0),
        ({"max_idle_turns": 2}, "idle_turns", 2),
    ],
)
def test_a_spent_budget_is_refused_and_told(run_server, limits, spent, answered):
    async def main():
        async with run_server("a b c d") as running, running.control.session(SessionRequest("a", **limits)) as session:
            async with running.harness(session.key) as http:
                codes = [(await ask(http, text, tools=TOOLS)).status_code for text in "vwxyz"]
                assert codes == [200] * answered + [400] * (5 - answered)
                assert (await ask(http, "z")).json()["error"]["code"] == SPENT
                assert (await ask(http, "z", "/v1/messages")).json()["error"]["type"] == "invalid_request_error"
                reply = await http.post("/v1/responses", json={"model": "m", "input": "z"})
                assert (reply.status_code, reply.json()["error"]["code"]) == (400, SPENT)
            assert await budget_of(session) == spent
            closed = await session.close()
            assert (closed.count, closed.budget, closed.lost) == (answered, spent, None)

    run(main())


def test_a_harness_that_would_ask_again_after_a_400_gets_the_status_that_it_takes_as_the_end(run_server):
    async def main():
        request = SessionRequest("a", max_turns=1, spent_status=401)
        async with (
            run_server("one") as running,
            running.control.session(request) as session,
            running.harness(session.key) as http,
        ):
            assert (await ask(http, "x")).status_code == 200
            reply = await ask(http, "y")
        assert reply.status_code == 401
        assert (reply.json()["error"]["type"], reply.json()["error"]["code"]) == ("authentication_error", SPENT)

    run(main())


def test_only_main_turns_in_a_row_that_were_offered_tools_and_called_none_are_idle(run_server):
    async def main():
        lines = [{"match": "call", "text": CALL}, {"text": "talk"}]
        request = SessionRequest("a", max_idle_turns=2, side_patterns=("^title",), user_agent="^harness")
        async with run_server(*lines) as running, running.control.session(request) as session:
            async with running.harness(session.key) as http:
                http.headers["user-agent"] = "harness"
                for text in ("talk 1", "call", "talk 2"):
                    await ask(http, text, tools=TOOLS)
                for text in ("a", "b"):  # no tools: a harness whose commands are text
                    await ask(http, text)
                await ask(http, "title, please", tools=TOOLS)
                http.headers["user-agent"] = "curl"
                await ask(http, "foreign", tools=TOOLS)
                http.headers["user-agent"] = "harness"
                assert (await ask(http, "talk 3", tools=TOOLS)).status_code == 200
                assert (await ask(http, "call again", tools=TOOLS)).status_code == 400
            assert await budget_of(session) == "idle_turns"

    run(main())


def test_a_recorded_answer_is_sent_again_after_the_budget_is_spent(run_server):
    async def main():
        request = SessionRequest("a", max_turns=2)
        async with run_server("one", "two") as running, running.control.session(request) as session:
            async with running.harness(session.key) as http:
                first = (await ask(http, "x", tools=TOOLS)).json()
                await ask(http, "y")
                # By now the first turn is no longer in memory.
                http.headers["x-stainless-retry-count"] = "1"
                assert (await ask(http, "x", tools=TOOLS)).json() == first
                assert (await ask(http, "z")).status_code == 400
            lines = (await running.control._client.get("/metrics")).text.splitlines()
            metrics = {name: int(value) for name, value in map(str.split, lines)}
            assert (metrics["legorl_open_turns"], metrics["legorl_open_tokens"]) == (2, session.state.tokens)
            assert metrics["legorl_open_spilled_bytes"] > 0 and metrics["legorl_resident_bytes"] > 1 << 20
            (turns,) = (await session.close()).turns.to_pylist()
        assert [t["text"] for t in turns] == ["one", "two"] and all(t["delivered"] for t in turns)
        assert json.loads(turns[0]["tools"]) and turns[1]["tools"] == "[]"

    run(main())


def kept_bytes(turns):
    """What the turns hold in memory, up to Python's own classes and modules."""
    seen, todo, total = set(), list(turns), 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | types.FunctionType | asyncio.Future):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return total


def prose(rng, words):
    """Text that compresses like a shell session: words of real source files, paths and numbers."""
    return " ".join(
        f"{rng.choice(VOCABULARY)}:{rng.integers(10_000)}" if rng.random() < 0.2 else str(rng.choice(VOCABULARY))
        for _ in range(words)
    )


def test_a_long_trajectory_costs_memory_and_disk_by_its_distinct_tokens(run_server, tmp_path):
    """The harness repeats 200 turns of history; 12 bytes a sampled token, 4 a context token and 400 a turn must do."""
    rng = np.random.default_rng(0)
    calls = [json.dumps({"name": "bash", "arguments": {"command": prose(rng, 12)}}) for _ in range(TURNS)]
    lines = [f"{prose(rng, 20)}\n<tool_call>\n{call}\n</tool_call>" for call in calls]
    request = SessionRequest("a", turn_tokens=400, side_patterns=("^never",))

    held = []

    async def main():
        async with run_server(*lines, context=200_000) as running, running.control.session(request) as session:
            server_side = running.server.session(session.id)
            async with running.harness(session.key) as http:
                messages = [{"role": "user", "content": prose(rng, 200)}]
                for _ in range(TURNS):
                    body = {"model": "m", "messages": messages, "tools": TOOLS, "temperature": 1.0, "top_p": 1.0}
                    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
                    (call,) = choice["message"]["tool_calls"]
                    messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"]}]
                    messages[-1]["content"] = prose(rng, 40)
                    held.append(kept_bytes(server_side.turns))
            return (await session.close()).turns.to_pylist()[0]

    turns = run(main())
    # Memory grows with what is new; the history that each request repeats would make it 4 times as much.
    assert held[-1] < 2.2 * held[TURNS // 2 - 1]
    assert [t["parent"] for t in turns] == list(range(-1, TURNS - 1))
    sampled = sum(len(t["completion_ids"]) for t in turns)
    context = sum(len(t["context_ids"]) for t in turns)
    assert sampled > 30 * TURNS and context > 60 * TURNS
    for turn in turns:  # a script's are all 0
        turn["logprobs"] = (-rng.exponential(size=len(turn["completion_ids"]))).astype(np.float32).tolist()
    size = builders.shard(tmp_path / "a.parquet", [builders.trajectory(turns=turns)]).stat().st_size
    assert size <= 12 * sampled + 4 * context + 400 * TURNS, (size / TURNS, sampled / TURNS, context / TURNS)
