"""Inside the container, as its root with almost no capabilities: do what the host asks, one request at a time.

A message is one line of JSON and then `body` bytes, on stdin and back on stdout. End of input ends the container.
The agent's programs run as another uid and get neither of these two: they can neither speak here nor signal this
process. It has one thread, and it can kill the agent without a fork, so no bomb of the agent's can stop it.
Standard library only.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

sys.dont_write_bytecode = True
import forward  # noqa: E402
import trees  # noqa: E402
from counters import counters  # noqa: E402
from processes import AGENT, FORWARDER, as_agent, fork, slay, spawn  # noqa: E402
from repositories import KEEP, Head, Refused, Repositories  # noqa: E402

REPORT_LIMIT = 8 << 20
DISKS = ("/ws", "/tmp", "/home/agent", "/dev/shm")  # where the agent can write
_FULL = 64 << 10  # bytes left: less than most programs write at a time
_ENVIRONMENT = {
    "HOME": "/home/agent",
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class Wire:
    """The host's end: requests in, replies out."""

    def __init__(self) -> None:
        self.fd = os.dup(0)
        self._out = os.dup(1)
        os.set_inheritable(self.fd, False)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        self._buffer = b""

    def header(self) -> dict[str, Any]:
        """Return the next request. Raises EOFError."""
        while b"\n" not in self._buffer:
            self._buffer += self._read(65536)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def waiting(self) -> bool:
        """Is a request already in the buffer (poll would not tell)?"""
        return bool(self._buffer)

    def body(self, size: int) -> Iterator[bytes]:
        while size:
            chunk = self._buffer[:size] if self._buffer else self._read(min(size, 1 << 16))
            self._buffer = self._buffer[len(chunk) :] if self._buffer else b""
            size -= len(chunk)
            yield chunk

    def _read(self, size: int) -> bytes:
        data = os.read(self.fd, size)
        if not data:
            raise EOFError
        return data

    def reply(self, body: bytes = b"", **fields: Any) -> None:
        header = {**fields, "counters": counters(), "body": len(body)}
        view = memoryview(json.dumps(header).encode() + b"\n" + body)
        while view:
            view = view[os.write(self._out, view) :]


class Forwarder:
    """The model's port, if its socket directory is mounted."""

    def __init__(self) -> None:
        self._ready: int | None = None
        if not os.path.ismount("/run/llm"):
            return
        self._ready, writer = os.pipe()
        fork(lambda: forward.main(writer), FORWARDER, keep=writer)
        os.close(writer)

    def wait(self) -> None:
        """Return once the port listens. Raises RuntimeError if the forwarder ended."""
        if self._ready is None:
            return
        with open(self._ready, "rb") as file:
            if file.read(1) != b"1":
                raise RuntimeError("the forwarder to the model did not start")
        self._ready = None


class Tail:
    """The last `limit` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._limit + (1 << 16):
            del self._data[: -self._limit or None]

    def value(self) -> bytes:
        return bytes(self._data[-self._limit :]) if self._limit else b""


def full_disks() -> list[str]:
    """Return the agent's file systems on which no more room or no more files are to be had."""
    full = []
    for path in DISKS:
        seen = os.statvfs(path)
        if seen.f_bavail * seen.f_frsize < _FULL or (seen.f_files and not seen.f_ffree):
            full.append(path)
    return full


