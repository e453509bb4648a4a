"""New weights of a sparse model in a running engine: those of the new folder from the first token on, or refused.

vLLM's CPU build reports success and computes something else when the experts of a sparse model are loaded in place, so
success is no evidence: what the engine samples afterwards is compared with a fresh pass over the right weights.
"""

import asyncio
from pathlib import Path

import pytest
from commands.serve.test_engines import agree, changed
from commands.serve.test_routing import sparse_folder

from legorl.commands.serve.engine import Unsupported
from legorl.commands.serve.torch_engine import TorchEngine
from legorl.commands.serve.vllm_engine import VllmEngine


@pytest.fixture(scope="module")
def folders(real_model, tmp_path_factory) -> tuple[Path, Path]:
    """A sparse model, and one with all weights changed."""
    place = tmp_path_factory.mktemp("models")
    folder = sparse_folder("qwen3_moe", real_model, place / "m", hidden_size=64, head_dim=32, moe_intermediate_size=64)
    return folder, changed(folder, place / "other", 0.3)


async def new_weights_are_right_or_refused(engine, folder: Path, other: Path, tolerance: float) -> bool:
    """Whether `engine`, serving `folder` as version 0, took the weights of `other`. It must be right either way."""
    await agree(engine, folder, "before", 0, tolerance)
    try:
        await engine.load_weights(other, 1)
    except Unsupported:
        await agree(engine, folder, "refused", 0, tolerance)
        return False
    await agree(engine, other, "after", 1, tolerance)
    await engine.load_weights(folder, 2)
    await agree(engine, folder, "back", 2, tolerance)
    return True


def test_the_torch_engine_takes_new_weights_of_a_sparse_model(folders):
    async def play():
        assert await new_weights_are_right_or_refused(TorchEngine(folders[0], 0, None, "float32"), *folders, 1e-4)

    asyncio.run(play())


@pytest.mark.vllm
def test_vllm_is_right_or_refuses(folders):
    async def play():
        wanted = {"context": 256, "sequences": 4, "kv_bytes": 1 << 26, "dtype": "float32", "cores": []}
        engine = await VllmEngine.start(folders[0], 0, **wanted)
        try:
            return await new_weights_are_right_or_refused(engine, *folders, 1e-3)
        finally:
            await engine.close()

    import torch

    taken = asyncio.run(play())
    assert taken == torch.cuda.is_available()  # the CPU build's reload is wrong
