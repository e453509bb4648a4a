"""Bombs are contained, the supervisor outlives them, and the evidence is read from outside."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from sandbox.boxes import SMALL, Boxes, sh, start

from legorl.sandbox import LimitsError, Sandbox, ensure_ready, limits, probe
from legorl.task import Limits

pytestmark = pytest.mark.podman
_FILL = "for d in /ws /tmp /home/agent /dev/shm; do head -c 200000000 /dev/zero >$d/fill; done"


@pytest.fixture(scope="module")
def bombed(boxes: Boxes) -> Sandbox:
    return boxes.open(name="bombed")


def test_a_memory_bomb_dies_and_the_tree_is_still_collected(bombed: Sandbox, do):
    do(start(bombed, "/ws/repo", {"a.txt": b"a\n"}))
    assert bombed.evidence().oom_kills == 0
    size = 2 * limits.memory_bytes(SMALL)
    result = do(sh(bombed, f"echo b >a.txt; exec python3 /lego/bombs.py memory {size}", cwd="/ws/repo"))
    assert result.exit_code == 128 + 9
    seen = bombed.evidence()
    assert seen.oom_kills > 0
    assert seen.memory_peak is None or limits.memory_bytes(SMALL) * 0.9 < seen.memory_peak <= limits.memory_bytes(SMALL)
    assert b"+b\n" in do(bombed.diff("/ws/repo"))


def test_a_fork_bomb_is_contained_and_dies(bombed: Sandbox, do):
    assert bombed.evidence().process_refusals == 0

    async def explode() -> None:
        until = asyncio.Event()
        running = asyncio.ensure_future(sh(bombed, "f() { f | f & }; f; sleep 1000", until=until))
        while not bombed.evidence().process_refusals:
            await asyncio.sleep(0.01)
        until.set()
        assert (await running).stopped

    do(explode())
    assert do(sh(bombed, "pgrep -u agent -c .; true")).log == b"1\n"  # the shell that asks


def test_a_full_disk_is_refused_and_is_not_a_full_memory(boxes: Boxes, do):
    box = boxes.open(name="full")
    seen = json.loads(do(sh(box, "python3 /lego/bombs.py disk /ws 100000000")).log)
    assert seen == {"bytes": SMALL.disk_mb << 20, "errno": "ENOSPC"}
    # All of them full at once: still no process is killed.
    assert box.evidence().full_disks == ()  # the bomb has cleaned up
    assert do(sh(box, _FILL)).log.count(b"No space left") == 4
    assert box.evidence() == replace(box.evidence(), oom_kills=0, full_disks=("/ws", "/tmp", "/home/agent", "/dev/shm"))
    do(sh(box, "rm /ws/fill /home/agent/fill /dev/shm/fill"))
    assert box.evidence().full_disks == ("/tmp",)


def test_memory_and_processes_are_promised_in_full(boxes: Boxes, do):
    box = boxes.open(name="promised")
    script = f"{_FILL}; exec python3 /lego/bombs.py memory {(SMALL.memory_mb - 16) << 20}"
    assert do(sh(box, script)).exit_code == 0
    started = json.loads(do(box.run(["python3", "/lego/bombs.py", "processes", "1000"])).log)["started"]
    assert SMALL.processes - 1 <= started <= SMALL.processes + 1


def test_limits_that_podman_ignores_are_found_out(do, monkeypatch: pytest.MonkeyPatch):
    if (limits.CGROUPS / "cgroup.controllers").exists():
        pytest.skip("cgroup v2: Podman's own flags act")
    monkeypatch.setenv("LEGORL_LIMITS", "native")
    with pytest.raises(LimitsError, match=r"memory \(exit code 0.*run as root"):
        do(ensure_ready())


def test_a_passed_probe_is_remembered(do, monkeypatch: pytest.MonkeyPatch):
    do(ensure_ready(SMALL))

    async def unexpected() -> dict:
        raise AssertionError("probed again")

    monkeypatch.setattr(probe, "probe", unexpected)
    do(ensure_ready(SMALL))


def test_wishes_beyond_the_machine_and_wrong_settings_are_named(do, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(LimitsError, match="lower memory_mb"):
        do(ensure_ready(Limits(memory_mb=1 << 30)))
    monkeypatch.setenv("LEGORL_LIMITS", "none")
    with pytest.raises(LimitsError, match="'outer' nor 'native'"):
        do(ensure_ready())


def test_the_probe_command_prints_each_check():
    done = subprocess.run([sys.executable, "-m", "legorl.sandbox", "probe", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    checks = {row["name"]: row["ok"] for row in map(json.loads, done.stdout.splitlines())}
    assert all(checks.values())
    assert {"network", "vsock", "memory", "processes", "cpu", "disk", "read-only", "privileges"} <= set(checks)


def test_a_process_that_has_ended_is_no_matter_of_limits():
    """A container killed while it is confined is lost, and tried again: it must not end the whole command."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    limiter = limits.limiter(f"test-dead-{dead.pid}", SMALL)
    try:
        with pytest.raises((ProcessLookupError, FileNotFoundError)):
            limiter.attach([dead.pid])
    finally:
        limiter.remove()
