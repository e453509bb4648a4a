"""lego-tasks import: rows, Harbor folders and commits become tasks, byte for byte and without what came later."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from imports import TASKS, Clone, git, lego_import, tree, write_rows

from legorl.commands.tasks.git_trees import Trees, find_clone
from legorl.commands.tasks.import_rows import parse_row
from legorl.commands.tasks.import_rows import test_command as command_of
from legorl.commands.tasks.import_trees import python_path
from legorl.commands.tasks.import_trees import test_paths as paths_of
from legorl.sandbox import Spec, ensure_ready, open_sandbox
from legorl.task import LOG_PARSERS, REPO, load_task, pack

BUGGY = b"def add(a, b):\r\n    return a - b\r\n"
FIXED = BUGGY.replace(b"-", b"+")
OLD_TEST = b"from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
NEW_TEST = OLD_TEST + b"\n\ndef test_add():\n    assert add(2, 2) == 4\n"
NODE = "tests/test_calc.py::"
# Everything that a checkout, an archive or a text mode would spoil.
FILES = {
    b"src/calc.py": BUGGY,  # CRLF
    b"tests/test_calc.py": OLD_TEST,
    b"tests/old_data.txt": b"old\n",
    b"binary.bin": bytes(range(256)) * 3,
    b"caf\xe9.txt": b"latin\n",  # not UTF-8
    b"with space/\xc3\xa4\n.txt": b"newline in its name\n",
    b".gitattributes": b"* text=auto eol=lf\n*.bin export-ignore filter=lfs\nident.txt ident export-subst\n",
    b"ident.txt": b"$Id$ $Format:%H$\n",
    b".gitignore": b"ignored.txt\n",
    b"ignored.txt": b"tracked all the same\n",
    b"large.bin": os.urandom(1 << 10) * (5 << 10),
}


LINKS = ((b"link", b"src/calc.py"), (b"outside", b"../../etc/passwd"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("import")


@pytest.fixture(scope="module")
def rows(work: Path) -> dict[str, dict]:
    """A clone whose history goes on after the base commit, and its rows in every variant."""
    clone = Clone(work / "repos" / "own__calc")
    files = {**FILES, b"run.sh": b"#!/bin/sh\n"}
    base = clone.commit(files, "base", links=LINKS)
    fixed = clone.commit(
        {**files, b"src/calc.py": FIXED, b"binary.bin": b"\0new"}, "The fix, a SECRET", base, links=LINKS
    )
    tested = {**files, b"tests/test_calc.py": NEW_TEST, b"tests/more/data.bin": b"\0\1"}
    del tested[b"tests/old_data.txt"]
    later = clone.commit(tested, "tests", fixed, links=LINKS)
    git(clone.folder, "tag", "v2")
    row = {
        "repo": "own/calc",
        "instance_id": "own__calc-1",
        "base_commit": base,
        "patch": clone.diff(base, fixed),
        "test_patch": clone.diff(base, later, "tests"),
        "problem_statement": "add subtracts\r\n",
        "FAIL_TO_PASS": json.dumps([f"{NODE}test_add"]),
        "PASS_TO_PASS": json.dumps([f"{NODE}test_zero"]),
        "version": "1",
        "eval_script": "set -x\nsource activate\npip install -e .\n: '>>>>> Start Test Output'\npytest -rA t.py\n"
        ": '>>>>> End Test Output'\n",
        "log_parser": "parse_log_pytest",
        "image": "some/image:1",
    }
    smith = {
        "instance_id": f"own__calc.{later[:8]}.func_pm_op_change__abc",
        "repo": "swesmith/own__calc.12345678",
        "image_name": "swesmith/x",
        "patch": clone.diff(fixed, base, "src"),
        "FAIL_TO_PASS": [f"{NODE}test_add"],
        "PASS_TO_PASS": [f"{NODE}test_zero"],
        "base_commit": clone.commit({**tested, b"src/calc.py": FIXED}, "clean", later, links=LINKS),
        "problem_statement": "add subtracts",
    }
    return {"row": row, "smith": smith}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_row_becomes_a_task_byte_for_byte(rows: dict, work: Path, tmp_path: Path, name: str) -> None:
    row = rows["row"] if name == "rows.jsonl" else rows["row"] | {"FAIL_TO_PASS": [f"{NODE}test_add"]}
    argv = ("swe-bench", write_rows(tmp_path / name, [row]), "--repos", work / "repos", "--out", tmp_path / "out")
    done = lego_import(*argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/out/own__calc-1\n"
    task = load_task(tmp_path / "out" / "own__calc-1")
    links = {path: b"-> " + target for path, target in LINKS}
    assert tree(task.repo) == {**FILES, b"run.sh": b"#!/bin/sh\n", **links}
    assert os.access(task.repo / "run.sh", os.X_OK)
    assert not os.access(task.repo / "ident.txt", os.X_OK)
    assert tree(task.tests) == {b"tests/test_calc.py": NEW_TEST, b"tests/more/data.bin": b"\0\1"}
    assert task.grade.removed == ("tests/old_data.txt",)
    assert (task.grade.files, task.grade.test_paths) == (("tests/test_calc.py",), ("tests",))
    assert (task.grade.python_path, task.grade.semantics) == (("src", "."), "swe-bench")
    assert task.grade.fail_to_pass == (f"{NODE}test_add",)
    assert (task.split, task.kind, task.image, task.instruction) == ("heldout", "own/calc", "", "add subtracts")
    # No later history anywhere in the folder.
    assert not list(task.path.rglob(".git"))
    assert b"SECRET" not in b"".join(tree(task.path).values())
    before = {p: p.lstat().st_ino for p in task.path.rglob("*")}
    again = lego_import(*argv)
    assert again.stdout == done.stdout
    assert {p: p.lstat().st_ino for p in task.path.rglob("*")} == before


def test_the_solution_leads_to_the_fixed_tree(rows: dict, work: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "r.jsonl", [rows["row"]])
    lego_import("swe-bench", file, "--repos", work / "repos", "--out", tmp_path / "out")
    task = load_task(tmp_path / "out" / "own__calc-1")
    git(task.repo, "init", "-q")
    git(task.repo, "apply", "--binary", "--whitespace=nowarn", "-", feed=task.solution)
    assert (task.repo / "src/calc.py").read_bytes() == FIXED
    assert (task.repo / "binary.bin").read_bytes() == b"\0new"


def test_a_reversed_patch_is_turned_round_and_its_tests_are_hidden(rows: dict, work: Path, tmp_path: Path) -> None:
    smith = rows["smith"]
    file = write_rows(tmp_path / "r.jsonl", [smith])
    done = lego_import("swe-bench", file, "--repos", work / "repos", "--out", tmp_path / "out", "--split", "train")
    assert done.returncode == 0, done.stderr
    task = load_task(tmp_path / "out" / smith["instance_id"])
    assert (task.repo / "src/calc.py").read_bytes() == BUGGY
    assert not (task.repo / "tests/test_calc.py").exists()
    assert tree(task.tests) == {b"tests/test_calc.py": NEW_TEST}
    assert b"+    return a + b" in task.solution
    assert task.split == "train"


def test_what_cannot_be_imported_is_counted_with_its_reason(rows: dict, work: Path, tmp_path: Path) -> None:
    row = rows["row"]
    bad = {
        "no clone": {"repo": "own/other"},
        "base_commit is not in the clone": {"base_commit": "1" * 40},
        "the patch does not apply": {"patch": row["patch"].replace("return a - b", "return a * b")},
        "no FAIL_TO_PASS": {"FAIL_TO_PASS": "[]"},
        "FAIL_TO_PASS is not a list": {"FAIL_TO_PASS": "tests/a.py::b"},
        "no problem_statement": {"problem_statement": " "},
        "no test_patch": {"test_patch": None},
        "its tests are not pytest's": {"FAIL_TO_PASS": '["test_a (m.C)"]', "log_parser": "parse_log_go"},
        "a second one of this id": {"instance_id": "own__calc-1"},
    }
    rest = [
        row | change | {"instance_id": change.get("instance_id", f"bad-{n}")} for n, change in enumerate(bad.values())
    ]
    file = write_rows(tmp_path / "r.jsonl", [row, *rest])
    done = lego_import("swe-bench", file, "--repos", work / "repos", "--out", tmp_path / "out")
    assert done.returncode == 0
    *skipped, total = done.stderr.strip().splitlines()
    assert [line.split(": ")[1] for line in skipped] == list(bad)
    assert total.startswith("1 tasks, 9 skipped (1 no clone; ")
    assert [p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")] == ["own__calc-1"]

    none = lego_import("swe-bench", file, "--repos", work / "repos", "--out", tmp_path / "none", "--ids", "bad-0", "-q")
    assert (none.returncode, none.stdout) == (1, "")
    assert "nothing could be imported (1 no clone)" in none.stderr
    other = lego_import("swe-bench", file, "--repos", work / "repos", "--out", tmp_path / "out", "--split", "dev")
    assert other.returncode == 1
    assert "made with other settings" in other.stderr
    text = write_rows(tmp_path / "t.jsonl", [])
    text.write_text("not JSON\n")
    broken = lego_import("swe-bench", text, "--repos", work / "repos", "--out", tmp_path / "b")
    assert (broken.returncode, len(broken.stderr.splitlines())) == (1, 1)
    assert "t.jsonl:1" in broken.stderr


def test_limit_image_and_explain(rows: dict, work: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "r.jsonl", [rows["row"] | {"instance_id": f"own__calc-{n}"} for n in range(3)])
    argv = ["swe-bench", file, "--repos", work / "repos", "--out", tmp_path / "out", "--limit", 2, "--image", "row"]
    shown = json.loads(lego_import(*argv, "--explain").stdout)
    assert (shown["limit"], shown["semantics"], shown["image"]) == (2, "swe-bench", "row")
    assert not (tmp_path / "out").exists()
    assert len(lego_import(*argv).stdout.splitlines()) == 2
    assert load_task(tmp_path / "out" / "own__calc-0").image == "some/image:1"


def test_a_row_with_nothing_but_a_log(rows: dict, work: Path, tmp_path: Path) -> None:
    change = {"FAIL_TO_PASS": '["test_add (tests.C)"]', "PASS_TO_PASS": "[]", "log_parser": "parse_log_django"}
    file = write_rows(tmp_path / "r.jsonl", [rows["row"] | change])
    lego_import("swe-bench", file, "--repos", work / "repos", "--out", tmp_path / "out")
    grade = load_task(tmp_path / "out" / "own__calc-1").grade
    assert (grade.runner, grade.parser) == ("log", "parse_log_django")
    assert grade.command == ("bash", "-c", "source activate\npytest -rA t.py")
    assert command_of("pytest\n") == ""


def test_submodules_are_their_content_or_a_refusal(tmp_path: Path) -> None:
    inner = Clone(tmp_path / "repos" / "inner")
    commit = inner.commit({b"x.txt": b"inner\n"})
    outer = Clone(tmp_path / "repos" / "own" / "outer.git")
    modules = b'[submodule "v"]\n\tpath = vendored\n\turl = https://localhost/own/inner.git\n'
    files = {b".gitmodules": modules, b"a.py": b"a = 1\n", b"test_a.py": b"\n"}
    base = outer.commit(files, sub=commit)
    fixed = outer.commit({**files, b"a.py": b"a = 2\n"}, sub=commit)
    tested = outer.commit({**files, b"test_a.py": b"def test_a(): pass\n"}, sub=commit)
    row = {
        "repo": "own/outer",
        "instance_id": "own__outer-1",
        "base_commit": base,
        "patch": outer.diff(base, fixed),
        "test_patch": outer.diff(base, tested),
        "problem_statement": "a",
        "FAIL_TO_PASS": ["test_a.py::test_a"],
        "PASS_TO_PASS": [],
    }
    file = write_rows(tmp_path / "r.jsonl", [row])
    lego_import("swe-bench", file, "--repos", tmp_path / "repos", "--out", tmp_path / "out")
    assert (tmp_path / "out/own__outer-1/repo/vendored/x.txt").read_bytes() == b"inner\n"
    inner.folder.rename(tmp_path / "away")
    done = lego_import("swe-bench", file, "--repos", tmp_path / "repos", "--out", tmp_path / "out2")
    assert done.returncode == 1
    assert "a submodule has no clone: submodule vendored (https://localhost/own/inner.git)" in done.stderr
    assert not (tmp_path / "out2" / "own__outer-1").exists()


@pytest.mark.parametrize("name", ["own__calc", "own/calc", "own-calc", "calc", "own__calc.git"])
def test_clones_are_found_by_their_usual_names(tmp_path: Path, name: str) -> None:
    Clone(tmp_path / name)
    assert find_clone(tmp_path, "own/calc") == tmp_path / name / ".git"
    assert find_clone(tmp_path, "own/other") is None


def test_a_tree_that_would_write_elsewhere_is_refused(tmp_path: Path) -> None:
    clone = Clone(tmp_path / "c")
    blob = git(clone.folder, "hash-object", "-w", "--stdin", feed=b"x")
    inner = git(clone.folder, "mktree", feed=b"100644 blob " + blob + b"\tx\n")
    # git's own commands refuse to make such a tree; a hostile repository holds it all the same
    body = b"40000 ..\0" + bytes.fromhex(inner.decode())
    bad = git(clone.folder, "hash-object", "-t", "tree", "-w", "--stdin", "--literally", feed=body).decode()
    with Trees(clone.folder / ".git") as trees, pytest.raises(Exception, match="no repository may hold"):
        trees.write(bad, tmp_path / "out" / "repo")
    assert not (tmp_path / "out" / "x").exists()


def test_test_paths_are_folders_unless_the_solution_works_there() -> None:
    assert paths_of({"tests/unit/test_a.py", "tests/b.txt", "test_root.py"}, {"src/a.py"}) == ["test_root.py", "tests"]
    assert paths_of({"pkg/testing/tests/test_a.py"}, {"pkg/testing/util.py"}) == ["pkg/testing/tests/test_a.py"]
    assert paths_of({"tests/test_a.py", "tests/test_b.py"}, {"tests/helper.py"}) == [
        "tests/test_a.py",
        "tests/test_b.py",
    ]
    assert python_path({"src/pkg/__init__.py", "lib/__init__.py", "lib/a.py"}) == ["src", "."]


def test_lists_of_every_shape() -> None:
    row = dict.fromkeys(("instance_id", "repo", "patch", "test_patch", "base_commit", "problem_statement"), "x")
    for value in ('["a.py::b", "a.py::b"]', ["a.py::b"]):
        parsed = parse_row(row | {"FAIL_TO_PASS": value, "PASS_TO_PASS": ["a.py::b", "a.py::c"]})
        assert (parsed.fail_to_pass, parsed.pass_to_pass) == (("a.py::b",), ("a.py::c",))


def test_every_parser_of_logs_has_a_name_that_tasks_may_give() -> None:
    from legorl.commands.grade.log_parsers import PARSERS

    assert set(LOG_PARSERS) == set(PARSERS)


@pytest.mark.podman
def test_commits_that_touch_source_and_tests_become_tasks(tmp_path: Path) -> None:
    clone = Clone(tmp_path / "mine")
    calc, tests = b"calc.py", b"tests/test_calc.py"
    first = clone.commit({calc: BUGGY, tests: OLD_TEST}, "Begin")
    fix = clone.commit(
        {calc: FIXED, tests: NEW_TEST, b"doc.md": b"x"}, "Add, not subtract\n\nIt was wrong.\n\nSigned-off-by: t", first
    )
    only = clone.commit({calc: FIXED + b"\r\n", tests: NEW_TEST}, "No test in this one", fix)
    idle = clone.commit({calc: FIXED, tests: NEW_TEST + b"\n"}, "Nothing fails before it", only)
    terse = clone.commit({calc: BUGGY, tests: OLD_TEST}, "wip", idle)
    done = lego_import("git", clone.folder, "--out", tmp_path / "out", "--split", "train")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/out/mine-{fix[:12]}\n"
    *skipped, total = done.stderr.strip().splitlines()
    assert [line.split(": ")[0].split("-")[1] for line in skipped] == [terse[:12], idle[:12]]
    assert total == "1 tasks, 2 skipped (1 its message says next to nothing; 1 no test passes only after it)"
    task = load_task(tmp_path / "out" / f"mine-{fix[:12]}")
    assert tree(task.repo) == {calc: BUGGY, tests: OLD_TEST}
    assert tree(task.tests) == {tests: NEW_TEST}
    assert task.instruction == "Add, not subtract\n\nIt was wrong."
    assert (task.grade.fail_to_pass, task.grade.pass_to_pass) == ((f"{NODE}test_add",), (f"{NODE}test_zero",))
    assert (task.grade.semantics, task.labels["commit"]) == ("strict", fix)
    assert b"doc.md" in task.solution
    assert b"test_calc" not in task.solution
    shown = json.loads(lego_import("git", clone.folder, "--out", tmp_path / "x", "--ids", fix[:8], "--explain").stdout)
    assert shown["ids"] == [fix[:8]]
    none = lego_import("git", tmp_path, "--out", tmp_path / "none")
    assert (none.returncode, none.stderr) == (1, f"lego-tasks: {tmp_path}: not a git repository\n")


FIND = r"""
cd /ws/repo
echo commits $(git rev-list --all | wc -l) tags $(git tag | wc -l) remotes $(git remote | wc -l)
echo lost $(git fsck --unreachable --no-reflogs --lost-found 2>/dev/null | wc -l) log $(git reflog | wc -l)
git cat-file --batch-all-objects --batch 2>/dev/null | grep -ac CANARY
grep -rasl CANARY / --exclude-dir=proc --exclude-dir=sys | grep -v '^/ws/probe' | wc -l
find / -xdev -name calc.py -not -path '/ws/repo/*' 2>/dev/null | wc -l
python3 - <<'P'
import socket
for address in (("1.1.1.1", 443), ("127.0.0.1", 3128), ("169.254.169.254", 80)):
    try:
        socket.create_connection(address, 2)
        print("reached", address)
    except OSError:
        pass
