"""Rows of SWE-bench and its kin as tasks: SWE-bench (full, Lite, Verified, Multimodal, Multilingual), SWE-Gym,
SWE-rebench, SWE-smith; Parquet or JSON lines.

    for row in read_rows(Path("dev.parquet")):
        write_row(row, clone, options, folder)

The gold patch becomes solution.patch, the test patch the hidden tests, the tree of base_commit the repository: one
root commit, without anything that came after it. SWE-smith stores the patch that breaks the repository: there the
broken tree is the repository, and the solution is the way back. Its tests to be mended are taken out of the
repository, as its own loader does. Its rule that a missing test has passed is not kept.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl.commands.tasks.folders import Skip, task_id
from legorl.commands.tasks.git_trees import GitError, Trees
from legorl.commands.tasks.import_trees import Options, Triple, write_trees
from legorl.task import LOG_PARSERS

CONDA_PYTHON = "/opt/miniconda3/envs/testbed/bin/python"  # in SWE-bench's own images, as their eval scripts enter it
_NODE = re.compile(r"[^\s:]+\.py(::.+)?$", re.S)
_SMITH = re.compile(r"^(?P<repo>[\w.-]+?__[\w.-]+?)\.(?P<commit>[0-9a-f]{8})\.\w+")


@dataclass(frozen=True)
class Row:
    """One instance, its fields checked and of one shape."""

    id: str
    repo: str  # owner/name
    commit: str
    patch: bytes
    test_patch: bytes
    reversed: bool  # the patch breaks the repository instead of mending it
    statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    eval_script: str = ""
    log_parser: str = ""
    eval_type: str = ""
    image: str = ""
    labels: dict[str, str] = field(default_factory=dict)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the raw rows of a Parquet file, or of a file of JSON lines. Raises Skip for a file that is neither."""
    with path.open("rb") as file:
        parquet = file.read(4) == b"PAR1"
    if parquet:
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches(64):
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise Skip("not a Parquet file and not JSON lines", f"{path}:{number}: {error}") from error
                if not isinstance(row, dict):
                    raise Skip("not a JSON object", f"{path}:{number}")
                yield row


def parse_row(raw: Mapping[str, Any]) -> Row:
    """Read one row of whatever variant. Raises Skip if something that a task needs is not in it."""

    def text(name: str) -> str:
        value = raw.get(name)
        return value if isinstance(value, str) else ""

    name = text("instance_id")
    smith = _SMITH.match(name) if text("image_name") or text("repo").startswith("swesmith/") else None
    repo = smith["repo"].replace("__", "/", 1) if smith else text("repo")
    test_patch = text("test_patch")
    for label, value in (("instance_id", name), ("repo", repo), ("patch", text("patch"))):
        if not value:
            raise Skip(f"no {label}")
    if not text("problem_statement").strip():
        raise Skip("no problem_statement")
    if not smith and not test_patch:
        raise Skip("no test_patch")
    fail, keep = _tests(raw, "FAIL_TO_PASS"), _tests(raw, "PASS_TO_PASS")
    if not fail:
        raise Skip("no FAIL_TO_PASS")
    commit = text("base_commit") or (smith["commit"] if smith else "")
    if not commit:
        raise Skip("no base_commit")
    kept = ("version", "created_at", "difficulty", "environment_setup_commit")
    return Row(
        id=name,
        repo=repo,
        commit=commit,
        patch=text("patch").encode(),
        test_patch=test_patch.encode(),
        reversed=smith is not None,
        statement=text("problem_statement"),
        fail_to_pass=fail,
        pass_to_pass=tuple(test for test in keep if test not in set(fail)),
        eval_script=text("eval_script"),
        log_parser=text("log_parser"),
        eval_type=text("eval_type"),
        image=text("image") or text("image_name"),
        labels={key: str(raw[key]) for key in kept if raw.get(key)},
    )


