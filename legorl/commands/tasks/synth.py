"""Synthetic bugs: mutate a library, keep what its tests notice, make a task of each.

    async for path in synthesise(library, out, Options(count=30, seed=1, split="train")): ...

1. The clean library's tests run three times; only those that pass each time count. One run notes which functions each
   test runs.
2. Mutants of functions that some test runs are drawn, spread over files and rules, no two of the same span.
3. Each mutant's test files run (those with a test that runs its function). It is kept if at least one test fails and
   five pass, at most half fail, and everything is collected; then twice more, and every test must agree.
4. The task: the mutated tree without its tests, those test files and what lies beside them as hidden tests, the
   reversal as solution, an instruction that tells what was seen (synth_story.py).

What was found is noted in OUT/.synth, so that a run that was killed goes on where it was.
"""

import hashlib
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from legorl.commands.tasks.build import Git
from legorl.commands.tasks.folders import new_folder, sandbox_limits, size_of, task_id, to_toml
from legorl.commands.tasks.mutate import Mutant, mutants
from legorl.commands.tasks.synth_run import MEMORY_MB, Job, Result, Runner, runner
from legorl.commands.tasks.synth_source import Library, SourceError
from legorl.commands.tasks.synth_story import instruction
from legorl.task import TASK_FORMAT

NOTES = ".synth"
RUNS = 3
PATIENCE = 6.0  # a mutant's tests may take so many times what the clean ones took
FILE_SECONDS = 12.0  # a test file slower than this is left out
SUITE_SECONDS = 300.0


@dataclass(frozen=True)
class Options:
    """How many tasks at most, from which seed, in which split; and what makes a mutant a task."""

    count: int
    seed: int
    split: str
    workers: int = 2
    least_kept: int = 5
    most_failing: float = 0.5


@dataclass(frozen=True)
class Clean:
    """The library as it is: seconds of each test file, its tests that always pass, and the files by what they run."""

    seconds: dict[str, float]
    passing: dict[str, frozenset[str]]
    touched: dict[str, dict[str, frozenset[int]]]  # test file -> source path -> lines of functions that it runs


@dataclass(frozen=True)
class Bug:
    """A mutant that is a task: its tests, and what the first failing ones say (statement, error)."""

    path: str
    mutant: Mutant
    files: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    stories: dict[str, tuple[str, str]]
    seconds: float


async def synthesise(library: Library, out: Path, options: Options, tell: Callable[[str], None]) -> AsyncIterator[Path]:
    """Yield the folders of up to `options.count` tasks of `library`, those that are there first.

    Raises SourceError if its tests cannot be used, and what the sandbox raises.
    """
    notes = out / NOTES / f"{library.label}-{library.digest[:12]}-{options.seed}.jsonl"
    known = _read(notes)
    made = 0
    async with runner(library, options.workers) as box:
        clean = _clean_of(known["clean"]) if "clean" in known else await _clean(library, box, tell)
        if "clean" not in known:
            _note(notes, {"id": "clean", **_plain(clean)})
        candidates = _candidates(library, clean, options.seed)
        tell(f"{sum(map(len, clean.passing.values()))} stable tests in {len(clean.passing)} files")
        while made < options.count and (batch := _take(candidates, 4 * options.workers)):
            tried = await _try(box, clean, batch, options, known, lambda line: _note(notes, line))
            for bug in tried:
                if made < options.count:
                    yield _write(library, bug, out, options)
                    made += 1


# -- the clean library -------------------------------------------------------------------------------------------------


async def _clean(library: Library, box: Runner, tell: Callable[[str], None]) -> Clean:
    """Run the clean library's test files RUNS times, the last time traced."""
    files = [path for path in library.tests if path.endswith(".py") and _holds_tests(path)]
    seconds: dict[str, float] = {}
    passing: dict[str, frozenset[str]] = {}
    touched: dict[str, dict[str, frozenset[int]]] = {}
    for run in range(RUNS):
        trace = run == RUNS - 1
        tell(f"clean run {run + 1} of {RUNS}: {len(files)} test files")
        jobs = [Job(file, (file,), seconds=SUITE_SECONDS if trace else 4 * FILE_SECONDS, trace=trace) for file in files]
        for result in await box.run(jobs):
            good = frozenset(test for test, outcome in result.outcomes.items() if outcome == "pass")
            passing[result.id] = good if run == 0 else passing[result.id] & good
            if run == 0:
                seconds[result.id] = result.seconds
            if trace:
                touched[result.id] = _by_path(result, passing[result.id])
        files = [file for file in files if passing[file] and seconds[file] <= FILE_SECONDS]
    if not files:
        raise SourceError(f"{library.label}: none of its test files passes with the standard library and pytest alone")
    return Clean(
        {file: seconds[file] for file in files},
        {file: passing[file] for file in files},
        {file: touched[file] for file in files},
    )


