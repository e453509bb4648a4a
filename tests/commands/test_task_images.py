"""Tasks with images of their own: another Python for the tests, and images that cannot be had, through the commands."""

import json
import subprocess
from pathlib import Path

import pytest
from builders import shard, small_task
from commands.test_rollout import loop_harness, rollout, rows_of, serving
from grading import attempt, grade
from grading import rows_of as graded_rows

from legorl.sandbox import BASE_IMAGE

CALC = "def add(a, b):\n    return a - b\n"
FIX = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
# The test holds in the other Python only, and there only if no name of the standard library is taken by the tree.
TESTS = {
    "unittest": """import sys, unittest

class TestAdd(unittest.TestCase):
    def test_add(self):
        import calc
        self.assertEqual(sys.prefix, "/opt/other")
        self.assertEqual(calc.add(1, 2), 3)
""",
    "pytest": """import sys

def test_add():
    import calc
    assert sys.prefix == "/opt/other"
    assert calc.add(1, 2) == 3
""",
    "script": "python3 -c 'import sys, calc; assert sys.prefix == \"/opt/other\" and calc.add(1, 2) == 3'\n",
}
IDS = {"unittest": "tests.test_task.TestAdd.test_add", "pytest": "tests/test_task.py::test_add", "script": "reward"}


def task_with(folder: Path, runner: str, python: str, image: str = "environment/Dockerfile") -> Path:
    """A task whose tests want the Python at /opt/other, and its image."""
    root = folder / runner
    for name in ("repo", "tests", "environment"):
        (root / name).mkdir(parents=True)
    (root / "environment" / "Dockerfile").write_text(
        f"FROM {BASE_IMAGE}\nRUN python3 -m venv --without-pip --system-site-packages /opt/other\n"
    )
    (root / "repo" / "calc.py").write_text(CALC)
    (root / "tests" / "__init__.py").touch()
    (root / "tests" / ("run.sh" if runner == "script" else "test_task.py")).write_text(TESTS[runner])
    (root / "instruction.md").write_text("make it add\n")
    command = 'command = ["bash", "tests/run.sh"]\n' if runner == "script" else ""
    (root / "task.toml").write_text(
        f'format = "task/1"\nid = "{runner}"\nfamily = "images"\nkind = "python"\nsplit = "train"\n'
        f'[grade]\nrunner = "{runner}"\nfail_to_pass = ["{IDS[runner]}"]\n{command}'
        f'[sandbox]\nimage = "{image}"\npython = "{python}"\nmemory_mb = 256\ndisk_mb = 32\nprocesses = 64\n'
    )
    return root


@pytest.mark.podman
def test_tests_run_in_the_python_of_the_task(tmp_path: Path) -> None:
    runners = ("pytest", "script")  # unittest: below
    tasks = [task_with(tmp_path / "t", runner, "/opt/other/bin/python3") for runner in runners]
    shards = [shard(tmp_path / f"{t.name}.parquet", [attempt(t, 0, FIX.encode())]) for t in tasks]
    done = grade(*shards, "--out", tmp_path / "graded", "-c", "3")
    rows = [row for path in done.stdout.split() for row in graded_rows(path)]
    assert {row["task_id"]: row["reward"] for row in rows} == dict.fromkeys(runners, 1.0), rows


MAKE = [{"match": "^make", "text": "type -p python3 > which.txt"}, {"match": "^rc [0-9]+$", "text": "DONE"}]


