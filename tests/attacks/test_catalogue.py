"""The catalogue is covered, and every flag that the grader can raise is explained."""

import re
from pathlib import Path

from attacks.by_deed import DEEDS
from attacks.by_patch import HONEST, PATCHES

from legorl.commands.grade import actions, suspicions

DOCS = (Path(__file__).parents[2] / "docs" / "grading.md").read_text()
# Rows whose attack acts before there is a patch, and rows that end with an outcome of their own instead of a flag.
DEED_ROWS = {17, 18, 19, 20, 21, 22, 24, 25, 26, 27}


def test_every_row_of_the_catalogue_is_an_attack_and_raises_a_flag() -> None:
    attacks = [*PATCHES.values(), *DEEDS.values()]
    assert {row for attack in attacks for row in attack.rows} == set(range(1, 29))
    flagged = {row for attack in attacks for row in attack.rows if attack.flags or getattr(attack, "outcome", None)}
    assert flagged == set(range(1, 29))
    assert {row for deed in DEEDS.values() for row in deed.rows} >= DEED_ROWS
    assert sum(not attack.rows for attack in attacks) >= 10
    assert HONEST["solution"].flags == set() and DEEDS["honest"].flags == set()


def test_the_docs_map_every_row_to_its_attacks_and_flags() -> None:
    table = {}
    for line in DOCS.splitlines():
        if match := re.match(r"\| (\d+) \| .* \| (.*) \| (.*) \|$", line):
            table[int(match[1])] = set(re.findall(r"`(\w+)`", match[2])), set(re.findall(r"`(\w+)`", match[3]))
    wanted: dict[int, tuple[set[str], set[str]]] = {row: (set(), set()) for row in range(1, 29)}
    for name, attack in [*PATCHES.items(), *DEEDS.items()]:
        for row in attack.rows:
            wanted[row][0].add(name)
            wanted[row][1].update(attack.flags or ())
    assert table == wanted


def test_every_flag_is_explained() -> None:
    used = {flag for attack in [*PATCHES.values(), *DEEDS.values(), *HONEST.values()] for flag in attack.flags or ()}
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", DOCS, re.M)
    explained = {flag for row in rows for flag in re.findall(r"\w+", row)}
    assert used | {*actions._PATTERNS, *suspicions._COMPILED} <= explained
