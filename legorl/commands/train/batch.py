"""One training batch: every sampled token of the step as an entry of a table, with its advantage or why it has none.

    batch = make_batch(rows, model_facts, max_lag=4, loss="grpo")
    batch.tokens.reason; batch.samples; batch.counts()

An attempt is valid if its blame is `model`, it has a reward, and its task is not an impossible one (a canary). Only
valid attempts enter their group's baseline (`advantages` has the formulas), each once, however many turns and branches
it has. All others are in the table, under a reason, and in no mean, deviation or denominator.

For sft, whose tokens come from anywhere, support and lag speak against no token, and a greedy one has temperature 1.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from legorl import tree
from legorl.commands.train.advantages import TRAINED, advantages_of, shaped
from legorl.commands.train.fit import ModelFacts, check_row, check_weights, lags_of
from legorl.commands.train.loss import LossName
from legorl.commands.train.pack import Sample, samples_of
from legorl.commands.train.rows import BatchError
from legorl.routing import RoutingError

# Without an advantage, but sampled by the policy in the ordinary way: good for alignment figures.
COMPARABLE = ("no_variance", "alone", "unrewarded")
UNKNOWN_LAG = -1


@dataclass
class Tokens:
    """One entry a sampled token. Not computed: NaN (float columns), -1 (clipped, flipped)."""

    attempt: np.ndarray  # int32, index into Batch.rows
    turn: np.ndarray  # int32
    position: np.ndarray  # int32, within the turn's completion
    token: np.ndarray  # int32
    sampler: np.ndarray  # float32 log-probability where it was sampled
    temperature: np.ndarray  # float32
    version: np.ndarray  # int32
    lag: np.ndarray  # int32, steps between the weights that sampled it and the loaded ones; -1: other weights (sft)
    reason: np.ndarray  # object (str): trained, or why not
    advantage: np.ndarray = field(init=False)  # float32
    old: np.ndarray = field(init=False)  # float32 log-probability, trainer at the step's start
    ref: np.ndarray = field(init=False)  # float32 log-probability, reference model of the KL term
    train: np.ndarray = field(
        init=False
    )  # float32 log-probability, trainer with the weights that the token's minibatch met
    ratio: np.ndarray = field(init=False)  # float32, policy over old policy
    weight: np.ndarray = field(init=False)  # float32, importance weight, old policy over sampler
    clipped: np.ndarray = field(init=False)  # int8
    flipped: np.ndarray = field(init=False)  # int8, the trainer routes its path otherwise than recorded

    def __post_init__(self) -> None:
        for name in ("advantage", "old", "ref", "train", "ratio", "weight"):
            setattr(self, name, np.full(len(self), np.nan, np.float32))
        self.clipped, self.flipped = np.full(len(self), -1, np.int8), np.full(len(self), -1, np.int8)

    def __len__(self) -> int:
        return len(self.token)


@dataclass
class Batch:
    """`rows`: one an attempt, as read; `samples`: the paths that carry a target, trained or comparable.

    `rewards`: float64 [rows], shaped, NaN where not valid, or its group left out; `free`: bool [tokens], nothing
    speaks against the token itself, whatever becomes of its attempt.
    """

    rows: list[dict[str, Any]]
    tokens: Tokens
    samples: list[Sample]
    rewards: np.ndarray
    free: np.ndarray

    def counts(self) -> dict[str, int]:
        """Sampled tokens by reason, `trained` among them."""
        return dict(Counter(self.tokens.reason.tolist()))

    def trained(self) -> np.ndarray:
        return self.tokens.reason == TRAINED

    def judge(self, loss: LossName, costs: np.ndarray | None = None) -> None:
        """Give every attempt its advantage, or its tokens the reason why not; `costs` [rows] are taken off rewards."""
        groups = [None if np.isnan(r) else row["group_id"] for row, r in zip(self.rows, self.rewards, strict=True)]
        rewards = self.rewards if costs is None else self.rewards - costs
        advantages, reasons = advantages_of(loss, groups, rewards)
        attempts = self.tokens.attempt[self.free]
        self.tokens.reason[self.free] = np.array(reasons, object)[attempts]
        self.tokens.advantage[self.free] = advantages[attempts]

    def kl_to_reference(self) -> np.ndarray:
        """k1 estimate of each attempt's KL to the reference, float64 [rows]: sum of old - ref over its free tokens."""
        gap = self.tokens.old[self.free].astype(np.float64) - self.tokens.ref[self.free]
        return np.bincount(self.tokens.attempt[self.free], weights=gap, minlength=len(self.rows))

    def check_sums(self) -> None:
        """Raise BatchError unless every sampled token of the rows has exactly one place in the table."""
        sampled = sum(len(turn["completion_ids"]) for row in self.rows for turn in row["turns"])
        places = {
            *zip(self.tokens.attempt.tolist(), self.tokens.turn.tolist(), self.tokens.position.tolist(), strict=True)
        }
        if not sampled == len(places) == len(self.tokens) == sum(self.counts().values()):
            counted = sum(self.counts().values())
            raise BatchError(f"{sampled} tokens were sampled, but {counted} are trained or counted under a reason")
        targets = np.concatenate([np.empty(0, np.int64), *(sample.index for sample in self.samples)])
        wanted = np.flatnonzero(np.isin(self.tokens.reason, [TRAINED, "masked", *COMPARABLE]))
        if not np.array_equal(np.sort(targets), wanted):
            raise BatchError("the paths of the batch do not hold every target exactly once")


def is_valid(row: dict[str, Any]) -> bool:
    return row["blame"] == "model" and row["reward"] is not None and not _is_canary(row)


def _is_canary(row: dict[str, Any]) -> bool:
    return "canary" in (row.get("flags") or ())


