"""Copies of hidden tests in which one assertion is wrong: code that does its work must fail them.

    files, flipped = flipped_tests(task, random.Random(seed))    # {path in the tree: text}, {test of fail_to_pass, ...}

Code under test shares its process with the assertions and with pytest, so it can reach whatever decides about a test:
replace pytest's parts, answer with an object that equals everything, read the expected value from its caller. None of
that tells a right expectation from a wrong one. The grader therefore runs the tests of an attempt that passed once
more, in a sandbox of its own, with one assertion of each test turned round: `== 4` becomes `== 5`, `in` becomes
`not in`, another exception is expected. A test that passes both ways says nothing about the code.

Only a statement is flipped that every passing run of its test must have reached: one of the function's own body, with
nothing before it that could leave the function. So honest code cannot pass: what held cannot hold when it is negated.
A flipped test looks like any other, as code under test may read it. A test in which no such statement is found has no
flipped copy; so have those of scripts and logs.
"""

import ast
import builtins
import random
from collections.abc import Iterator
from pathlib import Path

from legorl.task import Task

# Decorators that leave an assertion's failure alone. With any other a test is not flipped.
_DECORATORS = {"pytest", "mock", "patch", "unittest", "hypothesis", "given", "settings", "example", "skipIf"}
_LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Raise, ast.Break, ast.Continue, ast.Await)
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot},
    **{ast.NotEq: ast.Eq, ast.NotIn: ast.In, ast.IsNot: ast.Is},
}
_METHODS = dict(
    pair
    for a, b in (
        ("assertTrue", "assertFalse"),
        ("assertEqual", "assertNotEqual"),
        ("assertIn", "assertNotIn"),
        ("assertIs", "assertIsNot"),
        ("assertIsNone", "assertIsNotNone"),
        ("assertIsInstance", "assertNotIsInstance"),
    )
    for pair in ((a, b), (b, a))
)
_EQUALITIES = {
    "assertEqual",
    "assertEquals",
    "assertListEqual",
    "assertDictEqual",
    "assertTupleEqual",
    "assertSetEqual",
}
_RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
# Exceptions with no kinds of their own, which tests seldom expect.
_EXCEPTIONS = (
    "BufferError",
    "EOFError",
    "ZeroDivisionError",
    "ChildProcessError",
    "InterruptedError",
    "RecursionError",
)

_Edit = tuple[ast.expr, ast.expr]  # an expression of the source, and what replaces it


def flipped_tests(task: Task, rng: random.Random) -> tuple[dict[str, str], set[str]]:
    """Return the flipped test files of `task` and the tests of fail_to_pass that they flip; both empty if none can be.

    The paths are those of the tree in which the tests run.
    """
    wanted: dict[str, dict[str, set[str]]] = {}
    for test in task.grade.fail_to_pass:
        if place := place_of(task, test):
            wanted.setdefault(place[0], {}).setdefault(place[1], set()).add(test)
    files, flipped = {}, set()
    for path, names in wanted.items():
        text = source_of(task, path)
        if text is not None:
            files[path], done = flip(text, set(names), rng)
            flipped |= {test for name in done for test in names[name]}
    return (files, flipped) if flipped else ({}, set())


