"""More Podman hosts for tests: services of root's on this machine, each with a store, sockets and settings of its own.

    with services(2) as (one, two): ...      # one.url; one.kill(); one.start()

Root's own Podman enforces limits on cgroup v1 and v2. Nothing of this machine's configuration is used or changed. The
stores lie in memory, SIZE_MB at most in all: many small files are slow to make and to remove on a disk.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from legorl.paths import SERVICE_USER

SIZE_MB = 1500
_CONTAINERS = """[containers]
no_hosts = true
log_driver = "none"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "crun"
lock_type = "file"
exit_command_delay = 2
"""
# crun refuses to start where a cgroup2 mount holds controllers beside cgroup v1: hidden from the service only.
_START = (
    '[ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ] || umount /sys/fs/cgroup/unified 2>/dev/null; '
    'mount --make-rshared / && exec podman --tmpdir "$1/tmp" system service -t 0 "unix://$1/podman.sock"'
)


def _unmount(top: Path) -> None:
    """Remove `top`, and what a killed service was starting when it died: its processes name their folder."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{top}/".encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
    subprocess.run(["umount", "-R", "-l", top], check=True)
    top.rmdir()


class Service:
    """One Podman service and its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/podman.sock"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        (folder / "containers.conf").write_text(_CONTAINERS)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
            f'[storage.options]\nroot-auto-userns-user = "{SERVICE_USER}"\n'
        )

    def start(self) -> None:
        files = {name: str(self.folder / f"{name.lower()}.conf") for name in ("CONTAINERS", "STORAGE")}
        environment = {
            **os.environ,
            "CONTAINERS_CONF": files["CONTAINERS"],
            "CONTAINERS_STORAGE_CONF": files["STORAGE"],
        }
        argv = ["unshare", "-m", "--propagation", "slave", "--", "sh", "-c", _START, "sh", str(self.folder)]
        self._process = subprocess.Popen(argv, env=environment, cwd="/", start_new_session=True)
        while subprocess.run(self.client("version"), capture_output=True).returncode:
            assert self._process.poll() is None, "the Podman service ended"
            time.sleep(0.05)

    def take_images(self, other: "Service") -> None:
        """Begin with a copy of the images of `other`."""
        # Not shutil.copytree: there is a device node of the whole disk in it.
        subprocess.run(["cp", "-a", other.folder / "store", self.folder / "store"], check=True)
        shutil.rmtree(self.folder / "store" / "libpod")  # the other's containers, and its paths

    def client(self, *arguments: str) -> list[str]:
        return ["podman", "--remote", "--url", self.url, *arguments]

    def ask(self, *arguments: str) -> str:
        return subprocess.run(self.client(*arguments), capture_output=True, text=True, check=True).stdout

    def containers(self) -> list[str]:
        """Names of all containers, ended ones too."""
        return self.ask("ps", "-a", "--format", "{{.Names}}").split()

    def kill(self) -> None:
        """End the service, and nothing else, by kill -9."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            subprocess.run(self.client("rm", "-af", "-t", "0"), capture_output=True)
            self.kill()


@contextlib.contextmanager
def services(count: int, prepare: Callable[[Service], object] = lambda service: None) -> Iterator[list[Service]]:
    """Start `count` services; end them and remove everything afterwards.

    `prepare` is called with the first. The others begin with the images that it has then: sending one takes longer than
    most tests.
    """
    with contextlib.ExitStack() as stack:
        top = Path(tempfile.mkdtemp(prefix="lego-hosts-"))
        # Of a size of its own, never /dev/shm: a store that grows must not take the machine's memory.
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=755", "legorl", top], check=True)
        stack.callback(_unmount, top)
        made: list[Service] = []
        for k in range(count):
            made.append(Service(top / f"host{k}"))
            stack.callback(made[-1].close)
            if k:
                made[-1].take_images(made[0])
            made[-1].start()
            if not k:
                prepare(made[0])
        yield made
