"""Does a shard say what the model says? Every recorded prompt and completion through the reference model.

    report = verify(shards, [Path("model")], Limits())
    report.faults; report.slices(); report.turn_slices()

The reference is legorl.model in float32: one forward pass a root-to-leaf path of the conversation tree, so that a long
conversation is not read again for each of its turns, and each sampled token is compared once, under the weights that
sampled it, found by version and digest. What cannot be compared is counted, never left out.

|Δ log p| = |reference - recorded|; Pearson is that of the probabilities, as in legorl/metrics/align.sql.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from legorl import routing, tree
from legorl.checkpoint import Checkpoint, ModelError, open_checkpoint
from legorl.commands.inspect import routes
from legorl.commands.inspect.recorded import UNKNOWN, Attempt, Fault, Turn, Weights, read
from legorl.shards import Shard

FIGURES = (
    "tokens", "compared", "not_comparable", "unverified", "pearson", "logprob_abs_diff_mean", "logprob_abs_diff_p99",
    "logprob_abs_diff_max", "routing", "routing_equal",
)  # fmt: skip
# A correlation of probabilities that are all alike is one of rounding errors.
SPREAD = 1e-3


@dataclass(frozen=True)
class Limits:
    """What must hold. `max_diff` holds for every token: among a million, one wrong token moves no mean.

    So does `max_gap` for every row of experts: by how much the router may prefer others to the recorded ones.
    `min_routing`: least share of input positions with recorded experts, where the model is sparse. Measured with a
    sampler in float32: a mean of 5e-6, a p99 of 5e-5 and at most 1.1e-4 over 3549 tokens.
    """

    min_pearson: float = 0.9999
    max_mean: float = 1e-4
    max_diff: float = 1e-3
    max_gap: float = 1e-3
    min_routing: float = 0.0


@dataclass
class Report:
    """The outcome: all turns, what does not hold, and how many rows were graded copies of others."""

    turns: list[Turn]
    faults: list[Fault]
    copies: int

    def slices(self) -> list[list[Any]]:
        """[slice, *FIGURES] over all, then a policy version each."""
        versions = sorted({int(v) for turn in self.turns for v in turn.versions} - {UNKNOWN})
        return [
            ["all", *figures(self.turns)],
            *([f"version={version}", *figures(self.turns, version)] for version in versions),
        ]

    def turn_slices(self) -> Iterator[list[Any]]:
        """[attempt_id, turn, *FIGURES] a turn."""
        return ([turn.attempt_id, turn.index, *figures([turn])] for turn in self.turns)


def verify(
    shards: Iterable[Shard],
    models: Iterable[Path],
    limits: Limits,
    tell: Callable[[str], object] = lambda words: None,
    progress: Callable[[int], Callable[[int], object]] = lambda total: lambda done: None,
) -> Report:
    """Compare all rows of `shards` with the models that sampled them.

    `models`: checkpoints to use; where none fits, the recorded path does if it still holds the same weights. `tell`
    gets words for the user; `progress` the number of tokens to read, and what it returns is called as they are read.
    Raises ShardError and ModelError.
    """
    given = [open_checkpoint(path) for path in models]
    recorded = read(shards)
    attempts, report = recorded.attempts, Report(recorded.turns, recorded.faults, recorded.copies)
    found = _find_weights(attempts, given, tell, report)
    step = progress(sum(len(ids) for key in found for attempt in attempts for ids, _ in _paths(attempt, key)))
    for key, checkpoint in found.items():
        report.faults += _score(attempts, key, checkpoint, step)
    _compare(report, limits)
    return report


# -- weights ---------------------------------------------------------------------------------------------------------


def _find_weights(
    attempts: Sequence[Attempt], given: Sequence[Checkpoint], tell: Callable[[str], object], report: Report
) -> dict[Weights, Checkpoint]:
    """The checkpoint of every weights that sampled a comparable token; a fault for those that are nowhere."""
    wanted: dict[Weights, str | None] = {}
    for attempt in attempts:
        for version, (digest, path) in attempt.weights.items():
            if attempt.wanted((version, digest)):
                wanted.setdefault((version, digest), path)
    found: dict[Weights, Checkpoint] = {}
    for (version, digest), path in sorted(wanted.items()):
        fitting = [one for one in given if (one.version, one.digest) == (version, digest)]
        if fitting:
            found[version, digest] = fitting[0]
            continue
        checkpoint, why = _recorded(version, digest, path)
        if checkpoint:
            found[version, digest] = checkpoint
        else:
            text = f"version {version} cannot be verified: {why}; give the checkpoint of weights {digest} as --model"
            report.faults.append(Fault(None, None, text))
    for one in given:
        if one not in found.values():
            tell(f"{one.path}: version {one.version}, weights {one.digest}, sampled nothing here")
    return found


def _recorded(version: int, digest: str, path: str | None) -> tuple[Checkpoint | None, str]:
    if not path:
        return None, "no path was recorded"
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        return None, str(error)
    if (checkpoint.version, checkpoint.digest) != (version, digest):
        return None, f"{path} holds version {checkpoint.version}, weights {checkpoint.digest} now"
    return checkpoint, ""


# -- the reference ---------------------------------------------------------------------------------------------------


def _paths(attempt: Attempt, weights: Weights) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yield (token ids up to the last target, turns to compare on the way) a path; each wanted turn comes once."""
    home, on = tree.homes(attempt.nodes), dict[int, list[int]]()
    for index in attempt.wanted(weights):
        on.setdefault(home[index], []).append(index)
    for indices in on.values():
        yield tree.path_ids(attempt.nodes, indices[-1]), indices


