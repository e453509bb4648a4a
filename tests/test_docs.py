"""README and docs say what is so: commands and options exist, tables agree with the code, examples can be parsed."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from legorl import metrics, options, outcomes, schema

ROOT = Path(__file__).parent.parent
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
COMMANDS = sorted(path.parent.name for path in (ROOT / "legorl" / "commands").glob("*/cli.py"))
FORMAT = (ROOT / "docs" / "format.md").read_text()
MEANINGS = tomllib.loads((metrics.FOLDER / "columns.toml").read_text())


def main_of(name):
    return importlib.import_module(f"legorl.commands.{name}.cli").main


def section(title):
    """The text below the heading `title` of docs/format.md, up to the next heading."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", FORMAT, re.M | re.S)
    assert found, title
    return found[1]


def table(title):
    """The rows of the table in that section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [tuple(cell.strip().strip("`") for cell in line.strip("|").split("|")) for line in lines[2:]]


def columns(fields, view):
    """The table that documents `fields`; the view calls a turn's index `turn`."""
    rows = []
    for field in fields:
        if field.name == "turns":
            rows.append(("turns", "list<turn>", "one for each call of the model, in order; next table"))
            continue
        name = "turn" if (view, field.name) == ("turns", "index") else field.name
        meaning = MEANINGS[view][name].replace(" (`index` in the file)", "").strip("`")
        rows.append((field.name, str(field.type).replace("item: ", ""), meaning))
    return rows


@pytest.mark.parametrize(
    ("title", "fields", "view"),
    [
        (schema.TRAJECTORY_FORMAT, schema.TRAJECTORY, "trajectories"),
        ("turns[]", schema.TURN, "turns"),
        (schema.UPDATE_FORMAT, schema.UPDATE, "updates"),
        (schema.METRIC_FORMAT, schema.METRIC, "metrics"),
    ],
)
def test_every_column_is_documented_with_its_type_and_meaning(title, fields, view):
    assert table(title) == columns(fields, view)


def test_outcomes_reasons_and_exit_codes_are_documented():
    assert dict(table("Outcomes")) == outcomes.BLAME
    assert dict(table("Reasons")) == {**outcomes.DROP_REASONS, **outcomes.TRAIN_REASONS}
    assert {int(code): meaning for code, meaning in table("Exit codes")} == options.EXIT_HELP


def test_meanings_are_of_columns_that_the_views_have():
    connection = metrics.connect()
    for view in metrics.VIEWS:
        found = [name for name, *_ in connection.execute(f"describe {view}").fetchall()]
        assert list(MEANINGS[view]) == found


# Examples: every command line in the docs and in the help texts.


def lines_of(text):
    """Lines of `text` with continuations joined."""
    return re.sub(r"\\\n\s*", " ", text).splitlines()


def calls(text):
    """Yield (command, words after it) for each `lego-NAME ...` in `text`, up to the end of that command."""
    for line in lines_of(text):
        for found in re.finditer(r"(?<![\w/.-])(?:\.?/?(?:[\w.-]+/)*)lego-([a-z]+)\b([^`]*)", line):
            words = []
            try:
                parsed = shlex.split(found[2].split("  #")[0], comments=True)
            except ValueError:  # a quote that the prose closes elsewhere
                parsed = found[2].split()
            for word in parsed:
                if word in {"|", "&&", ";", ">", "<", "--", "||", "&"} or word.startswith("lego-"):
                    break
                words.append(word)
            yield found[1], words


def flags_of(one):
    return {flag for param in one.params for flag in [*param.opts, *param.secondary_opts]}


def below(one):
    """The command and all its sub-commands."""
    yield one
    for each in getattr(one, "commands", {}).values():
        yield from below(each)


def wrong_options(name, words):
    """The options among `words` that the command (and its sub-commands in them) does not have."""
    one = main_of(name)
    known = {"-h", "--help"} | flags_of(one)
    for word in words:
        if isinstance(one, click.Group) and word in one.commands:
            one = one.commands[word]
            known |= flags_of(one)
    return [word for word in words if re.match(r"--[a-z]", word) and word.split("=")[0] not in known]


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_commands_and_options_in_the_docs_exist(path):
    text = path.read_text()
    for name, words in calls(text):
        assert name in COMMANDS, f"{path.name}: lego-{name}"
        assert not wrong_options(name, words), f"{path.name}: lego-{name} {' '.join(words)}"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_options_named_in_the_docs_exist_somewhere(path):
    known = {"--help", "--version"}
    for name in COMMANDS:
        for each in below(main_of(name)):
            known |= flags_of(each)
    for found in re.finditer(r"`(--[a-z][a-z-]*)", path.read_text()):
        assert found[1] in known, f"{path.name}: {found[1]}"


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_the_help_have_real_options(name):
    for each in below(main_of(name)):
        found = list(calls(each.help or ""))
        assert found, each.name
        for other, words in found:
            if other in COMMANDS:
                assert not wrong_options(other, words), f"lego-{other} {' '.join(words)}"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_between_the_docs_lead_somewhere(path):
    for found in re.finditer(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / found[1]).exists(), f"{path.name}: {found[1]}"


def test_the_readme_names_every_command():
    text = (ROOT / "README.md").read_text()
    assert not [name for name in COMMANDS if f"lego-{name}" not in text]


def test_the_queries_in_the_docs_can_be_run():
    connection = metrics.connect()
    for path in DOCS:
        for name, words in calls(path.read_text()):
            if name == "inspect" and words[:1] == ["sql"]:
                query = next(word for word in words[1:] if not word.startswith("-"))
                connection.execute(query).fetchall()