@pytest.mark.podman
def test_an_image_that_cannot_be_had_costs_its_task_only(tmp_path: Path, tiny_model: Path) -> None:
    """In rollout, and in grade where the image went missing in between: its outcome, and the other tasks' own."""
    folder = tmp_path / "t"
    good = task_with(folder, "pytest", "/opt/other/bin/python3")
    broken, missing = small_task(folder, "broken", "make it"), small_task(folder, "missing", "make it")
    (broken / "environment").mkdir()
    (broken / "environment" / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nRUN echo no compiler >&2; exit 7\n")
    for task, image in ((broken, "environment/Dockerfile"), (missing, "localhost/legorl-absent:1")):
        with (task / "task.toml").open("a") as toml:
            toml.write(f'image = "{image}"\n')
    script = tmp_path / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, MAKE)))
    with serving(tiny_model, script) as (socket, _):
        done = rollout(
            *(good, broken, missing, "--out", tmp_path / "out", "--harness", loop_harness(tmp_path)),
            *("-n", 2, "-c", 3, "--retries", 1),
            serve=socket,
        )
    assert done.returncode == 3 and "2 of 6 attempts were lost" in done.stderr, done.stderr
    assert "making the image" in done.stderr and "no image for one task" in done.stderr
    rows = {row["task_id"]: row for row in rows_of(done)}
    ends = {name: (row["outcome"], row["blame"], len(row["history"])) for name, row in rows.items()}
    assert ends == {
        "pytest": ("finished", "model", 0),
        "broken": ("task_broken", "task", 0),
        "missing": ("image_missing", "infra", 1),
    }
    # The agent finds the task's Python first, too.
    assert b"+/opt/other/bin/python3\n" in rows["pytest"]["patch"]
    assert "no compiler" in rows["broken"]["detail"] and "exit status 7" in rows["broken"]["detail"]
    assert "localhost/legorl-absent:1" in rows["missing"]["detail"] and rows["missing"]["turns"] == []

    tried = [attempt(task, n, b"") for n, task in enumerate((broken, missing))]
    two = [shard(tmp_path / f"{row['task_id']}.parquet", [row]) for row in tried]
    graded = grade(*two, "--out", tmp_path / "graded", "-c", "2", "--max-lost", "1", check=False)
    assert graded.returncode == 1 and "0 resolved; 1 take no grade, 1 lost" in graded.stderr, graded.stderr
    verdicts = {row["task_id"]: row for path in graded.stdout.split() for row in graded_rows(path)}
    ends = {name: (row["outcome"], row["blame"], row["reward"]) for name, row in verdicts.items()}
    assert ends == {"broken": ("task_broken", "task", None), "missing": ("image_missing", "infra", None)}
    assert "no compiler" in verdicts["broken"]["detail"]


LIBRARY = "echo /opt/other/lib >/etc/ld.so.conf.d/other.conf && ldconfig"
PYENV = Path("~/.pyenv/versions").expanduser()


@pytest.mark.slow
@pytest.mark.podman
@pytest.mark.parametrize("version", ["3.6", "3.8"])
def test_tests_run_in_another_version_of_python(tmp_path: Path, version: str) -> None:
    """Where this machine has one to copy: the oldest that the programs beside the tests know, and one before 3.10."""
    home = next(PYENV.glob(f"{version}.*"), None)
    if home is None:
        pytest.skip(f"no Python {version} below {PYENV}")
    task = task_with(tmp_path, "unittest", "/opt/other/bin/python3")
    subprocess.run(["cp", "-a", home, task / "environment" / "python"], check=True)
    subprocess.run(["rm", "-rf", task / "environment/python/share", *_parts(task, "test", "ensurepip", "idlelib")])
    (task / "environment" / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nCOPY python /opt/other\nRUN {LIBRARY}\n")
    test = task / "tests" / "test_task.py"
    test.write_text(
        test.read_text().replace(
            '"/opt/other")',
            f'"/opt/other"); self.assertEqual(sys.version_info[:2], {tuple(map(int, version.split(".")))})',
        )
    )
    rows = [attempt(task, 0, FIX.encode()), attempt(task, 1, b"")]
    done = grade(shard(tmp_path / "g.parquet", rows), "--out", tmp_path / "graded", "-v")
    assert [row["reward"] for path in done.stdout.split() for row in graded_rows(path)] == [1.0, 0.0], done.stderr


def _parts(task: Path, *names: str) -> list[Path]:
    return [path for name in names for path in (task / "environment" / "python" / "lib").glob(f"python3*/{name}")]
