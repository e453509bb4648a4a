"""The checkpoint folder: written beside its place, made durable, and put there by one rename.

    model/             a plain Hugging Face folder: weights, configuration, the tokenizer's files as they came
    adapter/           the LoRA adapter that is merged into those weights, where one is trained (lora.py)
    optimizer/         AdamW's state by parameter name, safetensors; schedule.json, the place in the schedule
    updates.parquet    what happened to every sampled token (schema.UPDATE)
    metrics.parquet    the step's figures (schema.METRIC)
    legorl.json        format, version, digest, parent, configuration, figures

`version` counts steps from the base model, which is 0. Optimiser state is twice the weights, so only the newest few of
a run keep theirs.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from legorl import __version__, schema
from legorl.checkpoint import RECORD, Checkpoint, ModelError
from legorl.commands.train.ranks import like, whole
from legorl.shards import OutDir, ShardError, make_meta, sync_folder, sync_tree, write_shard

CHECKPOINT_FORMAT = "checkpoint/1"
OPTIMIZER = "optimizer"
ADAPTER = "adapter"
STATE = "state.safetensors"
SCHEDULE = "schedule.json"
# Written anew by save_pretrained; everything else in the model folder is copied as it is.
_REWRITTEN = ("config.json", "generation_config.json")


def read_record(out: Path) -> dict[str, Any] | None:
    """The record of a finished checkpoint at `out`, None if nothing is there; ShardError if it is something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    record = out / RECORD
    if not record.is_file():
        raise ShardError(f"{out}: something else is there (no {RECORD}); give another --out")
    return json.loads(record.read_text())


@contextmanager
def staging(out: Path) -> Iterator[OutDir]:
    """The folder beside `out` where a checkpoint is written, held by one writer; what a killed one left is harmless."""
    with OutDir(out.parent / f".{out.name}.partial", {}) as stage:
        try:
            yield stage
        finally:  # of a step that was refused or stopped, and of a disk that filled up, too
            shutil.rmtree(stage.path, ignore_errors=True)


