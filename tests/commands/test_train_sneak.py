"""Trying to sneak past lego-train: records, models and gradings that were changed after they were made.

What is caught exits with 4 or an error, moves no weight and leaves nothing at --out; what is not trained is counted.
docs/training.md says what nothing can catch.
"""

import copy
import datetime
import json
import shutil

import builders
import numpy as np
import pyarrow.parquet as pq
import pytest
from commands.test_train_routing import recorded
from commands.test_verify_routing import sparse_world
from commands.train_rows import World, tiny_llama

from legorl.checkpoint import open_checkpoint
from legorl.commands.train import gate

SHAPE = [(-1, None, 6, 4), (0, None, 3, 5), (0, 8, 4, 3)]
DIGEST = "2" * 32  # that of the builders' weights


@pytest.fixture(scope="module")
def honest(world):
    """A group of four attempts with branches, as the model of `world` samples them."""
    return [world.row("task-a", n, reward, SHAPE) for n, reward in enumerate((1.0, 0.0, 1.0, 0.0))]


@pytest.fixture
def step(world, tmp_path, cli):
    """Train on rows: (exit code, stderr). Unless the step is taken, nothing is at --out, and --model is as it was."""

    def run(rows, *options, model=world.checkpoint.path, plan=None, out="c"):
        shutil.rmtree(tmp_path / "shards", ignore_errors=True)
        for name in {row["group_id"] for row in rows}:
            mine = rows if plan else [row for row in rows if row["group_id"] == name]
            builders.shard(tmp_path / f"shards/{name}.parquet", mine, plan)
        before = {file: file.read_bytes() for file in model.rglob("*") if file.is_file()}
        code, printed, err = cli(tmp_path / "shards", "--model", model, "--out", tmp_path / out, *options)
        assert (tmp_path / out).exists() == bool(printed) == (code == 0), err
        assert {file: file.read_bytes() for file in model.rglob("*") if file.is_file()} == before
        return code, err

    return run


def lower(values, by):
    return [value - by for value in values]


def drop_last_turn(row):
    row["turns"].pop()


def take_token(row, at, also_count=True):
    """Take the sampled token at `at` of the last turn out of every column that knows of it."""
    one = row["turns"][-1]
    for name in ("completion_ids", "logprobs"):
        del one[name][at]
    one["versions"][0]["length"] -= 1
    if also_count:
        row["budgets"]["tokens"]["used"] -= 1


def double_token(row, at):
    one = row["turns"][-1]
    for name in ("completion_ids", "logprobs"):
        one[name].insert(at, one[name][at])
    one["versions"][0]["length"] += 1
    row["budgets"]["tokens"]["used"] += 1


def twice(row, **fields):
    """The first turn once more, as a second answer to the same request."""
    first = row["turns"][0]
    again = copy.deepcopy(first) | {"index": len(row["turns"]), "parent": 0, "context_ids": [], "cause": "resample"}
    row["turns"].append(again | {"prefix_len": len(first["context_ids"]), **fields})


def count_again(row):
    row["budgets"]["turns"]["used"] = len(row["turns"])
    row["budgets"]["tokens"]["used"] = sum(len(one["completion_ids"]) for one in row["turns"])


