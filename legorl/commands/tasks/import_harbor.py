"""Harbor task folders (schemas 1.0 to 1.4) as tasks.

    notes = await write_harbor(Path("hello-world"), options, folder)     # what of it is not kept, to be told

The repository is what the Dockerfile copies into its working folder, and can be reached under that folder's name. The
tests lie in /tests when the agent is gone, and the reward is what they leave in /logs/verifier. solution/solve.sh is
run once, in a sandbox, and becomes a patch. What depends on a network, on root, on other services or on a built image
cannot be had here: such a folder is passed over, or imported with a note.
"""

import os
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from legorl.commands.tasks.folders import Skip, sandbox_limits, size_of, task_id, to_toml
from legorl.commands.tasks.import_trees import Options
from legorl.task import REPO, TASK_FORMAT, pack

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
TESTS = "/tests"
REWARD = "/logs/verifier/reward"  # .json or .txt
SOLUTION = "/solution"
DISK_MB = 1024  # more than this a sandbox does not get: it is memory
SOLVE_S = 600.0
# Top folders of an image that cannot be a link.
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"}
_SYSTEM |= {"home", "lego", "opt", "ws"}


@dataclass
class Recipe:
    """What a Dockerfile says: its working folder, what it copies there, its variables, and what only an image has.

    The latter are `commands`: those that it runs, and what it copies from other images and stages.
    """

    workdir: str = "/"
    copies: list[tuple[Path, str]] = field(default_factory=list)  # source, absolute target
    commands: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def read_dockerfile(file: Path) -> Recipe:
    """Read the Dockerfile at `file`. Raises Skip for what no plain repository can stand for."""
    recipe, froms = Recipe(), 0
    text = re.sub(r"\\[ \t]*\n", " ", re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.M))
    lines = iter(text.splitlines())
    for line in filter(None, map(str.strip, lines)):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        document = re.search(r"<<-?\s*[\"']?(\w+)", rest) if word in ("RUN", "COPY", "ADD") else None
        if document and word != "RUN":
            raise Skip("its Dockerfile copies a here-document", rest)
        if document:
            for inner in lines:
                if inner.strip() == document[1]:
                    break
        if word == "FROM":
            froms += 1
            # Of several stages the last is the image; what it has of the others it copies.
            recipe = Recipe(commands=[line] if froms > 1 else [])
        elif word == "WORKDIR":
            recipe.workdir = str(PurePosixPath(recipe.workdir) / rest.strip("\"'"))
        elif word == "COPY" and re.match(r"(--\S+\s+)*--from=", rest):
            recipe.commands.append(line)
        elif word in ("COPY", "ADD"):
            recipe.copies += _copies(file.parent, recipe.workdir, rest)
        elif word == "RUN":
            recipe.commands.append(rest)
        elif word == "ENV":
            recipe.variables |= _variables(rest)
    if not froms:
        raise Skip("its Dockerfile names no image")
    return recipe


def _copies(context: Path, workdir: str, rest: str) -> list[tuple[Path, str]]:
    words = [word for word in shlex.split(rest.strip("[]").replace('",', '"')) if not re.match(r"--ch(own|mod)=", word)]
    if any(word.startswith("--") or "://" in word or "$" in word for word in words) or len(words) < 2:
        raise Skip("its Dockerfile copies from elsewhere", rest)
    *sources, target = words
    place = PurePosixPath(workdir) / target
    found = []
    for name in sources:
        matches = sorted(context.glob(name.lstrip("/"))) if name.lstrip("./") else [context]
        if not matches or not all(match.resolve().is_relative_to(context.resolve()) for match in matches):
            raise Skip("its Dockerfile copies what is not there", name)
        for match in matches:
            folder = target.endswith("/") or target in (".", "..") or len(sources) > 1 or len(matches) > 1
            found.append((match, str(place if match.is_dir() or not folder else place / match.name)))
    return found


def _variables(rest: str) -> dict[str, str]:
    if "=" not in rest.split(" ", 1)[0]:
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    return dict(word.split("=", 1) for word in shlex.split(rest) if "=" in word)


