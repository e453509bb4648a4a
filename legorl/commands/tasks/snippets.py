"""The `snippets` family: small Python modules with one real bug each, kept as Markdown files in the folder snippets/.

A snippet file has a front matter (kind, level, split, and `fails`: the tests that the bug breaks), the issue as the
agent sees it, one section a module of the repository, a section `fix` (two code blocks: a text that occurs once in the
repository, and what replaces it), and a section `tests`. Every test not named in `fails` passes before and after.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from legorl.commands.tasks.build import Draft, Node, run_command
from legorl.task import TaskError

FOLDER = Path(__file__).parent / "snippets"
TEST_HEADER = '"""Hidden tests of one small module."""\n\n'
_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S)


class Snippet(NamedTuple):
    """One parsed snippet file; `fix` is (file, old text, new text)."""

    name: str
    fields: dict[str, str]
    issue: str
    modules: dict[str, str]
    fix: tuple[str, str, str]
    tests: str


def read_snippet(file: Path) -> Snippet:
    """Parse a snippet file; raise TaskError if a part is missing or the fix does not fit."""
    try:
        _, front, body = file.read_text(encoding="utf-8").split("---\n", 2)
        issue, *parts = re.split(r"^## (.+)\n", body, flags=re.M)
    except ValueError as error:
        raise TaskError(f"{file}: no front matter") from error
    sections = {head: _BLOCK.findall(text) for head, text in zip(parts[::2], parts[1::2], strict=True)}
    try:
        old, new = sections.pop("fix")
        (tests,) = sections.pop("tests")
        modules = {name: code for name, (code,) in sections.items()}
    except (KeyError, ValueError) as error:
        raise TaskError(f"{file}: a section is missing or has the wrong number of code blocks ({error})") from error
    old, new = old.rstrip("\n"), new.rstrip("\n")
    places = [name for name, code in modules.items() for _ in range(code.count(old))]
    if len(places) != 1:
        raise TaskError(f"{file}: the text to fix occurs {len(places)} times in the modules, not once")
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    return Snippet(file.stem, fields, issue.strip(), modules, (places[0], old, new), tests)


def draft(snippet: Snippet) -> Draft:
    """Make the task of one snippet; raise TaskError if `fails` names a test that is not there."""
    names = re.findall(r"^def (test_\w+)", snippet.tests, re.M)
    fails = snippet.fields["fails"].split(", ")
    if unknown := set(fails) - set(names):
        raise TaskError(f"{snippet.name}: no test {', '.join(sorted(unknown))}")
    file, old, new = snippet.fix
    # Written without triple quotes, so that any text fits.
    code = f"from pathlib import Path\np = Path({file!r})\np.write_text(p.read_text().replace({old!r}, {new!r}))"
    command = f"python3 -c {quote(code)}"
    return Draft(
        id=f"snippets-{snippet.name}",
        family="snippets",
        kind=snippet.fields["kind"],
        level=int(snippet.fields["level"]),
        split=snippet.fields["split"],
        instruction=snippet.issue,
        repo={name: Node(text.encode()) for name, text in snippet.modules.items()},
        test_source=TEST_HEADER + snippet.tests,
        fail_to_pass=tuple(fails),
        pass_to_pass=tuple(name for name in names if name not in fails),
        solve=lambda folder: run_command(command, folder),
        labels={"solution_command": command},
    )


def drafts() -> Iterator[Draft]:
    """Yield the task of every snippet, by name."""
    for file in sorted(FOLDER.glob("*.md")):
        yield draft(read_snippet(file))


def collection_digest() -> str:
    """Return a digest of the collection and of the code that turns it into tasks."""
    total = hashlib.sha256()
    for file in (Path(__file__), *sorted(FOLDER.glob("*.md"))):
        total.update(file.read_bytes())
    return total.hexdigest()[:16]
