"""lego-train as a command: what it writes, what it refuses, how it continues."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import builders
import numpy as np
import pyarrow.parquet as pq
import pytest
from commands.train_rows import World, tiny_llama

from legorl import schema
from legorl.checkpoint import open_checkpoint
from legorl.commands.train.save import staging
from legorl.shards import ShardError, open_shard

BIN = Path(__file__).parents[2] / "bin" / "lego-train"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    return World(folder)


def shard_of(path, rows, **fields):
    return builders.shard(path, [row | fields for row in rows])


def read(checkpoint, name):
    return pq.read_table(checkpoint / f"{name}.parquet").to_pylist()


def test_a_step_from_the_shell(world, tmp_path):
    """Paths on stdin, the checkpoint's path on stdout; the folder is whole and loads as a Hugging Face folder."""
    rows = world.group([1.0, 0.0, 0.0])
    path = shard_of(tmp_path / "a.parquet", rows)
    out = tmp_path / "step-1"
    done = subprocess.run(
        [BIN, "--model", world.checkpoint.path, "--out", out, "--lr", "1e-3"],
        input=f"{path}\n", capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    assert done.stderr.count("\n") == 1 and "27 tokens = 27 trained; pearson 1.000000" in done.stderr
    assert {p.name for p in out.iterdir()} == {
        "model",
        "optimizer",
        "updates.parquet",
        "metrics.parquet",
        "legorl.json",
    }
    assert [p.name for p in tmp_path.glob(".*")] == []
    record = json.loads((out / "legorl.json").read_text())
    new = open_checkpoint(out)
    assert (new.version, new.digest) == (record["version"], record["digest"]) and new.version == 1
    assert new.digest != world.checkpoint.digest == record["parent"]["digest"]
    assert record["configuration"]["lr"] == 1e-3
    assert new.tokenizer_digest == world.checkpoint.tokenizer_digest

    updates = read(out, "updates")
    open_shard(out / "updates.parquet", schema.UPDATE_FORMAT)
    open_shard(out / "metrics.parquet", schema.METRIC_FORMAT)
    assert {(u["digest_in"], u["digest_out"], u["step"]) for u in updates} == {(world.checkpoint.digest, new.digest, 1)}
    told = {(u["attempt_id"], u["turn"], u["position"]): (u["token"], u["sampler_logprob"]) for u in updates}
    sampled = {
        (row["attempt_id"], turn["index"], k): (turn["completion_ids"][k], turn["logprobs"][k])
        for row in rows for turn in row["turns"] for k in range(len(turn["completion_ids"]))
    }  # fmt: skip
    assert told == sampled
    figures = {m["name"]: m["value"] for m in read(out, "metrics")}
    assert figures["tokens/sampled"] == figures["tokens/trained"] == figures["align/tokens"] == 27
    assert figures["align/logprob_abs_diff_max"] < 1e-4 and "align/harness=mini-swe-agent/pearson" in figures

    # The new weights are what a reader of the plain folder gets, and they favour what was rewarded.
    after = World(out)
    assert np.mean(after.score(json.loads(json.dumps(rows[0], default=str)))["turns"][1]["logprobs"]) > np.mean(
        rows[0]["turns"][1]["logprobs"]
    )


def test_rerunning_finds_the_step_taken_and_other_settings_are_refused(world, tmp_path, cli):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    arguments = (path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    assert cli(*arguments)[0] == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*")}
    code, out, _ = cli(*arguments)
    assert (code, out) == (0, f"{tmp_path / 'c'}\n")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*")} == before
    code, out, err = cli(*arguments, "--lr", "0.5", "--loss", "dapo")
    assert code == 1 and out == "" and "clip_high: was 0.2, now 0.28" in err and "lr: was 1e-05, now 0.5" in err
    other = shard_of(tmp_path / "b.parquet", world.group([1.0, 0.0]))
    code, _, err = cli(other, *arguments[1:])
    assert code == 1 and "inputs: was" in err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*")} == before


def test_equal_inputs_give_equal_weights_whatever_the_order_of_the_shards(world, tmp_path, cli):
    a = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0, 1.0]))
    b = shard_of(tmp_path / "b.parquet", world.group([0.0, 1.0], "task-b"))
    for name, paths in (("one", (a, b)), ("two", (b, a))):
        assert cli(*paths, "--model", world.checkpoint.path, "--out", tmp_path / name, "--minibatches", 2)[0] == 0
    for file in ("model/model.safetensors", "optimizer/state.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_lost_attempts_change_no_weight(world, tmp_path, cli):
    rows = world.group([1.0, 0.0])
    lost = [
        world.row("task-a", n, None, outcome=o) for n, o in ((2, "engine_lost"), (3, "task_broken"), (4, "finished"))
    ]
    for loss in ("grpo", "dapo"):
        digests = set()
        for name, batch in (("without", rows), ("with", rows + lost)):
            path = shard_of(tmp_path / f"{name}.parquet", batch)
            out = tmp_path / f"{loss}-{name}"
            assert cli(path, "--model", world.checkpoint.path, "--out", out, "--loss", loss)[0] == 0
            digests.add(open_checkpoint(out).digest)
        assert len(digests) == 1
        reasons = [u["reason"] for u in read(out, "updates")]
        assert {r: reasons.count(r) for r in set(reasons)} == {"trained": 18, "infra": 9, "task": 9, "ungraded": 9}
        assert all(u["train_logprob"] is None for u in read(out, "updates") if u["reason"] != "trained")


def test_a_tampered_logprob_stops_the_step(world, tmp_path, cli):
    rows = world.group([1.0, 0.0])
    rows[1]["turns"][1]["logprobs"][2] -= 0.75
    path = shard_of(tmp_path / "a.parquet", rows)
    arguments = (path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    code, out, err = cli(*arguments)
    assert code == 4 and out == "" and not (tmp_path / "c").exists()
    table, line = err.splitlines()[:-1], err.splitlines()[-1]
    assert "lag=0/logprob_abs_diff_max is 0.75, allowed is <= 0.1" in line and "no weight was moved" in line
    assert rows[1]["attempt_id"] in table[1] and "0.7500" in table[1] and "    1    2   0 " in table[1]
    code, _, _ = cli(*arguments, "--gate", "max=1,mean=1,p99=1,pearson=0")
    assert code == 0


def test_the_worst_tokens_are_shown_escaped_and_readable(world, tmp_path, cli):
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = shutil.copytree(world.checkpoint.path, tmp_path / "m")
    words = {f"w{k}": k for k in range(299)} | {"\x1b[31m": 299}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = World(folder).group([1.0, 0.0])
    for row in rows:
        row["tokenizer_digest"] = open_checkpoint(folder).tokenizer_digest
    rows[0]["turns"][1]["completion_ids"][1] = 299
    World(folder).score(rows[0])
    rows[0]["turns"][1]["logprobs"][1] -= 2
    path = shard_of(tmp_path / "a.parquet", rows)
    code, _, err = cli(path, "--model", folder, "--out", tmp_path / "c")
    before = rows[0]["turns"][1]["completion_ids"][0]
    assert code == 4 and "\x1b" not in err
    assert "x1b[31m' after 'w" in err.splitlines()[1] and err.splitlines()[1].endswith(f" w{before}'")


def test_an_incomplete_round_is_no_step(world, tmp_path, cli):
    rows = world.group([1.0, 0.0, 0.0])
    plan = builders.plan_of(rows)
    path = builders.shard(tmp_path / "a.parquet", rows[:2], plan=plan)
    arguments = (path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    code, out, err = cli(*arguments)
    assert code == 1 and out == "" and "2 of 3 attempts" in err and "--partial" in err and not (tmp_path / "c").exists()
    code, out, err = cli(*arguments, "--partial")
    assert code == 0 and out and "2 of 3 attempts" in err


def test_nothing_to_train_is_a_step_that_keeps_the_weights(world, tmp_path, cli):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 1.0]))
    arguments = (path, "--model", world.checkpoint.path)
    code, out, err = cli(*arguments, "--out", tmp_path / "c")
    assert code == 0 and out and "18 tokens = 18 no_variance; nothing to train, weights unchanged" in err
    new = open_checkpoint(tmp_path / "c")
    assert (new.version, new.digest) == (1, world.checkpoint.digest)
    assert {u["reason"] for u in read(tmp_path / "c", "updates")} == {"no_variance"}
    assert all(abs(u["old_logprob"] - u["sampler_logprob"]) < 1e-4 for u in read(tmp_path / "c", "updates"))
    code, out, err = cli(*arguments, "--out", tmp_path / "d", "--require-signal")
    assert code == 1 and "18 no_variance" in err and not (tmp_path / "d").exists()