def read_settings(source: Path) -> dict[str, Any]:
    """Read task.toml and check that the folder is a task of a known shape. Raises Skip."""
    for name in ("task.toml", "instruction.md", "environment", "tests/test.sh"):
        if not (source / name).exists():
            raise Skip("not a whole task", f"no {name}")
    try:
        data = tomllib.loads((source / "task.toml").read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Skip("its task.toml cannot be read", str(error)) from error
    version = str(data.get("schema_version", data.get("version", "1.0")))
    if version not in SCHEMAS:
        raise Skip("its schema is not known", version)
    environment, verifier = data.get("environment", {}), data.get("verifier", {})
    reasons = {
        "it has several steps": data.get("steps") or (source / "steps").is_dir(),
        "it is for Windows": environment.get("os", "linux") != "linux",
        "it needs accelerators": environment.get("gpus") or environment.get("tpu"),
        "it needs other services": environment.get("mcp_servers")
        or environment.get("healthcheck")
        or any((source / "environment").glob("*compose*.y*ml")),
        "it needs skills": environment.get("skills_dir"),
        "its verifier has an image of its own": any(
            name in verifier.get("environment", {}) for name in ("docker_image", "build_timeout_sec")
        )
        or (source / "tests" / "Dockerfile").exists(),
        "its verifier collects from the agent's machine": verifier.get("collect"),
    }
    for reason, true in reasons.items():
        if true:
            raise Skip(reason)
    return data


def network_note(data: dict[str, Any]) -> str | None:
    """Return what to tell of a task that asks for a network: here it runs without one."""
    asked = [
        str(table.get("network_mode") or ("public" if table.get("allow_internet", name == "environment") else ""))
        for name, table in ((name, data.get(name, {})) for name in ("environment", "agent", "verifier"))
    ]
    wanted = next((mode for mode in asked if mode and mode != "no-network"), None)
    return f"asks for a network ({wanted}), and runs without one" if wanted else None


def megabytes(table: dict[str, Any], name: str) -> int | None:
    """Return a resource in megabytes: memory_mb, or the older memory = "4G". None where nothing is said."""
    if table.get(f"{name}_mb"):
        return int(table[f"{name}_mb"])
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", str(table.get(name, "")).upper()):
        return max(
            1, int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2, "": 1 / 1024**2}[match[2]])
        )
    return None


async def write_harbor(source: Path, options: Options, folder: Path) -> list[str]:
    """Fill `folder` with the task of the Harbor folder `source`; return what is not kept of it. Raises Skip."""
    data = read_settings(source)
    environment, verifier = data.get("environment", {}), data.get("verifier", {})
    image = str(environment.get("docker_image", "")) if options.image == "row" else options.image
    recipe = _recipe(source, environment, image)
    notes = [note for note in (network_note(data),) if note]
    if recipe.commands:
        notes.append(
            f"its Dockerfile makes {len(recipe.commands)} things that it does not copy from here; "
            f"the image {image} must have them"
        )
    repo = folder / "repo"
    repo.mkdir()
    for origin, target in recipe.copies:
        if image and not PurePosixPath(os.path.normpath(target)).is_relative_to(recipe.workdir):
            notes.append(f"its Dockerfile copies {target}; the image {image} must have it")
            continue
        _copy(origin, target, recipe.workdir, repo)
    shutil.copytree(source / "tests", folder / "tests", symlinks=True)
    variables = {**recipe.variables, **_env(environment), **_env(verifier)}
    words = [f"{name}={value}" for name, value in variables.items()]
    limits = sandbox_limits(size_of(repo) + size_of(folder / "tests"), options.memory_mb)
    limits["memory_mb"] = megabytes(environment, "memory") or limits["memory_mb"]
    limits["disk_mb"] = max(limits["disk_mb"], min(megabytes(environment, "storage") or 0, DISK_MB))
    sandbox: dict[str, Any] = {**limits, "workdir": recipe.workdir}
    sandbox |= {"image": image} if image else {}
    sandbox |= {"cpus": float(environment["cpus"])} if environment.get("cpus") else {}
    solution = await _solve(source / "solution", repo, sandbox, _env(data.get("solution", {})), notes)
    if solution is not None:
        (folder / "solution.patch").write_bytes(solution)
    table = {
        "format": TASK_FORMAT,
        "id": task_id(source.name),
        "family": options.family,
        "kind": str(data.get("metadata", {}).get("category") or "harbor"),
        "level": 0,
        "split": options.split,
        "grade": {
            "runner": "script",
            "fail_to_pass": ["reward"],
            "timeout_s": float(verifier.get("timeout_sec", 600.0)),
            "files": [],
            "test_paths": [],
            "tests_at": TESTS,
            "command": [*(["env", *words] if words else []), "bash", f"{TESTS}/test.sh"],
            "reward_file": REWARD,
        },
        "sandbox": sandbox,
        "labels": {
            "source_id": str(data.get("task", {}).get("name") or source.name),
            "difficulty": str(data.get("metadata", {}).get("difficulty", "")) or None,
        },
    }
    (folder / "task.toml").write_text(to_toml(table), encoding="utf-8")
    (folder / "instruction.md").write_bytes((source / "instruction.md").read_bytes())
    return notes


