"""From what came out of the grading container to a verdict. Pure functions; nothing here runs or trusts anything.

The report is evidence from a place where the agent's code ran. It counts only if it is whole (every record signed with
this run's key and numbered without a gap, from `start` to `finish`), and if the exit code that the process outside of
the run saw agrees with it. A test that passed in a report that does not count is `unproven`.

    (report,), ended = read_runs(raw, keys)
    verdict = judge(task.grade, report, ended[0], timed_out, flags)
    verdict = confirm(task.grade, verdict, report, {test: report of that test run alone})
"""

import datetime
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from legorl.commands.grade.log_parsers import short_path
from legorl.task import Grade

PASS = "pass"
# What a test can get beside what pytest says of it (pass, fail, error, skip, xfail, xpass):
MISSING = "missing"  # no record of it: not collected, deselected, or the process ended before it
TIMEOUT = "timeout"  # no record of it, and the time was over
UNPROVEN = "unproven"  # said to have passed, in a report that does not count
FORGED = "forged"  # said to have passed, although its function raised
NOT_ALONE = "not_alone"  # passed with the others, but not when run alone
BOTH_WAYS = "both_ways"  # passed, and so did its copy with a wrong assertion


@dataclass(frozen=True)
class Report:
    """`outcomes`: test id to what it got. `fault`: why the report does not count, or None. `status`: pytest's own."""

    outcomes: dict[str, str]
    status: int | None
    fault: str | None
    tampered: tuple[str, ...] = ()


def read_report(raw: bytes, key: bytes) -> Report:
    """Check and read the report of one run: lines `MAC JSON`, signed with `key`."""
    outcomes: dict[str, str] = {}
    tampered: set[str] = set()
    failures = False
    fault = status = None
    lines = raw.split(b"\n")
    if lines and lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines):
        if not _signed(line, key):
            return Report(outcomes, None, f"record {number} is not ours", tuple(sorted(tampered)))
        record = json.loads(line.partition(b" ")[2])
        if record["n"] != number or (record["event"] == "start") != (number == 0) or status is not None:
            return Report(outcomes, None, f"record {number} is out of order", tuple(sorted(tampered)))
        if record["event"] == "test":
            # The same id twice (a test run again) is never better than its worst.
            before = outcomes.get(record["id"], PASS)
            outcomes[record["id"]] = record["outcome"] if before == PASS else before
        elif record["event"] == "finish":
            status = record["status"]
        tampered.update(record.get("tampered", ()))
        failures |= record["event"] == "uncollected" or record.get("outcome") not in (None, PASS, "skip", "xfail")
    if status is None:
        fault = "no finish record" if lines else "no report"
    elif tampered:
        fault = "pytest was tampered with"
    elif status == 1 and not failures:
        fault, tampered = "it says that tests failed, and names none", {"the outcomes"}
    return Report(outcomes, status, fault, tuple(sorted(tampered)))


def read_runs(raw: bytes, keys: Sequence[bytes]) -> tuple[list[Report], list[int | None]]:
    """Read what one program wrote of its runs, one after the other: the report of each, and how its process ended.

    keys: one a run, and last the key of the process that started the runs. The ends are its exit status, None if that
    process did not say; then no report counts.
    """
    segments: list[list[bytes]] = [[] for _ in keys]
    current = 0
    for line in raw.removesuffix(b"\n").split(b"\n") if raw else []:
        owner = next((k for k in range(current, len(keys)) if _signed(line, keys[k])), None)
        current = current if owner is None else owner
        segments[current].append(line)
        if owner is None:
            break  # nothing counts any more; whoever wrote it may have written millions
    reports = [read_report(b"\n".join(lines), key) for lines, key in zip(segments[:-1], keys, strict=False)]
    ends: list[int | None] = [None] * len(reports)
    if len(segments[-1]) == 1:
        last = json.loads(segments[-1][0].partition(b" ")[2])
        ends[: len(last["statuses"])] = last["statuses"]
    return reports, ends


def read_script(raw: bytes, key: bytes) -> dict[str, Any] | None:
    """Return the one record of a script's end, None unless there is exactly that and it is signed."""
    line = raw.removesuffix(b"\n")
    return json.loads(line.partition(b" ")[2]) if b"\n" not in line and _signed(line, key) else None


def _signed(line: bytes, key: bytes) -> bool:
    mac, _, body = line.partition(b" ")
    return hmac.compare_digest(mac, hmac.new(key, body, hashlib.sha256).hexdigest()[:32].encode())


@dataclass(frozen=True)
class Verdict:
    """What lego-grade writes of one attempt; `outcome` and `detail` only where grading changes them."""

    reward: float | None
    resolved: bool | None = None
    fail_to_pass: tuple[int, int] | None = None  # passed, total
    pass_to_pass: tuple[int, int] | None = None
    tests: tuple[tuple[str, str, str], ...] | None = None  # id, wanted, got
    flags: tuple[str, ...] = ()
    outcome: str | None = None
    detail: str | None = None
    grade_s: float = 0.0
    graded_at: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))

    def columns(self, grader: str) -> dict[str, Any]:
        """The verdict as the grade columns of schema.TRAJECTORY. Without a reward every one of them is null."""
        if self.reward is None:
            return {}
        count = [pair and {"passed": pair[0], "total": pair[1]} for pair in (self.fail_to_pass, self.pass_to_pass)]
        return {
            "reward": self.reward,
            "resolved": self.resolved,
            "fail_to_pass": count[0],
            "pass_to_pass": count[1],
            "tests": [{"id": i, "wanted": w, "got": g} for i, w, g in self.tests or ()],
            "flags": list(self.flags),
            "grader": grader,
            "graded_at": self.graded_at,
            "grade_s": self.grade_s,
        }