def write_checkpoint(
    out: Path, stage: OutDir, parent: Checkpoint, save: Callable[[Path], object] | None, optimizer: dict[str, Any],
    schedule: dict[str, Any], tables: Callable[[str], tuple[Any, list[dict[str, Any]]]], record: dict[str, Any],
    adapter: Callable[[Path], dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the checkpoint and rename it to `out`; return its record.

    `save` writes weights and configuration into the folder it is given; None keeps the parent's files as they are, so
    that unchanged weights keep their digest. `tables` makes the updates and metrics once the new digest is known.
    `adapter` makes the folder it is given and writes the adapter there; it returns what the record says of it.
    Raises ShardError where safetensors cannot write; whatever is raised, nothing of the checkpoint stays.
    """
    from safetensors import SafetensorError

    made = stage.path / "checkpoint"
    shutil.rmtree(made, ignore_errors=True)
    try:
        whole = _fill(made, parent, save, optimizer, schedule, tables, record, adapter)
    except SafetensorError as error:
        raise ShardError(f"{out}: its weights cannot be written ({error})") from error
    else:
        made.rename(out)
        sync_folder(out.parent)
        return whole


def _fill(
    made: Path, parent: Checkpoint, save: Callable[[Path], object] | None, optimizer: dict[str, Any],
    schedule: dict[str, Any], tables: Callable[[str], tuple[Any, list[dict[str, Any]]]], record: dict[str, Any],
    adapter: Callable[[Path], dict[str, Any]] | None,
) -> dict[str, Any]:  # fmt: skip
    """Write everything of a checkpoint into the folder `made` and make it durable; return its record."""
    model = made / "model"
    model.mkdir(parents=True)
    for file in sorted(parent.folder.iterdir()):
        weights = file.suffix == ".safetensors" or file.name.endswith(".safetensors.index.json")
        if file.is_file() and not (save and (weights or file.name in _REWRITTEN)):
            shutil.copyfile(file, model / file.name)
    if save:
        save(model)
    if optimizer:
        from safetensors.torch import save_file

        (made / OPTIMIZER).mkdir()
        save_file(optimizer, made / OPTIMIZER / STATE)
        (made / OPTIMIZER / SCHEDULE).write_text(json.dumps(schedule) + "\n")
    if adapter:
        record = {**record, "adapter": adapter(made / ADAPTER)}
    digest = Checkpoint(made, model, parent.version + 1).digest
    updates, metrics = tables(digest)
    meta = {"configuration": record["configuration"]}
    write_shard(made / "updates.parquet", updates, make_meta(schema.UPDATE_FORMAT, **meta))
    write_shard(made / "metrics.parquet", metrics, make_meta(schema.METRIC_FORMAT, **meta))
    whole = {
        "format": CHECKPOINT_FORMAT,
        "legorl": __version__,
        "version": parent.version + 1,
        "digest": digest,
        "parent": {"version": parent.version, "digest": parent.digest, "path": str(parent.path)},
        **record,
    }
    (made / RECORD).write_text(json.dumps(whole, indent=1, default=str) + "\n")
    for path in made.rglob("*"):  # safetensors writes 0600
        path.chmod(0o755 if path.is_dir() else 0o644)
    sync_tree(made)
    return whole


def optimizer_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """AdamW's state as tensors named PARAMETER/KEY; empty before the first step. All processes must ask for it."""
    return {
        f"{name}/{key}": whole(value.detach()).cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def weights_of(model: Any) -> dict[str, Any]:
    """The model's weights, whole, by name; one that has two names is one tensor. All processes must ask for them."""
    tensors: dict[int, Any] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    wanted = model.state_dict().keys()
    for _, tensor in named:
        if id(tensor) not in tensors:
            tensors[id(tensor)] = whole(tensor.detach())
    return {name: tensors[id(tensor)] for name, tensor in named if name in wanted}


def load_optimizer(checkpoint: Checkpoint, model: Any, optimizer: Any) -> bool:
    """Restore AdamW's state from `checkpoint`; False if it has none. Raises ModelError if it is another model's."""
    file = checkpoint.path / OPTIMIZER / STATE
    if not file.is_file():
        return False
    from safetensors.torch import load_file

    state = load_file(file)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        names = {key: f"{name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
        entries = {key: state.pop(full) for key, full in names.items() if full in state}
        averages = [entries[key] for key in ("exp_avg", "exp_avg_sq") if key in entries]
        if len(entries) < len(names) or any(average.shape != parameter.shape for average in averages):
            raise ModelError(
                f"{file}: does not fit parameter {name} of the model beside it; remove the folder to start afresh"
            )
        if not all(average.isfinite().all() for average in averages):
            raise ModelError(f"{file}: {name} holds what is not a finite number; remove the folder to start afresh")
        optimizer.state[parameter] = {k: v if k == "step" else like(v, parameter) for k, v in entries.items()}
    if state:
        raise ModelError(
            f"{file}: holds {next(iter(state))}, which the model beside it has not; remove it to start afresh"
        )
    return True


def load_schedule(checkpoint: Checkpoint) -> dict[str, Any]:
    """What write_checkpoint was given as `schedule`; empty where AdamW's state is gone, which it belongs to."""
    file = checkpoint.path / OPTIMIZER / SCHEDULE
    return json.loads(file.read_text()) if file.is_file() else {}


def prune(out: Path, keep: int) -> list[Path]:
    """Remove the optimizer/ folders of `out`'s ancestors but the newest `keep` checkpoints; return what was removed.

    Only ancestors in the same run are touched: beside `out`, or in a folder beside its parent.
    """
    removed = []
    roots = (out.resolve().parent, out.resolve().parent.parent)
    here: Path | None = out
    age = 0
    while here is not None and (record := here / RECORD).is_file():
        state = here / OPTIMIZER
        inside = here.resolve().parent == roots[0] or here.resolve().parent.parent == roots[1]
        if age >= keep and inside and state.is_dir():
            doomed = here / f".{OPTIMIZER}.removed"
            state.rename(doomed)
            shutil.rmtree(doomed)
            removed.append(state)
        parent = json.loads(record.read_text()).get("parent")
        here = Path(parent["path"]) if parent else None
        age += 1
    return removed
