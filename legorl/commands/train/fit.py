"""Whether an attempt's record fits the model to train: its tokens, its tree, the weights that sampled it.

    check_row(row, facts)
    lag = lags_of(row, facts)[version]
    facts = ModelFacts(..., ancestors=ancestors_of(checkpoint))

What does not fit is refused by the attempt's name; nothing is mended here.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from legorl import tree
from legorl.checkpoint import RECORD, Checkpoint
from legorl.commands.train.rows import BatchError, CheckError


@dataclass(frozen=True)
class ModelFacts:
    """What the rows are checked against: `context` in tokens, the tokenizer's digest or None if the folder has none.

    `ancestors`: digests of earlier versions, where they are known.
    """

    version: int
    digest: str
    vocabulary: int
    context: int | None
    tokenizer_digest: str | None
    ancestors: dict[int, str] = field(default_factory=dict)


def ancestors_of(checkpoint: Checkpoint) -> dict[int, str]:
    """Digests of the versions that `checkpoint` descends from, as far back as their records are where they were.

    Raises CheckError if its weights are not those that were written with its record.
    """
    found: dict[int, str] = {}
    record = _record(checkpoint.path)
    if record.get("digest", checkpoint.digest) != checkpoint.digest:
        raise CheckError(
            f"{checkpoint.path}: holds weights {checkpoint.digest}, but {record['digest']} were written there; they "
            f"were changed afterwards. Put them back, or give --model the folder {checkpoint.folder} as a new base"
        )
    while parent := record.get("parent"):
        found[parent["version"]] = parent["digest"]
        record = _record(Path(parent["path"]))
        if record.get("digest") != parent["digest"]:
            break
    return found


def _record(path: Path) -> dict[str, Any]:
    """The record of the checkpoint at `path`; empty where there is none."""
    file = path / RECORD
    return json.loads(file.read_text()) if file.is_file() else {}


def check_row(row: dict[str, Any], facts: ModelFacts) -> None:
    """Raise CheckError or BatchError, naming the attempt, unless its record is whole and of this model's tokens."""
    name = row["attempt_id"]
    if name.rpartition(".")[0] != row["group_id"]:
        raise CheckError(f"{name}: is no attempt of its group {row['group_id']}; its row was changed or mixed up")
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
    requests: dict[str, int] = {}
    for turn in row["turns"]:
        where = f"{name}, turn {turn['index']}"
        if turn["request_id"] and (first := requests.setdefault(turn["request_id"], turn["index"])) != turn["index"]:
            raise CheckError(f"{where}: is the request of turn {first} once more, so its tokens would be trained twice")
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
    _check_sums(row)


def _check_sums(row: dict[str, Any]) -> None:
    """Raise CheckError if what lego-rollout counted as it ended is not what is recorded, so that none gets lost."""
    turns, budgets = row["turns"], row["budgets"] or {}
    held = {"turns": len(turns), "tokens": sum(len(turn["completion_ids"]) for turn in turns)}
    for kind, count in held.items():
        used = (budgets.get(kind) or {}).get("used")
        if used is not None and used != count:
            raise CheckError(
                f"{row['attempt_id']}: {used:g} {kind} were counted when it was rolled out, and {count} are recorded; "
                "the record is not whole, so leave this attempt out or roll it out again"
            )


def check_weights(rows: Iterable[dict[str, Any]]) -> None:
    """Raise CheckError, naming two attempts, if `rows` do not agree on which weights a version is."""
    first: dict[int, tuple[str, str]] = {}
    for row in rows:
        used = _versions(row)
        for entry in (entry for entry in row["weights"] or [] if entry["version"] in used):
            digest, attempt = first.setdefault(entry["version"], (entry["digest"], row["attempt_id"]))
            if digest != entry["digest"]:
                raise CheckError(
                    f"{row['attempt_id']}: version {entry['version']} is {entry['digest']} there, and {digest} in "
                    f"{attempt}; they are of two runs, or were changed, so give only those of one"
                )


def _versions(row: dict[str, Any]) -> set[int]:
    return {span["version"] for turn in row["turns"] for span in turn["versions"]}


def lags_of(row: dict[str, Any], facts: ModelFacts) -> dict[int, int]:
    """Steps between the loaded weights and each version that sampled `row`; the same weights (by digest) are lag 0."""
    digests = {entry["version"]: entry["digest"] for entry in row["weights"] or []}
    lags = {}
    for version in sorted(_versions(row)):
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
        elif digests[version] != facts.ancestors.get(version, digests[version]):
            raise CheckError(
                f"{row['attempt_id']}: version {version} had weights {digests[version]} when it sampled, but the "
                f"version {version} that --model was made from had {facts.ancestors[version]}; give shards of this run"
            )
        else:
            lags[version] = facts.version - version
    return lags
