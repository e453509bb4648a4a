"""Inside the container, as the agent's user: try to break each limit and say how far it went.

    python3 /lego/bombs.py memory BYTES | processes COUNT | disk FOLDER BYTES | cpu SECONDS | walls

One line of JSON on stdout. Used by the probe; the verdict is the host's, which also reads its own counters.
"""

import errno
import json
import os
import signal
import socket
import sys
import time
from typing import Any


def memory(size: int) -> dict[str, Any]:
    """Touch `size` bytes; a limit kills this process before it can report."""
    block = bytearray(size)
    for offset in range(0, size, 4096):
        block[offset] = 1
    return {"bytes": size}


def processes(count: int) -> dict[str, Any]:
    """Start `count` sleeping children; report how many came to life."""
    children: list[int] = []
    try:
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.append(pid)
    except BlockingIOError:
        pass
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    return {"started": len(children)}


def disk(folder: str, size: int) -> dict[str, Any]:
    """Write up to `size` bytes into a file of `folder`, then delete it."""
    path = os.path.join(folder, "fill")
    written, error = 0, 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while written < size:
            written += os.write(fd, b"\1" * (1 << 20))
    except OSError as refusal:
        error = refusal.errno or 0
    finally:
        os.close(fd)
        os.unlink(path)
    return {"bytes": written, "errno": errno.errorcode.get(error, "")}


def cpu(seconds: float) -> dict[str, Any]:
    """Keep two processes busy for `seconds`; report the CPU seconds they got."""
    end = time.monotonic() + seconds
    child = os.fork()
    while time.monotonic() < end:
        pass
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    times = os.times()
    return {"cpu_s": times.user + times.system + times.children_user + times.children_system}


def walls() -> dict[str, Any]:
    """Report what this process may do and see."""
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)

    def refused(family: int) -> str:
        try:
            socket.socket(family, socket.SOCK_STREAM).close()
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error.errno))
        return ""

    writable = []
    for folder in ("/", "/usr", "/etc", "/lego", "/run", "/opt", "/var/tmp"):
        try:
            os.close(os.open(f"{folder}/probe", os.O_WRONLY | os.O_CREAT))
            writable.append(folder)
        except OSError:
            pass
    return {
        "interfaces": [name for _, name in socket.if_nameindex()],
        "vsock": refused(socket.AF_VSOCK),
        "packet": refused(socket.AF_PACKET),
        "writable": writable,
        "capabilities": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")],
        "no_new_privs": status["NoNewPrivs"],
        "seccomp": status["Seccomp"],
        "uids": status["Uid"].split(),
    }


def main(name: str, *arguments: str) -> None:
    bombs = {
        "memory": lambda: memory(int(arguments[0])),
        "processes": lambda: processes(int(arguments[0])),
        "disk": lambda: disk(arguments[0], int(arguments[1])),
        "cpu": lambda: cpu(float(arguments[0])),
        "walls": walls,
    }
    print(json.dumps(bombs[name]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
