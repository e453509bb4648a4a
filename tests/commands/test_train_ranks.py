"""lego-train in two processes, replicated and sharded: the step of one, its checkpoint, and the next step from it."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import builders
import numpy as np
import pyarrow.parquet as pq
import pytest
from commands.pair_train import take
from commands.test_verify_routing import routed
from commands.train_rows import World, tiny_llama
from moe import tiny_moe
from safetensors.numpy import load_file

BIN = Path(__file__).parents[2] / "bin" / "lego-train"
SHAPE = [(-1, None, 6, 4), (0, None, 3, 5), (0, 8, 4, 3)]
COLUMNS = ("train_logprob", "old_logprob", "ratio", "weight", "clipped", "flipped")


def dense(folder: Path) -> World:
    return World(tiny_llama(folder))


def sparse(folder: Path, kind: str = "qwen3_moe") -> World:
    from transformers import AutoModelForCausalLM

    world = World(tiny_moe(kind, folder))
    world.model = AutoModelForCausalLM.from_pretrained(folder).eval()  # its experts cannot run in float64
    return world


def launched(
    count: int, sharded: bool, *args: object, lines: str = "", module: str = "legorl.commands.train.cli", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run lego-train, or `module`, in `count` processes of torchrun, on the CPU, with `lines` on its stdin."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "LC_ALL": "C.UTF-8", **env}
    env |= {"ACCELERATE_USE_FSDP": "true"} if sharded else {}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count), "--standalone"]
    argv += ["--local_addr", "127.0.0.1", "-m", module, *map(str, args)]
    return subprocess.run(argv, env=env, input=lines, capture_output=True, text=True, timeout=300)


def shard(world: World, folder: Path) -> Path:
    """A group of three attempts whose sampler is somewhat off, with branches and, if sparse, their experts."""
    rows = [world.row("task-a", n, reward, SHAPE) for n, reward in enumerate((1.0, 0.0, 0.0))]
    if world.model.config.model_type != "llama":
        template = routed(world, SHAPE)
        for row in rows:  # any experts will do: replay does not ask whether the model would have chosen them
            for turn, other in zip(row["turns"], template["turns"], strict=True):
                turn["routing"] = other["routing"]
    rng = np.random.default_rng(0)
    for row in rows:
        for turn in row["turns"]:
            turn["logprobs"] = [min(0.0, value + rng.normal(0, 0.5)) for value in turn["logprobs"]]
    return builders.shard(folder / "a.parquet", rows)


def differences(one: Path, other: Path) -> float:
    """Largest difference of weights and of AdamW's averages, each in units of the largest value of its tensor."""
    gaps = []
    for name in ("model/model.safetensors", "optimizer/state.safetensors"):
        ours, theirs = load_file(one / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        gaps += [float(np.abs(ours[key] - theirs[key]).max() / (np.abs(theirs[key]).max() + 1e-12)) for key in ours]
    return max(gaps)


@pytest.mark.parametrize(
    ("make", "sharded", "steps"),
    [
        pytest.param(dense, False, 1, id="replicated"),
        pytest.param(dense, True, 1, id="sharded"),
        pytest.param(sparse, False, 2, id="replicated-sparse", marks=pytest.mark.slow),
        pytest.param(sparse, True, 2, id="sharded-sparse", marks=pytest.mark.slow),
    ],
)
def test_two_processes_take_the_steps_of_one(make, sharded, steps, tmp_path, cli):
    world = make(tmp_path / "m")
    path = shard(world, tmp_path)
    options = ["--loss", "dapo", "--minibatches", "2", "--is-mode", "mask", "--tokens-per-batch", "12", "--lr", "1e-3"]
    options += ["--gate", "none", "--grad-clip", "0.5"]
    one, two = tmp_path / "one", tmp_path / "two"
    for step in range(steps):  # the second starts from the first's checkpoint, AdamW's state too
        made = []
        for out in (one, two):
            start = out / f"{step}" if step else world.checkpoint.path
            args = (path, "--model", start, "--out", out / f"{step + 1}", *options)
            if out == one:
                code, _, err = cli(*args)
                assert code == 0, err
            else:
                done = launched(2, sharded, *args)
                assert done.returncode == 0, done.stderr
                assert done.stdout == f"{args[4]}\n" and done.stderr.count("tokens = ") == 1
            made.append(out / f"{step + 1}")
        assert differences(*made) < 2e-4
        records = [json.loads((folder / "legorl.json").read_text()) for folder in made]
        figures = [record["figures"] for record in records]
        for name in ("loss", "grad_norm"):
            assert figures[0][name] == pytest.approx(figures[1][name], rel=1e-4, abs=1e-6)
        for name in ("routing/replayed", "routing/flipped"):
            assert figures[0].get(name) == figures[1].get(name)
        assert records[1]["configuration"]["model_version"] == step
        updates = [pq.read_table(folder / "updates.parquet").to_pylist() for folder in made]
        for ours, theirs in zip(*updates, strict=True):
            assert ours["reason"] == theirs["reason"] and ours["position"] == theirs["position"]
            for name in COLUMNS:
                assert ours[name] == pytest.approx(theirs[name], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_every_loss_and_mode_in_two_processes_is_that_of_one(tmp_path, sharded):
    world = dense(tmp_path / "m")
    reference = tiny_llama(tmp_path / "r", seed=3, initializer_range=0.25)
    args = (shard(world, tmp_path), tmp_path / "m", reference)
    done = launched(2, sharded, *args, tmp_path / "two.npz", module="commands.pair_train")
    assert done.returncode == 0, done.stderr
    wanted, got = take(*args), np.load(tmp_path / "two.npz")
    assert got.files == [*wanted] and any(wanted["sequence-mask/masked"]) and any(wanted["mask/masked"])
    for name, value in wanted.items():
        if "/weights/" in name:
            assert np.abs(got[name] - value).max() < 2e-4 * np.abs(value).max(), name
        else:
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_several_processes_cannot_share_a_list_on_stdin(tmp_path, cli, monkeypatch):
    world = dense(tmp_path / "m")
    monkeypatch.setenv("RANK", "1")
    code, _, err = cli("--model", world.checkpoint.path, "--out", tmp_path / "out")
    assert code == 2 and "give the shards as arguments" in err


def test_a_process_ends_with_its_launcher() -> None:
    """One that waits for partners hears nothing else, so the kernel has to do it."""
    waits = "import signal; from legorl.commands.train.ranks import _end_with_launcher; _end_with_launcher(); "
    waits += "print('in', flush=True); signal.pause()"
    child = f'"{sys.executable}" -c "{waits}" & echo $!; wait'
    with subprocess.Popen(["sh", "-c", child], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        handle = os.pidfd_open(int(launcher.stdout.readline()))
        assert launcher.stdout.readline() == "in\n"
        launcher.kill()
        ended = select.select([handle], [], [], 30)[0]
        if not ended:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
    assert ended
