"""The recipe tiny-moe: its parts, the bounds of its table on figures made by hand, and a small run of the whole."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from builders import shard, small_task

from legorl import schema
from legorl.task import load_task

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_moe", ROOT / "recipes" / "tiny_moe.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OWN = {"tokens": 3000, "pearson": 0.998, "mean": 0.02, "p99": 0.3, "max": 1.8}
REPLAY = {"tokens": 3000, "pearson": 0.9995, "mean": 0.01, "p99": 0.1, "max": 0.6}
FLIPPED = {"tokens": 900, "pearson": 0.99, "mean": 0.03, "p99": 0.4, "max": 1.8}
FLIPPED_REPLAY = FLIPPED | {"p99": 0.2, "max": 0.6}


def written(folder: Path, everything: dict[str, float], flipped: dict[str, float] | None) -> None:
    """metrics.parquet of a checkpoint with these figures of align."""
    names = {"tokens": "tokens", "pearson": "pearson", **{n: f"logprob_abs_diff_{n}" for n in ("mean", "p99", "max")}}
    rows = [{"name": f"align/{names[name]}", "value": float(value)} for name, value in everything.items()]
    rows += [
        {"name": f"align/flipped=true/{names[name]}", "value": float(value)} for name, value in (flipped or {}).items()
    ]
    rows = [{"run": "r", "step": 1, **row} for row in rows]
    shard(folder / "metrics.parquet", rows, kind=schema.METRIC_FORMAT)


@pytest.mark.parametrize(
    ("own", "replay", "flipped", "flipped_replay", "missed"),
    [
        ({}, {}, {}, {}, None),
        ({}, {"pearson": 0.9989}, {}, {}, "the correlation is 0.998900 with replay, 0.999 is wanted"),
        ({"pearson": 0.9996}, {}, {}, {}, "the correlation is 0.999500 with replay, 0.999600 without it"),
        ({"max": 1.7}, {}, {}, {}, "the largest |Δ log p| is 2.83 times lower with replay, 3 times is wanted"),
        ({}, {"max": float("nan")}, {}, {}, "the largest |Δ log p| is nan times lower"),
        ({}, {}, {"p99": 0.39}, {}, "p99 of flipped tokens is 1.95 times lower with replay, 2 times is wanted"),
        ({}, {}, {}, {"tokens": 199}, "199 tokens have a flipped route on their path, 200 are wanted"),
        ({}, {}, None, {}, "0 tokens have a flipped route on their path, 200 are wanted"),
    ],
)
def test_the_table_names_every_bound_that_is_missed(
    recipe, own, replay, flipped, flipped_replay, missed, tmp_path, capsys
):
    written(tmp_path / "float32" / "no-replay", OWN | own, None if flipped is None else FLIPPED | flipped)
    written(tmp_path / "float32" / "replay", REPLAY | replay, FLIPPED_REPLAY | flipped_replay)
    assert recipe.report([tmp_path / "float32"]) == (4 if missed else 0)
    out = capsys.readouterr().out
    assert [line.split()[:4] for line in out.splitlines()[1:3]] == [
        ["float32", "trainer's", "3000", f"{(OWN | own)['pearson']:.6f}"],
        ["float32", "recorded", "3000", f"{(REPLAY | replay)['pearson']:.6f}"],
    ]
    assert [line for line in out.splitlines() if line.startswith("missed")] == (
        [line for line in out.splitlines() if line.startswith(f"missed: float32: {missed}")][:1] if missed else []
    )


def test_the_expert_answers_a_task_with_its_solution_and_a_result_with_the_end(recipe, tmp_path, capsys):
    tasks = [
        small_task(tmp_path, name, text) for name, text in (("a", "Put (hi) in a.txt"), ("b", "Put (hi) in a.txt.gz"))
    ]
    for task in tasks:
        with (task / "task.toml").open("a") as file:
            file.write(f'[labels]\nsolution_command = "echo {task.name}"\n')
    recipe.script(tasks)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def answer(text: str) -> list[str]:
        return [line["text"] for line in lines if re.search(line["match"], text, re.DOTALL)]

    assert [answer(load_task(task).instruction) for task in tasks] == [["echo a"], ["echo b"]]
    assert answer("exit 0\nsomething") == ["DONE"]


def make(run: Path, *settings: str) -> "subprocess.CompletedProcess[str]":
    argv = ["make", "-f", "recipes/tiny-moe.mk", f"RUN={run}", *settings]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1700)


def test_the_plan_trains_samples_and_compares_in_this_order(tmp_path):
    plan = make(tmp_path / "run", "-n", "EPOCHS=2").stdout
    stages = [
        "--engine script", "expert/graded.list", "--loss sft", "sft-2/checkpoint", "--dtype float32 --routing require",
        "float32/graded.list", "--no-replay", "recipes/tiny_moe.py report",
    ]  # fmt: skip
    places = [plan.index(stage) for stage in stages]
    assert places == sorted(places) and "--dtype bfloat16" in plan
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.podman
@pytest.mark.timeout(1800)
def test_replay_does_on_a_trained_model_what_it_should(tmp_path):
    """The whole recipe with one of its samplers."""
    settings = ("SAMPLERS=float32",)
    done = make(tmp_path / "run", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    again = make(tmp_path / "run", *settings)
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")  # nothing is done twice
