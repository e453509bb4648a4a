"""Tasks mined from the history of a repository: commits that touch source and tests.

    for commit in commits(trees, head): ...
        await write_commit(commit, trees, options, folder)

The repository is the commit's parent, what the commit changes in test files are the hidden tests, what else it changes
is the solution, and its message the instruction. The changed test files run in a sandbox, before and after: tests that
pass only after are fail_to_pass, those that pass both times are pass_to_pass. `lego-tasks check` has to prove the rest.
"""

import json
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from legorl.commands.tasks.folders import Skip, sandbox_limits, size_of
from legorl.commands.tasks.git_trees import GitError, SubmoduleMissing, Trees
from legorl.commands.tasks.import_trees import Options, Triple, is_test, python_path, write_trees
from legorl.commands.tasks.synth_run import MOUNT, PROGRAM, PROGRAMS

MOST_FILES = 20  # a commit that changes more is seldom one thing
LEAST_WORDS = 3
RUNS = 2  # of each version: tests that do not agree, or are called otherwise each time, are left out
_TRAILER = re.compile(r"^(signed-off-by|co-authored-by|reviewed-by|acked-by|change-id|cc|see-also)\s*:.*$", re.I | re.M)


@dataclass(frozen=True)
class Commit:
    """One commit with one parent; `paths` are what it changes, as text."""

    id: str
    parent: str
    date: str
    message: str
    tests: tuple[str, ...]
    sources: tuple[str, ...]


def head_of(git_dir: Path) -> str:
    """Return the commit that the clone has checked out. Raises GitError."""
    command = ["git", "-c", "safe.directory=*", f"--git-dir={git_dir}", "rev-parse", "--verify", "HEAD^{commit}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise GitError(f"{git_dir}: {done.stderr.strip()}")
    return done.stdout.strip()


def commits(trees: Trees, head: str, since: str = "") -> Iterator[Commit]:
    """Yield, newest first, the commits that change Python source and tests; `since` is a date as git takes it."""
    options = ["--no-merges", "-z", "--format=%H%x01%P%x01%cI%x01%B", *([f"--since={since}"] if since else [])]
    for entry in filter(None, trees.log(*options, head).split(b"\0")):
        commit, parents, date, message = entry.decode(errors="replace").split("\x01", 3)
        if len(parents.split()) != 1:
            continue
        paths = [path.decode("utf-8", "surrogateescape") for _, path in trees.changed(parents, commit)]
        tests = tuple(path for path in paths if is_test(path))
        sources = tuple(path for path in paths if not is_test(path))
        if _python(tests) and _python(sources):
            yield Commit(commit, parents, date, message, tests, sources)


def _python(paths: tuple[str, ...]) -> bool:
    return any(path.endswith(".py") for path in paths)


def instruction_of(message: str) -> str:
    """Return a commit's message without its trailers. Raises Skip if it says next to nothing."""
    text = _TRAILER.sub("", message.replace("\r\n", "\n")).strip()
    if len(text.split()) < LEAST_WORDS:
        raise Skip("its message says next to nothing", repr(text))
    return text


async def write_commit(commit: Commit, trees: Trees, name: str, options: Options, folder: Path) -> None:
    """Fill `folder` with the task of `commit` in the repository called `name`. Raises Skip."""
    if len(commit.tests) + len(commit.sources) > MOST_FILES:
        raise Skip("it changes many files", f"{len(commit.tests) + len(commit.sources)} of at most {MOST_FILES}")
    instruction = instruction_of(commit.message)
    try:
        base, after = trees.tree(commit.parent), trees.tree(commit.id)
        parts = [trees.diff(base, after, [_bytes(p) for p in paths]) for paths in (commit.sources, commit.tests)]
        three = Triple(base, trees.apply(base, parts[0]), trees.apply(base, parts[1]))
        names = {entry.name for entry in trees.entries(after)}
    except GitError as error:
        raise Skip("git could not", str(error)) from error
    files = [p for p in commit.tests if p in names and re.search(r"(^|/)(test_[^/]*|[^/]*_tests?|tests)\.py$", p)]
    if not files:
        raise Skip("it changes no file of tests")
    outcomes = await _run(trees, (three.tested, after), files, python_path(names), options)
    forward = sorted(t for t, got in outcomes[1].items() if got == "pass" and outcomes[0].get(t) != "pass")
    kept = sorted(t for t, got in outcomes[1].items() if got == "pass" and outcomes[0].get(t) == "pass")
    if not forward:
        raise Skip("no test passes only after it", f"{len(outcomes[1])} ran")
    write_trees(three, trees, folder, (*forward, *kept), options, {
        "id": folder.name,
        "kind": name,
        "instruction": instruction,
        "image": options.image,
        "grade": {"runner": "pytest", "fail_to_pass": forward, "pass_to_pass": kept},
        "labels": {"repo": name, "base_commit": commit.parent, "commit": commit.id, "created_at": commit.date},
    })  # fmt: skip


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


async def _run(
    trees: Trees, versions: tuple[str, ...], files: list[str], python_path: list[str], options: Options
) -> list[dict[str, str]]:
    """Run the test files in each version of the tree, in one sandbox; return what each test got every time."""
    from legorl.sandbox import BASE_IMAGE, Spec, ensure_ready, mountable, open_sandbox
    from legorl.task import TEST_ENVIRONMENT, Limits, pack

    with tempfile.TemporaryDirectory(prefix="legorl-mine-") as scratch:
        folders = [Path(scratch, str(k)) for k in range(len(versions))]
        try:
            for tree, folder in zip(versions, folders, strict=True):
                trees.write(tree, folder)
        except SubmoduleMissing as error:
            raise Skip("a submodule has no clone", str(error)) from error
        except GitError as error:
            raise Skip("git could not", str(error)) from error
        limits = Limits(**sandbox_limits(size_of(Path(scratch)), options.memory_mb))
        await ensure_ready(limits)
        spec = Spec(
            name=f"mine-{secrets.token_hex(4)}",
            run="import",
            limits=limits,
            image=options.image or BASE_IMAGE,
            mounts=((mountable("synth", PROGRAMS), MOUNT),),
        )
        found = []
        async with open_sandbox(spec) as box:
            for folder in folders:
                root = f"/ws/{folder.name}"
                await box.put(pack(folder), root)
                job = {"path": "", "source": "", "stamp": 1, "files": files, "only": [], "alone": False}
                job |= {"cpu_s": options.timeout_s, "wall_s": options.timeout_s}
                jobs = [{**job, "id": str(k)} for k in range(RUNS)]
                settings = {"root": root, "python_path": python_path, "modules": [], "jobs": jobs}
                await box.put(_tar(json.dumps(settings).encode()), "/ws/job")
                argv = ["/usr/bin/python3", "-s", "-B", f"{MOUNT}/{PROGRAM.name}", "/ws/job/settings.json"]
                ended = await box.run(argv, env=TEST_ENVIRONMENT, cwd=root, timeout_s=RUNS * options.timeout_s + 30)
                runs = [json.loads(line)["outcomes"] for line in ended.report.splitlines() if line.endswith(b"}")]
                if len(runs) != RUNS:
                    raise Skip("its tests could not be run", ended.log.decode(errors="replace").strip()[-200:])
                found.append({test: got for test, got in runs[0].items() if all(run.get(test) == got for run in runs)})
        return found


def _tar(settings: bytes) -> bytes:
    from legorl.task import pack

    with tempfile.TemporaryDirectory(prefix="legorl-job-") as folder:
        Path(folder, "settings.json").write_bytes(settings)
        return pack(Path(folder))