def _recipe(source: Path, environment: dict[str, Any], image: str) -> Recipe:
    dockerfile = source / "environment" / "Dockerfile"
    if not dockerfile.exists():
        raise Skip("its files are in an image", str(environment.get("docker_image", "no Dockerfile")))
    recipe = read_dockerfile(dockerfile)
    if environment.get("workdir"):
        recipe.workdir = str(environment["workdir"])
    if recipe.commands and not image:
        raise Skip(
            "its Dockerfile runs commands", f"{recipe.commands[0]!r}; give --image IMAGE that has what they bring"
        )
    parts = PurePosixPath(recipe.workdir).parts
    if len(parts) < 2 or parts[1] in _SYSTEM:
        raise Skip("its working folder is not one of its own", recipe.workdir)
    return recipe


def _env(table: dict[str, Any]) -> dict[str, str]:
    """Return a table of variables, ${NAME:-default} replaced by the default. Raises Skip where there is none."""
    found = {}
    for name, value in table.get("env", {}).items():
        match = re.fullmatch(r"\$\{(\w+)(?::-(.*))?\}", str(value))
        if match and match[2] is None:
            raise Skip("it needs a variable of the host", match[1])
        found[name] = match[2] if match else str(value)
    return found


def _copy(origin: Path, target: str, workdir: str, repo: Path) -> None:
    place = PurePosixPath(os.path.normpath(target))
    if not place.is_relative_to(workdir):
        raise Skip("its Dockerfile copies to outside of its working folder", target)
    inner = repo / place.relative_to(workdir)
    if origin.is_dir():
        shutil.copytree(origin, inner, symlinks=True, dirs_exist_ok=True)
    else:
        inner.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(origin, inner, follow_symlinks=False)


async def _solve(
    solution: Path, repo: Path, sandbox: dict[str, Any], variables: dict[str, str], notes: list[str]
) -> bytes | None:
    """Run solve.sh in a sandbox; return what it changed in the repository, None (and a note) if it did not succeed."""
    from legorl.sandbox import BASE_IMAGE, PatchUnusable, Spec, ensure_ready, open_sandbox
    from legorl.task import Limits

    if not (solution / "solve.sh").is_file():
        notes.append("has no solution: lego-tasks check cannot prove it")
        return None
    limits = Limits(
        **{name: sandbox[name] for name in ("memory_mb", "disk_mb", "processes", "cpus") if name in sandbox}
    )
    await ensure_ready(limits)
    links = ((sandbox["workdir"], REPO), (SOLUTION, f"/ws{SOLUTION}"))
    spec = Spec("solve", "import", limits, sandbox.get("image") or BASE_IMAGE, links=links, lifetime_s=2 * SOLVE_S)
    async with open_sandbox(spec) as box:
        await box.put(pack(repo), REPO)
        await box.commit(REPO)
        await box.put(pack(solution), f"/ws{SOLUTION}")
        result = await box.run(["bash", f"{SOLUTION}/solve.sh"], env=variables, cwd=REPO, timeout_s=SOLVE_S)
        if result.exit_code != 0:
            tail = result.log.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            notes.append(f"its solution did not run to its end here ({tail[0][:120]}): it has none")
            return None
        try:
            return await box.diff(REPO)
        except PatchUnusable as error:
            notes.append(f"its solution leaves no patch ({error}): it has none")
            return None
