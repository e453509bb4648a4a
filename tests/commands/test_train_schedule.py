"""The learning rate of each step: its schedule, its place in the checkpoint, and the rate that really was used."""

import json
import math
import shutil

import builders
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from commands.train_rows import World
from safetensors.numpy import load_file

from legorl.commands.train.schedule import Schedule
from legorl.commands.train.settings import SettingsError, resolve

LR = 1e-3


def rates(steps, taken=0, **settings):
    """The rates of `steps` steps after `taken` were taken."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(resolve(lr=LR, **settings), optimizer, taken)
    found = []
    for _ in range(steps):
        schedule.check()
        found.append(schedule.rate)
        assert optimizer.param_groups[0]["lr"] == schedule.rate
        optimizer.step()
        schedule.advance()
    assert schedule.state() == {"schedule": settings["schedule"], "taken": taken + steps}
    return found


def formula(schedule, n, warmup, total):
    """The rate of step `n` from 1, as the module's docstring has it."""
    if n <= warmup:
        return LR * n / (warmup + 1)
    if schedule == "constant":
        return LR
    done = (n - warmup - 1) / (total - warmup)
    return LR * (1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_are_those_of_the_formula_wherever_one_goes_on(schedule, warmup):
    total = 9
    ends = {} if schedule == "constant" else {"total": total}
    wanted = [formula(schedule, n, warmup, total) for n in range(1, total + 1)]
    found = rates(total, schedule=schedule, warmup=warmup, **ends)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert min(found) > 0 and max(found) == LR
    assert rates(total - 5, 5, schedule=schedule, warmup=warmup, **ends) == found[5:]


def test_a_schedule_that_is_over_is_gone_on_with_by_a_larger_total():
    with pytest.raises(SettingsError, match="ended with step 3"):
        rates(4, schedule="cosine", total=3)
    assert rates(1, 3, schedule="cosine", total=6) == pytest.approx([LR / 2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--schedule", "linear"], "--total"),
        (["--schedule", "cosine", "--warmup", "5", "--total", "5"], "more than --warmup 5"),
        (["--total", "5"], "constant learning rate has no end"),
        (["--schedule", "sqrt"], "--schedule"),
    ],
)
def test_schedules_that_cannot_be_are_usage_errors(world, tmp_path, cli, options, words):
    code, _, err = cli("a.parquet", "--model", world.checkpoint.path, "--out", tmp_path / "c", *options)
    assert code == 2 and words in err


def figures(checkpoint):
    return {m["name"]: m["value"] for m in pq.read_table(checkpoint / "metrics.parquet").to_pylist()}


def test_the_schedule_goes_on_from_checkpoint_to_checkpoint(world, tmp_path, cli):
    """With several minibatches a step has one rate. A step that moves nothing takes no place of the schedule."""
    model, taken = world.checkpoint.path, 0
    options = ("--lr", LR, "--schedule", "linear", "--warmup", 1, "--total", 3)
    for step, rewards in enumerate([(1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)]):
        path = builders.shard(tmp_path / f"{step}.parquet", World(model).group(rewards))
        out = tmp_path / f"c{step}"
        code, _, err = cli(path, "--model", model, "--out", out, *options, "--minibatches", 2)
        assert code == 0, err
        if len(set(rewards)) > 1:
            taken += 1
            assert figures(out)["lr"] == pytest.approx(formula("linear", taken, 1, 3))
        else:
            assert "lr" not in figures(out)
        state = json.loads((out / "optimizer/schedule.json").read_text())
        assert state == {"schedule": "linear", "taken": taken}
        moved = {float(v) for k, v in load_file(out / "optimizer/state.safetensors").items() if k.endswith("/step")}
        assert moved == {2.0 * taken}
        model = out
    path = builders.shard(tmp_path / "4.parquet", World(model).group([1.0, 0.0]))
    arguments = (path, "--model", model, "--out")
    code, _, err = cli(*arguments, tmp_path / "c4", *options)
    assert code == 1 and "the linear schedule ended with step 3" in err and not (tmp_path / "c4").exists()
    code, _, err = cli(*arguments, tmp_path / "c4", *options[:-1], 4)
    assert code == 0 and figures(tmp_path / "c4")["lr"] == pytest.approx(LR / 3)
    code, _, err = cli(*arguments, tmp_path / "c5", "--lr", LR, "--warmup", 1)
    assert code == 0 and "had a linear schedule; the constant one begins" in err
    assert figures(tmp_path / "c5")["lr"] == LR / 2
    fresh = shutil.copytree(model, tmp_path / "fresh")
    shutil.rmtree(fresh / "optimizer")
    code, _, err = cli(path, "--model", fresh, "--out", tmp_path / "c6", *options)
    assert code == 0 and "afresh" in err and figures(tmp_path / "c6")["lr"] == LR / 2


def test_the_rate_is_what_moves_the_weights(world, tmp_path, cli):
    """The first step of a warm-up over 3 steps is that of a constant rate a fourth as large."""
    path = builders.shard(tmp_path / "a.parquet", world.group([1.0, 0.0]))
    arguments = (path, "--model", world.checkpoint.path)
    for name, options in {"warm": ("--lr", LR, "--warmup", 3), "flat": ("--lr", LR / 4), "full": ("--lr", LR)}.items():
        assert cli(*arguments, "--out", tmp_path / name, *options)[0] == 0
    warm, flat, full = ((tmp_path / n / "model/model.safetensors").read_bytes() for n in ("warm", "flat", "full"))
    assert warm == flat != full