TAMPERED = {
    "one log-probability": (lambda a: a["turns"][2]["logprobs"].__setitem__(1, -9.0), 4, "logprob_abs_diff_max is"),
    "a turn, by little": (
        lambda a: a["turns"][1].update(logprobs=lower(a["turns"][1]["logprobs"], 0.05)), 4, "diff_p99 is 0.05",
    ),
    "an attempt, all alike": (
        lambda a: [one.update(logprobs=lower(one["logprobs"], 0.02)) for one in a["turns"]], 4, "diff_mean is 0.005",
    ),
    "not a number": (lambda a: a["turns"][2]["logprobs"].__setitem__(0, float("nan")), 1, "not a finite number"),
    "minus infinity": (lambda a: a["turns"][2]["logprobs"].__setitem__(0, float("-inf")), 1, "not a finite number"),
    "more than certain": (lambda a: a["turns"][2]["logprobs"].__setitem__(0, 0.5), 1, "not a finite number at most 0"),
    "an infinite reward": (lambda a: a.update(reward=float("inf")), 1, "its reward is inf"),
    "another temperature": (lambda a: a["turns"][0].update(temperature=0.8), 4, "disagree"),
    "no temperature": (lambda a: a["turns"][0].update(temperature=0.0), 1, "temperature 0"),
    "another sampled token": (lambda a: a["turns"][1]["completion_ids"].__setitem__(2, 7), 4, "disagree"),
    "another token of context": (lambda a: a["turns"][1]["context_ids"].__setitem__(1, 7), 4, "disagree"),
    "a token taken out": (lambda a: take_token(a, 1), 4, "disagree"),
    "a token taken out, the count left": (
        lambda a: take_token(a, -1, also_count=False), 4, "12 tokens were counted when it was rolled out, and 11 are",
    ),
    "a token doubled": (lambda a: double_token(a, 1), 4, "disagree"),
    "a token without its number": (lambda a: a["turns"][1]["logprobs"].pop(), 1, "4 log-probabilities for 5"),
    "a turn taken out": (drop_last_turn, 4, "3 turns were counted when it was rolled out, and 2 are recorded"),
    "a turn in the middle taken out": (lambda a: a["turns"].pop(1), 1, "turn 1: index is 2"),
    "a turn trained twice": (lambda a: [twice(a), count_again(a)], 4, "is the request of turn 0 once more"),
    "a turn trained twice, under another name": (lambda a: twice(a, request_id="x"), 4, "3 turns were counted"),
    "another parent with the same tokens": (lambda a: a["turns"][2].update(parent=1), 0, "48 tokens = 48 trained"),
    "another parent": (lambda a: a["turns"][2].update(parent=1, prefix_len=11), 4, "disagree"),
    "a parent cut off": (lambda a: a["turns"][2].update(parent=-1, prefix_len=0), 4, "disagree"),
    "a shared prefix made longer": (lambda a: a["turns"][2].update(prefix_len=10), 4, "disagree"),
    "a later parent": (lambda a: a["turns"][1].update(parent=2), 1, "parent 2 is not an earlier turn"),
    "spans of versions that run back": (
        lambda a: a["turns"][1].update(versions=[{"start": 0, "length": n, "version": 0} for n in (7, -2)]),
        1, "version spans do not cover its 5 sampled tokens",
    ),
    "a drop that runs back": (
        lambda a: a["turns"][1].update(drops=[{"start": 4, "length": -1, "reason": "cut"}]), 1, "a drop lies outside",
    ),
    "weights of another digest": (
        lambda a: a.update(weights=[a["weights"][0] | {"digest": "f" * 32}]), 4, f"is {'f' * 32} there, and",
    ),
    "two digests for one version": (
        lambda a: a.update(weights=[a["weights"][0] | {"digest": "f" * 32}, a["weights"][0]]), 4, "0 is fffff",
    ),
    "no weights": (lambda a: a.update(weights=[]), 4, "sampled by version 0, which its column `weights` does not name"),
    "newer weights": (
        lambda a: [a.update(weights=[{"version": 3, "digest": "f" * 32, "path": ""}]),
                   [one["versions"][0].update(version=3) for one in a["turns"]]],
        4, "sampled by version 3, newer than version 0 in --model",
    ),
    "another group": (lambda a: a.update(group_id="r1.0.mini-swe-agent.task-b"), 4, "is no attempt of its group"),
    "another tokenizer": (lambda a: a.update(tokenizer_digest="f" * 32), 0, ""),  # the folder has none to compare
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_a_changed_record_is_caught(honest, step, what):
    tamper, wanted, words = TAMPERED[what]
    rows = copy.deepcopy(honest)
    tamper(rows[1])
    plan = builders.plan_of(honest)
    code, err = step(rows, plan=plan)
    assert code == wanted and words in err, err


def test_what_grading_cannot_tell_from_honesty_is_not_an_error(honest, step):
    """Rewards are believed: whoever writes shards decides what is learned from. Nor does any number prove an end."""
    rows = copy.deepcopy(honest)
    rows[1]["reward"] = 1.0
    take_token(rows[2], -1)
    assert step(rows)[0] == 0


def test_an_attempt_copied_under_another_name_is_in_no_plan(honest, step):
    copied = copy.deepcopy(honest[0]) | {"attempt_id": honest[0]["group_id"] + ".4"}
    code, err = step([*honest, copied], plan=builders.plan_of(honest))
    assert code == 4 and f"holds {copied['attempt_id']}, which the plan of its round does not" in err


def test_a_shard_given_twice_or_under_another_name_counts_once(world, honest, tmp_path, cli):
    path = builders.shard(tmp_path / "a.parquet", honest)
    other = shutil.copy(path, tmp_path / "b.parquet")
    for name, paths in (("once", [path]), ("often", [path, other, path])):
        code, _, err = cli(*paths, "--model", world.checkpoint.path, "--out", tmp_path / name)
        assert code == 0 and "48 tokens = 48 trained" in err
    assert open_checkpoint(tmp_path / "once").digest == open_checkpoint(tmp_path / "often").digest


def test_of_two_gradings_the_newest_counts_and_two_of_one_instant_are_refused(world, honest, tmp_path, cli):
    rows = copy.deepcopy(honest)
    rows[1]["reward"] = 1.0
    first = builders.shard(tmp_path / "a.parquet", honest)
    arguments = ("--model", world.checkpoint.path, "--out", tmp_path / "c")
    code, out, err = cli(first, builders.shard(tmp_path / "b.parquet", rows), *arguments)
    assert code == 4 and not out and "b.parquet, both graded at" in err and not (tmp_path / "c").exists()
    rows[1]["graded_at"] += datetime.timedelta(days=1)
    code, _, _ = cli(first, builders.shard(tmp_path / "b.parquet", rows), *arguments)
    assert code == 0
    updates = pq.read_table(tmp_path / "c/updates.parquet").to_pylist()
    assert {u["attempt_id"][-1]: u["advantage"] > 0 for u in updates} == {"0": True, "1": True, "2": True, "3": False}


def test_a_grading_that_lets_dropped_tokens_pass_is_refused(world, honest, tmp_path, cli):
    rows = copy.deepcopy(honest)
    rows[1]["turns"][0]["drops"] = [{"start": 0, "length": 2, "reason": "cut"}]
    first = builders.shard(tmp_path / "a.parquet", rows)
    rows[1]["turns"][0]["drops"] = []
    rows[1]["graded_at"] += datetime.timedelta(days=1)
    second = builders.shard(tmp_path / "b.parquet", rows)
    code, out, err = cli(first, second, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    assert code == 4 and not out and "other tokens in" in err


@pytest.mark.parametrize(
    "options",
    [
        ("--is-mode", "mask", "--is-cap", "1.0001"),
        ("--is-mode", "mask", "--is-level", "sequence", "--is-cap", "1.0001"),
        ("--off-policy", "bypass"),
        ("--minibatches", "4"),
        ("--loss", "gspo", "--off-policy", "bypass"),
        ("--tokens-per-batch", "12"),
    ],
)
def test_no_mode_hides_a_token_from_the_gate(honest, step, options):
    """What is masked is measured all the same, and so is every part of the step before the first of them moves."""
    rows = copy.deepcopy(honest)
    rows[3]["turns"][2]["logprobs"][2] -= 0.3
    code, err = step(rows, *options)
    assert code == 4 and "logprob_abs_diff_max is 0.3" in err


def test_attempts_that_are_only_compared_are_measured_too(world, honest, step):
    rows = copy.deepcopy([*honest, *world.group([1.0, 1.0], "same")])
    rows[5]["turns"][0]["logprobs"][2] -= 0.3
    code, err = step(rows)
    assert code == 4 and "logprob_abs_diff_max is 0.3" in err and rows[5]["attempt_id"] in err
    rows[5]["blame"] = "infra"  # in no loss, so of no concern
    code, err = step(rows)
    assert code == 0 and "66 tokens = 48 trained + 9 alone + 9 infra" in err


def test_a_model_swapped_between_serve_and_train_is_refused(world, honest, step, tmp_path):
    """Same configuration, same version: other weights, or the weights under another configuration."""
    other = tiny_llama(tmp_path / "other", seed=1, num_hidden_layers=1)
    code, err = step(honest, model=other)
    assert code == 4 and f"had weights {world.checkpoint.digest} when it sampled" in err
    rows = copy.deepcopy(honest)
    for row in rows:
        row["weights"][0]["digest"] = open_checkpoint(other).digest
    code, err = step(rows, model=other)
    assert code == 4 and "disagree over 48 tokens" in err
    same = shutil.copytree(world.checkpoint.path, tmp_path / "same")
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.3}))
    assert open_checkpoint(same).digest == world.checkpoint.digest
    code, err = step(honest, model=same)
    assert code == 4 and "disagree over 48 tokens" in err


