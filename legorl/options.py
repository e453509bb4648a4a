"""What every command shares: exit codes, the error edge, common options, reading paths.

Usage: a command is a click command made with `@command(...)` of this module; it raises `Failure` (or a library error
listed in `EXPECTED`) and the edge turns that into one line on stderr and an exit code from the one table below.
Nothing here imports torch, vllm, transformers or duckdb: `--help` stays quick.
"""

import asyncio
import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import click

from legorl import __version__
from legorl.share import Share

# The one table of exit codes.
OK = 0
FAILED = 1
USAGE = 2
LOST = 3  # more attempts lost to infrastructure than --max-lost allows
CHECK = 4  # a check did not hold: gate, verify, tasks check, canary, alert
INTERRUPTED = 130
TERMINATED = 143

EXIT_HELP = {
    OK: "done",
    FAILED: "failed",
    USAGE: "usage",
    LOST: "more attempts were lost to infrastructure than --max-lost allows",
    CHECK: "a check did not hold (gate, verify, tasks check)",
    INTERRUPTED: "interrupted",
    TERMINATED: "terminated",
}


class Failure(Exception):
    """An expected failure: one line that says what, where and how to mend it, and the exit code it ends with."""

    def __init__(self, message: str, code: int = FAILED):
        super().__init__(message)
        self.code = code


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, so that no `except Exception` keeps the process alive."""


class ReaderGone(Exception):
    """The reader of our stdout went away (`| head`): a normal end for a Unix tool."""


def printable(text: str) -> str:
    """Escape control characters (but newline and tab): text from a sandbox or a model must not drive a terminal."""
    return "".join(
        c
        if c in "\n\t" or (c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF)
        else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


_QUIET = "legorl.quiet"


def say(message: str) -> None:
    """Words go to stderr. Commands use this; the library never does."""
    if not quiet():
        print(printable(message), file=sys.stderr, flush=True)


def quiet() -> bool:
    """Was -q given?"""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_QUIET))


def verbose() -> bool:
    """Was -v given?"""
    return logging.getLogger("legorl").isEnabledFor(logging.DEBUG)


def emit(line: str) -> None:
    """Data goes to stdout, flushed line by line, so that the next stage of a pipe begins at once."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


