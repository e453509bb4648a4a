"""A coding-agent harness as one TOML file: read it, install it once, fill in its command line.

    harness = load_harness("mini-swe-agent:small"); harness.make_ready()
    launch = harness.launch({"task": ..., "key": ..., ...})   # argv, env, files; harness.mounts goes into the Spec

A harness is used as its authors released it. Its file (legorl/harnesses/NAME.toml, or any path) says which release, how
to install it, and how to start it against an OpenAI-like API; docs/harnesses.md explains every key. `NAME:PRESET`
overrides the command line, the environment or the files of the plain form.

An installed harness is one folder in the cache, mounted read-only at /opt/h: `site/` (Python packages for the sandbox's
python3, or for the newer one in `python/`), `node_modules/` and `node/bin/node`. Python packages are compiled here,
because a read-only mount cannot keep the bytecode and some harnesses import for ten seconds without it.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from legorl import paths
from legorl.harness.program import Program, ProgramError, copy_program, find_program

BUILT_IN = Path(__file__).parent.parent / "harnesses"
MOUNT = "/opt/h"
BASE_URL = "http://127.0.0.1:8400"
RECORD = "installed.json"
ENDING = (400, 401, 403, 404)  # answers that clients do not try again
PROTOCOLS = ("openai-chat", "openai-responses", "anthropic", "any")
PROGRAM = "program"  # a field: where a program of the user's lies in the sandbox
FIELDS = ("task", "base_url", "key", "model", "home", "max_turns", "turn_tokens", "context", PROGRAM)
# {{...}} is left to the harness's own templates; braces around anything but a field's name are JSON.
_FIELD = re.compile(r"\{\{.*?\}\}|\{(" + "|".join(FIELDS) + r")\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KEYS = {
    "name", "version", "protocol", "user_agent", "side_patterns", "spent_status", "about", "install", "run", "presets",
}  # fmt: skip
_RUN_KEYS = {"argv", "env", "files", "about"}
_PRESET_KEYS = _RUN_KEYS | {"protocol", "user_agent"}
_INSTALL_KEYS = {"pip", "python", "npm", "node", "keep"}


class HarnessError(Exception):
    """A harness file is wrong, or the harness is not installed; the message says how to mend it."""


@dataclass(frozen=True)
class Install:
    """What to install: exact Python packages (nothing else gets in), npm packages, releases of Python and Node.js.

    python: the Python that the packages are for, if the sandbox's own is too old.
    keep: the only files that stay (path below the mount -> pattern of where npm puts it); empty: all of them.
    """

    pip: tuple[str, ...] = ()
    python: str = ""
    npm: tuple[str, ...] = ()
    node: str = ""
    keep: dict[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.pip or self.python or self.npm or self.node)


@dataclass(frozen=True)
class Launch:
    """A started harness: its argv, environment, and the files it finds (absolute path in the sandbox -> text)."""

    argv: list[str]
    env: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True)
class Harness:
    """A harness file with one preset applied. `label` is NAME or NAME:PRESET.

    program: the user's own, if the file starts one (`{program}`); then `preset` is its file name.
    """

    name: str
    version: str
    protocol: str
    preset: str
    digest: str  # of the file and the preset's name
    user_agent: str
    side_patterns: tuple[str, ...]
    install: Install
    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, str]
    spent_status: int = 400  # HTTP status that it takes as the end, when a budget is spent
    program: Program | None = None

    @property
    def label(self) -> str:
        return f"{self.name}:{self.preset}" if self.preset else self.name

    @property
    def folder(self) -> Path:
        if self.program:
            return paths.cache_dir() / "harness" / f"{self.name}-{self.program.digest}"
        return paths.cache_dir() / "harness" / f"{self.name}-{self.version}"

    @property
    def installed(self) -> bool:
        """Whether exactly what the file asks for is installed."""
        record = self.folder / RECORD
        if self.install.empty:
            return True
        found = json.loads(record.read_text()) if record.is_file() else {}
        return {k: v for k, v in found.items() if v} == wanted(self.install)

    def make_ready(self) -> None:
        """Copy a program of the user's to where it can be mounted from. Raises HarnessError for a harness that is not
        installed, or that has no program to run."""
        if self.program:
            copy_program(self.program, self.folder)
        elif _takes_program(self.argv):
            raise HarnessError(f"harness {self.name} needs a program to run: --harness {self.name}:./agent.sh")
        if not self.installed:
            raise HarnessError(
                f"harness {self.name} {self.version} is not installed; "
                f"run: python -m legorl.harness install {self.name}   (or: make setup)"
            )

    @property
    def mounts(self) -> tuple[tuple[Path, str], ...]:
        """Read-only mounts of the sandbox: (folder here, path there)."""
        return ((self.folder, MOUNT),) if self.program or not self.install.empty else ()

    def launch(self, values: dict[str, Any]) -> Launch:
        """Fill in the templates. `values` gives every name of FIELDS but the program's; None becomes 0 (for limits: no
        limit)."""
        texts = {k: "0" if v is None else str(v) for k, v in values.items()}
        texts[PROGRAM] = f"{MOUNT}/{self.program.start}" if self.program else ""

        def fill(template: str) -> str:
            return _FIELD.sub(lambda found: texts[found[1]] if found[1] else found[0], template)

        return Launch(
            [fill(a) for a in self.argv],
            {k: fill(v) for k, v in self.env.items()},
            {fill(k): fill(v) for k, v in self.files.items()},
        )


def wanted(install: Install) -> dict[str, Any]:
    """What the record of a finished installation must say, without what is empty."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(install).items() if v}


