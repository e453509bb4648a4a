"""lego-tasks synth and its recipe: a small library of our own, packed as an sdist, becomes tasks that are proved."""

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from legorl.commands.tasks.mutate import mutants
from legorl.commands.tasks.synth_run import Job, Result, runner
from legorl.commands.tasks.synth_source import SourceError, unpacked
from legorl.commands.tasks.synth_try import Candidate, fault_of
from legorl.commands.tasks.synth_write import reversal
from legorl.task import Task, load_task

ROOT = Path(__file__).parents[2]
TASKS = [str(Path(sys.executable).with_name("lego-tasks"))]
FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: Pairs\nVersion: 1.5\n",
    "setup.py": "import os\nos._exit(3)\n",
    "src/pairs/__init__.py": "from pairs.core import clip, merge, span\n",
    "src/pairs/core.py": '''
        def span(pair):
            """Length of a pair of ends, given in any order."""
            low, high = pair
            if low > high:
                low, high = high, low
            return high - low


        def clip(value, low, high):
            if value < low:
                return low
            if value > high:
                return high
            return value


        def merge(pairs):
            merged = []
            for low, high in sorted(pairs):
                if merged and low <= merged[-1][1]:
                    merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
                else:
                    merged.append((low, high))
            return merged


        def untested(a, b):
            return a + b if a > b else a - b
        ''',
    "tests/data/pairs.txt": "1 5\n7 3\n",
    "tests/test_core.py": """
        import itertools
        from pathlib import Path

        import pytest
        from pairs import clip, merge, span

        DATA = Path(__file__).parent / "data" / "pairs.txt"

        def test_span_of_data():
            assert [span(map(int, line.split())) for line in DATA.read_text().splitlines()] == [4, 4]

        @pytest.mark.parametrize("value, wanted", [(0, 1), (2, 2), (9, 5), (1, 1), (5, 5)])
        def test_clip(value, wanted):
            assert clip(value, 1, 5) == wanted

        def test_merge_of_nothing():
            assert merge([]) == []

        def test_merge_keeps_what_is_apart():
            assert merge([(4, 5), (1, 2)]) == [(1, 2), (4, 5)]

        def test_merge_joins():
            DATA.with_name("left.txt").write_text("")
            assert merge([(1, 3), (2, 5), (3, 4), (5, 6)]) == [(1, 6)]

        def test_fails_as_it_comes():
            assert span((1, 2)) == 3

        def test_that_hangs_if_merge_does():
            assert len(merge([(0, 1)] * 3)) == 1

        def test_that_leans_on_the_one_before():
            assert DATA.with_name("left.txt").exists()

        def test_that_is_flaky():
            flag = Path("/dev/shm/ran")
            assert not flag.exists() and not flag.write_text("")
        """,
    "tests/test_needs_more.py": "import no_such_library\n",
}


def sdist(folder: Path, files: dict[str, str] = FILES) -> Path:
    tree = folder / "pairs-1.5"
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(textwrap.dedent(text).lstrip("\n"))
    path = folder / "pairs-1.5.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree, tree.name)
    return path


def lego_tasks(*argv: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TASKS, *map(str, argv)], input=stdin, capture_output=True, text=True, env={**os.environ})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Task], str]:
    """The sdist, the tasks that the recipe made of it, and its report."""
    folder = tmp_path_factory.mktemp("synth")
    source = sdist(folder)
    done = recipe(folder, hashlib.sha256(source.read_bytes()).hexdigest())
    assert done.returncode == 0, done.stderr
    assert (folder / "set/train.list").read_text() == ""
    listed = (folder / "set/heldout.list").read_text().splitlines()
    assert len((folder / "set/checked.list").read_text().splitlines()) == 2
    return source, [load_task(path) for path in listed], done.stdout


def recipe(folder: Path, digest: str) -> subprocess.CompletedProcess[str]:
    (folder / "pins.txt").write_text(f"# ours\npairs==1.5 --hash=sha256:{digest}\n")
    settings = f"OUT={folder}/set SDISTS={folder} PINS={folder}/pins.txt HELDOUT=pairs COUNT=6 CHECK=2 SEED=3 CORES=2"
    argv = ["make", "-f", "recipes/synth.mk", *settings.split()]
    return subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.podman
