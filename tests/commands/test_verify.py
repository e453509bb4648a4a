"""lego-inspect verify: what a tiny model sampled agrees with it, and each planted fault is found and named."""

import copy
import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path

import builders
import numpy as np
import pytest
from commands.inspecting import inspect
from commands.train_rows import World, tiny_llama

from legorl import tree
from legorl.checkpoint import RECORD, open_checkpoint
from legorl.commands.inspect import load, recorded, verify

PROGRAM = Path(sys.executable).parent / "lego-inspect"

# A root with two branches: turns 0 and 1 are on both paths, turn 3 leaves turn 0 before its end.
SHAPE = [(-1, None, 6, 4), (0, None, 3, 5), (1, None, 2, 3), (0, 8, 2, 4), (1, None, 4, 2)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tiny_llama(tmp_path_factory.mktemp("model") / "m"))


@pytest.fixture(scope="module")
def next_world(tmp_path_factory):
    """Another policy, as lego-train leaves it: version 1."""
    folder = tmp_path_factory.mktemp("model") / "step-1"
    tiny_llama(folder / "model", seed=1)
    (folder / RECORD).write_text('{"version": 1}')
    return World(folder)


def counted(row):
    """`row` with the sums of its turns in `budgets`, as lego-rollout writes them."""
    used = {"turns": len(row["turns"]), "tokens": sum(len(t["completion_ids"]) for t in row["turns"]), "seconds": 2}
    return row | {"budgets": {name: {"limit": 100.0, "used": float(value)} for name, value in used.items()}}


@pytest.fixture
def row(world):
    world.rng = np.random.default_rng(0)
    row = counted(world.row("task-a", 0, None, SHAPE))
    row["turns"][3]["cause"] = "rewrite"
    return row


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="a.parquet"):
        return builders.shard(tmp_path / name, list(rows))

    return write


def read(done):
    """(slices by name, turn lines, faults) of --json."""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    faults = [line for line in lines if "fault" in line]
    slices = [line for line in lines if "fault" not in line]
    turns = [line for line in slices if line["slice"] == "turn"]
    return {line["slice"]: line for line in slices if line["slice"] != "turn"}, turns, faults


def check_sums(slices):
    for one in slices:
        assert one["tokens"] == one["compared"] + one["not_comparable"] + one["unverified"]


def test_what_the_model_sampled_agrees(world, row, write):
    row["turns"][1]["temperature"] = 0.7
    done = inspect("verify", "--turns", "--json", write(world.score(row)))
    assert (done.returncode, done.stderr) == (0, "")
    slices, turns, _ = read(done)
    assert set(slices) == {"all", "version=0"}
    one = slices["all"]
    assert (one["tokens"], one["compared"], one["routing"]) == (18, 18, None)
    assert one["pearson"] > 0.99999 and one["logprob_abs_diff_max"] < 1e-4
    assert one["logprob_abs_diff_mean"] <= one["logprob_abs_diff_p99"] <= one["logprob_abs_diff_max"]
    assert [(t["attempt_id"], t["turn"], t["compared"]) for t in turns] == [
        (row["attempt_id"], k, sampled) for k, (*_, sampled) in enumerate(SHAPE)
    ]
    check_sums([*slices.values(), *turns])


