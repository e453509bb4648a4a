"""Run a library's tests in sandboxes, many times, each time with one file changed or none.

    async with runner(library, workers=2) as box:
        results = await box.run([Job("clean", ("tests",)), ...])

A library is other people's code: it runs only in sandboxes. One sandbox a worker serves all its jobs one after another,
because a container costs more than most test runs. Files of the tree and in /tmp are put back after each job, what else
a job leaves behind is not; so a task made here must still be proved in fresh sandboxes by `lego-tasks check`.
"""

import asyncio
import contextlib
import io
import itertools
import json
import secrets
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from legorl.commands.tasks.folders import sandbox_limits, size_of
from legorl.commands.tasks.synth_source import Library
from legorl.sandbox import Sandbox, SandboxError, Spec, ensure_ready, mountable, open_sandbox
from legorl.task import TEST_ENVIRONMENT, Limits, pack

ROOT = "/ws/repo"
JOBS = "/ws/jobs"
PROGRAM = Path(__file__).with_name("synth_inside.py")
PROGRAMS = (PROGRAM, Path(__file__).with_name("synth_quote.py"))  # the program and what it imports
MOUNT = "/opt/synth"
CHUNK = 8  # jobs of one start of the program: its report has a limit
MEMORY_MB = 1024


@dataclass(frozen=True)
class Job:
    """One run of pytest on `files`, with `path` replaced by `body`.

    cpu_s, wall_s: limits of the run. only: these tests, until the first that fails. alone: run each test in a process
    of its own, and note what it runs; wall_s is then the limit of each test.
    """

    id: str
    files: tuple[str, ...]
    path: str = ""
    body: bytes = b""
    cpu_s: float = 60.0
    wall_s: float = 300.0
    only: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class Result:
    """What came of a job. outcomes: test to pass, fail, error, skip, xfail, xpass. stories: test to (code, error).

    uncollected: what could not be collected; not empty, too, where the process died. late: its time was over. Of a job
    `alone` besides: seconds and ran: test to CPU seconds, and to the (path, first line) of the functions that it ran;
    modules: what it imported of the standard library.
    """

    id: str
    cpu_s: float
    wall_s: float
    outcomes: dict[str, str]
    stories: dict[str, tuple[str, str]] = field(default_factory=dict)
    uncollected: tuple[str, ...] = ()
    late: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    ran: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()


@contextlib.asynccontextmanager
async def runner(library: Library, workers: int) -> AsyncIterator["Runner"]:
    """Open `workers` sandboxes with the library in each. Raises what open_sandbox raises."""
    limits = Limits(**sandbox_limits(size_of(library.root), MEMORY_MB))
    await ensure_ready(limits)
    mounts = ((mountable("synth", PROGRAMS), MOUNT),)
    tree = pack(library.root)

    async def opened(stack: contextlib.AsyncExitStack) -> Sandbox:
        spec = Spec(name=f"synth-{secrets.token_hex(6)}", run="synth", limits=limits, mounts=mounts, lifetime_s=7200)
        box = await stack.enter_async_context(open_sandbox(spec))
        await box.put(tree, ROOT)
        return box

    async with contextlib.AsyncExitStack() as stack:
        yield Runner(library, await asyncio.gather(*(opened(stack) for _ in range(workers))))


class Runner:
    """modules: of the standard library, to be imported before the processes of jobs are forked."""

    def __init__(self, library: Library, boxes: Sequence[Sandbox]) -> None:
        self._library, self.boxes = library, boxes
        self.modules: tuple[str, ...] = ()
        self._stamps = itertools.count(1)

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Run every job, in parallel over the sandboxes; return the results in the jobs' order.

        Raises SandboxError if a sandbox is lost.
        """
        size = max(1, min(CHUNK, -(-len(jobs) // (2 * len(self.boxes)))))
        chunks = [jobs[k : k + size] for k in range(0, len(jobs), size)]
        results: dict[str, Result] = {}

        async def work(box: Sandbox) -> None:
            while chunks:
                results.update({result.id: result for result in await self.run_in(box, chunks.pop(0))})

        workers = [asyncio.ensure_future(work(box)) for box in self.boxes]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [results[job.id] for job in jobs]

    async def run_in(self, box: Sandbox, jobs: Sequence[Job]) -> list[Result]:
        """Run at most CHUNK jobs in one sandbox; return the results in order. Raises SandboxError."""
        if not jobs:
            return []
        folder = f"{JOBS}/{secrets.token_hex(4)}"
        told = [
            {
                "id": str(k),
                "path": job.path,
                "source": f"{folder}/{k}",
                "stamp": next(self._stamps),
                "files": job.files,
                "only": job.only,
                "cpu_s": job.cpu_s,
                "wall_s": job.wall_s,
                "alone": job.alone,
            }
            for k, job in enumerate(jobs)
        ]
        settings = {"root": ROOT, "python_path": self._library.python_path, "modules": self.modules, "jobs": told}
        files = {"settings.json": json.dumps(settings).encode(), **{str(k): job.body for k, job in enumerate(jobs)}}
        await box.put(_tar(files), folder)
        argv = ["/usr/bin/python3", "-s", f"{MOUNT}/{PROGRAM.name}", f"{folder}/settings.json"]
        limit = 3600.0 if any(job.alone for job in jobs) else sum(job.wall_s + 5 for job in jobs)
        ended = await box.run(argv, env=TEST_ENVIRONMENT, cwd=ROOT, timeout_s=limit)
        lines = [_result(json.loads(line)) for line in ended.report.splitlines() if line.endswith(b"}")]
        done = {line.id: line for line in lines}
        if not lines and ended.exit_code:
            raise SandboxError(f"the library's tests could not be started: {ended.log.decode(errors='replace')[-300:]}")
        # The program itself died in a job: what it did not come to counts as a run that could not be collected.
        died = Result("", 0.0, 0.0, {}, uncollected=("",))
        return [replace(done.get(str(k), died), id=job.id) for k, job in enumerate(jobs)]


def _result(data: dict[str, Any]) -> Result:
    places = [(path, line) for path, line in data.get("places", ())]
    return Result(
        id=data["id"],
        cpu_s=data["cpu_s"],
        wall_s=data["wall_s"],
        outcomes=data["outcomes"],
        stories={test: (story[0], story[1]) for test, story in data["stories"].items()},
        uncollected=tuple(data["uncollected"]),
        late=data["late"],
        seconds=data.get("seconds", {}),
        ran={test: [places[k] for k in indices] for test, indices in data.get("ran", {}).items()},
        modules=tuple(data.get("modules", ())),
    )


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(body), 0o644
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()
