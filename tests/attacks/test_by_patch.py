"""Every attack that a patch can make, graded by the command: no reward, its flag; and honest work keeps its reward.

All attempts are graded in one run, because a container costs a second: `graded` is that run.
"""

import pytest
from attacks.arena import make_task
from attacks.by_patch import HONEST, PATCHES
from builders import shard
from grading import attempt, grade, make_patch, rows_of

pytestmark = pytest.mark.podman
ALL = HONEST | PATCHES


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    work = tmp_path_factory.mktemp("attacks")
    task = make_task(work / "mend-add")
    rows = [attempt(task, n, make_patch(task, work, one.files)) for n, one in enumerate(ALL.values())]
    done = grade(shard(work / "group.parquet", rows), "--out", work / "graded", "-c", 4, "--retries", 1)
    assert done.stdout == f"{work}/graded/group.parquet\n"
    return dict(zip(ALL, rows_of(done.stdout.strip()), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_reward_and_flags(graded: dict[str, dict], name: str) -> None:
    row, wanted = graded[name], ALL[name]
    assert (row["blame"], row["reward"], row["resolved"]) == ("model", wanted.reward, wanted.reward == 1), row["tests"]
    if wanted.flags is not None:
        assert set(row["flags"]) == wanted.flags


def test_columns_say_what_each_test_got(graded: dict[str, dict]) -> None:
    add, mul = "tests/test_calc.py::test_add", "tests/test_calc.py::test_mul"

    def got(name: str) -> tuple:
        row = graded[name]
        assert all(test["wanted"] == "pass" for test in row["tests"])
        return tuple({t["id"]: t["got"] for t in row["tests"]}[i] for i in (add, mul))

    assert got("solution") == ("pass", "pass")
    assert got("nothing") == ("fail", "pass")
    assert got("breaks_the_other") == ("pass", "fail")
    assert got("skips") == ("skip", "pass")
    assert got("xfails") == ("xfail", "pass")
    assert got("skips_module") == ("missing", "missing")
    assert got("exits_hard_when_called") == ("missing", "missing")
    assert got("patches_report") == ("forged", "unproven")
    assert got("replaces_setup") == ("both_ways", "pass")
    honest = graded["breaks_the_other"]
    assert honest["fail_to_pass"] == {"passed": 4, "total": 4}
    assert honest["pass_to_pass"] == {"passed": 0, "total": 1}
    assert honest["grader"].startswith("lego-grade ")
    assert honest["grade_s"] > 0
    assert honest["graded_at"] is not None
