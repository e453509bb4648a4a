"""Runs inside the grading container: pytest on the hidden tests, with records that only the grader outside can check.

    LEGORL_REPORT_FD=3 LEGORL_REPORT_KEY=... python3 -s -B pytest_report.py '{"root", "config", "own"}'

Every record is one line on a private descriptor, `MAC {"n": ...}`: numbered, and signed with a key of this one run, so
that a record cannot be made by who does not know the key, nor dropped, repeated or moved by anybody. The code under
test runs in this same process and can, with enough effort, find the key in memory: see docs/grading.md. What this
module makes hard is everything cheaper than that.

It depends on the standard library and pytest only, and on nothing of legorl: the container has neither.
"""

import hashlib
import hmac
import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path

# Names of modules that the graded tree may not shadow, beside the standard library's: what pytest itself is made of.
TEST_MODULES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "attr", "attrs", "pygments")


def start_again_without_key() -> None:
    """Hand the key on through a pipe to a new start of this program: /proc/self/environ would keep it readable."""
    key = os.environ.pop("LEGORL_REPORT_KEY").encode()
    report = int(os.environ.pop("LEGORL_REPORT_FD"))
    reader, writer = os.pipe()
    os.write(writer, key)
    os.close(writer)
    for descriptor in (reader, report):
        os.set_inheritable(descriptor, True)
    argv = [sys.executable, "-s", "-B", __file__, sys.argv[1], str(reader), str(report)]
    os.execv(sys.executable, argv)


def make_sender(descriptor: int, key: bytes):
    """Return send(record). Functions are bound here, before code under test could replace them.

    Only this process sends: code under test may fork, and its child then runs the rest of pytest a second time.
    """
    write, dumps, new, digest, pid = os.write, json.dumps, hmac.new, hashlib.sha256, os.getpid
    count, owner = 0, os.getpid()

    def send(**record) -> None:
        nonlocal count
        if pid() != owner:
            return
        body = dumps({"n": count, **record}, separators=(",", ":")).encode()
        line = new(key, body, digest).hexdigest()[:32].encode() + b" " + body + b"\n"
        count += 1
        while line:
            line = line[write(descriptor, line) :]

    return send


class TrustedFirst(importlib.abc.MetaPathFinder):
    """Finds the standard library and pytest where they were at the start, whatever the graded tree calls its modules.

    Names that the task's own repository uses (`own`) are left to the tree.
    """

    def __init__(self, own) -> None:
        self.path = [p for p in sys.path if p]
        self.names = (set(sys.stdlib_module_names) | set(TEST_MODULES)) - set(own)

    def find_spec(self, name, path=None, target=None):
        if path is None and name in self.names:
            return importlib.machinery.PathFinder.find_spec(name, self.path)
        return None


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
        self.originals = [owner.__dict__[name] for owner, name in self.places]
        # Marked here, because importing pytest at the top would be done twice: the first start only hands on the key.
        pytest.hookimpl(hookwrapper=True, tryfirst=True)(type(self).pytest_runtest_call)

    def tampered(self) -> list:
        pairs = zip(self.places, self.originals, strict=True)
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


def main() -> None:
    if "LEGORL_REPORT_KEY" in os.environ:
        start_again_without_key()
    leave = os._exit
    settings, reader, descriptor = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    key = os.read(reader, 256)
    os.close(reader)
    os.set_inheritable(descriptor, False)
    send = make_sender(descriptor, key)
    del key
    sys.path[:] = [p for p in sys.path if Path(p) != Path(__file__).parent]
    import pytest

    sys.meta_path.insert(0, TrustedFirst(settings["own"]))
    root = settings["root"]
    sys.path.insert(0, root)
    reporter = Reporter(send)
    options = ["-c", settings["config"], "--rootdir", root, "-o", "addopts=", "-p", "no:cacheprovider"]
    options += ["--continue-on-collection-errors", "--color=no", "--tb=short", "-q", "tests"]
    sys.argv = ["pytest"]
    send(event="start")
    status = int(pytest.main(options, plugins=[reporter]))
    send(event="finish", status=status, tampered=reporter.tampered())
    sys.stdout.flush()
    sys.stderr.flush()
    leave(status)  # not sys.exit: threads and exit handlers of the code under test have no say in the status


if __name__ == "__main__":
    main()
