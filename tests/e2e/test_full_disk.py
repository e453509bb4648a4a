"""A disk that fills up while a command writes: one line, nothing half-written, and the same command goes on later."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builders
import pytest
from e2e.driving import BIN, Run, harness, script

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def lost_attempts(tmp_path: Path) -> Path:
    """Attempts that take no grade and no training, so that every stage only has to write: 200 kB of them."""
    rows = builders.group([None, None], outcome="sandbox_lost", patch=os.urandom(100_000))
    return builders.shard(tmp_path / "lost.parquet", rows)


def fails_then_goes_on(run: Run, disk: Path, *argv: Any) -> list[str]:
    done = run.do(*argv)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1 and "the disk is full" in done.stderr, done.stderr
    assert str(disk) in done.stderr
    files = [file for file in disk.rglob("*") if file.suffix in (".parquet", ".safetensors", ".tmp")]
    assert files == []
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    done = run.do(*argv)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_grading(run: Run, disk: Path, tmp_path: Path) -> None:
    made = fails_then_goes_on(run, disk, BIN / "lego-grade", "-q", lost_attempts(tmp_path), "--out", disk / "graded")
    assert made == [str(disk / "graded" / "lost.parquet")]


def test_training(run: Run, disk: Path, tmp_path: Path, tiny_model: Path) -> None:
    argv = [BIN / "lego-train", "-q", lost_attempts(tmp_path), "--model", tiny_model, "--gate", "none"]
    made = fails_then_goes_on(run, disk, *argv, "--out", disk / "checkpoint")
    assert made == [str(disk / "checkpoint")] and [file.name for file in disk.iterdir()] == ["checkpoint"]


def test_task_sets(run: Run, disk: Path) -> None:
    made = fails_then_goes_on(run, disk, BIN / "lego-tasks", "snippets", "-q", "--out", disk / "set")
    assert len(made) >= 20 and all((Path(task) / "task.toml").is_file() for task in made)


@pytest.mark.podman
def test_rolling_out(run: Run, disk: Path, tmp_path: Path, tiny_model: Path) -> None:
    tasks = run.do(BIN / "lego-tasks", "shell", "--out", tmp_path / "t", "--count", 1, "--kind", "create", "--level", 0)
    (task,) = tasks.stdout.split()
    answers = script(tmp_path / "script.jsonl", [Path(task)])
    serve = [BIN / "lego-serve", "-q", tiny_model, "--engine", "script", "--script", answers, "--"]
    argv = [BIN / "lego-rollout", "-q", task, "--out", disk / "out", "--harness", harness(tmp_path), "-n", 4, "-c", 1]
    # Room for the first attempts and not for all.
    made = fails_then_goes_on(run, disk, *serve, *argv, "--run", "test_full_disk")
    counted = (
        "select count(*) as attempts, count(distinct attempt_id) as ids, sum(len(history)) as retries from trajectories"
    )
    done = run.do(BIN / "lego-inspect", "sql", "--json", counted, *made)
    assert json.loads(done.stdout) == {"attempts": 4, "ids": 4, "retries": 0}
