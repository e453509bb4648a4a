"""Candidates for tasks: which mutants are tried, in which order, and what makes one a task.

    for candidate in candidates(library, clean, seed): ...
    verdicts = await judge(box, sandbox, clean, batch, rules)

A mutant that no test notices, that hangs or cannot be imported is found out by those tests alone that run what it
changed. The others run with their whole files, three times.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from legorl.commands.tasks.mutate import Mutant, mutants
from legorl.commands.tasks.synth_clean import Clean, file_of
from legorl.commands.tasks.synth_run import Job, Result, Runner
from legorl.commands.tasks.synth_source import Library
from legorl.sandbox import Sandbox

RUNS = 3
PATIENCE, SLACK_S = 6.0, 3.0  # a mutant's tests may take so many times the clean ones' CPU seconds, and so many more
LEAST_KEPT = 5
MOST_FAILING = 0.5
PER_RULE = 2  # mutants by one rule in one function or class


@dataclass(frozen=True)
class Candidate:
    """A mutant of the file `path`, and the stable tests that run what it changed."""

    path: str
    mutant: Mutant
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(self.path.encode() + b"\0" + self.mutant.text).hexdigest()[:12]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({file_of(test) for test in self.tests}))


@dataclass(frozen=True)
class Verdict:
    """What the tests say of a candidate. fault: why it makes no task, "" if it does.

    stories: test to what of it can be quoted, and its error. run_s: CPU seconds of its slowest run; cpu_s: of all.
    """

    fault: str
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    stories: dict[str, tuple[str, str]] | None = None
    run_s: float = 0.0
    cpu_s: float = 0.0

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Verdict":
        stories = {test: (story[0], story[1]) for test, story in (data.get("stories") or {}).items()}
        lists = {name: tuple(data.get(name, ())) for name in ("fail_to_pass", "pass_to_pass")}
        return Verdict(data["fault"], **lists, stories=stories, run_s=data["run_s"], cpu_s=data["cpu_s"])


def candidates(library: Library, clean: Clean, seed: int) -> Iterator[Candidate]:
    """Yield all mutants that some test runs, no two of the same span.

    The rules take turns, and each gives a mutant of the function or class that has been drawn least so far.
    """
    by_place: dict[str, dict[int, list[str]]] = {}
    for test, places in clean.ran.items():
        for path, line in places:
            by_place.setdefault(path, {}).setdefault(line, []).append(test)
    by_rule: dict[str, list[Candidate]] = {}
    for path in library.sources:
        source = (library.root / path).read_bytes()
        rng = random.Random(f"{seed}|{library.digest}|{path}")
        try:
            found = list(mutants(source, rng, PER_RULE))
        except (SyntaxError, ValueError):
            continue
        lines = by_place.get(path, {})
        for mutant in found:
            first, last = mutant.lines
            tests = {test for line in lines if first <= line <= last for test in lines[line]}
            if tests:
                by_rule.setdefault(mutant.rule, []).append(Candidate(path, mutant, tuple(sorted(tests))))
    rng = random.Random(f"{seed}|{library.digest}")
    for _, listed in sorted(by_rule.items()):
        rng.shuffle(listed)
    yield from _in_turn(by_rule)


def _in_turn(by_rule: dict[str, list[Candidate]]) -> Iterator[Candidate]:
    drawn: Counter[tuple[str, str]] = Counter()
    spans: set[tuple[str, tuple[int, int]]] = set()
    while any(by_rule.values()):
        for rule in sorted(by_rule):
            left = [each for each in by_rule[rule] if (each.path, each.mutant.span) not in spans]
            if left:
                chosen = min(left, key=lambda each: drawn[each.path, each.mutant.name])
                left.remove(chosen)
                spans.add((chosen.path, chosen.mutant.span))
                drawn[chosen.path, chosen.mutant.name] += 1
                yield chosen
            by_rule[rule] = left


async def judge(box: Runner, sandbox: Sandbox, clean: Clean, batch: Sequence[Candidate]) -> list[Verdict]:
    """Try the mutants of `batch` in one sandbox; return a verdict on each, in order. Raises SandboxError."""
    screens = await box.run_in(sandbox, [_job(each, clean, screen=True) for each in batch])
    faults = {each.key: _screened(screen, each) for each, screen in zip(batch, screens, strict=True)}
    spent = {each.key: screen.cpu_s for each, screen in zip(batch, screens, strict=True)}
    runs: dict[str, list[Result]] = {each.key: [] for each in batch}
    for count in (1, RUNS - 1):
        left = [each for each in batch if not faults[each.key] for _ in range(count)]
        for each, run in zip(left, await _many(box, sandbox, [_job(each, clean) for each in left]), strict=True):
            runs[each.key].append(run)
            spent[each.key] += run.cpu_s
        for each in {each.key: each for each in left}.values():
            faults[each.key] = fault_of(runs[each.key], clean.stable(each.files))
    return [
        Verdict(faults[each.key], cpu_s=spent[each.key])
        if faults[each.key]
        else _found(runs[each.key], clean.stable(each.files), spent[each.key])
        for each in batch
    ]


async def _many(box: Runner, sandbox: Sandbox, jobs: list[Job]) -> list[Result]:
    half = len(jobs) // 2  # two runs of each: its report has a limit
    return [*await box.run_in(sandbox, jobs[:half]), *await box.run_in(sandbox, jobs[half:])]


def _job(candidate: Candidate, clean: Clean, screen: bool = False) -> Job:
    usual = sum(clean.tests[t] for t in candidate.tests) if screen else sum(clean.files[f] for f in candidate.files)
    cpu_s = PATIENCE * usual + SLACK_S
    only = candidate.tests if screen else ()
    mutant = candidate.mutant.text
    return Job(candidate.key, candidate.files, candidate.path, mutant, cpu_s, wall_s=10 * cpu_s + 30, only=only)


def _screened(run: Result, candidate: Candidate) -> str:
    """Why a run of the tests that run what was changed shows that there is no task, "" if it does not."""
    if fault := _unusable([run]):
        return fault
    noticed = any(run.outcomes.get(test) != "pass" for test in candidate.tests)
    return "" if noticed else "not noticed"


def _unusable(runs: Sequence[Result]) -> str:
    if any(run.late for run in runs):
        return "late"
    return "not collected" if any(run.uncollected for run in runs) else ""


def fault_of(runs: Sequence[Result], stable: frozenset[str]) -> str:
    """Why these runs of a mutant make no task, "" if they do. stable: the tests of its files that always pass."""
    if fault := _unusable(runs):
        return fault
    passed = [frozenset(test for test in stable if run.outcomes.get(test) == "pass") for run in runs]
    if len(set(passed)) > 1:
        return "runs disagree"
    failing = len(stable) - len(passed[0])
    if not failing:
        return "not noticed"
    if len(passed[0]) < LEAST_KEPT:
        return "too few tests pass"
    return "too many tests fail" if failing > MOST_FAILING * len(stable) else ""


def _found(runs: Sequence[Result], stable: frozenset[str], cpu_s: float) -> Verdict:
    passed = {test for test in stable if runs[0].outcomes.get(test) == "pass"}
    failing = tuple(sorted(stable - passed))
    stories = {test: runs[0].stories[test] for test in failing if test in runs[0].stories}
    return Verdict("", failing, tuple(sorted(passed)), stories, max(run.cpu_s for run in runs), cpu_s)
