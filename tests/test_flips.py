"""Flipped tests: what passes the test as written cannot pass its flipped copy, and each copy is still a test."""

import random
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.arena import make_task
from hypothesis import given
from hypothesis import strategies as st

from legorl.flips import flip, flipped_tests
from legorl.task import load_task

# Every function passes as it stands. Those called test_no_* have no statement that is certain to be reached.
SOURCE = '''
import pytest, unittest

def add(a, b):
    return a + b

def test_number():
    got = add(2, 2)
    assert got == 4, "é"
    assert type(got) is int and 4 == got and not got == 5

def test_kinds():
    assert {"a": [1, (2.5, None)], "é": b"x"} == {"a": [1, (2.5, None)], "é": b"x"}
    assert str(add(1, 2)) == (
        "3"
    )
    assert [] == list("")
    assert add(-1, 0) == -1

def test_words():
    """Say ä ==
    4."""
    assert not add(0, 0) is None; assert "a" in "abc"

def test_raises():
    def inner():
        return int("x")
    with pytest.raises(ValueError, match="x"):
        inner()

def test_raises_generally():
    with pytest.raises(ArithmeticError):
        1 / 0

def test_loop():
    for a, want in [(1, 2), (2, 3)]:
        assert add(a, 1) == want

@pytest.mark.parametrize("a", [1])
def test_more(a=1):
    assert add(a, a) > a

class Adding(unittest.TestCase):
    def test_equal(self):
        with self.subTest(a=1):
            self.assertEqual(add(1, 1), 2)
        self.assertDictEqual({"a": add(1, 1)}, {"a": 2})

    def test_other(self):
        self.assertTrue(add(1, 1))
        self.assertIsNone(None)
        self.assertRaises(KeyError, {}.pop, 1)

def test_no_assertion():
    add(1, 2)

def test_no_way_in():
    if add(1, 2) == 3:
        return
    assert add(1, 2) == 4

def test_no_loop():
    for a in []:
        assert a == 1
    try:
        assert False
    except AssertionError:
        pass

@print
def test_no_idea():
    assert 1 == 1

@pytest.mark.xfail
def test_no_pass():
    assert 1 == 2
'''
NAMES = {"number", "kinds", "words", "raises", "raises_generally", "loop", "more"}
FLIPPED = {f"test_{name}" for name in NAMES} | {"Adding.test_equal", "Adding.test_other"}
REFUSED = {f"test_no_{name}" for name in ("assertion", "way_in", "loop", "idea", "pass")}


def passes(source: str, name: str) -> bool:
    scope: dict = {"print": lambda function: function}
    exec(compile(source, "test_a.py", "exec"), scope)
    group, _, method = name.partition(".")
    if method:
        result = unittest.TestResult()
        scope[group](method).run(result)
        return result.wasSuccessful()
    test: Callable[[], None] = scope[name]
    try:
        test()
    except Exception:
        return False
    return True


@given(st.integers(0, 1 << 30))
def test_what_passes_a_test_does_not_pass_its_flipped_copy(seed: int) -> None:
    changed, done = flip(SOURCE, FLIPPED | REFUSED, random.Random(seed))
    assert done == FLIPPED
    assert len(changed.splitlines()) == len(SOURCE.splitlines())
    for name in FLIPPED:
        assert passes(SOURCE, name)
        assert not passes(changed, name), name


def test_only_what_is_asked_for_is_flipped() -> None:
    changed, done = flip(SOURCE, {"test_number"}, random.Random(1))
    differing = [a for a, b in zip(SOURCE.splitlines(), changed.splitlines(), strict=True) if a != b]
    assert (done, differing) == ({"test_number"}, ['    assert got == 4, "é"'])
    assert flip("print 'of old'\n", {"test_a"}, random.Random(1)) == ("print 'of old'\n", set())


def test_flipped_files_lie_where_the_tests_will(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path / "mend-add"))
    files, flipped = flipped_tests(task, random.Random(1))
    assert set(files) == {"tests/test_calc.py", "tests/test_later.py"}
    assert flipped == set(task.grade.fail_to_pass)
    assert "assert mul(2, 3) == 6" in files["tests/test_calc.py"]


@pytest.mark.parametrize(("at", "path"), [("tests", "tests/test_unit.py"), (".", "test_unit.py")])
def test_ids_of_unittest_are_found(tmp_path: Path, at: str, path: str) -> None:
    folder = make_task(tmp_path / "mend-add")
    (folder / "tests" / "test_unit.py").write_text(SOURCE)
    module = path.removesuffix(".py").replace("/", ".")
    text = (folder / "task.toml").read_text().replace('"pytest"', '"unittest"')
    start, end = text.index("fail_to_pass"), text.index("pass_to_pass")
    wanted = f'tests_at = "{at}"\nfail_to_pass = ["{module}.Adding.test_equal"]\n'
    (folder / "task.toml").write_text(text[:start] + wanted + text[end:])
    files, flipped = flipped_tests(load_task(folder), random.Random(1))
    assert (set(files), flipped) == ({path}, {f"{module}.Adding.test_equal"})
