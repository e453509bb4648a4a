"""How fast a training step is, as ratios within one run: `make bench-train`, or `tests/bench/train.py [PART ...]`.

trl     tokens a second of loss and gradient beside TRL's GRPO trainer's own: the same model, dtype and token rows; TRL
        takes all in one micro-batch, lego-train has a budget that would hold them; rows of equal length, and ragged.
memory  the peak of such a step on ragged rows above weights and gradients, each in a process of its own: TRL's eight
        rows a micro-batch beside lego-train's 2048 tokens, its default, and beside a budget that would hold all.
trees   tree packing beside linear packing: eight rows that share 75 % and 86 % of their tokens, and an attempt of 50
        turns with compactions beside one row a turn.
length  seconds against distinct tokens, 4k to 64k in one pack. PLOT=FILE draws them.

MODEL (a folder), ROUNDS and DTYPE in the environment change those. JSON on stdout, medians over rounds that alternate;
words on stderr. Exit 4 where a bound does not hold. Padding is no token; a token that is read twice counts once.
"""

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from train_rows import Row, batch_of, compacted, ragged, sharing
from trl_step import TrlStep

from legorl import paths
from legorl.commands.train.pack import Sample
from legorl.commands.train.settings import resolve
from legorl.commands.train.step import Trainer
from legorl.model import load_model

