"""The clean library: which of its tests always pass, how long they take, and which functions each of them runs.

    clean = await measure(library, box, say)

Three runs that have to agree: each test file by itself; all files together, as a task's run has several; and each test
in a process of its own, as lego-grade runs what has to pass. A test that passes in all three counts, any other is
flaky, depends on its company, or needs what is not there.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from legorl.commands.tasks.synth_run import Job, Runner
from legorl.commands.tasks.synth_source import Library, SourceError

FILE_SECONDS = 12.0  # CPU seconds; a test file slower than this is left out
SUITE_SECONDS = 300.0


@dataclass(frozen=True)
class Clean:
    """files: CPU seconds of each test file. tests: CPU seconds of each stable test.

    ran: the functions of the library that it runs, as (path, first line). modules: what they import of the standard
    library.
    """

    files: dict[str, float]
    tests: dict[str, float]
    ran: dict[str, frozenset[tuple[str, int]]]
    modules: tuple[str, ...]

    def stable(self, files: Iterable[str]) -> frozenset[str]:
        """The stable tests of `files`."""
        wanted = set(files)
        return frozenset(test for test in self.tests if file_of(test) in wanted)

    def to_json(self) -> dict[str, Any]:
        places = sorted(set().union(*self.ran.values()))
        index = {place: k for k, place in enumerate(places)}
        ran = {test: sorted(index[place] for place in found) for test, found in self.ran.items()}
        return json.loads(json.dumps(asdict(self) | {"ran": ran, "places": places}))

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Clean":
        places = [(path, line) for path, line in data["places"]]
        ran = {test: frozenset(places[k] for k in indices) for test, indices in data["ran"].items()}
        return Clean(data["files"], data["tests"], ran, tuple(data["modules"]))


def file_of(test: str) -> str:
    return test.partition("::")[0]


async def measure(library: Library, box: Runner, tell: Callable[[str], None]) -> tuple[Clean, float]:
    """Run the clean library's tests; return what came of it, and the CPU seconds that it took. Raises SourceError."""
    files = [path for path in library.tests if path.endswith(".py") and _holds_tests(path)]
    tell(f"clean run: {len(files)} test files")
    first = await box.run([Job(file, (file,), cpu_s=4 * FILE_SECONDS, wall_s=SUITE_SECONDS) for file in files])
    good = {run.id: _passing(run.outcomes) for run in first if run.cpu_s <= FILE_SECONDS}
    files = [file for file in files if good.get(file)]
    if not files:
        raise SourceError(f"{library.label}: none of its test files passes with the standard library and pytest alone")
    tell(f"clean run: {len(files)} test files together, and each test alone")
    together = Job("together", tuple(files), cpu_s=SUITE_SECONDS, wall_s=4 * SUITE_SECONDS)
    alone = [Job(file, (file,), cpu_s=SUITE_SECONDS, wall_s=60.0, alone=True) for file in files]
    whole, *single = await box.run([together, *alone])
    passing = set().union(*good.values()) & _passing(whole.outcomes)
    tests = {
        test: run.seconds[test]
        for run in single
        for test, outcome in run.outcomes.items()
        if outcome == "pass" and test in passing
    }
    if not tests:
        raise SourceError(f"{library.label}: no test passes by itself, in its file and with all the others")
    kept = {file_of(test) for test in tests}
    clean = Clean(
        files={run.id: run.cpu_s for run in first if run.id in kept},
        tests=tests,
        ran={test: frozenset(places) for run in single for test, places in run.ran.items() if test in tests},
        modules=tuple(sorted({name for run in single for name in run.modules})),
    )
    return clean, sum(run.cpu_s for run in [*first, whole, *single])


def _passing(outcomes: dict[str, str]) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome == "pass"}


def _holds_tests(path: str) -> bool:
    name = path.split("/")[-1]
    return name.startswith("test_") or name.endswith("_test.py")
