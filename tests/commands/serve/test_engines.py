"""The real engines: recorded log-probabilities against teacher forcing, weights replaced, requests aborted."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from legorl.commands.serve.engine import ContextOverflow, EngineError, Sampling
from legorl.commands.serve.torch_engine import TorchEngine
from legorl.commands.serve.vllm_engine import STEP_TOKENS, VllmEngine
from legorl.model import load_model, target_logprobs

PROMPTS = ["The fox", "List the files of a folder that ends in", "1 2 3 4"]


def changed(folder: Path, to: Path, spread: float) -> Path:
    """A copy of the model with every weight, embeddings and norms too, scaled by a random factor around one."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    random = torch.Generator().manual_seed(0)
    weights = {
        name: value.float() * (1 + spread * torch.randn(value.shape, generator=random))
        for name, value in load_file(to / "model.safetensors").items()
    }
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def forced(model, prompt: list[int], ids: list[int], temperature: float) -> np.ndarray:
    """Teacher-forced log-probabilities of `ids` after `prompt`, float64."""
    import torch

    whole = torch.tensor([prompt + ids])
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
    with torch.no_grad():
        values = target_logprobs(
            model,
            whole,
            torch.zeros_like(positions),
            positions,
            torch.tensor(ids),
            torch.full((len(ids),), temperature),
        )
    return values.double().numpy()


async def sample(engine, name: str, prompt: list[int], sampling: Sampling):
    ids, logprobs, versions, finish, cached = [], [], [], None, None
    async for delta in engine.generate(name, prompt, sampling):
        ids += delta.ids
        logprobs += delta.logprobs
        versions += [delta.version] * len(delta.ids)
        finish, cached = delta.finish, cached if cached is not None else delta.cached_tokens
    return ids, np.array(logprobs), versions, finish, cached


async def agree(engine, folder: Path, tag: str, version: int, tolerance: float) -> None:
    """Sample a mixed batch; its log-probabilities must be those of the weights in `folder`."""
    model = load_model(folder, "fp32")
    prompts = [engine.tokenizer(p)["input_ids"] * 3 for p in PROMPTS]
    temperatures = [1.0, 0.7, 1.3]
    jobs = [
        sample(engine, f"{tag}/{k}", p, Sampling(t, 1.0, 12, seed=k))
        for k, (p, t) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    for prompt, temperature, (ids, got, versions, finish, _) in zip(
        prompts, temperatures, await asyncio.gather(*jobs), strict=True
    ):
        assert finish in ("length", "stop") and len(ids) == len(got) and set(versions) == {version}
        assert np.abs(forced(model, prompt, ids, temperature) - got).max() < tolerance


def test_torch_engine_records_what_teacher_forcing_gives(tiny_model, tmp_path):
    other = changed(tiny_model, tmp_path / "other", 0.2)

    async def main():
        engine = TorchEngine(tiny_model, 0, None, "float32")
        await agree(engine, tiny_model, "a", 0, 1e-4)
        await engine.load_weights(other, 7)
        await agree(engine, other, "b", 7, 1e-4)
        ids, logprobs, *_ = await sample(engine, "c", [5, 6], Sampling(1.0, 0.5, 8, seed=3))
        narrowed = forced(load_model(other, "fp32"), [5, 6], ids, 1.0)
        assert (logprobs >= narrowed - 1e-4).all() and (
            logprobs > narrowed + 0.01
        ).any()  # renormalised over the nucleus

    asyncio.run(main())


@pytest.fixture(scope="module")
def with_vllm(real_model) -> AsyncIterator[Callable]:
    """Run coroutines against one vLLM engine: it takes half a minute to start."""
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(
        _start(VllmEngine.start(real_model, 0, context=512, sequences=8, kv_bytes=1 << 28, dtype="float32", cores=[]))
    )
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine(engine), 300))
    loop.run_until_complete(engine.close())
    loop.close()


async def _start(starting):
    return await starting


@pytest.mark.vllm
def test_vllm_records_what_teacher_forcing_gives_before_and_after_new_weights(with_vllm, real_model, tmp_path):
    other = changed(real_model, tmp_path / "other", 0.05)

    async def main(engine):
        await agree(engine, real_model, "a", 0, 1e-3)
        await engine.load_weights(other, 1)
        # The same prompts: a stale prefix cache would answer with the old weights' keys and values.
        await agree(engine, other, "b", 1, 1e-3)
        await engine.load_weights(real_model, 2)
        await agree(engine, real_model, "c", 2, 1e-3)

    with_vllm(main)


@pytest.mark.vllm
def test_vllm_streams_aborts_stops_and_reuses_prefixes(with_vllm):
    async def main(engine):
        prompt = engine.tokenizer("Paris is the capital of France. " * 12)["input_ids"]
        seen = []
        async for delta in engine.generate("long", prompt, Sampling(1.0, 1.0, 300, seed=1)):
            seen += delta.ids
            if len(seen) == 3:
                await engine.abort("long")
            finish = delta.finish
        assert finish == "abort" and len(seen) < 300
        *_, cached = await sample(engine, "again", prompt, Sampling(1.0, 1.0, 2, seed=1))
        assert cached and cached % 32 == 0
        ids, *_, finish, _ = await sample(engine, "stop", prompt, Sampling(0.0, 1.0, 40, stop=("Paris",), seed=1))
        assert finish == "stop" and "Paris" in engine.tokenizer.decode(ids)
        with pytest.raises(ContextOverflow):
            await sample(engine, "big", [5] * 512, Sampling())
        ids, *_, finish, _ = await sample(engine, "edge", [5] * 510, Sampling(1.0, 1.0, 99, seed=1))
        assert len(ids) <= 2 and finish in ("length", "stop")

    with_vllm(main)


@pytest.mark.vllm
def test_vllm_reads_more_prompts_at_once_than_fit_one_step(with_vllm):
    async def main(engine):
        prompts = [[100 * k + n for n in range(400)] for k in range(7)]
        assert sum(map(len, prompts)) > STEP_TOKENS
        jobs = [sample(engine, f"many/{k}", p, Sampling(1.0, 1.0, 2, seed=k)) for k, p in enumerate(prompts)]
        for ids, _, _, finish, _ in await asyncio.gather(*jobs):
            assert ids and finish in ("length", "stop")

    with_vllm(main)


@pytest.mark.vllm
def test_vllm_that_fails_tells_everyone(with_vllm):
    """The last test of this engine: it does not survive."""

    async def main(engine):
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            async for _delta in engine.generate("running", [5, 6, 7], Sampling(1.0, 1.0, 300, seed=1)):
                engine._commands.put(lambda: 1 // 0)
        assert "ZeroDivisionError" in engine.failure
        with pytest.raises(EngineError):
            await sample(engine, "later", [5, 6, 7], Sampling())

    with_vllm(main)


@pytest.mark.vllm
def test_vllm_that_cannot_start_says_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(EngineError, match="vLLM did not start"):
        asyncio.run(
            _start(VllmEngine.start(tmp_path, 0, context=64, sequences=1, kv_bytes=1 << 27, dtype="float32", cores=[]))
        )
