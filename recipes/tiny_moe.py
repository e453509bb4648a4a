"""The parts of recipes/tiny-moe.mk that no command has: a model from nothing, an expert's script, the table at the end.

.venv/bin/python recipes/tiny_moe.py model FOLDER < tasks.list   # random weights, a tokenizer of the tasks' words
.venv/bin/python recipes/tiny_moe.py script < tasks.list         # the known solutions, for lego-serve --engine script
.venv/bin/python recipes/tiny_moe.py report RUN/float32 ...      # what replay did; exit code 4 if a bound is missed
"""

import json
import os
import re
import sys
from pathlib import Path

from legorl import schema
from legorl.shards import open_shard
from legorl.task import load_task

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ 'assistant' if message['role'] == 'assistant' else 'user' }}|>"
    "{{ message['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FLIPPED = 200  # tokens with a flipped route on their path that the figures must rest on


def model(folder: Path, tasks: list[Path]) -> None:
    """Make a Qwen3-MoE of 3.5 million random weights and a tokenizer trained on the tasks; print the folder.

    One expert of 16 a token in each of 4 layers: where two are all but tied, the choice changes the whole of what the
    layer adds. Its weight is its share of the softmax, or no gradient would reach the router. Weights are drawn
    wide enough for this width (0.02 is meant for one of thousands): a few minutes of training then suffice.
    """
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    texts = [text for task in map(load_task, tasks) for text in (task.instruction, task.labels["solution_command"])]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    words.train_from_iterator([*texts, "DONE", "exit 0"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), tie_word_embeddings=True, max_position_embeddings=1024,
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=16, num_experts_per_tok=1, norm_topk_prob=False, moe_intermediate_size=128, initializer_range=0.08,
        bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    print(folder)


def script(tasks: list[Path]) -> None:
    """Print what the expert answers: to a task its known solution, to the result that it is done."""
    print(json.dumps({"match": "^exit [0-9]+", "text": "DONE"}))
    for task in map(load_task, tasks):
        match = "^" + re.escape(task.instruction.strip()) + r"\s*$"
        print(json.dumps({"match": match, "text": task.labels["solution_command"]}))


def report(folders: list[Path]) -> int:
    """Print the trainer's distance from each sampler, without and with replay; return 4 if replay does too little."""
    names = ("tokens", "pearson", "mean", "p99", "max", "flipped", "p99", "max")
    print("sampler    experts     " + "".join(f"{name:>10}" for name in names))
    missed = []
    for folder in folders:
        own, replay = (figures_of(folder / name) for name in ("no-replay", "replay"))
        for title, found in (("trainer's", own), ("recorded", replay)):
            print(f"{folder.name:<11}{title:<12}" + "".join(f"{value:>10}" for value in shown(found)))
        missed += [f"{folder.name}: {text}" for text in misses(own, replay)]
    print("\nmean, p99, max: |Δ log p| of trainer and sampler; flipped: tokens with a flipped route on their path")
    for text in missed:
        print(f"missed: {text}")
    return 4 if missed else 0


def figures_of(checkpoint: Path) -> dict[str, float]:
    rows = open_shard(checkpoint / "metrics.parquet", schema.METRIC_FORMAT).rows()
    return {row["name"]: row["value"] for row in rows}


def shown(found: dict[str, float]) -> list[str]:
    """The cells of one line of the table."""
    gap = "logprob_abs_diff"
    cells = [f"{found['align/tokens']:.0f}", f"{found['align/pearson']:.6f}"]
    cells += [f"{found[f'align/{gap}_{name}']:.4f}" for name in ("mean", "p99", "max")]
    flips = found.get("align/flipped=true/tokens", 0.0)
    return [*cells, f"{flips:.0f}", *(f"{found.get(f'align/flipped=true/{gap}_{n}', 0.0):.4f}" for n in ("p99", "max"))]


def misses(own: dict[str, float], replay: dict[str, float]) -> list[str]:
    """What of the bounds on replay does not hold. `own`: the figures without it."""
    worst, high = "align/logprob_abs_diff_max", "align/flipped=true/logprob_abs_diff_p99"
    flips = min(found.get("align/flipped=true/tokens", 0.0) for found in (own, replay))
    if flips < FLIPPED:
        return [f"{flips:.0f} tokens have a flipped route on their path, {FLIPPED} are wanted"]
    told = []
    if not replay["align/pearson"] >= 0.999:
        told.append(f"the correlation is {replay['align/pearson']:.6f} with replay, 0.999 is wanted")
    if not replay["align/pearson"] > own["align/pearson"]:
        told.append(
            f"the correlation is {replay['align/pearson']:.6f} with replay, {own['align/pearson']:.6f} without it"
        )
    for name, key, least in (("the largest |Δ log p|", worst, 3.0), ("p99 of flipped tokens", high, 2.0)):
        if not own[key] >= least * replay[key]:
            told.append(f"{name} is {own[key] / replay[key]:.2f} times lower with replay, {least:g} times is wanted")
    return told


def main() -> int:
    what, *arguments = sys.argv[1:]
    if what == "report":
        return report([Path(argument) for argument in arguments])
    tasks = [Path(line.strip()) for line in sys.stdin]
    if what == "model":
        model(Path(arguments[0]), tasks)
    else:
        script(tasks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
