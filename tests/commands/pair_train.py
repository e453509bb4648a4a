"""One step with each of many settings, in as many processes as were launched: python -m commands.pair_train ARGS.

ARGS: the shard, the model, the reference model, the file that the first process writes. Starting processes takes longer
than all of these steps.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "sft")
SETTINGS: dict[str, dict[str, Any]] = {
    **{loss: {"loss": loss} for loss in LOSSES},
    **{f"{loss}-parts": {"loss": loss, "minibatches": 2} for loss in LOSSES},
    "bypass": {"off_policy": "bypass"},
    "gspo-bypass": {"loss": "gspo", "off_policy": "bypass", "minibatches": 2},
    "sequence": {"is_level": "sequence"},
    "sequence-mask": {"is_level": "sequence", "is_mode": "mask", "loss": "rloo"},
    "mask": {"is_mode": "mask", "minibatches": 2, "is_cap": 1.3},
    "rows": {"packing": "rows"},
    "k1-reward": {"kl": "k1-reward", "kl_coef": 0.1},
    "k2": {"kl": "k2", "kl_coef": 0.1, "is_mode": "mask"},
    "k3": {"kl": "k3", "kl_coef": 0.1, "minibatches": 2},
}


def take(path: Path, model: Path, reference: Path) -> dict[str, np.ndarray]:
    """For each setting: NAME/loss, NAME/grad_norm, NAME/old and the like, NAME/weights/PARAMETER."""
    from legorl.checkpoint import open_checkpoint
    from legorl.commands.train import save
    from legorl.commands.train.batch import make_batch
    from legorl.commands.train.rows import read_rows
    from legorl.commands.train.settings import resolve
    from legorl.commands.train.step import Trainer
    from legorl.commands.train.train import facts_of, score_reference, with_constant
    from legorl.model import load_model
    from legorl.shards import Tally, open_shards

    rows = read_rows(open_shards([path]), Tally())
    checkpoint, referee = open_checkpoint(model), open_checkpoint(reference)
    found: dict[str, np.ndarray] = {}
    for name, given in SETTINGS.items():
        settings = resolve(**{"loss": "grpo", "lr": 1e-3, "tokens_per_batch": 12} | given)
        settings = with_constant(replace(settings, grad_clip=0.5), rows)
        batch = make_batch(rows, facts_of(checkpoint), 4, settings.loss)
        if settings.kl != "none":
            score_reference(batch, settings, referee)
        trainer = Trainer(settings, load_model(checkpoint.folder, "fp32"))
        figures = trainer.run(batch, lambda: None)
        batch.check_sums()
        found |= {f"{name}/{key}": np.array(figures[key]) for key in ("loss", "grad_norm")}
        found |= {f"{name}/{key}": getattr(batch.tokens, key) for key in ("train", "old", "ratio", "weight", "clipped")}
        found[f"{name}/masked"] = batch.tokens.reason == "masked"
        weights = save.weights_of(trainer.model)
        found |= {f"{name}/weights/{key}": value.cpu().numpy() for key, value in weights.items()}
    return found


if __name__ == "__main__":
    import os

    taken = take(*map(Path, sys.argv[1:4]))
    if os.environ["RANK"] == "0":
        np.savez(sys.argv[4], **taken)
