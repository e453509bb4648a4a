"""lego-train: graded shards and a model in, a checkpoint folder out."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from legorl.commands.train.loss import LOSSES
from legorl.commands.train.settings import IS_CAP, KL_COEF, SettingsError, cautions, resolve
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

loss_option = partial(option, group="Loss")
off_option = partial(option, group="Sampler and trainer")
kl_option = partial(option, group="Reference model")
gate_option = partial(option, group="Gate")
step_option = partial(option, group="Optimiser")
memory_option = partial(option, group="Memory and precision")


def _pair(text: str | None) -> tuple[int, int] | None:
    """MAX,CACHE as numbers."""
    if text is None:
        return None
    try:
        maximum, cache = (int(part) for part in text.split(","))
        return maximum, cache
    except ValueError:
        raise click.BadParameter(f"{text!r} is not MAX,CACHE, as in 4096,1024", param_hint="--overlong") from None


@command("lego-train")
@paths_argument
@option(
    "--model",
    type=click.Path(path_type=Path),
    required=True,
    help="Weights to train: a Hugging Face or checkpoint folder.",
)
@out_option
@loss_option("--loss", type=click.Choice(list(LOSSES)), default="grpo", help="Loss, by its published name.")
@loss_option(
    "--groups",
    type=click.Choice(["valid", "whole"]),
    default="valid",
    help="Groups of which attempts were lost: train their valid members, or leave them out (`incomplete`).",
)
@loss_option("--clip-low", type=click.FloatRange(0, 1), help="Clip ratios below 1 - this.  [default: the loss's own]")
@loss_option("--clip-high", type=click.FloatRange(0), help="Clip ratios above 1 + this.  [default: the loss's own]")
@loss_option(
    "--minibatches", type=click.IntRange(1), default=1, help="Optimiser steps; whole attempts are split among them."
)
@loss_option(
    "--dr-constant",
    type=click.FloatRange(0, min_open=True),
    help="Tokens that dr_grpo divides by.  [default: the largest token limit of the attempts]",
)
@loss_option(
    "--overlong",
    metavar="MAX,CACHE",
    callback=lambda _context, _parameter, value: _pair(value),
    help="DAPO's reward shaping: take off up to 1 between MAX - CACHE and MAX sampled tokens, and 1 beyond.",
)
@off_option(
    "--off-policy",
    type=click.Choice(["decoupled", "bypass"]),
    help="decoupled: ratio to the trainer at the step's start, times a weight trainer / sampler. bypass: ratio to the "
    "sampler, no weight.  [default: decoupled]",
)
@off_option(
    "--is-level",
    type=click.Choice(["token", "sequence"]),
    help="Weigh each token by itself, or by the product over its attempt.  [default: token]",
)
@off_option(
    "--is-mode",
    type=click.Choice(["truncate", "mask"]),
    help="Weights beyond the cap: hold them at it, or leave the token out, and below 1 / cap too.  [default: truncate]",
)
@off_option("--is-cap", type=click.FloatRange(1), help=f"Bound of the weight trainer / sampler.  [default: {IS_CAP}]")
@off_option(
    "--max-lag", type=click.IntRange(0), default=4, help="Leave out tokens sampled more steps before --model than this."
)
@off_option(
    "--replay/--no-replay", default=True, help="Sparse models: use the experts that were recorded, not the trainer's."
)
@kl_option(
    "--kl",
    type=click.Choice(["none", "k1-reward", "k2", "k3"]),
    default="none",
    help="Keep near --kl-ref: k1 taken off the reward, or k2 or k3 added to the loss. There is no k1 loss: its "
    "gradient is 0 on average.",
)
@kl_option("--kl-ref", type=click.Path(path_type=Path), help="Reference model: a Hugging Face or checkpoint folder.")
@kl_option("--kl-coef", type=click.FloatRange(0), help=f"Its coefficient.  [default: {KL_COEF}]")
@gate_option("--gate", help="Thresholds, as in pearson=0.99,max=0.5, over the defaults of --dtype; or none.")
@gate_option(
    "--gate-tokens", type=click.IntRange(0), default=4096, help="Tokens to read of attempts that are only compared."
)
@step_option("--lr", type=click.FloatRange(0, min_open=True), default=1e-5, help="Learning rate of AdamW.")
@step_option(
    "--schedule",
    type=click.Choice(["constant", "linear", "cosine"]),
    default="constant",
    help="Learning rate over the steps that move weights: constant, or falling to 0 after --total.",
)
@step_option("--warmup", type=click.IntRange(0), default=0, metavar="STEPS", help="Steps in which it rises to --lr.")
@step_option("--total", type=click.IntRange(1), metavar="STEPS", help="All steps of the schedule, --warmup's too.")
@step_option("--weight-decay", type=click.FloatRange(0), default=0.0, help="Weight decay of AdamW.")
@step_option("--grad-clip", type=click.FloatRange(0, min_open=True), default=1.0, help="Largest norm of the gradient.")
@memory_option(
    "--packing",
    type=click.Choice(["auto", "trees", "rows"]),
    default="auto",
    help="trees: read what attempts share once. rows: one path a row. auto: trees, where the model's layers allow it.",
)
@memory_option(
    "--tokens-per-batch", type=click.IntRange(1), default=2048, help="Tokens a micro-batch: distinct ones, or of rows."
)
@memory_option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", help="Of the forward pass; weights stay fp32."
)
@memory_option("--gradient-checkpointing", is_flag=True, help="Recompute activations: a third slower, less memory.")
@memory_option(
    "--lora",
    type=click.IntRange(0),
    default=0,
    metavar="RANK",
    help="Train an adapter of this rank beside the weights, and merge it in the checkpoint. 0: train the weights.",
)
@memory_option(
    "--lora-alpha",
    type=click.FloatRange(0, min_open=True),
    help="Its product is multiplied by this / RANK.  [default: 2 RANK]",
)
@memory_option(
    "--lora-targets",
    metavar="NAMES",
    help="Layers that have one, as in q_proj,v_proj; a wrong name shows all.  [default: all-linear, without the head]",
)
@option(
    "--follow",
    is_flag=True,
    help="Keep the model loaded and take a step for each round, as its last shard arrives: --out/step-0001/checkpoint, "
    "and so on.",
)
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
    paths: tuple[str, ...], model: Path, out: Path, follow: bool, partial: bool, require_signal: bool, keep: int,
    serve: Path | None, as_json: bool, explain: bool, kl_ref: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Take one policy-gradient step on graded shards and print the path of the new checkpoint.

    \b
    Examples:
      lego-train graded/*.parquet --model SmolLM2-135M-Instruct --out step-1
      lego-rollout ... | lego-grade --out graded | lego-train --model step-1 --out step-2
      lego-grade ... | lego-train --follow --model SmolLM2-135M-Instruct --out runs/a --serve $LEGORL_SERVE
      lego-train graded --model step-1 --out step-2 --loss dapo --lr 2e-6 --minibatches 2
      lego-train expert --model SmolLM2-135M-Instruct --out warm --loss sft
      lego-train graded --model step-1 --out step-2 --lora 16 --lr 1e-4
      lego-train graded --model step-1 --out step-2 --kl k3 --kl-coef 0.001 --kl-ref SmolLM2-135M-Instruct

    A PATH is a shard or a folder of shards; none, or -, reads them from stdin. Before any weight moves, the trainer's
    log-probabilities are compared with the recorded ones: beyond --gate, exit 4 and a table of the worst tokens. If the
    round is incomplete, exit 1 without a step (--partial takes it). A batch with nothing to train is a step that leaves
    the weights as they are. Under `torchrun` or `accelerate launch` the processes divide the step among them.

    With --follow the model stays loaded: every round (a plan, as lego-rollout writes it) is a step as soon as it is
    whole, until stdin ends, with the results of as many single commands. Run again on the same paths, it finds what is
    done.
    """
    settings = _settings(given)
    if (settings.kl == "none") != (kl_ref is None):
        raise click.UsageError("--kl and --kl-ref go together: which estimator, and from which model")
    if explain:
        rest = {"follow": follow, "partial": partial, "require_signal": require_signal, "keep": keep, "serve": serve}
        return _explain(settings, {"model": model, "kl_ref": kl_ref, "out": out, **rest})
    from legorl.checkpoint import open_checkpoint
    from legorl.commands.train import follow as rounds
    from legorl.commands.train.policy import Policy
    from legorl.commands.train.ranks import leave, rank

    if "RANK" in os.environ and paths in ((), ("-",)) and not follow:
        raise click.UsageError("several processes cannot read one stdin; give the shards as arguments, or --follow")
    tell = say if rank() == 0 else _silent
    policy = Policy(open_checkpoint(model), tell)
    reference = open_checkpoint(kl_ref) if kl_ref else None

    def step(rows: list[dict[str, Any]], out: Path) -> dict[str, Any]:
        return _train(rows, policy, reference, out, settings, keep, require_signal)

    def tell_made(out: Path, record: dict[str, Any], socket: Path | None) -> None:
        say(_summary(out, record))
        if socket:
            asyncio.run(_serve(socket, out, record))
        emit(json.dumps({"path": str(out), **record}, default=str) if as_json else str(out))

    told = cautions(settings, given["clip_low"] is not None, given["clip_high"] is not None)
    if not follow:
        rows = _rows(paths, partial, tell)
        for words in told:
            tell(words)
        record = step(rows, out)
        if rank() == 0:
            tell_made(out, record, serve)
        return leave()
    for words in told:
        tell(words)
    if serve and rank() == 0:
        asyncio.run(_reach(serve))
    for made, record in rounds.follow(each_path(paths), policy, out, step, partial):
        # Of steps found taken, only the newest is what the engine should serve.
        newer = rounds.place(out, record["version"] + 1).exists()
        tell_made(made, record, None if newer else serve)
    leave()


