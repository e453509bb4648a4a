"""One line a round: attempts, rewards with their uncertainty, and where every sampled token went.

Tokens: sampled = trained + dropped + undecided. With updates, `lego-train` has said of each token what became of it;
without, only the spans that lego-serve dropped are known and the rest is undecided. Tokens of earlier tries, of which
an attempt keeps only the count, are dropped under the reason `earlier_try`.

Reward interval: percentile bootstrap over groups, because attempts at one task are not independent of each other; null
with fewer than two groups. Pass interval: Wilson's over attempts, which says something even where all failed. Attempts
at impossible tasks (canaries) have no part in either: they are counted beside, and those that passed all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from legorl import metrics
from legorl.commands.inspect.load import Files

RESAMPLES = 10_000
EARLIER_TRY = "earlier_try"
UNNAMED = "unnamed"  # a row of updates without a reason: a fault, which `unaccounted` reports

# `told`: what updates say of each token. An attempt that was trained on more than once is told by its latest step.
# `place`: the round of an attempt: the one it was sampled in, or, for updates alone, the one it was trained in.
_TOLD = """
    with latest as (select attempt_id, max(step) as step from updates group by attempt_id),
    told as (select u.* from updates as u semi join latest using (attempt_id, step)),
    place as (
        select attempt_id, run, step from trajectories
        union all
        select distinct attempt_id, run, step from told anti join trajectories using (attempt_id)
    )
"""


_CANARY = "coalesce(list_contains(flags, 'canary'), false)"


@dataclass
class Round:
    """What is known of one run and step; None = not measured."""

    run: str
    step: int
    planned: int | None = None
    attempts: int | None = None
    lost: int | None = None
    reward: float | None = None
    reward_low: float | None = None
    reward_high: float | None = None
    graded: int | None = None
    judged: int | None = None  # attempts whose tests were judged, whatever the reward is made of
    passed: int | None = None
    pass_rate: float | None = None
    pass_low: float | None = None
    pass_high: float | None = None
    canaries: int | None = None  # graded attempts at impossible tasks; no reward or pass above is theirs
    canaries_passed: int | None = None  # of them, those that cheated
    turns_per_attempt: float | None = None
    sampled_tokens: int | None = None
    trained_tokens: int | None = None
    dropped_tokens: dict[str, int] = field(default_factory=dict)
    undecided_tokens: int | None = None
    pearson: float | None = None
    logprob_abs_diff_max: float | None = None
    outcomes: dict[str, int] = field(default_factory=dict)


def bootstrap(groups: Sequence[Sequence[float]], resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of the mean over all values, resampling whole groups; None below two groups.

    Deterministic: the same values give the same interval.
    """
    if len(groups) < 2:
        return None
    sums = np.array([sum(values) for values in groups], dtype=float)
    counts = np.array([len(values) for values in groups], dtype=float)
    picks = np.random.default_rng(0).integers(len(groups), size=(resamples, len(groups)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def wilson(passed: int, total: int) -> tuple[float, float] | None:
    """Return Wilson's 95 % score interval of a rate (Wilson 1927); None for no trials."""
    if not total:
        return None
    z = 1.959963984540054
    centre = (passed + z * z / 2) / (total + z * z)
    half = z / (total + z * z) * np.sqrt(passed * (total - passed) / total + z * z / 4)
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))


def summarise(connection: Any, files: Files) -> list[Round]:
    """Return the rounds in `connection` (of metrics.connect); the footers of `files` have the plans."""
    rounds: dict[tuple[str, int], Round] = {}

    def at(run: str, step: int) -> Round:
        return rounds.setdefault((run, step), Round(run, step))

    _attempts(connection, at)
    for plan in files.plans:
        one = at(plan.run, plan.step)
        one.planned = (one.planned or 0) + len(plan.attempt_ids)
    _tokens(connection, at)
    for one in rounds.values():
        _alignment(connection, one)
    return [rounds[key] for key in sorted(rounds)]


def _attempts(connection: Any, at: Any) -> None:
    for run, step, *numbers in connection.execute(f"""
        select run, step, count(*), count(*) filter (blame = 'infra'), avg(reward) filter (not {_CANARY}),
               count(reward) filter (not {_CANARY}), count(*) filter (resolved and not {_CANARY}),
               count(resolved) filter (not {_CANARY}), avg(turn_count), count(*) filter ({_CANARY}),
               count(*) filter (list_contains(flags, 'canary_passed'))
        from trajectories group by run, step
    """).fetchall():
        one = at(run, step)
        one.attempts, one.lost, one.reward, one.graded, passed, judged, one.turns_per_attempt, *canaries = numbers
        if canaries[0]:
            one.canaries, one.canaries_passed = canaries
        if judged:
            one.judged, one.passed, one.pass_rate = judged, passed, passed / judged
            one.pass_low, one.pass_high = wilson(passed, judged) or (None, None)
    groups: dict[tuple[str, int], list[list[float]]] = {}
    for run, step, rewards in connection.execute(f"""
        select run, step, list(reward order by attempt_id) from trajectories where reward is not null and not {_CANARY}
        group by run, step, group_id order by group_id
    """).fetchall():
        groups.setdefault((run, step), []).append(rewards)
    for key, values in groups.items():
        at(*key).reward_low, at(*key).reward_high = bootstrap(values) or (None, None)
    for run, step, outcome, count in connection.execute("""
        select run, step, outcome, count(*) as n from trajectories group by all order by n desc, outcome
    """).fetchall():
        at(run, step).outcomes[outcome] = count


