"""How the supervisor starts processes as another uid. Here outside of a container: it needs root, and nothing else."""

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import legorl.sandbox

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def processes() -> ModuleType:
    path = Path(legorl.sandbox.__file__).parent / "inside" / "processes.py"
    spec = importlib.util.spec_from_file_location("inside_processes", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slowly(become: Callable[[int], None]) -> Callable[[int], None]:
    def slow(uid: int) -> None:
        sum(range(10**7))  # a core that others use
        become(uid)

    return slow


def test_a_child_is_root_no_more_when_fork_returns(processes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is, killing the agent would kill it too: the forwarder to the model died of that now and then."""
    monkeypatch.setattr(processes, "become", slowly(processes.become))
    reader, writer = os.pipe()
    pid = processes.fork(lambda: os.read(reader, 1), processes.FORWARDER, keep=reader)
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        assert f"Uid:\t{processes.FORWARDER}\t{processes.FORWARDER}\t" in status
        # Of our descriptors it has the one that it was given.
        assert {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()} == {0, 1, 2, reader}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_a_child_that_cannot_become_another_does_not_hang_its_parent(processes: ModuleType) -> None:
    reader, writer = os.pipe()
    pid = processes.fork(lambda: None, -2, err=writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        assert b"Error" in said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
