"""Runs inside the grading container, before any code of the agent does: put right what could steer the tests.

    python3 -I -B tidy_tree.py ROOT STAGE       # prints JSON on the private descriptor: {"flags": [...]}

STAGE was filled before the agent's patch came: `tests/`, the hidden tests; `restore/`, pristine files that steer
pytest; `manifest.json`, about the pristine tree: `steering` {path: sha256} of files that steer Python or pytest by
their name, `sections` {file: text} of pytest's sections in shared configuration files, `tests` {path: sha256} of what
already lay under tests/, `top` the names of its top-level modules.

Steering files that are not pristine are removed, tests/ is removed whole, compiled Python is removed; then what is
staged moves into its place (a move needs no room on a disk that the patch may have filled). Shared configuration files
stay as the agent left them: pytest is told which file to read. What was found is named as flags: evidence for people
and for lego-inspect, not part of the verdict.
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
TEST_MODULES = {"pytest", "_pytest", "pluggy", "iniconfig"}


def flag_of(path: Path) -> str:
    """The flag of a steering file, "" for any other file."""
    return "startup_file" if path.suffix == ".pth" else STEERING.get(path.name, "")


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


def tidy(root: Path, manifest: dict) -> "list[str]":
    """Tidy the tree at `root`; return the flags, sorted."""
    flags = set()

    def there(path: Path) -> str:
        return path.relative_to(root).as_posix()

    tests = root / "tests"
    below = entries(tests) if tests.is_dir() and not tests.is_symlink() else []
    left = {there(p): digest(p) for p in below if p.suffix != ".pyc" and (p.is_symlink() or not p.is_dir())}
    if left != manifest["tests"] or tests.is_symlink() or tests.is_file():
        flags.add("tests_touched")
    remove(tests)

    for path in entries(root):
        if path.name == "__pycache__" or path.suffix in (".pyc", ".pyo"):
            remove(path)
        elif flag_of(path) and manifest["steering"].get(there(path)) != digest(path):
            flags.add(flag_of(path))
            remove(path)
    for name in manifest["steering"]:
        if not name.startswith("tests/") and not (root / name).is_file():
            flags.add(flag_of(Path(name)))

    if {name: section(root / name) for name in SECTIONS} != manifest["sections"]:
        flags.add("pytest_config")
    names = {path.name.partition(".")[0] for path in root.iterdir()} - set(manifest["top"])
    if names & (set(sys.stdlib_module_names) | TEST_MODULES):
        flags.add("shadows_module")

    return sorted(flags)


def settle(root: Path, stage: Path) -> None:
    """Move what is staged into the tree; nothing is written through a link that the agent left."""
    staged = stage / "restore"
    for source in [p for p in entries(staged) if p.is_file()]:
        inner = source.relative_to(staged)
        for folder in [root / parent for parent in inner.parents][-2::-1]:
            if folder.is_symlink() or not folder.is_dir():
                remove(folder)
                folder.mkdir()
        remove(root / inner)
        source.replace(root / inner)
    (stage / "tests").replace(root / "tests")
    shutil.rmtree(stage)


if __name__ == "__main__":
    tree, ready = Path(sys.argv[1]), Path(sys.argv[2])
    found = tidy(tree, json.loads((ready / "manifest.json").read_text()))
    settle(tree, ready)
    os.write(int(os.environ["LEGORL_REPORT_FD"]), json.dumps({"flags": found}).encode())