def _holds_tests(path: str) -> bool:
    name = path.split("/")[-1]
    return name.startswith("test_") or name.endswith("_test.py")


def _by_path(result: Result, passing: frozenset[str]) -> dict[str, frozenset[int]]:
    lines: dict[str, set[int]] = {}
    for test in passing:
        for path, line in result.touched.get(test, ()):
            lines.setdefault(path, set()).add(line)
    return {path: frozenset(found) for path, found in lines.items()}


# -- mutants -----------------------------------------------------------------------------------------------------------


def _candidates(library: Library, clean: Clean, seed: int) -> Iterator[tuple[str, Mutant, tuple[str, ...]]]:
    """Yield (path, mutant, its test files) of all mutants that some test runs: by turns from each rule, spans once."""
    by_rule: dict[str, list[tuple[str, Mutant, tuple[str, ...]]]] = {}
    for path in library.sources:
        source = (library.root / path).read_bytes()
        rng = random.Random(f"{seed}|{library.digest}|{path}")
        try:
            found = list(mutants(source, rng, per_rule=2))
        except (SyntaxError, ValueError):
            continue
        for mutant in found:
            files = tuple(
                file
                for file, lines in clean.touched.items()
                if any(mutant.lines[0] <= line <= mutant.lines[1] for line in lines.get(path, ()))
            )
            if files:
                by_rule.setdefault(mutant.rule, []).append((path, mutant, files))
    rng = random.Random(f"{seed}|{library.digest}")
    for listed in by_rule.values():
        rng.shuffle(listed)
    spans: set[tuple[str, tuple[int, int]]] = set()
    while any(by_rule.values()):
        for rule in sorted(by_rule):
            while by_rule[rule]:
                path, mutant, files = by_rule[rule].pop()
                if (path, mutant.span) not in spans:
                    spans.add((path, mutant.span))
                    yield path, mutant, files
                    break


def _take(candidates: Iterator, count: int) -> list:
    return [item for item, _ in zip(candidates, range(count), strict=False)]


async def _try(
    box: Runner,
    clean: Clean,
    batch: Sequence[tuple[str, Mutant, tuple[str, ...]]],
    options: Options,
    known: dict[str, dict],
    note: Callable[[dict], None],
) -> list[Bug]:
    """Run the batch's mutants; return those that are tasks, in order. What is `known` is not run again."""
    named = {key_of(path, mutant): (path, mutant, files) for path, mutant, files in batch}
    results: dict[str, list[Result]] = {}
    left = [key for key in named if key not in known]
    for run in range(RUNS):
        jobs = []
        for key in left:
            path, mutant, files = named[key]
            seconds = PATIENCE * sum(clean.seconds[file] for file in files) + 5
            jobs.append(Job(f"{key}/{run}", files, path, mutant.text, seconds))
        for key, result in zip(left, await box.run(jobs), strict=True):
            results.setdefault(key, []).append(result)
        left = [key for key in left if not _fault(results[key], clean, named[key][2], options)]
    bugs = []
    for key, (path, mutant, files) in named.items():
        if key in results:
            runs = results[key]
            fault = _fault(runs, clean, files, options)
            known[key] = {"id": key, "fault": fault} | ({} if fault else _found(runs, clean, files))
            note(known[key])
        if not known[key]["fault"]:
            facts = known[key]
            stories = {test: (story[0], story[1]) for test, story in facts["stories"].items()}
            tests = tuple(facts["fail_to_pass"]), tuple(facts["pass_to_pass"])
            bugs.append(Bug(path, mutant, files, *tests, stories, facts["seconds"]))
    return bugs


def _fault(runs: Sequence[Result], clean: Clean, files: tuple[str, ...], options: Options) -> str:
    """Why these runs of a mutant make no task, "" if they do."""
    if any(run.late for run in runs):
        return "late"
    if any(run.uncollected for run in runs):
        return "not collected"
    stable = frozenset().union(*(clean.passing[file] for file in files))
    passed = [frozenset(test for test in stable if run.outcomes.get(test) == "pass") for run in runs]
    if len(set(passed)) > 1:
        return "runs disagree"
    failing = len(stable) - len(passed[0])
    if not failing:
        return "not noticed"
    if len(passed[0]) < options.least_kept:
        return "too few tests pass"
    return "too many tests fail" if failing > options.most_failing * len(stable) else ""


