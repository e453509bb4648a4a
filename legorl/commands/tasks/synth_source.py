"""A library as a source of synthetic bugs: an sdist, a git repository or a plain folder, unpacked and understood.

    with unpacked(Path("boltons-26.2.0.tar.gz")) as library:
        library.name, library.version, library.root      # files without build leftovers
        library.sources, library.tests                   # paths that bugs may go to; paths that are the tests'

Nothing of the library is run here.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from legorl.commands.tasks.import_trees import is_test, python_path, test_paths

LEFT_OUT = ("__pycache__", ".git", ".eggs", ".tox", "node_modules")
NOT_LIBRARY = ("setup.py", "conftest.py", "noxfile.py", "fabfile.py", "tasks.py")
# What pytest itself is made of is loaded before a task's own copy could be.
PYTEST_OWN = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging")


class SourceError(Exception):
    """The source cannot be used; the message says why."""


@dataclass(frozen=True)
class Library:
    """An unpacked library. Paths are relative to `root`. digest: sha256 of the sdist or of the tree's files."""

    name: str
    version: str
    digest: str
    root: Path
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    python_path: tuple[str, ...]
    test_paths: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.name}-{self.version}" if self.version else self.name


@contextlib.contextmanager
def unpacked(source: Path) -> Iterator[Library]:
    """Unpack `source` (.tar.gz, .tar.bz2, .tar.xz, .zip, a git repository, a folder) for as long as the block runs.

    Raises SourceError.
    """
    with tempfile.TemporaryDirectory(prefix="legorl-synth-") as scratch:
        root = Path(scratch) / "tree"
        if source.is_dir():
            _copy(source, root)
        else:
            root = _unpack(source, Path(scratch))
        for leftover in [*root.rglob("*.egg-info"), *root.rglob("*.pyc"), *root.rglob("__pycache__")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
        yield _understood(root, source)


def _copy(source: Path, root: Path) -> None:
    if (source / ".git").exists():
        listed = subprocess.run(["git", "-C", str(source), "ls-files", "-z"], capture_output=True)
        if listed.returncode:
            raise SourceError(f"{source}: git cannot list its files ({listed.stderr.decode(errors='replace').strip()})")
        for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
            if (source / name).is_file() or (source / name).is_symlink():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, root / name, follow_symlinks=False)
    else:
        shutil.copytree(source, root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))


def _unpack(source: Path, scratch: Path) -> Path:
    into = scratch / "unpacked"
    try:
        if source.suffix == ".zip":
            with zipfile.ZipFile(source) as archive:
                archive.extractall(into)
        else:
            with tarfile.open(source) as archive:
                archive.extractall(into, filter="data")
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise SourceError(f"{source}: cannot be unpacked ({error})") from error
    entries = list(into.iterdir())
    if len(entries) != 1 or not entries[0].is_dir():
        raise SourceError(f"{source}: not an sdist: it holds {len(entries)} entries at its top, and not one folder")
    return entries[0]


def _understood(root: Path, source: Path) -> Library:
    name, version = _named(root, source)
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    tests = [path for path in paths if is_test(path)]
    roots = python_path(set(paths))
    sources = [path for path in paths if path.endswith(".py") and not is_test(path) and _importable(path, root, roots)]
    if not sources:
        raise SourceError(f"{source}: no Python package or module at its top or in src/ or lib/")
    if not any(path.endswith(".py") for path in tests):
        raise SourceError(f"{source}: it brings no tests; take one that does (an sdist often leaves them out)")
    if own := {_top(path, roots) for path in sources} & {*PYTEST_OWN}:
        raise SourceError(f"{source}: pytest itself runs on {own.pop()}, so its bugs would hide in the test run")
    return Library(
        name=name,
        version=version,
        digest=_digest(root, source),
        root=root,
        sources=tuple(sources),
        tests=tuple(tests),
        python_path=tuple(roots),
        test_paths=tuple(test_paths(set(tests), set())),
    )


def _importable(path: str, root: Path, roots: list[str]) -> bool:
    """Is it a module at one of `roots`, or in a package there?"""
    for at in roots:
        inner = path if at == "." else path.removeprefix(f"{at}/")
        if at != "." and inner == path:
            continue
        folders, name = inner.split("/")[:-1], inner.split("/")[-1]
        if not folders:
            return at != "." or (name not in NOT_LIBRARY and name.removesuffix(".py") not in sys.stdlib_module_names)
        return (root / at / folders[0] / "__init__.py").is_file()
    return False


def _top(path: str, roots: list[str]) -> str:
    for at in roots:
        if at != "." and path.startswith(f"{at}/"):
            path = path.removeprefix(f"{at}/")
    return path.split("/")[0].removesuffix(".py")


def _named(root: Path, source: Path) -> tuple[str, str]:
    info = root / "PKG-INFO"
    if info.is_file():
        fields = dict(re.findall(r"^(Name|Version): (\S+)", info.read_text(errors="replace"), re.MULTILINE))
        if len(fields) == 2:
            return fields["Name"].lower(), fields["Version"]
    name = source.resolve().name.removesuffix(".zip")
    name = re.sub(r"\.tar\.\w+$", "", name)
    match = re.fullmatch(r"(.+?)-(\d[\w.!+]*)", name)
    return (match[1].lower(), match[2]) if match else (re.sub(r"[^\w.-]", "-", name).lower(), "")


def _digest(root: Path, source: Path) -> str:
    if source.is_file():
        return hashlib.sha256(source.read_bytes()).hexdigest()
    total = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        body = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        total.update(path.relative_to(root).as_posix().encode("utf-8", "surrogateescape") + b"\0" + body + b"\0")
    return total.hexdigest()
