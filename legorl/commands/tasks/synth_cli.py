"""lego-tasks synth and synth-report: tasks from bugs put into libraries, and what came of it."""

import asyncio
import json
from pathlib import Path

import click

from legorl.options import (
    OK,
    Failure,
    command,
    each_path,
    emit,
    explain,
    explain_option,
    json_option,
    option,
    out_option,
    paths_argument,
    say,
    seed_option,
)


@command("synth")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=Path, exists=True))
@out_option
@option("--count", type=click.IntRange(1), default=25, help="Most tasks of each source.")
@seed_option
@option("--heldout", multiple=True, metavar="NAME", help="Library whose tasks get the split heldout; repeatable.")
@option("-c", "--concurrency", type=click.IntRange(1), default=2, help="Sandboxes at once.")
@explain_option
def synth(
    sources: tuple[Path, ...],
    out: Path,
    count: int,
    seed: int,
    heldout: tuple[str, ...],
    concurrency: int,
    **more: bool,
) -> int:
    """Make tasks by putting bugs into libraries that bring their tests.

    \b
    Examples:
      pip download --no-deps --no-binary :all: boltons==26.2.0
      lego-tasks synth boltons-26.2.0.tar.gz --out tasks/boltons --count 40
      lego-tasks synth *.tar.gz --out tasks/synth --heldout inflection --heldout schema
      lego-tasks list tasks/synth | lego-tasks check -c 2

    SOURCE is an sdist, a git repository or a folder. Its tests must pass with the standard library and pytest alone;
    they run in sandboxes. A bug becomes a task if at least one test notices it, five do not, at most half fail, and
    three runs agree. Prints the path of each task as it is made; the same command run again goes on.
    """
    from legorl.commands.tasks.synth import Options, synthesise
    from legorl.commands.tasks.synth_source import SourceError, unpacked
    from legorl.sandbox import SandboxError
    from legorl.shards import OutDir

    settings = {"family": "synth", "seed": seed, "heldout": sorted(heldout)}
    if more["explain"]:
        explain(
            {**settings, "sources": [str(s) for s in sources], "count": count, "concurrency": concurrency, "out": out}
        )
        return OK

    async def make(source: Path) -> int:
        made = 0
        with unpacked(source) as library:
            split = "heldout" if library.name in heldout else "train"
            options = Options(count, seed, split, concurrency)
            async for path in synthesise(library, out, options, lambda line: say(f"{library.label}: {line}")):
                emit(str(path))
                made += 1
            say(f"{library.label}: {made} tasks ({split})")
        return made

    made = failed = 0
    with OutDir(out, settings):
        for source in sources:
            try:
                made += asyncio.run(make(source))
            except SourceError as error:
                failed += 1
                say(str(error))
            except SandboxError as error:
                raise Failure(f"{source}: {error}") from error
    say(f"{made} tasks of {len(sources) - failed} libraries")
    if failed or not made:
        raise Failure(
            f"{failed} of {len(sources)} sources could not be used" if failed else f"{out}: no task was found"
        )
    return OK


@command("synth-report")
@paths_argument
@json_option
def synth_report(paths: tuple[str, ...], as_json: bool) -> int:
    """Print what synth made of each library: tasks by kind and level, and why other mutants make none.

    \b
    Examples:
      lego-tasks synth-report tasks/synth
      lego-tasks synth-report tasks/synth --json | grep '"split": "heldout"'

    Each PATH is a folder that synth wrote to, or one above it; without one, paths are read from stdin.
    """
    from legorl.commands.tasks.synth_report import report, table

    made = list(report([Path(path) for path in each_path(paths)]))
    if not made:
        raise Failure("no task and no note of synth is there")
    for line in (json.dumps(each.to_json()) for each in made) if as_json else table(made):
        emit(line)
    return OK
