"""Runs inside a sandbox, under synth_inside.py: what of a failed test's source can be quoted as a way to see the bug.

Standard library only.
"""

import ast
from pathlib import Path

LINES = 24  # of the test's body, the last ones up to what failed
VALUE = 160  # characters of a parameter's value
CONSTANT = 400  # characters of an assignment at the top of the module


def quoted(item, excinfo) -> str:
    """Imports, parameters and statements of the test `item` up to the one that failed; "" where it has no source."""
    lines = [entry.lineno + 1 for entry in excinfo.traceback if str(entry.path) == str(item.path)]
    try:
        text = Path(item.path).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return ""
    for at in lines:
        inside = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = [node for node in inside if node.lineno <= at <= node.end_lineno and node.name == item.originalname]
        if inside:
            body, names = _body(inside[0], at, text.splitlines())
            constants = _constants(tree, names, text)
            names |= {name for constant in constants for name in _names(constant)}
            return "\n".join(filter(None, [_imports(tree, names), *constants.values(), _values(item, names), body]))
    return ""


def _body(function, at, lines) -> tuple:
    """The statements at the top of `function` up to the one with line `at`, whole ones, as many as LINES allow; and
    the names in them."""
    statements = [node for node in function.body if node.lineno <= at]
    if isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant) and len(statements) > 1:
        statements = statements[1:]
    last = statements[-1].end_lineno
    fitting = [node for node in statements if last - _start(node) < LINES] or statements[-1:]
    first, indent = _start(fitting[0]), fitting[0].col_offset
    kept = {line for node in fitting for line in _in_strings(node)}
    body = [
        line[indent:] if k not in kept and not line[:indent].strip() else line
        for k, line in enumerate(lines[first - 1 : last], first)
    ]
    cut = "" if fitting[0] is statements[0] else "...\n"
    return cut + "\n".join(body), {name for node in fitting for name in _names(node)}


def _in_strings(tree) -> set:
    """Numbers of the lines that begin inside of a string."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    texts = [node for node in nodes if isinstance(getattr(node, "value", ""), str | bytes)]
    return {line for node in texts for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)}


def _names(tree) -> set:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _constants(tree, names, text) -> dict:
    """Short assignments at the top of the module to one of `names`, with their source."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets):
            source = ast.get_source_segment(text, node) or ""
            if len(source) <= CONSTANT:
                found[node] = source
    return found


def _start(node) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _imports(tree, names) -> str:
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            used = [each for each in node.names if (each.asname or each.name.partition(".")[0]) in names]
            if used and getattr(node, "module", "") != "__future__":
                node.names = used
                found.append(ast.unparse(node))
    return "\n".join(found)


def _values(item, names) -> str:
    params = getattr(getattr(item, "callspec", None), "params", {})
    shown = {name: repr(value) for name, value in params.items() if name in names}
    return "\n".join(
        f"{name} = {value}" for name, value in shown.items() if len(value) <= VALUE and not value.startswith("<")
    )