def run(wire: Wire, argv: list[str], env: dict[str, str], cwd: str, log_limit: int, timeout_s: float | None) -> None:
    """Run the agent's command to its end, its time limit or the host's "stop"; then nothing of the agent lives."""
    log_r, log_w = os.pipe()
    report_r, report_w = os.pipe()
    started = time.monotonic()
    log, report = Tail(log_limit), Head(REPORT_LIMIT)
    sinks = {log_r: log, report_r: report}
    fields: dict[str, Any] = {"exit_code": None, "timed_out": False, "stopped": False}
    child: subprocess.Popen[bytes] | None = None
    try:
        environment = {**_ENVIRONMENT, **env, "LEGORL_REPORT_FD": str(report_w)}
        child = spawn(argv, environment, cwd, subprocess.DEVNULL, log_w, log_w, (report_w,))
    except OSError as error:
        log.add(f"cannot run {argv[0]}: {error.strerror}\n".encode())
        fields["exit_code"] = 127
    except subprocess.SubprocessError:  # raised for what `prepare` raised in the child
        log.add(f"cannot enter {cwd}\n".encode())
        fields["exit_code"] = 127
    finally:
        os.close(log_w)
        os.close(report_w)
    try:
        if child is not None:
            _watch(wire, child, sinks, None if timeout_s is None else started + timeout_s, fields)
        fields["wall_s"] = time.monotonic() - started
    finally:
        slay(AGENT)
        if child is not None:
            child.wait()
    for fd, sink in sinks.items():
        while data := os.read(fd, 1 << 16):
            sink.add(data)
        os.close(fd)
    log_bytes, report_bytes = log.value(), report.value()
    fields |= {"log": len(log_bytes), "report_over": report.over, "full_disks": full_disks()}
    wire.reply(log_bytes + report_bytes, ok=True, **fields)


def _watch(wire: Wire, child: subprocess.Popen[bytes], sinks: dict, deadline: float | None, fields: dict) -> None:
    poll = select.poll()
    pidfd = os.pidfd_open(child.pid)
    for fd in (pidfd, wire.fd, *sinks):
        poll.register(fd, select.POLLIN)
    open_sinks = dict(sinks)
    try:
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                fields["timed_out"] = True
                return
            ready = [] if wire.waiting() else poll.poll(None if left is None else left * 1000 + 1)
            for fd, _ in ready:
                if fd in open_sinks:
                    data = os.read(fd, 1 << 16)
                    sinks[fd].add(data)
                    if not data:
                        poll.unregister(fd)
                        del open_sinks[fd]
            if (wire.waiting() or any(fd == wire.fd for fd, _ in ready)) and wire.header()["op"] == "stop":
                fields["stopped"] = True
                return
            if any(fd == pidfd for fd, _ in ready):
                code = child.wait()
                fields["exit_code"] = code if code >= 0 else 128 - code
                return
    finally:
        os.close(pidfd)


def serve(wire: Wire) -> None:
    """Answer requests until the host hangs up."""
    forwarder: Forwarder | None = None
    repositories = Repositories()
    wire.reply(ok=True)
    while True:
        request = wire.header()
        body = wire.body(request.get("body", 0))
        op = request["op"]
        try:
            if op == "start":  # the limits are in place: from here on there may be children
                forwarder = Forwarder()
                wire.reply(ok=True)
            elif op == "put":
                target = request["target"]
                trouble = as_agent(lambda: trees.unpack(sys.stdin.buffer, target), body)  # noqa: B023
                wire.reply(ok=not trouble, error=trouble)
            elif op == "commit":
                wire.reply(ok=True, **repositories.commit(request["repo"]))
            elif op == "diff":
                wire.reply(repositories.diff(request["repo"], request["limit"], request["seconds"]), ok=True)
            elif op == "apply":
                repositories.apply(request["repo"], body)
                wire.reply(ok=True)
            elif op == "run":
                if forwarder is not None:
                    forwarder.wait()
                # fmt: off
                run(wire, request["argv"], request["env"], request["cwd"], request["log_limit"], request["timeout_s"])
                # fmt: on
            elif op != "stop":  # a stop that crossed the end of its run needs no answer
                wire.reply(ok=False, error=f"unknown request {op!r}")
        except Refused as refused:
            wire.reply(ok=False, refused=str(refused), error=str(refused))
        except EOFError:
            raise
        except Exception as error:
            wire.reply(ok=False, error=f"{type(error).__name__}: {error}")
        for _ in body:  # whatever a failed request left unread
            pass


def main() -> NoReturn:
    os.umask(0o022)
    os.chmod(KEEP, 0o700)
    wire = Wire()
    try:
        serve(wire)
    except (EOFError, BrokenPipeError):
        pass
    slay(AGENT)
    os._exit(0)


if __name__ == "__main__":
    main()
