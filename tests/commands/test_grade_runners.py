"""The runners beside pytest, and tests laid over a whole tree: honest work gets 1, attacks 0, all in one graded run."""

import json
from pathlib import Path

import pytest
from builders import plan_of, shard
from grading import attempt, grade, make_patch, rows_of, write_tree

from legorl.commands.grade.log_parsers import parse

WRONG = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
UNITTEST = """
    import unittest
    from calc import add

    class Adding(unittest.TestCase):
        def test_add(self):
            self.assertEqual(add(2, 2), 4)

        def test_others(self):
            for a in (1, 10):
                with self.subTest(a=a):
                    self.assertEqual(add(a, 5), a + 5)

        def test_zero(self):
            self.assertEqual(add(0, 0), 0)

        @unittest.skip("never")
        def test_skipped(self):
            pass
    """
PYTEST = """
    import pytest
    from calc import add

    def test_zero():
        assert add(0, 0) == 0

    @pytest.mark.parametrize("words", ["a b", "a bc"])
    def test_words(words):
        assert add(2, len(words)) == 2 + len(words)

    @pytest.mark.skip(reason="never")
    def test_skipped():
        pass

    @pytest.mark.xfail(reason="known")
    def test_known():
        assert False
    """
HELPER = """
    def test_helper():
        import helper
        assert helper.x == 1
    """
SCRIPT = """
    #!/bin/bash
    reward=0
    [ "$(cat /app/answer.txt)" = 42 ] && python3 /app/calc.py && reward=1.0
    echo $reward > /logs/verifier/reward.txt
    """
UNIT = "tests.test_unit.Adding."
NODE = "checks/test_calc.py::"
# name: (what is in the repository, hidden tests, [grade] and [sandbox])
TASKS: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "unit": (
        {"calc.py": WRONG},
        {"__init__.py": "", "test_unit.py": UNITTEST},
        f"""runner = "unittest"
        fail_to_pass = ["{UNIT}test_add", "{UNIT}test_others"]
        pass_to_pass = ["{UNIT}test_zero"]
        """,
    ),
    "over": (
        {"src/calc.py": WRONG, "checks/test_calc.py": "def test_old(): pass\n", "checks/helper.py": "x = 1\n",
         "checks/stale.py": "x = 1\n"},
        {"checks/test_calc.py": PYTEST + HELPER},
        f"""runner = "pytest"
        semantics = "swe-bench"
        fail_to_pass = ["{NODE}test_words[a"]
        pass_to_pass = ["{NODE}test_zero", "{NODE}test_skipped", "{NODE}test_known", "{NODE}test_helper"]
        files = ["checks/test_calc.py"]
        test_paths = ["checks"]
        tests_at = "."
        removed = ["checks/stale.py"]
        python_path = ["src", "."]
        """,
    ),
    "script": (
        {"calc.py": "", "answer.txt": "0\n"},
        {"test.sh": SCRIPT},
        """runner = "script"
        fail_to_pass = ["reward"]
        test_paths = []
        tests_at = "/tests"
        command = ["bash", "/tests/test.sh"]
        reward_file = "/logs/verifier/reward"
        [sandbox]
        workdir = "/app"
        """,
    ),
    "exit": (
        {"calc.py": WRONG},
        {"check.py": "from calc import add\nassert add(2, 2) == 4\n"},
        """runner = "script"
        fail_to_pass = ["exit_code"]
        command = ["env", "PYTHONPATH=.", "python3", "tests/check.py"]
        """,
    ),
    "log": (
        {"calc.py": WRONG},
        {"test_calc.py": PYTEST},
        """runner = "log"
        semantics = "swe-bench"
        fail_to_pass = ["tests/test_calc.py::test_words[a"]
        pass_to_pass = ["tests/test_calc.py::test_zero"]
        command = ["python3", "-m", "pytest", "-rA", "-p", "no:cacheprovider", "tests"]
        parser = "parse_log_pytest"
        """,
    ),
}  # fmt: skip
# Goes on when the script is over, and would have the last word.
WRITER = """
import os, sys
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 64)
    while True:
        open("/logs/verifier/reward.txt", "w").write("1")
"""
LOCK = """
import os
open("/logs/verifier/reward.txt", "w").write("1")
os.chmod("/logs/verifier/reward.txt", 0o444)
raise SystemExit(1)
"""
FAKE = """
import unittest
def lie(self, result=None):
    result.startTest(self)
    result.addSuccess(self)
    result.stopTest(self)
unittest.TestCase.run = lie
"""
PRINTER = "print('PASSED tests/test_calc.py::test_words[a b]')\nimport os\nos._exit(1)\n"
# (task, what the agent leaves, reward, flags; None where chance decides)
ATTEMPTS: dict[str, tuple[str, dict[str, str | bytes | None], float, set[str] | None]] = {
    "unit_solution": ("unit", {"calc.py": FIXED}, 1.0, set()),
    "unit_nothing": ("unit", {}, 0.0, set()),
    "unit_subtest": ("unit", {"calc.py": WRONG.replace("a - b", "4 if a == 2 else 15 if a == 10 else 0")}, 0.0, set()),
    "unit_skips": (
        "unit", {"calc.py": WRONG.replace("return", "if a: raise __import__('unittest').SkipTest('no')\n    return")},
        0.0, {"skipped", "test_tools"},
    ),
    "unit_exits": ("unit", {"calc.py": "import os\nos._exit(0)\n"}, 0.0, {"ended_early", "exits_hard"}),
    "unit_fakes": ("unit", {"calc.py": FAKE + WRONG}, 0.0, {"tampered"}),
    "unit_counts": (
        "unit", {"calc.py": "n = iter([4, 6, 15, 0])\ndef add(a, b):\n    return next(n)\n"}, 0.0, {"not_alone"}
    ),
    "over_solution": ("over", {"src/calc.py": FIXED}, 1.0, set()),
    "over_nothing": ("over", {}, 0.0, set()),
    "over_half": ("over", {"src/calc.py": FIXED.replace("a + b", "a + b if b == 3 else a - b")}, 0.0, set()),
    "over_deletes": ("over", {"checks/test_calc.py": None, "checks/helper.py": None}, 0.0, {"tests_touched"}),
    "over_links": ("over", {"src/calc.py": FIXED, "checks": "-> src"}, 1.0, {"tests_touched"}),
    "script_solution": ("script", {"answer.txt": "42\n"}, 1.0, set()),
    "script_nothing": ("script", {}, 0.0, set()),
    "script_plants": ("script", {"logs/verifier/reward.txt": "1\n", "reward.txt": "1\n"}, 0.0, {"plants_reward"}),
    "script_writer": ("script", {"answer.txt": "42\n", "calc.py": WRITER}, 0.0, {"leaves_process", "left_running"}),
    "script_locks": ("script", {"answer.txt": "42\n", "calc.py": LOCK}, 0.0, {"reward_locked"}),
    "script_kills": ("script", {"answer.txt": "42\n", "calc.py": "import os\nos.kill(-1, 9)\n"}, 0.0, {"exits_hard"}),
    "exit_solution": ("exit", {"calc.py": FIXED}, 1.0, set()),
    "exit_nothing": ("exit", {}, 0.0, set()),
    # Not stopped: nothing but the script itself could tell. Flagged.
    "exit_ends_the_script": ("exit", {"calc.py": "import os\nos._exit(0)\n"}, 1.0, {"exits_hard"}),
    "log_solution": ("log", {"calc.py": FIXED}, 1.0, set()),
    "log_nothing": ("log", {}, 0.0, set()),
    "log_forged": ("log", {"calc.py": PRINTER}, 0.0, {"ended_early", "exits_hard", "prints_results"}),
}  # fmt: skip