def _tests(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of test ids: a list, or (full, Lite, Verified, Multimodal) the JSON text of one."""
    value = raw.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Skip(f"{name} is not a list", str(error)) from error
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Skip(f"{name} is not a list of names")
    return tuple(dict.fromkeys(value))


def triple(row: Row, trees: Trees) -> Triple:
    """Return the trees that `row` speaks of. Raises Skip if the clone does not hold them or a patch does not fit."""
    try:
        base = trees.tree(row.commit)
    except GitError as error:
        raise Skip("base_commit is not in the clone", row.commit) from error
    fixed = _apply(trees, base, row.patch, "the patch")
    if not row.reversed:
        return Triple(base, fixed, _apply(trees, base, row.test_patch, "the test patch"))
    names = {test.partition("::")[0].encode() for test in row.fail_to_pass}
    hidden = [entry.path for entry in trees.entries(base) if entry.path in names]
    return Triple(trees.without(fixed, hidden), trees.without(base, hidden), fixed)


def _apply(trees: Trees, tree: str, patch: bytes, what: str) -> str:
    try:
        return trees.apply(tree, patch)
    except GitError as error:
        raise Skip(f"{what} does not apply", str(error)) from error


def write_row(row: Row, trees: Trees, options: Options, folder: Path) -> None:
    """Fill `folder` with the task of `row`. Raises Skip if the clone or the row does not allow it."""
    image = row.image if options.image == "row" else options.image
    if options.image == "row" and not image:
        raise Skip("the row names no image")
    three = triple(row, trees)
    runner = runner_of(row)
    write_trees(three, trees, folder, (*row.fail_to_pass, *row.pass_to_pass), options, {
        "id": task_id(row.id),
        "kind": row.repo,
        "instruction": row.statement,
        "image": image,
        "python": options.python or (CONDA_PYTHON if options.image == "row" and enters_conda(row) else ""),
        "grade": {
            **runner,
            "fail_to_pass": row.fail_to_pass,
            "pass_to_pass": row.pass_to_pass,
        },
        "labels": {"source_id": row.id, "repo": row.repo, "base_commit": row.commit, **row.labels},
    })  # fmt: skip


def enters_conda(row: Row) -> bool:
    """Does the row's eval script say that its tests run in the conda environment of SWE-bench's images?"""
    return re.search(r"^conda activate testbed$", row.eval_script, re.M) is not None


def runner_of(row: Row) -> dict[str, Any]:
    """Return how the tests of `row` are run: by pytest where every id is one of pytest's, else by its own script.

    The latter gives nothing but a log. Raises Skip where the row does not even say how to get one and read it.
    """
    if all(_NODE.match(test) for test in (*row.fail_to_pass, *row.pass_to_pass)):
        return {"runner": "pytest"}
    command = test_command(row.eval_script)
    if row.log_parser not in LOG_PARSERS or not command:
        raise Skip("its tests are not pytest's", f"{row.fail_to_pass[0]!r}, parser {row.log_parser or 'not named'}")
    if row.eval_type not in ("", "pass_and_fail"):
        raise Skip("absent tests count as passed", f"eval_type {row.eval_type}")
    return {"runner": "log", "command": ["bash", "-c", command], "parser": row.log_parser, "files": []}


def test_command(eval_script: str) -> str:
    """Return the commands between an eval script's two markers, after those that enter its environment; "" if none.

    What else the script does (fetch, install, apply the test patch, reset files) is done elsewhere, or needs a network.
    """
    before, start, rest = eval_script.partition(">>>>> Start Test Output")
    body, end, _ = rest.partition(">>>>> End Test Output")
    if not (start and end):
        return ""
    entering = [line for line in before.splitlines() if re.match(r"(source|conda activate|\. |export )", line.strip())]
    tests = body.splitlines()[1:-1]  # the rest of the first marker's line, the beginning of the second's
    tests = [line for line in tests if not re.fullmatch(r"\s*\w+=\$\?\s*", line)]  # newer scripts keep the exit code so
    return "\n".join([*dict.fromkeys(entering), *tests]).strip() if any(line.strip() for line in tests) else ""
