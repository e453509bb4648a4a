"""What a step did to every sampled token, and its figures, as the tables that stand in a checkpoint folder."""

from typing import Any

import numpy as np

from legorl import schema
from legorl.commands.train.batch import UNKNOWN_LAG, Batch, is_valid


def updates_table(batch: Batch, step: int, digest_in: str, digest_out: str | None) -> Any:
    """One row a sampled token (schema.UPDATE). What was not computed is null."""
    import pyarrow as pa

    tokens = batch.tokens

    def of_attempt(values: list[Any]) -> Any:
        names = pa.DictionaryArray.from_arrays(pa.array(tokens.attempt, pa.int32()), pa.array(values, pa.string()))
        return names.cast(pa.string())

    def floats(column: np.ndarray) -> Any:
        return pa.array(column, pa.float32(), mask=np.isnan(column))

    count = len(tokens)
    columns = {
        "run": of_attempt([row["run"] for row in batch.rows]),
        "step": pa.array(np.full(count, step), pa.int32()),
        "digest_in": pa.array([digest_in] * count, pa.string()),
        "digest_out": pa.array([digest_out] * count, pa.string()),
        "attempt_id": of_attempt([row["attempt_id"] for row in batch.rows]),
        "turn": pa.array(tokens.turn),
        "position": pa.array(tokens.position),
        "token": pa.array(tokens.token),
        "train_logprob": floats(tokens.train),
        "old_logprob": floats(tokens.old),
        "sampler_logprob": floats(tokens.sampler),
        "ratio": floats(tokens.ratio),
        "weight": floats(tokens.weight),
        "advantage": floats(tokens.advantage),
        "clipped": pa.array(tokens.clipped == 1, pa.bool_(), mask=tokens.clipped < 0),
        "lag": pa.array(tokens.lag, mask=tokens.lag == UNKNOWN_LAG),
        "flipped": pa.array(tokens.flipped == 1, pa.bool_(), mask=tokens.flipped < 0),
        "reason": pa.array(tokens.reason, pa.string()),
    }
    return pa.table(columns, schema=schema.UPDATE)


def turns_table(batch: Batch) -> Any:
    """What `legorl.metrics` wants to know of the turns, to slice by harness and cause."""
    import pyarrow as pa

    turns = [
        {"attempt_id": row["attempt_id"], "turn": turn["index"], "cause": turn["cause"], "harness": row["harness"]}
        for row in batch.rows
        for turn in row["turns"]
    ]
    kinds = [("attempt_id", pa.string()), ("turn", pa.int32()), ("cause", pa.string()), ("harness", pa.string())]
    return pa.Table.from_pylist(turns, schema=pa.schema(kinds))


def batch_figures(batch: Batch) -> dict[str, float]:
    """Counts and means of the batch after its step. A mean of nothing is absent."""
    tokens, rows = batch.tokens, batch.rows
    valid = [row for row in rows if is_valid(row)]
    figures = {
        "attempts": float(len(rows)),
        "attempts/valid": float(len(valid)),
        "attempts/infra": float(sum(row["blame"] == "infra" for row in rows)),
        "groups": float(len({row["group_id"] for row in rows})),
        "groups/trained": float(len({rows[k]["group_id"] for k in np.unique(tokens.attempt[~np.isnan(tokens.train)])})),
        "tokens/sampled": float(len(tokens)),
        "tokens/trained": 0.0,
    }
    figures |= {f"tokens/{reason}": float(count) for reason, count in sorted(batch.counts().items())}
    if valid:
        figures["reward/mean"] = float(np.mean([row["reward"] for row in valid]))
    done = ~np.isnan(tokens.train)
    if done.any():
        figures["entropy/sampled"] = float(-tokens.train[done].astype(np.float64).mean())
        weight, ratio = (column[done].astype(np.float64) for column in (tokens.weight, tokens.ratio))
        if np.isfinite(weight).all():  # sft has none of these
            figures |= {
                "ratio/mean": float(ratio.mean()),
                "weight/mean": float(weight.mean()),
                "weight/max": float(weight.max()),
                "lag/mean": float(tokens.lag[done].mean()),
            }
        if (tokens.clipped[done] >= 0).all():
            figures["clip/fraction"] = float((tokens.clipped[done] == 1).mean())
        gap = tokens.ref[done].astype(np.float64) - tokens.train[done]
        if np.isfinite(gap).all():
            figures |= {"kl/k1": float(-gap.mean()), "kl/k3": float((np.exp(gap) - gap - 1).mean())}
    return figures
