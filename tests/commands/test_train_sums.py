"""The gates and the sums, whatever the rows: no gap hides among many tokens, and no sampled token has two places."""

import copy

import numpy as np
import pytest
from builders import group, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import trees

from legorl import outcomes
from legorl.commands.train import gate
from legorl.commands.train.batch import make_batch
from legorl.commands.train.fit import ModelFacts
from legorl.commands.train.rows import CheckError
from legorl.commands.train.updates import updates_table

DIGEST = "2" * 32  # that of the builders' weights


def comparison(rows, gaps):
    """The batch of `rows` as if the trainer had found the sampler's numbers, less `gaps` [tokens]."""
    batch = make_batch(rows, ModelFacts(0, DIGEST, 1000, None, None), 0)
    batch.tokens.old = (batch.tokens.sampler + gaps).astype(np.float32)
    return batch


@given(st.integers(0, 1199), st.floats(0.11, 20), st.booleans())
@settings(max_examples=5)
def test_one_token_in_a_thousand_is_enough(tmp_path_factory, place, gap, above):
    """The correlation hardly sees one token, and neither does the 99th percentile; the maximum does."""
    rng = np.random.default_rng(0)
    rows = group([1.0, 0.0], turns=[turn(completion_ids=range(600), logprobs=-rng.exponential(2, 600))])
    gaps = np.zeros(1200)
    gaps[place] = gap if above else -gap
    batch = comparison(rows, gaps)
    figures = gate.measure(batch)
    with pytest.raises(gate.GateError, match="lag=0/logprob_abs_diff_max") as caught:
        gate.check(batch, figures, gate.DEFAULTS["fp32"], tmp_path_factory.getbasetemp())
    assert caught.value.code == 4 and figures["align/lag=0/logprob_abs_diff_p99"] < 0.01
    assert f"{gap:.4f}" in caught.value.worst[1]


@given(st.integers(13, 1200), st.floats(0.02, 0.09))
@settings(max_examples=5)
def test_a_little_of_many_is_seen_by_the_percentile_or_the_mean(tmp_path_factory, count, gap):
    rows = group([1.0, 0.0], turns=[turn(completion_ids=range(600), logprobs=[-0.5] * 600)])
    batch = comparison(rows, np.where(np.arange(1200) < count, gap, 0.0))
    with pytest.raises(gate.GateError):
        gate.check(batch, gate.measure(batch), gate.DEFAULTS["fp32"], tmp_path_factory.getbasetemp())


@st.composite
def shards(draw):
    """Rows of several groups, with everything for which a token may be left out."""
    rows = []
    for task in range(draw(st.integers(1, 3))):
        for n in range(draw(st.integers(1, 4))):
            turns = draw(trees())
            for one in turns:
                count = len(one["completion_ids"])
                cut = draw(st.integers(0, count))
                version = draw(st.integers(0, 3))
                one |= {
                    "support": draw(st.sampled_from(["full", "full", "top_p", "greedy"])),
                    "foreign": draw(st.sampled_from([False, False, True])),
                    "drops": [{"start": cut, "length": count - cut, "reason": "cut"}] if draw(st.booleans()) else [],
                    "versions": [
                        {"start": 0, "length": cut, "version": 3},
                        {"start": cut, "length": count - cut, "version": version},
                    ],
                }  # fmt: skip
            outcome = draw(st.sampled_from(["finished", "finished", "finished", "engine_lost", "task_broken"]))
            reward = draw(st.sampled_from([None, 0.0, 1.0, 0.5])) if outcome == "finished" else None
            weights = [{"version": v, "digest": f"{v}", "path": ""} for v in range(4)]
            row = trajectory(f"task-{task}", n, turns=turns, outcome=outcome, reward=reward, weights=weights)
            if reward is not None and draw(st.sampled_from([False, False, True])):
                row["flags"] = ["canary"]
            rows.append(row | {"planned": draw(st.integers(1, 4))})
    return rows


@given(
    shards(),
    st.integers(0, 4),
    st.sampled_from(["grpo", "rloo", "reinforce", "sft"]),
    st.booleans(),
    st.integers(1, 40),
)
@settings(max_examples=30)
def test_every_sampled_token_has_one_place(rows, max_lag, loss, whole_groups, context):
    batch = make_batch(rows, ModelFacts(3, "3", 1000, context, None), max_lag, loss, None, whole_groups)
    sampled = [
        (row["attempt_id"], one["index"], k, token)
        for row in rows for one in row["turns"] for k, token in enumerate(one["completion_ids"])
    ]  # fmt: skip
    table = updates_table(batch, 1, "", "").to_pydict()
    told = [*zip(*(table[name] for name in ("attempt_id", "turn", "position", "token")), strict=True)]
    assert sorted(told) == sorted(sampled) and len({entry[:3] for entry in told}) == len(told)
    assert sum(batch.counts().values()) == len(sampled)
    assert set(table["reason"]) <= {*outcomes.TRAIN_REASONS, *outcomes.DROP_REASONS}
    has_advantage = [reason == "trained" and loss != "sft" for reason in table["reason"]]
    assert [value is not None for value in table["advantage"]] == has_advantage
    targets = [int(entry) for sample in batch.samples for entry in sample.index]
    trained = [number for number, reason in enumerate(table["reason"]) if reason == "trained"]
    assert len(targets) == len(set(targets)) and set(trained) <= set(targets)


@pytest.fixture
def honest():
    """A group of four attempts with branches."""
    shape = [(-1, 0, 6, 4), (0, 10, 3, 5), (0, 8, 4, 3)]
    turns = [
        turn(k, parent, prefix, context_ids=range(context), completion_ids=range(sampled), logprobs=[-1.0] * sampled)
        for k, (parent, prefix, context, sampled) in enumerate(shape)
    ]
    return group([1.0, 0.0, 1.0, 0.0], turns=turns)


def test_a_token_that_lost_its_place_stops_the_step(honest):
    batch = make_batch(honest, ModelFacts(0, DIGEST, 300, 128, None), 0)
    lost = copy.deepcopy(batch)
    lost.tokens.position[3] = lost.tokens.position[2]
    for broken in (lost, copy.deepcopy(batch)):
        if broken is not lost:
            broken.samples.pop()
        with pytest.raises(Exception, match=r"tokens were sampled|hold every target exactly once"):
            broken.check_sums()
    batch.check_sums()


def test_rows_that_do_not_agree_on_the_weights_of_a_version(honest):
    facts = ModelFacts(1, "new", 300, 128, None)
    rows = copy.deepcopy(honest)
    rows[2]["weights"][0]["digest"] = "f" * 32
    with pytest.raises(CheckError, match=rf"\.2: version 0 is {'f' * 32} there"):
        make_batch(rows, facts, 4)
    assert make_batch(rows, facts, 4, "sft").counts()["trained"] == 24  # whose tokens may come from anywhere
