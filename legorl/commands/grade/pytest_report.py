"""Runs inside the grading container: pytest on the hidden tests, with records that only the grader outside can check.

    LEGORL_REPORT_FD=3 LEGORL_REPORT_KEY=... python3 -s -B pytest_report.py '{"root", "config", "own", "runs", ...}'

Each of `runs` is a list of what pytest is given: files, folders or node ids. guarded.py says how records are kept from
being forged. What this module makes hard is changing pytest itself from inside.
"""

# ruff: noqa: B905
import sys

from guarded import guarded, open_tree, take_keys


class Reporter:
    """pytest plugin: one record a test, when its teardown is over."""

    def __init__(self, send) -> None:
        import _pytest.python
        import _pytest.reports
        import _pytest.runner
        import pytest

        self.send = send
        self.phases: dict = {}
        self.raised: set = set()
        # What makes a test's outcome inside pytest. Code under test that replaces one of these is caught at it.
        self.places = [
            (_pytest.reports.TestReport, "from_item_and_call"),
            (_pytest.runner, "call_and_report"),
            (_pytest.runner, "call_runtest_hook"),
            (_pytest.runner.CallInfo, "from_call"),
            (_pytest.python.Function, "runtest"),
            (pytest.Session, "perform_collect"),
        ]
        self.originals = [owner.__dict__.get(name) for owner, name in self.places]  # not every version has them all
        # Marked here: this module is imported where there is no pytest, too.
        pytest.hookimpl(hookwrapper=True, tryfirst=True)(type(self).pytest_runtest_call)

    def tampered(self) -> list:
        pairs = zip(self.places, self.originals)
        return [name for (owner, name), original in pairs if owner.__dict__.get(name) is not original]

    def pytest_runtest_call(self, item):
        result = yield
        if result.excinfo is not None:
            self.raised.add(item.nodeid)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.send(event="uncollected", id=report.nodeid)

    def pytest_collection_finish(self, session) -> None:
        self.send(event="collected", count=len(session.items))

    def pytest_runtest_logreport(self, report) -> None:
        self.phases.setdefault(report.nodeid, {})[report.when] = report
        if report.when == "teardown":
            self.send(event="test", id=report.nodeid, outcome=self.outcome(report.nodeid), tampered=self.tampered())

    def outcome(self, nodeid) -> str:
        phases = self.phases.pop(nodeid)
        setup, call, teardown = phases["setup"], phases.get("call"), phases["teardown"]
        if setup.failed or teardown.failed:
            return "error"
        decisive = call or setup
        if hasattr(decisive, "wasxfail"):
            return "xfail" if decisive.skipped else "xpass"
        if decisive.skipped:
            return "skip"
        if call is None or call.failed:
            return "fail"
        # pytest says passed although the test function raised: somebody rewrote its report.
        return "forged" if nodeid in self.raised else "pass"


def run_pytest(settings, arguments, send):
    """Run pytest on `arguments` in this process; return its exit status."""
    import _pytest.runner
    import pytest

    open_tree(settings)
    _pytest.runner._update_current_test_var = lambda item, when: None  # PYTEST_CURRENT_TEST tells the code who asks
    reporter = Reporter(send)
    options = ["-c", settings["config"], "--rootdir", settings["root"], "-o", "addopts=", "-p", "no:cacheprovider"]
    options += ["--continue-on-collection-errors", "--color=no", "--tb=short", "-q", *arguments]
    sys.argv = ["pytest"]
    status = int(pytest.main(options, plugins=[reporter]))
    send(event="finish", status=status, tampered=reporter.tampered())
    return status


def main():
    keys, report, settings = take_keys()
    import pytest  # noqa: F401  once, for every child

    runs = [lambda send, run=run: run_pytest(settings, run, send) for run in settings["runs"]]
    guarded(keys, report, runs)


if __name__ == "__main__":
    main()
