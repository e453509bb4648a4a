"""One row in the published shape of each data set that lego-tasks import swe-bench reads, through Parquet and JSON."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from imports import Clone, write_rows

from legorl.commands.tasks.folders import Skip
from legorl.commands.tasks.git_trees import Trees
from legorl.commands.tasks.import_rows import parse_row, read_rows, write_row
from legorl.commands.tasks.import_rows import test_command as command_of
from legorl.commands.tasks.import_trees import Options
from legorl.task import Task, load_task

BUGGY, FIXED = b"def add(a, b):\n    return a - b\n", b"def add(a, b):\n    return a + b\n"
OLD, NEW = b"def test_zero():\n    pass\n", b"def test_zero():\n    pass\n\n\ndef test_add():\n    pass\n"
NODES = ["tests/test_calc.py::test_add"], ["tests/test_calc.py::test_zero"]
SCRIPT = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
python -m pip install -e .
git checkout {base} tests/test_calc.py
git apply -v - <<'EOF_114329324912'
diff --git a/tests/test_calc.py b/tests/test_calc.py
EOF_114329324912
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
git checkout {base} tests/test_calc.py
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A clone and what its rows say of it, in no data set's shape yet."""
    clone = Clone(tmp_path_factory.mktemp("rows") / "own__calc")
    base = clone.commit({b"calc.py": BUGGY, b"tests/test_calc.py": OLD})
    fixed = clone.commit({b"calc.py": FIXED, b"tests/test_calc.py": NEW}, "fixed", base)
    return {
        "git_dir": clone.folder / ".git",
        "core": {
            "repo": "own/calc",
            "instance_id": "own__calc-7",
            "base_commit": base,
            "patch": clone.diff(base, fixed, "calc.py"),
            "test_patch": clone.diff(base, fixed, "tests"),
            "problem_statement": "add subtracts",
            "hints_text": "",
            "created_at": "2020-01-02T03:04:05Z",
            "version": "1.0",
        },
        "fixed": fixed,
        "bug": clone.diff(fixed, base, "calc.py"),
    }


def texts() -> dict[str, str]:
    return {"FAIL_TO_PASS": json.dumps(NODES[0]), "PASS_TO_PASS": json.dumps(NODES[1])}


def lists() -> dict[str, list[str]]:
    return {"FAIL_TO_PASS": NODES[0], "PASS_TO_PASS": NODES[1]}


def published(place: dict[str, Any], command: str = "pytest -rA tests/test_calc.py") -> dict[str, str]:
    """The columns of 2026 that say how to run the tests."""
    return {
        "eval_script": SCRIPT.format(base=place["core"]["base_commit"], command=command),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "image": "swebench/sweb.eval.x86_64.own_1776_calc-7:latest",
    }


def row_of(name: str, place: dict[str, Any]) -> dict[str, Any]:
    core, commit = place["core"], {"environment_setup_commit": place["core"]["base_commit"]}
    meta = {"failed_lite_validators": ["has_short_problem_statement"], "has_test_patch": True, "is_lite": False}
    return {
        "full": lambda: core | texts() | commit,
        "verified": lambda: core | texts() | commit | {"difficulty": "<15 min fix"} | published(place),
        "multimodal": lambda: core | texts() | published(place) | {"image_assets": '{"problem_statement": []}'},
        "multilingual": lambda: core | lists() | published(place),
        "gym": lambda: core | lists(),
        "extra": lambda: core | lists() | commit | {"meta": meta, "created_at": datetime.datetime(2020, 1, 2)},
        "smith": lambda: {
            **{key: core[key] for key in ("problem_statement", "created_at")},
            **lists(),
            "instance_id": f"own__calc.{place['fixed'][:8]}.func_pm_op_change__abc123",
            "repo": f"swesmith/own__calc.{place['fixed'][:8]}",
            "image_name": "swesmith.x86_64.own_1776_calc",
            "base_commit": place["fixed"],
            "patch": place["bug"],
        },
    }[name]()