def test_the_optimizer_goes_on_where_it_was(world, tmp_path, cli):
    first = shard_of(tmp_path / "1.parquet", world.group([1.0, 0.0]))
    assert cli(first, "--model", world.checkpoint.path, "--out", tmp_path / "c1")[0] == 0
    second = shard_of(tmp_path / "2.parquet", World(tmp_path / "c1").group([0.0, 1.0], step=1))
    assert cli(second, "--model", tmp_path / "c1", "--out", tmp_path / "c2")[0] == 0
    from safetensors.numpy import load_file

    state = load_file(tmp_path / "c2/optimizer/state.safetensors")
    assert {float(v) for k, v in state.items() if k.endswith("/step")} == {2.0}
    fresh = shutil.copytree(tmp_path / "c1", tmp_path / "fresh")
    shutil.rmtree(fresh / "optimizer")
    code, _, err = cli(second, "--model", fresh, "--out", tmp_path / "c3")
    assert code == 0 and "AdamW starts afresh" in err
    assert open_checkpoint(tmp_path / "c3").digest != open_checkpoint(tmp_path / "c2").digest
    other = tiny_llama(tmp_path / "wide", hidden_size=64)
    shutil.rmtree(fresh / "model")
    shutil.copytree(other, fresh / "model")
    (fresh / "legorl.json").write_text('{"version": 1}')
    shutil.copytree(tmp_path / "c1/optimizer", fresh / "optimizer")
    third = shard_of(tmp_path / "3.parquet", World(fresh).group([0.0, 1.0]))
    code, _, err = cli(third, "--model", fresh, "--out", tmp_path / "c4")
    assert code == 1 and "does not fit parameter" in err