@pytest.fixture
def lagged(honest, step, tmp_path):
    """The checkpoint of a step on `honest`, a World of it, and a group of two attempts that it samples."""
    assert step(honest, "--lr", "1e-3", out="step-1")[0] == 0
    new = World(tmp_path / "step-1")
    return new, [new.row("task-b", n, float(n), SHAPE, step=1) for n in range(2)]


def test_weights_swapped_inside_a_checkpoint_are_refused(honest, step, lagged, tmp_path):
    new, rows = lagged
    assert step(rows, model=new.checkpoint.path)[0] == 0
    other = tiny_llama(tmp_path / "other", seed=1, num_hidden_layers=1)
    shutil.copyfile(other / "model.safetensors", new.checkpoint.folder / "model.safetensors")
    for row in rows:
        row["weights"][0]["digest"] = open_checkpoint(other).digest
    code, err = step(rows, model=new.checkpoint.path, out="d")
    assert code == 4 and "they were changed afterwards" in err


def test_an_optimizer_state_that_is_damaged_is_refused(step, lagged, tmp_path):
    from safetensors.numpy import load_file, save_file

    new, rows = lagged
    file = new.checkpoint.path / "optimizer/state.safetensors"
    state = load_file(file)
    next(value for name, value in state.items() if name.endswith("exp_avg")).flat[3] = np.nan
    save_file(state, file)
    code, err = step(rows, model=new.checkpoint.path)
    assert code == 1 and "not a finite number" in err and "optimizer" in err


