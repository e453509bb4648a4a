"""The script engine: which line answers which request, and the faults that a line can ask for, in every protocol."""

import asyncio
import json

import anthropic
import httpx
import httpx2  # what the anthropic package speaks HTTP with
import openai
import pytest

from legorl import tree
from legorl.commands.serve.engine import EngineError
from legorl.commands.serve.script_engine import read_script
from legorl.control import SessionRequest

WORDS = "one two three four five six seven eight"
BROKEN_OFF = (
    openai.APIConnectionError, anthropic.APIConnectionError, httpx.RemoteProtocolError, httpx2.RemoteProtocolError,
)  # fmt: skip
PROTOCOLS = ("chat", "responses", "messages")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


class Asker:
    """Asks in one protocol through its official client."""

    def __init__(self, running, key: str, protocol: str, stream: bool):
        self.protocol, self.stream = protocol, stream
        self._openai, self._anthropic = running.openai(key), running.anthropic(key)

    async def __call__(self, text: str, system: str = "s") -> str:
        said = [{"role": "user", "content": text}]
        if self.protocol == "messages":
            asked = {"model": "m", "max_tokens": 99, "system": system, "messages": said}
            if not self.stream:
                return (await self._anthropic.messages.create(**asked)).content[0].text
            async with self._anthropic.messages.stream(**asked) as events:
                return await events.get_final_text()
        if self.protocol == "responses":
            reply = await self._openai.responses.create(model="m", instructions=system, input=said, stream=self.stream)
            if not self.stream:
                return reply.output_text
            return "".join([e.delta async for e in reply if e.type == "response.output_text.delta"])
        said.insert(0, {"role": "system", "content": system})
        reply = await self._openai.chat.completions.create(model="m", messages=said, stream=self.stream)
        if not self.stream:
            return reply.choices[0].message.content
        return "".join([c.choices[0].delta.content or "" async for c in reply])


async def asked(run_server, steps, *lines, protocol="chat", stream=False, **request):
    """Open a session, run `steps(ask)`, close; check the tree and return (turns, closed)."""
    async with run_server(*lines) as running, running.control.session(SessionRequest("a", **request)) as session:
        await steps(Asker(running, session.key, protocol, stream))
        closed = await session.close()
    turns = closed.turns.to_pylist()[0]
    tree.check(turns)
    assert session.state.lost is None
    return turns, closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("fault", ["500", "429"])
def test_a_refused_request_leaves_no_trace_and_is_answered_when_it_comes_again(run_server, protocol, stream, fault):
    async def steps(ask):
        for _ in range(2):
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as refused:
                await ask("hello")
            assert refused.value.status_code == int(fault)
        assert await ask("hello") == WORDS

    turns, closed = run(asked(run_server, steps, {"fault": fault}, {"fault": fault}, WORDS,
                              protocol=protocol, stream=stream))  # fmt: skip
    assert [(t["cause"], t["delivered"]) for t in turns] == [("root", True)] and not closed.overflow


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_overflow_on_demand_is_that_of_a_long_prompt(run_server, protocol, stream):
    async def steps(ask):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
            await ask("hello")
        assert "prompt is too long" in str(refused.value) or refused.value.code == "context_length_exceeded"

    turns, closed = run(asked(run_server, steps, {"fault": "overflow"}, protocol=protocol, stream=stream))
    assert turns == [] and closed.overflow


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_cut_answer_is_recorded_whole_and_sent_again(run_server, protocol, stream):
    async def steps(ask):
        with pytest.raises(BROKEN_OFF):
            await ask("hello")
        assert await ask("hello") == WORDS

    turns, _ = run(asked(run_server, steps, {"text": WORDS, "fault": "cut"}, "other", protocol=protocol, stream=stream))
    assert [(t["delivered"], t["finish_reason"], t["text"]) for t in turns] == [(True, "stop", WORDS)]


def test_what_arrived_before_the_cut_is_the_beginning_of_the_answer(run_server):
    async def main():
        line = {"text": WORDS, "fault": "cut"}
        async with run_server(line) as running, running.control.session(SessionRequest("a")) as session:
            async with running.harness(session.key) as http:
                body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
                seen = ""
                with pytest.raises(httpx.RemoteProtocolError):
                    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                        async for data in reply.aiter_lines():
                            if data.startswith("data: {"):
                                seen += json.loads(data[6:])["choices"][0]["delta"].get("content", "")
                assert WORDS.startswith(seen) and 0 < len(seen) < len(WORDS)
            (turn,) = (await session.close()).turns.to_pylist()[0]
        assert (turn["delivered"], turn["text"], turn["stop_token_sampled"]) == (False, WORDS, True)

    run(main())


def test_a_length_stop_samples_no_end_token(run_server):
    async def steps(ask):
        assert await ask("hello") == WORDS

    (turn,), _ = run(asked(run_server, steps, {"text": WORDS, "fault": "length"}))
    assert (turn["finish_reason"], turn["stop_token_sampled"]) == ("length", False)


def test_lines_are_found_by_the_last_message_and_the_system_text(run_server):
    async def steps(ask):
        assert await ask("what is it", "You write titles.") == "A title"
        assert await ask("what is it") == "first"
        assert await ask("what is it not") == "second"
        assert await ask("what is it now") == "second"  # all used: the last fitting one again
        assert await ask("what is it", "You write titles!") == "A title"

    lines = [
        {"match": "what", "system": "^You write titles", "text": "A title"},
        {"match": "^what", "system": "^s$", "text": "first"},
        {"match": "what", "system": "^s$", "text": "second"},
    ]
    assert len(run(asked(run_server, steps, *lines))[0]) == 5


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ({"match": "x"}, "'text'"),
        ({"text": 1}, "'text' must be a string"),
        ({"text": "x", "fault": "fire"}, "unknown fault 'fire'; known: 500"),
        ({"fault": "cut"}, "'text'"),
        ({"text": "", "fault": "length"}, "not empty"),
        ({"text": "x", "mach": "y"}, "unknown key 'mach'"),
        ({"text": "x", "match": "("}, "unterminated"),
        ([], "object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, word):
    path = tmp_path / "script.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n\n" + json.dumps(line))
    with pytest.raises(EngineError, match=r"script\.jsonl:3: not a script line") as wrong:
        read_script(path)
    assert word in str(wrong.value)
