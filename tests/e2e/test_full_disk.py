"""A disk that fills up while a command writes: one line, nothing half-written, and the same command goes on later."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builders
import pytest
from e2e.driving import BIN, ROOT, Run, harness, rows, script, until

from legorl import paths
from legorl.sandbox.podman import SERVICE_HOME, SERVICE_RUNTIME

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


@contextlib.contextmanager
def store_of_its_own(size_mb: int) -> Iterator[list[str]]:
    """Podman's store on a small disk, seen by what is run with these words in front only; the base image is in it."""
    own = f"{paths.SERVICE_USER}:{paths.SERVICE_USER}"
    mounts = " && ".join(
        f"mount -t tmpfs -o size={size}m,mode=700 tmpfs {folder} && chown {own} {folder}"
        for folder, size in ((SERVICE_HOME / "storage", size_mb), (SERVICE_RUNTIME, 20))
    )
    argv = ["unshare", "-m", "sh", "-c", f"{mounts} && echo ready && exec sleep infinity"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        words = ["nsenter", "-t", str(holder.pid), "-m", f"--wd={ROOT}"]
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
            subprocess.run([*words, sys.executable, "-m", "legorl.sandbox", "setup"], check=True, capture_output=True)
            yield words
        finally:
            pause = f"kill -9 $(cat {SERVICE_RUNTIME}/libpod/tmp/pause.pid)"  # holds the mounts
            subprocess.run([*words, "sh", "-c", pause], check=False)
            holder.kill()


@pytest.mark.slow
@pytest.mark.podman
def test_podman_s_own_disk(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    """Full before a container is made: infra's, and made again. Full while one runs: nothing that it would notice."""
    tasks = [builders.small_task(tmp_path, name, name) for name in ("first", "second")]
    going_on = tmp_path / "script.jsonl"
    lines = {"^first$": "echo hi > hello.txt", "^second$": "sleep 33.25; echo hi > hello.txt", "^rc": "DONE"}
    going_on.write_text("\n".join(json.dumps({"match": match, "text": text}) for match, text in lines.items()))
    with store_of_its_own(400) as within:
        fill = [*within, "dd", "if=/dev/zero", f"of={SERVICE_HOME}/storage/fill", "bs=1M"]

        def rollout(task: Path) -> list[Any]:
            serve = [BIN / "lego-serve", "-q", tiny_model, "--engine", "script", "--script", going_on, "--"]
            argv = [BIN / "lego-rollout", task, "--out", run.folder / task.name, "--harness", harness(tmp_path)]
            return [*within, *serve, *argv, "-n", 1, "--run", run.folder.name, "--retries", 0]

        subprocess.run(fill, capture_output=True)
        done = run.do(*rollout(tasks[0]))
        assert done.returncode == 3 and "no space left on device" in done.stderr, done.stderr
        (row,) = rows(run.folder / "first")
        assert (row["outcome"], row["blame"]) == ("sandbox_setup_failed", "infra")
        subprocess.run([*within, "rm", f"{SERVICE_HOME}/storage/fill"], check=True)
        assert run.do(*rollout(tasks[0])).returncode == 0
        (row,) = rows(run.folder / "first")
        assert (row["outcome"], len(row["history"])) == ("finished", 1)

        process = run.start(*rollout(tasks[1]))
        until(
            lambda: subprocess.run(["pgrep", "-u", "100999", "-f", "^sleep 33.25$"], capture_output=True).stdout,
            "it to run",
        )
        subprocess.run(fill, capture_output=True)
        _, words = process.communicate(timeout=200)
        assert process.returncode == 0, words
        (row,) = rows(run.folder / "second")
        assert row["outcome"] == "finished"
        listed = subprocess.run(
            [*within, sys.executable, "-m", "legorl.sandbox", "reap"], capture_output=True, text=True, check=True
        )
        assert run.folder.name not in listed.stdout + listed.stderr
    run.wait_gone()
    assert run.left() == []