def _tokens(connection: Any, at: Any) -> None:
    fates = connection.execute(
        _TOLD
        + """
        select place.run, place.step, coalesce(reason, ?) as told, null as dropped, count(*)
        from told join place using (attempt_id) group by all
        union all
        select run, step, null, drop_reason, count(*) from tokens anti join latest using (attempt_id) group by all
        union all
        select run, step, null, ?, sum(list_sum(list_transform(history, lambda h: h.tokens)))
        from trajectories where len(history) > 0 group by all
        order by all
        """,
        [UNNAMED, EARLIER_TRY],
    ).fetchall()
    for run, step, told, dropped, count in fates:
        one = at(run, step)
        count = int(count or 0)
        one.sampled_tokens = (one.sampled_tokens or 0) + count
        one.undecided_tokens = one.undecided_tokens or 0
        if told:
            one.trained_tokens = one.trained_tokens or 0
        if told == "trained":
            one.trained_tokens += count
        elif told or dropped:
            one.dropped_tokens[told or dropped] = one.dropped_tokens.get(told or dropped, 0) + count
        else:
            one.undecided_tokens += count


def _alignment(connection: Any, one: Round) -> None:
    updates = connection.sql(
        _TOLD + "select told.* from told join place using (attempt_id) where place.run = ? and place.step = ?",
        params=[one.run, one.step],
    ).to_arrow_table()
    figures = dict(metrics.run("align", updates=updates)) if len(updates) else {}
    one.pearson = figures.get("align/pearson")
    one.logprob_abs_diff_max = figures.get("align/logprob_abs_diff_max")


def shown(one: Round) -> dict[str, Any]:
    """The cells of `one` in a table for people, by heading."""
    short = one.planned is not None and one.planned != one.attempts
    return {
        "run": one.run,
        "step": one.step,
        "attempts": f"{one.attempts or 0} of {one.planned}" if short else one.attempts,
        "lost": one.lost,
        "reward": _rounded(one.reward, 3),
        "95 %": _interval(one.reward_low, one.reward_high),
        "passed": None if one.passed is None else f"{one.passed} of {one.judged}",
        "95 % ": _interval(one.pass_low, one.pass_high),
        "turns": _rounded(one.turns_per_attempt, 2),
        "sampled =": one.sampled_tokens,
        "trained +": one.trained_tokens,
        "dropped +": None if one.sampled_tokens is None else sum(one.dropped_tokens.values()),
        "undecided": one.undecided_tokens,
        "Pearson": _rounded(one.pearson, 6),
        "max |Δ log p|": one.logprob_abs_diff_max,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _interval(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{low:.2f} to {high:.2f}"


def unaccounted(connection: Any) -> list[str]:
    """Return a line for each attempt whose tokens in updates are not exactly those sampled, each told once.

    Attempts that no update has seen are not looked at.
    """
    wrong = connection.execute(
        _TOLD
        + """,
        told_tokens as (select attempt_id, turn, position, any_value(token) as token, count(*) as times,
                               bool_or(reason is null) as unnamed from told group by all),
        sampled as (select attempt_id, turn, position, token from tokens semi join latest using (attempt_id)),
        compared as (
            select attempt_id, s.token as sampled, t.token as told, t.times, t.unnamed
            from sampled as s full join (select * from told_tokens semi join trajectories using (attempt_id)) as t
            using (attempt_id, turn, position)
        )
        select attempt_id, count(*) filter (told is null), count(*) filter (sampled is null),
               count(*) filter (told <> sampled), count(*) filter (times > 1), count(*) filter (unnamed)
        from compared where told is distinct from sampled or times > 1 or unnamed group by attempt_id
        order by attempt_id
        """
    ).fetchall()
    names = ("neither trained nor dropped", "never sampled", "other than sampled", "told twice", "without a reason")
    return [
        f"{attempt}: " + ", ".join(f"{n} tokens {name}" for n, name in zip(counts, names, strict=True) if n)
        for attempt, *counts in wrong
    ]