def _score(
    attempts: Sequence[Attempt], weights: Weights, checkpoint: Checkpoint, step: Callable[[int], object]
) -> list[Fault]:
    """Fill `reference` and `routes` of every turn that `weights` sampled; return faults of what they cannot read."""
    import torch

    from legorl.model import find_routers, load_model

    model = load_model(checkpoint.folder, "fp32").to("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    faults = []
    routers, sparse = None, True
    try:
        routers = find_routers(model)
        sparse = routers is not None
    except ModelError as error:
        if any(turn.routing for attempt in attempts for turn in attempt.turns):
            faults.append(Fault(None, None, f"the recorded experts cannot be compared: {error}"))
    for attempt in attempts:
        for ids, indices in _paths(attempt, weights):
            if outside := ids[(ids < 0) | (ids >= vocabulary)].tolist():
                text = f"token {outside[0]} on its path is none of the model's {vocabulary}"
                faults.append(Fault(attempt.id, indices[-1], text))
            else:
                faults += _score_path(model, routers, attempt, weights[0], ids, indices)
                for turn in (attempt.turns[index] for index in indices):
                    turn.sparse = sparse
                    if turn.routing and not sparse:
                        faults.append(Fault(attempt.id, turn.index, "experts are recorded, and the model is dense"))
            step(len(ids))
    return faults


def _score_path(
    model: Any, routers: Any, attempt: Attempt, version: int, ids: np.ndarray, indices: list[int]
) -> list[Fault]:
    import torch

    from legorl.model import target_logprobs

    turns = [attempt.turns[index] for index in indices]
    picked = [np.flatnonzero(turn.comparable & (turn.versions == version)) for turn in turns]
    places = np.concatenate([attempt.nodes[turn.index].prompt_len + k for turn, k in zip(turns, picked, strict=True)])
    temperatures = np.repeat([turn.temperature for turn in turns], [len(k) for k in picked])
    tensors = [
        torch.as_tensor(values, device=model.device)
        for values in (
            ids[None, :-1].astype(np.int64), np.zeros_like(places), places - 1, ids[places].astype(np.int64),
            temperatures.astype(np.float32),
        )
    ]  # fmt: skip
    compared = routes.Comparison(routers, turns, version, len(ids) - 1) if routers else None
    with torch.no_grad(), compared.watching() if compared else nullcontext():
        logprobs = target_logprobs(model, *tensors).double().cpu().numpy()
    for turn, k, values in zip(
        turns, picked, np.split(logprobs, np.cumsum([len(k) for k in picked])[:-1]), strict=True
    ):
        turn.reference[k] = values
        turn.scored[k] = True
    if compared is None:
        return []
    compared.settle()
    return [Fault(attempt.id, turn.index, text) for turn, text in compared.faults]


# -- figures ---------------------------------------------------------------------------------------------------------


def figures(turns: Sequence[Turn], version: int | None = None) -> list[Any]:
    """The FIGURES of these turns, or of the tokens in them that `version` sampled. None = not measured.

    tokens = compared + not_comparable + unverified.
    """
    turns = [turn for turn in turns if version is None or (turn.versions == version).any()]
    pick = [np.full(len(t.ids), True) if version is None else t.versions == version for t in turns]

    def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros(0), *(array[p] for array, p in zip(arrays, pick, strict=True))])

    scored = joined(t.scored for t in turns).astype(bool)
    other = joined(np.full(len(t.ids), not t.comparable) for t in turns)
    recorded, reference = (joined(a)[scored] for a in ((t.recorded for t in turns), (t.reference for t in turns)))
    gaps = np.abs(reference - recorded)
    some = len(gaps) > 0
    routed = [t for t in turns if t.sparse or t.routing is not None]
    wanted = sum(len(t.span) for t in routed)
    same = np.concatenate([np.zeros(0, bool), *(t.routes.equal for t in turns if t.routes is not None)])
    return [
        len(scored),
        int(scored.sum()),
        int(other.sum()),
        int((~scored).sum() - other.sum()),
        _pearson(np.exp(reference), np.exp(recorded)),
        float(gaps.mean()) if some else None,
        float(np.percentile(gaps, 99)) if some else None,
        float(gaps.max()) if some else None,
        sum(routing.valid_rows(t.routing) for t in routed) / wanted if wanted else None,
        float(same.mean()) if len(same) else None,
    ]


