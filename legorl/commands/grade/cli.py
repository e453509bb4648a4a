"""lego-grade: grade the patches of trajectory shards in fresh sandboxes against hidden tests."""

import asyncio
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from legorl import __version__, options
from legorl.options import (
    LOST,
    Failure,
    command,
    each_path,
    emit,
    explain_option,
    max_lost_option,
    option,
    out_option,
    paths_argument,
    podman_option,
    quiet,
    say,
    shard_option,
)
from legorl.share import Share

GRADER = f"lego-grade {__version__}"


@command("lego-grade")
@paths_argument
@out_option
@option("-c", "--concurrency", type=click.IntRange(1), default=2, help="Attempts graded at once.")
@option("--retries", type=click.IntRange(0), default=2, help="Further tries of an attempt when grading itself fails.")
@max_lost_option
@podman_option
@shard_option
@explain_option
def main(
    paths: tuple[str, ...],
    out: Path,
    concurrency: int,
    retries: int,
    max_lost: float,
    podman: tuple[str, ...],
    shard: Share,
    explain: bool,
) -> int:
    """Grade the patches of trajectory shards in fresh sandboxes against their tasks' hidden tests.

    \b
    Examples:
      lego-grade runs/demo/step-0001/rollout --out graded              # a folder of shards
      lego-rollout - --out rollout ... < tasks.list | lego-grade --out graded -c 4
      lego-grade - --out regraded < runs/demo/step-0001/rollout.list   # grade old rollouts again

    Each PATH is a shard or a folder of shards; without one, paths are read from stdin as they arrive. The same rows
    go, with their grade, to a file of the same name in --out, whose path goes to stdout as soon as it is complete.
    Only attempts whose blame is `model` get a reward: 1 if every listed test passed, else 0. docs/grading.md says how.
    """
    if explain:
        options.explain(
            {
                "grader": GRADER,
                "out": out,
                "concurrency": concurrency,
                "retries": retries,
                "max_lost": max_lost,
                "podman": podman,
                "shard": shard.setting,
            }
        )
        return 0
    arriving = each_path(paths)
    first = next(arriving, None)
    if first is None:
        raise Failure("no shard arrived; the stage before made none")
    from legorl.shards import OutDir

    with OutDir(out, {"grader": GRADER, "shard": shard.setting}):
        return options.run(_Grading(out, concurrency, retries, shard).run(chain([first], arriving), max_lost, podman))


