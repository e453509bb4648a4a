"""What a test log says of each test: SWE-bench's parsers for Python, for tasks of which nothing but a log can be had.

    outcomes = parse("parse_log_pytest", text)

A log is the weakest evidence there is: the code under test writes to it, too. The published parsers let the last line
about a test win; here the worst does, so that a forged line cannot hide a real failure. Only of ids that the parser
cuts at white space, which several tests then share, the last line still wins: the published lists were made so.
"""

import re
from collections.abc import Callable, Iterator

Found = Iterator[tuple[str, str]]

WORDS = {"PASSED": "pass", "FAILED": "fail", "ERROR": "error", "SKIPPED": "skip", "XFAIL": "xfail"}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BARE_COLOUR = re.compile(r"\[\d+m")  # what is left of one whose escape character was lost
_RANK = ("pass", "xfail", "skip", "error", "fail")  # from best to worst


def _status(line: str) -> str:
    return next((word for word in WORDS if line.startswith(word)), "")


def _is_count(status: str, name: str) -> bool:
    """Is it pytest's summary `SKIPPED [3] file.py:12: reason`?"""
    return status == "SKIPPED" and re.fullmatch(r"\[\d+\]", name) is not None


def pytest_log(lines: list[str]) -> Found:
    """Lines `STATUS id` of `pytest -rA`: the id is one word."""
    for line in lines:
        words = line.split()
        if _status(line) and len(words) > 1 and words[0] in WORDS and not _is_count(words[0], words[1]):
            yield words[1], WORDS[words[0]]


def pytest_options_log(lines: list[str]) -> Found:
    """As pytest_log, but of a parameter that is a path only its last part is kept."""
    for test, outcome in pytest_log(lines):
        yield short_path(test), outcome


def short_path(test: str) -> str:
    """Return the id with a parameter like /a/b/c cut down to /c, as SWE-bench's lists have it for some repositories."""
    match = re.search(r"(.*?)\[(.*)\]", test)
    if match and match[2].startswith("/") and not match[2].startswith("//") and "*" not in match[2]:
        return f"{match[1]}[/{match[2].rpartition('/')[2]}]"
    return f"{match[1]}[{match[2]}]" if match else test


def pytest_v2_log(lines: list[str]) -> Found:
    """Lines `STATUS id - reason` or, of an older pytest, `id STATUS`; the id may hold white space.

    Published ids have lost what looks like a colour, `[3m-x]` too, but `[m]` is a parameter.
    """
    for line in ("".join(c for c in _BARE_COLOUR.sub("", line) if not "\x01" <= c < " ") for line in lines):
        words = line.split()
        if len(words) < 2:
            continue
        if _status(line):
            words = line.split(" - ", 1)[0].split() if words[0] == "FAILED" else words
            if words[0] in WORDS and not _is_count(*words[:2]):
                yield " ".join(words[1:]), WORDS[words[0]]
        elif words[-1] in WORDS:
            yield " ".join(words[:-1]), WORDS[words[-1]]


def seaborn_log(lines: list[str]) -> Found:
    """Lines `FAILED id`, `PASSED id` or `id PASSED [ 9%]`."""
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] in ("FAILED", "PASSED"):
            yield words[1], WORDS[words[0]]
        elif len(words) > 1 and words[1] == "PASSED" and " PASSED " in line:
            yield words[0], "pass"


def matplotlib_log(lines: list[str]) -> Found:
    """As pytest_log, with the enumeration's names as they were."""
    yield from pytest_log([s.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3") for s in lines])


def django_log(lines: list[str]) -> Found:
    """Lines `test (module.Class) ... ok` of unittest's verbose runner, an ok perhaps on a later line; and headings."""
    before = None
    for line in (line.strip() for line in lines):
        if "--version is equivalent to version" in line:
            yield "--version is equivalent to version", "pass"
        test, dots, _ = line.partition(" ... ")
        before = test if dots else before
        for ending, outcome in (
            (r" \.\.\. {1,2}(ok|OK)", "pass"),
            (r" \.\.\. FAIL", "fail"),
            (r" \.\.\. ERROR", "error"),
        ):
            if match := re.search(f"{ending}$", line):
                yield line[: match.start()].removeprefix("Applying sites.0002_alter_domain_unique..."), outcome
        if " ... skipped" in line:
            yield line.split(" ... skipped")[0], "skip"
        if line.startswith(("FAIL:", "ERROR:")) and len(line.split()) > 1:
            yield line.split()[1], "fail" if line.startswith("FAIL") else "error"
        if line.startswith("ok") and before is not None:
            yield before, "pass"


def sympy_log(lines: list[str]) -> Found:
    """Lines `test_name ok` (F: failed, E: error), and headings `____ path.py:test_name ____` of failures."""
    for line in lines:
        if match := re.search(r"_ (.*)\.py:(.*) _", line):
            yield f"{match[1]}.py:{match[2]}", "fail"
        words = line.split()
        if len(words) > 1 and words[0].startswith("test_") and words[-1] in ("ok", "F", "E"):
            yield words[0], {"ok": "pass", "F": "fail", "E": "error"}[words[-1]]


PARSERS: dict[str, Callable[[list[str]], Found]] = {
    f"parse_log_{name}": parser
    for parser, names in (
        (pytest_log, ("pytest", "astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray")),
        (pytest_options_log, ("pytest_options", "pydicom", "requests", "pylint")),
        (pytest_v2_log, ("pytest_v2", "astropy", "scikit", "sphinx")),
        (django_log, ("django",)),
        (matplotlib_log, ("matplotlib",)),
        (seaborn_log, ("seaborn",)),
        (sympy_log, ("sympy",)),
    )
    for name in names
}


def parse(name: str, text: str) -> dict[str, str]:
    """Return what each test of the log got. Raises KeyError for a parser that is not in PARSERS."""
    found: dict[str, str] = {}
    for test, outcome in PARSERS[name](_COLOUR.sub("", text).split("\n")):
        cut = test.count("[") > test.count("]")
        found[test] = outcome if cut else max(found.get(test, outcome), outcome, key=_RANK.index)
    return found
