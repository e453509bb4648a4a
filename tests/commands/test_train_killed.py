"""A chain of two steps of two processes, killed and run again: the checkpoints of a chain that nobody disturbed."""

import subprocess
from pathlib import Path

import pytest
from commands.test_train_ranks import dense, launched, shard

OPTIONS = ("--gate", "none", "--lr", "1e-3", "--minibatches", "2")


def step_of(path: Path, model: Path, out: Path, kill: str = "") -> subprocess.CompletedProcess[str]:
    """A step in two processes; `kill` as in killed_train."""
    module = "commands.killed_train" if kill else "legorl.commands.train.cli"
    return launched(2, False, path, "--model", model, "--out", out, *OPTIONS, module=module, KILL=kill)


def bytes_of(checkpoint: Path) -> list[bytes]:
    return [(checkpoint / name).read_bytes() for name in ("model/model.safetensors", "optimizer/state.safetensors")]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The shard, and the folders of the base and of both steps, which were left in peace."""
    folder = tmp_path_factory.mktemp("chain")
    world = dense(folder / "0")
    path = shard(world, folder)
    for step in (1, 2):
        done = step_of(path, folder / str(step - 1), folder / str(step))
        assert done.returncode == 0, done.stderr
    return path, [folder / str(step) for step in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "kill"),
    [(1, "moved:one:1"), (1, "weights:all:0"), (2, "moved:all:0"), (2, "whole:one:0"), (2, "renamed:one:0")],
)
def test_a_step_that_was_killed_and_run_again_is_the_step(chain, tmp_path, step, kill):
    path, made = chain
    out = tmp_path / "c"
    killed = step_of(path, made[step - 1], out, kill)  # it ends: no process waits for one that is gone
    assert killed.returncode != 0 and killed.stdout == ""
    assert out.exists() == kill.startswith("renamed")  # whole or not at all
    again = step_of(path, made[step - 1], out)
    assert again.returncode == 0 and again.stdout == f"{out}\n", again.stderr
    assert bytes_of(out) == bytes_of(made[step])
    assert not (tmp_path / ".c.partial").exists() or kill.startswith("renamed")  # with nothing but its lock
