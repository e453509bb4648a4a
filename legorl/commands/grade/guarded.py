"""Runs inside the grading container, under every runner there: signed records, and runs each in a process of its own.

    keys, report, settings = take_keys()        # at the start of a program: LEGORL_REPORT_KEY, LEGORL_REPORT_FD
    guarded(keys, report, [lambda send: ..., ...])

Every record is one line `MAC {"n": ...}`: numbered, and signed with a key of this one run, so that a record cannot be
made by who does not know the key, nor dropped, repeated or moved by anybody. This process never runs code of the
graded tree: it forks a child for each run and waits for it. A child knows the key of its own run only, and the parent
takes its own key, with which it signs how every child ended, from the pipe after the last child is dead. The code under
test shares its child with the reporter and can, with enough effort, find that run's key in memory: see docs/grading.md.

Standard library only, and nothing of legorl: the container has neither. What runs beside the tests (this, and the
reporters of pytest and unittest) runs in the task's Python, back to 3.6.
"""

# ruff: noqa: PTH100, PTH108, PTH118, PTH120, PTH208
import ctypes
import hashlib
import hmac
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import tempfile
import traceback

KEY_BYTES = 32
_DUMPABLE = 4  # PR_SET_DUMPABLE
# Names of modules that the graded tree may not shadow, beside the standard library's: what pytest itself is made of.
TEST_MODULES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "attr", "attrs", "pygments")


def take_keys():
    """Return (descriptor to read keys from, descriptor of the report, settings: the argument, read as JSON).

    The first start hands the keys on through a pipe to a second: /proc/self/environ would keep them readable.
    """
    if "LEGORL_REPORT_KEY" not in os.environ:
        keys, report = int(sys.argv.pop()), int(sys.argv.pop())
        for descriptor in (keys, report):
            os.set_inheritable(descriptor, False)
        dumpable(False)
        return keys, report, json.loads(sys.argv.pop())
    text = os.environ.pop("LEGORL_REPORT_KEY").encode()
    report = int(os.environ.pop("LEGORL_REPORT_FD"))
    keys = os.memfd_create("keys", 0) if hasattr(os, "memfd_create") else _unnamed_file()
    os.write(keys, text)
    os.lseek(keys, 0, os.SEEK_SET)
    for descriptor in (keys, report):
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, "-s", "-B", *sys.argv, str(report), str(keys)])


def _unnamed_file():
    descriptor, name = tempfile.mkstemp()
    os.unlink(name)
    return descriptor


def dumpable(yes):
    """Let other processes of this user look into this one (its memory, its descriptors), or not."""
    ctypes.CDLL(None).prctl(_DUMPABLE, int(yes), 0, 0, 0)


def make_sender(descriptor, key):
    """Return send(record). Functions are bound here, before code under test could replace them.

    Only this process sends: code under test may fork, and its child then runs the rest of pytest a second time.
    """
    write, dumps, new, digest, pid = os.write, json.dumps, hmac.new, hashlib.sha256, os.getpid
    count, owner = 0, os.getpid()

    def send(**record):
        nonlocal count
        if pid() != owner:
            return
        body = dumps({"n": count, **record}, separators=(",", ":")).encode()
        line = new(key, body, digest).hexdigest()[:32].encode() + b" " + body + b"\n"
        count += 1
        while line:
            line = line[write(descriptor, line) :]

    return send


def guarded(keys, report, runs):
    """Run each of `runs` in a child of its own; what a child leaves alive is killed before the next.

    A run is called with `send` and returns its exit status. The last record, signed by this process, has how each child
    ended (its exit status, or minus the signal). Then this process ends.
    """
    statuses = []
    for run in runs:
        key = os.read(keys, KEY_BYTES)
        child = os.fork()
        if not child:
            _play(keys, report, key, run)
        status = os.waitpid(child, 0)[1]
        statuses.append(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        kill_others()
    make_sender(report, os.read(keys, KEY_BYTES))(event="ended", statuses=statuses)
    os._exit(0)


def kill_others():
    """Kill every process of this user but this one, in a grading container only: elsewhere it would end a session."""
    if not __file__.startswith("/opt/grade/"):
        raise RuntimeError("not in a grading container")
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:  # there is none
        pass


def _play(keys, report, key, run):
    leave = os._exit  # not sys.exit: threads and exit handlers of the code under test have no say in the status
    os.close(keys)
    dumpable(True)
    status = 70
    try:
        send = make_sender(report, key)
        del key
        send(event="start")
        status = run(send)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        leave(status)


def open_tree(settings):
    """Import from the graded tree, in a child: its folders first, but the standard library and pytest are not its."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if p and os.path.abspath(p) != here]
    sys.meta_path.insert(0, TrustedFirst(settings["own"]))
    sys.path[:0] = [os.path.normpath(os.path.join(settings["root"], name)) for name in settings["python_path"]]


def standard_names():
    """Return the names of the standard library's modules and packages."""
    if hasattr(sys, "stdlib_module_names"):  # since Python 3.10
        return set(sys.stdlib_module_names)
    home = os.path.dirname(os.__file__)
    files = [*os.listdir(home), *os.listdir(os.path.join(home, "lib-dynload"))]
    return {name.partition(".")[0] for name in files} | set(sys.builtin_module_names)


class TrustedFirst(importlib.abc.MetaPathFinder):
    """Finds the standard library and pytest where they were at the start, whatever the graded tree calls its modules.

    Names that the task's own repository uses (`own`) are left to the tree.
    """

    def __init__(self, own):
        self.path = [p for p in sys.path if p]
        self.names = (standard_names() | set(TEST_MODULES)) - set(own)

    def find_spec(self, name, path=None, target=None):
        if path is None and name in self.names:
            return importlib.machinery.PathFinder.find_spec(name, self.path)
        return None