def test_the_past_that_a_shard_tells_of_must_be_that_of_the_checkpoint(honest, step, lagged):
    new, rows = lagged
    both = [*rows, *copy.deepcopy(honest)]
    assert step(both, model=new.checkpoint.path)[0] == 0
    for row in both[2:]:
        row["weights"][0]["digest"] = "f" * 32
    code, err = step(both, model=new.checkpoint.path, out="d")
    assert code == 4 and "version 0 that --model was made from had" in err


@pytest.mark.parametrize("shift", [6.0, -6.0])
def test_a_few_honest_tokens_do_not_cover_older_ones(honest, step, lagged, shift):
    """Moved all alike: the effective sample size of equal weights is 1, and no numeric gate holds for older weights."""
    new, rows = lagged
    older = copy.deepcopy(honest)
    for row in older:
        for one in row["turns"]:
            one["logprobs"] = np.minimum(lower(one["logprobs"], shift), 0).tolist()
    code, err = step([*rows, *older], model=new.checkpoint.path)
    assert code == 4 and "lag=1/ratio_outside is" in err and "disagree" not in err
    lines = [line for line in err.splitlines() if "task-" in line.split(" ")[0]]
    assert len(lines) == gate.WORST and all("task-a" in line for line in lines)  # the older ones are shown


def test_an_older_shard_counts_as_stale(honest, step, lagged):
    new, rows = lagged
    code, err = step([*rows, *honest], "--max-lag", "0", model=new.checkpoint.path)
    assert code == 0 and "72 tokens = 24 trained + 48 stale" in err


def test_experts_of_another_model_are_seen_by_the_gate(tmp_path, cli):
    world = sparse_world("qwen3_moe", tmp_path / "m")
    rows = recorded(world)  # experts that the model would not choose
    for row in rows:
        world.score(row)
    path = builders.shard(tmp_path / "a.parquet", rows)
    code, out, err = cli(path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    assert code == 4 and not out and "disagree over" in err and not (tmp_path / "c").exists()
