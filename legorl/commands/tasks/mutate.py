"""Bugs by rule: small changes of one function or class of a Python source, chosen by a seeded generator.

    for mutant in mutants(source, random.Random(7), per_rule=2):
        mutant.text                                  # the source with the bug in it
        mutant.rule, mutant.name, mutant.lines       # what was done, to what, and the span of that function or class

The rules are the procedural ones of SWE-smith (mutate_rules.py). Departures: changes are edits of the text and not of a
syntax tree that is printed again, so that the diff shows the bug and nothing else; where a rule strikes at several
places of a function each is taken with the rule's likelihood, and one at random where none was; a change that leaves
the syntax tree as it was is no mutant.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass

from legorl.commands.tasks.mutate_rules import RULES, Code, Edit, Rule, Site, complexity


@dataclass(frozen=True)
class Mutant:
    """A source with a bug. `lines`: first and last line of the function or class; `sites`: how many places differ."""

    rule: str
    name: str
    lines: tuple[int, int]
    sites: int
    span: tuple[int, int]  # bytes of the source that were replaced, from the first to the last
    text: bytes


def mutants(source: bytes, rng: random.Random, per_rule: int) -> Iterator[Mutant]:
    """Yield up to `per_rule` mutants of each function or class by each rule that fits it, each text once.

    Raises SyntaxError for a source that is not Python, UnicodeDecodeError for one that is not UTF-8.
    """
    code = Code(source)
    seen = {source}
    for name, node in _targets(code.tree):
        size, place = complexity(node), code.lines_of(node)
        start, end = code.lines(*place)
        same = _parsed(source[start:end])
        for rule in RULES:
            if not isinstance(node, rule.on) or not rule.least <= size <= rule.most:
                continue
            for _ in range(per_rule):
                sites = _choose(list(rule.sites(code, node, rng)), rule, rng)
                edits = [edit for site in sites for edit in site]
                text = code.edited(edits)
                if text in seen or _parsed(text[start : end + len(text) - len(source)]) in (None, same):
                    continue
                seen.add(text)
                span = min(e.start for e in edits), max(e.end for e in edits)
                yield Mutant(rule.name, name, place, len(sites), span, text)


def _targets(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes at the top of the module and methods, with their names; what lies inside them is theirs."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _choose(sites: list[Site], rule: Rule, rng: random.Random) -> list[Site]:
    """Take each site with the rule's likelihood, at least one, no two that overlap."""
    chosen = [site for site in sites if rng.random() < rule.likelihood] or (rng.sample(sites, 1) if sites else [])
    kept: list[Site] = []
    taken: list[Edit] = []
    for site in chosen:
        if all(e.end <= t.start or t.end <= e.start for e in site for t in taken):
            kept.append(site)
            taken += site
    return kept


def _parsed(lines: bytes) -> str | None:
    """The syntax tree of the whole lines of a function or class, written out; None if they are no Python.

    It stands for the whole file's, which would take most of the time there is.
    """
    try:
        return ast.dump(ast.parse(b"if 1:\n" + lines if lines[:1].isspace() else lines))
    except (SyntaxError, ValueError):
        return None
