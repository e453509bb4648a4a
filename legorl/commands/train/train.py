"""One step from rows to a checkpoint folder: batch, update, gate, files.

    record = train(rows, Policy(open_checkpoint(model)), out, settings, keep=3, reference=None)

A step with nothing to train is a step: the new checkpoint holds the same weights under the next version.
"""

import json
import math
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from legorl.checkpoint import Checkpoint, ModelError
from legorl.commands.train import gate, lora, save
from legorl.commands.train.batch import Batch, make_batch
from legorl.commands.train.fit import ModelFacts, ancestors_of
from legorl.commands.train.policy import Policy
from legorl.commands.train.ranks import rank
from legorl.commands.train.rows import BatchError, CheckError, digest_of
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
    known = ancestors_of(checkpoint)
    return ModelFacts(checkpoint.version, checkpoint.digest, int(config["vocab_size"]), context, tokenizer, known)


def configuration_of(
    settings: Settings, checkpoint: Checkpoint, rows: list[dict[str, Any]], reference: Checkpoint | None = None
) -> dict[str, Any]:
    """What a checkpoint is made from, as its record keeps it: equal configurations give equal weights."""
    return asdict(settings) | {
        "model_digest": checkpoint.digest,
        "model_version": checkpoint.version,
        "adapter_digest": lora.adapter_digest(checkpoint) if settings.lora else None,
        "kl_ref_digest": reference.digest if reference else None,
        "inputs": digest_of(rows),
    }