def _pearson(one: np.ndarray, other: np.ndarray) -> float | None:
    if len(one) < 2 or min(one.std(), other.std()) < SPREAD:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _compare(report: Report, limits: Limits) -> None:
    """Add a fault for every turn with a token or a row beyond `limits`, and for every figure of a slice beyond them."""
    for turn in report.turns:
        if wrong := routes.fault(turn, limits.max_gap):
            report.faults.append(Fault(turn.attempt_id, turn.index, wrong))
        # Written so that a NaN is beyond every limit.
        beyond = np.flatnonzero(turn.scored & ~(turn.gaps <= limits.max_diff))
        if len(beyond):
            worst = int(beyond[np.argmax(np.nan_to_num(turn.gaps[beyond], nan=np.inf))])
            text = (
                f"log p of {len(beyond)} of {len(turn.ids)} tokens is off by more than {limits.max_diff:g}; most at "
                f"position {worst} (token {turn.ids[worst]}): recorded {turn.recorded[worst]:.6g}, reference "
                f"{turn.reference[worst]:.6g}"
            )
            report.faults.append(Fault(turn.attempt_id, turn.index, text))
    for name, *values in report.slices():
        found = dict(zip(FIGURES, values, strict=True))
        pearson, mean = found["pearson"], found["logprob_abs_diff_mean"]
        if pearson is not None and not pearson >= limits.min_pearson:
            report.faults.append(Fault(None, None, f"{name}: pearson is {pearson:.6g}, below {limits.min_pearson:g}"))
        if mean is not None and not mean <= limits.max_mean:
            text = f"{name}: the mean of |Δ log p| is {mean:.3g}, above {limits.max_mean:g}"
            report.faults.append(Fault(None, None, text))
        if found["routing"] is not None and not found["routing"] >= limits.min_routing:
            text = f"{name}: experts are recorded for {found['routing']:.6g} of the input positions, below "
            report.faults.append(Fault(None, None, f"{text}{limits.min_routing:g}"))
        if name == "all" and found["unverified"]:
            report.faults.append(Fault(None, None, f"{found['unverified']} of {found['tokens']} tokens are unverified"))
        elif name == "all" and found["tokens"] and not found["compared"]:
            report.faults.append(Fault(None, None, f"none of the {found['tokens']} tokens could be compared"))
