"""The experts of sparse models as engine and session record them: whole, at the right positions, or loudly not."""

import asyncio
import contextlib
import json
import os
import shutil

import numpy as np
import pytest
from conftest import TOKENIZER_FILES
from moe import KINDS, native_experts, tiny_moe

from legorl import routing, tree
from legorl.checkpoint import open_checkpoint
from legorl.commands.serve.cli import Voice, _main, main
from legorl.commands.serve.engine import Delta, Sampling
from legorl.commands.serve.launch import make_llm_dir, serving
from legorl.commands.serve.server import Server
from legorl.commands.serve.torch_engine import TorchEngine
from legorl.control import Control, SessionRequest
from legorl.model import load_model
from legorl.options import Failure


@pytest.fixture(scope="module", params=KINDS)
def folder(request, real_model, tmp_path_factory):
    return sparse_folder(request.param, real_model, tmp_path_factory.mktemp("models") / "m")


def sparse_folder(kind, tokenizer, to, seed=0, **config):
    tiny_moe(kind, to, vocab_size=49152, seed=seed, **config)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, to / name)
    return to


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def sampled(engine, prompt, sampling=None, routing_from=0):
    """(ids, log-probabilities, the routing as it came)."""
    ids, logprobs, pieces = [], [], []
    async for delta in engine.generate("r", prompt, sampling or Sampling(max_tokens=12, seed=1), routing_from):
        ids, logprobs = ids + delta.ids, logprobs + delta.logprobs
        pieces += [delta.routing] if delta.routing else []
    return ids, logprobs, pieces


def recorded(engine, pieces, start, stop):
    experts, valid = routing.unpack(routing.pack(engine.info().routing, range(start, stop), pieces))
    return np.sort(experts, axis=2), valid


PROMPT = list(range(40, 70))


def test_every_input_position_is_recorded_as_a_plain_forward_pass_chooses(folder):
    engine = TorchEngine(folder, 0, None, "float32")
    ids, _, pieces = run(sampled(engine, PROMPT))
    native = native_experts(load_model(folder, "fp32"), PROMPT + ids)
    assert native.shape[1:] == (engine.info().routing.layers, 2) and engine.info().routing.dtype == "uint8"
    experts, valid = recorded(engine, pieces, 0, len(PROMPT) + len(ids))
    assert valid.tolist() == [True] * (len(PROMPT) + len(ids) - 1) + [False]  # the last token was never fed
    assert np.array_equal(experts[valid], native[:-1])
    assert len({tuple(row.ravel()) for row in native}) > 10  # not all alike

    later = run(sampled(engine, PROMPT, routing_from=21))[2]
    assert later[0][0] == 21 and len(later[0][1]) == len(PROMPT) - 21
    assert np.array_equal(recorded(engine, later, 21, len(PROMPT))[0], native[21 : len(PROMPT)])


