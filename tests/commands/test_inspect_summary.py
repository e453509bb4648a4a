"""lego-inspect summary: attempts, where every token went, and sums that do not add up."""

import json
import subprocess

import pytest
from builders import group, plan_of, shard, turn, update_rows
from commands.inspecting import EARLIER, LOST, PROGRAM, good, inspect, objects, write_step
from commands.train_rows import World, tiny_llama

from legorl import schema
from legorl.commands.inspect import summary


def test_summary_counts_attempts_and_says_where_every_token_went(run_folder):
    first, second = objects("summary", "--json", run_folder)
    assert (first["planned"], first["attempts"], first["lost"], first["graded"]) == (6, 6, 1, 5)
    assert first["reward"] == pytest.approx(0.2)
    assert (first["passed"], first["judged"]) == (1, 5)
    assert first["outcomes"] == {"finished": 5, "engine_lost": 1}
    assert first["trained_tokens"] == 8
    assert first["dropped_tokens"] == {"infra": 4, "no_variance": 12, "earlier_try": 17}
    assert first["sampled_tokens"] == 8 + 4 + 12 + 17
    assert first["undecided_tokens"] == 0
    assert first["pearson"] > 0.9
    assert 0 < first["logprob_abs_diff_max"] < 0.1
    # The second round was not trained: nothing about training may look measured.
    assert second["sampled_tokens"] == second["undecided_tokens"] == 12
    assert second["trained_tokens"] is second["pearson"] is second["logprob_abs_diff_max"] is None
    assert second["reward_low"] is None  # one group says nothing about the spread over groups


def test_canaries_are_told_apart_from_what_was_achieved(tmp_path):
    rows = [*group([1.0, 0.0], "task-a"), *group([1.0, 0.0], "task-b")]
    wanted = objects("summary", "--json", shard(tmp_path / "a.parquet", rows))[0]
    assert wanted["canaries"] is wanted["canaries_passed"] is None
    flags = (["canary"], ["canary", "canary_passed"], ["canary"])
    canaries = group([0.0] * 3, "task-a-canary")
    rows += [row | {"flags": flag} for row, flag in zip(canaries, flags, strict=True)]
    path = shard(tmp_path / "b.parquet", rows)
    [found] = objects("summary", "--json", path)
    for name in ("reward", "reward_low", "reward_high", "passed", "judged", "graded", "pass_rate"):
        assert found[name] == wanted[name]
    assert (found["canaries"], found["canaries_passed"]) == (3, 1)
    assert "r1 0 cheating: 1 of 3 attempts at impossible tasks passed (33.3%)" in good("summary", path)


def test_summary_for_people_shows_the_same(run_folder):
    text = good("summary", run_folder)
    assert "sampled =" in text
    assert "r1 0 dropped: infra 4, no_variance 12, earlier_try 17" in text
    second = next(line for line in text.splitlines() if line.startswith("r1") and " 1 " in line[:10])
    assert " - " in second


def test_summary_of_a_checkpoint_alone_does_not_invent_attempts(run_folder):
    [one] = objects("summary", "--json", run_folder / "step-0000" / "checkpoint")
    assert one["attempts"] is one["lost"] is one["reward"] is None
    assert (one["trained_tokens"], one["sampled_tokens"]) == (8, 24)
    assert one["pearson"] > 0.9


def test_summary_says_when_a_round_is_cut(tmp_path):
    rows = group([1.0, 0.0])
    shard(tmp_path / "a.parquet", rows[:1], plan_of(rows))
    assert "1 of 2" in good("summary", tmp_path)


def lose(told):
    told.pop()


def double(told):
    told.append(told[0])


def invent(told):
    told.append(told[0] | {"position": 99})


def exchange(told):
    told[0]["token"] += 1


def unname(told):
    told[0]["reason"] = None


