"""Run Podman rootless: directly as a plain user, through the service user `legorl` when started as root.

    done = await podman("image", "exists", IMAGE, check=False)
    process = await asyncio.create_subprocess_exec(*command("run", ...), **context(), stdin=PIPE, stdout=PIPE)

With `url` it is the client of a Podman service that runs elsewhere, as whatever user that one is.

Root does not run `sudo`-like wrappers: `unshare` makes a private mount namespace, `setpriv` becomes the service user.
The namespace is needed because crun refuses to start where a cgroup2 mount holds controllers beside cgroup v1 ("hybrid"
machines); there the mount is hidden from Podman, and only from Podman.
"""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl import paths
from legorl.sandbox.errors import ImageBroken, ImageMissing, PodmanMissing, SandboxError

SERVICE_HOME = Path("/var/lib/legorl")
SERVICE_RUNTIME = Path("/run/legorl")
_BECOME = (
    '[ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ] || umount /sys/fs/cgroup/unified 2>/dev/null; '
    f"mount --make-rshared / && exec setpriv --reuid {paths.SERVICE_USER} --regid {paths.SERVICE_USER} "
    '--init-groups -- "$@"'
)


@dataclass(frozen=True)
class Done:
    """A finished Podman command."""

    code: int
    out: bytes
    err: str


def command(*arguments: str, url: str | None = None) -> list[str]:
    """Return the argv that runs `podman ARGUMENTS` rootless, or by the service at `url`. Raises PodmanMissing."""
    if shutil.which("podman") is None:
        raise PodmanMissing(
            "podman is not installed: run `make setup` (or apt-get install podman crun uidmap catatonit)"
        )
    if url is not None:
        return ["podman", "--remote", "--url", url, *arguments]
    if not paths.is_root():
        return ["podman", *arguments]
    # slave: folders mounted on the host later still appear in Podman's mount namespace.
    return ["unshare", "-m", "--propagation", "slave", "--", "sh", "-c", _BECOME, "sh", "podman", *arguments]


def context(url: str | None = None) -> dict[str, Any]:
    """Return `cwd` and `env` for a process made of `command(...)`. Raises PodmanMissing where setup was never run."""
    if url is not None or not paths.is_root():
        return {"cwd": "/", "env": dict(os.environ)}
    account = service_account()
    if not SERVICE_RUNTIME.is_dir():  # /run is empty after a boot
        SERVICE_RUNTIME.mkdir(mode=0o700, exist_ok=True)
        os.chown(SERVICE_RUNTIME, account.pw_uid, account.pw_gid)
    env = {
        "HOME": str(SERVICE_HOME),
        "USER": paths.SERVICE_USER,
        "LOGNAME": paths.SERVICE_USER,
        "XDG_RUNTIME_DIR": str(SERVICE_RUNTIME),
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
    }
    return {"cwd": str(SERVICE_HOME), "env": env}


def pid_folder() -> Path:
    """Return the folder, writable for Podman's user, where it notes the containers' process ids."""
    return SERVICE_RUNTIME if paths.is_root() else paths.private_dir()


def service_account() -> pwd.struct_passwd:
    """Return the service user's account. Raises PodmanMissing if there is none."""
    try:
        return pwd.getpwnam(paths.SERVICE_USER)
    except KeyError:
        raise PodmanMissing(
            f"no user {paths.SERVICE_USER!r} to run containers as: run `make setup` (python -m legorl.sandbox setup)"
        ) from None


async def podman(
    *arguments: str,
    url: str | None = None,
    timeout_s: float = 60.0,
    check: bool = True,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int = asyncio.subprocess.PIPE,
) -> Done:
    """Run one short Podman command to its end, here or by the service at `url`.

    `stdin`, `stdout`: file descriptors to read from and to write to (then `out` is empty). Raises SandboxError on a
    time-out and, with `check`, on a non-zero exit.
    """
    what = f"podman {' '.join(arguments[:2])}"
    process = await asyncio.create_subprocess_exec(
        *command(*arguments, url=url),
        **context(url),
        stdin=stdin,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except (TimeoutError, asyncio.CancelledError) as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # unshare, sh and setpriv each exec the next: this is podman itself
            if arguments[0] == "build":  # the commands of a Dockerfile outlive it
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, asyncio.CancelledError):
            raise
        raise SandboxError(f"{what}: no answer within {timeout_s:g} s") from None
    code = process.returncode
    assert code is not None
    done = Done(code, out or b"", err.decode(errors="replace").strip())
    if check and code:
        raise failure(what, done.err)
    return done


def failure(what: str, stderr: str) -> SandboxError | ImageBroken:
    """Return the exception that a failed Podman command's stderr calls for."""
    line = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    if any(words in stderr for words in ("image not known", "no such image", "initializing source docker://")):
        base = "; build the base image with `make setup` (python -m legorl.sandbox setup)"
        return ImageMissing(f"{what}: {line}{base if 'legorl-base' in line else ''}")
    if "failed to exec pid1" in stderr:  # so says the init that Podman puts in
        return ImageBroken(f"{what}: the image has no python3 on its PATH, which every sandbox needs: {line}")
    return SandboxError(f"{what}: {line}")
