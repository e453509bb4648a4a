"""Grade one attempt: its patch, in a fresh sandbox that the agent never saw, against the task's hidden tests.

    verdict = await grade(job, programs=programs_dir(), retries=2)

In the sandbox: the pristine repository and its root commit, the patch on top, what steers pytest put right, the
pristine tests on top of that, then pytest as the agent's user. The lists of wanted tests and the comparison stay in
this process. A failure of our own is tried again, then becomes outcome `grader_crash`: no reward.
"""

import asyncio
import io
import json
import logging
import random
import secrets
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from legorl.commands.grade import tidy_tree
from legorl.commands.grade.runners import PROGRAMS, PYTHON, REPO, RERUNNERS, RUNNERS, Runner
from legorl.commands.grade.suspicions import suspicions
from legorl.commands.grade.verdict import MISSING, Verdict, both_ways, failed, of_canary
from legorl.flips import flipped_tests
from legorl.sandbox import (
    BASE_IMAGE,
    ImageBroken,
    ImageMissing,
    LimitsError,
    PatchUnusable,
    PodmanMissing,
    Sandbox,
    SandboxError,
    Spec,
    mountable,
    open_sandbox,
)
from legorl.sandbox.container import Opener
from legorl.sandbox.errors import HostsGone
from legorl.task import TEST_ENVIRONMENT, Grade, Task, pack

STAGE = "/ws/grade"
INSIDE = ("guarded.py", "pytest_report.py", "unittest_report.py", "script_report.py", "tidy_tree.py")
OUR_TIME_S = 90.0  # for everything in the sandbox but the tests; more than ten times what a loaded machine needs
CONFIGS = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")  # in pytest's own order

log = logging.getLogger("legorl.grade")


@dataclass(frozen=True)
class Job:
    """One attempt to grade.

    patch: a git diff of the task's repository, possibly empty; None if there is none. flags: those of what the agent
    did while it worked.
    """

    attempt_id: str
    run: str
    task: Task
    patch: bytes | None
    flags: tuple[str, ...] = ()


def programs_dir() -> Path:
    """Return a folder that sandboxes can mount and that holds the programs that run inside."""
    return mountable("grade", [Path(__file__).with_name(name) for name in INSIDE])


async def grade(job: Job, programs: Path, retries: int, open_box: Opener = open_sandbox) -> Verdict:
    """Return the verdict on `job`; `grader_crash` or `grader_timeout` (no reward) after `retries` further tries."""
    started = time.monotonic()
    if job.patch is None:
        verdict = failed(job.task.grade, MISSING, flags=job.flags)
        return of_canary(verdict) if job.task.canary else verdict
    seen = {*job.flags, *suspicions(job.patch)}
    for left in range(retries, -1, -1):
        try:
            async with asyncio.timeout(2 * job.task.grade.timeout_s + job.task.grade.alone_s + 4 * OUR_TIME_S):
                verdict = await _grade_once(job, programs, open_box)
            flags = tuple(sorted({*verdict.flags, *seen}))
            verdict = replace(verdict, flags=flags, grade_s=time.monotonic() - started)
            return of_canary(verdict) if job.task.canary else verdict
        except (PodmanMissing, LimitsError, HostsGone):
            raise  # no further try would help: this machine is not set up
        except ImageMissing as error:
            return Verdict(None, outcome="image_missing", detail=f"grading: {error}")
        except ImageBroken as error:
            return Verdict(None, outcome="task_broken", detail=f"grading: {error}")
        except SandboxError as error:
            outcome, detail = "grader_crash", str(error)
        except TimeoutError:
            outcome, detail = "grader_timeout", "the grading sandbox did not answer in time"
        log.info("%s: %s%s", job.attempt_id, detail, f"; {left} more tries" if left else "")
    return Verdict(None, outcome=outcome, detail=f"grading: {detail}", grade_s=time.monotonic() - started)


async def _grade_once(job: Job, programs: Path, open_box: Opener) -> Verdict:
    verdict = await _in_sandbox(job, programs, {}, RUNNERS[job.task.grade.runner], open_box)
    if not verdict.resolved or job.task.grade.runner not in RERUNNERS:
        return verdict
    files, flipped = flipped_tests(job.task, random.SystemRandom())
    if not flipped:
        return verdict
    # A sandbox of its own: in the first one the code could find out that it is asked a second time.
    again = await _in_sandbox(job, programs, files, RERUNNERS[job.task.grade.runner], open_box)
    return both_ways(job.task.grade, verdict, again, flipped)