MODEL = Path(os.environ.get("MODEL", paths.cache_dir() / "models" / "SmolLM2-135M-Instruct"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
ROWS, LONGEST = 8, 256
DTYPE = os.environ.get("DTYPE", "fp32")
BOUNDS = {
    "ragged_to_trl": 1.3, "equal_to_trl": 0.95, "memory_to_trl": 0.5, "sharing_75": 1.9, "sharing_86": 2.6,
    "turns_50": 8.0, "of_ideal": 0.65, "seconds_per_token_64k_to_4k": 1.25,
}  # fmt: skip
AT_MOST = ("memory_to_trl", "seconds_per_token_64k_to_4k")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Step:
    """Loss and gradient of a step as lego-train takes it, over `rows`, in micro-batches of `budget` tokens."""

    def __init__(self, folder: Path, rows: Sequence[Row], packing: str, budget: int, one: bool = False):
        self.settings = resolve(packing=packing, tokens_per_batch=budget, dtype=DTYPE, gate={})
        self.trainer = Trainer(self.settings, load_model(folder, "fp32"))
        self.batch = batch_of(rows, self.trainer.model.config.vocab_size, one)
        self.samples: list[Sample] = self.batch.samples
        self.read = sum(micro.tokens for micro in self.trainer.pack(self.samples, budget))

    def __call__(self) -> None:
        self.trainer.backward(self.batch, self.samples, self.batch.tokens.old)
        self.trainer.model.zero_grad(set_to_none=False)


def alternate(steps: dict[str, Callable[[], None]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each step, round by round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - begun)
        say(f"round {number}/{rounds}: " + ", ".join(f"{n} {s[-1]:.2f} s" for n, s in seconds.items() if s))
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """Median over rounds of how many times `fast` is as fast as `slow`."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


# -- trl ---------------------------------------------------------------------------------------------------------------


def trl() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with small_moe() as moe:
        for name, folder in ((MODEL.name, MODEL), ("tiny-moe", moe)):
            for shape, padding in (("equal", 0.0), ("ragged", 0.4)):
                rows = ragged(ROWS, LONGEST, padding)
                ours = Step(folder, rows, "rows", ROWS * LONGEST)
                theirs = TrlStep(folder, rows, DTYPE)
                say(f"{name}, {shape}: {ours.read} tokens")
                seconds = alternate({"trl": theirs, "ours": ours})
                found[f"{name}_{shape}"] = {
                    f"{shape}_to_trl": ratio(seconds, "trl", "ours"),
                    "tokens": ours.read,
                    "padding_of_trl": theirs.padding,
                    "tokens_per_s": ours.read / statistics.median(seconds["ours"]),
                    "seconds": seconds,
                }
    return found


@contextmanager
def small_moe() -> Iterator[Path]:
    """A mixture of experts with random weights, as small as the one of recipes/tiny-moe.mk, with MODEL's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield Path(folder)


# -- memory ------------------------------------------------------------------------------------------------------------


def memory() -> dict[str, Any]:
    """Each in a process of its own: `tests/bench/train.py --peak NAME` prints mebibytes."""
    peaks = {name: float(_output("--peak", name)) for name in PEAKS}
    say(", ".join(f"{name} {mb:.0f} MiB" for name, mb in peaks.items()))
    return {
        "memory_to_trl": peaks["ours"] / peaks["trl"],
        "memory_to_trl_with_room_for_all": peaks["ours_with_room"] / peaks["trl"],
        "peak_mb": peaks,
    }


def _output(*arguments: str) -> str:
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]


def peak_mb(name: str) -> float:
    """Mebibytes that a step needs above what the process holds after a small one: weights, gradients, libraries."""
    rows = ragged(ROWS, 2 * LONGEST, 0.4)
    small = [Row(row.prompt[:8], row.completion[:8]) for row in rows]
    for given in (small, rows):
        step = PEAKS[name](given)
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = _status("VmRSS")
        step()
        after = _status("VmHWM")
        del step
        gc.collect()
    return (after - before) / 1024


PEAKS: dict[str, Callable[[Sequence[Row]], Callable[[], None]]] = {
    "trl": lambda rows: TrlStep(MODEL, rows, DTYPE),
    "ours": lambda rows: Step(MODEL, rows, "rows", resolve().tokens_per_batch),
    "ours_with_room": lambda rows: Step(MODEL, rows, "rows", ROWS * max(map(len, rows))),
}


def _status(field: str) -> int:
    """A field of /proc/self/status, in kB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0])


# -- trees -------------------------------------------------------------------------------------------------------------


def trees() -> dict[str, Any]:
    found = {}
    for percent in (75, 86):
        rows = sharing(ROWS, 2 * LONGEST, percent / 100)
        found[f"sharing_{percent}"] = _against_rows(f"sharing_{percent}", rows, one=False)
    turns = compacted(turns=50, every=17, system=200, observed=16, sampled=8)
    found["turns_50"] = _against_rows("turns_50", turns, one=True)
    return found


def _against_rows(name: str, rows: Sequence[Row], one: bool) -> dict[str, Any]:
    linear = Step(MODEL, rows, "rows", resolve().tokens_per_batch)
    packed = Step(MODEL, rows, "trees", resolve().tokens_per_batch, one)
    say(f"{name}: {linear.read} tokens in rows, {packed.read} in trees")
    seconds = alternate({"rows": linear, "trees": packed})
    times, ideal = ratio(seconds, "rows", "trees"), linear.read / packed.read
    return {name: times, "ideal": ideal, "of_ideal": times / ideal, "seconds": seconds}


# -- length ------------------------------------------------------------------------------------------------------------


def length() -> dict[str, Any]:
    """One pack of trees of 4096 distinct tokens each (a prompt of 1024, 12 branches of 256), more and more of them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        steps: dict[str, Callable[[], None]] = {}
        for count in (1, 2, 4, 8, 16):
            rows = [row for seed in range(count) for row in sharing(12, 1280, 0.8, seed)]
            steps[str(4096 * count)] = Step(Path(folder), rows, "trees", 1 << 20)
        seconds = {name: statistics.median(all_of) for name, all_of in alternate(steps).items()}
    per_token = {name: value / int(name) for name, value in seconds.items()}
    if target := os.environ.get("PLOT"):
        plot(seconds, Path(target))
    return {"seconds_per_token_64k_to_4k": per_token["65536"] / per_token["4096"], "seconds": seconds}


def plot(seconds: dict[str, float], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [int(name) / 1024 for name in seconds]
    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    axes.plot(tokens, list(seconds.values()), "o-", label="measured")
    first = next(iter(seconds.values())) / tokens[0]
    axes.plot(tokens, [first * each for each in tokens], "--", color="grey", label="linear from 4k")
    axes.set(xlabel="distinct tokens in one pack (thousands)", ylabel="seconds, loss and gradient", ylim=0)
    axes.legend()
    figure.savefig(target)


# ----------------------------------------------------------------------------------------------------------------------


def figures_of(found: Any) -> Iterator[tuple[str, float]]:
    """Every figure that has a bound, wherever it stands."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name in BOUNDS and not isinstance(value, dict):
                yield name, value
            yield from figures_of(value)


def holds(name: str, value: float) -> bool:
    return value <= BOUNDS[name] if name in AT_MOST else value >= BOUNDS[name]


def main(parts: Sequence[str]) -> int:
    known = {"trl": trl, "memory": memory, "trees": trees, "length": length}
    if unknown := [part for part in parts if part not in known]:
        raise SystemExit(f"unknown part {unknown[0]}; known: {', '.join(known)}")
    machine = {"cpus": os.cpu_count(), "processor": platform.machine(), "model": MODEL.name, "dtype": DTYPE}
    report: dict[str, Any] = {"machine": machine, "rounds": ROUNDS, "bounds": BOUNDS, "load_before": os.getloadavg()}
    for part in parts or known:
        report[part] = known[part]()
    report["load_after"] = os.getloadavg()
    missed = [f"{name} {value:.3g}" for name, value in figures_of(report) if not holds(name, value)]
    report["missed"] = missed
    print(json.dumps(report, indent=1))
    for words in missed:
        say(f"bound missed: {words}")
    return 4 if missed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        print(peak_mb(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
