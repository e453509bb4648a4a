"""Runs inside a sandbox: pytest on a library, once a job, each in a child process that changes one file or none.

    LEGORL_REPORT_FD=3 python3 -s synth_inside.py SETTINGS.json

SETTINGS: root, python_path, modules (of the standard library, to import beforehand), jobs [{id, path, source (a file
with its new content), stamp, files, only, cpu_s, wall_s, alone}]. Every job gives one JSON line on the
descriptor: {id, cpu_s, wall_s, outcomes {test: pass, fail, ...}, stories {test: [code, error]}, uncollected, late}, and
a job `alone`, which runs each test in a process of its own, {seconds {test: }, ran {test: [index in places]},
places [[path, first line of a function]], modules} besides.

pytest is imported once and forked; the library never is, so that each child sees its own. Most of a short run would be
compiling the tests, so bytecode is kept, outside of the tree. It is looked up by a file's time and size: hence every
changed content has a time of its own, `stamp`. After a job the tree and /tmp are as they were before it.

It depends on the standard library and pytest only: the container has nothing of legorl.
"""

import contextlib
import gc
import importlib
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from synth_quote import quoted

STORY = 1500  # characters of an error that are kept
BYTECODE = "/ws/bytecode"
SCRATCH = Path("/tmp")


class Watcher:
    """pytest plugin: outcome of each test, or of those in `only`, and what failed first in it."""

    def __init__(self, only=()) -> None:
        self.only = set(only)
        self.outcomes: dict = {}
        self.stories: dict = {}
        self.uncollected: list = []

    def pytest_collection_modifyitems(self, items) -> None:
        if self.only:
            items[:] = [item for item in items if item.nodeid in self.only]

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.uncollected.append(report.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        self.note(item.nodeid, report)
        if report.failed and call.excinfo is not None and item.nodeid not in self.stories:
            words = call.excinfo.exconly(tryshort=False)
            self.stories[item.nodeid] = [quoted(item, call.excinfo), words[:STORY]]

    def note(self, test, report) -> None:
        before = self.outcomes.get(test)
        if report.failed:
            self.outcomes[test] = "fail" if report.when == "call" else "error"
        elif report.skipped:
            self.outcomes[test] = "xfail" if hasattr(report, "wasxfail") else "skip"
        elif report.when == "call" and before is None:
            self.outcomes[test] = "xpass" if hasattr(report, "wasxfail") else "pass"

    def found(self) -> dict:
        return {"outcomes": self.outcomes, "stories": self.stories, "uncollected": self.uncollected}


class Alone(Watcher):
    """The same, with each test in a child process, which begins with the same files; and the functions that it runs."""

    def __init__(self, tree, wall_s) -> None:
        super().__init__()
        self.tree, self.root, self.wall_s = tree, tree.root.rstrip("/") + "/", wall_s
        self.seconds: dict = {}
        self.ran: dict = {}
        self.places: dict = {}
        self.modules: set = set()

    def pytest_runtestloop(self, session):
        gc.freeze()
        for item in session.items:
            told, late, _ = in_child(lambda send, item=item: send(self.traced(item)), None, self.wall_s)
            self.tree.restore()
            if late or told is None:
                self.outcomes[item.nodeid] = "error"
                continue
            self.outcomes |= told["outcomes"]
            self.seconds[item.nodeid] = told["seconds"]
            self.ran[item.nodeid] = [self.places.setdefault(tuple(p), len(self.places)) for p in told["ran"]]
            self.modules |= set(told["modules"])
        return True

    def traced(self, item) -> dict:
        seen: set = set()

        def trace(frame, _event, _argument):
            seen.add(frame.f_code)  # and no local trace: called once a call, not once a line

        begun = time.process_time()
        threading.settrace(trace)
        sys.settrace(trace)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        sys.settrace(None)
        threading.settrace(None)
        own = [(c.co_filename, c.co_firstlineno) for c in seen if c.co_filename.startswith(self.root)]
        return {
            "outcomes": self.outcomes,
            "seconds": time.process_time() - begun,
            "ran": sorted((name[len(self.root) :], line) for name, line in own),
            "modules": standard_modules(self.root),
        }

    def found(self) -> dict:
        more = {"seconds": self.seconds, "ran": self.ran, "places": list(self.places), "modules": sorted(self.modules)}
        return super().found() | more


def standard_modules(root) -> list:
    """Names of what has been imported of the standard library."""
    found = [
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] in sys.stdlib_module_names
        and not (getattr(module, "__file__", None) or "").startswith(root)
    ]
    return sorted(found)


