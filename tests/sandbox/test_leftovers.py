"""After kill -9 nothing is left, or what is left is removed at the next start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from legorl.sandbox import BASE_IMAGE, limits, owner, reap
from legorl.sandbox.podman import pid_folder, podman

_OWNER = """
import asyncio
from legorl.sandbox import Spec, open_sandbox
from legorl.task import Limits

async def main():
    async with open_sandbox(Spec(name="left", run="tests", limits=Limits(), lifetime_s=300)) as box:
        print(box.name, box._process.pid, flush=True)
        await box.run(["sleep", "1000"])

asyncio.run(main())
"""


@pytest.mark.podman
@pytest.mark.parametrize("podman_too", [False, True])
def test_leftovers_of_a_killed_owner_are_removed(podman_too: bool, do):
    process = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name, client = process.stdout.readline().split()
    unique = name[-8:]
    assert [folder for folder in limits.leftover_cgroups() if folder.name.endswith(unique)]
    process.kill()
    if podman_too:
        os.kill(int(client), signal.SIGKILL)
    process.wait()
    do(reap())
    assert name not in do(podman("ps", "-a", "--format", "{{.Names}}")).out.decode().split()
    assert not [folder for folder in limits.leftover_cgroups() if folder.name.endswith(unique)]
    assert not list(pid_folder().glob(f"*{unique}.pid"))


@pytest.mark.podman
def test_a_container_that_was_never_started_is_removed(do):
    name = f"legorl-never-{os.getpid()}"
    labels = ("--label", "legorl=1", "--label", "legorl.owner=00000000.1.1")
    do(podman("create", "--pull=never", "--network", "none", "--name", name, *labels, BASE_IMAGE, "true"))
    assert name in do(reap())
    assert do(podman("container", "exists", name, check=False)).code == 1


@pytest.mark.podman
def test_containers_of_living_owners_stay(box, do):
    assert box.name not in do(reap())
    assert do(box.run(["true"])).exit_code == 0


def test_an_owner_is_known_by_pid_start_and_boot():
    mine = owner.mine()
    assert owner.is_alive(mine)
    boot, pid, start = mine.split(".")
    assert not owner.is_alive(f"{boot}.{pid}.{int(start) + 1}")
    assert not owner.is_alive(f"00000000.{pid}.{start}")
    for mark in ("", "x", "a.b.c"):
        assert not owner.is_alive(mark)


def test_a_zombie_owns_nothing():
    process = subprocess.Popen(["true"])
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    assert owner._start(process.pid) is None
    process.wait()
