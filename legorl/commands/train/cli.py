"""lego-train: graded shards and a model in, a checkpoint folder out."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click

from legorl.options import (
    Failure,
    command,
    each_path,
    emit,
    explain,
    explain_option,
    json_option,
    option,
    out_option,
    paths_argument,
    say,
    seed_option,
)


@command("lego-train")
@paths_argument
@option(
    "--model",
    type=click.Path(path_type=Path),
    required=True,
    help="Weights to train: a Hugging Face or checkpoint folder.",
)
@out_option
@option("--loss", type=click.Choice(["grpo", "dapo"]), default="grpo", help="Loss, by its published name.")
@option("--lr", type=click.FloatRange(0, min_open=True), default=1e-5, help="Learning rate of AdamW.")
@option("--clip-low", type=click.FloatRange(0, 1), help="Ratios are clipped below 1 - this.  [default: 0.2]")
@option("--clip-high", type=click.FloatRange(0), help="Ratios are clipped above 1 + this.  [default: 0.2; dapo: 0.28]")
@option("--minibatches", type=click.IntRange(1), default=1, help="Optimiser steps; attempts are split among them.")
@option("--is-cap", type=click.FloatRange(1), default=2.0, help="Bound of the importance weight trainer / sampler.")
@option(
    "--is-mode",
    type=click.Choice(["truncate", "mask"]),
    default="truncate",
    help="Beyond the bound: hold, or leave out.",
)
@option("--max-lag", type=click.IntRange(0), default=4, help="Oldest weights to learn from, in steps behind --model.")
@option("--tokens-per-batch", type=click.IntRange(1), default=2048, help="Tokens a micro-batch, padding counted.")
@option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", help="Of the forward pass; weights stay fp32.")
@option("--gradient-checkpointing", is_flag=True, help="Recompute activations: a third slower, much less memory.")
@option("--gate", help="Thresholds, as in pearson=0.99,max=0.5, over the defaults of --dtype; or none.")
@option(
    "--gate-tokens", type=click.IntRange(0), default=4096, help="Tokens to read of attempts that are only compared."
)
@option("--grad-clip", type=click.FloatRange(0, min_open=True), default=1.0, help="Largest norm of the gradient.")
@option("--weight-decay", type=click.FloatRange(0), default=0.0, help="Weight decay of AdamW.")
@option("--partial", is_flag=True, help="Train although attempts of the round are missing.")
@option("--require-signal", is_flag=True, help="Fail if there is nothing to train.")
@option(
    "--keep", type=click.IntRange(1), default=3, help="Newest checkpoints of a run that keep their optimizer state."
)
@click.option(
    "--serve", type=click.Path(path_type=Path), metavar="SOCKET", help="Load the new weights into this lego-serve."
)
@seed_option
@json_option
@explain_option
def main(
    paths: tuple[str, ...], model: Path, out: Path, partial: bool, require_signal: bool, keep: int, serve: Path | None,
    as_json: bool, explain: bool, **given: Any,
) -> None:  # fmt: skip
    """Take one policy-gradient step on graded shards and print the path of the new checkpoint.

    \b
    Examples:
      lego-train graded/*.parquet --model SmolLM2-135M-Instruct --out step-1
      lego-rollout ... | lego-grade --out graded | lego-train --model step-1 --out step-2
      lego-train graded --model step-1 --out step-2 --loss dapo --lr 2e-6 --minibatches 2

    A PATH is a shard or a folder of shards; none, or -, reads them from stdin. Before any weight moves, the trainer's
    log-probabilities are compared with the recorded ones: beyond --gate, exit 4 and a table of the worst tokens. If the
    round is incomplete, exit 1 without a step (--partial takes it). A batch with nothing to train is a step that leaves
    the weights as they are.
    """
    settings = _settings(given)
    if explain:
        return _explain(settings, model, out, partial, require_signal, keep, serve)
    from legorl.checkpoint import open_checkpoint
    from legorl.commands.train.rows import read_rows
    from legorl.shards import Tally, open_shards

    checkpoint = open_checkpoint(model)
    tally = Tally()
    rows = read_rows(open_shards(each_path(paths)), tally)
    if complaint := tally.complaint():
        if not partial:
            raise Failure(f"{complaint}; no step was taken (--partial takes it all the same)")
        say(f"going on with part of the round: {complaint}")
    if settings.minibatches == 1 and (given["clip_low"] is not None or given["clip_high"] is not None):
        say(
            "with --minibatches 1 the ratio to the policy at the step's start is 1, so no clip can act; "
            "--minibatches 2 or more lets it"
        )
    record = _train(rows, checkpoint, out, settings, keep, require_signal)
    say(_summary(out, record))
    if serve:
        loaded = asyncio.run(_serve(serve, out, record["version"]))
        say(f"{serve}: serves version {loaded['version']} now")
    emit(json.dumps({"path": str(out), **record}, default=str) if as_json else str(out))


def _settings(given: dict[str, Any]) -> Any:
    from legorl.commands.train.gate import parse_gate
    from legorl.commands.train.loss import CLIP_HIGH, CLIP_LOW
    from legorl.commands.train.settings import Settings

    try:
        gate = parse_gate(given["gate"], given["dtype"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gate") from error
    low, high = given["clip_low"], given["clip_high"]
    low = CLIP_LOW if low is None else low
    high = CLIP_HIGH[given["loss"]] if high is None else high
    return Settings(**given | {"gate": gate, "clip_low": low, "clip_high": high})


def _explain(settings: Any, model: Path, out: Path, partial: bool, signal: bool, keep: int, serve: Path | None) -> None:
    from dataclasses import asdict

    rest = {"model": model, "out": out, "partial": partial, "require_signal": signal, "keep": keep, "serve": serve}
    explain(asdict(settings) | rest)


def _train(
    rows: list[dict[str, Any]], checkpoint: Any, out: Path, settings: Any, keep: int, signal: bool
) -> dict[str, Any]:
    from tqdm import tqdm

    from legorl.commands.train.gate import GateError
    from legorl.commands.train.train import train

    bars: list[Any] = []

    def progress(total: int) -> Any:
        bars.append(tqdm(total=total, unit="tok", disable=not sys.stderr.isatty(), leave=False))
        return bars[0].update

    try:
        return train(rows, checkpoint, out, settings, keep, signal, say, progress)
    except GateError as error:
        for line in error.worst:
            say(line)
        raise
    finally:
        for bar in bars:
            bar.close()


async def _serve(socket: Path, out: Path, version: int) -> dict[str, Any]:
    from legorl.control import Control

    async with Control(socket) as control:
        return await control.load_weights(out.resolve(), version)


def _summary(out: Path, record: dict[str, Any]) -> str:
    """One line: `step-1: version 1; 812 tokens = 600 trained + 212 no_variance; pearson 0.99999, max |dlogp| 5e-05`."""
    figures, tokens = record["figures"], record["tokens"]
    parts = " + ".join(f"{tokens[name]} {name}" for name in sorted(tokens, key=lambda n: (n != "trained", -tokens[n])))
    words = f"{out}: version {record['version']}; {sum(tokens.values())} tokens = {parts or 'none'}"
    if not record["moved"]:
        words += "; nothing to train, weights unchanged"
    if "align/logprob_abs_diff_max" in figures:
        pearson = figures.get("align/pearson")
        words += f"; pearson {'undefined' if pearson is None else f'{pearson:.6f}'}"
        words += f", max |dlogp| {figures['align/logprob_abs_diff_max']:.2g} over {figures['align/tokens']:.0f} tokens"
    return words


if __name__ == "__main__":
    main()
