"""A task folder: read it, check it, digest it, pack its repository.

    TASK/task.toml         what follows
    TASK/instruction.md    what the agent is told
    TASK/repo/             the repository as plain files; in the sandbox it becomes one root commit
    TASK/tests/            hidden: reaches only the grading container
    TASK/solution.patch    hidden: a git diff of repo/

task.toml:

    format = "task/1"
    id = "shell-0001-rename"          # unique in its set; letters, digits, '-', '_', '.'
    family = "shell"                  # free labels to select by
    kind = "rename"
    level = 1
    split = "train"                   # train, dev, heldout, unseen
    [grade]
    runner = "pytest"                 # runs `pytest tests/` from the repository's root, with tests/ put there
    fail_to_pass = ["tests/test_task.py::test_renamed"]
    pass_to_pass = []
    timeout_s = 60
    [sandbox]                         # optional
    memory_mb = 512
    disk_mb = 128
    image = "localhost/other:1"       # instead of the base image; legorl.image_reference says what can stand here
    workdir = "/app"                  # a path under which the repository can be reached, too
    python = "/opt/py39/bin/python"   # the Python of the tests, in the image; its folder is the first on PATH

Imported tasks say more under [grade]; the class Grade tells what.
"""

import hashlib
import io
import os
import re
import tarfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from legorl import image_reference