def test_a_task_holds_a_bug_that_only_its_solution_tells(made: tuple[Path, list[Task], str], tmp_path: Path) -> None:
    _, tasks, _ = made
    assert len(tasks) == 6 and len({task.id for task in tasks}) == 6
    clean = (sdist(tmp_path).parent / "pairs-1.5/src/pairs/core.py").read_text()
    for task in tasks:
        assert (task.family, task.split, task.labels["library"]) == ("synth", "heldout", "pairs")
        broken = task.repo / "src/pairs/core.py"
        assert broken.read_text() != clean
        assert not (task.repo / "tests").exists() and (task.tests / "tests/data/pairs.txt").is_file()
        copy = tmp_path / task.id
        (copy / "src/pairs").mkdir(parents=True)
        (copy / "src/pairs/core.py").write_bytes(broken.read_bytes())
        subprocess.run(["git", "apply", task.path / "solution.patch"], cwd=copy, check=True)
        assert (copy / "src/pairs/core.py").read_text() == clean
        assert task.labels["target"] != "untested"  # no test would notice
        for word in ("core.py", task.kind, "test_"):
            assert word not in task.instruction
        listed = {*task.grade.fail_to_pass, *task.grade.pass_to_pass}
        assert "tests/test_core.py::test_merge_of_nothing" in listed
        assert not any(word in test for word in ("flaky", "as_it_comes", "leans") for test in listed)
        assert "from pairs import" in task.instruction or "DATA" in task.instruction


@pytest.mark.podman
def test_the_report_counts_every_mutant(made: tuple[Path, list[Task], str]) -> None:
    _, tasks, said = made
    assert "0 tasks in" in said and "6 in heldout.list" in said
    done = lego_tasks("synth-report", tasks[0].path.parent, "--json")
    (told,) = map(json.loads, done.stdout.splitlines())
    assert (told["library"], told["split"], told["tasks"]) == ("pairs-1.5", "heldout", 6)
    assert sum(told["kinds"].values()) == sum(told["levels"].values()) == 6
    assert told["tried"] >= 6 + sum(told["left_out"].values()) and told["cpu_s"] > 0


@pytest.mark.podman
def test_run_again_it_gives_the_same_tasks_from_its_notes(made: tuple[Path, list[Task], str]) -> None:
    source, tasks, _ = made
    out = tasks[0].path.parent
    notes = {path: path.read_bytes() for path in (out / ".synth").iterdir()}
    done = lego_tasks("synth", source, "--out", out, "--count", 6, "--seed", 3, "--heldout", "pairs")
    assert (done.returncode, done.stdout.splitlines()) == (0, [str(task.path) for task in tasks]), done.stderr
    assert {path: path.read_bytes() for path in (out / ".synth").iterdir()} == notes
    assert "clean run" in (out.parent / "pairs-1.5.log").read_text() and "clean run" not in done.stderr


def test_the_recipe_refuses_an_sdist_with_another_sha256(tmp_path: Path) -> None:
    sdist(tmp_path)
    done = recipe(tmp_path, "0" * 64)
    assert done.returncode != 0 and "pairs-1.5.tar.gz: FAILED" in done.stdout + done.stderr
    assert not (tmp_path / "set/pairs-1.5").exists()


QUOTED = """
    import json
    from math import floor, pi as PI

    import pytest

    STEP = int(1)
    LONG = [
        1,
        2, 2, 2,
    ]

    @pytest.mark.parametrize("value", [2])
    def test_it(value):
        "Words."
        wanted = floor(PI)
        for k in range(3):
            assert value + STEP * k == wanted, json.dumps(k)
        assert "never reached"
    """


def told_of(folder: Path, source: str) -> list[str]:
    """What synth_quote.py quotes of the only test in `source`, which fails, line by line."""
    folder.mkdir(exist_ok=True)
    file, program = folder / "test_it.py", folder / "conftest.py"
    file.write_text(source)
    program.write_text(
        "import pytest\nfrom legorl.commands.tasks.synth_quote import quoted\n"
        "@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n    yield\n"
        f"    if call.excinfo: open({str(folder / 'told')!r}, 'w').write(quoted(item, call.excinfo))\n"
    )
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file], capture_output=True)
    return (folder / "told").read_text().splitlines()


def test_what_a_failed_test_does_is_quoted_with_imports_and_values(tmp_path: Path) -> None:
    assert told_of(tmp_path, textwrap.dedent(QUOTED)) == [
        "import json",
        "from math import floor, pi as PI",
        "STEP = int(1)",
        "value = 2",
        "wanted = floor(PI)",
        "for k in range(3):",
        "    assert value + STEP * k == wanted, json.dumps(k)",
    ]


@pytest.mark.parametrize(
    "source",
    [
        'def test_it():\n    text = """\\\n[a]\n  b = 1\n"""\n    assert text == ""\n',
        'def test_it():\n    text = f"""\n{1 + 1}\nnone"""\n    assert text == b"""\nx""" or not text\n',
        "class TestIt:\n    def test_it(self):\n        t = (\n  1,\n2)\n        # words\n\n        assert not t\n",
        "def test_it():\n\ttext = 1\n\tassert not text\n",
        "def test_it():\n  # first\n  assert not 1\n",
    ],
    ids=["text", "in braces", "in brackets", "tabs", "comment"],
)
def test_what_is_quoted_does_what_the_test_does(tmp_path: Path, source: str) -> None:
    quoted = "\n".join(told_of(tmp_path, source))
    assert "assert" in quoted
    with pytest.raises(AssertionError):
        exec(quoted, {})


