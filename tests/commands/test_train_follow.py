"""lego-train --follow: the steps of single commands, byte for byte, and what becomes of rounds that are not whole."""

import gc
import io
import json
import os
import signal
import subprocess
from pathlib import Path

import builders
import pyarrow.parquet as pq
import pytest
from commands.test_train_ranks import differences, launched
from commands.test_verify_routing import routed
from commands.train_rows import World
from moe import tiny_moe

from legorl import shards
from legorl.checkpoint import open_checkpoint
from legorl.commands.train.follow import Rounds
from legorl.shards import OutDir, ShardError, open_shard

BIN = Path(__file__).parents[2] / "bin" / "lego-train"
FILES = ("model/model.safetensors", "model/config.json", "optimizer/state.safetensors", "optimizer/schedule.json")
OPTIONS = ("--lr", "1e-3", "--schedule", "cosine", "--warmup", "1", "--total", "9", "--minibatches", "2", "--keep", "9")
SHAPE = [(-1, None, 6, 4), (0, None, 3, 5)]


def place(folder, step):
    return folder / f"step-{step:04d}" / "checkpoint"


def round_of(world, folder, step, rewards=(1.0, 0.0), tasks=("a", "b"), experts=False):
    """Shards of a round, a group each, sampled by `world`; every group knows the plan of all."""
    rows = {task: world.group(list(rewards), task, step=step, shape=SHAPE) for task in tasks}
    everything = [row for group in rows.values() for row in group]
    if experts:  # any will do: replay does not ask whether the model would have chosen them
        template = routed(world, SHAPE)
        for row in everything:
            for turn, other in zip(row["turns"], template["turns"], strict=True):
                turn["routing"] = other["routing"]
    plan = builders.plan_of(everything)
    return [builders.shard(folder / f"r{step}-{task}.parquet", group, plan) for task, group in rows.items()]


