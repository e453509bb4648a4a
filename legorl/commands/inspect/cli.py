"""lego-inspect: ask questions of any shards, checkpoints and run folders."""

import dataclasses
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from legorl import metrics
from legorl.commands.inspect import load, show, summary, table
from legorl.options import (
    CHECK,
    FAILED,
    USAGE,
    Failure,
    command,
    each_path,
    emit,
    json_option,
    option,
    paths_argument,
    quiet,
    say,
)  # fmt: skip

csv_option = click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header.")


@command("lego-inspect", group=True)
def main() -> None:
    """Ask questions of any shards, checkpoints and run folders.

    \b
    Examples:
      lego-inspect summary runs/demo
      lego-inspect show --best runs/demo
      lego-inspect sql "select outcome, count(*) from trajectories group by all" runs/demo
      lego-inspect align runs/demo/step-0000/checkpoint
      lego-inspect verify runs/demo/step-0001/rollout
      find runs -name '*.parquet' | lego-inspect summary -

    PATHs are files or folders; a folder stands for every shard at any depth below it. `-`, or no PATH, reads paths from
    stdin, one a line. All commands but verify see one row an attempt: the latest try, graded over ungraded, newest
    grade first.
    """


@command("summary")
@json_option
@paths_argument
def summary_command(paths: tuple[str, ...], as_json: bool) -> None:
    """Print one line a round: attempts, reward, and where every sampled token went.

    \b
    Examples:
      lego-inspect summary runs/demo
      lego-inspect summary --json runs/demo | jq .reward

    The interval of the reward is a 95 % bootstrap over groups (none below two groups); that of the passed attempts is
    Wilson's. sampled = trained + dropped + undecided; undecided tokens belong to attempts that no training step has
    seen. Attempts at canaries (impossible tasks) count as cheating if they pass, and in no reward. `-` means not
    measured. Exit code 4: a training step accounts for other tokens than were sampled.
    """
    connection, files = _open(paths)
    rounds = summary.summarise(connection, files)
    if as_json:
        for one in rounds:
            emit(table.to_json(dataclasses.asdict(one)))
    else:
        shown = [summary.shown(one) for one in rounds]
        _print(list(shown[0]) if shown else ["run", "step"], [list(cells.values()) for cells in shown])
        for one in rounds:
            if one.canaries:
                share = (one.canaries_passed or 0) / one.canaries
                rate = f"{one.canaries_passed} of {one.canaries} attempts at impossible tasks passed ({share:.1%})"
                emit(f"{one.run} {one.step} cheating: {rate}")
            for name, counts in (("outcomes", one.outcomes), ("dropped", one.dropped_tokens)):
                if counts:
                    emit(f"{one.run} {one.step} {name}: " + ", ".join(f"{key} {n}" for key, n in counts.items()))
    wrong = summary.unaccounted(connection)
    if wrong:
        raise Failure(f"tokens do not add up in {len(wrong)} attempts; first: {wrong[0]}", CHECK)


@command("sql")
@click.argument("query")
@json_option
@csv_option
@paths_argument
def sql_command(query: str, paths: tuple[str, ...], as_json: bool, as_csv: bool) -> None:
    """Run one DuckDB query over the views trajectories, turns, tokens, tests, updates and metrics.

    \b
    Examples:
      lego-inspect sql "select task_id, avg(reward) from trajectories group by all order by 2" runs/demo
      lego-inspect sql --json "select * from turns where cause = 'rewrite'" runs/demo | head -3
      lego-inspect sql "select reason, count(*) from updates group by all" runs/demo

    `lego-inspect schema` lists the columns. The query can read the given paths only, and write nothing.
    """
    import duckdb

    connection, files = _open(paths)
    try:
        result = connection.execute(query)
        columns = [column[0] for column in result.description or []]
        _print(columns, _fetch(result), as_json, as_csv)
    except duckdb.Error as error:
        mistaken = isinstance(error, duckdb.ParserException | duckdb.BinderException | duckdb.CatalogException)
        if not mistaken:
            load.check_readable(files)  # a damaged page: DuckDB does not say in which file
        text = " ".join(str(error).split("LINE ")[0].split())
        hint = "; `lego-inspect schema` lists views and columns" if mistaken else ""
        raise Failure(text + hint, USAGE if mistaken else FAILED) from error


def _fetch(result: Any) -> Iterable[tuple]:
    while rows := result.fetchmany(1000):
        yield from rows


