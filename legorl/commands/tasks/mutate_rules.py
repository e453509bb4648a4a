"""The rules by which mutate.py makes bugs: where each can strike in a function or class, and with what text.

A site is a set of edits that belong together. Rules are named as SWE-smith names them, without its `func_pm_`. Its
complexity is not published as a formula; here it is one, plus one for every branch, loop, handler, comprehension,
condition and operator.
"""

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Edit(NamedTuple):
    """Bytes `start` to `end` of the source become `text`."""

    start: int
    end: int
    text: bytes


Site = tuple[Edit, ...]
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Code:
    """A source, its syntax tree, and the way from nodes to bytes. Raises SyntaxError, UnicodeDecodeError."""

    def __init__(self, source: bytes) -> None:
        source.decode("utf-8")
        self.source = source
        self.tree = ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Bytes of `node`, without parentheses around it."""
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> bytes:
        start, end = self.span(node)
        return self.source[start:end]

    def lines_of(self, node: ast.AST) -> tuple[int, int]:
        """First and last line of `node`, decorators included."""
        decorators = getattr(node, "decorator_list", [])
        return min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno  # type: ignore[attr-defined]

    def block(self, statements: Sequence[ast.stmt], comments: bool = False) -> tuple[int, int] | None:
        """Bytes of the whole lines of `statements`; None where they share a line with others.

        comments: with the lines of comments right above them.
        """
        first, last = self.lines_of(statements[0])[0], self.lines_of(statements[-1])[1]
        start, end = self._starts[first - 1], self._starts[last]
        before = self.source[start : self._at(statements[0].lineno, statements[0].col_offset)]
        after = self.source[self.span(statements[-1])[1] : end]
        if not getattr(statements[0], "decorator_list", None) and before.strip():
            return None
        if after.strip() and not after.strip().startswith(b"#"):
            return None
        while comments and first > 1 and self._line(first - 1).strip().startswith(b"#"):
            first -= 1
            start = self._starts[first - 1]
        return start, end

    def lines(self, first: int, last: int) -> tuple[int, int]:
        """Bytes of the lines from `first` to `last`."""
        return self._starts[first - 1], self._starts[last]

    def edited(self, edits: Sequence[Edit]) -> bytes:
        """The source with `edits`, no two of which overlap."""
        text = self.source
        for edit in sorted(edits, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _line(self, number: int) -> bytes:
        return self.source[self._starts[number - 1] : self._starts[number]]


@dataclass(frozen=True)
class Rule:
    """`sites` finds where it can strike `on` a function or class whose complexity is from `least` to `most`."""

    name: str
    sites: Callable[[Code, ast.AST, random.Random], Iterator[Site]]
    likelihood: float
    on: tuple[type, ...] = Function
    least: int = 3
    most: float = float("inf")


def complexity(node: ast.AST) -> int:
    """One, plus one for every branch, loop, handler, comprehension, condition and operator in `node`."""
    counted = (
        ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.With, ast.Compare, ast.BoolOp,
        ast.BinOp,
    )  # fmt: skip
    return 1 + sum(isinstance(each, counted) for each in ast.walk(node))


# -- operators and constants -------------------------------------------------------------------------------------------

FAMILIES = ((b"+", b"-"), (b"*", b"/", b"//", b"%"), (b"&", b"|", b"^"), (b"<<", b">>"), (b"**", b"*"))
FLIPS = {
    b"==": b"!=", b"!=": b"==", b"<": b">", b">": b"<", b"<=": b">=", b">=": b"<=", b"in": b"not in", b"not in": b"in",
    b"is": b"is not", b"is not": b"is", b"and": b"or", b"or": b"and",
}  # fmt: skip
_OPERATOR = re.compile(rb"(?:[\s\\)]|#[^\n]*\n)*(not\s+in|is\s+not|in|is|and|or|\*\*|//|<<|>>|[=!<>]=|[-+*/%@&|^<>])")


def _operator(code: Code, left: ast.AST, right: ast.AST) -> tuple[int, int, bytes]:
    """Bytes of the operator between two operands, and what it is."""
    found = _OPERATOR.match(code.source, code.span(left)[1], code.span(right)[0])
    if found is None:
        raise AssertionError(f"no operator in {code.source[code.span(left)[0] : code.span(right)[1]]!r}")
    return found.start(1), found.end(1), b" ".join(found[1].split())


def _binary(node: ast.AST) -> Iterator[ast.BinOp]:
    """Binary operations, but for the formatting of a literal string."""
    for each in ast.walk(node):
        if isinstance(each, ast.BinOp) and not isinstance(getattr(each.left, "value", None), str):
            yield each


def op_change(code: Code, node: ast.AST, rng: random.Random) -> Iterator[Site]:
    for each in _binary(node):
        start, end, operator = _operator(code, each.left, each.right)
        for family in FAMILIES:
            if operator in family:
                yield (Edit(start, end, rng.choice([other for other in family if other != operator])),)
                break


def op_flip(code: Code, node: ast.AST, _rng: random.Random) -> Iterator[Site]:
    for each in ast.walk(node):
        if isinstance(each, ast.Compare):
            pairs = list(zip([each.left, *each.comparators], each.comparators, strict=False))
        elif isinstance(each, ast.BoolOp):
            pairs = list(zip(each.values, each.values[1:], strict=False))
        else:
            continue
        if len(pairs) == 1:
            start, end, operator = _operator(code, *pairs[0])
            yield (Edit(start, end, FLIPS[operator]),)


def op_swap(code: Code, node: ast.AST, _rng: random.Random) -> Iterator[Site]:
    for each in ast.walk(node):
        if isinstance(each, ast.BoolOp) and len(each.values) == 2:
            left, right = each.values
        elif isinstance(each, ast.BinOp) and not isinstance(each.left, ast.Constant):
            left, right = each.left, each.right
        else:
            continue
        (start, end), (at, past, _) = code.span(each), _operator(code, left, right)
        first, second = code.source[start:at].rstrip(), code.source[past:end].lstrip()
        between = code.source[start + len(first) : end - len(second)]
        if isinstance(left, ast.BinOp | ast.BoolOp) and first == code.text(left):
            first = b"(" + first + b")"
        if isinstance(right, ast.BinOp | ast.BoolOp) and second == code.text(right):
            second = b"(" + second + b")"
        yield (Edit(start, end, second + between + first),)


def op_break_chains(code: Code, node: ast.AST, rng: random.Random) -> Iterator[Site]:
    for each in _binary(node):
        if isinstance(each.left, ast.BinOp):
            start, end = code.span(each)
            at, _, _ = _operator(code, each.left, each.right)
            inner, _, _ = _operator(code, each.left.left, each.left.right)
            whole = code.source[start:at].rstrip() == code.text(each.left)  # without parentheses
            first = code.source[code.span(each.left)[0] : inner].rstrip()
            kept = [code.text(each.left)] + ([first + b" " + code.source[at:end]] if whole else [])
            yield (Edit(start, end, rng.choice(kept)),)


def op_change_const(code: Code, node: ast.AST, rng: random.Random) -> Iterator[Site]:
    for each in ast.walk(node):
        if isinstance(each, ast.BinOp):
            operands = [each.left, each.right]
        elif isinstance(each, ast.Compare):
            operands = [each.left, *each.comparators]
        else:
            continue
        for operand in operands:
            if isinstance(operand, ast.Constant) and type(operand.value) is int and code.text(operand).isdigit():
                changed = operand.value + rng.choice([1, -1])
                yield (Edit(*code.span(operand), str(changed).encode()),)


# -- statements --------------------------------------------------------------------------------------------------------


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for each in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(each, name, None)
            if isinstance(body, list) and body:
                yield body


def _removed(code: Code, body: list[ast.stmt], statement: ast.stmt) -> Site | None:
    block = code.block([statement], comments=True)
    if block is None or code.text(statement).startswith(b"elif"):
        return None
    left = b" " * statement.col_offset + b"pass\n" if len(body) == 1 else b""
    return (Edit(*block, left),)


def _remove(*kinds: type) -> Callable[[Code, ast.AST, random.Random], Iterator[Site]]:
    def sites(code: Code, node: ast.AST, _rng: random.Random) -> Iterator[Site]:
        for body in _bodies(node):
            for statement in body:
                if isinstance(statement, kinds) and (site := _removed(code, body, statement)):
                    yield site

    return sites


def ctrl_invert_if(code: Code, node: ast.AST, _rng: random.Random) -> Iterator[Site]:
    for each in ast.walk(node):
        if not isinstance(each, ast.If) or not each.orelse or each.body[0].col_offset != each.orelse[0].col_offset:
            continue
        yes, no = code.block(each.body, comments=True), code.block(each.orelse, comments=True)
        if yes and no and yes[1] <= no[0]:
            source = code.source
            yield (Edit(yes[0], no[1], source[slice(*no)] + source[yes[1] : no[0]] + source[slice(*yes)]),)


def _shuffled(code: Code, statements: Sequence[ast.stmt], rng: random.Random) -> Site | None:
    blocks = [code.block([statement]) for statement in statements]
    if len(blocks) < 2 or None in blocks:
        return None
    spans = [block for block in blocks if block]
    if any(b[0] < a[1] for a, b in pairwise(spans)):
        return None
    order = list(spans)
    while order == spans:
        rng.shuffle(order)
    text = b""
    for k, (old, new) in enumerate(zip(spans, order, strict=True)):
        between = code.source[old[1] : spans[k + 1][0]] if k + 1 < len(spans) else b""
        text += code.source[slice(*new)] + between
    return (Edit(spans[0][0], spans[-1][1], text),)


def ctrl_shuffle(code: Code, node: ast.AST, rng: random.Random) -> Iterator[Site]:
    body = node.body  # type: ignore[attr-defined]
    loops = any(isinstance(each, ast.For | ast.While | ast.AsyncFor) for each in ast.walk(node))
    if loops and (site := _shuffled(code, body[1:] if ast.get_docstring(node) is not None else body, rng)):  # type: ignore[arg-type]
        yield site


# -- classes -----------------------------------------------------------------------------------------------------------


def class_rm_base(code: Code, node: ast.AST, _rng: random.Random) -> Iterator[Site]:
    assert isinstance(node, ast.ClassDef)
    listed = [*node.bases, *node.keywords]
    for k, _ in enumerate(node.bases):
        start, end = code.span(listed[k])
        if k + 1 < len(listed):
            end = code.span(listed[k + 1])[0]
        elif k:
            start = code.span(listed[k - 1])[1]
        else:
            start, end = code.source.rindex(b"(", 0, start), code.source.index(b")", end) + 1
        yield (Edit(start, end, b""),)


def _methods(node: ast.AST) -> list[ast.stmt]:
    return [each for each in node.body if isinstance(each, Function)]  # type: ignore[attr-defined]


def class_rm_funcs(code: Code, node: ast.AST, _rng: random.Random) -> Iterator[Site]:
    for method in _methods(node):
        removed = _removed(code, node.body, method)  # type: ignore[attr-defined]
        if removed is None:
            continue
        calls = [
            Edit(*code.span(call), b"None")
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and (call.func.value.id, call.func.attr) == ("self", method.name)  # type: ignore[attr-defined]
        ]
        apart: list[Edit] = []
        for call in sorted(calls):
            if call.start >= (apart[-1].end if apart else 0) and not removed[0].start <= call.start < removed[0].end:
                apart.append(call)
        yield (*removed, *apart)


def class_shuffle_funcs(code: Code, node: ast.AST, rng: random.Random) -> Iterator[Site]:
    if site := _shuffled(code, _methods(node), rng):
        yield site


RULES = (
    Rule("op_change", op_change, 0.4),
    Rule("op_flip", op_flip, 0.4),
    Rule("op_swap", op_swap, 0.4),
    Rule("op_break_chains", op_break_chains, 0.4),
    Rule("op_change_const", op_change_const, 0.4),
    Rule("ctrl_invert_if", ctrl_invert_if, 0.25, least=5),
    Rule("ctrl_shuffle", ctrl_shuffle, 0.25, most=10),
    Rule("remove_loop", _remove(ast.For, ast.While, ast.AsyncFor), 0.25),
    Rule("remove_cond", _remove(ast.If), 0.25),
    Rule("remove_assign", _remove(ast.Assign, ast.AugAssign), 0.25),
    Rule("remove_wrapper", _remove(ast.With, ast.AsyncWith, ast.Try), 0.25),
    Rule("class_rm_base", class_rm_base, 0.25, (ast.ClassDef,), least=10),
    Rule("class_rm_funcs", class_rm_funcs, 0.15, (ast.ClassDef,), least=10),
    Rule("class_shuffle_funcs", class_shuffle_funcs, 0.25, (ast.ClassDef,), least=10),
)
