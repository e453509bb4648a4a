"""Write the task of a bug: the mutated tree without its tests, the hidden tests, the reversal, the instruction."""

import shutil
import tempfile
from pathlib import Path

from legorl.commands.tasks.build import Git
from legorl.commands.tasks.folders import new_folder, sandbox_limits, size_of, task_id, to_toml
from legorl.commands.tasks.synth_clean import Clean
from legorl.commands.tasks.synth_run import MEMORY_MB
from legorl.commands.tasks.synth_source import Library
from legorl.commands.tasks.synth_story import instruction
from legorl.commands.tasks.synth_try import Candidate, Verdict
from legorl.task import TASK_FORMAT

NARROW, WIDE = 4, 20  # functions that the narrowest failing test runs: up to these, levels 0 and 1


def write(library: Library, bug: Candidate, verdict: Verdict, clean: Clean, out: Path, split: str) -> Path:
    """Write the task of `bug` below `out` unless it is there; return its folder."""
    name = task_id(f"{library.label}-{bug.mutant.rule}-{bug.key}")
    if (out / name / "task.toml").exists():
        return out / name
    size = size_of(library.root)
    with new_folder(out, name) as folder:
        shutil.copytree(library.root, folder / "repo", symlinks=True)
        for path in library.tests:
            (folder / "tests" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "repo" / path).rename(folder / "tests" / path)
        _prune(folder / "repo")
        (folder / "repo" / bug.path).write_bytes(bug.mutant.text)
        (folder / "solution.patch").write_bytes(reversal(library, bug))
        (folder / "instruction.md").write_text(instruction(library, bug.mutant, verdict), encoding="utf-8")
        table = {
            "format": TASK_FORMAT,
            "id": name,
            "family": "synth",
            "kind": bug.mutant.rule,
            "level": level(bug, verdict, clean),
            "split": split,
            "grade": {
                "runner": "pytest",
                "fail_to_pass": list(verdict.fail_to_pass),
                "pass_to_pass": list(verdict.pass_to_pass),
                "timeout_s": time_limit(verdict),
                "files": list(bug.files),
                "test_paths": list(library.test_paths),
                "tests_at": ".",
                "python_path": list(library.python_path),
            },
            "sandbox": sandbox_limits(size, MEMORY_MB),
            "labels": {
                "library": library.name,
                "version": library.version,
                "source_digest": library.digest,
                "file": bug.path,
                "target": bug.mutant.name,
            },
        }
        (folder / "task.toml").write_text(to_toml(table), encoding="utf-8")
    return out / name


def time_limit(verdict: Verdict) -> float:
    """Seconds for a grading run: many times the CPU seconds it took here, and some for each test that runs alone."""
    return float(round(max(60.0, 20 * verdict.run_s) + 2 * len(verdict.fail_to_pass)))


def level(bug: Candidate, verdict: Verdict, clean: Clean) -> int:
    """How much there is to search: the functions that the narrowest failing test runs; more for several places."""
    fewest = min(len(clean.ran[test]) for test in verdict.fail_to_pass)
    return (fewest > NARROW) + (fewest > WIDE) + (bug.mutant.sites > 1)


def _prune(folder: Path) -> None:
    """Remove the folders below `folder` that hold nothing any more."""
    for path in sorted((p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()


def reversal(library: Library, bug: Candidate) -> bytes:
    """The git diff from the mutant back to the clean file, which applied gives the clean file byte for byte."""
    with tempfile.TemporaryDirectory(prefix="legorl-synth-") as name:
        work = Path(name) / "work"
        git = Git(Path(name) / "git", work)
        file, clean = work / bug.path, (library.root / bug.path).read_bytes()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(clean)
        git("add", "-A", "--force")
        whole = git("write-tree").decode().strip()
        file.write_bytes(bug.mutant.text)
        git("add", "-A", "--force")
        broken = git("write-tree").decode().strip()
        patch = git("diff", "--binary", "--no-renames", broken, whole)
        (Path(name) / "patch").write_bytes(patch)
        git("apply", "--whitespace=nowarn", f"{name}/patch")
        if file.read_bytes() != clean:
            raise AssertionError(f"{library.label}: the reversal of {bug.path} does not give it back")
    return patch
