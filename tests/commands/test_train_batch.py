"""From rows to a batch: validity, advantages, reasons, lags, and paths that hold every target once."""

import numpy as np
import pytest
from builders import group, shard, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import trees

from legorl import tree
from legorl.commands.train.batch import make_batch
from legorl.commands.train.fit import ModelFacts
from legorl.commands.train.pack import samples_of
from legorl.commands.train.rows import BatchError, CheckError, read_rows
from legorl.shards import Tally, open_shards

DIGEST = "2" * 32  # that of the builders' weights
FACTS = ModelFacts(version=0, digest=DIGEST, vocabulary=1000, context=64, tokenizer_digest=None)


def batch_of(rows, facts=FACTS, max_lag=4):
    return make_batch(rows, facts, max_lag)


def advantages(batch):
    return {
        row["attempt_id"].rsplit(".", 1)[1]: float(batch.tokens.advantage[batch.tokens.attempt == k][0])
        for k, row in enumerate(batch.rows)
        if (batch.tokens.attempt == k).any()
    }


def test_advantage_is_reward_in_sample_deviations_of_its_valid_siblings():
    got = advantages(batch_of(group([1.0, 0.0, 0.0, 0.0])))
    assert got["0"] == pytest.approx(0.75 / (0.5 + 1e-4)) and got["1"] == pytest.approx(-0.25 / (0.5 + 1e-4))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"outcome": "engine_lost"}, "infra"),
        ({"outcome": "task_broken"}, "task"),
        ({"outcome": "finished"}, "ungraded"),
        ({"reward": 0.0, "flags": ["canary", "canary_passed"]}, "canary"),
        ({"outcome": "grader_crash", "reward": 0.0}, "infra"),  # blame decides, whatever the reward column holds
    ],
)
def test_an_attempt_that_is_not_valid_moves_no_baseline(fields, reason):
    rows = group([1.0, 0.0])
    wanted = advantages(batch_of(rows))
    batch = batch_of([*rows, trajectory(attempt=2, **fields)])
    got = advantages(batch)
    assert np.isnan(got.pop("2")) and got == wanted
    assert batch.counts() == {"trained": 8, reason: 4}


def test_groups_without_a_difference_have_no_advantage():
    batch = batch_of([*group([1.0, 1.0], "same"), *group([0.5], "one"), *group([1.0, None], "left")])
    assert batch.counts() == {"no_variance": 8, "alone": 8, "ungraded": 4}
    assert np.isnan(batch.tokens.advantage).all()
    assert len(batch.samples) == 4  # comparable: three groups' valid attempts


def test_a_group_that_lost_attempts_is_trained_on_the_valid_ones_or_left_out():
    lost = [*group([1.0, 0.0]), trajectory(attempt=2, outcome="sandbox_lost")]
    rows = [*lost, *group([1.0, 0.0], "whole"), *group([1.0, 0.0], "cut")]
    rows = [row | {"planned": 3 if row["task_id"] == "cut" else 2} for row in rows]  # of `cut`, one has not arrived
    assert make_batch(rows, FACTS, 4).counts() == {"trained": 24, "infra": 4}
    batch = make_batch(rows, FACTS, 4, whole_groups=True)
    assert batch.counts() == {"trained": 8, "incomplete": 16, "infra": 4}
    told = {row["task_id"]: {*batch.tokens.reason[batch.tokens.attempt == k]} for k, row in enumerate(batch.rows)}
    assert told["whole"] == {"trained"} and told["cut"] == {"incomplete"}
    assert len(batch.samples) == 2 and np.isnan(batch.tokens.advantage[batch.tokens.reason == "incomplete"]).all()


def test_each_reason_of_a_token():
    turns = [
        turn(0, completion_ids=range(4), drops=[{"start": 1, "length": 2, "reason": "cut"}]),
        turn(1, 0, 7, completion_ids=[5], support="top_p"),
        turn(2, 0, 7, context_ids=[8], completion_ids=[9], foreign=True),
        turn(3, context_ids=range(100, 160), completion_ids=range(200, 210)),
        turn(4, context_ids=[500], completion_ids=[501], version=3),
    ]
    weights = [{"version": 0, "digest": "old", "path": None}, {"version": 3, "digest": "newer", "path": None}]
    rows = [
        trajectory(attempt=0, reward=1.0, turns=turns, weights=weights),
        trajectory(attempt=1, reward=0.0, turns=[]),
    ]
    facts = ModelFacts(4, "newest", 1000, 64, None)
    assert batch_of(rows, facts).counts() == {"trained": 8, "cut": 2, "support": 1, "foreign": 1, "too_long": 5}
    stale = batch_of(rows, facts, max_lag=1)
    assert stale.counts() == {"stale": 7, "trained": 1, "cut": 2, "support": 1, "foreign": 1, "too_long": 5}
    assert set(stale.tokens.lag[stale.tokens.turn == 4]) == {1}
    long = stale.tokens.reason[stale.tokens.turn == 3]
    assert long.tolist() == ["stale"] * 5 + ["too_long"] * 5  # 60 of prompt: the 65th token can still be predicted


