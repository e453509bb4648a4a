"""Run a task's hidden tests without a container, fast enough for every kind; test_tasks_check tries lego-grade.

outcomes_of([(folder with a repository in it, test source), ...]) -> [{test name: "passed" or the error}, ...]
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from legorl.commands.tasks.build import run_command
from legorl.task import Task

# Each repository gets a process of its own (a fork): modules and working folder cannot leak from one to the next.
RUNNER = """
import json, os, sys
sys.dont_write_bytecode = True
jobs = json.load(sys.stdin)
if any("import pytest" in source for _, source in jobs):
    import pytest  # once, not once a fork
for folder, source in jobs:
    if os.fork() == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        space, got = {}, {}
        try:
            exec(compile(source, "test_task.py", "exec"), space)
        except BaseException as error:
            got["*"] = repr(error)
        for name in [name for name in space if name.startswith("test_")]:
            try:
                space[name]()
                got[name] = "passed"
            except BaseException as error:
                got[name] = repr(error)[:300]
        print(json.dumps(got), flush=True)
        os._exit(0)
    os.wait()
"""


def outcomes_of(jobs: list[tuple[Path, str]]) -> list[dict[str, str]]:
    text = json.dumps([(str(folder), source) for folder, source in jobs])
    done = subprocess.run([sys.executable, "-c", RUNNER], input=text, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def ways_of(task: Task, place: Path) -> list[tuple[Path, str]]:
    """Lay out the task's repository three times under `place`: as it is, with solution.patch, with solution_command."""
    source = (task.tests / "test_task.py").read_text()
    folders = [place / task.id / way for way in ("empty", "patch", "command")]
    for folder in folders:
        shutil.copytree(task.repo, folder, symlinks=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=task.solution, cwd=folders[1], check=True)
    run_command(task.labels["solution_command"], folders[2])
    return [(folder, source) for folder in folders]


def complaints(task: Task, results: list[dict[str, str]]) -> list[str]:
    """What does not hold of one task, given what its tests got in the three ways."""
    names = {test.partition("::")[2] for test in (*task.grade.fail_to_pass, *task.grade.pass_to_pass)}
    found = []
    for way, got in zip(("empty", "patch", "command"), results, strict=True):
        if set(got) != names:
            found.append(f"{way}: tests are {sorted(got)}, task.toml lists {sorted(names)}")
        for test in (*task.grade.fail_to_pass, *task.grade.pass_to_pass):
            passes = got.get(test.partition("::")[2]) == "passed"
            if passes != (way != "empty" or test in task.grade.pass_to_pass):
                found.append(f"{way}: {test}: {got.get(test.partition('::')[2])}")
    return found