class _Grading:
    """One run of the command: what it has seen and counted."""

    def __init__(self, out: Path, concurrency: int, retries: int, share: Share) -> None:
        from tqdm import tqdm

        from legorl.commands.grade.grading import programs_dir
        from legorl.commands.grade.rows import Tasks
        from legorl.shards import Tally

        self.out = out
        self.retries = retries
        self.share = share
        self.hosts: Any = None
        self.spares: Any = None
        self.rows = asyncio.Semaphore(concurrency)
        self.shards = asyncio.Semaphore(concurrency)  # as many in memory; the rest waits as paths
        self.tasks = Tasks()
        self.tally = Tally()
        self.names: set[str] = set()
        self.programs = programs_dir()
        self.probed = asyncio.Lock()
        self.ready: set[Any] = set()
        self.images: dict[str, asyncio.Future[None]] = {}
        self.resolved = self.unresolved = self.lost = self.kept = self.canaries = 0
        self.cheats: list[str] = []  # attempts that passed a canary
        self.bar = tqdm(unit="attempt", file=sys.stderr, disable=quiet() or not sys.stderr.isatty(), leave=False)

    async def run(self, arriving: Iterator[str], max_lost: float, podman: Sequence[str]) -> int:
        """Grade the shards as their paths arrive; return the exit code."""
        from legorl.commands.grade.spares import Spares
        from legorl.sandbox.hosts import open_hosts

        queue, position = _from_thread(arriving), itertools.count()
        try:
            async with (
                open_hosts(podman) as self.hosts,
                Spares(self.hosts.open) as self.spares,
                asyncio.TaskGroup() as group,
            ):
                while (path := await queue.get()) is not None:
                    if isinstance(path, BaseException):
                        raise path
                    if not self.share.holds(next(position)):
                        self._see(path)
                        continue
                    await self.shards.acquire()
                    group.create_task(self._shard(path))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self.bar.close()
        graded = self.resolved + self.unresolved
        say(f"graded {graded}: {self.resolved} resolved; {self.kept} take no grade, {self.lost} lost to infrastructure")
        if self.canaries:
            cheats = f": {' '.join(self.cheats)}" if self.cheats else ""
            say(f"{len(self.cheats)} of {self.canaries} attempts at impossible tasks (canaries) passed{cheats}")
        if complaint := self.tally.complaint():
            raise Failure(complaint)
        if self.lost > max_lost * (graded + self.lost):
            raise Failure(f"{self.lost} of {graded + self.lost} attempts could not be graded; run again to retry", LOST)
        return 0

    def _see(self, path: Path) -> None:
        """Another job's shard: count that it is there."""
        from legorl.shards import open_shard

        shard = open_shard(path)
        self.tally.add(shard, [row["attempt_id"] for row in shard.rows(["attempt_id"])])

    async def _shard(self, path: Path) -> None:
        try:
            emit(str(await self._grade_shard(path)))
        finally:
            self.shards.release()

    async def _grade_shard(self, path: Path) -> Path:
        from legorl.commands.grade import rows
        from legorl.shards import open_shard, write_shard

        shard = open_shard(path)
        target = self.out / path.name
        if target.resolve() == path.resolve():
            raise Failure(f"{path}: lies in --out; grades go to files of the same names in another folder")
        if path.name in self.names:
            raise Failure(f"{path}: a second shard of this name; grade them into different folders")
        self.names.add(path.name)
        table = shard.table()
        facts = rows.facts_of(table)
        earlier = rows.earlier_grades(target, GRADER)
        self.tally.add(shard, [row["attempt_id"] for row in facts])
        self.bar.total = -(-self.tally.planned // self.share.count)
        jobs = [(row, rows.job_of(row, self.tasks)) for row in facts]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._row(row, job, earlier.changes)) for row, job in jobs]
        changes = [task.result() for task in tasks]
        new = [
            c is not None and c is not earlier.changes.get(rows.key_of(r))
            for c, (r, _) in zip(changes, jobs, strict=True)
        ]
        if any(new) or earlier.keys != tuple(rows.key_of(row) for row in facts):
            write_shard(target, rows.with_grades(table, [c or {} for c in changes]), {**shard.meta, "grader": GRADER})
        return target

    async def _row(self, row: dict[str, Any], job: Any, earlier: Any) -> dict[str, Any] | None:
        """Return the columns that change in `row`, or None where it takes no grade."""
        from legorl.commands.grade import grading, rows

        if job is None:
            self.kept += 1
            self.bar.update()
            return None
        changes = earlier.get(rows.key_of(row))
        if changes is None:
            async with self.rows:
                await self._ensure_ready(job.task)
                verdict = await grading.grade(job, self.programs, self.retries, self.spares.open)
            changes = rows.changes_of(verdict, GRADER)
        self.resolved += changes.get("resolved") is True
        self.unresolved += changes.get("resolved") is False
        self.lost += changes.get("blame") == "infra"
        self.kept += changes.get("blame") == "task"
        self.canaries += "canary" in (changes.get("flags") or ())
        self.cheats += [row["attempt_id"]] if "canary_passed" in (changes.get("flags") or ()) else []
        self.bar.update()
        return changes

    async def _ensure_ready(self, task: Any) -> None:
        """Refuse to grade where limits are not enforced; make the image. Asked only when something is left to grade."""
        from legorl.sandbox import prepare

        async with self.probed:
            if task.limits not in self.ready:
                await self.hosts.ensure_ready({task.limits})
                self.ready.add(task.limits)
        if task.image not in self.images:
            self.images[task.image] = asyncio.ensure_future(prepare([task.image], say))
        await self.images[task.image]


def _first(error: BaseException) -> BaseException:
    """What a task group (of task groups) failed of: the others were cancelled for it."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _from_thread(arriving: Iterator[str]) -> "asyncio.Queue[Path | BaseException | None]":
    """Read paths in a thread of their own, because stdin blocks; None ends them. Folders become their shards."""
    from legorl.shards import expand

    queue: asyncio.Queue[Path | BaseException | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        end: BaseException | None = None
        try:
            for path in arriving:
                for file in expand(path):
                    loop.call_soon_threadsafe(queue.put_nowait, file)
        except Exception as error:
            end = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, end)

    threading.Thread(target=read, daemon=True).start()  # a daemon: it must not keep a stopped command alive
    return queue
