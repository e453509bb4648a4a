"""Metrics and views against plain Python over the same rows."""

import math

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from builders import group, trajectory, turn, update_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl import metrics, schema, tree


def table(rows, arrow_schema=schema.TRAJECTORY):
    return pa.Table.from_pylist(rows, schema=arrow_schema)


def updates(rows):
    return table(rows, schema.UPDATE)


def token(sampler, old, position=0, **fields):
    row = {"sampler_logprob": sampler, "old_logprob": old, "position": position, "attempt_id": "a", "turn": 0}
    return row | {"lag": 0, "reason": "trained"} | fields


logprobs = st.floats(-8, 0, width=32)


@settings(max_examples=25)
@given(st.lists(st.tuples(logprobs, logprobs), min_size=3, max_size=30))
def test_align_is_what_its_formulas_say(pairs):
    figures = dict(metrics.run("align", updates=updates([token(s, o) for s, o in pairs])))
    s, o = np.array(pairs, dtype=np.float32).astype(float).T
    d, r = o - s, np.exp(o - s)
    wanted = {
        "tokens": len(pairs),
        "nonfinite": 0,
        "logprob_abs_diff_mean": np.abs(d).mean(),
        "logprob_abs_diff_p50": np.quantile(np.abs(d), 0.5),
        "logprob_abs_diff_p99": np.quantile(np.abs(d), 0.99),
        "logprob_abs_diff_max": np.abs(d).max(),
        "k1": (s - o).mean(),
        "k3": (r - 1 - d).mean(),
        "k1_reverse": (r * d).mean(),
        "k3_reverse": (r * (np.exp(-d) - 1 + d)).mean(),
        "ess": r.sum() ** 2 / (len(r) * (r * r).sum()),
        "ratio_outside": ((r < 0.5) | (r > 2)).mean(),
        "chi2": (r * r).mean() - 1,
    }
    for name, value in wanted.items():
        assert figures[f"align/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    if np.exp(s).std() > 1e-3 and np.exp(o).std() > 1e-3:
        pearson = np.corrcoef(np.exp(s), np.exp(o))[0, 1]
        assert figures["align/pearson"] == pytest.approx(pearson, abs=1e-6)


def test_reverse_k1_and_k3_estimate_the_kl_divergence_from_samples_of_the_sampler():
    """Over all tokens of a small distribution, each as often as the sampler draws it, the estimates are exact."""
    sampler, trainer = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    rows = [token(math.log(sampler[k]), math.log(trainer[k])) for k in (0, 0, 1, 2)]
    figures = dict(metrics.run("align", updates=updates(rows)))
    forward = (sampler * np.log(sampler / trainer)).sum()
    reverse = (trainer * np.log(trainer / sampler)).sum()
    assert figures["align/k1"] == pytest.approx(forward, abs=1e-6)
    assert figures["align/k3"] == pytest.approx(forward, abs=1e-6)
    assert figures["align/k1_reverse"] == pytest.approx(reverse, abs=1e-6)
    assert figures["align/k3_reverse"] == pytest.approx(reverse, abs=1e-6)
    assert figures["align/chi2"] == pytest.approx((trainer**2 / sampler).sum() - 1, abs=1e-6)


def test_align_counts_masked_tokens_but_not_restricted_or_unmeasured_ones():
    rows = [
        token(-1.0, -1.5),
        token(-1.0, -5.0, reason="masked"),
        token(-1.0, -9.0, reason="support"),
        token(-1.0, None, reason="infra"),
        token(None, -1.0),
    ]
    figures = dict(metrics.run("align", updates=updates(rows)))
    assert figures["align/tokens"] == 2
    assert figures["align/logprob_abs_diff_max"] == 4.0


def test_align_counts_what_is_not_finite_instead_of_hiding_it():
    rows = [token(-1.0, float("nan")), token(-1.0, -1.5), token(-1.0, float("-inf")), token(-2.0, -2.0)]
    figures = dict(metrics.run("align", updates=updates(rows)))
    assert (figures["align/tokens"], figures["align/nonfinite"]) == (4, 2)
    assert figures["align/logprob_abs_diff_max"] == 0.5


def test_one_broken_token_does_not_make_the_sums_infinite():
    figures = dict(metrics.run("align", updates=updates([token(-1000.0, -1.0), token(-1.0, -1.0)])))
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["align/logprob_abs_diff_max"] == 999.0


def test_align_of_nothing_has_counts_and_no_figures():
    assert metrics.run("align") == [("align/tokens", 0.0), ("align/nonfinite", 0.0)]


def test_a_figure_that_cannot_be_computed_is_absent_not_zero():
    figures = dict(metrics.run("align", updates=updates([token(-1.0, -1.0)])))
    assert "align/pearson" not in figures
    assert figures["align/logprob_abs_diff_max"] == 0.0


def test_align_slices():
    rows = [
        token(-1.0, -1.1, turn=0, lag=0, position=0),
        token(-1.0, -1.2, turn=0, lag=1, position=15, flipped=False),
        token(-1.0, -1.4, turn=2, lag=0, position=300, flipped=True),
        token(-1.0, -1.3, turn=3, lag=0, position=0),
        token(-1.0, -1.1, turn=3, lag=0, position=1),
    ]
    turns = pa.table(
        {
            "attempt_id": ["a"] * 3,
            "turn": pa.array([0, 2, 3], pa.int32()),
            "cause": ["root", "rewrite", "extend"],
            "harness": ["pi"] * 3,
        }
    )
    figures = dict(metrics.run("align", updates=updates(rows), turns=turns))
    counts = {name: value for name, value in figures.items() if name.endswith("/tokens")}
    assert counts == {
        "align/tokens": 5,
        "align/lag=0/tokens": 4,
        "align/lag=1/tokens": 1,
        "align/turn=0/tokens": 2,
        "align/turn=2/tokens": 1,
        "align/turn=3/tokens": 2,
        "align/position=0/tokens": 2,
        "align/position=1-15/tokens": 2,
        "align/position=256+/tokens": 1,
        "align/cause=extend/tokens": 2,
        "align/cause=rewrite/tokens": 1,
        "align/cause=root/tokens": 2,
        "align/harness=pi/tokens": 5,
        "align/first=after_tool/tokens": 1,
        "align/flipped=false/tokens": 1,
        "align/flipped=true/tokens": 1,
    }
    assert figures["align/flipped=true/logprob_abs_diff_p99"] == pytest.approx(0.4)
    assert figures["align/first=after_tool/logprob_abs_diff_max"] == pytest.approx(0.3)
    assert figures["align/cause=rewrite/logprob_abs_diff_max"] == pytest.approx(0.4)
    names = [name for name in counts if "=" in name]
    assert [n.split("/")[1].split("=")[0] for n in names] == sorted(
        (n.split("/")[1].split("=")[0] for n in names),
        key=["lag", "turn", "position", "cause", "harness", "first", "flipped"].index,
    )


def test_without_turns_there_are_no_slices_by_cause_or_harness():
    names = [name for name, _ in metrics.run("align", updates=updates([token(-1.0, -1.1)]))]
    assert not any("cause" in name or "harness" in name for name in names)


def test_trajectories_give_align_the_same_slices_as_turns():
    rows = group([1.0, 0.0])
    told = updates([one for row in rows for one in update_rows(row, noise=0.1)])
    by_rows = metrics.run("align", updates=told, trajectories=table(rows))
    turns = pa.Table.from_pylist(
        [
            {"attempt_id": row["attempt_id"], "turn": t["index"], "cause": t["cause"], "harness": row["harness"]}
            for row in rows
            for t in row["turns"]
        ]
    )
    assert dict(by_rows) == pytest.approx(dict(metrics.run("align", updates=told, turns=turns)))


SPANS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@st.composite
def turn_rows(draw):
    turns = []
    for index in range(draw(st.integers(0, 3))):
        lengths = draw(SPANS)
        count = sum(lengths)
        versions, at = [], 0
        for version, length in enumerate(lengths):
            versions.append({"start": at, "length": length, "version": version})
            at += length
        start = draw(st.integers(0, count))
        drops = [{"start": start, "length": count - start, "reason": "cut"}] if draw(st.booleans()) else None
        ids = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        turns.append(
            turn(index, index - 1, completion_ids=ids, versions=versions, drops=drops, logprobs=[-0.5 * k for k in ids])
        )
    return turns


@settings(max_examples=25)
@given(st.lists(turn_rows(), min_size=1, max_size=3))
def test_the_views_of_turns_and_tokens_hold_what_the_rows_hold(all_turns):
    rows = [trajectory("t", n, turns=turns) for n, turns in enumerate(all_turns)]
    connection = metrics.connect(table(rows))
    tokens, turns = [], []
    for row in rows:
        for t in row["turns"]:
            drops = tree.drop_reasons(t)
            count = len(t["completion_ids"])
            turns.append((row["attempt_id"], t["index"], t["prefix_len"] + len(t["context_ids"]), count))
            for k in range(count):
                version = next(v["version"] for v in t["versions"] if v["start"] <= k < v["start"] + v["length"])
                tokens.append(
                    (row["attempt_id"], t["index"], k, t["completion_ids"][k], t["logprobs"][k], version, drops[k])
                )
    found = connection.execute(
        "select attempt_id, turn, position, token, logprob, version, drop_reason from tokens order by 1, 2, 3"
    ).fetchall()
    assert found == tokens
    found = connection.execute(
        "select attempt_id, turn, prompt_tokens, completion_tokens from turns order by 1, 2"
    ).fetchall()
    assert found == turns
    counts = connection.execute("select turn_count, coalesce(sampled_tokens, 0) from trajectories").fetchall()
    assert counts == [(len(ts), sum(len(t["completion_ids"]) for t in ts)) for ts in all_turns]


def test_the_view_of_tests_has_one_row_a_test():
    rows = group([1.0, None])
    found = metrics.connect(table(rows)).execute("select attempt_id, id, wanted, got from tests").fetchall()
    assert found == [(rows[0]["attempt_id"], "tests/test_task.py::test_it", "pass", "pass")]


@pytest.mark.parametrize(
    "query",
    [
        "select * from '/etc/passwd'",
        "select * from read_text('/proc/self/environ')",
        "select * from read_parquet('*.parquet')",
        "copy (select 1) to 'out.csv'",
        "attach 'out.db'",
        "export database 'out'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "set lock_configuration = false",
        "set python_enable_replacements = true",
        "select * from secret_table",
    ],
)
def test_a_query_can_reach_no_file_and_no_variable(query, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    secret_table = pa.table({"a": [1]})
    with pytest.raises(duckdb.Error):
        metrics.connect().execute(query).fetchall()
    assert list(tmp_path.iterdir()) == []
    assert len(secret_table) == 1


def test_losses_have_the_length_of_lost_tries_and_of_kept_attempts():
    def earlier(outcome, blame, turns):
        figures = {"turns": turns, "tokens": 10 * turns, "wall_s": float(turns)}
        return {"try": 0, "outcome": outcome, "blame": blame, "detail": "", **figures}

    rows = [
        trajectory("a", 0, turns=[turn()], wall_s=2.0),
        trajectory("a", 1, turns=[turn()], wall_s=4.0, history=[earlier("sandbox_lost", "infra", 7)]),
        trajectory("a", 2, turns=[], weights=[], outcome="sandbox_lost", wall_s=1.0),
        trajectory("b", 0, harness="pi", outcome="task_broken", turns=[turn(), turn(1, 0)], wall_s=3.0),
    ]
    figures = dict(metrics.run("losses", trajectories=table(rows)))
    assert (figures["losses/kept"], figures["losses/lost"], figures["losses/lost_share"]) == (3, 2, 0.4)
    assert (figures["losses/kept_turns"], figures["losses/lost_turns"]) == (pytest.approx(4 / 3), 3.5)
    assert (figures["losses/kept_tokens"], figures["losses/lost_tokens"]) == (pytest.approx(8 / 3), 35)
    assert (figures["losses/kept_wall_s"], figures["losses/lost_wall_s"]) == (3, 4)
    assert figures["losses/outcome=sandbox_lost/lost"] == 2 and "losses/outcome=sandbox_lost/kept_turns" not in figures
    assert figures["losses/harness=pi/lost_share"] == 0 and figures["losses/round=r1.0/lost"] == 2
    assert (figures["losses/version=0/lost"], figures["losses/version=none/lost_share"]) == (1, 1)
    assert metrics.run("losses", trajectories=table([])) == []


def test_behaviour():
    call = {"id": "1", "name": "bash", "arguments": "{}", "valid": True}
    rows = [
        trajectory("a", turns=[turn(0, tool_calls=[call, call | {"valid": False}]), turn(1, 0)], patch=b"diff"),
        trajectory("b", turns=[turn(0, tool_calls=[call], finish_reason="length")], harness="pi"),
        trajectory("c", outcome="engine_lost"),
    ]
    figures = dict(metrics.run("behaviour", trajectories=table(rows)))
    assert figures["behaviour/attempts"] == 2
    assert figures["behaviour/turns_per_attempt"] == 1.5
    assert figures["behaviour/text_only_rate"] == pytest.approx(1 / 3)
    assert figures["behaviour/tool_call_valid_rate"] == pytest.approx(2 / 3)
    assert figures["behaviour/cut_by_length_rate"] == pytest.approx(1 / 3)
    assert figures["behaviour/empty_patch_rate"] == 0.5
    assert figures["behaviour/harness=pi/tool_calls_per_turn"] == 1
    assert figures["behaviour/round=r1.0/attempts"] == 2


def test_rates_without_anything_to_rate_are_absent():
    figures = dict(metrics.run("behaviour", trajectories=table([trajectory(turns=[])])))
    assert figures["behaviour/attempts"] == 1
    assert "behaviour/text_only_rate" not in figures
    figures = dict(metrics.run("behaviour", trajectories=table([trajectory(turns=[turn()])])))
    assert "behaviour/tool_call_valid_rate" not in figures


def test_an_unknown_metric_names_the_known():
    with pytest.raises(ValueError, match="align, behaviour, losses"):
        metrics.run("nonsense")
