"""Make this machine able to open sandboxes: service user, its Podman configuration, the base image. Idempotent.

    await setup(say)      # as root: everything; as a plain user: only the image (Podman is already rootless)

System packages are the Makefile's business; a missing one is named. Nothing of an existing user's Podman configuration
is touched.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from legorl import paths
from legorl.sandbox import image, limits
from legorl.sandbox.errors import SandboxError
from legorl.sandbox.podman import SERVICE_HOME, SERVICE_RUNTIME, command, service_account

_STORAGE = f"""[storage]
driver = "overlay"
graphroot = "{SERVICE_HOME}/storage"
runroot = "{SERVICE_RUNTIME}/containers"
"""
# exit_command_delay: the default leaves a conmon for 5 minutes after each container.
_CONTAINERS = """[containers]
no_hosts = true
log_driver = "none"
default_ulimits = ["nofile=4096:4096", "core=0:0"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "crun"
exit_command_delay = 2
"""


async def setup(say: Callable[[str], None]) -> None:
    """Do what is missing. Raises SandboxError (PodmanMissing, ...) saying what and how to mend it."""
    command()
    programs = {"newuidmap": "uidmap", "crun": "crun", "catatonit": "catatonit"}
    missing = [package for program, package in programs.items() if not _installed(program)]
    if missing:
        raise SandboxError(
            f"not installed: {' '.join(missing)}; run `make setup` (or apt-get install {' '.join(missing)})"
        )
    if paths.is_root():
        _service_user(say)
    limits.chosen()
    await image.ensure_image(say)


def _installed(program: str) -> bool:
    return shutil.which(program) is not None or Path("/usr/libexec/podman", program).exists()


def _service_user(say: Callable[[str], None]) -> None:
    name = paths.SERVICE_USER
    if subprocess.run(["id", name], capture_output=True).returncode:
        say(f"adding the system user {name}, who owns the containers")
        # fmt: off
        _call("useradd", "--system", "--user-group", "--create-home", "--home-dir", str(SERVICE_HOME),
              "--shell", "/usr/sbin/nologin", name)
        # fmt: on
    for file in (Path("/etc/subuid"), Path("/etc/subgid")):  # useradd --system assigns no ranges
        rows = [line.split(":") for line in file.read_text().splitlines()] if file.exists() else []
        if not any(row[0] == name for row in rows):
            start = max([100_000, *(int(row[1]) + int(row[2]) for row in rows if len(row) == 3)])
            with file.open("a") as out:
                out.write(f"{name}:{start}:65536\n")
    account = service_account()
    folder = SERVICE_HOME / ".config" / "containers"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "storage.conf").write_text(_STORAGE)
    (folder / "containers.conf").write_text(_CONTAINERS)
    for path in (SERVICE_HOME, folder.parent, folder, *folder.iterdir()):
        os.chown(path, account.pw_uid, account.pw_gid)
    SERVICE_HOME.chmod(0o700)


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SandboxError(f"{argv[0]}: {done.stderr.strip() or done.returncode}")