def test_the_table_and_the_installed_command(row, write):
    done = subprocess.run([PROGRAM, "verify"], input=f"{write(row)}\n", capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    head, _, everything, version = done.stdout.splitlines()
    assert head.split() == ["slice", *verify.FIGURES]
    assert everything.split()[:5] == ["all", "18", "18", "0", "0"] and everything.endswith("-")  # routing: dense
    assert version.startswith("version=0")


def test_each_path_is_read_once_and_each_turn_is_a_target_once(row, write):
    [attempt] = recorded.read(load.find([write(row)]).trajectories).attempts
    [weights] = attempt.weights.items()
    found = list(verify._paths(attempt, (weights[0], weights[1][0])))
    assert [turns for _, turns in found] == [[0, 1, 2], [3], [4]]
    assert [len(ids) for ids, _ in found] == [attempt.nodes[k].path_len for k in (2, 3, 4)]


# Planted faults. Each takes the row apart and returns the turn that the report must name.


def fault_token_changed(row):
    row["turns"][1]["completion_ids"][2] ^= 1
    return 1


def fault_context_token_changed(row):
    row["turns"][1]["context_ids"][-1] ^= 1
    return 1


def fault_logprob_zeroed(row):
    row["turns"][2]["logprobs"][1] = 0.0
    return 2


def fault_nan(row):
    row["turns"][1]["logprobs"][0] = float("nan")
    return 1


def fault_null_logprobs(row):
    row["turns"][1]["logprobs"] = None
    return 1


def fault_prefix_one_short(row):
    row["turns"][1]["prefix_len"] -= 1
    return 1


def fault_prefix_one_long(row):
    row["turns"][2]["prefix_len"] += 1
    return 2


def fault_version_span_short(row):
    row["turns"][1]["versions"][0]["length"] -= 1
    return 1


def fault_version_spans_overlap(row):
    row["turns"][1]["versions"] = [{"start": 0, "length": 3, "version": 0}, {"start": 2, "length": 2, "version": 0}]
    return 1


def fault_version_unknown(row):
    row["turns"][1]["versions"][0]["version"] = 7
    return 1


def append(row, turn, **fields):
    row["turns"].append(copy.deepcopy(turn) | {"index": len(row["turns"])} | fields)
    row.update(counted(row))
    return len(row["turns"]) - 1


def fault_turn_duplicated(row):
    return append(row, row["turns"][2])


def as_resample(row, index):
    """Fields that put a copy of turn `index` where a second sample for the same prompt stands in the tree."""
    prompt = tree.nodes_of(row["turns"])[index].prompt_len
    return {"parent": index, "prefix_len": prompt, "context_ids": [], "cause": "resample"}


def fault_turn_duplicated_with_a_place_of_its_own(row):
    return append(row, row["turns"][2], request_id="other", **as_resample(row, 2))


def fault_retry_counted_twice(world, row):
    number = append(row, row["turns"][2], **as_resample(row, 2), completion_ids=[5, 6, 7])
    world.score(row)
    return number


def fault_undelivered_answer_sampled_again(world, row):
    row["turns"][2]["delivered"] = False
    later = row["turns"][2]["started_at"] + datetime.timedelta(seconds=9)
    fields = as_resample(row, 2) | {"request_id": "other", "started_at": later, "completion_ids": [5, 6, 7]}
    number = append(row, row["turns"][2], **fields)
    world.score(row)
    return number


def fault_no_prompt(row):
    row["turns"][0] |= {"context_ids": []}
    row["turns"] = row["turns"][:1]
    row.update(counted(row))
    return 0


def fault_routing_row_missing(row):
    routing = {"data": bytes(10 * 2 * 2), "dtype": "uint8", "rows": 10, "layers": 2, "topk": 2, "valid": bytes(10)}
    row["turns"][1]["routing"] = routing  # 4 sampled, 1 shared token, 3 of context: 8 rows
    return 1


FAULTS = [value for name, value in list(globals().items()) if name.startswith("fault_")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.removeprefix("fault_"))
def test_a_planted_fault_is_found(fault, world, row, write):
    wanted = fault(*(world, row)[2 - fault.__code__.co_argcount :])
    done = inspect("verify", "--json", write(row))
    slices, _, faults = read(done)
    assert done.returncode == 4
    assert {"attempt_id": row["attempt_id"], "turn": wanted} in [
        {"attempt_id": one["attempt_id"], "turn": one["turn"]} for one in faults
    ]
    check_sums(slices.values())
    assert slices["all"]["tokens"] == sum(len(t["completion_ids"]) for t in row["turns"])
    # The same for people, with the attempt and the turn in the line.
    plain = inspect("verify", write(row))
    assert plain.returncode == 4
    assert f"fault: {row['attempt_id']}, turn {wanted}: " in plain.stdout
    assert f"{len(faults)} faults; first: " in plain.stderr


def test_two_samples_for_one_request_are_no_fault(world, row, write):
    """The harness rejected a delivered answer, or the first try failed."""
    later = row["turns"][2]["started_at"] + datetime.timedelta(seconds=9)
    append(row, row["turns"][2], **as_resample(row, 2) | {"request_id": "other", "started_at": later})
    assert inspect("verify", write(row)).returncode == 0
    row["turns"][2] |= {"delivered": False, "finish_reason": "error"}
    assert inspect("verify", write(row)).returncode == 0


def test_a_turn_left_out_is_found_by_the_sums(row, write):
    row["turns"].pop()
    done = inspect("verify", write(row))
    assert done.returncode == 4
    assert f"fault: {row['attempt_id']}: 5 turns were counted when it was rolled out, and 4 are recorded" in done.stdout
    assert "18 tokens were counted" in done.stdout


def test_an_attempt_that_stands_twice_is_found_and_a_graded_copy_is_not(world, row, write, tmp_path):
    twice = inspect("verify", "--json", write(row, row))
    slices, _, [fault] = read(twice)
    assert twice.returncode == 4 and fault["attempt_id"] == row["attempt_id"] and "two rows" in fault["fault"]
    assert slices["all"]["tokens"] == 18  # counted once all the same

    graded = row | {"reward": 1.0, "graded_at": builders.EPOCH, "grader": "test/1"}
    files = [write(row), write(graded, name="graded.parquet")]
    done = inspect("verify", "--json", *files)
    assert (done.returncode, read(done)[0]["all"]["tokens"]) == (0, 18)
    assert done.stderr == "1 rows are graded copies of others, with the same tokens; compared once\n"

    again = inspect("verify", files[0], shutil.copyfile(files[0], tmp_path / "b.parquet"))
    assert again.returncode == 4 and "the same row in" in again.stdout

    graded["turns"] = copy.deepcopy(row["turns"])
    graded["turns"][0]["logprobs"][0] -= 1
    other = inspect("verify", files[0], write(graded, name="graded.parquet"))
    assert other.returncode == 4 and "other tokens in" in other.stdout


def test_what_was_not_sampled_from_the_full_distribution_is_counted_apart(row, write):
    row["turns"][1] |= {"support": "top_p", "logprobs": [-0.5] * 5}
    row["turns"][2] |= {"support": "greedy", "temperature": 0.0, "logprobs": [0.0] * 3}
    done = inspect("verify", "--json", write(row))
    one = read(done)[0]["all"]
    assert (done.returncode, one["compared"], one["not_comparable"], one["unverified"]) == (0, 10, 8, 0)
    for turn in row["turns"]:
        turn["support"] = "greedy"
    done = inspect("verify", write(row))
    assert done.returncode == 4 and "none of the 18 tokens could be compared" in done.stdout


def swapped(world, next_world, row):
    """`row` as --swap recompute leaves it: from the third token of turn 1 on it was sampled by version 1."""
    row["weights"].append(
        {"version": 1, "digest": next_world.checkpoint.digest, "path": str(next_world.checkpoint.path)}
    )
    after = next_world.score(copy.deepcopy(row))
    for turn, other in zip(row["turns"], after["turns"], strict=True):
        keep = {0: len(turn["logprobs"]), 1: 2}.get(turn["index"], 0)
        turn["logprobs"][keep:] = other["logprobs"][keep:]
        spans = [(0, keep, 0), (keep, len(turn["logprobs"]) - keep, 1)]
        turn["versions"] = [{"start": s, "length": n, "version": v} for s, n, v in spans if n]
    return row


def test_each_token_is_compared_under_the_weights_that_sampled_it(world, next_world, row, write):
    done = inspect("verify", "--json", write(swapped(world, next_world, row)))
    slices, _, faults = read(done)
    assert (done.returncode, faults) == (0, [])
    assert {name: one["compared"] for name, one in slices.items()} == {"all": 18, "version=0": 6, "version=1": 12}


def test_weights_that_are_gone_are_found_by_model_or_counted(world, next_world, row, write, tmp_path):
    row = swapped(world, next_world, row)
    row["weights"][0]["path"] = str(tmp_path / "gone")
    row["weights"][1]["path"] = None
    shard = write(row)
    done = inspect("verify", "--json", shard, "--model", world.checkpoint.path)
    slices, _, faults = read(done)
    assert done.returncode == 4
    assert {name: one["unverified"] for name, one in slices.items()} == {"all": 12, "version=0": 0, "version=1": 12}
    assert slices["version=1"]["pearson"] is None
    assert f"give the checkpoint of weights {next_world.checkpoint.digest} as --model" in faults[0]["fault"]
    assert "12 of 18 tokens are unverified" in faults[-1]["fault"]
    both = inspect("verify", shard, "--model", world.checkpoint.path, "--model", next_world.checkpoint.path)
    assert (both.returncode, both.stderr) == (0, "")


def test_other_weights_at_the_recorded_path_or_as_model_are_not_used(world, next_world, row, write, tmp_path):
    moved = shutil.copytree(next_world.checkpoint.folder, tmp_path / "m")  # plain folder: version 0, other digest
    row["weights"][0]["path"] = str(moved)
    done = inspect("verify", write(row), "--model", moved)
    assert done.returncode == 4
    assert f"{moved} holds version 0, weights {open_checkpoint(moved).digest} now" in done.stdout
    assert "18 of 18 tokens are unverified" in done.stdout
    assert f"{moved}: version 0, weights {open_checkpoint(moved).digest}, sampled nothing here" in done.stderr


def test_the_limits_are_options(row, write):
    row["turns"][3]["logprobs"][0] -= 0.05
    shard = write(row)
    assert inspect("verify", shard).returncode == 4
    loose = ["--max-diff", "0.1", "--max-mean", "0.01", "--min-pearson", "0.9"]
    assert inspect("verify", shard, *loose).returncode == 0
    for tight in (["--max-diff", "0.04"], ["--max-mean", "0.001"], ["--min-pearson", "1"]):
        assert inspect("verify", shard, *loose, *tight).returncode == 4
    assert inspect("verify", shard, "--max-diff", "small").returncode == 2


def test_a_token_outside_the_vocabulary_is_named(row, write):
    row["turns"][0]["context_ids"][0] = 300
    done = inspect("verify", write(row))
    assert done.returncode == 4
    assert f"fault: {row['attempt_id']}, turn 2: token 300 on its path is none of the model's 300\n" in done.stdout


def test_nothing_to_verify(world, write, tmp_path):
    row = builders.trajectory(turns=[], outcome="engine_lost", budgets=None)
    done = inspect("verify", "--json", write(row))
    assert (done.returncode, read(done)[0]["all"]["tokens"]) == (0, 0)
    builders.shard(tmp_path / "c" / "updates.parquet", [], kind="update/2")
    done = inspect("verify", tmp_path / "c")
    assert done.returncode == 1 and "no trajectory shard" in done.stderr