def test_only_the_newest_checkpoints_of_a_run_keep_their_optimizer(world, tmp_path, cli):
    model = world.checkpoint.path
    for step in range(1, 5):
        path = shard_of(tmp_path / f"{step}.parquet", World(model).group([1.0, 0.0]))
        out = tmp_path / f"run/step-{step}/checkpoint"
        assert cli(path, "--model", model, "--out", out, "--keep", 2)[0] == 0
        model = out
    kept = [(tmp_path / f"run/step-{step}/checkpoint/optimizer").is_dir() for step in range(1, 5)]
    assert kept == [False, False, True, True]
    assert all((tmp_path / f"run/step-{step}/checkpoint/model/config.json").is_file() for step in range(1, 5))
    # A run that starts from another's checkpoint leaves that run alone.
    path = shard_of(tmp_path / "5.parquet", World(model).group([1.0, 0.0]))
    assert cli(path, "--model", model, "--out", tmp_path / "other/step-1/checkpoint", "--keep", 1)[0] == 0
    assert (model / "optimizer").is_dir()


def test_weights_that_did_not_sample_are_refused(world, tmp_path, cli):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    other = tiny_llama(tmp_path / "other", seed=1)
    code, _, err = cli(path, "--model", other, "--out", tmp_path / "c")
    assert code == 4 and world.checkpoint.digest in err and open_checkpoint(other).digest in err


def test_a_batch_of_older_tokens_is_verified_with_the_weights_that_sampled_it(world, tmp_path, cli):
    rows = world.group([1.0, 0.0])
    path = shard_of(tmp_path / "a.parquet", rows)
    old = shutil.copytree(world.checkpoint.path, tmp_path / "old")
    assert cli(path, "--model", old, "--out", tmp_path / "c1", "--lr", "1e-3")[0] == 0
    weights = [{"version": 0, "digest": world.checkpoint.digest, "path": str(old)}]
    lagged = shard_of(tmp_path / "lagged.parquet", rows, weights=weights)
    arguments = ("--model", tmp_path / "c1")
    code, _, err = cli(lagged, *arguments, "--out", tmp_path / "c2")
    assert code == 0 and f"verifying some with version 0 in {old}" in err
    assert {u["lag"] for u in read(tmp_path / "c2", "updates")} == {1}
    code, _, err = cli(lagged, *arguments, "--out", tmp_path / "c3", "--gate", "lagged_ess=0.9999")
    assert code == 4 and "lag=1/ess" in err
    rows[0]["turns"][0]["logprobs"][0] -= 0.5
    tampered = shard_of(tmp_path / "tampered.parquet", rows, weights=weights)
    code, _, err = cli(tampered, *arguments, "--out", tmp_path / "c3")
    assert code == 4 and "logprob_abs_diff_max is 0.5" in err
    shutil.rmtree(old)
    code, _, err = cli(lagged, *arguments, "--out", tmp_path / "c3")
    assert code == 4 and "version 0 cannot verify" in err and "--gate none" in err
    assert cli(lagged, *arguments, "--out", tmp_path / "c3", "--gate", "none")[0] == 0
    code, _, err = cli(lagged, *arguments, "--out", tmp_path / "c4", "--max-lag", 0)
    assert code == 0 and "18 tokens = 18 stale; nothing to train" in err


