"""What must hold of one recorded attempt by itself, without a model.

    broken = shape_faults(row)       # its tokens cannot be put in order: not to be fed to a model
    wrong = record_faults(row)       # in order, but not a true record: something counted twice, sums that differ

Both return (turn or None, what is wrong). A row is a dictionary with the columns COLUMNS, its turns with TURN_COLUMNS.
"""

import re
from typing import Any

from legorl import routing, tree
from legorl.rows import TOKEN_FIELDS

COLUMNS = ("attempt_id", "try", "weights", "budgets", "graded_at", "grader")
TURN_COLUMNS = (
    *TOKEN_FIELDS, "cause", "routing", "request_id", "request_digest", "delivered", "finish_reason", "started_at",
    "drops",
)  # fmt: skip

Found = list[tuple[int | None, str]]


def shape_faults(row: dict[str, Any]) -> Found:
    """Nulls among the tokens, an invalid tree (legorl.tree.check), versions that are not told of every token."""
    turns = row["turns"]
    for number, turn in enumerate(turns):
        if nulls := [name for name in TOKEN_FIELDS if turn[name] is None]:
            return [(number, f"{', '.join(nulls)} is null")]
    try:
        tree.check(turns)
    except tree.TreeError as error:
        found = re.fullmatch(r"turn (\d+): (.*)", str(error))
        return [(int(found[1]), found[2]) if found else (None, str(error))]
    faults: Found = []
    for number, turn in enumerate(turns):
        starts = [0]
        for span in turn["versions"]:
            starts.append(starts[-1] + span["length"])
        if [span["start"] for span in turn["versions"]] != starts[:-1]:
            faults.append((number, "its version spans do not follow one another"))
        if turn["completion_ids"] and not turn["prefix_len"] + len(turn["context_ids"]):
            faults.append((number, "sampled from an empty prompt"))
    return faults


def record_faults(row: dict[str, Any]) -> Found:
    """Turns that stand twice, causes and routing that contradict the tree, sums that differ from those in `budgets`."""
    turns = row["turns"]
    faults = _repeated(turns)
    path_lens: list[int] = []
    routed = any(turn["routing"] is not None for turn in turns)
    for number, turn in enumerate(turns):
        sampled, context = len(turn["completion_ids"] or []), len(turn["context_ids"] or [])
        path_lens.append((turn["prefix_len"] or 0) + context + sampled)
        if (turn["cause"] == "root" and turn["parent"] != tree.ROOT) or (
            turn["cause"] == "extend"
            and not (0 <= turn["parent"] < number and turn["prefix_len"] == path_lens[turn["parent"]])
        ):
            faults.append(
                (
                    number,
                    f"its cause is {turn['cause']}, but it has {turn['prefix_len']} tokens of turn {turn['parent']}",
                )
            )
        if routed and (fault := _routing_fault(turn)):
            faults.append((number, fault))
    held = {"turns": len(turns), "tokens": sum(len(turn["completion_ids"] or []) for turn in turns)}
    for name, count in held.items():
        used = ((row["budgets"] or {}).get(name) or {}).get("used")
        if used is not None and used != count:
            faults.append((None, f"{used:g} {name} were counted when it was rolled out, and {count} are recorded"))
    return faults


def _repeated(turns: list[dict[str, Any]]) -> Found:
    """A request that stands twice, an undelivered answer that was sampled again, a turn that is a copy of another.

    An answer that was not delivered is sent again and not sampled again (unless it failed), so no later turn can have
    the same request. Equal prompts with equal answers are possible (`resample`), but not begun at one instant.
    """
    faults: Found = []
    by_id: dict[str, int] = {}
    undelivered: dict[str, int] = {}
    by_answer: dict[tuple, int] = {}
    for number, turn in enumerate(turns):
        if turn["request_id"] is not None:
            first = by_id.setdefault(turn["request_id"], number)
            if first != number:
                faults.append((number, f"the request of turn {first} once more: a retry counted twice"))
                continue
        if (digest := turn["request_digest"]) is not None:
            if digest in undelivered:
                text = f"sampled again, though the answer of turn {undelivered[digest]} had not been delivered"
                faults.append((number, text))
            elif turn["delivered"] is False and turn["finish_reason"] not in ("error", "abort"):
                undelivered[digest] = number
        if turn["completion_ids"] and turn["started_at"] is not None:
            answer = (turn["started_at"], tuple(turn["completion_ids"]), tuple(turn["logprobs"] or []))
            first = by_answer.setdefault(answer, number)
            if first != number:
                faults.append((number, f"a copy of turn {first}"))
    return faults


def _routing_fault(turn: dict[str, Any]) -> str | None:
    """What is wrong with the routing record of a turn whose attempt has some."""
    if turn["routing"] is None:
        return "no routing record, though other turns of the attempt have one" if turn["completion_ids"] else None
    rows = routing.wanted_rows(turn)
    if turn["routing"]["rows"] != rows:
        return f"{turn['routing']['rows']} rows of routing for {rows} input positions"
    try:
        routing.unpack(turn["routing"])
    except routing.RoutingError as error:
        return str(error)
    return None
