"""lego-train --follow beside a real lego-serve: tokens sampled there are trained, and it goes on serving meanwhile."""

import asyncio
import json
from pathlib import Path

import builders
import httpx

from legorl.checkpoint import open_checkpoint
from legorl.control import Control, SessionRequest

BIN = Path(__file__).parents[2] / "bin"


async def ask(control, llm_dir, attempt, tokens, begun=None):
    """One turn of at most `tokens` tokens in a session of its own; returns what the session recorded.

    `begun` is set once the first token has come.
    """
    transport = httpx.AsyncHTTPTransport(uds=f"{llm_dir}/llm.sock")
    body = {"model": "m", "messages": [{"role": "user", "content": f"say {attempt}"}], "stream": True}
    async with control.session(SessionRequest(attempt, seed=len(attempt), turn_tokens=tokens)) as session:
        headers = {"authorization": f"Bearer {session.key}"}
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://model", headers=headers, timeout=240) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as reply,
        ):
            assert reply.status_code == 200
            last = ""
            async for line in reply.aiter_lines():
                if begun and '"content"' in line:
                    begun.set()
                last = line or last
            assert last == "data: [DONE]"
        return await session.close()


async def sample_round(control, llm_dir, folder, step):
    """A round of two attempts that the engine samples now, one of them rewarded; returns its shard."""
    closed = [await ask(control, llm_dir, f"r{step}.{n}", 12) for n in (0, 1)]
    rows = [
        builders.trajectory(
            "task-a", n, step=step, reward=1.0 - n, turns=c.turns.to_pylist()[0], weights=c.weights,
            tokenizer_digest=c.tokenizer_digest,
        )
        for n, c in enumerate(closed)
    ]  # fmt: skip
    return builders.shard(folder / f"{step}.parquet", rows)


def versions(closed):
    return {span["version"] for turn in closed.turns.to_pylist()[0] for span in turn["versions"]}


def test_new_weights_go_into_the_running_engine(tiny_model, tmp_path):
    async def start(*argv):
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*map(str, argv), stdin=pipe, stdout=pipe, stderr=pipe)

    async def steps(control, socket):
        llm_dir = (await control.health()).llm_dir
        argv = (
            "--follow",
            "--model",
            tiny_model,
            "--out",
            tmp_path / "run",
            "--serve",
            socket,
            "--lr",
            "1e-3",
            "--json",
        )
        trainer = await start(BIN / "lego-train", *argv)
        try:
            trainer.stdin.write(f"{await sample_round(control, llm_dir, tmp_path, 1)}\n".encode())
            first = json.loads(await trainer.stdout.readline())
            health = await control.health()
            assert (health.version, health.digest) == (1, first["digest"]) and first["moved"]
            assert health.weights_path == str(tmp_path / "run/step-0001/checkpoint")
            # A long answer is under way when the next step ends: it stays whole, and is of one version.
            shard, begun = await sample_round(control, llm_dir, tmp_path, 2), asyncio.Event()
            running = asyncio.create_task(ask(control, llm_dir, "long", 300, begun))
            await begun.wait()
            trainer.stdin.write(f"{shard}\n".encode())
            second = json.loads(await trainer.stdout.readline())
            assert (await control.health()).version == second["version"] == 2
            assert versions(await running) == {1}
            assert versions(await ask(control, llm_dir, "new", 4)) == {2}
            out, err = await trainer.communicate(b"")  # which closes its stdin
            assert trainer.returncode == 0 and out == b"" and b"serves version 2 now" in err
        finally:
            if trainer.returncode is None:
                trainer.kill()
        # The engine was lost: the same command finds both steps, and has it serve the newer one only.
        await control.load_weights(tiny_model, 0)
        again = await start(BIN / "lego-train", *argv, tmp_path / "1.parquet", tmp_path / "2.parquet")
        out, err = await again.communicate()
        assert again.returncode == 0 and out.count(b"\n") == 2, err
        assert b"serves version 2" in err and b"serves version 1" not in err
        health = await control.health()
        assert (health.version, health.digest) == (2, open_checkpoint(tmp_path / "run/step-0002/checkpoint").digest)

    async def serving():
        server = await start(BIN / "lego-serve", tiny_model, "--engine", "torch")
        try:
            socket = (await server.stdout.readline()).decode().strip()
            async with Control(socket) as control:
                await steps(control, socket)
        finally:
            server.terminate()
            _, err = await server.communicate()
        assert server.returncode == 0, err

    asyncio.run(asyncio.wait_for(serving(), 400))
