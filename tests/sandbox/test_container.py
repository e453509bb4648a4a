"""What a command in a sandbox can see, do and outlive; how it ends."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.boxes import SMALL, Boxes, sh, tar

from legorl import paths
from legorl.sandbox import (
    ImageMissing,
    PodmanMissing,
    Sandbox,
    SandboxError,
    SandboxLost,
    Spec,
    ensure_ready,
    open_sandbox,
)

pytestmark = pytest.mark.podman

# int 0x80 from 64-bit code: socketcall(socket, {AF_VSOCK, SOCK_STREAM, 0}), whose arguments no filter can read.
_INT80 = """
import ctypes, mmap, struct
page = mmap.mmap(-1, 4096, prot=7, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
page[1024:1036] = struct.pack("<III", 40, 1, 0)
load = b"\\xb8" + struct.pack("<I", 102) + b"\\xbb" + struct.pack("<I", 1) + b"\\xb9" + struct.pack("<I", at + 1024)
code = b"\\x53" + load + b"\\xcd\\x80\\x5b\\xc3"
page[: len(code)] = code
print("made it", ctypes.CFUNCTYPE(ctypes.c_int)(at)())
"""

_DAEMONS = """
setsid sleep 1000 &
python3 -c '
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp("sleep", "sleep", "1000")
'"""


def test_the_agent_has_no_privileges(box: Sandbox, do):
    status = do(sh(box, "cat /proc/self/status")).log.decode()
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert f"{name}:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Uid:\t1000\t1000\t1000\t1000" in status
    assert "Groups:\t \n" in status


def test_only_loopback_and_no_name_but_localhost(box: Sandbox, do):
    result = do(sh(box, "ls /sys/class/net; getent hosts localhost | tr -s ' '; cat /etc/resolv.conf"))
    assert result.log == b"lo\n127.0.0.1 localhost\n"


def test_no_socket_beyond_the_container_by_any_entrance(box: Sandbox, do):
    script = "python3 -c 'import socket; socket.socket(socket.AF_VSOCK)' 2>&1 | tail -1; unshare -Ur true"
    log = do(sh(box, script)).log.decode()
    assert "Function not implemented" in log
    assert "unshare" in log
    if os.uname().machine == "x86_64":
        result = do(box.run(["python3", "-c", _INT80]))
        assert (result.exit_code, result.log) == (128 + 31, b"")  # SIGSYS


def test_nothing_of_the_host_is_visible(box: Sandbox, do):
    script = """
    ls /root /run/keep
    cat /proc/2/environ /proc/1/mem
    ps -eo pid,user,args --no-headers
    """
    lines = do(sh(box, script)).log.decode().splitlines()
    assert do(sh(box, "ls /sys/fs/cgroup")).log == b""
    for path in ("/root", "/run/keep", "/proc/2/environ", "/proc/1/mem"):
        assert any(path in line and "Permission denied" in line for line in lines)
    users = {line.split()[1] for line in lines if line.split()[:1] and line.split()[0].isdigit()}
    assert users == {"root", "agent"}
    everything = do(sh(box, "find / -xdev -name '*.py' -path '*legorl*' 2>/dev/null; env")).log.decode()
    assert "legorl" not in everything.replace("LEGORL_REPORT_FD", "")


def test_the_supervisor_cannot_be_signalled_or_spoken_to(box: Sandbox, do):
    log = do(sh(box, "kill -9 2; kill -TERM 1; ls /proc/2/fd; kill -9 -1")).log.decode()
    assert log.count("Operation not permitted") >= 2
    assert do(sh(box, "echo alive")).log == b"alive\n"


def test_everything_but_tmpfs_is_read_only(box: Sandbox, do):
    script = "for d in / /usr /etc /lego /run /opt /var/tmp /sys/fs/cgroup; do touch $d/x 2>/dev/null && echo $d; done"
    assert do(sh(box, script)).log == b""
    assert do(sh(box, "for d in /ws /tmp /home/agent /dev/shm; do touch $d/x && rm $d/x; done")).exit_code == 0


def test_exit_codes_log_tail_and_report(box: Sandbox, do):
    result = do(sh(box, "echo out; echo err >&2; echo private >&$LEGORL_REPORT_FD; exit 7"))
    assert (result.exit_code, result.log, result.report) == (7, b"out\nerr\n", b"private\n")
    assert do(sh(box, "kill -SEGV $$")).exit_code == 128 + 11
    result = do(sh(box, "seq 100000", log_limit=12))
    assert result.log == b"99999\n100000\n"[-12:]
    result = do(sh(box, "head -c 9000000 /dev/zero >&$LEGORL_REPORT_FD"))
    assert len(result.report) == 8 << 20
    result = do(box.run(["no-such-program"]))
    assert result.exit_code == 127 and b"no-such-program" in result.log
    result = do(box.run(["true"], cwd="/no/such/folder"))
    assert result.exit_code == 127 and b"/no/such/folder" in result.log


def test_environment_is_clean_but_for_what_is_given(box: Sandbox, do):
    result = do(box.run(["env"], env={"GIVEN": "é"}))
    names = {line.split(b"=")[0] for line in result.log.splitlines()}
    assert names == set(
        b"HOME USER LOGNAME SHELL PATH LANG TERM TMPDIR PYTHONDONTWRITEBYTECODE LEGORL_REPORT_FD GIVEN".split()
    )
    assert "GIVEN=é\n".encode() in result.log


def test_time_limit_and_stop_kill_every_descendant(box: Sandbox, do):
    result = do(sh(box, f"{_DAEMONS}; trap '' TERM INT; sleep 1000", timeout_s=1.0))
    assert (result.timed_out, result.stopped, result.exit_code) == (True, False, None)

    async def stop_when_started() -> None:
        until = asyncio.Event()
        running = asyncio.ensure_future(sh(box, "touch /ws/started; sleep 1000", until=until))
        until.set()
        result = await running
        assert (result.timed_out, result.stopped, result.exit_code) == (False, True, None)

    do(stop_when_started())
    do(sh(box, _DAEMONS))  # ends by itself, its daemons with it
    assert do(sh(box, "rm -f /ws/started; pgrep -c sleep")).log == b"0\n"


def test_put_replaces_what_is_in_the_way_and_follows_no_link(box: Sandbox, do):
    do(sh(box, "mkdir -p put/folder; ln -s /tmp put/link; echo old >/tmp/victim; ln -s /tmp/victim put/file"))
    do(
        box.put(
            tar({"link/victim": b"new", "file": b"new", "folder": b"new", "run": (b"#!/bin/sh\n", 0o755)}), "/ws/put"
        )
    )
    log = do(sh(box, "cat /tmp/victim put/link/victim put/file put/folder; stat -c '%a %U' put/run; rm -r put")).log
    assert log == b"old\nnewnewnew755 agent\n"
    with pytest.raises(SandboxError, match="outside"):
        do(box.put(tar({"../x": b""}), "/ws/put"))
    with pytest.raises(SandboxError, match="put"):
        do(box.put(b"no tar at all" * 100, "/ws/put"))
    assert do(sh(box, "rm -rf put; echo in step")).log == b"in step\n"


class Echo(threading.Thread):
    """A Unix socket server that answers every line with the line, in capitals, and closes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(folder / "llm.sock"))
        (folder / "llm.sock").chmod(0o666)
        self.socket.listen(64)

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                connection.sendall(lines.readline().upper())


@pytest.fixture(scope="module")
def llm_dir() -> Iterator[Path]:
    folder = paths.mounts_dir() / f"test-{os.getpid()}"
    folder.mkdir(mode=0o711)
    server = Echo(folder)
    server.start()
    yield folder
    server.socket.close()
    (folder / "llm.sock").unlink()
    folder.rmdir()


def test_the_forwarder_leads_to_the_socket_and_mounts_are_read_only(boxes: Boxes, do, llm_dir: Path, tmp_path: Path):
    mounted = paths.mounts_dir() / f"test-mount-{os.getpid()}"
    mounted.mkdir(mode=0o755)
    try:
        (mounted / "tool").write_text("a tool")
        box = boxes.open(llm_dir=llm_dir, mounts=((mounted, "/opt/h"),), cpus_allowed=(0,))
        script = "exec 3<>/dev/tcp/127.0.0.1/8400; echo hello >&3; cat <&3; cat /opt/h/tool"
        assert do(sh(box, script)).log == b"HELLO\na tool"
        assert do(sh(box, "echo x >/opt/h/tool")).exit_code == 1
        assert do(sh(box, "rm /run/llm/llm.sock")).exit_code == 1
        assert do(sh(box, "nproc")).log == b"1\n"
        # The forwarder belongs to another user: the agent cannot stop it, and its own death is not the forwarder's.
        assert do(sh(box, "pkill -9 -f supervisor; kill -9 -1; true", timeout_s=20)).exit_code is not None
        assert do(sh(box, script)).log == b"HELLO\na tool"
    finally:
        (mounted / "tool").unlink()
        mounted.rmdir()


def test_a_container_that_ends_is_reported_with_evidence_and_leaves_nothing(do):
    async def outlive() -> str:
        spec = Spec(name="short", run="tests", limits=SMALL, lifetime_s=2)
        async with open_sandbox(spec) as box:
            with pytest.raises(SandboxLost, match="lifetime 2 s"):
                await box.run(["sleep", "1000"])
            with pytest.raises(SandboxLost):
                await box.run(["true"])
            assert box.evidence().oom_kills == 0
        return box.name

    name = do(outlive())
    assert name.startswith("legorl-short-")
    assert not list(Path("/sys/fs/cgroup").glob(f"*/legorl/*{name[-8:]}"))


def test_a_request_cut_short_does_not_answer_the_next_one(do):
    async def cut() -> None:
        async with open_sandbox(Spec(name="cut", run="tests", limits=SMALL, lifetime_s=60)) as box:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.run(["sleep", "1000"]), 0.2)
            with pytest.raises(SandboxLost, match="cut short"):
                await box.run(["true"])

    do(cut())


async def _opening(**fields) -> None:
    async with open_sandbox(Spec(name="no", run="tests", limits=SMALL, **fields)):
        raise AssertionError("opened")


def test_a_missing_image_and_a_missing_mount_are_named(do):
    with pytest.raises(ImageMissing, match="no-such-image:1: image not known"):
        do(_opening(image="localhost/no-such-image:1"))
    with pytest.raises(SandboxError, match="/no/such/folder"):
        do(_opening(mounts=((Path("/no/such/folder"), "/opt/h"),)))
    with pytest.raises(SandboxError, match="comma"):
        do(_opening(mounts=((Path("/a,b"), "/opt/h"),)))


def test_links_lead_into_the_sandbox(do):
    async def look() -> tuple[str, bytes]:
        spec = Spec(name="links", run="tests", limits=SMALL, links=(("/app", "/ws/repo"), ("/data/in", "/ws/in")))
        async with open_sandbox(spec) as box:
            await box.put(tar({"a.txt": b"a\n"}), "/ws/repo")
            await box.commit("/ws/repo")
            seen = await sh(box, "cat /app/a.txt; echo b >/app/a.txt; readlink /data/in; rm /app 2>&1", cwd="/")
            return seen.log.decode(), await box.diff("/ws/repo")

    log, patch = do(look())
    assert log.splitlines()[:2] == ["a", "/ws/in"]
    assert "cannot remove" in log
    assert b"+b" in patch
    with pytest.raises(SandboxError, match="absolute path"):
        do(_opening(links=(("app", "/ws/repo"),)))


def test_without_podman_the_message_says_how_to_get_it(do, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PodmanMissing, match="make setup"):
        do(ensure_ready())
    with pytest.raises(PodmanMissing, match="apt-get install podman"):
        do(_opening())
