"""Runs inside a sandbox: pytest on a library, once a job, each in a child process that changes one file or none.

    LEGORL_REPORT_FD=3 python3 -s -B synth_inside.py SETTINGS.json

SETTINGS: root, python_path, jobs [{id, path, source (a file with its new content), files, seconds, trace}]. Every job
gives one JSON line on the descriptor: {id, seconds, outcomes {test: pass, fail, ...}, stories {test: [statement,
error]}, uncollected, late, touched {test: [[path, first line of what it ran], ...]}}. pytest is imported once and
forked; the library never is, so that each child sees its own.

It depends on the standard library and pytest only: the container has nothing of legorl.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

STORY = 1500  # characters of an error that are kept


class Watcher:
    """pytest plugin: outcome of each test, what failed first in it, and which functions of the library it ran."""

    def __init__(self, root, trace) -> None:
        self.root, self.trace = root.rstrip("/") + "/", trace
        self.outcomes: dict = {}
        self.stories: dict = {}
        self.touched: dict = {}
        self.uncollected: list = []

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.uncollected.append(report.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        if not self.trace:
            yield
            return
        seen: set = set()

        def profile(frame, event, _argument):
            if event == "call":
                seen.add(frame.f_code)

        sys.setprofile(profile)
        yield
        sys.setprofile(None)
        own = [(c.co_filename, c.co_firstlineno) for c in seen if c.co_filename.startswith(self.root)]
        self.touched[item.nodeid] = sorted((name[len(self.root) :], line) for name, line in own)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        self.note(item.nodeid, report)
        if report.failed and call.excinfo is not None and item.nodeid not in self.stories:
            statement = ""
            for entry in call.excinfo.traceback:
                if str(entry.path) == str(item.path):
                    statement = str(entry.statement)
            words = call.excinfo.exconly(tryshort=False)
            self.stories[item.nodeid] = [statement[:STORY], words[:STORY]]

    def note(self, test, report) -> None:
        before = self.outcomes.get(test)
        if report.failed:
            self.outcomes[test] = "fail" if report.when == "call" else "error"
        elif report.skipped:
            self.outcomes[test] = "xfail" if hasattr(report, "wasxfail") else "skip"
        elif report.when == "call" and before is None:
            self.outcomes[test] = "xpass" if hasattr(report, "wasxfail") else "pass"


def run_child(job, settings, writer) -> None:
    """The job's pytest, in this process, which ends with it."""
    root = settings["root"]
    os.setsid()
    os.chdir(root)
    sys.path[:0] = [str(Path(root, name)) for name in settings["python_path"]]
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    watcher = Watcher(root, job["trace"])
    options = ["--rootdir", root, "-o", "addopts=", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-q"]
    pytest.main([*options, "--tb=no", *job["files"]], plugins=[watcher])
    keys = ("outcomes", "stories", "touched", "uncollected")
    with os.fdopen(writer, "w") as pipe:
        json.dump({key: getattr(watcher, key) for key in keys}, pipe)
    os._exit(0)


def run_job(job, settings) -> dict:
    """Put the job's content in place, fork, wait, put the old content back."""
    file = Path(settings["root"], job["path"]) if job["path"] else None
    before = file.read_bytes() if file else b""
    begun = time.monotonic()
    reader, writer = os.pipe()
    try:
        if file:
            file.write_bytes(Path(job["source"]).read_bytes())
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                run_child(job, settings, writer)
            finally:
                os._exit(1)
        os.close(writer)
        body, late = read_until(reader, begun + job["seconds"])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finally:
        os.close(reader)
        if file:
            file.write_bytes(before)
    found = (
        json.loads(body) if body and not late else {"outcomes": {}, "stories": {}, "touched": {}, "uncollected": [""]}
    )
    return {"id": job["id"], "seconds": time.monotonic() - begun, "late": late, **found}


def read_until(reader, deadline) -> tuple:
    """All that comes from `reader` until its end, and whether the deadline came first."""
    pieces: list = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b"", True
        piece = os.read(reader, 1 << 16)
        if not piece:
            return b"".join(pieces), False
        pieces.append(piece)


def main() -> None:
    report = int(os.environ["LEGORL_REPORT_FD"])
    os.set_inheritable(report, False)
    settings = json.loads(Path(sys.argv[1]).read_text())
    for job in settings["jobs"]:
        line = json.dumps(run_job(job, settings)).encode() + b"\n"
        while line:
            line = line[os.write(report, line) :]


if __name__ == "__main__":
    main()
