"""The snippets family: every snippet holds both ways; a snippet file that lacks something is refused by name."""

from pathlib import Path

import pytest
from commands.task_runs import complaints, outcomes_of, ways_of

from legorl.commands.tasks import snippets
from legorl.commands.tasks.build import write_tasks
from legorl.task import TaskError, load_task

SNIPPET = """---
kind: off-by-one
level: 0
split: train
fails: test_two
---
# Wrong

It is wrong.

## one.py

```python
def two():
    return 1
```

## fix

```python
    return 1
```

```python
    return 2
```

## tests

```python
from one import two


def test_two():
    assert two() == 2


def test_number():
    assert isinstance(two(), int)
```
"""


def test_every_snippet_holds_both_ways(tmp_path: Path) -> None:
    tasks = [load_task(path) for path in write_tasks(snippets.drafts(), tmp_path / "set")]
    assert len(tasks) >= 20
    results = outcomes_of([job for task in tasks for job in ways_of(task, tmp_path / "ways")])
    for number, task in enumerate(tasks):
        assert complaints(task, results[3 * number : 3 * number + 3]) == [], task.id
        assert task.grade.pass_to_pass, f"{task.id}: nothing guards what works"
    assert {task.split for task in tasks} == {"train", "dev", "heldout"}


def test_modules_have_names_of_their_own() -> None:
    """A module called like one of the standard library would be looked for there."""
    import sys

    names = [name for draft in snippets.drafts() for name in draft.repo]
    assert len(names) == len(set(names))
    assert not {name.removesuffix(".py") for name in names} & sys.stdlib_module_names


def test_a_snippet_is_read(tmp_path: Path) -> None:
    file = tmp_path / "too-small.md"
    file.write_text(SNIPPET)
    draft = snippets.draft(snippets.read_snippet(file))
    assert (draft.id, draft.kind, draft.level, draft.split) == ("snippets-too-small", "off-by-one", 0, "train")
    assert draft.instruction == "# Wrong\n\nIt is wrong."
    assert draft.repo["one.py"].body == b"def two():\n    return 1\n"
    assert (draft.fail_to_pass, draft.pass_to_pass) == (("test_two",), ("test_number",))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("---\n", "", "no front matter"),
        ("## tests", "## others", "a section is missing"),
        ("    return 1\n```\n\n```python", "    return 3\n```\n\n```python", "occurs 0 times"),
        ("def two():", "def one():\n    return 1\n\n\ndef two():", "occurs 2 times"),
        ("fails: test_two", "fails: test_three", "no test test_three"),
    ],
)
def test_a_broken_snippet_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.md"
    assert old in SNIPPET
    file.write_text(SNIPPET.replace(old, new))
    with pytest.raises(TaskError, match=message):
        snippets.draft(snippets.read_snippet(file))