def test_two_writers_and_a_killed_one(world, tmp_path, cli):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    arguments = (path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    with staging(tmp_path / "c"):
        code, _, err = cli(*arguments)
        assert code == 1 and f"process {os.getpid()} is writing here" in err
    left = tmp_path / ".c.partial/checkpoint/model"
    left.mkdir(parents=True)
    (left / "junk.safetensors").write_text("half")
    assert cli(*arguments)[0] == 0
    assert not (tmp_path / "c/model/junk.safetensors").exists() and not (tmp_path / ".c.partial").exists()


def test_something_else_at_out_is_left_alone(world, tmp_path, cli):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/thesis.txt").write_text("years")
    code, _, err = cli(path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    assert code == 1 and "something else is there" in err and (tmp_path / "c/thesis.txt").read_text() == "years"


def test_a_disk_that_fills_up_leaves_nothing(world, tmp_path, cli):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        code, out, err = cli(path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and out == "" and len(err.splitlines()) == 1 and "File too large" in err
    assert not (tmp_path / "c").exists()


def test_weights_that_give_no_number_are_named(world, tmp_path, cli):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(world.checkpoint.path, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    rows = world.group([1.0, 0.0])
    digest = [{"version": 0, "digest": open_checkpoint(folder).digest, "path": ""}]
    code, _, err = cli(
        shard_of(tmp_path / "a.parquet", rows, weights=digest), "--model", folder, "--out", tmp_path / "c"
    )
    assert code == 1 and "turn 0, position 0" in err and "not a finite number" in err and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "nowhere"), 1, "nowhere: no such model folder"),
        (("missing.parquet",), 1, "missing.parquet: no such file"),
        (("--gate", "pearson=high"), 2, "pearson=high"),
        (("--gate", "typo=1"), 2, "no figure 'typo'"),
        (("--minibatches", "0"), 2, "--minibatches"),
    ],
)
def test_bad_arguments_get_one_line(world, tmp_path, cli, arguments, code, words):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    got, out, err = cli(path, "--model", world.checkpoint.path, "--out", tmp_path / "c", *arguments)
    assert got == code and out == "" and words in err and not (tmp_path / "c").exists()


def test_a_clip_that_cannot_act_is_said_once(world, tmp_path, cli):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    arguments = (path, "--model", world.checkpoint.path)
    assert cli(*arguments, "--out", tmp_path / "a", "--clip-high", 0.3)[2].count("no clip can act") == 1
    assert "no clip can act" not in cli(*arguments, "--out", tmp_path / "b")[2]
    assert "no clip can act" not in cli(*arguments, "--out", tmp_path / "c", "--clip-high", 0.3, "--minibatches", 2)[2]


def test_json_and_explain(world, tmp_path, cli):
    path = shard_of(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    arguments = (path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    code, out, _ = cli(*arguments, "--loss", "dapo", "--explain")
    assert code == 0 and json.loads(out)["clip_high"] == 0.28 and not (tmp_path / "c").exists()
    code, out, _ = cli(*arguments, "--json")
    assert code == 0 and json.loads(out)["path"] == str(tmp_path / "c") and json.loads(out)["tokens"] == {"trained": 18}


def test_help_and_usage_errors_load_nothing_heavy():
    code = (
        "import sys; sys.argv[1:] = [{!r}]\nfrom legorl.commands.train.cli import main\ntry:\n    main()\n"
        "except SystemExit: print([m for m in ('torch', 'transformers', 'duckdb', 'vllm') if m in sys.modules])"
    )
    for argument in ("--help", "--version", "--wrong"):
        done = subprocess.run([sys.executable, "-c", code.format(argument)], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "[]", argument


def test_the_staging_folder_says_who_holds_it(tmp_path):
    with staging(tmp_path / "c"), pytest.raises(ShardError, match="is writing here"), staging(tmp_path / "c"):
        pass
