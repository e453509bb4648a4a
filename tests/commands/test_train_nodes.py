"""Two launchers that meet over the network, a process each: the step of one process."""

import os
import socket
import subprocess
import sys

import pytest
from commands.test_train_ranks import dense, differences, shard
from commands.train_rows import train_in_process


@pytest.mark.slow
def test_two_nodes_take_the_step_of_one_process(tmp_path, capsys, monkeypatch):
    world = dense(tmp_path / "m")
    args = [str(shard(world, tmp_path)), "--model", str(world.checkpoint.path), "--gate", "none", "--lr", "1e-3"]
    args += ["--minibatches", "2", "--tokens-per-batch", "12"]
    with train_in_process(capsys, monkeypatch) as cli:
        code, _, err = cli(*args, "--out", tmp_path / "one")
        assert code == 0, err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"}
    env |= {"GLOO_SOCKET_IFNAME": "lo"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "x"]
    launcher += ["--local_addr", "127.0.0.1", "-m", "legorl.commands.train.cli", *args, "--out", str(tmp_path / "two")]
    nodes = [
        subprocess.Popen(launcher, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        told = [node.communicate(timeout=500) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    assert sorted(out for out, _ in told) == ["", f"{tmp_path / 'two'}\n"]  # one process speaks for all
    assert differences(tmp_path / "one", tmp_path / "two") < 2e-4
