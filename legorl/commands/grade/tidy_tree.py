"""Runs inside the grading container, before any code of the agent does: put right what could steer the tests.

    python3 -I -B tidy_tree.py ROOT STAGE       # prints JSON on the private descriptor: {"flags": [...]}

STAGE was filled before the agent's patch came: `tests/`, the tests at their paths in the tree; `restore/`, pristine
files that steer pytest; `manifest.json`, about the pristine tree: `steering` {path: sha256} of files that steer Python
or pytest by their name, `sections` {file: text} of pytest's sections in shared configuration files, `test_paths` the
folders and files that belong to the tests, `tests` {path: sha256} of what already lay there, `top` the names of its
top-level modules, `compiled` and `tools` what it has of byte code and of programs called as tools are.

Steering files that are not pristine are removed, the test paths are removed whole, compiled Python is removed; then
what is staged moves into its place (a move needs no room on a disk that the patch may have filled). Shared
configuration files stay as the agent left them: pytest is told which file to read. What was found is named as flags:
evidence for people and for lego-inspect, not part of the verdict.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

# File name to the flag that a change of it gets.
STEERING = {
    "conftest.py": "conftest",
    "pytest.ini": "pytest_config",
    ".pytest.ini": "pytest_config",
    "sitecustomize.py": "startup_file",
    "usercustomize.py": "startup_file",
}
SECTIONS = {"pyproject.toml": "[tool.pytest", "tox.ini": "[pytest]", "setup.cfg": "[tool:pytest]"}
TOOLS = {"python", "python3", "pytest", "py.test", "git", "sh", "bash", "env", "curl", "pip"}
TEST_MODULES = {"pytest", "_pytest", "pluggy", "iniconfig"}
# The image's own Python may be older than 3.10, which has the list.
STANDARD = set(
    getattr(sys, "stdlib_module_names", ())
    or {*sys.builtin_module_names, *(path.stem for path in Path(os.__file__).parent.iterdir())}
)


def flag_of(path: Path) -> str:
    """The flag of a steering file, "" for any other file."""
    return "startup_file" if path.suffix == ".pth" else STEERING.get(path.name, "")


def is_compiled(path: Path) -> bool:
    """Is it Python's byte code? Collection never takes any along, so a patch that has some was made to."""
    return path.suffix in (".pyc", ".pyo")


def digest(path: Path) -> str:
    if path.is_symlink():
        return "link"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"


def section(file: Path) -> str:
    """Return pytest's sections of a shared configuration file, without blank lines; "" if there are none."""
    if file.is_symlink() or not file.is_file():
        return ""
    kept, inside = [], False
    for line in file.read_text(errors="replace").splitlines():
        if line.startswith("["):
            inside = line.startswith(SECTIONS[file.name])
        if inside and line.strip():
            kept.append(line.strip())
    return "\n".join(kept)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_symlink() or path.exists():
        path.unlink()


def entries(root: Path) -> "list[Path]":
    """Everything below `root` but .git, without following links; the entries of a folder after the folder."""
    found = []
    for folder, folders, files in os.walk(root):
        if ".git" in folders:
            folders.remove(".git")
        found += [Path(folder, name) for name in (*folders, *files)]
    return found


def behind_link(root: Path, path: str) -> bool:
    """Does a folder on the way to `path` lie elsewhere?"""
    return any((root / parent).is_symlink() for parent in list(Path(path).parents)[:-1])


def files_at(root: Path, path: str) -> "list[Path]":
    """Every file and link at or below `path` in the tree at `root`; no link at it or on the way to it is followed."""
    place = root / path
    if behind_link(root, path):
        return []
    if place.is_dir() and not place.is_symlink():
        return [p for p in entries(place) if p.is_symlink() or not p.is_dir()]
    return [place] if place.is_symlink() or place.exists() else []


def inside(name: str, paths) -> bool:
    """Is `name` one of `paths`, or below one?"""
    return any(name == path or name.startswith(f"{path}/") for path in paths)


def tidy(root: Path, manifest: dict) -> "list[str]":
    """Tidy the tree at `root`; return the flags, sorted."""
    flags = set()

    def there(path: Path) -> str:
        return path.relative_to(root).as_posix()

    left: dict = {}
    for path in manifest["test_paths"]:
        left.update((there(p), digest(p)) for p in files_at(root, path) if not is_compiled(p))
        if not behind_link(root, path):
            remove(root / path)
    if left != manifest["tests"]:
        flags.add("tests_touched")

    for path in entries(root):
        if is_compiled(path) or path.name == "__pycache__":
            if is_compiled(path) and there(path) not in manifest["compiled"]:
                flags.add("compiled_python")
            remove(path)
        elif flag_of(path) and manifest["steering"].get(there(path)) != digest(path):
            flags.add(flag_of(path))
            remove(path)
    for name in manifest["steering"]:
        if not inside(name, manifest["test_paths"]) and not (root / name).is_file():
            flags.add(flag_of(Path(name)))

    if {name: section(root / name) for name in SECTIONS} != manifest["sections"]:
        flags.add("pytest_config")
    names = {path.name.partition(".")[0] for path in root.iterdir()} - set(manifest["top"])
    if names & (STANDARD | TEST_MODULES):
        flags.add("shadows_module")
    places = [p for p in (root, root / "bin") if p.is_dir() and not p.is_symlink()]
    tools = {there(p) for place in places for p in place.iterdir() if p.name in TOOLS and os.access(p, os.X_OK)}
    if tools - set(manifest["tools"]):
        flags.add("shadows_tool")

    return sorted(flags)


def settle(root: Path, stage: Path, test_paths: "list[str]") -> None:
    """Move what is staged into the tree; nothing is written through a link that the agent left."""
    staged = stage / "restore"
    for source in [p for p in entries(staged) if p.is_file()]:
        move(source, root, source.relative_to(staged))
    for path in test_paths:
        source = stage / "tests" / path
        if source.is_symlink() or source.exists():
            move(source, root, Path(path))
    shutil.rmtree(stage)


def move(source: Path, root: Path, inner: Path) -> None:
    """Move `source` to root / inner, whatever is in the way."""
    for folder in [root / parent for parent in inner.parents][-2::-1]:
        if folder.is_symlink() or not folder.is_dir():
            remove(folder)
            folder.mkdir()
    remove(root / inner)
    source.rename(root / inner)


if __name__ == "__main__":
    tree, ready = Path(sys.argv[1]), Path(sys.argv[2])
    facts = json.loads((ready / "manifest.json").read_text())
    found = tidy(tree, facts)
    settle(tree, ready, facts["test_paths"])
    os.write(int(os.environ["LEGORL_REPORT_FD"]), json.dumps({"flags": found}).encode())