def finished(out: Path, configuration: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the checkpoint at `out` if it is there and was made so; ShardError if it was made otherwise."""
    record = save.read_record(out)
    if record:
        check_settings(out, record["configuration"], configuration)
    return record


def with_constant(settings: Settings, rows: list[dict[str, Any]]) -> Settings:
    """dr_grpo's constant, where none was given: the largest limit on sampled tokens that an attempt had."""
    if settings.loss != "dr_grpo" or settings.dr_constant is not None:
        return settings
    limits = [((row["budgets"] or {}).get("tokens") or {}).get("limit") for row in rows]
    finite = [limit for limit in limits if limit and math.isfinite(limit)]
    if not finite:
        raise BatchError("dr_grpo divides by a constant, and no row has a limit on its tokens; give --dr-constant")
    return replace(settings, dr_constant=max(finite))


def check_reference(reference: Checkpoint, checkpoint: Checkpoint) -> None:
    """Raise CheckError unless the two models read the same tokens."""
    ours, theirs = facts_of(checkpoint), facts_of(reference)
    if ours.vocabulary != theirs.vocabulary:
        raise CheckError(
            f"{reference.path}: has a vocabulary of {theirs.vocabulary}, the model to train one of {ours.vocabulary}; "
            "give --kl-ref a model of the same family"
        )
    if ours.tokenizer_digest and theirs.tokenizer_digest and ours.tokenizer_digest != theirs.tokenizer_digest:
        raise CheckError(f"{reference.path}: has another tokenizer than the model to train; give --kl-ref one like it")


def train(
    rows: list[dict[str, Any]], policy: Policy, out: Path, settings: Settings, keep: int = 3,
    require_signal: bool = False, progress: Callable[[int], Callable[[int], object]] = lambda total: lambda done: None,
    reference: Checkpoint | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Take the step, or find it taken; return the checkpoint's record, empty in all processes but the first.

    `policy` stands at the checkpoint that was made or found then. `progress` gets the number of tokens to read and
    returns what is called as they are read; `reference` is the model of the KL term, where settings.kl names one.

    Raises BatchError, CheckError (GateError among them), ModelError, ShardError; nothing is at `out` then.
    """
    if not rows:
        raise BatchError("the shards hold no attempt; give graded shards")
    settings, checkpoint = with_constant(settings, rows), policy.checkpoint
    configuration = configuration_of(settings, checkpoint, rows, reference)
    if done := finished(out, configuration):
        policy.stand_at(out)
        return done
    with save.staging(out) if rank() == 0 else nullcontext() as stage:
        if stage and (done := finished(out, configuration)):
            policy.stand_at(out)
            return done
        batch = make_batch(
            rows, facts_of(checkpoint), settings.max_lag, settings.loss, settings.overlong, settings.groups == "whole"
        )
        if require_signal and settings.kl != "k1-reward":  # which may yet make rewards differ
            require(batch)
        if reference and batch.samples:
            check_reference(reference, checkpoint)
            score_reference(batch, settings, reference)
        return _step(batch, policy, out, stage, configuration, settings, keep, progress, require_signal)


def require(batch: Batch) -> None:
    """Raise BatchError if there is nothing to train."""
    if not batch.trained().any():
        raise BatchError(f"nothing to train ({reasons(batch)}), and --require-signal was given")


def score_reference(batch: Batch, settings: Settings, reference: Checkpoint) -> None:
    """Fill `ref`. The reference's model is gone again afterwards; a policy's first step is loaded only then."""
    from legorl.commands.train.step import Trainer
    from legorl.model import load_model

    trained = batch.trained()
    needed = [s for s in batch.samples if settings.kl == "k1-reward" or trained[s.index[0]]]
    if needed:
        own = replace(settings, replay=False)  # the recorded experts are the policy's choice, not the reference's
        Trainer(own, load_model(reference.folder, "fp32")).score(batch, needed, batch.tokens.ref)


def _step(
    batch: Batch, policy: Policy, out: Path, stage: Any, configuration: dict[str, Any], settings: Settings, keep: int,
    progress: Callable[[int], Callable[[int], object]], signal: bool,
) -> dict[str, Any]:  # fmt: skip
    import torch

    torch.manual_seed(settings.seed)
    started = time.monotonic()
    checkpoint, tell = policy.checkpoint, policy.tell
    trainer = policy.trainer(settings)
    policy.schedule.check()
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
        if settings.loss == "sft":
            return
        figures.update(gate.measure(batch))
        if settings.gate:
            _check_gate(batch, figures, settings, checkpoint, tell)

    figures |= trainer.run(batch, check)
    batch.check_sums()
    if signal and "loss" not in figures:
        require(batch)
    seconds = time.monotonic() - loaded
    figures |= batch_figures(batch)
    numbers = ("is_cap", "clip_low", "clip_high", "kl_coef", "dr_constant")
    figures |= {name: float(value) for name in numbers if (value := getattr(settings, name)) is not None}
    figures |= {"time/load_s": loaded - started, "time/step_s": seconds, "time/read_tokens_per_s": read / seconds}
    figures["trained_parameters"] = sum(parameter.numel() for parameter in trainer.trained)
    figures["memory/peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if trainer.ranks.device.type == "cuda":
        figures["memory/cuda_peak_mb"] = torch.cuda.max_memory_allocated(trainer.ranks.device) / 2**20
    if moved := "loss" in figures:
        figures["lr"] = policy.schedule.rate
        policy.schedule.advance()
    version = checkpoint.version + 1
    run = batch.rows[0]["run"]

    def tables(digest: str) -> tuple[Any, list[dict[str, Any]]]:
        metrics = [{"run": run, "step": version, "name": name, "value": value} for name, value in figures.items()]
        return updates_table(batch, version, checkpoint.digest, digest), metrics

    adapter = policy.adapter
    weights: dict[str, Any] = {}
    if moved:
        weights = adapter.merged() if adapter else save.weights_of(trainer.model)
    matrices = adapter.state() if adapter else {}
    state = save.optimizer_state(trainer.model, trainer.optimizer)
    if stage is None:
        return {}

    def write(folder: Path) -> None:
        trainer.model.save_pretrained(folder, state_dict=weights)

    record = save.write_checkpoint(
        out, stage, checkpoint, write if moved else None, state, policy.schedule.state(), tables,
        {"run": run, "moved": moved, "tokens": batch.counts(), "configuration": configuration,
         "figures": {name: value for name, value in figures.items() if "=" not in name}},
        (lambda folder: adapter.write(folder, matrices)) if adapter else None,
    )  # fmt: skip
    for removed in save.prune(out, keep):
        tell(f"{removed}: removed, it was older than --keep {keep} checkpoints")
    policy.moved_to(out, record["digest"])
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