def _version(context: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        emit(f"{context.find_root().info_name} {__version__}")
        context.exit(OK)


class _Edge:
    """Mixin for click commands: errors become one line and an exit code; SIGPIPE and SIGTERM as in Unix tools."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        kwargs.setdefault("prog_name", Path(sys.argv[0]).name)
        try:
            signal.signal(signal.SIGTERM, _raise_terminated)
            code = super().main(*args, **kwargs)  # type: ignore[misc]
            sys.stdout.flush()
        except (click.exceptions.Abort, KeyboardInterrupt):
            code = _tell("interrupted", INTERRUPTED)
        except Terminated:
            code = _tell("terminated", TERMINATED)
        except click.exceptions.Exit as stop:
            code = stop.exit_code
        except click.UsageError as error:
            error.show()
            code = USAGE
        except click.ClickException as error:
            code = _tell(error.format_message(), error.exit_code)
        except ReaderGone:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing more to flush at exit
            code = 128 + signal.SIGPIPE  # as a shell reports it
        except Exception as error:
            if verbose():
                traceback.print_exc()
            if isinstance(error, Failure):
                code = _tell(str(error), error.code)
            elif isinstance(error, OSError) and error.errno:
                code = _tell(f"{error.strerror}: {error.filename or ''}".rstrip(": "), FAILED)
            elif type(error).__module__.startswith("legorl"):
                code = _tell(str(error), getattr(error, "code", FAILED))
            else:
                code = _tell(f"{type(error).__name__}: {error} (run again with -v for the traceback)", FAILED)
        sys.exit(code if isinstance(code, int) else OK)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)  # type: ignore[misc]
        except BrokenPipeError as error:  # some other pipe or socket: click would exit without a word
            raise Failure("a process or server at the other end of a pipe went away") from error


class Option(click.Option):
    """An option that --help shows under a heading of its own, `group`."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group


class Command(_Edge, click.Command):
    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options heading by heading, those without one last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record and not isinstance(parameter, click.Argument):
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for name in sorted(groups, key=lambda name: name == "Options"):
            with formatter.section(name):
                formatter.write_dl(groups[name])


class Group(_Edge, click.Group):
    pass


def _tell(message: str, code: int) -> int:
    name = Path(sys.argv[0]).name
    line = printable(" ".join(message.split("\n")))
    print(f"{name}: {line}", file=sys.stderr, flush=True)
    return code


def _raise_terminated(_signum: int, _frame: Any) -> None:
    raise Terminated


def run(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` as the whole of a command: the first SIGINT or SIGTERM cancels it (it cleans up), the second kills.

    A handler that raises, as outside of asyncio, would do so inside any callback, and some of those swallow it.
    """
    return asyncio.run(_interruptible(work))


async def _interruptible(work: Coroutine[Any, Any, int]) -> int:
    loop, task, caught = asyncio.get_running_loop(), asyncio.ensure_future(work), []

    def stop(number: int) -> None:
        caught.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not caught:
            raise
        raise (KeyboardInterrupt if caught[0] == signal.SIGINT else Terminated) from None


CONTEXT = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": None, "max_content_width": 110}


def command(name: str, group: bool = False) -> Callable[[Callable], Any]:
    """Decorator: make `function` the click command `name`, with -h, --version, -q, -v and the error edge."""

    def wrap(function: Callable) -> Any:
        kind: Any = Group if group else Command
        make = click.group if group else click.command
        function = click.option(
            "--version",
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_version,
            help="Print the version and exit.",
        )(function)
        function = click.option(
            "-v", "--verbose", is_flag=True, expose_value=False, callback=_loudness, help="Say more; show tracebacks."
        )(function)
        function = click.option(
            "-q", "--quiet", is_flag=True, expose_value=False, callback=_silence, help="Say only errors."
        )(function)
        return make(name, cls=kind, context_settings=CONTEXT)(function)

    return wrap


def _loudness(_context: click.Context, _param: click.Parameter, value: bool) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    if value:  # given before or after the name of a sub-command
        logging.getLogger().setLevel(logging.DEBUG)
        logging.getLogger("legorl").setLevel(logging.DEBUG)
    elif logging.getLogger("legorl").level == logging.NOTSET:
        logging.getLogger("legorl").setLevel(logging.INFO)


def _silence(context: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:  # given before or after the name of a sub-command
        context.meta[_QUIET] = True


def env(name: str) -> str:
    """Environment twin of an option: --max-lost is LEGORL_MAX_LOST."""
    return "LEGORL_" + name.strip("-").replace("-", "_").upper()


def option(name: str, *rest: Any, **kwargs: Any) -> Callable:
    """click.option with its LEGORL_* environment twin, its default shown and, with `group`, a heading in --help."""
    kwargs.setdefault("cls", Option)
    kwargs.setdefault("envvar", env(name))
    kwargs.setdefault("show_default", True)
    return click.option(name, *rest, **kwargs)


out_option = option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder to write to; rerun to continue."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
explain_option = click.option("--explain", is_flag=True, help="Print the resolved configuration and stop.")
seed_option = option("--seed", type=int, default=0, help="Seed of everything random.")
max_lost_option = option(
    "--max-lost", type=click.FloatRange(0, 1), default=0.2, help="Share of attempts that may be lost to infrastructure."
)


def _podman_urls(_context: click.Context, _param: click.Parameter, urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        if not re.fullmatch(r"local|unix:///.+|ssh://([^/@:]+@)?[^/@:]+(:\d+)?/.+", url):
            raise click.BadParameter(f"{url!r}: neither ssh://[USER@]HOST[:PORT]/PATH nor unix:///PATH nor local")
    return urls


def _share(_context: click.Context, _param: click.Parameter, text: str) -> Share:
    try:
        return Share.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


podman_option = option(
    "--podman",
    multiple=True,
    metavar="URL",
    callback=_podman_urls,
    help="Open sandboxes on this Podman host: ssh://[USER@]HOST[:PORT]/PATH or unix:///PATH of its service's socket; "
    "repeatable, and `local` is this machine.  [default: local]",
    show_default=False,
)
shard_option = option(
    "--shard",
    default="1/1",
    metavar="I/N",
    callback=_share,
    envvar=None,  # a pipeline's later stages would each take a part of the part
    help="Do only the I-th of N equal parts of the list: the same list in N jobs is all of it once.",
)
paths_argument = click.argument("paths", nargs=-1, metavar="[PATH]...")


def each_path(paths: tuple[str, ...], stdin: Any = None) -> Iterator[str]:
    """The paths to read: the arguments, or lines of stdin for `-` or no argument, as they arrive.

    Raises UsageError, at once, if nothing was given and stdin is a terminal.
    """
    stdin = stdin or sys.stdin
    if not paths:
        if stdin.isatty():
            raise click.UsageError("no PATH given and stdin is a terminal; give paths, or pipe them in")
        paths = ("-",)
    return _each(paths, stdin)


def _each(paths: tuple[str, ...], stdin: Any) -> Iterator[str]:
    for path in paths:
        if path != "-":
            yield path
            continue
        for line in iter(stdin.readline, ""):
            if line.strip():
                yield line.rstrip("\n")


def explain(config: dict[str, Any]) -> None:
    """Print the resolved configuration as JSON, for --explain."""
    emit(json.dumps(config, indent=2, default=str, sort_keys=True))