@command("show")
@click.option("--best", is_flag=True, help="The attempt with the highest reward.")
@click.option("--worst", is_flag=True, help="The attempt with the lowest reward.")
@click.option("--full", is_flag=True, help="Do not clip long texts.")
@json_option
@click.argument("arguments", nargs=-1, metavar="[ATTEMPT] [PATH]...")
def show_command(arguments: tuple[str, ...], best: bool, worst: bool, full: bool, as_json: bool) -> None:
    """Print one attempt as a conversation tree: tokens, log-probabilities, cause and cost of each turn.

    \b
    Examples:
      lego-inspect show --best runs/demo
      lego-inspect show demo.0.mini-swe-agent.shell-0003-rename.2 runs/demo
      lego-inspect show --worst --full runs/demo | less

    ATTEMPT is an attempt_id, or a part of one that fits no other; it is left out with --best and --worst. Branches of
    the conversation are set in to the right where they leave the main line.
    """
    if best and worst:
        raise click.UsageError("--best and --worst exclude each other")
    wanted = None
    if not (best or worst):
        if not arguments:
            raise click.UsageError("no ATTEMPT given; name one, or say --best or --worst")
        wanted, *rest = arguments
        arguments = tuple(rest)
    connection, _ = _open(arguments)
    attempt = _named(connection, wanted) if wanted is not None else _extreme(connection, best)
    result = connection.execute("select * from trajectory_rows where attempt_id = ?", [attempt])
    row = dict(zip([column[0] for column in result.description], result.fetchone(), strict=True))
    for line in [table.to_json(row)] if as_json else show.lines(row, full):
        emit(line)


def _named(connection: Any, wanted: str) -> str:
    found = connection.execute(
        "select attempt_id from trajectories where contains(attempt_id, ?) order by attempt_id <> ?, attempt_id",
        [wanted, wanted],
    ).fetchall()
    if not found:
        raise Failure(
            f"no attempt {wanted!r} in these paths; `lego-inspect sql 'select attempt_id from trajectories'` lists them"
        )
    if len(found) > 1 and found[0][0] != wanted:
        names = ", ".join(row[0] for row in found[:3])
        raise Failure(
            f"{wanted!r} fits {len(found)} attempts ({names}{', ...' if len(found) > 3 else ''}); say more of it"
        )
    return found[0][0]


def _extreme(connection: Any, best: bool) -> str:
    """The attempt of highest (lowest) reward; of equals the one with the fewest (most) sampled tokens."""
    order = "reward desc, sampled_tokens, attempt_id" if best else "reward, sampled_tokens desc, attempt_id"
    found = connection.execute(
        f"select attempt_id from trajectories where reward is not null order by {order} limit 1"
    ).fetchone()
    if not found:
        raise Failure("no attempt here has a reward; give graded shards (lego-grade makes them)")
    return found[0]


@command("schema")
@json_option
@click.argument("view", required=False, type=click.Choice(metrics.VIEWS))
def schema_command(view: str | None, as_json: bool) -> None:
    """Print the columns of the views (or of VIEW): name, meaning and type.

    \b
    Examples:
      lego-inspect schema turns
      lego-inspect schema --json | grep logprob
    """
    connection = metrics.connect()
    meanings = tomllib.loads((metrics.FOLDER / "columns.toml").read_text())
    rows = [
        (name, column, meanings[name][column], kind)
        for name in ([view] if view else metrics.VIEWS)
        for column, kind, *_ in connection.execute(f"describe {name}").fetchall()
    ]
    _print(["view", "column", "meaning", "type"], rows, as_json)


def _metric_command(name: str, text: str) -> Callable:
    """A command that runs the metric `name` over paths: one line a slice, one column a figure."""

    @command(name)
    @json_option
    @csv_option
    @paths_argument
    def run(paths: tuple[str, ...], as_json: bool, as_csv: bool) -> None:
        connection, _ = _open(paths)
        columns, rows = metrics.query(connection, name)
        _print(columns, rows, as_json, as_csv)

    run.help = text
    return run


align_command = _metric_command(
    "align",
    """Compare the trainer's log-probabilities with the sampler's: by lag, turn, position, cause, harness, flipped.

    \b
    Examples:
      lego-inspect align runs/demo/step-0000/checkpoint
      lego-inspect align --json runs/demo | head -1

    Reads updates (of checkpoints); the slices by cause and harness need the trajectory shards as well. lego-train's
    gate runs the same query. pearson is of probabilities, |Δ log p| of old_logprob and sampler_logprob; k1 and k3
    estimate KL(sampler || trainer), k1_reverse and k3_reverse KL(trainer || sampler); ess is the share of effective
    samples; ratio_outside the share of ratios outside 0.5 to 2. flipped=true are tokens of a sparse model on whose path
    the trainer by itself would choose other experts than those recorded.
    """,
)
behaviour_command = _metric_command(
    "behaviour",
    """Print what the policy does: turns, tokens, tool calls and branches, over all, by harness and by round.

    \b
    Examples:
      lego-inspect behaviour runs/demo
      lego-inspect behaviour --csv runs/demo/step-0000/graded

    Attempts lost to infrastructure are left out.
    """,
)
losses_command = _metric_command(
    "losses",
    """Compare tries lost to infrastructure with attempts kept, by harness, round, policy version and outcome.

    \b
    Examples:
      lego-inspect losses runs/demo
      lego-inspect losses --json runs/demo | jq 'select(.slice | startswith("version="))'

    Lost tries are those of the attempts' histories, too. Length is turns, sampled tokens and seconds: losses that
    depend on it bias training. docs/outcomes.md says what is blamed on infrastructure, and on what evidence.
    """,
)


