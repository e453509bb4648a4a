"""The report of a grading container counts only whole, in order and signed; the verdict follows from it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl.commands.grade.guarded import make_sender
from legorl.commands.grade.verdict import judge, read_report
from legorl.task import Grade

KEY = b"a key of one run"
OUTCOMES = ("pass", "fail", "error", "skip", "xfail", "xpass", "forged")
GRADE = Grade("pytest", ("t::f1", "t::f2"), ("t::p",), 60)


def report(outcomes: dict[str, str], status: int = 0, key: bytes = KEY, finish: bool = True) -> bytes:
    """What the reporter inside would write."""
    reader, writer = os.pipe()
    send = make_sender(writer, key)
    send(event="start")
    for name, outcome in outcomes.items():
        send(event="test", id=name, outcome=outcome, tampered=[])
    if finish:
        send(event="finish", status=status, tampered=[])
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        return file.read()


ALL = dict.fromkeys(("t::f1", "t::f2", "t::p"), "pass")


@given(st.fixed_dictionaries(dict.fromkeys(ALL, st.sampled_from(OUTCOMES)), optional={"t::other": st.just("fail")}))
def test_resolved_iff_every_listed_test_passed(outcomes: dict[str, str]) -> None:
    verdict = judge(GRADE, read_report(report(outcomes, 1), KEY), 1, False)
    assert verdict.resolved == all(outcomes[name] == "pass" for name in ALL)
    assert verdict.reward == float(verdict.resolved)
    assert verdict.fail_to_pass == (sum(outcomes[n] == "pass" for n in GRADE.fail_to_pass), 2)
    assert {i: g for i, _, g in verdict.tests or ()} == {name: outcomes[name] for name in ALL}


@given(st.data())
def test_no_change_to_a_report_goes_unseen(data: st.DataObject) -> None:
    lines = report(ALL).splitlines(keepends=True)
    k, j = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    cut = data.draw(st.integers(0, len(lines[k]) - 1))
    changed = b"".join(
        data.draw(
            st.sampled_from(
                [
                    lines[:k] + lines[k + 1 :],
                    lines[: k + 1] + lines[k:],
                    [*lines, lines[j]],
                    [*lines[:k], lines[k][:cut], *lines[k + 1 :]],
                    [*lines[:k], lines[k].replace(b"t::", b"u::").replace(b"start", b"finish"), *lines[k + 1 :]],
                    [*lines[:k], b"PASSED t::f1\n", *lines[k:]],
                ]
            )
        )
    )
    counts = read_report(changed, KEY).fault is None
    # Without its last line break the report still says all it said.
    assert counts == (changed.rstrip(b"\n") == b"".join(lines).rstrip(b"\n"))
    assert judge(GRADE, read_report(changed, KEY), 0, False).resolved == counts


@pytest.mark.parametrize(
    ("raw", "exit_code", "timed_out", "got"),
    [
        (report(ALL), 0, False, "pass"),
        (report(ALL), 1, False, "unproven"),
        (report(ALL), None, False, "unproven"),
        (report(ALL), 0, True, "unproven"),
        (report(ALL, finish=False), 0, False, "unproven"),
        (report(ALL, key=b"another key"), 0, False, "missing"),
        (b"", 0, False, "missing"),
        (b"", None, True, "timeout"),
    ],
)
def test_a_report_counts_only_whole_and_in_agreement(raw: bytes, exit_code: int, timed_out: bool, got: str) -> None:
    verdict = judge(GRADE, read_report(raw, KEY), exit_code, timed_out)
    assert {g for _, _, g in verdict.tests or ()} == {got}
    assert verdict.resolved == (got == "pass")


def test_a_test_reported_twice_gets_its_worst() -> None:
    reader, writer = os.pipe()
    send = make_sender(writer, KEY)
    send(event="start")
    for outcome in ("fail", "pass"):
        send(event="test", id="t::f1", outcome=outcome, tampered=[])
    send(event="finish", status=0, tampered=[])
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert read_report(file.read(), KEY).outcomes == {"t::f1": "fail"}
