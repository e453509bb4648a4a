"""The alignment gate: do the trainer and the sampler agree on the tokens that the loaded weights sampled?

The figures are those of legorl/metrics/align.sql, the file that `lego-inspect align` runs, over the batch's tokens
before anything is masked. Thresholds hold for lag 0; tokens of older weights differ by right, and only their effective
sample size (`lagged_ess`) and the share of their ratios outside [0.5, 2] (`lagged_outside`, which sees what moves all
ratios alike) are bounded. A batch without lag-0 tokens is verified on the newest checkpoint that sampled a
part of it, so that no mismatch hides behind staleness.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from legorl import metrics, tree
from legorl.checkpoint import ModelError, open_checkpoint
from legorl.commands.train.batch import Batch
from legorl.commands.train.rows import CheckError
from legorl.commands.train.updates import turns_table, updates_table
from legorl.options import printable

# Name on the command line -> figure of align.sql. Those of LEAST must not fall below their threshold, the others must
# not rise above it.
FIGURES = {
    "pearson": "pearson",
    "ess": "ess",
    "mean": "logprob_abs_diff_mean",
    "p50": "logprob_abs_diff_p50",
    "p99": "logprob_abs_diff_p99",
    "max": "logprob_abs_diff_max",
    "k1": "k1",
    "k3": "k3",
    "outside": "ratio_outside",
    "chi2": "chi2",
}
LAGGED = {"lagged_ess": "ess", "lagged_outside": "ratio_outside"}  # at each lag above 0
LEAST = ("pearson", "ess", "lagged_ess")
# Measured with the sampler in float32: a float32 trainer differs by 7e-6 in the mean and 6e-5 at most, a bfloat16 one
# by 3e-2 and 0.3.
DEFAULTS = {
    "fp32": {"pearson": 0.999, "mean": 1e-3, "p99": 1e-2, "max": 0.1, "lagged_ess": 0.3, "lagged_outside": 0.9},
    "bf16": {"pearson": 0.99, "mean": 0.1, "p99": 0.5, "max": 3.0, "lagged_ess": 0.3, "lagged_outside": 0.9},
}
WORST = 8  # tokens shown
CONTEXT = 12  # tokens shown before each


class GateError(CheckError):
    """A threshold does not hold; `worst` is a table of the tokens that differ most."""

    def __init__(self, message: str, worst: list[str]):
        super().__init__(message)
        self.worst = worst


def parse_gate(text: str | None, dtype: str) -> dict[str, float]:
    """Thresholds from `pearson=0.99,max=0.5`, over the defaults of `dtype`; `none` for no gate. Raises ValueError."""
    if text == "none":
        return {}
    thresholds = dict(DEFAULTS[dtype])
    for part in (text or "").split(","):
        name, _, value = part.strip().partition("=")
        if not name:
            continue
        if name not in FIGURES | LAGGED:
            raise ValueError(f"no figure {name!r}; known: {', '.join(FIGURES | LAGGED)}")
        try:
            thresholds[name] = float(value)
        except ValueError:
            thresholds[name] = math.nan
        if not math.isfinite(thresholds[name]):
            raise ValueError(f"{part.strip()}: a threshold is written as NAME=NUMBER")
    return thresholds


def measure(batch: Batch) -> dict[str, float]:
    """All alignment figures of the batch as it stands: align/FIGURE over all, align/SLICE/FIGURE a slice."""
    return dict(metrics.run("align", updates=updates_table(batch, 0, "", None), turns=turns_table(batch)))


def check(batch: Batch, figures: dict[str, float], thresholds: dict[str, float], folder: Path) -> int:
    """Raise GateError unless `thresholds` hold for the lag-0 tokens of `figures`; return how many those are.

    `folder`: the model's, for the tokenizer that makes the worst tokens readable. A figure that cannot be computed
    (the correlation of one token) is not held against anything.
    """
    tokens = int(figures.get("align/lag=0/tokens", 0))
    lags = [key.split("/")[1] for key in figures if key.startswith("align/lag=") and key.endswith("/tokens")]
    broken, lagged = [], True
    for name, threshold in thresholds.items():
        slices = [lag for lag in lags if lag != "lag=0"] if name in LAGGED else ["lag=0"]
        keys = [f"align/{lag}/{LAGGED.get(name) or FIGURES[name]}" for lag in slices]
        for key in keys:
            value = figures.get(key)
            if value is not None and (value < threshold if name in LEAST else value > threshold):
                sign = ">=" if name in LEAST else "<="
                broken.append(f"{key.removeprefix('align/')} is {value:.4g}, allowed is {sign} {threshold:g}")
                lagged = lagged and name in LAGGED
    if broken:
        if lagged:
            what, why = "the weights that sampled are too far from the loaded ones", "train on fresher shards"
        else:
            what = f"trainer and sampler disagree over {tokens} tokens of the loaded weights"
            why = "other weights, another dtype, or damaged records"
        raise GateError(
            f"{what}: {'; '.join(broken)}; no weight was moved ({why}; --gate sets the thresholds)",
            worst_tokens(batch, folder, lagged),
        )
    return tokens


def worst_tokens(batch: Batch, folder: Path, lagged: bool = False) -> list[str]:
    """Lines of a table: the tokens whose two log-probabilities differ most, each with the text before it.

    Those that the loaded weights sampled, or with `lagged` those of older ones, which may differ more by right.
    """
    tokens = batch.tokens
    gap = np.abs(tokens.old.astype(np.float64) - tokens.sampler)
    known = np.flatnonzero(np.isfinite(gap) & ((tokens.lag > 0) == lagged))
    worst = known[np.argsort(-gap[known], kind="stable")][:WORST]
    names = [batch.rows[tokens.attempt[entry]]["attempt_id"] for entry in worst]
    width = max(map(len, [*names, "attempt"]))
    decode = _decoder(folder)
    lines = [f"{'attempt':<{width}} turn  pos lag   sampler   trainer      gap  token, and what stands before it"]
    for entry, name in zip(worst, names, strict=True):
        nodes = tree.nodes_of(batch.rows[tokens.attempt[entry]]["turns"])
        turn = int(tokens.turn[entry])
        before = tree.path_ids(nodes, turn, nodes[turn].prompt_len + int(tokens.position[entry]))[-CONTEXT:]
        shown, context = (decode(ids) for ids in ([int(tokens.token[entry])], before.tolist()))
        lines.append(
            f"{name:<{width}} {turn:>4} {tokens.position[entry]:>4} {tokens.lag[entry]:>3} "
            f"{tokens.sampler[entry]:>9.4f} {tokens.old[entry]:>9.4f} {gap[entry]:>8.4f}  {shown} after {context}"
        )
    return lines


def _decoder(folder: Path) -> Any:
    """A function from ids to quoted text; without a tokenizer in `folder`, to the ids themselves."""
    if not (folder / "tokenizer.json").is_file():
        return str
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: repr(printable(tokenizer.decode(ids, skip_special_tokens=False)))


def newest_sampler(batch: Batch) -> tuple[int, Path, str] | None:
    """Of a batch without lag-0 tokens: version, folder and digest of the newest weights that sampled a target of it."""
    entries = [sample.index for sample in batch.samples]
    if not entries:
        return None
    versions = batch.tokens.version[np.concatenate(entries)]
    newest = int(versions.max())
    for row in batch.rows:
        for weights in row["weights"] or []:
            if weights["version"] == newest and weights["path"]:
                return newest, Path(weights["path"]), weights["digest"]
    raise CheckError(
        f"no token was sampled by the loaded weights, and version {newest}, the newest that did, has no path; "
        "train on fresher shards, or give --gate none to step without a gate"
    )


def open_sampler(version: int, path: Path, digest: str) -> Path:
    """The Hugging Face folder of older weights, proven by digest. Raises CheckError if they are gone or changed."""
    advice = "train on fresher shards, or give --gate none to step without a gate"
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        raise CheckError(
            f"no token was sampled by the loaded weights, and version {version} cannot verify: {error}; {advice}"
        ) from error
    if checkpoint.digest != digest:
        raise CheckError(
            f"no token was sampled by the loaded weights, and version {version} cannot verify: {path} holds "
            f"{checkpoint.digest}, the rows were sampled by {digest}; {advice}"
        )
    return checkpoint.folder


def as_lag_zero(batch: Batch, version: int) -> Batch:
    """The batch as its sampler of `version` sees it: those tokens at lag 0, nothing computed yet."""
    lag = np.where(batch.tokens.version == version, 0, np.maximum(batch.tokens.lag, 1))
    samples = [s for s in batch.samples if (batch.tokens.version[s.index] == version).any()]
    return replace(batch, tokens=replace(batch.tokens, lag=lag.astype(np.int32)), samples=samples)