try:
    import calc
except ImportError:
    print("not installed")
P
"""


@pytest.mark.podman
def test_an_agent_finds_neither_the_fix_nor_the_tests_nor_a_way_out(rows: dict, work: Path, tmp_path: Path) -> None:
    row = dict(rows["row"])
    row["patch"] = row["patch"].replace("a + b", "a + b  # CANARY")
    row["test_patch"] = row["test_patch"].replace("== 4", "== 4  # CANARY")
    file = write_rows(tmp_path / "r.jsonl", [row])
    assert lego_import("swe-bench", file, "--repos", work / "repos", "--out", tmp_path / "out").returncode == 0
    task = load_task(tmp_path / "out" / "own__calc-1")
    assert b"CANARY" in task.solution

    async def look() -> str:
        await ensure_ready(task.limits)
        async with open_sandbox(Spec("find", "find", task.limits)) as box:
            await box.put(pack(task.repo), REPO)
            await box.commit(REPO)
            result = await box.run(["bash", "-c", FIND], cwd="/", timeout_s=120)
            assert await box.diff(REPO) == b""
            return result.log.decode()

    assert asyncio.run(look()).split("\n") == [
        "commits 1 tags 0 remotes 0",
        "lost 0 log 1",
        "0",
        "0",
        "0",
        "not installed",
        "",
    ]


@pytest.mark.podman
def test_real_rows_get_the_published_verdict(tmp_path: Path) -> None:
    """One marshmallow row both ways. LEGORL_TEST_REPOS: a folder with its clone and swe-bench-dev.parquet.

    LEGORL_TEST_IMAGE: an image that has pytz, simplejson and dateutil beside pytest.
    """
    repos, image = os.environ.get("LEGORL_TEST_REPOS"), os.environ.get("LEGORL_TEST_IMAGE")
    if not repos or not image:
        pytest.skip("LEGORL_TEST_REPOS and LEGORL_TEST_IMAGE name no clones and no image")
    file = Path(repos, "swe-bench-dev.parquet")
    row = "marshmallow-code__marshmallow-1359"
    done = lego_import(
        "swe-bench", file, "--repos", repos, "--out", tmp_path / "out", "--ids", row, "--image", image
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    checked = subprocess.run([TASKS, "check", tmp_path / "out", "--runs", "1"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
