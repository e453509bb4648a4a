"""Losses, modes and reference models through the command: what is recorded, told and refused; weights untouched by what
cannot be trained."""

import json
import shutil

import builders
import pyarrow.parquet as pq
import pytest
from commands.train_rows import World, tiny_llama

from legorl.checkpoint import open_checkpoint
from legorl.commands.train.loss import LOSSES


@pytest.fixture
def step(world, tmp_path, cli):
    """Train on rows: (exit code, stderr, record or None); the checkpoint is `c`."""

    def run(rows, *options):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        path = builders.shard(tmp_path / "a.parquet", rows)
        code, _, err = cli(path, "--model", world.checkpoint.path, "--out", tmp_path / "c", *options)
        record = tmp_path / "c/legorl.json"
        return code, err, json.loads(record.read_text()) if record.exists() else None

    return run


def updates(tmp_path):
    return pq.read_table(tmp_path / "c/updates.parquet").to_pylist()


@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_loss_moves_weights_and_records_its_numbers(world, step, tmp_path, loss):
    code, err, record = step(world.group([1.0, 0.0]), "--loss", loss)
    assert code == 0, err
    assert record["moved"] and record["digest"] != world.checkpoint.digest
    resolved, facts = record["configuration"], LOSSES[loss]
    assert (resolved["clip_low"], resolved["clip_high"]) == (facts.clip_low, facts.clip_high)
    assert resolved["dr_constant"] == (100.0 if loss == "dr_grpo" else None)  # the builders' limit
    weighed = (None, None, None) if loss == "sft" else ("token", "truncate", 2.0)
    assert (resolved["is_level"], resolved["is_mode"], resolved["is_cap"]) == weighed
    assert ("ratio/mean" in record["figures"]) == (loss != "sft")
    assert ("clip/fraction" in record["figures"]) == (facts.clip_high is not None)
    assert err.count("no clip can act") == (loss in ("dapo", "gspo", "cispo"))
    clipped = {u["clipped"] for u in updates(tmp_path) if u["reason"] == "trained"}
    assert clipped == ({None} if facts.clip_high is None else {False})


def test_sft_learns_from_an_expert_that_is_no_policy(world, step, tmp_path):
    rows = world.group([1.0, 0.0])
    for row in rows:
        row["weights"] = [{"version": 0, "digest": "expert", "path": ""}]
        for turn in row["turns"]:
            turn |= {"support": "greedy", "logprobs": [0.0] * len(turn["completion_ids"]), "temperature": 0.0}
    code, err, record = step(rows, "--loss", "sft", "--lr", "1e-2")
    assert code == 0 and record["tokens"] == {"trained": 9, "unrewarded": 9}, err
    trained = [u for u in updates(tmp_path) if u["reason"] == "trained"]
    for name in ("old_logprob", "ratio", "weight", "advantage", "clipped", "lag"):
        assert {u[name] for u in trained} == {None}, name
    assert sum(u["train_logprob"] for u in trained) / 9 == pytest.approx(-record["figures"]["loss"])
    after = World(tmp_path / "c").score(rows[0] | {"turns": [t | {"temperature": 1.0} for t in rows[0]["turns"]]})
    values = [v for turn in after["turns"] for v in turn["logprobs"]]
    assert sum(values) > sum(u["train_logprob"] for u in trained)  # likelier now
    code, err, record = step(world.group([0.0, 0.5]), "--loss", "sft")
    assert code == 0 and not record["moved"] and "18 unrewarded; nothing to train, weights unchanged" in err
    code, err, record = step(world.group([0.0, 0.0]), "--loss", "reinforce", "--require-signal")
    assert code == 1 and record is None and "18 unrewarded" in err


def test_a_reference_model_is_recorded_and_measured(world, step, tmp_path):
    reference = tiny_llama(tmp_path / "ref", seed=5, num_hidden_layers=1)
    digest = open_checkpoint(reference).digest
    found = {}
    for kind in ("k1-reward", "k2", "k3"):
        code, err, record = step(world.group([1.0, 1.0]), "--kl", kind, "--kl-ref", reference, "--kl-coef", "0.1")
        assert code == 0, err
        assert record["configuration"]["kl_ref_digest"] == digest and record["configuration"]["kl_coef"] == 0.1
        found[kind] = record
    assert [found[kind]["moved"] for kind in found] == [True, False, False]  # k1 made equal rewards differ
    code, _, record = step(world.group([1.0, 0.0]), "--kl", "k3", "--kl-ref", reference)
    assert code == 0 and record["figures"]["kl/k3"] > 0.1 and record["figures"]["kl_coef"] == 1e-3
    _, _, same = step(world.group([1.0, 0.0]), "--kl", "k3", "--kl-ref", world.checkpoint.path)
    assert abs(same["figures"]["kl/k3"]) < 1e-6
    code, err, record = step(world.group([1.0, 1.0]), "--kl", "k2", "--kl-ref", reference, "--require-signal")
    assert code == 1 and record is None and "18 no_variance" in err
    code, err, record = step(
        world.group([1.0, 0.0]), "--kl", "k3", "--kl-ref", tiny_llama(tmp_path / "v", vocab_size=310)
    )
    assert code == 4 and record is None and "vocabulary of 310" in err
    code, err, record = step(world.group([1.0, 0.0]), "--kl", "k3", "--kl-ref", tmp_path / "nowhere")
    assert code == 1 and record is None and "no such model folder" in err


