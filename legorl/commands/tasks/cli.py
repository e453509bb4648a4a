"""lego-tasks: make, list and prove task sets."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from legorl.commands.tasks.check_cli import check
from legorl.commands.tasks.import_cli import import_group
from legorl.commands.tasks.synth_cli import synth, synth_report
from legorl.options import (
    OK,
    Failure,
    command,
    each_path,
    emit,
    json_option,
    option,
    out_option,
    paths_argument,
    seed_option,
)
from legorl.task import SPLITS

if TYPE_CHECKING:
    from legorl.commands.tasks.build import Draft

split_option = click.option(
    "--split", "splits", type=click.Choice(SPLITS), multiple=True, help="Only this split; may be given more than once."
)
kind_option = click.option(
    "--kind", "kinds", metavar="KIND", multiple=True, help="Only this kind; may be given more than once."
)
level_option = click.option(
    "--level", "levels", type=int, multiple=True, help="Only this level of difficulty (0 is easiest); repeatable."
)


@command("lego-tasks", group=True)
def main() -> None:
    """Make, list and prove tasks: small repositories with an instruction, hidden tests and a solution.

    \b
    Examples:
      lego-tasks shell --out tasks/shell --count 200 --seed 1
      lego-tasks snippets --out tasks/snippets
      lego-tasks synth boltons-26.2.0.tar.gz --out tasks/boltons
      lego-tasks import swe-bench dev.parquet --repos clones --out tasks/dev
      lego-tasks list tasks --split train --level 0
      lego-tasks list tasks --split train | shuf -n 8 | lego-tasks check -c 2 > good.list
    """


@command("shell")
@out_option
@option("--count", type=click.IntRange(1), required=True, help="How many tasks.")
@seed_option
@split_option
@level_option
@kind_option
def shell(
    out: Path, count: int, seed: int, splits: tuple[str, ...], levels: tuple[int, ...], kinds: tuple[str, ...]
) -> int:
    """Make small file tasks (create, rename, search, count, sort, repair a script, ...) from a seed.

    \b
    Examples:
      lego-tasks shell --out tasks/easy --count 24 --seed 1 --level 0 --split train
      lego-tasks shell --out tasks/shell --count 400 --seed 1
      lego-tasks shell --out tasks/sorting --count 10 --kind sort --kind unique

    Prints the path of each task. Kinds and levels are spread evenly, and of several splits `train` gets three times as
    many. The same seed gives the same bytes, and a larger --count adds to what is there. Tasks of the split `unseen`
    are of kinds that no other split has; `dev` and `heldout` share the kinds of `train`, but no name, content or
    phrasing.
    """
    from legorl.commands.tasks import shell as family

    if unknown := [kind for kind in kinds if kind not in family.KINDS]:
        raise click.UsageError(f"no kind {unknown[0]!r}; there are: {', '.join(family.KINDS)}")
    if missing := [level for level in levels if level not in family.LEVELS]:
        raise click.UsageError(f"no level {missing[0]}; there are: {', '.join(map(str, family.LEVELS))}")
    settings = {
        "family": "shell",
        "seed": seed,
        "kinds": kinds,
        "levels": levels or family.LEVELS,
        "splits": splits or SPLITS,
        "generator": family.generator_digest(),
    }
    drafts = family.drafts(seed, kinds, levels or family.LEVELS, splits or SPLITS)
    return _write(islice(drafts, count), out, settings)


@command("snippets")
@out_option
def snippets(out: Path) -> int:
    """Make repair tasks: small Python modules with one real bug each, and hidden pytest tests.

    \b
    Example:
      lego-tasks snippets --out tasks/snippets

    Prints the path of each task. The collection is fixed: there is no seed and no count.
    """
    from legorl.commands.tasks import snippets as family

    return _write(family.drafts(), out, {"family": "snippets", "generator": family.collection_digest()})


def _write(drafts: Iterable["Draft"], out: Path, settings: dict[str, object]) -> int:
    from legorl.commands.tasks.build import write_tasks
    from legorl.shards import OutDir

    with OutDir(out, settings):
        made = 0
        for path in write_tasks(drafts, out):
            emit(str(path))
            made += 1
    if not made:
        raise Failure(f"{out}: these kinds do not occur in these splits, so there is nothing to make")
    return OK


@command("list")
@paths_argument
@split_option
@click.option("--family", "families", metavar="FAMILY", multiple=True, help="Only this family; repeatable.")
@kind_option
@level_option
@json_option
def list_tasks(
    paths: tuple[str, ...],
    splits: tuple[str, ...],
    families: tuple[str, ...],
    kinds: tuple[str, ...],
    levels: tuple[int, ...],
    as_json: bool,
) -> int:
    """Print the paths of tasks, all or by label.

    \b
    Examples:
      lego-tasks list tasks/shell
      lego-tasks list tasks --split train --level 0 | shuf -n 8 | lego-rollout - --out rollout ...
      lego-tasks list tasks --json | head -n 1

    Each PATH is a task folder or a folder with tasks at any depth; without one, paths are read from stdin.
    """
    from legorl.commands.tasks.listing import Selection, describe, select

    selection = Selection(splits, families, kinds, levels)
    for path in each_path(paths):
        for folder, task in select(Path(path), selection):
            emit(json.dumps(describe(folder, task), ensure_ascii=False) if as_json else str(folder))
    return OK


for each in (shell, snippets, synth, synth_report, import_group, list_tasks, check):
    main.add_command(each)
