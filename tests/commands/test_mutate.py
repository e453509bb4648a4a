"""The rules that make bugs: what each does to a source, and what holds for every mutant of real code."""

import ast
import random
from pathlib import Path

import pytest

from legorl.commands.tasks import mutate
from legorl.commands.tasks.mutate import mutants
from legorl.commands.tasks.mutate_rules import RULES, Code, complexity

# rule: (a source, the texts that it may become at one site)
EXAMPLES = {
    "op_change": (
        "def f(a, b):\n    return a + (  # sum\n        b) if a > b else 0\n",
        ["return a - (  # sum\n        b)"],
    ),
    "op_flip": (
        "def f(a, b):\n    return a is  not b or a not in b\n",
        ["return a is  not b and a not in b", "return a is b or a not in b", "return a is  not b or a in b"],
    ),
    "op_swap": (
        "def f(a, b, c):\n    return a - b - (c - 1)\n",
        ["return (c - 1) - (a - b)", "return b - a - (c - 1)", "return a - b - (1 - c)"],
    ),
    "op_break_chains": ("def f(a, b, c):\n    return a + b * 2 + c\n", ["return a + b * 2\n", "return a + c\n"]),
    "op_change_const": (
        "def f(a):\n    return a + 1 if a > 3 else True + a\n",
        ["a + 2 if", "a + 0 if", "a > 4", "a > 2"],
    ),
    "ctrl_invert_if": (
        "def f(a):\n    if a and a > 1 + b:\n        # 1\n        x = 1 + b\n    else:\n        x = 2\n    return x\n",
        ["+ b:\n        x = 2\n    else:\n        # 1\n        x = 1 + b\n"],
    ),
    "ctrl_shuffle": (
        'def f(a):\n    """Doc."""\n    b = a + 1\n    for c in a:\n        b += c\n',
        ['"""Doc."""\n    for c in a:\n        b += c\n    b = a + 1\n'],
    ),
    "remove_loop": ("def f(a):\n    while a > 1:\n        a -= a * 2\n", ["def f(a):\n    pass\n"]),
    "remove_cond": (
        "def f(a):\n    x = a + 1\n    # why\n    if a > 1:\n        x = 0\n    elif a:\n        x = 1\n    return x\n",
        ["x = a + 1\n    return x\n"],
    ),
    "remove_assign": (
        "def f(a):\n    x = a + 1 > 2\n    x += 1\n    return x\n",
        ["(a):\n    x +=", "> 2\n    return"],
    ),
    "remove_wrapper": (
        "def f(a):\n    x = a + 1 > 2\n    try:\n        x = 1\n    except E:\n        raise\n    return x\n",
        ["> 2\n    return x\n"],
    ),
    "class_rm_base": ("class A(B, C, k=1):\n    def f(self, a):\n{body}", ["A(C, k=1)", "A(B, k=1)"]),
    "class_rm_funcs": (
        "class A(B):\n    def f(self, a):\n{body}    def g(self):\n        return self.f(2)\n",
        ["class A(B):\n    def g(self):\n        return None\n", "{body}"],
    ),
    "class_shuffle_funcs": (
        "class A(B):\n    def f(self, a):\n{body}    def g(self):\n        return 2\n",
        ["class A(B):\n    def g(self):\n        return 2\n    def f(self, a):\n"],
    ),
}
BODY = "        a = a + 1 > 2 < 3 + 4 * 5 - a or a and a < 1 + 1 - 2\n        return a\n"


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_rule_does_what_it_is_named_for(rule: str) -> None:
    source, wanted = EXAMPLES[rule]
    source, wanted = source.replace("{body}", BODY), [part.replace("{body}", BODY) for part in wanted]
    made = [
        mutant
        for seed in range(40)
        for mutant in mutants(source.encode(), random.Random(seed), 3)
        if mutant.rule == rule and mutant.sites == 1
    ]
    texts = {mutant.text.decode() for mutant in made}
    assert all(any(part in text for part in wanted) for text in texts), texts
    for part in wanted:
        assert any(part in text for text in texts), (part, texts)


def test_an_elif_is_not_cut_out_of_its_chain() -> None:
    source = b"def f(a):\n    if a > 1:\n        return 1\n    elif a > 2:\n        return 2\n    return a + 3\n"
    removed = {m.text for seed in range(20) for m in mutants(source, random.Random(seed), 2) if m.rule == "remove_cond"}
    assert removed == {b"def f(a):\n    return a + 3\n"}


def test_statements_that_share_a_line_stay() -> None:
    source = b"def f(a):\n    b = a + 1 > 2; c = b\n    if a: b = 1\n    else: b = 2\n    return b\n"
    rules = {m.rule for seed in range(20) for m in mutants(source, random.Random(seed), 2)}
    assert rules <= {"op_change", "op_flip", "op_swap", "op_change_const", "remove_cond"}


def test_simple_functions_are_left_alone() -> None:
    assert list(mutants(b"def f(a):\n    return a + 1\n", random.Random(1), 5)) == []
    assert complexity(ast.parse("a + 1")) == 2


@pytest.mark.parametrize("module", ["textwrap.py", "heapq.py", "shlex.py", "configparser.py", "fractions.py"])
def test_every_mutant_of_real_code_is_a_change_of_one_function_or_class(module: str) -> None:
    """On the standard library: each parses, differs in its tree, and differs only within the lines of its target."""
    source = Path(ast.__file__).with_name(module).read_bytes()
    same, code = ast.dump(ast.parse(source)), Code(source)
    assert code.edited([]) == source
    made = list(mutants(source, random.Random(1), 1))
    assert len({mutant.text for mutant in made}) == len(made) > 10
    lines = source.splitlines()
    for mutant in made:
        assert ast.dump(ast.parse(mutant.text)) != same
        first, last = mutant.lines
        changed = mutant.text.splitlines()
        assert changed[: first - 1] == lines[: first - 1]
        after = len(lines) - last
        assert after == 0 or changed[-after:] == lines[-after:]


def test_one_seed_gives_the_same_mutants() -> None:
    source = Path(mutate.__file__).read_bytes()
    one, two = (list(mutants(source, random.Random(5), 2)) for _ in range(2))
    assert one == two != list(mutants(source, random.Random(6), 2))
