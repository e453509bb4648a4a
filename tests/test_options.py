"""The contract that all commands share, tested on a small command of its own and on the six real ones."""

import importlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl import __version__, options

COMMANDS = ("tasks", "serve", "rollout", "grade", "train", "inspect")
HEAVY = ("torch", "vllm", "transformers", "duckdb")

PROBE = '''
import asyncio, errno, os, signal, sys, time
import click
from legorl import options, shards

async def task():
    options.emit("ready")
    try:
        await asyncio.sleep(60)
    finally:
        options.emit("cleaned up")

@options.command("lego-probe")
@options.option("--level", type=int, default=1, help="A number.")
@options.option("--how", default="lines", help="What to do.")
@options.max_lost_option
@options.paths_argument
def main(level, how, max_lost, paths):
    """Probe the shared parts.

    Example: lego-probe --how lines
    """
    if how == "lines":
        for path in options.each_path(paths):
            options.emit(path)
    elif how == "level":
        options.emit(str(level))
    elif how == "say":
        options.say("words")
        options.emit("data")
    elif how == "flood":
        while True:
            options.emit("x" * 1000)
    elif how == "hang":
        options.emit("ready")
        time.sleep(60)
    elif how == "task":
        options.run(task())
    elif how == "failure":
        raise options.Failure("two\\nlines \\x1b[31m", options.CHECK)
    elif how == "shard":
        raise shards.ShardError("x.parquet: broken; make it again")
    elif how == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/a.parquet")
    elif how == "bug":
        raise RuntimeError("unexpected")
    elif how == "pipe":
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    elif how == "usage":
        raise click.UsageError("not like that")
    elif how == "exit":
        sys.exit(options.LOST)

main()
'''


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe") / "lego-probe"
    path.write_text(PROBE)
    return [sys.executable, str(path)]


def run(argv, stdin="", **kwargs):
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=120, check=False, **kwargs)


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("lines", options.OK, ""),
        ("failure", options.CHECK, "lego-probe: two lines \\x1b[31m\n"),
        ("shard", options.FAILED, "lego-probe: x.parquet: broken; make it again\n"),
        ("disk", options.FAILED, "lego-probe: No space left on device: out/a.parquet\n"),
        ("bug", options.FAILED, "lego-probe: RuntimeError: unexpected (run again with -v for the traceback)\n"),
        ("pipe", options.FAILED, "lego-probe: a process or server at the other end of a pipe went away\n"),
        ("exit", options.LOST, ""),
    ],
)
def test_each_end_has_its_code_and_at_most_one_line(probe, how, code, says):
    done = run([*probe, "--how", how])
    assert (done.returncode, done.stderr, done.stdout) == (code, says, "")


@pytest.mark.parametrize("argv", [["--how", "usage"], ["--nonsense"], ["--level", "three"], ["--max-lost", "2"]])
def test_usage_errors_end_with_2_and_point_to_the_help(probe, argv):
    done = run([*probe, *argv])
    assert done.returncode == options.USAGE
    assert "--help" in done.stderr or "-h" in done.stderr
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("how", "code"), [("bug", options.FAILED), ("failure", options.CHECK)])
def test_verbose_shows_the_traceback_and_keeps_the_code(probe, how, code):
    done = run([*probe, "--how", how, "-v"])
    assert done.returncode == code
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("lego-probe: ")