def test_new_routers_and_experts_route_as_a_fresh_load_does(folder, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(folder, tmp_path / "other")
    random = torch.Generator().manual_seed(7)
    changed = set()
    weights = load_file(other / "model.safetensors")
    for name, value in weights.items():
        if "experts" in name or ".gate." in name or "router" in name:
            weights[name] = value + 0.3 * torch.randn(value.shape, generator=random)
            changed.add(name.split(".")[4])
    assert len(changed) >= 2, sorted(weights)  # routers and experts
    save_file(weights, other / "model.safetensors", {"format": "pt"})

    async def play():
        engine, fresh = (TorchEngine(f, 0, None, "float32") for f in (folder, other))
        before = await sampled(engine, PROMPT)
        await engine.load_weights(other, 1)
        after, wanted = await sampled(engine, PROMPT), await sampled(fresh, PROMPT)
        assert (after[0], after[1]) == (wanted[0], pytest.approx(wanted[1], abs=1e-6))
        one, two = (recorded(engine, pieces, 0, len(PROMPT)) for pieces in (after[2], wanted[2]))
        assert one[1].all() and np.array_equal(one[0], two[0])
        assert not np.array_equal(one[0], recorded(engine, before[2], 0, len(PROMPT))[0])
        await engine.load_weights(folder, 2)
        again = await sampled(engine, PROMPT)
        assert again[0] == before[0] and again[1] == pytest.approx(before[1], abs=1e-6)

    run(play())


def test_a_dense_model_gets_no_hook_and_no_record(tiny_model):
    engine = TorchEngine(tiny_model, 0, None, "float32")
    info = engine.info()
    assert (info.routing, info.unrouted, info.routing_words) == (None, None, "no experts to record")
    seen = []
    for module in engine._model.modules():
        module.register_forward_pre_hook(lambda module, _inputs: seen.append(len(module._forward_hooks)))
    _, _, pieces = run(sampled(engine, PROMPT))
    assert pieces == [] and seen and set(seen) == {0}


def test_off_records_nothing(folder):
    engine = TorchEngine(folder, 0, None, "float32", "off")
    assert engine.info().routing is None and "--routing off" in engine.info().routing_words
    assert run(sampled(engine, PROMPT))[2] == []


# -- sessions ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def session_of(engine, folder, require=False):
    """An open session of a server in this process: (its control side, a client of its harness side)."""
    import httpx

    server = Server(engine, open_checkpoint(folder), make_llm_dir(), [], require)
    async with serving(server, None) as (control, _port), Control(control) as client:
        request = SessionRequest("r.0.h.t.0", turn_tokens=9)
        async with client.session(request) as session:
            transport = httpx.AsyncHTTPTransport(uds=f"{server.llm_dir}/llm.sock")
            headers = {"authorization": f"Bearer {session.key}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://m", headers=headers, timeout=60) as http:
                yield client, session, http


async def chat(http, messages, **options):
    reply = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages, **options})
    return reply.status_code, reply.json()


def user(text):
    return {"role": "user", "content": text}


async def converse(http):
    """A root, its continuation, a rewrite of the beginning, and the same request once more."""
    first = [user("List the files of a folder.")]
    _, reply = await chat(http, first)
    answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    await chat(http, [*first, answer, user("And of another one.")])
    await chat(http, [user("List the files of a city.")])
    await chat(http, first)


def test_a_tree_of_turns_has_a_row_for_every_position_of_every_path(folder):
    async def play():
        engine = TorchEngine(folder, 0, None, "float32")
        async with session_of(engine, folder, require=True) as (client, session, http):
            assert (await client.health()).routing == "recorded"
            await converse(http)
            return (await session.close()).turns.to_pylist()[0]

    turns = run(play())
    nodes, model = tree.nodes_of(turns), load_model(folder, "fp32")
    assert [turn["cause"] for turn in turns] == ["root", "extend", "rewrite", "resample"]
    assert [len(node.context_ids) > 0 for node in nodes] == [True, True, True, False]
    for node, turn in zip(nodes, turns, strict=True):
        record = turn["routing"]
        assert record["rows"] == routing.wanted_rows(turn) == routing.valid_rows(record)
        assert (record["dtype"], len(record["valid"])) == ("uint8", record["rows"])
        path = native_experts(model, tree.path_ids(nodes, node.index))
        got = {}
        while True:
            experts, _ = routing.unpack(turns[node.index]["routing"])
            span = routing.positions(node.prefix_len, node.prompt_len, len(node.completion_ids))
            got = dict(zip(span, np.sort(experts, axis=2), strict=True)) | got
            if node.parent == tree.ROOT:
                break
            node = nodes[node.parent]
        assert len(path) - 1 <= len(got)
        assert all(np.array_equal(got[position], path[position]) for position in range(len(path) - 1))