SETS = ("full", "verified", "multimodal", "multilingual", "gym", "extra", "smith")


def imported(raw: dict[str, Any], place: dict[str, Any], folder: Path, options: Options | None = None) -> Task:
    file = write_rows(folder / ("rows.parquet" if raw.get("meta") else "rows.jsonl"), [raw])
    (again,) = read_rows(file)
    target = folder / "task"
    target.mkdir()
    with Trees(place["git_dir"]) as trees:
        write_row(parse_row(again), trees, options or Options(), target)
    return load_task(target)


@pytest.mark.parametrize("name", SETS)
def test_a_row_of_each_data_set_becomes_the_same_task(place: dict[str, Any], tmp_path: Path, name: str) -> None:
    task = imported(row_of(name, place), place, tmp_path)
    assert (task.grade.runner, task.kind, task.image) == ("pytest", "own/calc", "")
    assert (list(task.grade.fail_to_pass), list(task.grade.pass_to_pass)) == NODES
    assert (task.repo / "calc.py").read_bytes() == BUGGY
    assert (task.tests / "tests/test_calc.py").read_bytes() == NEW
    assert b"+    return a + b" in task.solution
    assert task.labels["created_at"].startswith("2020-01-02")
    assert task.labels.get("difficulty") == ("<15 min fix" if name == "verified" else None)


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("verified", "swebench/sweb.eval.x86_64.own_1776_calc-7:latest"),
        ("smith", "swesmith.x86_64.own_1776_calc"),
    ],
)
def test_the_image_that_a_row_names(place: dict[str, Any], tmp_path: Path, name: str, image: str) -> None:
    task = imported(row_of(name, place), place, tmp_path, Options(image="row"))
    assert task.image == image
    # Their tests run in a conda environment, where the row's own script says so.
    assert task.python == ("/opt/miniconda3/envs/testbed/bin/python" if name == "verified" else "")


def test_rows_of_other_languages_and_other_rules_are_passed_over(place: dict[str, Any], tmp_path: Path) -> None:
    names = {"FAIL_TO_PASS": ["TestAdd/zero"], "PASS_TO_PASS": []}
    go = row_of("multilingual", place) | names | {"log_parser": "parse_log_gotest"}
    with pytest.raises(Skip, match="not pytest's"):
        imported(go, place, tmp_path)
    (tmp_path / "task").rmdir()
    absent = row_of("multimodal", place) | names | {"eval_type": "fail_only", "log_parser": "parse_log_django"}
    with pytest.raises(Skip, match="absent tests count as passed"):
        imported(absent, place, tmp_path)
    (tmp_path / "task").rmdir()
    with pytest.raises(Skip, match="no problem_statement"):
        imported(row_of("smith", place) | {"problem_statement": ""}, place, tmp_path)


def test_ids_of_another_kind_are_read_from_a_log(place: dict[str, Any], tmp_path: Path) -> None:
    command = "PYTHONWARNINGS='ignore::UserWarning' bin/test -C --verbose tests/test_calc.py"
    row = row_of("verified", place) | published(place, command) | {"log_parser": "parse_log_sympy"}
    names = {"FAIL_TO_PASS": '["test_add"]', "PASS_TO_PASS": '["test_zero"]'}
    task = imported(row | names, place, tmp_path)
    assert (task.grade.runner, task.grade.parser) == ("log", "parse_log_sympy")
    entering = "source /opt/miniconda3/bin/activate\nconda activate testbed\n"
    assert task.grade.command == ("bash", "-c", entering + command)
    # As newer graders rewrite it: the exit code is that of the tests, not of keeping it.
    kept = row["eval_script"].replace(": '>>>>> End", "SWEBENCH_TEST_EXIT_CODE=$?\n: '>>>>> End")
    assert command_of(kept) == entering + command