def _found(runs: Sequence[Result], clean: Clean, files: tuple[str, ...]) -> dict:
    stable = sorted(frozenset().union(*(clean.passing[file] for file in files)))
    passed = [test for test in stable if runs[0].outcomes.get(test) == "pass"]
    failing = [test for test in stable if test not in set(passed)]
    return {
        "fail_to_pass": failing,
        "pass_to_pass": passed,
        "stories": {test: runs[0].stories[test] for test in failing if test in runs[0].stories},
        "seconds": max(run.seconds for run in runs),
    }


def key_of(path: str, mutant: Mutant) -> str:
    return hashlib.sha256(path.encode() + b"\0" + mutant.text).hexdigest()[:12]


# -- tasks -------------------------------------------------------------------------------------------------------------


def _write(library: Library, bug: Bug, out: Path, options: Options) -> Path:
    """Write the task of `bug` unless it is there; return its folder."""
    name = task_id(f"{library.label}-{bug.mutant.rule}-{key_of(bug.path, bug.mutant)}")
    if (out / name / "task.toml").exists():
        return out / name
    size = size_of(library.root)
    with new_folder(out, name) as folder:
        shutil.copytree(library.root, folder / "repo", symlinks=True)
        for path in library.tests:
            (folder / "tests" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "repo" / path).rename(folder / "tests" / path)
        _prune(folder / "repo")
        (folder / "repo" / bug.path).write_bytes(bug.mutant.text)
        (folder / "solution.patch").write_bytes(_reversal(library, bug))
        (folder / "instruction.md").write_text(instruction(library, bug), encoding="utf-8")
        table = {
            "format": TASK_FORMAT,
            "id": name,
            "family": "synth",
            "kind": bug.mutant.rule,
            "level": min(2, bug.mutant.sites - 1),
            "split": options.split,
            "grade": {
                "runner": "pytest",
                "fail_to_pass": list(bug.fail_to_pass),
                "pass_to_pass": list(bug.pass_to_pass),
                "timeout_s": max(30.0, round(10 * bug.seconds)),
                "files": list(bug.files),
                "test_paths": list(library.test_paths),
                "tests_at": ".",
                "python_path": list(library.python_path),
            },
            "sandbox": sandbox_limits(size, MEMORY_MB),
            "labels": {
                "library": library.name,
                "version": library.version,
                "source_digest": library.digest,
                "file": bug.path,
                "target": bug.mutant.name,
            },
        }
        (folder / "task.toml").write_text(to_toml(table), encoding="utf-8")
    return out / name


def _prune(folder: Path) -> None:
    """Remove the folders below `folder` that hold nothing any more."""
    for path in sorted((p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()


def _reversal(library: Library, bug: Bug) -> bytes:
    """The git diff from the mutant back to the clean file, which applied gives the clean file byte for byte."""
    with tempfile.TemporaryDirectory(prefix="legorl-synth-") as name:
        work = Path(name) / "work"
        git = Git(Path(name) / "git", work)
        file, clean = work / bug.path, (library.root / bug.path).read_bytes()
        file.parent.mkdir(parents=True)
        file.write_bytes(clean)
        git("add", "-A", "--force")
        whole = git("write-tree").decode().strip()
        file.write_bytes(bug.mutant.text)
        git("add", "-A", "--force")
        broken = git("write-tree").decode().strip()
        patch = git("diff", "--binary", "--no-renames", broken, whole)
        (Path(name) / "patch").write_bytes(patch)
        git("apply", "--whitespace=nowarn", f"{name}/patch")
        if file.read_bytes() != clean:
            raise AssertionError(f"{library.label}: the reversal of {bug.path} does not give it back")
    return patch


# -- notes -------------------------------------------------------------------------------------------------------------


def _read(notes: Path) -> dict[str, dict]:
    """The lines of `notes` by id; a last line that was cut is none."""
    found = {}
    for line in notes.read_text().splitlines() if notes.exists() else ():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[data["id"]] = data
    return found


def _note(notes: Path, line: dict) -> None:
    notes.parent.mkdir(parents=True, exist_ok=True)
    with notes.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _plain(clean: Clean) -> dict:
    return json.loads(json.dumps(asdict(clean), default=sorted))


def _clean_of(data: dict) -> Clean:
    return Clean(
        data["seconds"],
        {file: frozenset(tests) for file, tests in data["passing"].items()},
        {file: {path: frozenset(lines) for path, lines in places.items()} for file, places in data["touched"].items()},
    )


def faults(out: Path) -> Counter[str]:
    """Count why mutants were not taken, over all notes in `out`."""
    lines = [line for notes in (out / NOTES).glob("*.jsonl") for line in _read(notes).values()]
    return Counter(line["fault"] for line in lines if line.get("fault"))