class Forgetful(TorchEngine):
    """Tells no experts for the positions that a prefix cache without them would have answered."""

    async def generate(self, *arguments):
        async for delta in super().generate(*arguments):
            if delta.routing and len(delta.routing[1]) > 1:
                start, rows = delta.routing
                delta.routing = (start + 5, rows[5:])
            yield delta


def test_positions_without_experts_are_not_valid_and_not_made_up(folder):
    async def play():
        async with session_of(Forgetful(folder, 0, None, "float32"), folder) as (_, session, http):
            status, _ = await chat(http, [user("List the files.")])
            assert status == 200
            return (await session.close()).turns.to_pylist()[0]

    [turn] = run(play())
    experts, valid = routing.unpack(turn["routing"])
    assert valid.tolist() == [False] * 5 + [True] * (len(valid) - 5)
    assert not experts[:5].any()


def test_where_routing_is_required_an_incomplete_turn_ends_the_session(folder):
    async def play():
        async with session_of(Forgetful(folder, 0, None, "float32"), folder, True) as (_, session, http):
            status, reply = await chat(http, [user("List the files.")])
            await asyncio.wait_for(session.changed.wait(), 30)
            while session.state.lost is None:
                session.changed.clear()
                await asyncio.wait_for(session.changed.wait(), 30)
            return status, json.dumps(reply), session.state.lost, (await session.close()).turns.to_pylist()[0]

    status, reply, lost, [turn] = run(play())
    assert status == 500 and "turn 0: the engine told the experts of" in reply and "--routing require" in lost
    assert turn["finish_reason"] == "error" and turn["drops"][0]["reason"] == "cut"


class Impossible(TorchEngine):
    async def generate(self, *arguments):
        async for delta in super().generate(*arguments):
            yield Delta(delta.ids, delta.logprobs, 0, delta.finish, routing=(0, np.full((1, 1, 2), 8)))


def test_experts_that_the_model_does_not_have_end_the_session(folder):
    async def play():
        async with session_of(Impossible(folder, 0, None, "float32"), folder) as (_, session, http):
            status, reply = await chat(http, [user("List the files.")])
            return status, json.dumps(reply), (await session.close()).turns.to_pylist()[0]

    status, reply, [turn] = run(play())
    assert status == 500 and "RoutingError" in reply and turn["routing"] is None


# -- the command -------------------------------------------------------------------------------------------------------


def serve(folder, engine, routing):
    """Run `lego-serve FOLDER -- true` in this process; return its exit code and its words on stderr."""
    options = ["--engine", engine, "--routing", routing, "--cores", "all"]
    wanted = main.make_context("lego-serve", [*options, str(folder)]).params
    ours, theirs = os.pipe()
    code, error = 0, ""
    try:
        code = asyncio.run(_main(open_checkpoint(folder), ["true"], Voice(theirs, theirs, False), wanted))
    except Failure as failure:
        code, error = failure.code, str(failure)
    os.close(theirs)
    with os.fdopen(ours) as said:
        return code, said.read() + error


def test_the_first_line_says_whether_experts_are_recorded(folder, tiny_model):
    layers = 2 if "qwen" in (folder / "config.json").read_text() else 3
    code, words = serve(folder, "torch", "require")
    assert code == 0 and f"on torch, context 1024, experts of {layers} sparse layers recorded, ready in" in words
    code, words = serve(folder, "torch", "off")
    assert code == 0 and "experts not recorded (--routing off), ready in" in words
    code, words = serve(tiny_model, "torch", "auto")
    assert code == 0 and "no experts to record, ready in" in words


def test_required_and_impossible_is_a_failure_at_the_start(tiny_model, folder):
    name = "--routing require: tiny on torch chooses no experts"
    assert serve(tiny_model, "torch", "require") == (1, name)
    reason = "vLLM's CPU build cannot tell which experts were chosen; --engine torch can"
    assert serve(folder, "vllm", "require") == (1, f"vLLM did not start: --routing require: {reason}")