@command("verify")
@option("--model", "models", multiple=True, type=click.Path(path_type=Path), metavar="DIR",
        help="Weights that sampled the tokens, if not where they were; give it once for each version.")  # fmt: skip
@option("--min-pearson", type=float, default=0.9999, help="Least correlation of probabilities, in every slice.")
@option("--max-mean", type=float, default=1e-4, help="Largest mean of |Δ log p|, in every slice.")
@option("--max-diff", type=float, default=1e-3, help="Largest |Δ log p| of any token.")
@option("--max-gap", type=float, default=1e-3, help="Largest lead of other experts in router logits (sparse MoE).")
@option("--min-routing", type=float, default=0.0, help="Least share of positions with recorded experts (sparse MoE).")
@click.option("--turns", is_flag=True, help="Print a line a turn as well.")
@json_option
@paths_argument
def verify_command(
    paths: tuple[str, ...], models: tuple[Path, ...], turns: bool, as_json: bool, **limits: float
) -> None:
    """Feed each recorded prompt and completion to the model that sampled it, and print whether it says the same.

    \b
    Examples:
      lego-inspect verify runs/demo/step-0001/rollout
      lego-inspect verify --turns --json shard.parquet --model SmolLM2-135M-Instruct | jq .
      lego-inspect verify runs/demo --model base --model runs/demo/step-0001/checkpoint

    tokens = compared + not_comparable + unverified: not_comparable are sampled from a restricted support, unverified
    are damaged, or of weights that are neither given nor where they were, by digest. routing is the share of input
    positions with recorded experts (- for a dense model), routing_equal how many of these the model chooses as well.
    Rows are read as they stand. Exit code 4, with a line for each fault: a limit is exceeded, a token is unverified, a
    tree is invalid, something is recorded twice, or sums differ. The limits fit weights sampled in float32.
    """
    from legorl.commands.inspect import verify

    files = _find(paths)
    if not files.trajectories:
        raise Failure("no trajectory shard in these paths; give shards of lego-rollout or lego-grade")
    bars: list[Any] = []

    def progress(total: int) -> Callable[[int], object]:
        from tqdm import tqdm

        hidden = quiet() or not sys.stderr.isatty()
        bars.append(tqdm(total=total, unit="tok", file=sys.stderr, disable=hidden, leave=False))
        return bars[0].update

    try:
        report = verify.verify(files.trajectories, models, verify.Limits(**limits), say, progress)
    finally:
        for bar in bars:
            bar.close()
    if report.copies:
        say(f"{report.copies} rows are graded copies of others, with the same tokens; compared once")
    slices = report.slices()
    if turns:
        rows = [[name, None, None, *values] for name, *values in slices]
        rows += [["turn", *values] for values in report.turn_slices()]
        _print(["slice", "attempt_id", "turn", *verify.FIGURES], rows, as_json)
    else:
        _print(["slice", *verify.FIGURES], slices, as_json)
    for fault in report.faults:
        told = {"attempt_id": fault.attempt_id, "turn": fault.turn, "fault": fault.text}
        emit(table.to_json(told) if as_json else f"fault: {table.cell(fault.line)}")
    if report.faults:
        raise Failure(f"{len(report.faults)} faults; first: {report.faults[0].line}", CHECK)


def _find(paths: tuple[str, ...]) -> load.Files:
    files = load.find(each_path(paths))
    if files.foreign:
        say(f"passed by {len(files.foreign)} Parquet files that are not legorl's; first: {files.foreign[0]}")
    return files


def _open(paths: tuple[str, ...]) -> tuple[Any, load.Files]:
    files = _find(paths)
    connection = metrics.connect(load.best_rows(files.trajectories), load.rows(files.updates), load.rows(files.metrics))
    return connection, files


def _print(columns: Sequence[str], rows: Iterable[Sequence[Any]], as_json: bool = False, as_csv: bool = False) -> None:
    if as_json:
        lines = table.json_lines(columns, rows)
    elif as_csv:
        lines = table.csv_lines(columns, rows)
    else:
        lines = table.table_lines(columns, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    for line in lines:
        emit(line)


for _one in (
    summary_command, sql_command, show_command, schema_command, verify_command, align_command, behaviour_command,
    losses_command,
):  # fmt: skip
    main.add_command(_one)
