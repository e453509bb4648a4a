"""What tests/bench/gpu.sh runs: a training step and the server on one device, checked and timed, as a table.

step    tree packing beside linear packing: log-probabilities, gradients, tokens a second, peak memory
dense, moe
        lego-serve records turns; lego-train takes a step on them and loads the new weights into the running engine;
        what that samples then must be what the new checkpoint gives (lego-inspect verify), and must not be what the
        old one does. For moe, with the experts that the engine recorded replayed in the trainer, and without.

DEVICE, MODEL, ENGINE, DTYPE, JSON in the environment: see gpu.sh. The models are random unless MODEL is given, so the
figures of moe say that things fit together, not how much replay helps; recipes/tiny-moe.mk trains one for that.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import builders

from legorl.shards import open_shard

ROOT = Path(__file__).parents[2]
CUDA = os.environ.get("DEVICE", "cuda") == "cuda"
ENGINE = os.environ.get("ENGINE", "vllm" if CUDA else "torch")
DTYPE = os.environ.get("DTYPE", "bf16" if CUDA else "fp32")
WIDTH, LAYERS, LENGTH, SESSIONS, ANSWER = (1024, 12, 2048, 64, 256) if CUDA else (64, 2, 64, 2, 8)
SHARE = "0.35"  # of the GPU's memory for the engine; the trainer is beside it
# Largest that is right: of a gradient, in units of its largest value; of a log-probability; of the mean of those.
LIMITS = {
    "bf16": {"gradient": 0.05, "logprob": 0.5, "mean": 0.1}, "fp32": {"gradient": 1e-4, "logprob": 1e-3, "mean": 1e-4},
}[DTYPE]  # fmt: skip
LR = "1e-2"  # far too much to learn by: new weights must differ from the old ones by more than bf16 rounds

Figures = dict[str, Any]


def make_model(folder: Path, sparse: bool) -> Path:
    """A random Qwen3, or Qwen3-MoE, whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    words = ["<|end|>", "<|user|>", "<|assistant|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0], pad_token=words[0])
    fast.chat_template = (
        "{% for message in messages %}<|{{ 'assistant' if message['role'] == 'assistant' else 'user' }}|>"
        "{{ message['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    common: dict[str, Any] = {
        "vocab_size": len(words), "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": WIDTH // 32, "num_key_value_heads": WIDTH // 64, "head_dim": 32, "eos_token_id": 0,
        "max_position_embeddings": 4096, "initializer_range": 0.08, "bos_token_id": None, "pad_token_id": 0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    if sparse:
        own = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH // 2, "norm_topk_prob": True}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **own)).save_pretrained(folder)
    else:
        Qwen3ForCausalLM(Qwen3Config(**common)).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def step_part(folder: Path) -> Figures:
    """A step on eight rows that share three quarters of their tokens, packed either way."""
    import numpy as np
    import torch

    from legorl.checkpoint import open_checkpoint
    from legorl.commands.train.batch import make_batch
    from legorl.commands.train.settings import resolve
    from legorl.commands.train.step import Trainer
    from legorl.commands.train.train import facts_of
    from legorl.model import load_model

    rng, checkpoint = np.random.default_rng(0), open_checkpoint(folder)
    shared = rng.integers(3, 250, LENGTH * 3 // 4).tolist()
    weights = [{"version": 0, "digest": checkpoint.digest, "path": str(folder)}]
    rows = []
    for n in range(8):
        own = rng.integers(3, 250, LENGTH // 4).tolist()
        one = builders.turn(context_ids=shared, completion_ids=own, logprobs=[-5.0] * len(own))
        rows.append(builders.trajectory("t", n, turns=[one], reward=float(n % 2), weights=weights))
    for row in rows:
        row["tokenizer_digest"] = None
    found: Figures = {}
    kept = {}
    for packing in ("rows", "trees"):
        settings = resolve(packing=packing, dtype=DTYPE, tokens_per_batch=8 * LENGTH, gate={}, off_policy="bypass")
        trainer = Trainer(settings, load_model(folder, "fp32"))
        batch = make_batch(rows, facts_of(checkpoint), 0)
        for _ in range(3):  # the last counts
            trainer.model.zero_grad(set_to_none=True)
            if CUDA:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            trainer.backward(batch, batch.samples, batch.tokens.old)
            if CUDA:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
        found[f"{packing}: tokens a second"] = 8 * LENGTH / seconds  # of the rows, however often they are read
        if CUDA:
            found[f"{packing}: peak memory, GB"] = torch.cuda.max_memory_allocated() / 1e9
        kept[packing] = batch.tokens.train.copy(), {n: p.grad.cpu() for n, p in trainer.model.named_parameters()}
    gaps = [
        float((kept["trees"][1][name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        for name, wanted in kept["rows"][1].items()
    ]
    found["trees over rows"] = found["trees: tokens a second"] / found["rows: tokens a second"]
    found["log-probabilities, largest gap"] = float(np.abs(kept["trees"][0] - kept["rows"][0]).max())
    found["gradients, largest gap"] = max(gaps)
    found["ok"] = max(gaps) <= LIMITS["gradient"] and found["log-probabilities, largest gap"] <= LIMITS["logprob"]
    return found


def serve_part(folder: Path, work: Path) -> Figures:
    """Serve, train, load, serve again; `drive` is what runs beside the server."""
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[DTYPE]
    argv = [ROOT / "bin/lego-serve", folder, "--engine", ENGINE, "--dtype", dtype, "--context", "2048"]
    argv += ["--engine-arg", f"gpu_memory_utilization={SHARE}"] if ENGINE == "vllm" and CUDA else []
    work.mkdir()
    subprocess.run([*map(str, argv), "--", sys.executable, __file__, "drive", str(folder), str(work)], check=True)
    return json.loads((work / "figures.json").read_text())


async def sample(work: Path, name: str) -> tuple[Path, float]:
    """A shard of SESSIONS conversations of two turns with the running server, and its tokens a second."""
    import httpx

    from legorl.control import Control, SessionRequest

    async with (
        Control(os.environ["LEGORL_SERVE"]) as control,
        httpx.AsyncClient(base_url=os.environ["OPENAI_BASE_URL"] + "/", timeout=600) as client,
    ):

        async def converse(n: int) -> dict[str, Any]:
            ident = f"r1.0.mini-swe-agent.{name}.{n}"
            async with control.session(SessionRequest(ident, seed=n, turn_tokens=ANSWER)) as session:
                said: list[dict[str, str]] = []
                for words in ("Count the files here.", "And now the folders."):
                    said.append({"role": "user", "content": words})
                    reply = await client.post(
                        "chat/completions", json={"model": "m", "messages": said},
                        headers={"Authorization": f"Bearer {session.key}"},
                    )  # fmt: skip
                    reply.raise_for_status()
                    said.append(
                        {"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"] or ""}
                    )
                closed = await session.close()
            return builders.trajectory(
                name, n, reward=float(n % 2), turns=closed.turns.to_pylist()[0], weights=closed.weights,
                tokenizer_digest=closed.tokenizer_digest,
            )  # fmt: skip

        begun = time.perf_counter()
        rows = await asyncio.gather(*map(converse, range(SESSIONS)))
        tokens = sum(len(one["completion_ids"]) for row in rows for one in row["turns"])
        speed = tokens / (time.perf_counter() - begun)
    return builders.shard(work / f"{name}.parquet", rows), speed


def mean_gap(shard: Path, model: Path) -> float:
    """The mean of |Δ log p| that lego-inspect verify finds."""
    command = [Path(sys.executable).with_name("lego-inspect"), "verify", shard, "--model", model, "--json"]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[0])["logprob_abs_diff_mean"]


def drive(folder: Path, work: Path) -> None:
    first, speed = asyncio.run(sample(work, "first"))
    found: Figures = {"serve: tokens a second": speed}

    def train(out: str, *options: str) -> Figures:
        argv = [sys.executable, "-m", "legorl.commands.train.cli", first, "--model", folder, "--out", work / out]
        argv += ["--dtype", DTYPE, "--lr", LR, "--gate", "none", "--json", *options]
        done = subprocess.run([*map(str, argv)], stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)["figures"]

    runs = {"": train("step-1", "--serve", os.environ["LEGORL_SERVE"])}
    if "routing/replayed" in runs[""]:
        found["routing replayed"] = runs[""]["routing/replayed"]
        runs["without replay: "] = train("native", "--no-replay")
    for name, figures in runs.items():
        for key in ("pearson", "logprob_abs_diff_mean", "logprob_abs_diff_p99", "logprob_abs_diff_max"):
            found[f"{name}{key}"] = figures.get(f"align/{key}")
    found["train: tokens a second"] = runs[""]["time/read_tokens_per_s"]
    found["train: peak memory, GB"] = runs[""].get("memory/cuda_peak_mb", runs[""]["memory/peak_mb"]) / 1e3
    second, _ = asyncio.run(sample(work, "second"))
    old = open_shard(first).rows()[0]["weights"]
    rows = open_shard(second).rows()
    for row in rows:  # as if the engine had gone on with the old weights
        row["weights"] = old
        for one in row["turns"]:
            one["versions"] = [{"start": 0, "length": len(one["completion_ids"]), "version": 0}]
    claimed = builders.shard(work / "claimed.parquet", rows)
    found |= {
        "mean gap, new weights": mean_gap(second, work / "step-1"),
        "mean gap, old ones": mean_gap(claimed, folder),
    }
    found["new weights are served"] = found["mean gap, new weights"] <= LIMITS["mean"] < found["mean gap, old ones"]
    found["ok"] = found["new weights are served"] and found["logprob_abs_diff_p99"] <= LIMITS["logprob"]
    (work / "figures.json").write_text(json.dumps(found))


def main() -> int:
    parts: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        dense = Path(os.environ["MODEL"]) if "MODEL" in os.environ else make_model(work / "model", sparse=False)
        parts["step"] = _apart(dense)
        parts["dense"] = serve_part(dense, work / "dense")
        parts["moe"] = serve_part(make_model(work / "moe-model", sparse=True), work / "moe")
    for part, figures in parts.items():
        for name, value in figures.items():
            print(f"{part:<6} {name:<40} {value:.6g}" if isinstance(value, float) else f"{part:<6} {name:<40} {value}")
    if "JSON" in os.environ:
        Path(os.environ["JSON"]).write_text(json.dumps({"device": os.environ.get("DEVICE", "cuda"), **parts}, indent=1))
    return 0 if all(figures["ok"] for figures in parts.values()) else 4


def _apart(folder: Path) -> Figures:
    """step_part in a process of its own, which gives the device's memory back."""
    done = subprocess.run(
        [sys.executable, __file__, "step", str(folder)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        print(json.dumps(step_part(Path(sys.argv[2]))))
    elif sys.argv[1:2] == ["drive"]:
        drive(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())