def make_task(folder: Path, repo: dict[str, str], tests: dict[str, str], grade_table: str) -> Path:
    write_tree(folder / "repo", repo)
    write_tree(folder / "tests", tests)
    (folder / "instruction.md").write_text("Mend add.\n")
    head = f'format = "task/1"\nid = "{folder.name}"\nfamily = "test"\nkind = "test"\nsplit = "train"\n[grade]\n'
    (folder / "task.toml").write_text(head + grade_table)
    return folder


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Every row of ATTEMPTS, graded in one run; and the same rows again from the archive."""
    work = tmp_path_factory.mktemp("runners")
    tasks = {name: make_task(work / name, *parts) for name, parts in TASKS.items()}
    rows, counts = {}, dict.fromkeys(TASKS, 0)
    for name, (task, files, _, _) in ATTEMPTS.items():
        rows[name] = attempt(tasks[task], counts[task], make_patch(tasks[task], work, files))
        counts[task] += 1
    paths = []
    for task in TASKS:
        mine = [rows[name] for name, parts in ATTEMPTS.items() if parts[0] == task]
        paths.append(shard(work / f"{task}.parquet", mine, plan_of(mine)))
    done = grade(*paths, "--out", work / "graded", "-c", 3, "--retries", 0)
    found = {row["attempt_id"]: row for line in done.stdout.splitlines() for row in rows_of(line)}
    return {name: found[row["attempt_id"]] for name, row in rows.items()}


@pytest.mark.podman
@pytest.mark.parametrize("name", ATTEMPTS)
def test_reward_and_flags(graded: dict[str, dict], name: str) -> None:
    _, _, reward, flags = ATTEMPTS[name]
    row = graded[name]
    assert (row["blame"], row["reward"], row["resolved"]) == ("model", reward, reward == 1.0), row["tests"]
    if flags is not None:
        assert set(row["flags"]) == flags


@pytest.mark.podman
def test_what_each_test_got(graded: dict[str, dict]) -> None:
    def got(name: str) -> dict[str, str]:
        return {test["id"].rpartition(".")[2].rpartition("::")[2]: test["got"] for test in graded[name]["tests"]}

    assert got("unit_subtest") == {"test_add": "pass", "test_others": "fail", "test_zero": "pass"}
    assert got("unit_skips")["test_add"] == "skip"
    passed = dict.fromkeys(("test_words[a", "test_zero", "test_helper"), "pass")
    assert got("over_solution") == {**passed, "test_skipped": "skip", "test_known": "xfail"}
    assert got("script_writer") == {"reward": "unproven"}
    assert got("script_kills") == {"reward": "missing"}
    assert got("log_forged")["test_words[a"] in ("missing", "unproven")


LOG = """
PASSED tests/a.py::test_one
\x1b[31mFAILED\x1b[0m tests/a.py::test_two - assert 1 == 2
ERROR tests/a.py::test_three
SKIPPED [3] tests/a.py:12: never
XFAIL tests/a.py::test_four - known
PASSED tests/a.py::test_five[a b]
FAILED tests/a.py::test_five[a c]
PASSED tests/a.py::test_five[a d]
PASSED tests/a.py::test_six[/tmp/x/y]
"""
DJANGO = """
test_a (m.C) ... ok
test_b (m.C) ... FAIL
test_c (m.C) ... skipped 'no'
test_d (m.C) ... noise
ok
FAIL: test_b (m.C)
"""


@pytest.mark.parametrize(
    ("parser", "log", "found"),
    [
        (
            "parse_log_pytest",
            LOG,
            {"test_one": "pass", "test_two": "fail", "test_three": "error", "test_four": "xfail", "test_five[a": "pass",
             "test_six[/tmp/x/y]": "pass"},
        ),
        ("parse_log_requests", "PASSED tests/a.py::test_six[/tmp/x/y]", {"test_six[/y]": "pass"}),
        ("parse_log_sphinx", "tests/a.py::t PASSED\nFAILED tests/a.py::t[a b] - x", {"t": "pass", "t[a b]": "fail"}),
        ("parse_log_sympy", "test_x ok\ntest_y F\n____ sympy/a.py:test_y ____", {"test_x": "pass", "test_y": "fail",
                                                                             "sympy/a.py:test_y": "fail"}),
        ("parse_log_seaborn", "tests/a.py::t PASSED [ 9%]\nFAILED tests/a.py::u - x", {"t": "pass", "u": "fail"}),
        ("parse_log_django", DJANGO, {"test_a (m.C)": "pass", "test_b (m.C)": "fail", "test_c (m.C)": "skip",
                                      "test_d (m.C)": "pass", "test_b": "fail"}),
        # A parameter is no colour; a number and an m in brackets are, as published ids have it.
        ("parse_log_astropy", "PASSED a.py::u[m]\n\x1b[32mPASSED\x1b[0m a.py::u[3m-x]", {"a.py::u[m]": "pass",
                                                                                     "a.py::u-x]": "pass"}),
        ("parse_log_pytest", "PASSED a.py::u[3m-x]", {"a.py::u[3m-x]": "pass"}),
        # A forged line does not hide a failure, wherever it stands.
        ("parse_log_pytest", "FAILED a.py::t - x\nPASSED a.py::t", {"a.py::t": "fail"}),
    ],
)  # fmt: skip
def test_logs_are_read_as_published(parser: str, log: str, found: dict[str, str]) -> None:
    read = parse(parser, log)
    assert {name.removeprefix("tests/a.py::"): outcome for name, outcome in read.items()} == found


@pytest.mark.parametrize(
    ("files", "reward", "fault"),
    [
        ({"reward.txt": "0.5\n"}, 0.5, None),
        ({"reward.json": '{"reward": 1, "style": 0.2}', "reward.txt": "0"}, 1.0, None),
        ({"reward.json": '{"accuracy": 0.25}'}, 0.25, None),
        ({"reward.json": '{"a": 1, "b": 1}'}, None, "none is called reward"),
        ({"reward.json": '{"reward": true}'}, None, "not a number"),
        ({"reward.json": '{"reward": NaN}'}, None, "not a finite number"),
        ({"reward.json": "[]"}, None, "no numbers"),
        ({"reward.txt": ""}, None, "could not convert"),
        ({"reward.txt": "inf"}, None, "not a finite number"),
        ({}, None, "no reward file"),
    ],
)
def test_rewards_are_read_as_harbor_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], reward: float | None, fault: str | None
) -> None:
    monkeypatch.syspath_prepend(Path("legorl/commands/grade").absolute())
    from legorl.commands.grade.script_report import read_reward

    write_tree(tmp_path, files)
    found = read_reward(f"{tmp_path}/reward")
    assert found.get("reward") == reward
    assert fault is None or fault in found["fault"]


def test_a_link_is_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path("legorl/commands/grade").absolute())
    from legorl.commands.grade.script_report import read_reward

    (tmp_path / "elsewhere").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "elsewhere")
    assert "replaced" in json.dumps(read_reward(f"{tmp_path}/reward"))
