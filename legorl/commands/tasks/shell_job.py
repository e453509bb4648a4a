"""The drawing board of one shell task: a kind draws names and contents, says what it asks, and states the end state.

A kind is a function of one `Job`. It computes the wanted end state in Python and gives the solution as a shell
command: two independent ways to the same tree, which `lego-tasks check` compares.

    def empty(job):
        name = job.name("txt")
        job.ask(job.phrase(f"Create an empty file named {name}.", ...))
        job.solve(f"touch {quote(name)}")
        job.want_text(name, "")

Files that no `want_*` mentions must be left as they were: a pass-to-pass test says so.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from shlex import quote
from typing import Any

from legorl.commands.tasks.build import Draft, Node, run_command
from legorl.commands.tasks.shell_words import pool

HEADER = '''\
"""Hidden tests: the end state that the instruction asks for."""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path


def data(name):
    path = Path(name)
    assert not path.is_symlink(), f"{name} is a link, not a file"
    assert path.is_file(), f"{name} is not there"
    return path.read_bytes()


def text(name):
    """The file's text; whether its last line ends with a newline does not matter."""
    return data(name).decode("utf-8").removesuffix("\\n")


def run(*command, cwd="."):
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode("utf-8").rstrip("\\n")
'''

KEEP_ASKS = (
    "Leave every other file as it is.",
    "Nothing else may change.",
    "Do not touch anything else.",
    "All other files must stay the way they are.",
    "The rest of the folder has to stay unchanged.",
)


class Job:
    """One shell task being made. `rng` is seeded by everything that names the task."""

    def __init__(self, kind: str, level: int, split: str, rng: random.Random):
        self.kind, self.level, self.split, self.rng = kind, level, split, rng
        self.files: dict[str, Node] = {}
        self.result: tuple[str, str] | None = None  # path and text of the main file, if they are certain
        self._asks: list[str] = []
        self._commands: list[str] = []
        self._tests: list[tuple[str, str, bool]] = []  # name, source, fails before
        self._touched: set[str] = set()
        self._left: dict[str, list[str]] = {}

    # --- drawing words ---

    def word(self, name: str) -> str:
        """Draw a word of pool `name`; no word comes twice in one task until the pool is used up."""
        if not self._left.get(name):
            self._left[name] = self.rng.sample(words := pool(name, self.split), len(words))
        return self._left[name].pop()

    def words(self, name: str, count: int) -> list[str]:
        return [self.word(name) for _ in range(count)]

    def name(self, extension: str = "txt", plain: bool = False) -> str:
        """Draw a file name. From level 2 on it may have two words and a space; at level 3 accents too."""
        return self._compose(self.word("stem"), plain) + (f".{extension}" if extension else "")

    def folder(self, plain: bool = False) -> str:
        return self._compose(self.word("folder"), plain)

    def _compose(self, stem: str, plain: bool) -> str:
        if plain or self.level < 2:
            return stem
        first = self.word("unicode") if self.level == 3 and self.rng.random() < 0.4 else self.word("adjective")
        return self.rng.choice([f"{first} {stem}", f"{first} {stem}", f"{first}-{stem}", stem])

    def sentence(self) -> str:
        """Draw a short plain sentence, such as "the quick fox sleeps under the oak"."""
        first = self.rng.choice(["the", "a", "our", "my", "this", "that", "every", "one"])
        return f"{first} {self.word('adjective')} {self.word('noun')} {self.word('verb')} {self.word('place')}"

    def sentences(self, count: int) -> list[str]:
        """Draw `count` different sentences."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.sentence()] = None
        return list(found)

    def size(self, small: int) -> int:
        """Return how long a content of this level is, if it has `small` lines at level 0."""
        return small + (0, 2, 8, 16)[self.level]

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def phrase(self, *texts: str, **fields: object) -> str:
        """Choose a phrasing and fill in its {fields}, if any are given.

        The last phrasing belongs to held-out tasks, the one before it to dev, the others to training.
        """
        if self.split in ("heldout", "unseen"):
            text = texts[-1]
        elif self.split == "dev":
            text = texts[-2]
        else:
            text = self.rng.choice(texts[:-2])
        return text.format(**fields) if fields else text

    def show(self, name: str) -> str:
        """Return a name as the instruction shows it: bare while it is one plain word at level 0, else in backticks."""
        return name if self.level == 0 else f"`{name}`"

    # --- the repository and the request ---

    def put(self, path: str, content: str | bytes | Iterable[str], executable: bool = False) -> str:
        """Add a file: text, bytes, or lines (each gets a newline). Returns its path."""
        if not isinstance(content, str | bytes):
            content = "".join(f"{line}\n" for line in content)
        self.files[path] = Node(content.encode() if isinstance(content, str) else content, executable)
        return path

    def put_link(self, path: str, target: str) -> str:
        self.files[path] = Node(link=target)
        return path

    def bystander(self, extension: str = "txt", folder: str = "") -> str:
        """Add an unrelated file, which must survive. Returns its path."""
        return self.put(folder + self.name(extension, plain=True), self.sentences(self.number(1, 3)))

    def ask(self, text: str) -> None:
        self._asks.append(text)

    def block(self, lines: Iterable[str]) -> str:
        """Return lines as an indented block of the instruction."""
        return "\n\n" + "\n".join(f"    {line}" for line in lines)

    def solve(self, command: str) -> None:
        self._commands.append(command)

    # --- the end state ---

    def touch(self, path: str) -> None:
        """Say that `path` may change in ways that its own tests judge."""
        self._touched.add(path)

    def test(self, label: str, *lines: str, before: bool = False) -> None:
        """Add a test function. It must fail before the task is done, or, with `before`, hold before and after."""
        slug = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")[:40].strip("_")
        name = f"test_{len(self._tests) + 1}_{slug}"
        self._tests.append((name, "\n".join(f"    {line}" for line in lines), not before))

    def want_text(self, path: str, content: str | Iterable[str], main: bool = False) -> None:
        """`path` holds this text (or these lines); one newline more or less at its end is accepted."""
        if not isinstance(content, str):
            content = "\n".join(content)
        content = content.removesuffix("\n")
        if main:
            self.result = (path, content)
        self.touch(path)
        self.test(f"text of {path}", f"assert text({path!r}) == {_literal(content)}")

    def want_bytes(self, path: str, content: bytes) -> None:
        self.touch(path)
        self.test(f"bytes of {path}", f"assert data({path!r}) == {content!r}")

    def want_gone(self, *paths: str) -> None:
        for path in paths:
            self.touch(path)
            self.test(f"{path} is gone", f"assert not os.path.lexists({path!r})")

    def want_lines(self, path: str, lines: Iterable[str]) -> None:
        """`path` holds these lines in any order; a leading ./ (as find prints it) is accepted."""
        wanted = sorted(lines)
        self.touch(path)
        self.test(
            f"lines of {path}",
            f'assert sorted(line.removeprefix("./") for line in text({path!r}).split("\\n")) == {wanted!r}',
        )

    def want_number(self, path: str, number: int | str) -> None:
        """`path` holds this number and nothing else; white space around it is accepted."""
        self.result = (path, str(number))
        self.touch(path)
        self.test(f"number in {path}", f"assert text({path!r}).strip() == {str(number)!r}")

    def want_json(self, path: str, value: Any) -> None:
        """`path` holds JSON equal to `value`; its layout is free."""
        self.touch(path)
        self.test(f"json of {path}", f"assert json.loads(data({path!r})) == {value!r}")

    def want_output(self, command: list[str], output: str, given: dict[str, str] | None = None) -> None:
        """`command` prints this and exits 0; with `given` files in a copy of the folder, if there are any."""
        if not given:
            self.test(f"output of {' '.join(command)}", f"assert run(*{command!r}) == {output!r}")
            return
        self.test(
            f"output of {' '.join(command)} with other input",
            "with tempfile.TemporaryDirectory() as place:",
            "    shutil.copytree('.', place, dirs_exist_ok=True)",
            *(f"    Path(place, {name!r}).write_text({content!r})" for name, content in given.items()),
            f"    assert run(*{command!r}, cwd=place) == {output!r}",
        )

    # --- done ---

    def draft(self, ident: str) -> Draft:
        """Return the finished task."""
        kept = [path for path in self.files if path not in self._touched]
        if kept:
            if self.level > 0:
                self.ask(self.phrase(*KEEP_ASKS))
            sums = [
                f"{p!r}: {hashlib.sha256(self.files[p].body).hexdigest()!r},"
                for p in kept
                if self.files[p].link is None
            ]
            self.test(
                "other files are untouched",
                *["kept = {", *(f"    {line}" for line in sums), "}"],
                "assert {name: hashlib.sha256(data(name)).hexdigest() for name in kept} == kept",
                before=True,
            )
        command = " && ".join(self._commands)
        tests = "".join(f"\n\ndef {name}():\n{body}\n" for name, body, _ in self._tests)
        return Draft(
            id=ident,
            family="shell",
            kind=self.kind,
            level=self.level,
            split=self.split,
            instruction=_join(self._asks),
            repo=self.files,
            test_source=_used_imports(HEADER, tests) + tests,
            fail_to_pass=tuple(name for name, _, fails in self._tests if fails),
            pass_to_pass=tuple(name for name, _, fails in self._tests if not fails),
            solve=_solver(command),
            labels={"solution_command": command},
        )


def _solver(command: str) -> Callable[[Path], None]:
    return lambda folder: run_command(command, folder)


def _join(asks: list[str]) -> str:
    """Join sentences to a paragraph; what follows an indented block, or a line quoted at the end, starts a new one."""
    text = ""
    for ask in asks:
        text += (" " if text.endswith((".", "?", "!")) and "\n    " not in text else "\n\n" if text else "") + ask
    return text


def _literal(content: str) -> str:
    """Return a Python literal of `content`, one line of text a line where there are several."""
    if "\n" not in content:
        return repr(content)
    *lines, last = content.split("\n")
    return "(\n" + "\n".join(f"        {line!r}" for line in [*(f"{x}\n" for x in lines), last]) + "\n    )"


def _used_imports(header: str, tests: str) -> str:
    """Drop the imports and helpers that no test uses."""
    uses = {
        "hashlib": "hashlib.",
        "json": "json.",
        "os": "os.",
        "shutil": "shutil.",
        "subprocess": "run(",
        "tarfile": "tarfile.",
        "tempfile": "tempfile.",
    }
    for module, mark in uses.items():
        if mark not in tests:
            header = header.replace(f"import {module}\n", "")
    if "run(" not in tests:
        header = header[: header.index("\n\ndef run(")]
    return header


def paths(*names: str) -> str:
    """Return names quoted for a shell command line."""
    return " ".join(quote(name) for name in names)


def printf(lines: Iterable[str]) -> str:
    """Return a command that prints the lines: echo for one plain line, else printf."""
    lines = list(lines)
    if len(lines) == 1 and "\\" not in lines[0] and not lines[0].startswith("-"):
        return f"echo {quote(lines[0])}"
    return "printf '%s\\n' " + paths(*lines)
