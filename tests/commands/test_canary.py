"""Canaries: which tasks get one, what is written, and that no honest way passes one. test_tasks_check grades one."""

import difflib
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from builders import small_task
from commands.task_runs import outcomes_of, ways_of

from legorl.commands.tasks import shell, snippets
from legorl.commands.tasks.build import write_tasks
from legorl.commands.tasks.canary import choose, with_twin, write_canary
from legorl.task import Task, load_task


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """One task of every kind of the families `shell` and `snippets`."""
    drafts = [
        shell.make(kind, 0, "train" if kind in list(shell.KINDS)[:35] else "unseen", 0, 3) for kind in shell.KINDS
    ]
    return [load_task(p) for p in write_tasks([*drafts, *snippets.drafts()], tmp_path_factory.mktemp("set") / "set")]


def test_no_honest_way_passes_a_canary_of_any_kind(tasks: list[Task], tmp_path: Path) -> None:
    sources = choose(tasks, 1.0, seed=1)
    assert len(sources) > 0.9 * len(tasks), {t.id for t in tasks} - {t.id for t in sources}
    canaries = [load_task(write_canary(task, 1, tmp_path / "canaries")) for task in sources]
    jobs = [job for canary, source in zip(canaries, sources, strict=True) for job in _ways(canary, source, tmp_path)]
    results = iter(outcomes_of(jobs))
    for canary in canaries:
        names = {test.partition("::")[2] for test in canary.grade.fail_to_pass}
        for way in ("empty", "solution"):
            got = next(results)
            failed = {name for name in names if got.get(name) != "passed"}
            assert failed, f"{canary.id}: {way} passes"
            if way == "solution":
                assert failed == {canary.canary.partition("::")[2]}, canary.id


def _ways(canary: Task, source: Task, place: Path) -> list[tuple[Path, str]]:
    """The canary's repository as it is, and with its solution, each with the canary's tests."""
    if "solution_command" in canary.labels:
        return ways_of(canary, place)[:2]
    text = (canary.tests / "test_task.py").read_text()
    folders = [place / canary.id / way for way in ("empty", "patch")]
    for folder in folders:
        shutil.copytree(canary.repo, folder)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=canary.solution, cwd=folders[1], check=True)
    return [(folder, text) for folder in folders]


def test_a_canary_is_its_task_but_for_one_test(tasks: list[Task], tmp_path: Path) -> None:
    source = choose(tasks, 0.01, seed=5)[0]
    canary = load_task(write_canary(source, 5, tmp_path))
    assert canary.id == f"{source.id}-canary" and canary.labels["canary_of"] == source.digest
    assert canary.grade.fail_to_pass == (*source.grade.fail_to_pass, canary.canary)
    assert (canary.instruction, canary.solution) == (source.instruction, source.solution)
    assert (canary.split, canary.family, canary.kind, canary.level) == (
        *(source.split, source.family, source.kind),
        source.level,
    )
    old, new = ((t.tests / "test_task.py").read_text() for t in (source, canary))
    changes = [line[0] for line in difflib.ndiff(old.splitlines(), new.splitlines())]
    assert "-" not in changes and "+" in changes and not source.canary
    # Again: it stays, unless its task has changed.
    before = canary.path.stat().st_mtime_ns
    assert write_canary(source, 5, tmp_path).stat().st_mtime_ns == before
    other = load_task(shutil.copytree(source.path, tmp_path / "other" / source.path.name))
    (other.path / "instruction.md").write_text("Something else.\n")
    assert load_task(write_canary(load_task(other.path), 5, tmp_path)).instruction == "Something else."


def test_the_choice_depends_on_the_seed_and_the_ids_alone(tasks: list[Task]) -> None:
    chosen = {seed: [t.id for t in choose(tasks, 0.1, seed)] for seed in (1, 2)}
    assert len(chosen[1]) == round(0.1 * len(tasks)) and chosen[1] != chosen[2]
    assert [t.id for t in choose(tasks[::-1], 0.1, 1)] == chosen[1]
    assert len(choose(tasks, 0.0001, 1)) == 1


def test_a_task_whose_tests_cannot_be_turned_round_gets_none(tmp_path: Path) -> None:
    path = small_task(tmp_path, "a")
    (path / "tests" / "test_task.py").write_text("def test_it():\n    import hello\n")
    assert choose([load_task(path)], 1.0, 0) == []


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_copy_keeps_decorators_and_class_and_takes_a_free_name(newline: str) -> None:
    source = (
        "import pytest\n\n\nclass TestA:\n    '\x0c'\n\n    @pytest.mark.parametrize(\n        'n', [1, 2]\n    )\n"
        "    def test_x(self, n):\n        assert n + 1 == 3\n\n    def test_x_2(self):\n        pass"
    ).replace("\n", newline)
    made = with_twin(source, "TestA.test_x", random.Random(0))
    assert made is not None
    text, old, new = made
    assert (old, new) == ("test_x", "test_x_3")
    assert text.count("@pytest.mark.parametrize(") == 2 and f"    def test_x_3(self, n):{newline}" in text
    assert text.startswith(source[: source.index("    def test_x_2")].rstrip()) and text.endswith("pass")
    space: dict = {"pytest": pytest}
    exec(compile(text, "t", "exec"), space)
    assert [name for name in vars(space["TestA"]) if name.startswith("test")] == ["test_x", "test_x_3", "test_x_2"]
    space["TestA"]().test_x(2)
    with pytest.raises(AssertionError):
        space["TestA"]().test_x_3(2)
