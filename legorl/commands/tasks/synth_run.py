"""Run a library's tests in sandboxes, many times, each time with one file changed or none.

    async with Runner(library, workers=2) as runner:
        results = await runner.run([Job("clean", files=("tests",)), ...])

A library is other people's code: it runs only in sandboxes. One sandbox a worker serves all its jobs one after another,
because a container costs more than most test runs; what one job leaves behind in the tree's files is not undone, so a
task made here must still be proved in fresh sandboxes by `lego-tasks check`.
"""

import asyncio
import contextlib
import io
import json
import secrets
import tarfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl.commands.tasks.folders import sandbox_limits, size_of
from legorl.commands.tasks.synth_source import Library
from legorl.sandbox import Sandbox, SandboxError, Spec, ensure_ready, mountable, open_sandbox
from legorl.task import TEST_ENVIRONMENT, Limits, pack

ROOT = "/ws/repo"
JOBS = "/ws/jobs"
PROGRAM = Path(__file__).with_name("synth_inside.py")
MOUNT = "/opt/synth"
CHUNK = 8  # jobs of one start of the program: its report has a limit
MEMORY_MB = 1024


@dataclass(frozen=True)
class Job:
    """One run of pytest on `files` with `path` replaced by `body`. trace: note which functions each test runs."""

    id: str
    files: tuple[str, ...]
    path: str = ""
    body: bytes = b""
    seconds: float = 60.0
    trace: bool = False


@dataclass(frozen=True)
class Result:
    """What came of a job. outcomes: test to pass, fail, error, skip, xfail, xpass. stories: test to (statement, error).

    touched: test to the (path, first line) of what it ran. uncollected: what could not be collected; not empty, too,
    where the process died. late: the time was over.
    """

    id: str
    seconds: float
    outcomes: dict[str, str]
    stories: dict[str, tuple[str, str]] = field(default_factory=dict)
    touched: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    uncollected: tuple[str, ...] = ()
    late: bool = False


@contextlib.asynccontextmanager
async def runner(library: Library, workers: int) -> AsyncIterator["Runner"]:
    """Open `workers` sandboxes with the library in each. Raises what open_sandbox raises."""
    limits = Limits(**sandbox_limits(size_of(library.root), MEMORY_MB))
    await ensure_ready(limits)
    mounts = ((mountable("synth", [PROGRAM]), MOUNT),)
    async with contextlib.AsyncExitStack() as stack:
        boxes = []
        for _ in range(workers):
            spec = Spec(
                name=f"synth-{secrets.token_hex(6)}", run="synth", limits=limits, mounts=mounts, lifetime_s=7200
            )
            box = await stack.enter_async_context(open_sandbox(spec))
            await box.put(pack(library.root), ROOT)
            boxes.append(box)
        yield Runner(library, boxes)


class Runner:
    def __init__(self, library: Library, boxes: Sequence[Sandbox]) -> None:
        self._library, self._boxes = library, boxes

    async def run(self, jobs: Sequence[Job], ended: Callable[[Result], None] = lambda result: None) -> list[Result]:
        """Run every job, in parallel over the sandboxes; return the results in the jobs' order.

        Raises SandboxError if a sandbox is lost.
        """
        size = max(1, min(CHUNK, -(-len(jobs) // len(self._boxes))))
        chunks = [jobs[k : k + size] for k in range(0, len(jobs), size)]
        results: dict[str, Result] = {}

        async def work(box: Sandbox) -> None:
            while chunks:
                for result in await self._chunk(box, chunks.pop(0)):
                    results[result.id] = result
                    ended(result)

        async with asyncio.TaskGroup() as group:
            for box in self._boxes:
                group.create_task(work(box))
        return [results[job.id] for job in jobs]

    async def _chunk(self, box: Sandbox, jobs: Sequence[Job]) -> list[Result]:
        folder = f"{JOBS}/{secrets.token_hex(4)}"
        told = [
            {
                "id": job.id,
                "path": job.path,
                "source": f"{folder}/{k}",
                "files": job.files,
                "seconds": job.seconds,
                "trace": job.trace,
            }
            for k, job in enumerate(jobs)
        ]
        settings = {"root": ROOT, "python_path": self._library.python_path, "jobs": told}
        files = {"settings.json": json.dumps(settings).encode(), **{str(k): job.body for k, job in enumerate(jobs)}}
        await box.put(_tar(files), folder)
        argv = ["/usr/bin/python3", "-s", "-B", f"{MOUNT}/{PROGRAM.name}", f"{folder}/settings.json"]
        limit = sum(job.seconds + 5 for job in jobs)
        ended = await box.run(argv, env=TEST_ENVIRONMENT, cwd=ROOT, timeout_s=limit)
        lines = [_result(json.loads(line)) for line in ended.report.splitlines() if line.endswith(b"}")]
        done = {line.id: line for line in lines}
        if not lines and ended.exit_code:
            raise SandboxError(f"the library's tests could not be started: {ended.log.decode(errors='replace')[-300:]}")
        # The program itself died in a job: what it did not come to counts as a run that could not be collected.
        return [done.get(job.id, Result(job.id, 0.0, {}, uncollected=("",))) for job in jobs]


def _result(data: dict[str, Any]) -> Result:
    return Result(
        id=data["id"],
        seconds=data["seconds"],
        outcomes=data["outcomes"],
        stories={test: (story[0], story[1]) for test, story in data["stories"].items()},
        touched={test: [(path, line) for path, line in places] for test, places in data["touched"].items()},
        uncollected=tuple(data["uncollected"]),
        late=data["late"],
    )


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(body), 0o644
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()
