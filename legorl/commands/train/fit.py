"""Whether an attempt's record fits the model to train: its tokens, its tree, the weights that sampled it.

    check_row(row, facts)
    lag = lags_of(row, facts)[version]

What does not fit is refused by the attempt's name; nothing is mended here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from legorl import tree
from legorl.commands.train.rows import BatchError, CheckError


@dataclass(frozen=True)
class ModelFacts:
    """What the rows are checked against: `context` in tokens, the tokenizer's digest or None if the folder has none."""

    version: int
    digest: str
    vocabulary: int
    context: int | None
    tokenizer_digest: str | None


def check_row(row: dict[str, Any], facts: ModelFacts) -> None:
    """Raise CheckError or BatchError, naming the attempt, unless its record is whole and of this model's tokens."""
    name = row["attempt_id"]
    if not np.isfinite(row["reward"]):
        raise BatchError(f"{name}: its reward is {row['reward']}; grade it again")
    try:
        tree.check(row["turns"])
    except tree.TreeError as error:
        raise BatchError(
            f"{name}: {error}; the record is damaged, so leave this attempt out or roll it out again"
        ) from error
    digest = row["tokenizer_digest"]
    if digest and facts.tokenizer_digest and digest != facts.tokenizer_digest:
        raise CheckError(
            f"{name}: sampled with tokenizer {digest}, but the model to train has {facts.tokenizer_digest}; "
            "give --model the model that sampled it"
        )
    for turn in row["turns"]:
        where = f"{name}, turn {turn['index']}"
        ids = [*turn["context_ids"], *turn["completion_ids"]]
        if ids and not 0 <= min(ids) <= max(ids) < facts.vocabulary:
            raise CheckError(
                f"{where}: holds token {max(ids)}, but the model's vocabulary ends at {facts.vocabulary - 1}; "
                "give --model the model that sampled it"
            )
        if turn["completion_ids"] and turn["prefix_len"] + len(turn["context_ids"]) == 0:
            raise BatchError(f"{where}: it has no prompt, so its first token has no log-probability")
        if turn["support"] == "full" and not turn["temperature"] > 0:
            raise BatchError(f"{where}: sampled from the full support at temperature {turn['temperature']}")


def lags_of(row: dict[str, Any], facts: ModelFacts) -> dict[int, int]:
    """Steps between the loaded weights and each version that sampled `row`; the same weights (by digest) are lag 0."""
    digests = {entry["version"]: entry["digest"] for entry in row["weights"] or []}
    lags = {}
    for version in sorted({span["version"] for turn in row["turns"] for span in turn["versions"]}):
        if version not in digests:
            raise CheckError(
                f"{row['attempt_id']}: sampled by version {version}, which its column `weights` does not name"
            )
        if digests[version] == facts.digest:
            lags[version] = 0
        elif version == facts.version:
            raise CheckError(
                f"{row['attempt_id']}: version {version} had weights {digests[version]} when it sampled, but version "
                f"{facts.version} in --model has {facts.digest}; give --model the checkpoint that was served"
            )
        elif version > facts.version:
            raise CheckError(
                f"{row['attempt_id']}: sampled by version {version}, newer than version {facts.version} in --model; "
                "give --model the newest checkpoint"
            )
        else:
            lags[version] = facts.version - version
    return lags
