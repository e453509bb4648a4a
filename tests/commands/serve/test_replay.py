"""A recorded attempt sampled again: the same tree to the last bit, and clear words where the harness leaves it."""

import asyncio
import contextlib
import json
from pathlib import Path

import builders
import httpx
import pytest

from legorl import tree
from legorl.checkpoint import open_checkpoint
from legorl.commands.serve.cli import main
from legorl.commands.serve.engine import EngineError
from legorl.commands.serve.launch import make_llm_dir, serving
from legorl.commands.serve.replay_engine import ReplayEngine, read_record
from legorl.commands.serve.server import Server
from legorl.commands.serve.torch_engine import TorchEngine
from legorl.control import Control, ServeError, SessionRequest
from legorl.shards import open_shard

# What no two runs have in common.
VARYING = ("request_id", "request_digest", "started_at", "queue_s", "prefill_s", "decode_s")
ATTEMPT = "r1.0.mini-swe-agent.task-a.0"
REQUEST = SessionRequest(ATTEMPT, seed=3, temperature=0.8, turn_tokens=8)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def say(text: str) -> dict:
    return {"role": "user", "content": text}


async def ask(http: httpx.AsyncClient, messages: list, **body) -> dict:
    reply = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages, **body})
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]


async def harness(http: httpx.AsyncClient, observation: str = "rc 0") -> None:
    """Echoes, rejects an answer, drops one, asks two things at once, and lets an answer end early."""
    first = await ask(http, [say("list")])
    second = await ask(http, [say("list"), first, say(observation)])
    second = await ask(http, [say("list"), first, say(observation)])
    await ask(http, [say("list"), first, say(observation), second, say("go on")], max_tokens=3)
    await ask(http, [say("list"), say("format error")], stop=["e"])
    await asyncio.gather(*[ask(http, [{"role": "system", "content": "s"}, say(text)]) for text in ("one", "two")])


@contextlib.asynccontextmanager
async def session(engine, model, request):
    """Yield (HTTP client, session of the control client, turns once closed)."""
    server = Server(engine, open_checkpoint(model), make_llm_dir(), [])
    transport = httpx.AsyncHTTPTransport(uds=f"{server.llm_dir}/llm.sock")
    async with (
        serving(server, None) as (control, _port),
        Control(control) as client,
        client.session(request) as opened,
        httpx.AsyncClient(transport=transport, base_url="http://model", timeout=60) as http,
    ):
        http.headers["authorization"] = f"Bearer {opened.key}"
        yield http, opened


async def played(engine, model, request=REQUEST, **changes):
    """Let the harness play; return (turns, what the closed session says)."""
    async with session(engine, model, request) as (http, opened):
        await harness(http, **changes)
        closed = await opened.close()
    turns = closed.turns.to_pylist()[0]
    tree.check(turns)
    return turns, closed


def comparable(turns: list[dict]) -> list[dict]:
    return [{k: v for k, v in turn.items() if k not in VARYING} for turn in turns]


