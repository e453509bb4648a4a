"""Synthetic bugs: mutate a library, keep what its tests notice, make a task of each.

    async for path in synthesise(library, out, Options(count=30, seed=1, split="train"), say): ...

1. The clean library's tests run in three ways; those that pass in each count (synth_clean.py).
2. Mutants of functions that some test runs are tried, spread over rules and functions (synth_try.py): kept if at least
   one test fails and five pass, at most half fail, everything is collected, and three runs agree.
3. The task is written (synth_write.py): the mutated tree without its tests, those test files and what lies beside them
   as hidden tests, the reversal as solution, an instruction that tells what was seen (synth_story.py).

What was found is noted in OUT/.synth, so that a run that was killed goes on where it was.
"""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from legorl.commands.tasks.synth_clean import Clean, measure
from legorl.commands.tasks.synth_run import Runner, runner
from legorl.commands.tasks.synth_source import Library
from legorl.commands.tasks.synth_try import Candidate, Verdict, candidates, judge
from legorl.commands.tasks.synth_write import write
from legorl.sandbox import Sandbox

NOTES = ".synth"
BATCH = 6  # candidates that a sandbox takes at once


@dataclass(frozen=True)
class Options:
    """How many tasks at most, from which seed, in which split."""

    count: int
    seed: int
    split: str
    workers: int = 2


class Notes:
    """What is known of a library, one JSON line each: the clean library, and each candidate that was tried."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict(read_notes(path))

    def add(self, name: str, data: dict[str, Any]) -> None:
        self.known[name] = data
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"id": name, **data}) + "\n")


def read_notes(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the notes in `path` with their names; a line that was cut is none."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield data["id"], data


async def synthesise(library: Library, out: Path, options: Options, tell: Callable[[str], None]) -> AsyncIterator[Path]:
    """Yield the folders of up to `options.count` tasks of `library`, those that are there first.

    Raises SourceError if its tests cannot be used, and what the sandbox raises.
    """
    notes = Notes(out / NOTES / f"{library.label}-{library.digest[:12]}-{options.seed}.jsonl")
    made = 0
    async with runner(library, options.workers) as box:
        if "clean" not in notes.known:
            clean, cpu_s = await measure(library, box, tell)
            notes.add("clean", clean.to_json() | {"cpu_s": cpu_s})
        clean = Clean.from_json(notes.known["clean"])
        tell(f"{len(clean.tests)} stable tests in {len(clean.files)} files")
        box.modules = clean.modules
        async with contextlib.aclosing(_judged(box, clean, candidates(library, clean, options.seed), notes)) as judged:
            async for candidate, verdict in judged:
                if not verdict.fault:
                    yield write(library, candidate, verdict, clean, out, options.split)
                    made += 1
                if made == options.count:
                    return


async def _judged(
    box: Runner, clean: Clean, queue: Iterator[Candidate], notes: Notes
) -> AsyncGenerator[tuple[Candidate, Verdict], None]:
    """Yield every candidate with its verdict, in order; what is known is not tried again, and each sandbox is busy."""
    free: asyncio.Queue[Sandbox] = asyncio.Queue()
    for sandbox in box.boxes:
        free.put_nowait(sandbox)

    async def tried(batch: list[Candidate]) -> None:
        new = [each for each in batch if each.key not in notes.known]
        if not new:
            return
        sandbox = await free.get()
        for each, verdict in zip(new, await judge(box, sandbox, clean, new), strict=True):
            notes.add(each.key, asdict(verdict) | {"rule": each.mutant.rule})
        free.put_nowait(sandbox)

    ahead: deque[tuple[list[Candidate], asyncio.Task[None]]] = deque()
    try:
        while True:
            while len(ahead) <= len(box.boxes) and (batch := list(islice(queue, BATCH))):
                ahead.append((batch, asyncio.create_task(tried(batch))))
            if not ahead:
                return
            batch, task = ahead.popleft()
            await task
            for each in batch:
                yield each, Verdict.from_json(notes.known[each.key])
    finally:
        for _, task in ahead:
            task.cancel()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
