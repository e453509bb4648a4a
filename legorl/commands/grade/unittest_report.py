"""Runs inside the grading container: unittest on the hidden tests, with records that only the grader outside can check.

    LEGORL_REPORT_FD=3 LEGORL_REPORT_KEY=... python3 -s -B unittest_report.py '{"root", "own", "runs", ...}'

Each of `runs` is a list of test files, folders to discover tests in, and ids (`package.module.Class.test`).
guarded.py says how records are kept from being forged. A test's record is sent when the test is over, cleanup included.
"""

# ruff: noqa: B905
import sys
import unittest
from pathlib import Path

from guarded import guarded, open_tree, take_keys


class Result(unittest.TestResult):
    """Sends one record a test; a test with failing subtests has failed."""

    def __init__(self, send) -> None:
        super().__init__()
        self.send = send
        self.outcome = "pass"
        self.raised = False
        # What makes a test's outcome inside unittest. Code under test that replaces one of these is caught at it.
        self.places = [
            *((Result, name) for name in ("addSuccess", "addError", "addFailure", "stopTest", "settle")),
            (unittest.TestCase, "run"),
            (unittest.TestCase, "_callTestMethod"),
            (unittest.case._Outcome, "testPartExecutor"),  # type: ignore[attr-defined]
            (unittest.TestSuite, "run"),
        ]
        self.originals = [owner.__dict__.get(name) for owner, name in self.places]  # not every version has them all

    def tampered(self) -> list:
        pairs = zip(self.places, self.originals)
        return [name for (owner, name), original in pairs if owner.__dict__.get(name) is not original]

    def startTest(self, test) -> None:
        super().startTest(test)
        self.outcome = "missing"

    def settle(self, outcome) -> None:
        # A test that failed somewhere (a subtest, a cleanup) stays so.
        if self.outcome in ("missing", "pass"):
            self.outcome = outcome

    def addSuccess(self, test) -> None:
        self.settle("pass")

    def addError(self, test, err) -> None:
        super().addError(test, err)
        if isinstance(test, unittest.TestCase):
            self.settle("error")
        else:
            self.send(event="uncollected", id=str(test))

    def addFailure(self, test, err) -> None:
        super().addFailure(test, err)
        self.settle("fail")

    def addSkip(self, test, reason) -> None:
        super().addSkip(test, reason)
        if isinstance(test, unittest.TestCase):
            self.settle("skip")

    def addExpectedFailure(self, test, err) -> None:
        super().addExpectedFailure(test, err)
        self.settle("xfail")

    def addUnexpectedSuccess(self, test) -> None:
        super().addUnexpectedSuccess(test)
        self.settle("xpass")

    def addSubTest(self, test, subtest, err) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.settle("fail")

    def stopTest(self, test) -> None:
        super().stopTest(test)
        self.send(event="test", id=test.id(), outcome=self.outcome, tampered=self.tampered())


def load(root: Path, arguments) -> unittest.TestSuite:
    """The tests of files, folders and ids; what cannot be imported is a test that fails, as unittest has it."""
    loader = unittest.TestLoader()
    suite = unittest.TestSuite()
    for name in arguments:
        path = root / name
        if path.is_dir():
            suite.addTests(loader.discover(str(path), top_level_dir=str(root)))
        elif path.is_file():
            suite.addTests(loader.loadTestsFromName(".".join(Path(name).with_suffix("").parts)))
        else:
            suite.addTests(loader.loadTestsFromName(name))
    return suite


def run_unittest(settings, arguments, send) -> int:
    """Run the tests that `arguments` name; return 0 if all passed, else 1."""
    open_tree(settings)
    sys.argv = ["unittest"]
    result = Result(send)
    load(Path(settings["root"]), arguments).run(result)
    status = 0 if result.wasSuccessful() else 1
    send(event="finish", status=status, tampered=result.tampered())
    return status


def main() -> None:
    keys, report, settings = take_keys()
    guarded(keys, report, [lambda send, run=run: run_unittest(settings, run, send) for run in settings["runs"]])


if __name__ == "__main__":
    main()
