"""The script for a machine with a GPU, on a CPU: its parts run and its checks hold."""

import json
import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_gpu_script_runs_on_a_cpu(tmp_path):
    script = Path(__file__).parent / "bench/gpu.sh"
    env = {**os.environ, "DEVICE": "cpu", "JSON": str(tmp_path / "figures.json"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([script], env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {part for part in figures if part != "device"} == {"step", "dense", "moe"}
    for part in ("dense", "moe"):
        assert figures[part]["mean gap, new weights"] < 1e-4 < figures[part]["mean gap, old ones"]
    assert figures["moe"]["routing replayed"] > 0.9 and figures["dense"]["serve: tokens a second"] > 0
    assert all(name in done.stdout for name in figures["step"])