def test_a_record_cut_short_by_infrastructure_is_counted_all_the_same():
    broken = trajectory(attempt=2, outcome="capture_incomplete")
    broken["turns"][0] |= {"logprobs": [], "versions": []}
    assert batch_of([*group([1.0, 0.0]), broken]).counts() == {"trained": 8, "infra": 4}


def test_the_same_weights_under_another_version_are_lag_zero():
    rows = group([1.0, 0.0])
    assert set(batch_of(rows, ModelFacts(7, DIGEST, 1000, 64, None)).tokens.lag) == {0}
    assert set(batch_of(rows, ModelFacts(7, "other", 1000, 64, None), max_lag=9).tokens.lag) == {7}


@pytest.mark.parametrize(
    ("change", "facts", "error", "words"),
    [
        ({}, {"digest": "f00"}, CheckError, rf"version 0 had weights {DIGEST}.*has f00"),
        ({"weights": [{"version": 5, "digest": "x", "path": ""}]}, {}, CheckError, "version 0, which its column"),
        ({"tokenizer_digest": "t1"}, {"tokenizer_digest": "3" * 32}, CheckError, "tokenizer t1.*has 333"),
        ({}, {"vocabulary": 120}, CheckError, "token 151.*ends at 119"),
        ({"reward": float("nan")}, {}, BatchError, "its reward is nan"),
        ({"turns": [turn(logprobs=[-1.0, float("nan")])]}, {}, BatchError, "turn 0: a log-probability is not a finite"),
        ({"turns": [turn(temperature=0.0)]}, {}, BatchError, "temperature 0"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(change, facts, error, words):
    rows = group([1.0, 0.0])
    rows[1] |= change
    with pytest.raises(error, match=words) as caught:
        batch_of(rows, ModelFacts(**vars(FACTS) | facts))
    assert "r1.0.mini-swe-agent.task-a." in str(caught.value)


def test_a_turn_without_a_prompt_is_refused():
    rows = group([1.0, 0.0])
    rows[0]["turns"] = [turn() | {"context_ids": []}]
    with pytest.raises(BatchError, match="no prompt"):
        batch_of(rows)


def test_tokens_of_newer_weights_are_refused():
    weights = [{"version": 3, "digest": "later", "path": ""}]
    with pytest.raises(CheckError, match="version 3, newer than version 0"):
        batch_of(group([1.0, 0.0], turns=[turn(version=3)], weights=weights))


def test_rows_come_by_attempt_one_each_with_their_turns(tmp_path):
    rows = group([1.0, 0.0, 0.0])
    paths = [shard(tmp_path / "a.parquet", rows[1:]), shard(tmp_path / "b.parquet", [rows[1], rows[0]])]
    tally = Tally()
    got = read_rows(open_shards(paths), tally)
    assert [row["attempt_id"] for row in got] == [row["attempt_id"] for row in rows]
    assert [turn["logprobs"] for row in got for turn in row["turns"]] == [[-0.25, -0.375]] * 6
    assert tally.planned == 3 and not tally.missing


@given(trees(), st.data())
@settings(max_examples=150, deadline=None)
def test_every_wanted_token_is_a_target_once_behind_its_own_prefix(turns, data):
    tree.check(turns)
    nodes = tree.nodes_of(turns)
    tokens = [(t, k) for t, node in enumerate(nodes) for k in range(len(node.completion_ids))]
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))), bool)
    samples = samples_of(nodes, 3, 100, wanted)
    seen = [int(entry) for sample in samples for entry in sample.index]
    assert sorted(seen) == (100 + np.flatnonzero(wanted)).tolist()
    assert len(samples) <= len(set(tree.homes(nodes)))
    for sample in samples:
        assert sample.attempt == 3 and len(sample.ids) == sample.positions[-1] + 1  # nothing is read behind the last
        for position, entry in zip(sample.positions, sample.index, strict=True):
            t, k = tokens[entry - 100]
            assert sample.ids[: position + 1].tolist() == tree.path_ids(nodes, t, nodes[t].prompt_len + k).tolist()
