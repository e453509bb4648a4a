"""One step from rows to a checkpoint folder: batch, update, gate, files.

    record = train(rows, open_checkpoint(model), out, settings, keep=3)

A step with nothing to train is a step: the new checkpoint holds the same weights under the next version.
"""

import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from legorl.checkpoint import Checkpoint, ModelError
from legorl.commands.train import gate, save
from legorl.commands.train.batch import Batch, ModelFacts, make_batch
from legorl.commands.train.rows import BatchError, digest_of
from legorl.commands.train.settings import Settings
from legorl.commands.train.updates import batch_figures, updates_table
from legorl.shards import check_settings


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    """What rows are checked against, from the folder's files alone."""
    config = json.loads((checkpoint.folder / "config.json").read_text())
    if "vocab_size" not in config:
        raise ModelError(f"{checkpoint.folder}: its config.json names no vocab_size; it is no text-only language model")
    tokenizer = checkpoint.tokenizer_digest if (checkpoint.folder / "tokenizer.json").is_file() else None
    context = config.get("max_position_embeddings")
    return ModelFacts(checkpoint.version, checkpoint.digest, int(config["vocab_size"]), context, tokenizer)


def configuration_of(settings: Settings, checkpoint: Checkpoint, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint is made from, as its record keeps it: equal configurations give equal weights."""
    return asdict(settings) | {
        "model_digest": checkpoint.digest,
        "model_version": checkpoint.version,
        "inputs": digest_of(rows),
    }


def finished(out: Path, configuration: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the checkpoint at `out` if it is there and was made so; ShardError if it was made otherwise."""
    record = save.read_record(out)
    if record:
        check_settings(out, record["configuration"], configuration)
    return record


def train(
    rows: list[dict[str, Any]], checkpoint: Checkpoint, out: Path, settings: Settings, keep: int = 3,
    require_signal: bool = False, tell: Callable[[str], object] = lambda words: None,
    progress: Callable[[int], Callable[[int], object]] = lambda total: lambda done: None,
) -> dict[str, Any]:  # fmt: skip
    """Take the step, or find it taken; return the checkpoint's record.

    `tell` gets words for the user; `progress` gets the number of tokens to read and returns what is called as they are
    read. Raises BatchError, CheckError (GateError among them), ModelError, ShardError; nothing is at `out` then.
    """
    if not rows:
        raise BatchError("the shards hold no attempt; give graded shards")
    configuration = configuration_of(settings, checkpoint, rows)
    if done := finished(out, configuration):
        return done
    with save.staging(out) as stage:
        if done := finished(out, configuration):
            return done
        batch = make_batch(rows, facts_of(checkpoint), settings.max_lag)
        if require_signal and not batch.trained().any():
            raise BatchError(f"nothing to train ({reasons(batch)}), and --require-signal was given")
        return _step(batch, checkpoint, out, stage, configuration, settings, keep, tell, progress)


def _step(
    batch: Batch, checkpoint: Checkpoint, out: Path, stage: Any, configuration: dict[str, Any], settings: Settings,
    keep: int, tell: Callable[[str], object], progress: Callable[[int], Callable[[int], object]],
) -> dict[str, Any]:  # fmt: skip
    import torch

    from legorl.commands.train.step import Trainer
    from legorl.model import load_model

    torch.manual_seed(settings.seed)
    started = time.monotonic()
    model = load_model(checkpoint.folder, "fp32")
    trainer = Trainer(settings, model)
    restored = save.load_optimizer(checkpoint, trainer.model, trainer.optimizer)
    if checkpoint.version and not restored:
        tell(f"{checkpoint.path}: no optimizer state there; AdamW starts afresh")
    loaded = time.monotonic()
    read = 0
    step = progress(trainer.planned(batch))

    def count(tokens: int) -> None:
        nonlocal read
        read += tokens
        step(tokens)

    trainer.progress = count
    figures: dict[str, float] = {}

    def check() -> None:
        figures.update(gate.measure(batch))
        if settings.gate:
            _check_gate(batch, figures, settings, checkpoint, tell)

    figures |= trainer.run(batch, check)
    batch.check_sums()
    seconds = time.monotonic() - loaded
    figures |= batch_figures(batch)
    figures |= {
        "lr": settings.lr,
        "is_cap": settings.is_cap,
        "clip_low": settings.clip_low,
        "clip_high": settings.clip_high,
    }
    figures |= {"time/load_s": loaded - started, "time/step_s": seconds, "time/read_tokens_per_s": read / seconds}
    figures["memory/peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    moved = "loss" in figures
    version = checkpoint.version + 1
    run = batch.rows[0]["run"]

    def tables(digest: str) -> tuple[Any, list[dict[str, Any]]]:
        metrics = [{"run": run, "step": version, "name": name, "value": value} for name, value in figures.items()]
        return updates_table(batch, version, checkpoint.digest, digest), metrics

    record = save.write_checkpoint(
        out, stage, checkpoint, trainer.model.save_pretrained if moved else None,
        save.optimizer_state(trainer.model, trainer.optimizer), tables,
        {"run": run, "moved": moved, "tokens": batch.counts(), "configuration": configuration,
         "figures": {name: value for name, value in figures.items() if "=" not in name}},
    )  # fmt: skip
    for removed in save.prune(out, keep):
        tell(f"{removed}: removed, it was older than --keep {keep} checkpoints")
    return record


def _check_gate(
    batch: Batch, figures: dict[str, float], settings: Settings, checkpoint: Checkpoint, tell: Callable[[str], object]
) -> None:
    from legorl.commands.train.step import Trainer
    from legorl.model import load_model

    verified = gate.check(batch, figures, settings.gate, checkpoint.folder)
    if verified or not figures.get("align/tokens"):
        return
    sampler = gate.newest_sampler(batch)
    if sampler is None:
        return
    version, path, digest = sampler
    folder = gate.open_sampler(version, path, digest)
    tell(f"no token was sampled by the loaded weights; verifying some with version {version} in {path}")
    referee = gate.as_lag_zero(batch, version)
    trainer = Trainer(settings, load_model(folder, "fp32"))
    trainer.score(referee, trainer.some(referee.samples))
    gate.check(referee, gate.measure(referee), settings.gate, folder)


def reasons(batch: Batch) -> str:
    """`812 tokens sampled: 600 trained, 212 no_variance`."""
    counts = batch.counts()
    parts = [f"{counts[name]} {name}" for name in sorted(counts, key=lambda name: (name != "trained", -counts[name]))]
    return f"{len(batch.tokens)} tokens sampled: {', '.join(parts) or 'none'}"
