"""What harnesses do to their histories after faults and otherwise, as measured, and the tree that must come of it.

Every test talks as a harness does, in its protocol; the script engine answers. `Talk.turns` checks of each attempt that
the tree is valid, that each answer of the engine stands in one turn, and that what the engine was fed is what is
recorded. The last test does the same for conversations and edits that nobody wrote down.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl import tree
from legorl.checkpoint import open_checkpoint
from legorl.commands.serve.launch import make_llm_dir
from legorl.commands.serve.script_engine import Line, ScriptEngine, _line
from legorl.commands.serve.server import Server
from legorl.commands.serve.session import Session
from legorl.commands.serve.turn import Request, reject_unanswerable
from legorl.control import SessionRequest

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run", "parameters": SCHEMA}}]
ANTHROPIC_TOOLS = [{"name": "bash", "description": "Run", "input_schema": SCHEMA}]
CALL = 'Looking. \n<tool_call>\n{"name": "bash", "arguments": {"timeout": 5,  "command": "ls  é"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call>'
USER = {"role": "user", "content": "list the files"}


class Engine(ScriptEngine):
    """A script engine that notes what it is fed and emits, several tokens at a time where `chunk` says so."""

    chunk = 1

    def __init__(self, model: Path):
        super().__init__(model, 0, [], 100_000)
        self.fed: list[tuple[list[int], list[int]]] = []

    def script(self, *lines: Any) -> None:
        self._script = [_line({"text": x} if isinstance(x, str) else x) for x in lines]
        self.fed = []

    async def generate(self, request_id: str, prompt_ids: list[int], *rest: Any) -> Any:
        emitted: list[int] = []
        self.fed.append((prompt_ids, emitted))
        held = None
        async for delta in super().generate(request_id, prompt_ids, *rest):
            emitted += delta.ids
            if held:
                delta.ids[:0], delta.logprobs[:0] = held.ids, held.logprobs
                delta.cut = delta.cut or held.cut
            held = delta
            if delta.finish or len(delta.ids) >= self.chunk:
                yield held
                held = None


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(tiny_model)


@pytest.fixture(scope="module")
def server(engine: Engine, tiny_model: Path) -> Server:
    return Server(engine, open_checkpoint(tiny_model), make_llm_dir(), [])


def checked(turns: list[dict[str, Any]], fed: list[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
    """Assert that the record is what went in and out of the engine, each turn once."""
    tree.check(turns)
    nodes = tree.nodes_of(turns)
    assert [tree.prompt_ids(nodes, k).tolist() for k in range(len(nodes))] == [prompt for prompt, _ in fed]
    assert [t["completion_ids"] for t in turns] == [ids for _, ids in fed]
    for turn, node in zip(turns, nodes, strict=True):
        whole = node.parent != tree.ROOT and node.prefix_len == nodes[node.parent].path_len
        if turn["cause"] in ("root", "extend"):
            assert (turn["cause"] == "extend") == whole, turn["index"]
    return turns


@dataclass
class Talk:
    """One session, spoken to over HTTP without a socket."""

    http: httpx.AsyncClient
    session: Session
    engine: Engine
    opened: list[Any] = field(default_factory=list)

    async def chat(self, *messages: dict, tools: Any = CHAT_TOOLS, **body: Any) -> dict:
        reply = await self.http.post("/v1/chat/completions", json={"messages": messages, "tools": tools, **body})
        reply.raise_for_status()
        return reply.json()["choices"][0]["message"]

    async def anthropic(self, *messages: dict, tools: Any = ANTHROPIC_TOOLS, **body: Any) -> dict:
        asked = {"max_tokens": 500, "messages": messages, "tools": tools, **body}
        reply = await self.http.post("/v1/messages", json=asked)
        reply.raise_for_status()
        return {"role": "assistant", "content": reply.json()["content"]}

    async def turns(self) -> list[dict[str, Any]]:
        await self.session.close()
        return checked(self.session.record(), self.engine.fed)


@pytest.fixture
def talk(engine: Engine, server: Server):
    """talk(steps, *lines): run `steps(talk)` in a session of its own with these answers; return its turns."""
    from legorl.commands.serve.app import harness_app

    async def main(steps: Any, **request: Any) -> list[dict[str, Any]]:
        session = server.open_session(SessionRequest("a", **request))
        transport = httpx.ASGITransport(harness_app(server), raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {session.key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://model", headers=headers) as http:
            await steps(it := Talk(http, session, engine))
            return await it.turns()

    def run(steps: Any, *lines: Any, **request: Any) -> list[dict[str, Any]]:
        engine.script(*lines)
        return asyncio.run(asyncio.wait_for(main(steps, **request), 60))

    return run


def causes(turns: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(t["cause"], t["parent"]) for t in turns]


def result(call: dict, content: str = "a b") -> dict:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def tool_result(block: dict, content: Any = "a b", **fields: Any) -> dict:
    return {"type": "tool_result", "tool_use_id": block["id"], "content": content, **fields}


def block_of(answer: dict) -> dict:
    return next(b for b in answer["content"] if b["type"] == "tool_use")


# -- edits of what was answered ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"__unparsedToolInput": {"raw": '{"command": "l', "len": 14}},
        {"value": '{"command": "l'},
        {"timeout": 5, "command": "ls é"},
        {"timeout": "5", "command": "ls  é"},
    ],
    ids=["emptied", "unparsed", "raw", "a space less", "another type"],
)
def test_other_arguments_under_the_same_id_are_an_edit(talk, arguments):
    async def chat(it):
        answer = await it.chat(USER)
        (call,) = answer["tool_calls"]
        call["function"]["arguments"] = json.dumps(arguments)
        await it.chat(USER, answer, result(call))

    async def anthropic(it):
        answer = await it.anthropic(USER)
        block = block_of(answer)
        block["input"] = arguments
        await it.anthropic(USER, answer, {"role": "user", "content": [tool_result(block)]})

    for steps in (chat, anthropic):
        first, second = talk(steps, CALL, "Done.")
        assert causes([first, second]) == [("root", -1), ("edited", 0)]
        assert second["prefix_len"] < len(first["context_ids"]) + len(first["completion_ids"])
        (kept,) = [c for m in json.loads(second["messages"]) for c in m.get("tool_calls", [])]
        assert json.loads(kept["arguments"]) == arguments


def shown_by_smolagents(answer):
    calls = []
    for call in answer["tool_calls"]:
        function = {"name": "bash", "arguments": json.loads(call["function"]["arguments"])}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return {"role": "assistant", "content": f"Looking.\nCalling tools:\n{calls}"}


def rewritten(arguments):
    def echo(answer):
        (call,) = answer["tool_calls"]
        call = {**call, "function": {"name": "bash", "arguments": arguments}}
        return {"role": "assistant", "content": " Looking.", "tool_calls": [call]}

    return echo


@pytest.mark.parametrize(
    "echo",
    [
        shown_by_smolagents,
        rewritten('{"command":"ls  \\u00e9","timeout":5}'),
        rewritten('{"timeout": 5, "command": "ls  é"}'),
    ],
)
def test_an_echo_in_the_words_of_another_client_is_no_edit(talk, echo):
    async def steps(it):
        answer = await it.chat(USER)
        await it.chat(USER, echo(answer), {"role": "user", "content": "Observation: a b"})

    turns = talk(steps, CALL, "Done.")
    assert causes(turns) == [("root", -1), ("extend", 0)]


def test_calls_shown_as_text_with_other_arguments_are_another_history(talk):
    async def steps(it):
        answer = await it.chat(USER)
        shown = shown_by_smolagents(answer)
        for text in (shown["content"].replace("'ls", "'rm"), shown["content"] + ")", "Looking.\nCalling tools:\n[1]"):
            await it.chat(USER, {**shown, "content": text}, {"role": "user", "content": "Observation: a b"})

    turns = talk(steps, CALL, "one", "two", "three")
    assert {t["cause"] for t in turns[1:]} == {"rewrite"}


def test_cleared_results_are_an_edit_and_what_follows_goes_on_from_there(talk):
    async def steps(it):
        said = [USER]
        for k in range(3):
            answer = await it.anthropic(*said)
            said += [answer, {"role": "user", "content": [tool_result(block_of(answer), f"long listing {k}")]}]
        said[2] = {"role": "user", "content": [tool_result(block_of(said[1]), "[Old tool result content cleared]")]}
        answer = await it.anthropic(*said)
        said += [answer, {"role": "user", "content": [tool_result(block_of(answer), "more")]}]
        await it.anthropic(*said)

    turns = talk(steps, CALL, CALL, CALL, CALL, "Done.")
    assert causes(turns)[3:] == [("edited", 1), ("extend", 3)]
    assert "long listing 0" not in turns[3]["messages"] and "cleared" in turns[3]["messages"]


@pytest.mark.parametrize("answer", ["", "I think about it.", '<tool_call>\n{"name": "bash", "arguments": {"comm'])
def test_a_failed_answer_that_is_left_out_stays_a_sample_beside_the_branch(talk, answer):
    """mini-swe-agent: only the error is in the next request. Claude Code, after an empty answer, does the same."""

    async def steps(it):
        first = await it.chat(USER)
        (call,) = first["tool_calls"]
        said = [USER, first, result(call)]
        await it.chat(*said)
        third = await it.chat(*said, {"role": "user", "content": "Tool call error: try again"})
        await it.chat(*said, {"role": "user", "content": "Tool call error: try again"}, third, result(
            third["tool_calls"][0]))  # fmt: skip

    turns = talk(steps, CALL, answer, CALL, "Done.")
    assert causes(turns) == [("root", -1), ("extend", 0), ("rewrite", 1), ("extend", 2)]
    assert turns[1]["delivered"] and all(d["reason"] == "support" for d in turns[1]["drops"])


def test_a_reminder_in_the_first_message_changes_all_that_follows(talk):
    async def steps(it):
        answer = await it.anthropic(USER)
        back = {"role": "user", "content": [tool_result(block_of(answer))]}
        await it.anthropic(USER, answer, back)
        texts = [USER["content"], "<system-reminder>Go on</system-reminder>"]
        reminded = {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
        last = await it.anthropic(reminded, answer, back)
        await it.anthropic(reminded, answer, back, last, {"role": "user", "content": "and now?"})

    turns = talk(steps, CALL, "", "Fine.", "Done.")
    assert causes(turns)[2:] == [("edited", 0), ("extend", 2)] and turns[2]["prefix_len"] < len(turns[0]["context_ids"])


def test_a_reminder_behind_an_answer_goes_on_from_it(talk):
    """Claude Code after an answer that met the limit of tokens."""

    async def steps(it):
        answer = await it.anthropic(USER)
        await it.anthropic(USER, answer, {"role": "user", "content": "Output token limit hit. Resume directly"})

    turns = talk(steps, {"text": "I begin to", "fault": "length"}, "Done.")
    assert causes(turns) == [("root", -1), ("extend", 0)] and not turns[0]["stop_token_sampled"]


# -- faults of the connection ------------------------------------------------------------------------------------------


async def cut(it: Talk, path: str, body: dict) -> str:
    """Ask for a stream that breaks off; return what arrived."""
    reply = await it.http.post(path, json={**body, "stream": True})
    return reply.text


def test_the_part_of_a_cut_answer_that_is_kept_is_a_branch_inside_it(talk):
    """Claude Code keeps what it has seen, and adds a reminder; qwen-code does so for one request and takes both out."""

    async def steps(it):
        await cut(it, "/v1/messages", {"max_tokens": 99, "messages": [USER]})
        part = {"role": "assistant", "content": [{"type": "text", "text": "one two three"}]}
        reminder = {"role": "user", "content": "<system-reminder>Your response above was cut off mid-stream"}
        answer = await it.anthropic(USER, part, reminder, tools=[])
        await it.anthropic(USER, answer, {"role": "user", "content": "go on"}, tools=[])

    turns = talk(steps, {"text": "one two three four five six", "fault": "cut"}, "Sorry.", "Done.")
    assert causes(turns) == [("root", -1), ("rewrite", 0), ("rewrite", 0)]
    prompt = len(turns[0]["context_ids"])
    assert prompt < turns[1]["prefix_len"] < prompt + len(turns[0]["completion_ids"])
    assert [t["delivered"] for t in turns] == [False, True, True] and turns[0]["text"].endswith("six")


def test_the_reasoning_of_a_cut_answer_that_is_kept_alone_asks_for_the_same_answer(talk):
    """Codex sends the request again with the finished reasoning item of the answer that it lost."""

    async def steps(it):
        said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
        await cut(it, "/v1/responses", {"input": [said]})
        orphan = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
        reply = await it.http.post("/v1/responses", json={"input": [said, orphan]})
        assert reply.json()["output"][-1]["content"][0]["text"] == "one two three four"

    (turn,) = talk(steps, {"text": "one two three four", "fault": "cut"}, "never asked for")
    assert turn["delivered"]


def test_a_refusal_does_not_move_the_tree(talk):
    async def steps(it):
        answer = await it.chat(USER)
        said = [USER, answer, result(answer["tool_calls"][0])]
        for status in (500, 429, 400):
            with pytest.raises(httpx.HTTPStatusError, match=str(status)):
                await it.chat(*said)
        await it.chat(*said)

    turns = talk(steps, CALL, {"fault": "500"}, {"fault": "429"}, {"fault": "overflow"}, "Done.")
    assert causes(turns) == [("root", -1), ("extend", 0)]


# -- several conversations in one session ------------------------------------------------------------------------------


def test_results_of_parallel_calls_in_any_order_go_on_from_their_answer(talk):
    async def steps(it):
        answer = await it.anthropic(USER)
        calls = [b for b in answer["content"] if b["type"] == "tool_use"]
        results = [tool_result(calls[1], "second"), tool_result(calls[0], "first", is_error=True)]
        await it.anthropic(USER, answer, {"role": "user", "content": results})

    turns = talk(steps, TWO_CALLS, "Done.")
    assert causes(turns) == [("root", -1), ("extend", 0)]
    assert [m["content"] for m in json.loads(turns[1]["messages"])] == ["Error: first", "second"]


def test_sub_agents_side_by_side_extend_themselves_only(talk):
    system = {"role": "system", "content": "You are a sub-agent. " * 20}

    async def agent(it, name):
        said = [system, {"role": "user", "content": f"task {name}"}]
        for k in range(3):
            answer = await it.chat(*said)
            said += [answer, result(answer["tool_calls"][0], f"{name} {k}")]

    async def steps(it):
        main = await it.chat(USER)
        await asyncio.gather(*[agent(it, name) for name in "abc"])
        await it.chat(USER, main, result(main["tool_calls"][0], "all sub-agents are done"))

    turns = talk(steps, CALL)
    assert causes(turns)[-1] == ("extend", 0) and len(turns) == 11
    starts = [t for t in turns[1:-1] if t["cause"] != "extend"]
    # The first branches off within the main conversation's system text, or not at all; the others share with a sibling.
    assert len(starts) == 3 and {t["cause"] for t in starts} <= {"rewrite", "root"}
    names = {t["index"]: json.loads(t["messages"])[-1]["content"].split()[-1] for t in starts}
    assert sorted(names.values()) == list("abc")
    for turn in turns[1:-1]:
        if turn["cause"] == "extend":
            name = json.loads(turn["messages"])[-1]["content"].split()[0]
            names[turn["index"]] = name
            assert names[turn["parent"]] == name


def test_compaction_is_a_rewrite_that_keeps_the_system_text(talk):
    system = {"role": "system", "content": "You are a coding agent."}

    async def steps(it):
        answer = await it.chat(system, USER)
        said = [system, USER, answer, result(answer["tool_calls"][0])]
        summary = await it.chat(*said, {"role": "user", "content": "Summarise what we did so far."})
        told = {"role": "user", "content": f"Summary of the work so far: {summary['content']}"}
        answer = await it.chat(system, told)
        await it.chat(system, told, answer, result(answer["tool_calls"][0]))

    turns = talk(steps, CALL, "We looked.", CALL, "Done.")
    assert causes(turns) == [("root", -1), ("extend", 0), ("rewrite", 0), ("extend", 2)]
    assert 0 < turns[2]["prefix_len"] < len(turns[0]["context_ids"])


def test_a_title_request_is_at_the_side_and_not_trained(talk):
    async def steps(it):
        await it.chat({"role": "system", "content": "You write titles."}, USER, tools=[])
        await it.chat(USER)

    title, main = talk(steps, "A title", CALL, side_patterns=("^You write titles",))
    assert title["cause"] == "side" and main["cause"] in ("root", "rewrite")
    assert [d["length"] for d in title["drops"]] == [len(title["completion_ids"])]


# -- whatever a harness may do -----------------------------------------------------------------------------------------

ANSWERS = ["", "ok", "Fine, é.", " spaced ", CALL, TWO_CALLS, '<tool_call>\n{"name": "bash"']
HARMLESS = ["as it is", "stripped", "compact", "reasoning dropped"]
HARMFUL = ["emptied", "retold", "left out", "system changed"]


def echoed(answer: dict, how: str) -> dict:
    """The recorded answer as a harness keeps it."""
    kept = json.loads(json.dumps(answer))
    if how == "stripped":
        kept["content"] = kept["content"].strip()
    elif how == "compact":
        for call in kept["tool_calls"]:
            arguments = dict(reversed(json.loads(call["arguments"]).items()))
            call["arguments"] = json.dumps(arguments, separators=(",", ":"))
    elif how == "reasoning dropped":
        kept.pop("reasoning", None)
    elif how == "emptied":
        kept["tool_calls"] = [{**c, "arguments": "{}"} for c in kept["tool_calls"]]
    elif how == "retold":
        kept["content"] = "In short: " + kept["content"]
    return kept


STEPS = st.lists(
    st.tuples(st.sampled_from(ANSWERS), st.sampled_from(HARMLESS + HARMFUL), st.sampled_from(["go on", "again", "x"])),
    min_size=1,
    max_size=6,
)


async def wander(server: Server, engine: Engine, steps: list[tuple[str, str, str]]) -> None:
    """Play a conversation in which each answer is kept as its step says, and check each turn's place."""
    session = server.open_session(SessionRequest("a", turn_tokens=40))
    said: list[dict[str, Any]] = [{"role": "system", "content": "s"}, USER]
    expected: list[tuple[str, int] | None] = [("root", -1)]
    last: int | None = None
    for answer, how, _ in steps:
        engine._script = [Line(engine._script[0].match, engine._script[0].system, answer)]
        request = Request("openai-chat", [dict(m) for m in said], CHAT_TOOLS, {})
        reject_unanswerable(request)
        turn = session.open_turn(request)
        await turn.end()
        turn.delivered = True
        last = turn.node.index
        assert turn.answer is not None
        kept = echoed(turn.answer, how)
        same = how in HARMLESS or (how == "emptied" and not kept["tool_calls"])
        if how == "left out":
            said.append({"role": "user", "content": f"error {len(said)}"})
        else:
            said.append(kept)
            said += [{"role": "tool", "tool_call_id": c["id"], "content": f"r{len(said)}"} for c in kept["tool_calls"]]
            said.append({"role": "user", "content": f"next {len(said)}"})
        if how == "system changed":
            said[0] = {"role": "system", "content": f"s{len(said)}"}
        expected.append(("extend", last) if same else None)
    await session.close()
    turns = checked(session.record(), engine.fed)
    for turn, place in zip(turns, expected, strict=False):
        if place:
            assert (turn["cause"], turn["parent"]) == place
        else:
            assert turn["cause"] in ("rewrite", "edited", "root"), turn["cause"]


@settings(max_examples=60)
@given(STEPS, st.integers(1, 9))
def test_any_conversation_with_any_edits_is_recorded_as_it_was_fed(engine, server, steps, chunk):
    engine.script("x")
    engine.chunk = chunk
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(wander(server, engine, steps))
    engine.chunk = 1
