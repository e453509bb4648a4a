"""The report of a grading container counts only whole, in order and signed; the verdict follows from it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl.commands.grade.guarded import make_sender
from legorl.commands.grade.suspicions import suspicions
from legorl.commands.grade.verdict import Report, confirm, judge, outcome_of, read_report, read_runs
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
    status = int(not {"pass", "skip", "xfail"} >= set(outcomes.values()))
    verdict = judge(GRADE, read_report(report(outcomes, status), KEY), status, False)
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


def test_failures_that_have_no_name_are_a_sign_of_tampering() -> None:
    verdict = judge(GRADE, read_report(report(ALL, 1), KEY), 1, False)
    assert (verdict.resolved, verdict.flags) == (False, ("tampered",))


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


KEYS = [f"{k:032}".encode() for k in range(3)]


def runs(*reports: bytes, statuses: list[int], key: bytes = KEYS[2]) -> bytes:
    """What one program writes of several runs, and last of how they ended."""
    reader, writer = os.pipe()
    make_sender(writer, key)(event="ended", statuses=statuses)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        return b"".join(reports) + file.read()


def test_each_run_has_its_report_and_its_end() -> None:
    raw = runs(report(ALL, key=KEYS[0]), report({"t::f1": "fail"}, 1, key=KEYS[1]), statuses=[0, 1])
    (first, second), ends = read_runs(raw, KEYS)
    assert (first.outcomes, first.fault, second.outcomes, second.fault) == (ALL, None, {"t::f1": "fail"}, None)
    assert ends == [0, 1]


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_byte_changed_anywhere_costs_the_run_or_its_end(place: int, byte: int) -> None:
    raw = runs(report(ALL, key=KEYS[0]), statuses=[0], key=KEYS[1])
    changed = bytearray(raw)
    changed[place % (len(raw) - 1)] = byte
    (one,), ends = read_runs(bytes(changed), KEYS[:2])
    assert (one.fault is None and ends == [0]) == (bytes(changed) == raw)


def test_a_run_cannot_speak_for_the_next_or_for_its_end() -> None:
    forged = report({"t::f1": "pass"}, key=KEYS[0])
    own_end = runs(statuses=[0, 0], key=KEYS[0])
    (first, second), ends = read_runs(report(ALL, key=KEYS[0]) + forged + own_end, KEYS)
    assert first.fault
    assert second.fault == "no report"
    assert ends == [None, None]
    assert read_runs(b"", KEYS)[1] == [None, None]


SWE = Grade("pytest", ("t.py::a[x", "t.py::b"), ("t.py::c[/z]", "t.py::d"), 60, semantics="swe-bench")


@pytest.mark.parametrize(
    ("outcomes", "got"),
    [
        ({"t.py::a[x y]": "pass", "t.py::a[x z]": "pass"}, "pass"),
        ({"t.py::a[x y]": "pass", "t.py::a[x z]": "xfail"}, "pass"),
        ({"t.py::a[x y]": "pass", "t.py::a[x z]": "fail"}, "fail"),
        ({"t.py::a[xy z]": "pass"}, "pass"),
        ({"t.py::a[x y]": "pass", "t.py::a[xy]": "fail"}, "pass"),  # the second was not cut at white space
        ({"t.py::b[x]": "pass"}, None),
        ({}, None),
    ],
)
def test_cut_ids_stand_for_tests_that_agree(outcomes: dict[str, str], got: str | None) -> None:
    assert outcome_of("t.py::a[x", outcomes, "swe-bench") == got
    assert outcome_of("t.py::a[x", outcomes, "strict") is None


def test_what_swe_bench_counts_as_kept() -> None:
    def resolved(**changes: str) -> bool:
        base = {"t.py::a[x y]": "pass", "t.py::b": "pass", "t.py::c[/y/z]": "pass", "t.py::d": "pass"}
        outcomes = base | {f"t.py::{name}": outcome for name, outcome in changes.items()}
        return bool(judge(SWE, Report(outcomes, 0, None), 0, False).resolved)

    assert resolved()
    assert resolved(d="skip", b="xfail")
    assert not resolved(b="skip")
    assert not resolved(d="fail")
    assert not resolved(**{"c[/y/z]": "error"})


def test_a_test_that_fails_alone_does_not_count() -> None:
    whole = Report(ALL, 0, None)
    verdict = judge(GRADE, whole, 0, False)
    good, bad = Report({"t::f1": "pass"}, 0, None), Report({"t::f2": "fail"}, 1, None)
    assert (
        confirm(GRADE, verdict, whole, {"t::f1": (good, 0), "t::f2": (Report({"t::f2": "pass"}, 0, None), 0)})
        == verdict
    )
    for single, end in ((bad, 1), (Report({"t::f2": "pass"}, 0, None), 1), (Report({}, None, "no report"), None)):
        failing = confirm(GRADE, verdict, whole, {"t::f1": (good, 0), "t::f2": (single, end)})
        assert (failing.reward, failing.flags) == (0.0, ("not_alone",))
        assert {t: g for t, _, g in failing.tests or ()}["t::f2"] == "not_alone"


def test_time_over_in_the_runs_alone_says_nothing_of_who_did_not_come_to_run() -> None:
    whole = Report(ALL, 0, None)
    verdict = judge(GRADE, whole, 0, False)
    # How the runs ended is said at the very end, which did not come: f1 had passed, f2 had not begun.
    alone = {"t::f1": (Report({"t::f1": "pass"}, 0, None), None), "t::f2": (Report({}, None, "no report"), None)}
    late = confirm(GRADE, verdict, whole, alone, timed_out=True)
    assert (late.reward, late.flags) == (0.0, ())
    assert {t: g for t, _, g in late.tests or ()} == {"t::f1": "timeout", "t::f2": "timeout", "t::p": "pass"}
    alone["t::f1"] = (Report({"t::f1": "fail"}, 1, None), None)
    assert confirm(GRADE, verdict, whole, alone, timed_out=True).flags == ("not_alone",)
    many = Grade("pytest", tuple(f"t::f{n}" for n in range(890)), (), 300)
    assert (many.alone_s, GRADE.alone_s) == (4450, 60)


@pytest.mark.parametrize(
    ("file", "line", "flags"),
    [
        ("a.py", "    def __eq__(self, other): return True", {"always_equal"}),
        ("a.py", "frame = sys._getframe(1)", {"inspects_frames"}),
        ("a.py", 'if "pytest" in sys.modules:', {"reads_test_state"}),
        ("a.py", "builtins.open = mine", {"patches_builtins"}),
        ("a.py", "    def __eq__(self, other): return self.x == other.x", set()),
        ("a.py", "started = time.time()", set()),
        ("a.md", "frame = sys._getframe(1)", set()),
        ("a.py", "import os, _pytest.runner", {"test_tools"}),
        ("tests/test_a.py", "import pytest", set()),
        ("a.py", "sys.exit(0)", {"exits_hard"}),
        ("a.py", "    sys.exit(0)", set()),
        ("a.py", "raise SystemExit", {"exits_hard"}),
        ("a.py", "raise SystemExit(1)", set()),
        ("logs/reward.txt", "1", {"plants_reward"}),
        ("../a.md", "x", {"leaves_tree"}),
        ("a/.GIT/config", "x", {"leaves_tree"}),
        (".gitattributes", "* filter=x", {"git_attributes"}),
        (".gitattributes", "* text=auto", set()),
        ("x.egg-info/entry_points.txt", "[pytest11]", {"loads_plugin"}),
    ],
)
def test_suspicions_are_of_added_python(file: str, line: str, flags: set[str]) -> None:
    head = f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n@@ -1,2 +1,2 @@\n"
    assert suspicions(f"{head} kept\n-old\n+{line}\n".encode()) == flags
    by_name = {"plants_reward", "leaves_tree"}
    assert suspicions(f"{head} kept\n-{line}\n+new\n".encode()) == flags & by_name


@pytest.mark.parametrize(
    ("path", "target", "flags"),
    [("a", "/etc", {"leaves_tree"}), ("a/b", "../../x", {"leaves_tree"}), ("a/b", "../x", set()), ("a", "b", set())],
)
def test_links_out_of_the_tree_are_seen(path: str, target: str, flags: set[str]) -> None:
    patch = (
        f"diff --git a/{path} b/{path}\nnew file mode 120000\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{target}\n"
    )
    assert suspicions(patch.encode()) == flags
