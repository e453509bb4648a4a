"""One attempt as a conversation tree that can be read.

The main line of the conversation runs down one column; what branches off (side requests, resamples, sub-agents,
histories that were given up) is set in to the right at the turn that it leaves. Everything from the sandbox and the
model is escaped.
"""

import json
from collections.abc import Iterator
from typing import Any

from legorl import tree
from legorl.commands.inspect.table import cell
from legorl.options import printable

CLIP_LINES = 12
CLIP_CHARS = 900
RAIL = "│ "


def lines(row: dict[str, Any], full: bool = False) -> Iterator[str]:
    """Yield the lines that show `row` (schema.TRAJECTORY); long texts are clipped unless `full`."""
    yield from _head(row)
    turns = row["turns"] or []
    nodes = tree.nodes_of(turns)
    children: dict[int, list[int]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node.index)
    for root in children.get(tree.ROOT, []):
        yield from _line_of(root, nodes, turns, children, "", full)
    yield from _tail(row, full)


def main_child(nodes: list[tree.Node], turns: list[dict[str, Any]], children: list[int]) -> int | None:
    """The child that goes on with the conversation: the last one that extends its parent whole, else the last one.

    Side requests never do. None if there is no such child.
    """
    able = [k for k in children if turns[k]["cause"] != "side"]
    whole = [k for k in able if nodes[k].prefix_len == nodes[nodes[k].parent].path_len]
    return max(whole or able, default=None)


def _line_of(
    index: int | None,
    nodes: list[tree.Node],
    turns: list[dict[str, Any]],
    children: dict[int, list[int]],
    rail: str,
    full: bool,
) -> Iterator[str]:
    while index is not None:
        for text in _turn(turns[index], nodes[index], full):
            yield rail + text
        below = children.get(index, [])
        onward = main_child(nodes, turns, below)
        for branch in below:
            if branch != onward:
                yield from _line_of(branch, nodes, turns, children, rail + RAIL, full)
        index = onward


def _head(row: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(str(w["version"]) for w in row["weights"] or []) or "-"
    tokens = sum(len(t["completion_ids"]) for t in row["turns"] or [])
    yield printable(row["attempt_id"])
    yield printable(
        f"  task {row['task_id']} ({row['split']}), harness {row['harness']} {row['harness_version'] or ''}"
    ).rstrip()
    yield printable(
        f"  model {row['model']}, policy version {versions}, seed {cell(row['seed'])}, try {cell(row['try'])}"
    )
    yield f"  {len(row['turns'] or [])} turns, {tokens} sampled tokens, {_seconds(row['wall_s'])} in all: " + ", ".join(
        f"{name} {_seconds(row[f'{name}_s'])}" for name in ("setup", "harness", "engine", "queue", "collect")
    )
    for past in row["history"] or []:
        yield printable(
            f"  earlier try {past['try']}: {past['outcome']} ({past['blame']}) {past['detail'] or ''}"
        ).rstrip()
    yield ""


def _turn(turn: dict[str, Any], node: tree.Node, full: bool) -> Iterator[str]:
    where = turn["cause"] or "-"
    if node.parent != tree.ROOT:
        where += f" of turn {node.parent}"
        if turn["cause"] != "extend":
            where += f" after {node.prefix_len} shared tokens"
    logprobs = turn["logprobs"]
    mean = f"{sum(logprobs) / len(logprobs):.3f}" if len(logprobs) else "-"
    versions = ", ".join(str(v["version"]) for v in turn["versions"] or []) or "-"
    yield (
        f"● turn {node.index}: {cell(where)}; prompt {node.prompt_len} (+{len(node.context_ids)}), "
        f"sampled {len(node.completion_ids)}, mean log p {mean}, version {versions}, {cell(turn['finish_reason'])}"
    )
    yield (
        f"  queued {_seconds(turn['queue_s'])}, prefill {_seconds(turn['prefill_s'])}, "
        f"decode {_seconds(turn['decode_s'])}, {cell(turn['cached_tokens'])} tokens cached"
    )
    marks = [
        f"not trained ({d['reason']}): tokens {d['start']} to {d['start'] + d['length'] - 1}"
        for d in turn["drops"] or []
    ]
    marks += ["asked by hand, not by the harness"] if turn["foreign"] else []
    marks += ["not wholly delivered"] if turn["delivered"] is False else []
    for mark in marks:
        yield printable(f"  ! {mark}")
    for message in _messages(turn["messages"]):
        yield from _said(message, full)
    if turn["reasoning"]:
        yield from _block("reasoning", turn["reasoning"], full)
    yield from _block("answer", turn["text"] or "", full)
    for call in turn["tool_calls"] or []:
        valid = "" if call["valid"] else " (invalid)"
        yield from _block(f"call {call['name']}{valid}", call["arguments"] or "", full)


def _messages(text: str | None) -> list[Any]:
    try:
        found = json.loads(text) if text else []
    except ValueError:
        return [text]
    return found if isinstance(found, list) else [found]


def _said(message: Any, full: bool) -> Iterator[str]:
    if not isinstance(message, dict):
        yield from _block("message", message if isinstance(message, str) else json.dumps(message), full)
        return
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(
            part.get("text", json.dumps(part)) if isinstance(part, dict) else str(part) for part in content
        )
    yield from _block(str(message.get("role", "message")), str(content or ""), full)
    for call in message.get("tool_calls") or []:
        yield from _block("call", json.dumps(call), full)


def _block(label: str, text: str, full: bool) -> Iterator[str]:
    """`label: first line`, further lines set in; nothing for an empty text but the label."""
    kept = text.rstrip("\n") if full else _clip(text.rstrip("\n"))
    first, *rest = printable(kept).expandtabs(4).split("\n")
    yield f"  {printable(label)}: {first}".rstrip()
    for line in rest:
        yield f"    {line}".rstrip()


def _clip(text: str) -> str:
    kept = "\n".join(text.split("\n")[:CLIP_LINES])[:CLIP_CHARS]
    return kept if len(kept) == len(text) else f"{kept} … ({len(text) - len(kept)} more characters; --full)"


def _tail(row: dict[str, Any], full: bool) -> Iterator[str]:
    yield ""
    yield printable(f"outcome {row['outcome']} (blame {row['blame']}), exit code {cell(row['exit_code'])}")
    if row["detail"]:
        yield from _block("detail", row["detail"], full)
    for name, budget in (row["budgets"] or {}).items():
        if budget and budget["limit"] is not None:
            yield f"  {name}: {cell(budget['used'])} of {cell(budget['limit'])}"
    if row["graded_at"] is None and row["reward"] is None:
        yield "not graded"
    else:
        yield printable(
            f"reward {cell(row['reward'])}, resolved {cell(row['resolved'])}, grader {row['grader'] or '-'}"
        )
        yield from (printable(f"  flag {flag}") for flag in row["flags"] or [])
        for test in row["tests"] or []:
            yield f"  test {cell(test['id'])}: wanted {cell(test['wanted'])}, got {cell(test['got'])}"
    yield from _block("patch", (row["patch"] or b"").decode("utf-8", "backslashreplace"), full)
    if row["log_tail"]:
        yield from _block("log", row["log_tail"], full)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
