"""What a synthetic task tells the agent: what was seen to fail, as somebody who uses the library would report it.

It quotes the statement of a failing test and its error, counts the others, and names neither the file nor the function
that was changed, nor how. The wording is drawn by the bug, so that instructions do not all begin alike.
"""

import random
import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legorl.commands.tasks.synth import Bug
    from legorl.commands.tasks.synth_source import Library

OPENINGS = (
    "Something in {label} went wrong: {symptom}.",
    "{label} misbehaves: {symptom}.",
    "Since the last change {label} is broken: {symptom}.",
    "I came across a bug in {label}: {symptom}.",
)
CLOSINGS = (
    "Please find the cause in the library and mend it. Everything that works now must go on working.",
    "The library's code is to be corrected, so that this and whatever else comes from the same cause works again.",
    "Correct the library itself. What works today must not break.",
)
SHOWN = 2  # failures that are quoted
LINES = 8  # lines of an error that are quoted


def instruction(library: "Library", bug: "Bug") -> str:
    """The text of instruction.md."""
    rng = random.Random(bug.mutant.text)
    told = [(test, *bug.stories[test]) for test in bug.fail_to_pass if test in bug.stories]
    told = [(test, statement, error) for test, statement, error in told if statement.strip()] or told
    shown = _distinct(told)[:SHOWN]
    lines = [rng.choice(OPENINGS).format(label=library.name, symptom=_symptom(shown)), ""]
    for k, (_, statement, error) in enumerate(shown):
        lines += ["For example, this does not hold any more:" if k == 0 else "Nor does this:", ""]
        lines += [*_indented(statement), "", "It ends with", "", *_indented("\n".join(error.splitlines()[:LINES])), ""]
    others = len(bug.fail_to_pass) - len(shown)
    if others > 0:
        lines += ["One other check fails too." if others == 1 else f"{others} other checks fail too.", ""]
    lines += [rng.choice(CLOSINGS), ""]
    return "\n".join(lines)


def _distinct(told: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """One failure of each statement, in order."""
    seen: dict[str, tuple[str, str, str]] = {}
    for item in told:
        seen.setdefault(item[1], item)
    return list(seen.values())


def _symptom(shown: list[tuple[str, str, str]]) -> str:
    if not shown:
        return "some of what it promises does not hold"
    kind = re.match(r"[\w.]+", shown[0][2])
    name = kind[0].rpartition(".")[2] if kind else "an error"
    if name in ("AssertionError", "Failed"):
        return "a result is not what it should be"
    return f"a use that should work raises {name}"


def _indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in textwrap.dedent(text).strip("\n").splitlines()]
