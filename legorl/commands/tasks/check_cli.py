"""lego-tasks check: which tasks hold, as paths for the next stage; what is wrong with the others, as a table."""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from legorl.options import (
    CHECK,
    LOST,
    OK,
    Failure,
    command,
    each_path,
    emit,
    json_option,
    option,
    paths_argument,
    podman_option,
    quiet,
    say,
    seed_option,
    shard_option,
    verbose,
)
from legorl.share import Share

if TYPE_CHECKING:
    from legorl.commands.tasks.check import Finding
    from legorl.task import Task

MOST_LINES = 6  # of one task in the table


@command("check")
@paths_argument
@option("-c", "--concurrency", type=click.IntRange(1), default=2, help="Attempts graded at once.")
@option("--runs", type=click.IntRange(1), default=3, help="How often each task is graded both ways; all must agree.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Keep the attempts, their grades and the canaries here.  [default: a temporary folder]",
)
@click.option(
    "--canary",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Add impossible tasks, SHARE of the others (0.03, say), in OUT/canaries: who passes one has cheated.",
)
@seed_option
@podman_option
@shard_option
@json_option
def check(
    paths: tuple[str, ...],
    concurrency: int,
    runs: int,
    out: Path | None,
    canary: float | None,
    seed: int,
    podman: tuple[str, ...],
    shard: Share,
    as_json: bool,
) -> int:
    """Prove tasks both ways: unsolved, their tests fail as they must; with the solution, all pass.

    \b
    Examples:
      lego-tasks check tasks/snippets -c 2 > good.list
      lego-tasks check tasks/snippets --out checked --canary 0.03 | lego-rollout - --out rollout ...
      lego-tasks list tasks --level 0 | lego-tasks check --runs 1 --out checked
      lego-tasks check tasks/shell-copy-0-train-0000 --runs 1 -v     # with what its tests print
      lego-tasks check tasks --json | jq 'select(.ok | not)'

    Each PATH is a task folder or a folder with tasks at any depth; without one, paths are read from stdin. Grading is
    done by lego-grade in sandboxes. The path of each task that holds goes to stdout; what is wrong with the others to
    stderr, as a table at the end, and the exit code is 4. Could some not be graded for want of a sandbox, and is
    nothing else wrong, it is 3.
    """
    from legorl.commands.tasks.canary import choose, write_canary
    from legorl.commands.tasks.check import check as prove
    from legorl.task import load_task

    if canary and out is None:
        raise click.UsageError("canaries are tasks to roll out: give --out FOLDER, where they stay")
    tasks, broken, reached = _load(paths)
    if not tasks and not broken:
        raise Failure("no task arrived; the stage before named none")
    sources = choose(tasks, canary, seed) if canary else []
    tasks, broken = shard.of(tasks), broken if shard.holds(0) else []  # folders that are none: the first part's
    if not tasks and not broken:
        say(f"no task in part {shard}")
        return OK
    settings = {"command": "tasks check", "runs": runs, "shard": shard.setting}
    settings |= {"canary": canary, "seed": seed} if canary else {}
    with _folder(out, settings) as work:
        own = {task.path for task in tasks}
        canaries = [write_canary(task, seed, work / "canaries") for task in sources if task.path in own]
        tasks = _mixed(tasks, [load_task(folder) for folder in canaries], seed)
        reached |= {str(folder.resolve()): str(folder) for folder in canaries}
        _make_images(tasks)
        findings = []
        with _bar(len(broken) + len(tasks)) as bar:
            for found in chain(broken, prove(tasks, work, runs, concurrency, verbose(), podman)):
                finding = replace(found, path=reached.get(found.path, found.path))
                findings.append(finding)
                bar.update()
                if as_json:
                    emit(json.dumps(finding.to_json(), ensure_ascii=False))
                elif finding.ok:
                    emit(finding.path)
    return _conclude(findings, canary is not None)


def _load(paths: tuple[str, ...]) -> tuple[list["Task"], list["Finding"], dict[str, str]]:
    """Return the tasks at `paths`, a finding on each folder that is none, and folders as reached, by absolute path."""
    from legorl.commands.tasks.check import Finding
    from legorl.commands.tasks.listing import task_folders
    from legorl.task import TaskError, load_task

    tasks, broken, reached = [], [], {}
    for path in each_path(paths):
        for folder in task_folders(Path(path)):
            try:
                tasks.append(load_task(folder))
                reached[str(tasks[-1].path)] = str(folder)
            except TaskError as error:
                broken.append(Finding(folder.name, str(folder), task=str(error)))
    return tasks, broken, reached


def _mixed(tasks: Sequence["Task"], canaries: Sequence["Task"], seed: int) -> list["Task"]:
    """Return all of them, the canaries anywhere among the others."""
    mixed, rng = list(tasks), random.Random(seed)
    for task in canaries:
        mixed.insert(rng.randrange(len(mixed) + 1), task)
    return mixed


def _make_images(tasks: Sequence["Task"]) -> None:
    from legorl.sandbox import prepare

    asyncio.run(prepare([task.image for task in tasks], say))


def _bar(total: int):
    from tqdm import tqdm

    shown = sys.stderr.isatty() and not quiet() and not verbose()
    return tqdm(total=total, unit="task", file=sys.stderr, disable=not shown, leave=False)


def _conclude(findings: Sequence["Finding"], with_canaries: bool) -> int:
    """Say what was found, as a table of what is wrong; return OK, or raise Failure with the exit code."""
    broken = sorted((f for f in findings if not f.ok), key=lambda f: f.task_id)
    for line in _table(broken):
        say(line)
    if with_canaries:
        made = [finding for finding in findings if finding.canary]
        say(f"{sum(f.ok for f in made)} of {len(made)} canaries are impossible, as they must be")
    count = f"{len(findings) - len(broken)} of {len(findings)} tasks hold"
    wrong = [finding.task_id for finding in broken if not finding.lost]
    if wrong:
        raise Failure(f"{count}; not: {' '.join(wrong)}", CHECK)
    if broken:
        raise Failure(f"{count}; {len(broken)} could not be graded, so run the check again", LOST)
    say(f"all {len(findings)} tasks hold, both ways")
    return OK


def _table(broken: Sequence["Finding"]) -> Iterator[str]:
    """The lines of the table: a task, the way in which it does not hold, and what happens instead."""
    rows = []
    for finding in broken:
        faults = finding.faults()
        more = [("", f"... and {len(faults) - MOST_LINES} more")] if len(faults) > MOST_LINES else []
        for number, (way, what) in enumerate([*faults[:MOST_LINES], *more]):
            rows.append(("" if number else finding.task_id, way, what))
    if rows:
        rows.insert(0, ("task", "with", "what is wrong"))
    first, second = (max((len(row[k]) for row in rows), default=0) for k in (0, 1))
    for name, way, what in rows:
        yield f"{name:{first}}  {way:{second}}  {what}"


@contextlib.contextmanager
def _folder(out: Path | None, settings: dict[str, object]) -> Iterator[Path]:
    """Give the folder to work in: `out`, held by this process, or a temporary one."""
    from legorl.shards import OutDir

    if out is None:
        with tempfile.TemporaryDirectory(prefix="legorl-check-") as name:
            yield Path(name)
    else:
        with OutDir(out, settings):
            yield out
