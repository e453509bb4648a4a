"""Run a task's tests in a grading sandbox that is ready for them, and judge what came of it.

    verdict = await RUNNERS[task.grade.runner](box, task, config, flags)

Which ids are expected stays here. Only when the run of all tests has passed do the ids of fail_to_pass go in, and each
is run once more, alone, in a process of its own.
"""

import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from legorl.commands.grade.log_parsers import parse
from legorl.commands.grade.verdict import (
    MISSING,
    PASS,
    TIMEOUT,
    UNPROVEN,
    Report,
    Verdict,
    candidates,
    confirm,
    failed,
    judge,
    read_runs,
    read_script,
)
from legorl.sandbox import RunResult, Sandbox
from legorl.task import TEST_ENVIRONMENT, Task

REPO = "/ws/repo"
PROGRAMS = "/opt/grade"  # where the programs that run inside are mounted, read-only
PYTHON = "python3"  # of the image, for what is no test

LOG_LIMIT = 8 << 20  # bytes at the end of a log that is parsed

log = logging.getLogger("legorl.grade")


async def run_python(box: Sandbox, task: Task, config: str, flags: tuple[str, ...]) -> Verdict:
    """Judge a task whose tests are pytest's or unittest's: a signed report of every test that ran."""
    grade = task.grade
    result, [report], [end] = await _reported(box, task, config, [list(grade.files)], grade.timeout_s)
    verdict = judge(grade, report, end, result.timed_out, flags)
    if not verdict.resolved:
        return verdict
    names = [name for test in grade.fail_to_pass for name in candidates(test, report.outcomes, grade.semantics)]
    runs = [[name] for name in names]
    result, reports, ends = await _reported(box, task, config, runs, grade.alone_s)
    alone = dict(zip(names, zip(reports, ends, strict=True), strict=True))
    return confirm(grade, verdict, report, alone, result.timed_out)


async def rerun_python(box: Sandbox, task: Task, config: str, flags: tuple[str, ...]) -> Verdict:
    """Run all tests once, and say what each got: for tests that were changed so that they must not pass."""
    result, [report], [end] = await _reported(box, task, config, [list(task.grade.files)], task.grade.timeout_s)
    return judge(task.grade, report, end, result.timed_out, flags)


async def _reported(
    box: Sandbox, task: Task, config: str, runs: list[list[str]], timeout_s: float
) -> tuple[RunResult, list[Report], list[int | None]]:
    """Run the reporter on each of `runs` (what it is given); return its end, the reports and the runs' exit codes."""
    keys = [secrets.token_hex(16) for _ in (*runs, None)]
    result = await box.run(
        [
            *(task.python or PYTHON, "-s", "-B", f"{PROGRAMS}/{task.grade.runner}_report.py"),
            json.dumps(settings_of(task, config, runs)),
        ],
        env={**task.on_path(TEST_ENVIRONMENT), "LEGORL_REPORT_KEY": "".join(keys)},
        cwd=REPO,
        timeout_s=timeout_s,
    )
    reports, ends = read_runs(result.report, [key.encode() for key in keys])
    if result.exit_code != 0:
        ends = [None] * len(runs)
    faults = [report.fault for report in reports if report.fault]
    text = result.log.decode(errors="replace")
    log.debug("%s: exit %s, runs %s, %s; the log:\n%s", task.id, result.exit_code, ends, faults, text)
    return result, reports, ends


def settings_of(task: Task, config: str, runs: list[list[str]]) -> dict[str, Any]:
    """What the programs inside are told: paths and what to run, nothing of what is expected."""
    places = [task.repo / name for name in task.grade.python_path]
    own = {path.name.partition(".")[0] for place in places if place.is_dir() for path in place.iterdir()}
    return {
        "root": REPO,
        "config": config,
        "own": sorted(own),
        "python_path": task.grade.python_path,
        "runs": runs,
    }


async def run_script(box: Sandbox, task: Task, config: str, flags: tuple[str, ...]) -> Verdict:
    """Judge a task by how its script ended, or by the reward that the script left (column reward; resolved from 1 on).

    A script that leaves processes running could have had its reward changed by one of them: it fails.
    """
    grade, key = task.grade, secrets.token_hex(16)
    settings = {"root": REPO, "command": grade.command, "reward_file": grade.reward_file}
    result = await box.run(
        [PYTHON, "-s", "-B", f"{PROGRAMS}/script_report.py", json.dumps(settings)],
        env={**task.on_path(TEST_ENVIRONMENT), "LEGORL_REPORT_KEY": key},
        cwd=REPO,
        timeout_s=grade.timeout_s,
    )
    log.debug("%s: exit %s; the log:\n%s", task.id, result.exit_code, result.log.decode(errors="replace"))
    record = read_script(result.report, key.encode())
    if record is None or result.timed_out:
        return failed(grade, TIMEOUT if result.timed_out else MISSING, flags=flags)
    if record["left"]:
        return failed(grade, UNPROVEN, flags=tuple(sorted({*flags, "left_running"})))
    if not grade.reward_file:
        return failed(grade, PASS if record["status"] == 0 else "fail", flags=flags)
    if "reward" not in record:
        log.info("%s: %s", task.id, record["fault"])
        locked = ("reward_locked",) if "locked" in record["fault"] else ()
        return failed(grade, MISSING, flags=tuple(sorted({*flags, *locked})))
    verdict = failed(grade, PASS if record["reward"] >= 1 else "fail", flags=flags)
    return replace(verdict, reward=float(record["reward"]))


async def run_log(box: Sandbox, task: Task, config: str, flags: tuple[str, ...]) -> Verdict:
    """Judge a task by the log of its command: only for those of which nothing better can be had.

    A log without a failure and an exit code that is not 0 contradict each other: nothing in it counts then.
    """
    grade = task.grade
    result = await box.run(
        list(grade.command),
        env=task.on_path(TEST_ENVIRONMENT),
        cwd=REPO,
        log_limit=LOG_LIMIT,
        timeout_s=grade.timeout_s,
    )
    outcomes = parse(grade.parser, result.log.decode(errors="replace"))
    clean = not {"fail", "error"} & set(outcomes.values())
    status = result.exit_code if clean or result.exit_code is None else 0
    report = Report(outcomes, 0, None)
    return judge(grade, report, status, result.timed_out, flags)


Runner = Callable[[Sandbox, Task, str, tuple[str, ...]], Awaitable[Verdict]]
RERUNNERS: dict[str, Runner] = {"pytest": rerun_python, "unittest": rerun_python}
RUNNERS: dict[str, Runner] = {"pytest": run_python, "unittest": run_python, "script": run_script, "log": run_log}