def test_bypass_has_weights_of_one_and_a_ratio_to_the_sampler(world, step, tmp_path):
    rows = world.group([1.0, 0.0])
    for row in rows:
        for turn in row["turns"]:
            turn["logprobs"] = [value - 0.05 for value in turn["logprobs"]]
    code, err, record = step(
        rows, "--off-policy", "bypass", "--clip-high", "0.01", "--clip-low", "0.5", "--gate", "none"
    )
    assert code == 0 and "no clip can act" not in err, err
    for u in updates(tmp_path):
        assert u["weight"] == 1 and u["ratio"] == pytest.approx(2.718281828**0.05, rel=1e-3)
        assert u["clipped"] == (u["advantage"] > 0)
    assert record["configuration"]["off_policy"] == "bypass" and record["configuration"]["is_cap"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--off-policy", "bypass", "--is-cap", "3"), "--is-cap: --off-policy bypass has the weight 1"),
        (("--kl", "k1"), "'k1' is not one of"),
        (("--kl", "k3"), "--kl and --kl-ref go together"),
        (("--kl-ref", "m"), "--kl and --kl-ref go together"),
        (("--overlong", "4096"), "'4096' is not MAX,CACHE"),
        (("--overlong", "10,20"), "0 < CACHE <= MAX"),
        (("--loss", "sft", "--gate", "max=1"), "--gate: sft"),
        (("--loss", "ppo"), "'ppo' is not one of"),
    ],
)
def test_options_that_contradict_are_usage_errors(world, step, options, words):
    code, err, record = step(world.group([1.0, 0.0]), *options)
    assert code == 2 and record is None and words in " ".join(err.split())


def test_a_reward_is_shaped_before_the_baseline(world, step):
    rows = [world.row("task-a", 0, 1.0), world.row("task-a", 1, 1.0, [(-1, None, 6, 4)])]
    code, err, record = step(rows, "--overlong", "10,5", "--loss", "dr_grpo", "--dr-constant", "8")
    assert code == 0 and record["moved"] and record["tokens"] == {"trained": 13}, err
    assert record["configuration"]["overlong_max"] == 10 and record["configuration"]["dr_constant"] == 8


def test_what_cannot_be_trained_is_counted_or_refused_and_moves_no_weight(world, step):
    def rows(*rewards):
        return world.group(list(rewards))

    for made, tokens in (
        (rows(1.0, None), {"alone": 9, "ungraded": 9}),
        (rows(None, None), {"ungraded": 18}),
        ([world.row("task-a", 0, 1.0), world.row("task-a", 1, 0.0, outcome="engine_lost")], {"alone": 9, "infra": 9}),
    ):
        code, _, record = step(made)
        assert code == 0 and record["tokens"] == tokens
        assert not record["moved"] and record["digest"] == world.checkpoint.digest
    nan, vocabulary, empty, long = (rows(1.0, 0.0) for _ in range(4))
    nan[0]["turns"][1]["logprobs"][2] = float("nan")
    vocabulary[0]["turns"][1]["completion_ids"][2] = 300
    for row in empty + long:
        row["turns"], row["budgets"] = [], None
    for row in long:
        row["turns"] = world.turns([(-1, None, 200, 4)])
    for made, code, words in (
        (nan, 1, "turn 1: a log-probability is not a finite number"),
        (vocabulary, 4, "token 300, but the model's vocabulary ends at 299"),
    ):
        got, err, record = step(made)
        assert got == code and record is None and words in err
    code, err, record = step(long)
    assert code == 0 and record["tokens"] == {"too_long": 8} and not record["moved"]
    code, err, record = step(empty)
    assert code == 0 and record["tokens"] == {} and not record["moved"]