def _rows(paths: tuple[str, ...], partial: bool, tell: Callable[[str], object]) -> list[dict[str, Any]]:
    """All rows of one step; Failure if some of its round are missing and `partial` does not allow it."""
    from legorl.commands.train.rows import read_rows
    from legorl.shards import Tally, open_shards

    tally = Tally()
    rows = read_rows(open_shards(each_path(paths)), tally)
    if complaint := tally.complaint():
        if not partial:
            raise Failure(f"{complaint}; no step was taken (--partial takes it all the same)")
        tell(f"going on with part of the round: {complaint}")
    return rows


def _silent(words: str) -> None:
    """What is told of one step is told by the first process."""


def _settings(given: dict[str, Any]) -> Any:
    from legorl.commands.train.gate import parse_gate

    gate: dict[str, float] = {}
    if given["loss"] != "sft" or given["gate"] not in (None, "none"):
        try:
            gate = parse_gate(given["gate"], given["dtype"])
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--gate") from error
    try:
        return resolve(**given | {"gate": gate})
    except SettingsError as error:
        raise click.UsageError(str(error)) from error


def _explain(settings: Any, rest: dict[str, Any]) -> None:
    from dataclasses import asdict

    explain(asdict(settings) | rest)


def _train(
    rows: list[dict[str, Any]], policy: Any, reference: Any, out: Path, settings: Any, keep: int, signal: bool
) -> dict[str, Any]:  # fmt: skip
    from tqdm import tqdm

    from legorl.commands.train.gate import GateError
    from legorl.commands.train.train import train

    bars: list[Any] = []

    def progress(total: int) -> Any:
        bars.append(
            tqdm(total=total, unit="tok", disable=policy.tell is _silent or not sys.stderr.isatty(), leave=False)
        )
        return bars[0].update

    try:
        return train(rows, policy, out, settings, keep, signal, progress, reference)
    except GateError as error:
        for line in error.worst:
            policy.tell(line)
        raise
    finally:
        for bar in bars:
            bar.close()


async def _serve(socket: Path, out: Path, record: dict[str, Any]) -> None:
    """Have the lego-serve at `socket` serve the checkpoint, unless it does."""
    from legorl.control import Control

    async with Control(socket) as control:
        health = await control.health()
        if (health.version, health.digest) != (record["version"], record["digest"]):
            await control.load_weights(out.resolve(), record["version"])
    say(f"{socket}: serves version {record['version']} now")


async def _reach(socket: Path) -> None:
    """Raise ServeError unless a lego-serve answers, before hours of work that it should get."""
    from legorl.control import Control

    async with Control(socket) as control:
        await control.health()


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
