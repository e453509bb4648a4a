"""What a synthetic task tells the agent: what was seen to fail, as somebody who uses the library would report it.

It quotes what a failing test does and its error, counts the others, and says neither where something was changed nor
how. The wording is drawn by the bug, so that instructions do not all begin alike.
"""

import random
import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legorl.commands.tasks.mutate import Mutant
    from legorl.commands.tasks.synth_source import Library
    from legorl.commands.tasks.synth_try import Verdict

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
ADVICE = "Use -v to get more diff"  # pytest's, under a difference


def instruction(library: "Library", mutant: "Mutant", verdict: "Verdict") -> str:
    """The text of instruction.md."""
    rng = random.Random(mutant.text)
    shown = _shown(verdict)
    lines = [rng.choice(OPENINGS).format(label=library.name, symptom=_symptom(shown)), ""]
    for k, (code, error) in enumerate(shown):
        if code:
            lines += ["For example:" if k == 0 else "And:", "", *_indented(code), "", "This ends with", ""]
        else:
            lines += ["What is reported:", ""]
        lines += [*_indented(error, LINES), ""]
    others = len(verdict.fail_to_pass) - len(shown)
    if others > 0:
        lines += ["One other check fails too." if others == 1 else f"{others} other checks fail too.", ""]
    lines += [rng.choice(CLOSINGS), ""]
    return "\n".join(lines)


def _shown(verdict: "Verdict") -> list[tuple[str, str]]:
    """Code and error of at most SHOWN failures, each of another test function; without code only where none has any."""
    seen: dict[str, tuple[str, str]] = {}
    for test, (code, error) in (verdict.stories or {}).items():
        seen.setdefault(test.partition("[")[0], (code, error))
    coded = [told for told in seen.values() if told[0]]
    return coded[:SHOWN] or list(seen.values())[:1]


def _symptom(shown: list[tuple[str, str]]) -> str:
    if not shown:
        return "some of what it promises does not hold"
    kind = re.match(r"[\w.]+", shown[0][1])
    name = kind[0].rpartition(".")[2] if kind else "an error"
    if name in ("AssertionError", "Failed"):
        return "a result is not what it should be"
    return f"a use that should work raises {name}"


def _indented(text: str, limit: int | None = None) -> list[str]:
    lines = [line for line in textwrap.dedent(text).strip("\n").splitlines() if line.strip() != ADVICE]
    return [f"    {line}".rstrip() for line in lines[:limit]]