@pytest.mark.parametrize("fault", [lose, double, invent, exchange, unname], ids=lambda f: f.__name__)
def test_summary_fails_the_check_when_tokens_do_not_add_up(tmp_path, fault):
    rows = group([1.0, 0.0])
    told = [one for row in rows for one in update_rows(row)]
    write_step(tmp_path, rows, told)
    assert good("summary", tmp_path)
    fault(told)
    write_step(tmp_path, rows, told)
    done = inspect("summary", tmp_path)
    assert done.returncode == 4
    assert "1 tokens" in done.stderr
    assert done.stdout


def test_an_attempt_trained_twice_is_told_by_its_latest_step(tmp_path):
    rows = group([1.0, 0.0])
    # The older file is of a format without the column `flipped`.
    for step, reason, kind in ((1, "stale", schema.UPDATE_1_FORMAT), (2, "trained", schema.UPDATE_FORMAT)):
        told = [one for row in rows for one in update_rows(row, step=step, reason=reason, flipped=True)]
        shard(tmp_path / f"u{step}.parquet", told, kind=kind)
    shard(tmp_path / "a.parquet", rows)
    [one] = objects("summary", "--json", tmp_path)
    assert (one["sampled_tokens"], one["trained_tokens"], one["dropped_tokens"]) == (8, 8, {})
    counts = objects(
        "sql", "--json", "select step, flipped, count(*) as n from updates group by all order by 1", tmp_path
    )
    assert counts == [{"step": 1, "flipped": None, "n": 8}, {"step": 2, "flipped": True, "n": 8}]


def test_marked_spans_are_dropped_before_any_training(tmp_path):
    side = turn(1, 0, drops=[{"start": 0, "length": 2, "reason": "side"}])
    path = shard(tmp_path / "a.parquet", group([1.0], turns=[turn(), side]))
    [one] = objects("summary", "--json", path)
    assert (one["dropped_tokens"], one["undecided_tokens"], one["trained_tokens"]) == ({"side": 2}, 2, None)


def test_wilson_is_the_textbook_interval():
    assert summary.wilson(10, 24) == pytest.approx((0.2447, 0.6117), abs=1e-4)
    assert summary.wilson(0, 24) == pytest.approx((0, 0.1380), abs=1e-4)
    assert summary.wilson(0, 0) is None


def test_the_bootstrap_resamples_groups_and_not_attempts():
    same_within = [[0.0] * 8, [1.0] * 8] * 4  # 64 attempts, but only 8 independent draws
    low, high = summary.bootstrap(same_within)
    assert high - low > 0.5
    low, high = summary.bootstrap([[0.0, 1.0] * 4] * 8)
    assert (low, high) == (0.5, 0.5)
    assert summary.bootstrap([[1.0, 0.0]]) is None
    assert summary.bootstrap(same_within) == summary.bootstrap(same_within)


def test_what_lego_train_wrote_adds_up_and_shows_the_figures_of_its_gate(tmp_path):
    """The two commands meet in files only, so one test has to hold them together."""
    world = World(tiny_llama(tmp_path / "model"))
    rows = [*world.group([1.0, 0.0, 0.0]), *world.group([1.0, 1.0], "task-b")]
    rows[2] |= {"reward": None, "graded_at": None, "history": [EARLIER]} | LOST
    graded = shard(tmp_path / "run" / "graded" / "a.parquet", rows, plan_of(rows))
    out = tmp_path / "run" / "checkpoint"
    argv = [str(PROGRAM.with_name("lego-train")), "--model", str(world.checkpoint.path), "--out", str(out), "--partial"]
    done = subprocess.run([*argv, str(graded)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "legorl.json").read_text())
    [one] = objects("summary", "--json", tmp_path / "run")
    assert one["trained_tokens"] == record["tokens"].pop("trained")
    assert one["dropped_tokens"] == record["tokens"] | {"earlier_try": 17}
    assert {"infra", "no_variance"} <= set(one["dropped_tokens"])
    assert one["undecided_tokens"] == 0
    assert one["pearson"] == pytest.approx(record["figures"]["align/pearson"])
    assert one["logprob_abs_diff_max"] == pytest.approx(record["figures"]["align/logprob_abs_diff_max"])