async def _in_sandbox(
    job: Job, programs: Path, changed_tests: dict[str, str], runner: Runner, open_box: Opener
) -> Verdict:
    """Run the tests, with some of their files changed, in a fresh sandbox in which the patch is applied."""
    task, grade = job.task, job.task.grade
    spec = Spec(
        name=f"grade-{secrets.token_hex(6)}",
        run=job.run,
        limits=task.limits,
        mounts=((programs, PROGRAMS),),
        lifetime_s=grade.timeout_s + grade.alone_s + OUR_TIME_S,
        image=task.image or BASE_IMAGE,
        links=(*task.links, *_links(grade)),
    )
    config, restored = _restored(task.repo)
    manifest = json.dumps(_manifest(task)).encode()
    staged = {"manifest.json": manifest, **{f"restore/{name}": body for name, body in restored.items()}}
    async with open_box(spec) as box:
        await box.put(pack(task.repo), REPO)
        await box.commit(REPO)
        await box.put(_tar(staged), STAGE)
        await _stage_tests(box, task)
        if changed_tests:
            await box.put(_tar({name: text.encode() for name, text in changed_tests.items()}), f"{STAGE}/tests")
        try:
            await box.apply(job.patch or b"", REPO)
            verdict = await runner(box, task, config, await _tidy(box))
            if not verdict.resolved:
                _check_host(box)
            return replace(verdict, flags=tuple(sorted({*verdict.flags, *_limits_met(box)})))
        except PatchUnusable as error:
            _check_host(box)
            return failed(grade, MISSING, outcome="patch_unusable", detail=f"grading: {error}")
        except SandboxError:
            if not box.evidence().filled_up:
                raise
            # The container ended because of what the patch brought into it, as seen from outside: the agent's doing.
            return failed(grade, MISSING, flags=_limits_met(box))


def _check_host(box: Sandbox) -> None:
    """Raise SandboxError if something was killed or refused although the sandbox was within its own limits."""
    seen = box.evidence()
    if seen.host_oom_kills or seen.host_refusals:
        what = "memory" if seen.host_oom_kills else "processes"
        raise SandboxError(f"the host had no {what} left that the sandbox was entitled to")


def _limits_met(box: Sandbox) -> tuple[str, ...]:
    """The flags of the limits that the tests ran into, as the kernel counted outside of the sandbox."""
    seen = box.evidence()
    met = {"out_of_memory": seen.oom_kills, "too_many_processes": seen.process_refusals, "disk_full": seen.full_disks}
    return tuple(flag for flag, count in met.items() if count)


async def _tidy(box: Sandbox) -> tuple[str, ...]:
    argv = [PYTHON, "-I", "-B", f"{PROGRAMS}/tidy_tree.py", REPO, STAGE]
    result = await box.run(argv, env=TEST_ENVIRONMENT, cwd="/", timeout_s=OUR_TIME_S)
    if result.exit_code != 0:
        log.debug("tidy_tree ended with %s:\n%s", result.exit_code, result.log.decode(errors="replace"))
        raise PatchUnusable("what it leaves cannot be put right for the tests")
    return tuple(json.loads(result.report)["flags"])


def _links(grade: Grade) -> tuple[tuple[str, str], ...]:
    """Links for what a script expects outside of the tree: its tests, and a folder for its reward."""
    outside = [name for name in (grade.tests_at, grade.reward_file) if name.startswith("/")]
    tops = dict.fromkeys("/" + name.split("/")[1] for name in outside)
    return tuple((top, f"/ws{top}") for top in tops)


async def _stage_tests(box: Sandbox, task: Task) -> None:
    """Put the tests aside in the sandbox, at their paths in the tree: what the test paths shall hold in the end."""
    grade = task.grade
    if grade.tests_at.startswith("/"):
        await box.put(pack(task.tests), f"/ws{grade.tests_at}")
        return
    if grade.tests_at != ".":
        await box.put(pack(task.tests), f"{STAGE}/tests/{grade.tests_at}")
        return

    def pristine(name: str) -> bool:
        return tidy_tree.inside(name, grade.test_paths) and name not in grade.removed

    await box.put(pack(task.repo, pristine), f"{STAGE}/tests")
    await box.put(pack(task.tests), f"{STAGE}/tests")


def _restored(repo: Path) -> tuple[str, dict[str, bytes]]:
    """Return the path of the configuration that pytest is told to read, and the pristine files to put back.

    A pristine configuration goes back under a name of our own: the agent may rightly have changed the shared file.
    """
    steering = [p for p in tidy_tree.entries(repo) if p.is_file() and tidy_tree.flag_of(p)]
    files = {p.relative_to(repo).as_posix(): p.read_bytes() for p in steering}
    name, body = ".lego-pytest.ini", b"[pytest]\n"
    for file in (repo / name for name in CONFIGS):
        if file.is_file() and (file.name in tidy_tree.STEERING or tidy_tree.section(file)):
            name, body = f".lego-pytest{file.suffix}", file.read_bytes()
            break
    return f"{REPO}/{name}", {**files, name: body}


def _manifest(task: Task) -> dict[str, object]:
    """What tidy_tree.py must know of the pristine tree."""
    repo, test_paths = task.repo, task.grade.test_paths
    files = {p.relative_to(repo).as_posix(): p for p in tidy_tree.entries(repo) if p.is_symlink() or p.is_file()}
    return {
        "steering": {name: tidy_tree.digest(p) for name, p in files.items() if tidy_tree.flag_of(p)},
        "sections": {name: tidy_tree.section(repo / name) for name in tidy_tree.SECTIONS},
        "test_paths": test_paths,
        "tests": {name: tidy_tree.digest(p) for name, p in files.items() if tidy_tree.inside(name, test_paths)},
        "compiled": [name for name, p in files.items() if tidy_tree.is_compiled(p)],
        "tools": [name for name, p in files.items() if p.name in tidy_tree.TOOLS],
        "top": [p.name.partition(".")[0] for p in repo.iterdir()],
    }


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, body in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(body), 0o644
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()