TASK_FORMAT = "task/1"
# In which tests run, whoever runs them: a task made by one environment would not hold in another.
TEST_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONHASHSEED": "0",
}
REPO = "/ws/repo"  # where a sandbox has the repository
ALONE_S = 5.0  # seconds for one test alone, most of which go into importing what it tests
SPLITS = ("train", "dev", "heldout", "unseen")
RUNNERS = ("pytest", "unittest", "script", "log")
SEMANTICS = ("strict", "swe-bench")
# Parsers of test logs, by SWE-bench's names, for tasks whose runner is `log`.
LOG_PARSERS = tuple(
    f"parse_log_{name}"
    for name in (
        *(
            "pytest",
            "pytest_options",
            "pytest_v2",
            "astroid",
            "astropy",
            "django",
            "flask",
            "marshmallow",
            "matplotlib",
        ),
        *("pvlib", "pydicom", "pylint", "pyvista", "requests", "scikit", "seaborn", "sphinx", "sqlfluff", "sympy"),
        "xarray",
    )
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class TaskError(Exception):
    """A folder is not a usable task; the message says which part and how to mend it."""


@dataclass(frozen=True)
class Grade:
    """How a patch is graded. Paths are relative to the repository's root.

    semantics: what counts as kept (docs/grading.md). files: what the runner is given. test_paths: files and folders
    that belong to the tests and are put right whatever the patch did to them. tests_at: where the task's tests/ goes:
    it replaces that path, or is laid over the whole tree ("."), where `removed` names what it takes away; an absolute
    path lies outside of the tree.
    python_path: what the tests import from. command, parser, reward_file: of the runners `script` and `log`.
    """

    runner: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    timeout_s: float
    semantics: str = "strict"
    files: tuple[str, ...] = ("tests",)
    test_paths: tuple[str, ...] = ("tests",)
    tests_at: str = "tests"
    removed: tuple[str, ...] = ()
    python_path: tuple[str, ...] = (".",)
    command: tuple[str, ...] = ()
    parser: str = ""
    reward_file: str = ""

    @property
    def alone_s(self) -> float:
        """Seconds for running each test of fail_to_pass once alone: some rows of SWE-bench have hundreds of them."""
        return max(self.timeout_s, ALONE_S * len(self.fail_to_pass))

    def holds(self, got: str, forward: bool) -> bool:
        """Is `got` what a test of fail_to_pass (forward) or of pass_to_pass must get?

        With SWE-bench's semantics an xfail is a pass, and a test of pass_to_pass that is skipped is kept.
        """
        lenient = self.semantics == "swe-bench"
        return got == "pass" or (lenient and (got == "xfail" or (got == "skip" and not forward)))


@dataclass(frozen=True)
class Limits:
    """What the task's sandboxes may use."""

    memory_mb: int = 512
    disk_mb: int = 128
    processes: int = 128
    cpus: float = 1.0


@dataclass(frozen=True)
class Task:
    path: Path
    id: str
    family: str
    kind: str
    level: int
    split: str
    grade: Grade
    limits: Limits
    image: str = ""  # as legorl.image_reference has it, paths absolute; "" is the base image
    workdir: str = ""  # an absolute path under which the repository can be reached, too
    python: str = ""  # an absolute path in the image; "" is the first python3 on PATH
    labels: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def instruction(self) -> str:
        return (self.path / "instruction.md").read_text().strip()

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """The symbolic links that its sandboxes need, (path, target)."""
        return ((self.workdir, REPO),) if self.workdir else ()

    @property
    def canary(self) -> str:
        """The test that no solution can pass together with the others, "" if the task is not a canary."""
        return str(self.labels.get("canary", ""))

    def on_path(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return `environment` with the folder of the task's Python first on PATH."""
        folder = f"{Path(self.python).parent}:" if self.python else ""
        return {**environment, "PATH": folder + environment["PATH"]}

    @property
    def repo(self) -> Path:
        return self.path / "repo"

    @property
    def tests(self) -> Path:
        return self.path / "tests"

    @property
    def solution(self) -> bytes:
        """The solution as a git diff of repo/. Raises TaskError if the task has none."""
        file = self.path / "solution.patch"
        if not file.exists():
            raise TaskError(f"{self.path}: no solution.patch")
        return file.read_bytes()

    @cached_property
    def digest(self) -> str:
        """sha256 over every path, mode and content of the folder: two tasks are the same iff their digests are."""
        total = hashlib.sha256()
        for file in sorted(self.path.rglob("*"), key=lambda p: os.fsencode(p.relative_to(self.path))):
            name = os.fsencode(file.relative_to(self.path))
            if file.is_symlink():
                body, mode = os.fsencode(file.readlink()), b"l"
            elif file.is_file():
                body, mode = file.read_bytes(), b"x" if os.access(file, os.X_OK) else b"f"
            else:
                continue
            total.update(b"%d:%b%b%d:" % (len(name), name, mode, len(body)))
            total.update(hashlib.sha256(body).digest())
        return total.hexdigest()[:32]


def load_task(path: Path | str) -> Task:
    """Read the task folder at `path`; raise TaskError if it is not one."""
    path = Path(path).resolve()
    if not (path / "task.toml").is_file():
        raise TaskError(f"{path}: not a task folder (no task.toml)")
    try:
        data = tomllib.loads((path / "task.toml").read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}/task.toml: {error}") from error
    if data.get("format") != TASK_FORMAT:
        raise TaskError(f"{path}/task.toml: format {data.get('format')!r}, but this version reads {TASK_FORMAT!r}")
    for name in ("instruction.md", "repo"):
        if not (path / name).exists():
            raise TaskError(f"{path}: no {name}")
    try:
        grade, sandbox = data["grade"], dict(data.get("sandbox", {}))
        image, workdir, python = (sandbox.pop(name, "") for name in ("image", "workdir", "python"))
        task = Task(
            path=path,
            id=data["id"],
            family=data["family"],
            kind=data["kind"],
            level=int(data.get("level", 0)),
            split=data["split"],
            grade=_grade(grade),
            limits=Limits(**sandbox),
            image=image_reference.absolute(image, path),
            workdir=workdir,
            python=python,
            labels=data.get("labels", {}),
        )
    except KeyError as error:
        raise TaskError(f"{path}/task.toml: no key {error}") from error
    except (TypeError, ValueError) as error:
        raise TaskError(f"{path}/task.toml: {error}") from error
    if python and not python.startswith("/"):
        raise TaskError(f"{path}/task.toml: python {python!r} must be an absolute path in the image")
    if not _NAME.fullmatch(task.id):
        raise TaskError(f"{path}/task.toml: id {task.id!r} may hold only letters, digits, '.', '_' and '-'")
    if task.split not in SPLITS:
        raise TaskError(f"{path}/task.toml: split {task.split!r} is none of {', '.join(SPLITS)}")
    if task.grade.runner not in RUNNERS:
        raise TaskError(f"{path}/task.toml: runner {task.grade.runner!r} is none of {', '.join(RUNNERS)}")
    if task.grade.semantics not in SEMANTICS:
        raise TaskError(f"{path}/task.toml: semantics {task.grade.semantics!r} is none of {', '.join(SEMANTICS)}")
    if task.grade.runner in ("script", "log") and not task.grade.command:
        raise TaskError(f"{path}/task.toml: runner {task.grade.runner!r} needs grade.command, the words of a command")
    if task.grade.runner == "log" and task.grade.parser not in LOG_PARSERS:
        raise TaskError(f"{path}/task.toml: parser {task.grade.parser!r} is none of {', '.join(LOG_PARSERS)}")
    for name in (task.workdir, task.grade.reward_file, task.grade.tests_at):
        if ".." in name.split("/"):
            raise TaskError(f"{path}/task.toml: {name!r} is no plain path")
    for name in (*task.grade.test_paths, *task.grade.files, *task.grade.removed, *task.grade.python_path):
        if name.startswith("/") or ".." in name.split("/"):
            raise TaskError(f"{path}/task.toml: {name!r} leaves the repository")
    if not task.grade.fail_to_pass or not any(task.tests.rglob("*")):
        raise TaskError(
            f"{path}: a task with no tests cannot be graded; add tests/ and name them in grade.fail_to_pass"
        )
    return task


def _grade(table: dict[str, Any]) -> Grade:
    """Read [grade]. Raises KeyError or TypeError for what is missing or unknown."""
    table = {"pass_to_pass": (), **table, "timeout_s": float(table.get("timeout_s", 60))}
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}
    return Grade(runner=fields.pop("runner"), fail_to_pass=fields.pop("fail_to_pass"), **fields)


def pack(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> bytes:
    """Return `folder` as an uncompressed tar of files, links and modes, without owners or times (deterministic).

    Of everything in it only what is `wanted`, by its path relative to `folder`.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(folder.rglob("*"), key=os.fsencode):
            name = str(file.relative_to(folder))
            if not wanted(name):
                continue
            info = tar.gettarinfo(file, arcname=name)
            if info.islnk():  # the second name of one file: a file of its own, as in git
                info.type, info.size = tarfile.REGTYPE, file.stat().st_size
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = 0
            info.mode = 0o755 if info.isdir() or info.mode & 0o111 else 0o644
            if info.isreg():
                with file.open("rb") as body:
                    tar.addfile(info, body)
            elif info.isdir() or info.issym():
                tar.addfile(info)
    return buffer.getvalue()
