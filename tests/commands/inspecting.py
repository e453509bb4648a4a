"""lego-inspect in this process, and hand-made run folders for it: `good("show", folder)` is what it prints."""

import contextlib
import io
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import group, plan_of, shard, update_rows

from legorl import schema
from legorl.commands.inspect.cli import main

PROGRAM = Path(sys.executable).parent / "lego-inspect"


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def inspect(*argv, stdin=""):
    """Run the command in this process (a hundred interpreters would take minutes)."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        patch.setattr(sys, "argv", ["lego-inspect", *map(str, argv)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.setattr(signal, "signal", lambda *_: None)  # the handler of SIGTERM stays pytest's
        main()
    return Done(stop.value.code, out.getvalue(), err.getvalue())


def good(*argv, **kwargs):
    done = inspect(*argv, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(*argv, **kwargs):
    return [json.loads(line) for line in good(*argv, **kwargs).splitlines()]


def ungraded(rows):
    return [row | dict.fromkeys(schema.GRADE_COLUMNS) for row in rows]


def write_step(folder, rows, told=None, step=0):
    """A step as a recipe leaves it: rollout, graded, checkpoint."""
    base = folder / f"step-{step:04}"
    shard(base / "rollout" / "a.parquet", ungraded(rows), plan_of(rows))
    shard(base / "graded" / "a.parquet", rows, plan_of(rows))
    if told is not None:
        shard(base / "checkpoint" / "updates.parquet", told, kind=schema.UPDATE_FORMAT)
        figures = [{"run": "r1", "step": step, "name": "loss", "value": 0.5}]
        shard(base / "checkpoint" / "metrics.parquet", figures, kind=schema.METRIC_FORMAT)
    return base


LOST = {"outcome": "engine_lost", "blame": "infra"}
EARLIER = {"try": 0, "outcome": "engine_lost", "blame": "infra", "detail": "", "turns": 1, "tokens": 17, "wall_s": 1.0}


def make_run_folder(folder):
    """Two rounds: the first trained (one task without variance, one attempt lost, one tried twice), the second not."""
    first = group([1.0, 0.0, None]) + group([0.0, 0.0, 0.0], task_id="task-b")
    first[2] |= LOST
    first[0] |= {"try": 1, "history": [EARLIER]}
    told = []
    for row in first:
        reason = "infra" if row["blame"] == "infra" else "no_variance" if row["task_id"] == "task-b" else "trained"
        told += update_rows(row, noise=0.01, reason=reason, step=1)
    write_step(folder, first, told)
    write_step(folder, group([1.0, 1.0, 0.0], step=1), step=1)
    return folder
