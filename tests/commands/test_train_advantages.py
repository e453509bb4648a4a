"""Advantages by the formulas, who enters a baseline, reward shaping, and what sft and reinforce learn from."""

import numpy as np
import pytest
from builders import group, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl.commands.train.advantages import advantages_of, shaped
from legorl.commands.train.batch import make_batch
from legorl.commands.train.fit import ModelFacts
from legorl.commands.train.loss import LOSSES, token_scales
from legorl.commands.train.rows import CheckError

DIGEST = "2" * 32  # that of the builders' weights
FACTS = ModelFacts(version=0, digest=DIGEST, vocabulary=1000, context=64, tokenizer_digest=None)
BASELINED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")


def of(loss, rewards, groups=None):
    groups = ["a"] * len(rewards) if groups is None else groups
    return advantages_of(loss, groups, np.array(rewards, float))


def test_the_formulas():
    rewards = np.array([1.0, 0.0, 0.5, 0.0])
    std = np.sqrt(((rewards - 0.375) ** 2).sum() / 3)
    for loss in ("grpo", "dapo", "gspo", "cispo"):
        assert np.allclose(of(loss, rewards)[0], (rewards - 0.375) / (std + 1e-4))
    assert np.allclose(of("dr_grpo", rewards)[0], rewards - 0.375)
    others = [rewards[[1, 2, 3]], rewards[[0, 2, 3]], rewards[[0, 1, 3]], rewards[[0, 1, 2]]]
    assert np.allclose(of("rloo", rewards)[0], [r - o.mean() for r, o in zip(rewards, others, strict=True)])
    assert np.allclose(of("reinforce", rewards)[0], rewards)
    got, reasons = of("sft", rewards)
    assert np.isnan(got).all() and reasons == ["trained", "unrewarded", "unrewarded", "unrewarded"]


@pytest.mark.parametrize("loss", BASELINED)
def test_groups_without_a_difference_and_lone_attempts_have_no_baseline(loss):
    got, reasons = of(loss, [1, 1, 0, 1, 0, np.nan], ["same", "same", "one", "two", "two", None])
    assert reasons == ["no_variance", "no_variance", "alone", "trained", "trained", "trained"]
    assert np.isfinite(got).tolist() == [False, False, False, True, True, False]


def test_without_a_baseline_equal_rewards_and_lone_attempts_are_learned_from():
    got, reasons = of("reinforce", [1, 1, 0], ["same", "same", "one"])
    assert got.tolist() == [1, 1, 0] and set(reasons) == {"trained"}
    assert of("sft", [1, 1, 1], ["same", "same", "one"])[1] == ["trained"] * 3
    # Nothing but zeros: a step of size 0 would still move weights by the optimiser's momentum.
    assert of("reinforce", [0, 0])[1] == ["unrewarded"] * 2
    assert of("reinforce", [-1, 0])[1] == ["trained"] * 2


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=6),
    st.floats(0.1, 100),
    st.floats(-5, 5),
)
@settings(max_examples=60, deadline=None)
def test_what_scaling_and_shifting_rewards_changes(rewards, scale, shift):
    changed = np.array(rewards) * scale + shift
    plain, _ = of("grpo", rewards)
    assert np.allclose(of("grpo", changed)[0], plain, rtol=2e-2, equal_nan=True)  # but for the 1e-4
    for loss in ("dr_grpo", "rloo"):
        assert np.allclose(of(loss, changed)[0], scale * of(loss, rewards)[0], atol=1e-9, equal_nan=True)


def test_overlong_attempts_are_punished_in_a_line():
    lengths = np.array([10, 60, 70, 80, 100, 500])
    assert np.allclose(shaped(np.ones(6), lengths, 100, 40), [1, 1, 0.75, 0.5, 0, 0])


def test_the_length_that_is_punished_is_what_the_policy_sampled_and_nobody_cut():
    cut = [{"start": 0, "length": 3, "reason": "cut"}]
    rows = [
        trajectory(attempt=0, reward=1.0, turns=[turn(completion_ids=range(4)), turn(1, 0, 7, completion_ids=[7])]),
        trajectory(attempt=1, reward=1.0, turns=[turn(completion_ids=range(5), drops=cut)]),
    ]
    batch = make_batch(rows, FACTS, 4, overlong=(6, 4))
    assert np.allclose(batch.rewards, [1 - 3 / 4, 1.0])
    assert batch.counts() == {"trained": 7, "cut": 3}  # the shaping makes the difference
    assert make_batch(rows, FACTS, 4).counts() == {"no_variance": 7, "cut": 3}