def _why_invalid(row: dict[str, Any]) -> str | None:
    """The reason for which no token of `row` is trained; None if it is valid."""
    if is_valid(row):
        return None
    return row["blame"] if row["blame"] in ("infra", "task") else "canary" if _is_canary(row) else "ungraded"


def make_batch(
    rows: list[dict[str, Any]], facts: ModelFacts, max_lag: int, loss: LossName = "grpo",
    overlong: tuple[int, int] | None = None, whole_groups: bool = False,
) -> Batch:  # fmt: skip
    """Make the batch of one step from `rows` (one an attempt). Raises BatchError or CheckError; see the module.

    `overlong`: (maximum, cache) of the overlong punishment, in sampled tokens of an attempt that no drop covers.
    `whole_groups`: leave out valid attempts (`incomplete`) whose group has others, or should have by the plan.
    """
    if loss != "sft":
        check_weights(filter(is_valid, rows))
    pieces = [_tokens_of(number, row, facts, max_lag, loss == "sft") for number, row in enumerate(rows)]
    tokens = Tokens(**{name: np.concatenate([_GIVEN[name], *(piece[name] for piece in pieces)]) for name in _GIVEN})
    free = tokens.reason == TRAINED
    if whole_groups:
        broken = _broken_groups(rows)
        left_out = free & np.array([row["group_id"] in broken for row in rows], bool)[tokens.attempt]
        tokens.reason[left_out], free = "incomplete", free & ~left_out
    samples: list[Sample] = []
    first = 0
    for number, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
        here = slice(first, first + len(piece["token"]))
        if free[here].any():
            samples += _samples_of(row, number, first, free[here])
        first = here.stop
    rewards = np.array([row["reward"] if is_valid(row) else np.nan for row in rows], np.float64)
    if whole_groups:
        rewards[[row["group_id"] in broken for row in rows]] = np.nan
    if overlong:
        lengths = [sum(d is None for turn in row["turns"] for d in tree.drop_reasons(turn)) for row in rows]
        rewards = shaped(rewards, np.array(lengths), *overlong)
    batch = Batch(rows, tokens, samples, rewards, free)
    batch.judge(loss)
    batch.check_sums()
    return batch


def _broken_groups(rows: list[dict[str, Any]]) -> set[str]:
    """Groups that do not consist of valid attempts only, as many as planned (where the rows have `planned`)."""
    members: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        members.setdefault(row["group_id"], []).append(row)
    return {
        group
        for group, own in members.items()
        if not all(map(is_valid, own)) or len(own) < max(row.get("planned") or 0 for row in own)
    }


_GIVEN: dict[str, np.ndarray] = {
    "attempt": np.empty(0, np.int32),
    "turn": np.empty(0, np.int32),
    "position": np.empty(0, np.int32),
    "token": np.empty(0, np.int32),
    "sampler": np.empty(0, np.float32),
    "temperature": np.empty(0, np.float32),
    "version": np.empty(0, np.int32),
    "lag": np.empty(0, np.int32),
    "reason": np.empty(0, object),
}


def _samples_of(row: dict[str, Any], number: int, first: int, wanted: np.ndarray) -> list[Sample]:
    records = [turn["routing"] for turn in row["turns"]]
    try:
        return samples_of(tree.nodes_of(row["turns"]), number, first, wanted, records)
    except RoutingError as error:
        raise BatchError(f"{row['attempt_id']}: {error}; leave this attempt out or roll it out again") from error


def _tokens_of(
    number: int, row: dict[str, Any], facts: ModelFacts, max_lag: int, expert: bool
) -> dict[str, np.ndarray]:
    """The columns of `_GIVEN` for one attempt; `trained` here means: nothing speaks against it so far.

    `expert`: for sft.
    """
    whole = _why_invalid(row)
    if whole is None:
        check_row(row, facts)
    lags = lags_of(row, facts) if whole is None and not expert else {}
    columns: dict[str, list[Any]] = {name: [] for name in _GIVEN}
    for turn in row["turns"]:
        count = len(turn["completion_ids"])
        versions = [version for span in turn["versions"] for version in [span["version"]] * span["length"]]
        logprobs = turn["logprobs"]
        if whole is not None:  # a record that was cut short is counted all the same
            versions = [*versions, *[facts.version] * count][:count]
            logprobs = [*logprobs, *[np.nan] * count][:count]
        prompt = turn["prefix_len"] + len(turn["context_ids"])
        drops = tree.drop_reasons(turn)
        temperature = turn["temperature"]
        if whole is None and expert:
            drops = [None if drop == "support" else drop for drop in drops]
            temperature = 1.0 if turn["support"] == "greedy" or not temperature > 0 else temperature
        elif whole is None and turn["support"] != "full":
            drops = [drop or "support" for drop in drops]
        if whole is None and turn["foreign"]:
            drops = [drop or "foreign" for drop in drops]
        for k in range(count):
            lag = UNKNOWN_LAG if expert else lags.get(versions[k], facts.version - versions[k])
            reason = whole or drops[k]
            if reason is None and facts.context is not None and prompt + k > facts.context:
                reason = "too_long"
            if reason is None and lag > max_lag:
                reason = "stale"
            columns["lag"].append(lag)
            columns["reason"].append(reason or TRAINED)
        columns["attempt"] += [number] * count
        columns["turn"] += [turn["index"]] * count
        columns["position"] += range(count)
        columns["token"] += turn["completion_ids"]
        columns["sampler"] += logprobs
        columns["temperature"] += [temperature] * count
        columns["version"] += versions
    return {name: np.array(columns[name], dtype=empty.dtype) for name, empty in _GIVEN.items()}