@pytest.mark.podman
def test_a_run_that_pytest_breaks_off_shows_nothing(tmp_path: Path) -> None:
    """A test that pytest did not come to has not failed."""
    test = "import pytest\ndef test_a(): pytest.exit('enough')\ndef test_b(): pass\n"
    source = sdist(tmp_path, {"one.py": "", "tests/test_one.py": test})

    async def run() -> Result:
        with unpacked(source) as library:
            async with runner(library, workers=1) as box:
                return (await box.run([Job("it", ("tests/test_one.py",))]))[0]

    assert asyncio.run(run()).uncollected == ("",)


def test_the_reversal_gives_a_module_at_the_top_back_byte_for_byte(tmp_path: Path) -> None:
    clean = b"def f(a):\r\n    return a > 1 and a + 2\r\n# no newline at the end: \xc3\xa9"
    source = sdist(tmp_path, {"one.py": "", "tests/test_one.py": ""})
    with unpacked(source) as library:
        (library.root / "one.py").write_bytes(clean)
        for mutant in mutants(clean, random.Random(1), 2):
            patch = reversal(library, Candidate("one.py", mutant, ()))
            work = tmp_path / mutant.rule
            work.mkdir(exist_ok=True)
            (work / "one.py").write_bytes(mutant.text)
            subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=work, input=patch, check=True)
            assert (work / "one.py").read_bytes() == clean != mutant.text


def run_of(**outcomes: str) -> Result:
    return Result("x", 1.0, 1.0, outcomes)


TEN = frozenset("abcdefghij")


@pytest.mark.parametrize(
    ("runs", "fault"),
    [
        ([run_of(**dict.fromkeys(TEN, "pass"))] * 3, "not noticed"),
        ([run_of(**dict.fromkeys(TEN, "pass") | {"a": "fail", "b": "skip"})] * 3, ""),
        ([run_of(**dict.fromkeys("abcde", "pass"))] * 3, ""),  # a test that has gone is one that fails
        ([run_of(**dict.fromkeys("abcd", "pass"))] * 3, "too few tests pass"),
        ([run_of(**dict.fromkeys(TEN, "pass") | {"a": "fail"}), run_of(**dict.fromkeys(TEN, "pass"))], "runs disagree"),
        ([replace(run_of(), late=True)], "late"),
        ([replace(run_of(**dict.fromkeys("bcdefghij", "pass")), uncollected=("x",))], "not collected"),
    ],
)
def test_what_makes_a_mutant_a_task(runs: list[Result], fault: str) -> None:
    assert fault_of(runs, TEN) == fault


def test_more_than_half_failing_is_too_many() -> None:
    stable = frozenset(f"t{k}" for k in range(20))
    assert fault_of([run_of(**{f"t{k}": "pass" for k in range(9)})], stable) == "too many tests fail"
    assert fault_of([run_of(**{f"t{k}": "pass" for k in range(10)})], stable) == ""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"PKG-INFO": "Name: a\nVersion: 1\n", "a/__init__.py": ""}, "brings no tests"),
        ({"README": "", "tests/test_a.py": ""}, "no Python package"),
        ({"src/pluggy/__init__.py": "", "tests/test_a.py": ""}, "pytest itself runs on pluggy"),
    ],
)
def test_a_source_that_cannot_be_used_says_why(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(SourceError, match=words), unpacked(sdist(tmp_path, files)):
        pass


def test_a_broken_archive_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x-1.tar.gz").write_bytes(b"no archive")
    done = lego_tasks("synth", tmp_path / "x-1.tar.gz", "--out", tmp_path / "set")
    assert done.returncode == 1 and "cannot be unpacked" in done.stderr and "Traceback" not in done.stderr


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    evil = tmp_path / "evil-1.tar.gz"
    (tmp_path / "x").write_text("x")
    with tarfile.open(evil, "w:gz") as archive:
        archive.add(tmp_path / "x", "evil-1/../../escaped")
    with pytest.raises(SourceError, match="cannot be unpacked"), unpacked(evil):
        pass


def test_a_git_repository_counts_by_its_tracked_files(tmp_path: Path) -> None:
    tree = sdist(tmp_path).parent / "pairs-1.5"
    (tree / "src/pairs/later.py").write_text("x = 1\n")
    for argv in (["init", "-q"], ["add", "setup.py", "src/pairs/core.py", "src/pairs/__init__.py", "tests"]):
        subprocess.run(["git", *argv], cwd=tree, check=True)
    with unpacked(tree) as library:
        assert library.sources == ("src/pairs/__init__.py", "src/pairs/core.py")
        assert library.python_path == ("src", ".") and library.test_paths == ("tests",)
        assert (library.name, library.version) == ("pairs", "1.5")