def assert_same(one: Path, other: Path):
    """Two checkpoints that differ in nothing but in when and where they were made."""
    for name in (*FILES, "updates.parquet"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    figures, records = [], []
    for folder in (one, other):
        metrics = pq.read_table(folder / "metrics.parquet").to_pylist()
        figures.append({m["name"]: m["value"] for m in metrics if not m["name"].startswith(("time/", "memory/"))})
        record = json.loads((folder / "legorl.json").read_text())
        record["figures"] = {k: v for k, v in record["figures"].items() if not k.startswith(("time/", "memory/"))}
        parent = Path(record["parent"].pop("path"))
        assert open_checkpoint(parent).digest == record["parent"]["digest"]
        if record["version"] > 1:
            assert parent == place(folder.parents[1], record["version"] - 1)
        records.append(record)
    assert figures[0] == figures[1] and records[0] == records[1]


def test_it_takes_the_steps_of_single_commands(world, tmp_path, cli, monkeypatch):
    """The second round has no variance: its step moves nothing, and takes no place of the schedule."""
    single, model, rounds = tmp_path / "single", world.checkpoint.path, []
    for step, rewards in enumerate([(1.0, 0.0), (1.0, 1.0), (0.0, 1.0)], 1):
        rounds.append(round_of(World(model), tmp_path, step, rewards))
        code, _, err = cli(*rounds[-1], "--model", model, "--out", place(single, step), *OPTIONS)
        assert code == 0, err
        model = place(single, step)
    arguments = ("--follow", "--model", world.checkpoint.path, "--out", tmp_path / "run", *OPTIONS)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{path}\n" for paths in rounds for path in paths)))
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert out.splitlines() == [str(place(tmp_path / "run", step)) for step in (1, 2, 3)]
    assert err.count("tokens = ") == 3 and err.count("weights unchanged") == 1
    for step in (1, 2, 3):
        assert_same(place(single, step), place(tmp_path / "run", step))
    # Started again, it finds all that is done, and goes on.
    before = {path: path.stat().st_mtime_ns for path in place(tmp_path / "run", 3).rglob("*")}
    more = round_of(World(place(single, 3)), tmp_path, 4)
    code, out, err = cli(*arguments, *[path for paths in [*rounds, more] for path in paths])
    assert code == 0 and out.splitlines() == [str(place(tmp_path / "run", step)) for step in (1, 2, 3, 4)]
    assert {path: path.stat().st_mtime_ns for path in place(tmp_path / "run", 3).rglob("*")} == before
    code, _, err = cli(*more, "--model", place(single, 3), "--out", place(single, 4), *OPTIONS)
    assert code == 0, err
    assert_same(place(single, 4), place(tmp_path / "run", 4))
    # Other rounds than those that are done belong somewhere else, or behind them.
    code, out, err = cli(*arguments, *more)
    assert code == 1 and out == "" and "inputs: was" in err and f"give --model {place(tmp_path / 'run', 4)}" in err


def test_experts_are_replayed_step_by_step(tmp_path, cli):
    from transformers import AutoModelForCausalLM

    world = World(tiny_moe("qwen3_moe", tmp_path / "m"))
    world.model = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()  # its experts cannot run in float64
    rounds = [round_of(world, tmp_path, step, experts=True) for step in (1, 2)]
    options = ("--lr", "1e-3", "--gate", "none")
    model = tmp_path / "m"
    for step, paths in enumerate(rounds, 1):
        assert cli(*paths, "--model", model, "--out", place(tmp_path / "single", step), *options)[0] == 0
        model = place(tmp_path / "single", step)
    flat = [path for paths in rounds for path in paths]
    code, _, err = cli("--follow", *flat, "--model", tmp_path / "m", "--out", tmp_path / "run", *options)
    assert code == 0, err
    for step in (1, 2):
        assert_same(place(tmp_path / "single", step), place(tmp_path / "run", step))
        record = json.loads((place(tmp_path / "run", step) / "legorl.json").read_text())
        assert 0 < record["figures"]["routing/replayed"] <= 1


def test_each_checkpoint_is_told_at_once_and_sigterm_leaves_whole_ones(world, tmp_path):
    rounds = [round_of(world, tmp_path, step) for step in (1, 2)]
    argv = [BIN, "--follow", "--model", world.checkpoint.path, "--out", tmp_path / "run", *OPTIONS]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
    try:
        process.stdin.write("".join(f"{path}\n" for path in rounds[0]))
        process.stdin.flush()
        assert process.stdout.readline() == f"{place(tmp_path / 'run', 1)}\n"  # while stdin is open
        process.stdin.write(f"{rounds[1][0]}\n")
        process.stdin.flush()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 143 and out == "" and err.splitlines()[-1] == "lego-train: terminated"
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["step-0001"]
    assert list((tmp_path / "run").rglob(".*partial*")) == []
    argv = [BIN, *rounds[0], "--model", world.checkpoint.path, "--out", place(tmp_path / "single", 1), *OPTIONS]
    subprocess.run(argv, check=True, env=env)  # a process too: with as many threads, or it rounds otherwise
    assert_same(place(tmp_path / "single", 1), place(tmp_path / "run", 1))


def test_a_round_that_is_cut_is_no_step(world, tmp_path, cli):
    rounds = [round_of(world, tmp_path, step) for step in (1, 2, 3)]
    arguments = ("--follow", "--model", world.checkpoint.path, "--gate", "none", "--out")
    # The second round is never whole: it holds up nothing, and what is left of it is said.
    paths = [*rounds[0], rounds[1][1], *rounds[2]]
    code, out, err = cli(*arguments, tmp_path / "run", *paths)
    assert code == 1 and out.splitlines() == [str(place(tmp_path / "run", step)) for step in (1, 2)]
    assert "round 2 of r1: 2 of 4 attempts" in err.splitlines()[-1] and "--partial" in err.splitlines()[-1]
    assert not (tmp_path / "run/step-0003").exists()
    code, out, err = cli(*arguments, tmp_path / "run", *paths, "--partial")
    assert code == 0 and out.splitlines() == [str(place(tmp_path / "run", step)) for step in (1, 2, 3)]
    assert "going on with part of the round: round 2 of r1: 2 of 4 attempts" in err
    tables = [pq.read_table(place(tmp_path / "run", step) / "updates.parquet") for step in (2, 3)]
    steps = [table["attempt_id"][0].as_py() for table in tables]
    assert [name.split(".")[1] for name in steps] == ["3", "2"]


def test_no_input_is_no_success(world, tmp_path, cli, monkeypatch):
    arguments = ("--follow", "--model", world.checkpoint.path, "--out", tmp_path / "run")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, out, err = cli(*arguments)
    assert code == 1 and out == "" and "no shard came in" in err
    row = world.row("task-a", 0, 1.0)
    bare = shards.write_shard(tmp_path / "bare.parquet", [row], shards.make_meta())
    code, out, err = cli(*arguments, bare)
    assert code == 1 and "bare.parquet: its metadata holds no plan" in err and "without --follow" in err
    code, out, err = cli(*arguments, tmp_path / "none.parquet")
    assert code == 1 and "none.parquet: no such file" in err
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_gate_that_does_not_hold_stops_and_leaves_what_is_there(world, tmp_path, cli):
    good = round_of(world, tmp_path, 1)
    options = ("--model", world.checkpoint.path, "--lr", "1e-3", "--out", tmp_path / "run")
    assert cli(*good, *options[:-1], place(tmp_path / "run", 1))[0] == 0
    rows = World(place(tmp_path / "run", 1)).group([1.0, 0.0], step=2)
    rows[1]["turns"][1]["logprobs"][2] -= 0.75
    bad = builders.shard(tmp_path / "bad.parquet", rows)
    code, out, err = cli("--follow", *options, *good, bad, *round_of(world, tmp_path, 3))
    assert code == 4 and out == f"{place(tmp_path / 'run', 1)}\n"
    assert "logprob_abs_diff_max is 0.75" in err and rows[1]["attempt_id"] in err
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-0001"]


def test_rounds_that_interleave_come_late_or_come_again(world, tmp_path):
    words = []
    rounds = Rounds(words.append)
    one, two = (round_of(world, tmp_path, step, tasks=("a", "b")) for step in (1, 2))
    assert rounds.add(open_shard(one[0])) is None and rounds.add(open_shard(two[1])) is None
    assert [each.plan.step for each in rounds.open] == [1, 2]
    assert rounds.add(open_shard(two[1])) is None  # printed again by a stage that was run again
    assert rounds.add(open_shard(two[0])).paths == [str(two[1]), str(two[1]), str(two[0])]
    assert [each.plan.step for each in rounds.open] == [1] and words == []
    for path in two:
        assert rounds.add(open_shard(path)) is None
    assert len(words) == 1 and "round 2 of r1 has had its step" in words[0]
    assert rounds.add(open_shard(one[1])).plan.step == 1 and rounds.open == []
    with pytest.raises(ShardError, match="no plan"):
        rounds.add(open_shard(shards.write_shard(tmp_path / "bare.parquet", [], shards.make_meta())))


def test_tokens_of_weights_too_old_are_left_out(world, tmp_path, cli):
    rounds = [round_of(world, tmp_path, step) for step in (1, 2, 3)]
    paths = [path for each in rounds for path in each]
    code, _, err = cli(
        "--follow", *paths, "--model", world.checkpoint.path, "--max-lag", 1, "--lr", "1e-3", "--out", tmp_path / "run"
    )
    assert code == 0, err
    for step, wanted in enumerate([(0, "trained"), (1, "trained"), (2, "stale")], 1):
        updates = pq.read_table(place(tmp_path / "run", step) / "updates.parquet").to_pylist()
        assert {(u["lag"], u["reason"]) for u in updates} == {wanted}
    assert open_checkpoint(place(tmp_path / "run", 3)).digest == open_checkpoint(place(tmp_path / "run", 2)).digest
    assert "verifying some with version 0" in err


def test_nothing_is_kept_from_step_to_step(world, tmp_path, cli, monkeypatch):
    """Tensors alive and rows read, counted as each checkpoint is printed."""
    import torch

    from legorl.commands.train import cli as command

    rounds = [round_of(world, tmp_path, step, tasks=("a",)) for step in range(1, 6)]
    counts = []

    def count(line):
        gc.collect()
        found = gc.get_objects()
        tensors = sum(type(each) in (torch.Tensor, torch.nn.Parameter) for each in found)
        counts.append((tensors, sum(type(each) is dict for each in found)))

    monkeypatch.setattr(command, "emit", count)
    paths = [path for each in rounds for path in each]
    code, _, err = cli(
        "--follow",
        *paths,
        "--model",
        world.checkpoint.path,
        "--gate",
        "none",
        "--max-lag",
        9,
        "--out",
        tmp_path / "run",
    )
    assert code == 0, err
    tensors, dictionaries = zip(*counts[1:], strict=True)  # the first step brings AdamW's
    assert len(counts) == 5 and len(set(tensors)) == 1
    assert max(dictionaries) - min(dictionaries) < 20  # a row of a shard is more


def test_one_writer_and_room_for_others(world, tmp_path, cli):
    paths = round_of(world, tmp_path, 1)
    with OutDir(tmp_path / "run", {}):
        code, _, err = cli("--follow", *paths, "--model", world.checkpoint.path, "--out", tmp_path / "run")
    assert code == 1 and f"process {os.getpid()} is writing here" in err


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_the_first_of_two_processes_reads_stdin_for_both(sharded, world, tmp_path, cli):
    paths = [path for step in (1, 2) for path in round_of(world, tmp_path, step)]
    options = ("--model", world.checkpoint.path, "--lr", "1e-3", "--gate", "none", "--tokens-per-batch", 12)
    lines = "".join(f"{path}\n" for path in paths)
    done = launched(2, sharded, "--follow", *options, "--out", tmp_path / "two", lines=lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(place(tmp_path / "two", step)) for step in (1, 2)]
    assert done.stderr.count("tokens = ") == 2
    code, _, err = cli("--follow", *paths, *options, "--out", tmp_path / "one")
    assert code == 0, err
    for step in (1, 2):
        assert differences(place(tmp_path / "one", step), place(tmp_path / "two", step)) < 2e-4
    cut = launched(2, sharded, "--follow", *options, "--out", tmp_path / "two", lines=f"{lines}{paths[0]}\n")
    assert cut.returncode == 0 and cut.stderr.count("has had its step") == 1
    none = launched(2, sharded, "--follow", *options, "--out", tmp_path / "three")
    assert none.returncode == 1 and "no shard came in" in none.stderr and none.stdout == ""