def built_in() -> list[str]:
    """Names of the harness files that come with legorl."""
    return sorted(p.stem for p in BUILT_IN.glob("*.toml"))


def load_harness(spec: str) -> Harness:
    """Read the harness `spec`: NAME, NAME:PRESET, or the path of a .toml file, with :PRESET or without; or NAME:PATH,
    if it runs a program of the user's.

    Raises HarnessError for an unknown name or preset, a file that is wrong, or a program that cannot be run.
    """
    name, _, preset = spec.partition(":")
    preset = "" if preset == "default" else preset
    path = Path(name) if name.endswith(".toml") else BUILT_IN / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(built_in())
        raise HarnessError(f"no harness {name!r}; known: {known}; or give the path of a .toml file (docs/harnesses.md)")
    raw = path.read_bytes()
    try:
        data = tomllib.loads(raw.decode())
        if _takes_program(data["run"].get("argv", ())):
            return _with_program(path, data, preset, raw)
        return _build(path, data, preset, hashlib.sha256(raw + b"\0" + preset.encode()).hexdigest()[:16])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HarnessError(f"{path}: {error}") from error
    except KeyError as error:
        raise HarnessError(f"{path}: no key {error}") from error


def _takes_program(argv: Iterable[str]) -> bool:
    return any(f"{{{PROGRAM}}}" in word for word in argv)


def _with_program(path: Path, data: dict[str, Any], program: str, raw: bytes) -> Harness:
    if not program:
        return _build(path, data, "", hashlib.sha256(raw).hexdigest()[:16])
    try:
        found = find_program(Path(program))
    except ProgramError as error:
        raise HarnessError(str(error)) from error
    if not _NAME.fullmatch(found.path.name):
        raise HarnessError(f"{found.path}: its name may hold only letters, digits, '.', '_' and '-'")
    digest = hashlib.sha256(raw + b"\0" + found.digest.encode()).hexdigest()[:16]
    return replace(_build(path, data, "", digest), preset=found.path.name, program=found)


def _build(path: Path, data: dict[str, Any], preset: str, digest: str) -> Harness:
    presets = data.get("presets", {})
    for where, table, keys in (
        ("", data, _KEYS),
        ("install: ", data.get("install", {}), _INSTALL_KEYS),
        ("run: ", data["run"], _RUN_KEYS),
        *((f"presets.{n}: ", t, _PRESET_KEYS) for n, t in presets.items()),
    ):
        unknown = sorted(set(table) - keys)
        if unknown:
            raise HarnessError(f"{path}: {where}unknown key {unknown[0]!r}; known: {', '.join(sorted(keys))}")
    if preset and preset not in presets:
        raise HarnessError(f"{path}: no preset {preset!r}; known: {', '.join(['default', *sorted(presets)])}")
    if not _NAME.fullmatch(data["name"]):
        raise HarnessError(f"{path}: name {data['name']!r} may hold only letters, digits, '.', '_' and '-'")
    for table in (data, *presets.values()):
        protocol = table.get("protocol", data["protocol"])
        if protocol not in PROTOCOLS:
            raise HarnessError(f"{path}: protocol {protocol!r} is none of {', '.join(PROTOCOLS)}")
    agents = [table.get("user_agent", "") for table in (data, *presets.values())]
    for pattern in [*agents, *data.get("side_patterns", ())]:
        try:
            re.compile(pattern)
        except re.error as error:
            raise HarnessError(f"{path}: {pattern!r} is not a regular expression ({error})") from error
    spent = data.get("spent_status", 400)
    if spent not in ENDING:
        raise HarnessError(f"{path}: spent_status {spent!r} is none of {', '.join(map(str, ENDING))}")
    base, change = data["run"], presets.get(preset, {})
    install = data.get("install", {})
    return Harness(
        name=data["name"],
        version=data["version"],
        protocol=change.get("protocol", data["protocol"]),
        preset=preset,
        digest=digest,
        user_agent=change.get("user_agent", data.get("user_agent", "")),
        side_patterns=tuple(data.get("side_patterns", ())),
        spent_status=spent,
        install=Install(
            pip=tuple(install.get("pip", ())),
            python=install.get("python", ""),
            npm=tuple(install.get("npm", ())),
            node=install.get("node", ""),
            keep=install.get("keep", {}),
        ),
        argv=tuple(change.get("argv", base["argv"])),
        env={**base.get("env", {}), **change.get("env", {})},
        files={**base.get("files", {}), **change.get("files", {})},
    )