def in_child(work, cpu_s, wall_s) -> tuple:
    """Run `work(send)` in a process; return what it sent (None: nothing), whether its time was over, its CPU seconds.

    What was sent counts from the end of its line: something else that the child started may hold the pipe open.
    """
    reader, writer = os.pipe()
    deadline = time.monotonic() + wall_s
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            if cpu_s is not None:
                os.setsid()
                limit = math.ceil(cpu_s)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
            work(lambda data: write_line(writer, data))
        finally:
            os._exit(0)
    os.close(writer)
    body, late = read_line(reader, deadline)
    os.close(reader)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.kill if cpu_s is None else os.killpg)(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    late = late or (not body and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    return (json.loads(body) if body else None), late, usage.ru_utime + usage.ru_stime


def write_line(descriptor, data) -> None:
    line = json.dumps(data).encode() + b"\n"
    while line:
        line = line[os.write(descriptor, line) :]


def read_line(reader, deadline) -> tuple:
    """One line of `reader` ("" if it ended before), and whether the deadline came first."""
    pieces: list = []
    while not (pieces and pieces[-1].endswith(b"\n")):
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b"", True
        piece = os.read(reader, 1 << 16)
        if not piece:
            return b"", False
        pieces.append(piece)
    return b"".join(pieces), False


def run_pytest(job, settings, tree, send) -> None:
    """The job's pytest, in this process."""
    root = settings["root"]
    os.chdir(root)
    sys.path[:0] = [str(Path(root, name)) for name in settings["python_path"]]
    sys.dont_write_bytecode, sys.pycache_prefix = False, BYTECODE
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    watcher = Alone(tree, job["wall_s"]) if job["alone"] else Watcher(job["only"])
    options = ["--rootdir", root, "-o", "addopts=", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-q"]
    options += ["--maxfail=1"] if job["only"] else []
    ended = pytest.main([*options, "--tb=no", *job["files"]], plugins=[watcher])
    if ended in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        watcher.uncollected.append("")  # tests without an outcome are tests that it did not come to
    send(watcher.found())


def run_job(job, settings, tree) -> dict:
    """Put the job's content in place, run, put everything back."""
    begun = time.monotonic()
    if job["path"]:
        tree.put(job["path"], Path(job["source"]).read_bytes(), job["stamp"])
    wall_s = job["wall_s"] * (1000 if job["alone"] else 1)  # alone: a limit of each test
    told, late, cpu_s = in_child(lambda send: run_pytest(job, settings, tree, send), job["cpu_s"], wall_s)
    tree.restore()
    spent = {"id": job["id"], "cpu_s": cpu_s, "wall_s": time.monotonic() - begun, "late": late}
    return spent | (told or {"outcomes": {}, "stories": {}, "uncollected": [""]})


class Tree:
    """The files below `root` and the names in SCRATCH, to be restored."""

    def __init__(self, root) -> None:
        self.root = root
        self.files = {path: (path.read_bytes(), path.stat()) for path in self.paths() if path.is_file()}
        self.names = set(self.paths())
        self.scratch = set(SCRATCH.iterdir())

    def paths(self) -> list:
        return [Path(folder, name) for folder, folders, names in os.walk(self.root) for name in (*folders, *names)]

    def put(self, path, body, stamp) -> None:
        file = Path(self.root, path)
        file.write_bytes(body)
        os.utime(file, (stamp, stamp))

    def restore(self) -> None:
        for path in [*self.paths(), *SCRATCH.iterdir()]:
            if path not in self.names and path not in self.scratch:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        for path, (body, stat) in self.files.items():
            now = path.stat() if path.exists() else None
            if now is None or (now.st_mtime_ns, now.st_size) != (stat.st_mtime_ns, stat.st_size):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(body)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def main() -> None:
    report = int(os.environ["LEGORL_REPORT_FD"])
    os.set_inheritable(report, False)
    settings = json.loads(Path(sys.argv[1]).read_text())
    for name in settings["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    tree = Tree(settings["root"])
    gc.freeze()
    for job in settings["jobs"]:
        write_line(report, run_job(job, settings, tree))


if __name__ == "__main__":
    main()
