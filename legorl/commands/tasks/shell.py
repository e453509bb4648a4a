"""The `shell` family: small file tasks drawn from a seed, in kinds, levels and splits.

    for draft in islice(drafts(seed=1, kinds=(), levels=(0,), splits=("train",)), 24): ...

A task is named by kind, level, split and number, and drawn from a seed made of these and the family seed: so it never
depends on how many tasks are made, and a longer run begins with the shorter one.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from legorl.commands.tasks import (
    shell_follow,
    shell_kinds_lines,
    shell_kinds_make,
    shell_kinds_place,
    shell_kinds_query,
    shell_kinds_repair,
    shell_kinds_several,
    shell_kinds_tables,
    shell_kinds_text,
)
from legorl.commands.tasks.build import Draft
from legorl.commands.tasks.shell_job import Job
from legorl.task import SPLITS

Kind = Callable[[Job], None]

LEVELS = (0, 1, 2, 3)
SHARES = {"train": 3, "dev": 1, "heldout": 1, "unseen": 1}  # where several splits are made at once
TRAINED: tuple[Kind, ...] = (
    *(shell_kinds_make.create, shell_kinds_make.empty, shell_kinds_make.mkdir, shell_kinds_make.tree),
    *(shell_kinds_make.pack, shell_kinds_make.unpack),
    *(shell_kinds_place.rename, shell_kinds_place.move, shell_kinds_place.copy, shell_kinds_place.delete),
    shell_kinds_place.executable,
    *(shell_kinds_lines.append, shell_kinds_lines.prepend, shell_kinds_lines.edit_line),
    *(shell_kinds_lines.insert_line, shell_kinds_lines.delete_line, shell_kinds_lines.number_lines),
    *(shell_kinds_text.replace, shell_kinds_text.config, shell_kinds_text.template),
    *(shell_kinds_query.search, shell_kinds_query.count_lines, shell_kinds_query.count_words),
    *(shell_kinds_query.count_matches, shell_kinds_query.head_tail, shell_kinds_query.find),
    *(shell_kinds_tables.column, shell_kinds_tables.sort, shell_kinds_tables.unique),
    *(shell_kinds_tables.json_field, shell_kinds_tables.csv_sum),
    *(shell_kinds_several.join, shell_kinds_several.split),
    *(shell_kinds_repair.repair_shell, shell_kinds_repair.repair_python),
)
NEVER_TRAINED: tuple[Kind, ...] = (
    *(shell_kinds_place.symlink, shell_kinds_place.lowercase, shell_kinds_text.dedupe),
    *(shell_kinds_text.line_endings, shell_kinds_tables.tally, shell_kinds_tables.compare),
)


def _named(kinds: tuple[Kind, ...]) -> dict[str, Kind]:
    return {kind.__name__.replace("_", "-"): kind for kind in kinds}


KINDS = _named(TRAINED + NEVER_TRAINED)
UNSEEN = frozenset(_named(NEVER_TRAINED))


def generator_digest() -> str:
    """Return a digest of the code that draws tasks: the same settings give the same bytes only under the same code."""
    total = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("shell*.py")):
        total.update(file.read_bytes())
    return total.hexdigest()[:16]


def make(kind: str, level: int, split: str, number: int, seed: int) -> Draft:
    """Draw task `number` of its kind, level and split."""
    ident = f"shell-{kind}-{level}-{split}-{number:04d}"
    rng = random.Random(f"{seed}/{ident}")
    job = Job(kind, level, split, rng)
    KINDS[kind](job)
    if level == 3:
        shell_follow.follow(job)
    return job.draft(ident)


def drafts(seed: int, kinds: tuple[str, ...], levels: tuple[int, ...], splits: tuple[str, ...]) -> Iterator[Draft]:
    """Yield tasks without end, spread evenly: each round has one of every kind, and each kind goes through its levels
    and splits in an order of its own, `SHARES` of each split.

    Empty `kinds` means all that the splits allow. Kinds of `unseen` occur in that split only, and no other kind does.
    Yields nothing if no kind fits any split.
    """
    cells: dict[str, list[tuple[int, str]]] = {}
    for kind in kinds or KINDS:
        fitting = [split for split in SPLITS if split in splits and (split == "unseen") == (kind in UNSEEN)]
        mine = [
            (level, split) for split in fitting for level in LEVELS if level in levels for _ in range(SHARES[split])
        ]
        if mine:
            cells[kind] = random.Random(kind).sample(mine, len(mine))
    made: Counter[tuple[str, int, str]] = Counter()
    turn = 0
    while cells:
        for kind, mine in cells.items():
            level, split = mine[turn % len(mine)]
            yield make(kind, level, split, made[kind, level, split], seed)
            made[kind, level, split] += 1
        turn += 1