def flip(source: str, names: set[str], rng: random.Random) -> tuple[str, set[str]]:
    """Return `source` with one assertion of each function in `names` flipped, and the names that could be.

    names: `function` or `Class.method`. Source that is not this Python's flips nothing.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return source, set()
    edits, done = [], set()
    for name, function in functions(module.body):
        if name in names and name not in done and (edit := _choose(function, rng)):
            edits.append(edit)
            done.add(name)
    return _edited(source, edits), done


def place_of(task: Task, test: str) -> tuple[str, str] | None:
    """Return (path in the tree, name in the file) of a listed test, None where it does not say."""
    if task.grade.runner == "pytest":
        path, *names = test.partition("[")[0].split("::")
        return (path, ".".join(names)) if names else None
    if task.grade.runner == "unittest":
        parts = test.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            path = "/".join(parts[:cut]) + ".py"
            if source_of(task, path) is not None:
                return path, ".".join(parts[cut:])
    return None


def source_of(task: Task, path: str) -> str | None:
    """Return the text of a test file, by its path in the tree in which tests run."""
    at = task.grade.tests_at
    if at == ".":
        files = [task.tests / path, task.repo / path]
    elif not at.startswith("/") and Path(path).is_relative_to(at):
        files = [task.tests / Path(path).relative_to(at)]
    else:
        return None
    for file in files:
        if file.is_file() and not file.is_symlink():
            try:
                return file.read_bytes().decode()
            except UnicodeDecodeError:
                return None
    return None


def functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function of a module or of its classes with its name, those that are defined last first."""
    for node in reversed(body):
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def _choose(function: ast.FunctionDef, rng: random.Random) -> _Edit | None:
    names = [_dotted(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]
    if any(name.split(".")[0] not in _DECORATORS or "xfail" in name or "expected" in name for name in names):
        return None
    # A wrong value also gives away who reads it, or is equal to everything: it goes before a negation.
    for kind in (_other_value, _negation):
        edits = [edit for statement in _reached(function.body) if (edit := kind(statement, rng))]
        if edits:
            return rng.choice(edits)
    return None


def _reached(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of `body` that are reached whenever the function returns without an exception."""
    for node in body:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.List | ast.Tuple) and node.iter.elts:
            if not any(isinstance(e, ast.Starred) for e in node.iter.elts):
                yield from _reached(node.body)
        elif isinstance(node, ast.With) and _dotted(_called(node.items[0].context_expr)).endswith("subTest"):
            yield from _reached(node.body)
        else:
            yield node
        if _may_leave(node):
            return


def _may_leave(node: ast.AST) -> bool:
    """Can `node` end the function that it stands in, or what is left of a loop's body?"""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return False
    return isinstance(node, _LEAVES) or any(map(_may_leave, ast.iter_child_nodes(node)))


def _other_value(node: ast.stmt, rng: random.Random) -> _Edit | None:
    """The edit that makes a statement expect another value, if it compares something with a literal."""
    sides: list[ast.expr] = []
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and _is(node.test, ast.Eq):
        sides = [*node.test.comparators, node.test.left]
    elif (call := _method(node)) and _name(call) in _EQUALITIES and len(call.args) >= 2:
        sides = [call.args[1], call.args[0]]
    literal = [side for side in sides if _value(side) is not _NONE]
    if len(literal) != 1:
        return None
    changed = _changed(_value(literal[0]), rng)
    return None if changed is _NONE else (literal[0], ast.parse(repr(changed), mode="eval").body)


def _negation(node: ast.stmt, rng: random.Random) -> _Edit | None:
    """The edit that turns a statement into its opposite, if it is an assertion that has one."""
    if isinstance(node, ast.Assert):
        return node.test, _opposite(node.test)
    if isinstance(node, ast.With) and len(node.items) == 1 and isinstance(node.items[0].context_expr, ast.Call):
        return _other_exception(node.items[0].context_expr, rng)
    if call := _method(node):
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr in _METHODS:
            return function, ast.Attribute(function.value, _METHODS[function.attr])
        return _other_exception(call, rng)
    return None


def _opposite(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPPOSITE:
        return ast.Compare(test.left, [_OPPOSITE[type(test.ops[0])]()], test.comparators)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _other_exception(call: ast.Call, rng: random.Random) -> _Edit | None:
    if _name(call) not in _RAISES or not call.args or not isinstance(call.args[0], ast.Name | ast.Attribute):
        return None
    expected = getattr(builtins, _dotted(call.args[0]), None)
    related = expected if isinstance(expected, type) else ()
    names = [name for name in _EXCEPTIONS if not issubclass(getattr(builtins, name), related)]
    return (call.args[0], ast.Name(rng.choice(names))) if names else None


_NONE = object()


def _value(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _NONE


def _changed(value: object, rng: random.Random) -> object:
    """Return another value of the same type, _NONE if this knows none."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 2))
    if isinstance(value, float):
        changed = value + rng.choice((-1.0, 1.0, 2.0))
        return changed if changed != value else _NONE
    if isinstance(value, str):
        return value[:-1] if len(value) > 1 and rng.random() < 0.5 else value + rng.choice("aens1")
    if isinstance(value, bytes):
        return value + b"s"
    if isinstance(value, list | tuple) and value:
        place = rng.randrange(len(value))
        inner = _changed(value[place], rng)
        return _NONE if inner is _NONE else type(value)([*value[:place], inner, *value[place + 1 :]])
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        inner = _changed(value[key], rng)
        return _NONE if inner is _NONE else {**value, key: inner}
    if isinstance(value, list):
        return [0]
    if isinstance(value, dict):
        return {"a": 0}
    return _NONE


def _is(compare: ast.Compare, op: type[ast.cmpop]) -> bool:
    return len(compare.ops) == 1 and isinstance(compare.ops[0], op)


def _method(node: ast.stmt) -> ast.Call | None:
    return node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _name(call: ast.Call) -> str:
    return _dotted(call.func).rpartition(".")[2]


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _edited(source: str, edits: list[_Edit]) -> str:
    """Return `source` with each edit made in place; all else stays as it was, byte for byte."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = source.encode()

    def spot(node: ast.expr) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 1) - 1] + (
            node.end_col_offset or 0
        )

    for old, new in sorted(edits, key=lambda edit: spot(edit[0]), reverse=True):
        start, end = spot(old)
        body = ast.unparse(ast.fix_missing_locations(new)).encode()
        if b"\n" in text[start:end]:  # what spanned lines may have stood without brackets around it in a longer one
            body = b"(" + body + b")"
        text = text[:start] + body + text[end:]
    return text.decode()