@pytest.mark.parametrize("loss", BASELINED)
def test_branches_change_neither_advantage_nor_weight_of_an_attempt(loss):
    whole = [turn(completion_ids=range(6))]
    branches = [
        turn(completion_ids=range(2)),
        turn(1, 0, 3, context_ids=[11], completion_ids=[5, 6]),
        turn(2, context_ids=[12], completion_ids=[7, 8]),
    ]
    found = []
    for turns in (whole, branches):
        rows = [trajectory(attempt=0, reward=1.0, turns=turns), *group([1.0, 0.0, 0.0])[1:]]
        tokens = make_batch(rows, FACTS, 4, loss).tokens
        scales = token_scales(loss, tokens.attempt, 10.0)
        mine = tokens.attempt == 0
        assert mine.sum() == 6
        found.append([scales[mine].sum(), *np.unique(tokens.advantage[mine])])
    assert np.allclose(*found) and len(found[1]) == 2


def test_costs_are_taken_off_before_the_baseline():
    rows = group([1.0, 1.0, 0.0])
    batch = make_batch(rows, FACTS, 4, "dr_grpo")
    batch.tokens.old = np.full(len(batch.tokens), -1.0, np.float32)
    batch.tokens.ref = np.where(batch.tokens.attempt == 1, -1.25, -1.0).astype(np.float32)
    costs = batch.kl_to_reference()
    assert np.allclose(costs, [0, 0.25 * 4, 0])  # summed over the attempt's four tokens
    batch.judge("dr_grpo", 0.3 * costs)
    batch.check_sums()
    wanted = np.array([1.0, 0.7, 0.0]) - 1.7 / 3
    assert np.allclose(batch.tokens.advantage, wanted[batch.tokens.attempt])
    same = make_batch(group([1.0, 1.0]), FACTS, 4)
    assert same.counts() == {"no_variance": 8}
    same.judge("grpo", np.array([0.1, 0.0]))
    assert same.counts() == {"trained": 8}


def test_a_dropped_token_costs_nothing():
    rows = group([1.0, 0.0])
    rows[0]["turns"][0]["drops"] = [{"start": 0, "length": 1, "reason": "cut"}]
    batch = make_batch(rows, FACTS, 4)
    batch.tokens.old[:], batch.tokens.ref[:] = -1.0, -2.0
    batch.tokens.old[batch.tokens.reason == "cut"] = np.nan
    assert batch.kl_to_reference().tolist() == [3.0, 4.0]


def test_sft_takes_tokens_of_any_support_and_of_any_weights():
    turns = [
        turn(0, completion_ids=range(3), support="greedy", temperature=0.0, version=7),
        turn(1, 0, 6, completion_ids=[5, 6], support="top_p", temperature=0.5),
        turn(2, 0, 6, context_ids=[8], completion_ids=[9], foreign=True),
        turn(3, context_ids=[70], completion_ids=[71, 72], drops=[{"start": 0, "length": 1, "reason": "support"},
                                                                  {"start": 1, "length": 1, "reason": "side"}]),
    ]  # fmt: skip
    weights = [{"version": 7, "digest": "an expert", "path": ""}]
    rows = [trajectory(attempt=k, reward=r, turns=turns, weights=weights) for k, r in enumerate((1.0, 0.0))]
    rows.append(trajectory(attempt=2, outcome="engine_lost"))
    batch = make_batch(rows, FACTS, 0, "sft")
    assert batch.counts() == {"trained": 6, "unrewarded": 6, "foreign": 2, "side": 2, "infra": 4}
    mine = batch.tokens.attempt == 0
    assert batch.tokens.temperature[mine].tolist() == [1, 1, 1, 0.5, 0.5, 1, 1, 1]
    assert set(batch.tokens.lag[batch.trained()]) == {-1}
    with pytest.raises(CheckError, match="version 0, which its column"):
        make_batch(rows, FACTS, 0, "reinforce")


def test_every_loss_says_how_it_averages_and_what_an_advantage_is():
    assert {loss: (f.average, f.advantage, f.clip_low, f.clip_high) for loss, f in LOSSES.items()} == {
        "grpo": ("attempt", "scaled", 0.2, 0.2),
        "dr_grpo": ("constant", "centred", 0.2, 0.2),
        "dapo": ("token", "scaled", 0.2, 0.28),
        "gspo": ("attempt", "scaled", 3e-4, 4e-4),
        "cispo": ("token", "scaled", None, 4.0),
        "rloo": ("sum", "leave_one_out", None, None),
        "reinforce": ("sum", "reward", None, None),
        "sft": ("token", "solved", None, None),
    }
