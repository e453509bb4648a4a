"""Inside the container: start processes as another uid, and kill every process of a uid. Standard library only."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable

AGENT = 1000
FORWARDER = 1002
MESSAGE_LIMIT = 4096  # bytes of an error message that are passed on
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_DUMPABLE = 4


def become(uid: int) -> None:
    """Give up everything but `uid`; be the first to be killed when memory ends."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(0o022)


def fork(work: Callable[[], None], uid: int, stdin: int | None = None, err: int | None = None, keep: int = -1) -> int:
    """Run `work` as `uid` in a child; of our descriptors above 2 it has only `keep`. Return its pid.

    Returns once the child has that uid: until then it is root, and `slay` would kill it with the agent.
    """
    became_r, became_w = os.pipe()
    pid = os.fork()
    if pid:
        os.close(became_w)
        os.read(became_r, 1)
        os.close(became_r)
        return pid
    code = 1
    try:
        os.setsid()
        if stdin is not None:
            os.dup2(stdin, 0)
        if err is not None:
            os.dup2(err, 2)
        first = 3
        for kept in sorted({keep, became_w} - {-1}):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, 1 << 16)
        become(uid)
        os.close(became_w)
        work()
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")[:MESSAGE_LIMIT])
    finally:
        os._exit(code)


def as_agent(work: Callable[[], None], feed: Iterable[bytes] = ()) -> str:
    """Run `work` as the agent's user with `feed` as its stdin; return "" or what went wrong.

    `feed` is always read to its end, so that the wire stays in step.
    """
    stdin_r, stdin_w = os.pipe()
    err_r, err_w = os.pipe()
    try:
        pid = fork(work, AGENT, stdin_r, err_w)
    finally:
        os.close(stdin_r)
        os.close(err_w)
    for chunk in feed:
        with contextlib.suppress(BrokenPipeError):
            view = memoryview(chunk)
            while view:
                view = view[os.write(stdin_w, view) :]
    os.close(stdin_w)
    with open(err_r, "rb") as file:
        message = file.read(MESSAGE_LIMIT).decode("utf-8", "backslashreplace")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}"
    return "" if status == 0 else message or "failed"


def alive(uid: int) -> bool:
    """Is there a process of `uid`? Zombies count until init has reaped them; our own children are ours to reap."""
    ours = f"\nPPid:\t{os.getpid()}\n"
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/status") as file:
                text = file.read()
        except OSError:
            continue
        if f"\nUid:\t{uid}\t" in text and not ("\nState:\tZ" in text and ours in text):
            return True
    return False


def slay(uid: int) -> None:
    """Kill every process of `uid`, however detached, without a fork.

    kill(-1) reaches whatever the caller may signal: with the effective uid of the agent, and root only as real uid,
    that is the agent's processes; the caller itself and PID 1 are exempt by definition.
    """
    while True:
        os.setresuid(0, uid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        os.setresuid(0, 0, 0)
        _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # the change of uid took our own /proc/self/oom_score_adj from us
        if not alive(uid):
            return
        time.sleep(0.005)


def spawn(argv: list[str], env: dict[str, str], cwd: str, stdin: int, out: int, err: int, keep: tuple[int, ...] = ()):
    """Start a program as the agent's user."""

    def prepare() -> None:
        become(AGENT)
        os.chdir(cwd)

    return subprocess.Popen(
        argv, env=env, stdin=stdin, stdout=out, stderr=err, pass_fds=keep, start_new_session=True, preexec_fn=prepare
    )