def test_a_reader_that_goes_away_is_no_error(probe):
    pipe = f"set -o pipefail; '{probe[0]}' '{probe[1]}' --how flood | head -1; echo ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", pipe])
    assert done.stdout == "x" * 1000 + "\n141\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(signal.SIGTERM, options.TERMINATED, "terminated"), (signal.SIGINT, options.INTERRUPTED, "interrupted")],
)
@pytest.mark.parametrize(("how", "after"), [("hang", ""), ("task", "cleaned up\n")])
def test_signals(probe, how, after, number, code, says):
    process = subprocess.Popen([*probe, "--how", how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    data, words = process.communicate(timeout=60)
    assert (process.returncode, data, words.strip()) == (code, after, f"lego-probe: {says}")


def test_paths_come_from_arguments_from_a_dash_or_from_stdin(probe):
    assert run([*probe, "a", "b"], "c\n").stdout == "a\nb\n"
    assert run([*probe, "-"], "c\n\nd e\n").stdout == "c\nd e\n"
    assert run([*probe], "c\nd").stdout == "c\nd\n"
    assert run([*probe, "a", "-", "b"], "c\n").stdout == "a\nc\nb\n"


def test_each_path_is_handed_on_before_the_next_arrives(probe):
    with subprocess.Popen(probe, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        for path in ("first", "second"):
            process.stdin.write(f"{path}\n")
            assert process.stdout.readline() == f"{path}\n"  # would wait for ever if it were held back
        process.stdin.close()
        assert process.wait(60) == 0


def test_no_path_and_a_terminal_is_a_usage_error(probe):
    master, slave = pty.openpty()
    try:
        done = subprocess.run(probe, stdin=slave, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == options.USAGE
    assert "stdin is a terminal" in done.stderr


def test_a_flag_wins_over_the_environment_and_that_over_the_default(probe):
    argv, with_env = [*probe, "--how", "level"], os.environ | {"LEGORL_LEVEL": "2"}
    assert run(argv).stdout == "1\n"
    assert run(argv, env=with_env).stdout == "2\n"
    assert run([*argv, "--level", "3"], env=with_env).stdout == "3\n"


def test_words_go_to_stderr_and_quiet_silences_them(probe):
    done = run([*probe, "--how", "say"])
    assert (done.stdout, done.stderr) == ("data\n", "words\n")
    done = run([*probe, "--how", "say", "-q"])
    assert (done.stdout, done.stderr) == ("data\n", "")


def test_version(probe):
    assert run([*probe, "--version"]).stdout == f"lego-probe {__version__}\n"


@given(st.text())
def test_printable_leaves_nothing_that_drives_a_terminal(text):
    shown = options.printable(text)
    assert all(c in "\n\t" or c.isprintable() for c in shown)
    shown.encode()  # lone surrogates are gone


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_printable_leaves_what_is_harmless_as_it_is(text):
    assert options.printable(text) == text


def test_printable_shows_what_was_there():
    assert options.printable("a\x1b[2J\r\u202eb\x9b\n") == "a\\x1b[2J\\r\\u202eb\\x9b\n"


def test_every_exit_code_is_explained():
    codes = {value for name, value in vars(options).items() if name.isupper() and isinstance(value, int)}
    assert codes == set(options.EXIT_HELP)


# The six real commands.

LIGHT = """
import importlib, json, sys
name, argvs, heavy = json.loads(sys.argv[1])
codes = []
for argv in argvs:
    main = importlib.import_module(f"legorl.commands.{name}.cli").main
    sys.argv = ["lego-" + name, *argv]
    try:
        main()
    except SystemExit as stop:
        codes.append(stop.code)
print(json.dumps([codes, [module for module in heavy if module in sys.modules]]), file=sys.stderr)
"""


def main_of(name):
    return importlib.import_module(f"legorl.commands.{name}.cli").main


def each_command(name):
    """(path of names, click command) for the command and its sub-commands."""
    main = main_of(name)
    yield [f"lego-{name}"], main
    for sub, one in getattr(main, "commands", {}).items():
        yield [f"lego-{name}", sub], one


@pytest.mark.parametrize("name", COMMANDS)
def test_help_version_and_usage_errors_are_light(name):
    subs = [path[1:] for path, _ in each_command(name)]
    argvs = [[*sub, "--help"] for sub in subs] + [[*sub, "--version"] for sub in subs]
    argvs += [[*sub, "--no-such-option"] for sub in subs]
    done = run([sys.executable, "-c", LIGHT, json.dumps([name, argvs, HEAVY])])
    codes, loaded = json.loads(done.stderr.splitlines()[-1])
    assert codes == [0] * (2 * len(subs)) + [2] * len(subs)
    assert loaded == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_one_sentence_and_examples(name):
    for path, one in each_command(name):
        where = " ".join(path)
        paragraphs = [part.strip() for part in (one.help or "").split("\n\n")]
        assert paragraphs[0].endswith("."), where
        assert ". " not in paragraphs[0], where
        assert f"lego-{name}" in paragraphs[1], where


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_every_command_has_the_common_ones(name):
    for path, one in each_command(name):
        where = " ".join(path)
        flags = {flag for param in one.params for flag in param.opts}
        assert {"-q", "-v", "--version"} <= flags, where
        for param in one.params:
            if isinstance(param, click.Option):
                assert param.help, f"{where} {param.opts[0]}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_installed_command_and_the_link_in_bin_are_the_same(name):
    for folder in (Path(sys.executable).parent, Path(__file__).parent.parent / "bin"):
        done = run([str(folder / f"lego-{name}"), "--version"])
        assert (done.returncode, done.stdout) == (0, f"lego-{name} {__version__}\n")