def failed(grade: Grade, got: str, **fields: Any) -> Verdict:
    """The verdict on an attempt all of whose tests got `got`: for one, those of an attempt whose tests never ran."""
    return _count(grade, dict.fromkeys((*grade.fail_to_pass, *grade.pass_to_pass), got), **fields)


def judge(grade: Grade, report: Report, exit_code: int | None, timed_out: bool, flags: tuple[str, ...] = ()) -> Verdict:
    """Compare a report with the task's lists: resolved iff the report counts and every listed test passed.

    A skipped, xfailed, missing, late or forged test is not a pass, in either list. With the semantics `swe-bench` an
    xfail is one, and a test of pass_to_pass that is skipped is kept.
    """
    fault = "time is over" if timed_out else report.fault
    if fault is None and exit_code != report.status:
        fault = f"exit code {exit_code}, but the report says {report.status}"
    if report.tampered:
        flags += ("tampered",)
    elif fault and fault.startswith("record"):
        flags += ("forged_report",)
    elif fault:
        flags += ("timed_out" if timed_out else "ended_early",)
    if FORGED in report.outcomes.values():
        flags += ("forged_report",)
    got = {}
    for test in (*grade.fail_to_pass, *grade.pass_to_pass):
        outcome = outcome_of(test, report.outcomes, grade.semantics) or (TIMEOUT if timed_out else MISSING)
        got[test] = UNPROVEN if fault and outcome == PASS else outcome
    if {"skip", "xfail"} & {got[test] for test in grade.fail_to_pass}:
        flags += ("skipped",)
    return _count(grade, got, flags=tuple(sorted(set(flags))))


def candidates(test: str, outcomes: Mapping[str, str], semantics: str) -> list[str]:
    """Return the recorded ids that the listed id `test` stands for.

    SWE-bench took ids from a log, word by word: those with white space in their parameters were cut there, others have
    lost all but the last part of a path. Both are matched as its own grader does.
    """
    if test in outcomes or semantics != "swe-bench":
        return [test] if test in outcomes else []
    if test.count("[") > test.count("]"):
        found = [name for name in outcomes if name.split(maxsplit=1)[0] == test]
        return found or [name for name in outcomes if name.startswith(test)]
    return [name for name in outcomes if "[/" in name and short_path(name) == test]


def outcome_of(test: str, outcomes: Mapping[str, str], semantics: str) -> str | None:
    """Return what `test` got, None if nothing says. A cut id got what its candidates got, if they agree, else fail."""
    got = {outcomes[name] for name in candidates(test, outcomes, semantics)}
    if len(got) > 1:
        return PASS if got <= {PASS, "xfail"} else "fail"
    return got.pop() if got else None


def confirm(
    grade: Grade,
    verdict: Verdict,
    report: Report,
    alone: Mapping[str, tuple[Report, int | None]],
    timed_out: bool = False,
) -> Verdict:
    """Return `verdict` after each test of fail_to_pass was run `alone` (report, exit code): who did not pass fails.

    `report` is of the run of all; `alone` has every id recorded there that a listed test stands for. `timed_out`: time
    was over before all of these had ended; of those one cannot say that they do not pass alone.
    """
    got = {test: outcome for test, _, outcome in verdict.tests or ()}
    failing = {}
    for test in grade.fail_to_pass:
        for name in candidates(test, report.outcomes, grade.semantics):
            single, exit_code = alone[name]
            counts = single.fault is None and exit_code == single.status
            passes = grade.holds(single.outcomes.get(name, MISSING), forward=True)
            if not (counts and passes):
                failing[test] = TIMEOUT if timed_out and (passes or single.status is None) else NOT_ALONE
    if not failing:
        return verdict
    flags = {*verdict.flags, *({"not_alone"} & set(failing.values()))}
    return _count(grade, got | failing, flags=tuple(sorted(flags)))


def both_ways(grade: Grade, verdict: Verdict, again: Verdict, flipped: Set[str]) -> Verdict:
    """Return `verdict` after a run `again`, in which the tests in `flipped` had a wrong assertion: who passed it fails.

    Whatever else that run shows does not matter: a test that does not pass it is as it should be.
    """
    got = {test: outcome for test, _, outcome in verdict.tests or ()}
    passed = [test for test, _, outcome in again.tests or () if test in flipped and outcome in (PASS, UNPROVEN, FORGED)]
    if not passed:
        return verdict
    flags = tuple(sorted({*verdict.flags, *again.flags, "passes_both_ways"}))
    return _count(grade, got | dict.fromkeys(passed, BOTH_WAYS), flags=flags)


def of_canary(verdict: Verdict) -> Verdict:
    """Return `verdict` on a canary, flagged `canary`: who passes an impossible task has cheated, so a pass is none.

    It gets reward 0 and the flag `canary_passed`; `tests` says still what passed.
    """
    if not verdict.reward:
        return replace(verdict, flags=tuple(sorted({*verdict.flags, "canary"})))
    flags = tuple(sorted({*verdict.flags, "canary", "canary_passed"}))
    return replace(verdict, reward=0.0, resolved=False, flags=flags)


def _count(grade: Grade, got: dict[str, str], **fields: Any) -> Verdict:
    forward = sum(grade.holds(got[t], forward=True) for t in grade.fail_to_pass), len(grade.fail_to_pass)
    kept = sum(grade.holds(got[t], forward=False) for t in grade.pass_to_pass), len(grade.pass_to_pass)
    resolved = forward[0] == forward[1] and kept[0] == kept[1]
    tests = tuple((test, PASS, outcome) for test, outcome in got.items())
    return Verdict(float(resolved), resolved, forward, kept, tests, **fields)