@pytest.fixture(scope="module")
def sampled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of one attempt that a real model sampled, with a sibling whose turns nobody asks for."""

    async def record():
        return await played(TorchEngine(tiny_model, 0, None, "float32"), tiny_model)

    turns, closed = run(record())
    assert [t["cause"] for t in turns][:5] == ["root", "extend", "resample", "extend", "rewrite"]
    facts = {"weights": closed.weights, "tokenizer_digest": closed.tokenizer_digest}
    rows = [builders.trajectory("task-a", 0, turns=turns, **facts), builders.trajectory("task-a", 1, **facts)]
    return builders.shard(tmp_path_factory.mktemp("shard") / "a.parquet", rows)


def replay(shard: Path, model: Path) -> ReplayEngine:
    held = open_checkpoint(model)
    return ReplayEngine(held.folder, 0, read_record(shard, held.tokenizer_digest), None)


def recorded(shard: Path) -> list[dict]:
    return open_shard(shard).rows()[0]["turns"]


def test_a_sampled_attempt_is_repeated_to_the_last_bit(sampled, tiny_model):
    engine = replay(sampled, tiny_model)
    turns, closed = run(played(engine, tiny_model))
    assert comparable(turns) == comparable(recorded(sampled))
    assert {t["support"] for t in turns} == {"full"} and any(p < -1 for t in turns for p in t["logprobs"])
    assert [w["path"] for w in closed.weights] == [str(tiny_model)]
    assert engine.words() == "7 of 7 recorded turns replayed, in 1 sessions"


def test_the_attempt_of_another_run_is_known_by_its_task_and_number(sampled, tiny_model):
    engine = replay(sampled, tiny_model)
    other = SessionRequest("again.v2.7.mini-swe-agent.task-a.0", temperature=0.8, turn_tokens=8)
    turns, _ = run(played(engine, tiny_model, other))
    assert [t["completion_ids"] for t in turns] == [t["completion_ids"] for t in recorded(sampled)]


def test_other_observations_change_the_tokens_and_not_the_shape(sampled, tiny_model):
    engine = replay(sampled, tiny_model)
    turns, _ = run(played(engine, tiny_model, observation="rc 0, after 0.3 s"))
    before = recorded(sampled)
    assert [(t["parent"], t["cause"]) for t in turns] == [(t["parent"], t["cause"]) for t in before]
    assert [t["completion_ids"] for t in turns] == [t["completion_ids"] for t in before]
    assert turns[1]["context_ids"] != before[1]["context_ids"]
    assert engine.words().endswith(f"; 3 to other prompts than in the record (first: {ATTEMPT}, turn 1)")


async def refused(engine, model, request, *messages) -> str:
    """Ask; return why the session was lost."""
    async with session(engine, model, request) as (http, opened):
        for conversation in messages:
            reply = await http.post("/v1/chat/completions", json={"messages": conversation})
        assert reply.status_code == 500
        while opened.state.lost is None:
            opened.changed.clear()
            await opened.changed.wait()
        assert (await opened.close()).lost == opened.state.lost  # told again at the end: an event may come too late
        return opened.state.lost


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (SessionRequest("r1.0.pi.task-b.0"), "which recorded attempt is r1.0.pi.task-b.0 to replay? The record holds"),
        (SessionRequest(ATTEMPT, temperature=1.0), f"{ATTEMPT}, turn 0: was sampled at temperature 0.8"),
        (SessionRequest(ATTEMPT, temperature=0.8, turn_tokens=2), "leave room for 2"),
    ],
)
def test_what_cannot_be_replayed_says_why(sampled, tiny_model, request_, words):
    assert words in run(refused(replay(sampled, tiny_model), tiny_model, request_, [say("list")]))


def test_weights_are_refused_and_the_replay_goes_on(sampled, tiny_model):
    async def main():
        server = Server(replay(sampled, tiny_model), open_checkpoint(tiny_model), make_llm_dir(), [])
        async with serving(server, None) as (control, _port), Control(control) as client:
            with pytest.raises(ServeError, match="a replay has no weights to load"):
                await client.load_weights(tiny_model, 1)
        assert server.failed is None and server.version == 0

    run(main())


def test_a_harness_that_goes_another_way_is_told_where(sampled, tiny_model):
    conversation = [say("list"), {"role": "assistant", "content": "never said"}, say("go on")]
    lost = run(refused(replay(sampled, tiny_model), tiny_model, REQUEST, *[[say("list")]] * 3, conversation))
    assert f"{ATTEMPT}, turn " in lost and "goes another way than in the record" in lost


@pytest.mark.parametrize("outcome", ["context_overflow", "finished"])
def test_a_prompt_beyond_the_record_does_not_fit_if_the_record_ended_so(outcome, sampled, tiny_model, tmp_path):
    facts = {k: v for k, v in open_shard(sampled).rows()[0].items() if k in ("turns", "weights", "tokenizer_digest")}
    ended = builders.shard(tmp_path / "ended.parquet", [builders.trajectory("task-a", 0, outcome=outcome, **facts)])

    async def go():
        async with session(replay(ended, tiny_model), tiny_model, REQUEST) as (http, opened):
            await harness(http)
            reply = await http.post("/v1/chat/completions", json={"messages": [say("what was not recorded")]})
            return reply, await opened.close()

    reply, closed = run(go())
    assert reply.status_code == (400 if outcome == "context_overflow" else 500)
    assert closed.overflow == (outcome == "context_overflow") == (closed.lost is None)


def test_a_turn_that_ended_badly_is_repeated_up_to_there(tmp_path, tiny_model):
    held = open_checkpoint(tiny_model)
    broken = builders.turn(finish_reason="error", temperature=0.8)
    row = builders.trajectory(turns=[broken], tokenizer_digest=held.tokenizer_digest)
    shard = builders.shard(tmp_path / "b.parquet", [row])
    lost = run(refused(replay(shard, tiny_model), tiny_model, SessionRequest("any", temperature=0.8), [say("x")]))
    assert "ended badly when it was recorded too" in lost


def test_a_record_of_another_tokenizer_or_of_two_weights_is_refused(tmp_path, sampled):
    with pytest.raises(EngineError, match="another tokenizer"):
        read_record(sampled, "other")
    weights = [[{"version": 0, "digest": d, "path": "p"}] for d in "ab"]
    rows = [builders.trajectory("a", k, weights=w) for k, w in enumerate(weights)]
    shard = builders.shard(tmp_path / "c.parquet", rows)
    with pytest.raises(EngineError, match="two weights of version 0"):
        read_record(shard, rows[0]["tokenizer_digest"])


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--replay", "x"], 2, "no other engine takes them"),
        (["--engine", "script", "--replay", "x", "--script", "y"], 2, "exclude each other"),
        (["--engine", "script", "--replay", "none.parquet", "--", "true"], 1, "none.parquet: no such file"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, code, line, tiny_model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main.main([str(tiny_model), *arguments])
    assert stop.value.code == code and line in capfd.readouterr().err


def test_explain_names_the_record(tiny_model, capsys):
    with pytest.raises(SystemExit):
        main.main([str(tiny_model), "--engine", "script", "--replay", "x", "--explain"])
    assert json.loads(capsys.readouterr().out)["replay"] == "x"
