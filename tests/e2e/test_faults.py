"""Unmodified harnesses in their sandboxes while things go wrong: what they do then, and the tree that comes of it.

Of every attempt: the tree is valid, each answer of the engine stands in exactly one turn, what the engine was fed is
what is recorded, and the structural checks of `lego-inspect verify` hold. The shape of each tree was looked at and then
written down: SHAPES. A harness joins by a line in CASES; of a fault without a shape only what always holds is asked.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e.faulty import Bench, Script, call

from legorl import tree
from legorl.commands.inspect.invariants import record_faults, shape_faults

HARNESSES = Path(__file__).parents[2] / "legorl" / "harnesses"

# (cause, parent) of each turn. The harness echoes what it got:
ALONE = [("root", -1)]
STOPS = [*ALONE, ("extend", 0)]
GOES_ON = [*STOPS, ("extend", 1)]
REPORTS = [*GOES_ON, ("extend", 2)]
# It leaves the failed answer out and says something instead; what follows goes on from there.
LEFT_OUT = [*STOPS, ("rewrite", 1), ("extend", 2)]

# A call that is no call (no JSON, an unknown tool) reaches the harness as text.
SHAPES = {
    "500": GOES_ON,
    "429": GOES_ON,
    "overflow": ALONE,
    "cut": REPORTS,
    "empty": STOPS,
    "text": STOPS,
    "badjson": STOPS,
    "badtool": STOPS,
    "badargs": REPORTS,
    "length": STOPS,
}
MINI = {**SHAPES, **dict.fromkeys(("empty", "text", "badjson", "badtool", "badargs", "length"), LEFT_OUT)}
# Claude Code has a reminder for an empty answer, in whose place it stands, and one for a cut-off answer, behind it.
CLAUDE = {**SHAPES, "empty": LEFT_OUT, "length": REPORTS}
# Qwen Code asks again after an empty answer. Of a cut one it keeps what it saw, and joins the next answer to it.
QWEN = {
    "empty": [*STOPS, ("resample", 1), ("extend", 2)],
    "cut": [*STOPS, ("rewrite", 1), ("edited", 1)],
    "badargs": REPORTS,
}
# OpenHands asks for a call or a message behind an empty answer.
OPENHANDS = dict.fromkeys(("empty", "cut", "badargs"), REPORTS)


def fence(command: str) -> str:
    return f"Now this.\n\n```mswea_bash_command\n{command}\n```"


@dataclass(frozen=True)
class Case:
    """A harness and how a model speaks to it. `often`: the faults that `make test` tries; `replayed`: and replays."""

    spec: str
    act: Callable[[str], str]
    end: str = "Done."
    shapes: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: SHAPES)
    often: tuple[str, ...] = ()
    replayed: bool = False

    def script(self, fault: str) -> Script:
        """The answers: one good call, the fault, and what is needed after it."""
        first, second, third = (self.act(f"{words}; echo {n}") for n, words in enumerate(
            ("echo hi > hello.txt", "cat hello.txt", "ls")))  # fmt: skip
        broken = second[: second.index("; echo")]
        faulty: Script = {
            "500": [{"fault": "500"}, {"fault": "500"}],
            "429": [{"fault": "429"}],
            "overflow": [{"fault": "overflow"}],
            "cut": [{"text": "Now I look at what is there, with great care. " * 3 + second, "fault": "cut"}],
            "empty": [""],
            "text": ["I think about it."],
            "badjson": [broken],
            "badtool": ['<tool_call>\n{"name": "nosuch", "arguments": {"x": 1}}\n</tool_call>'],
            "badargs": [re.sub('"(cmd|command)"', '"kommand"', second)],
            "length": [{"text": broken, "fault": "length"}],
        }[fault]
        return [first, *faulty, third, self.end]


BASH = call("bash")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CASES = [
    Case("mini-swe-agent", BASH, BASH(SUBMIT), MINI, replayed=True),
    Case("mini-swe-agent:text", fence, fence(SUBMIT), {**MINI, "badargs": REPORTS}),
    Case("pi", BASH, often=("cut", "badargs", "500"), replayed=True),
    Case("pi:anthropic", BASH),
    Case("pi:responses", BASH),
    Case("claude-code:small", call("Bash", description="é  x"), shapes=CLAUDE, often=("cut", "empty", "length")),
    Case("codex:small", call("exec_command", "cmd", workdir="/ws/repo"), often=("cut", "badargs", "empty", "overflow")),
    Case("opencode:small", call("bash", description="é  x"), shapes={}),
    Case("qwen-code:small", call("run_shell_command", description="é  x"), shapes=QWEN),
    Case("openhands:small", call("terminal"), call("finish", "message")("Done."), OPENHANDS),
]


@pytest.fixture(scope="module")
def bench(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    with Bench(tiny_model, folder) as running:
        yield running


def check(bench: Bench, row: dict[str, Any], answers: list[str] | None = None) -> None:
    """What holds of every attempt."""
    turns = row["turns"]
    assert shape_faults(row) == [] and record_faults(row) == []
    nodes = tree.nodes_of(turns)
    assert [tree.prompt_ids(nodes, k).tolist() for k in range(len(nodes))] == bench.engine.fed[row["attempt_id"]]
    if answers is not None:  # one turn an answer, in order, none twice
        assert [t["text"] for t in turns] == answers[: len(turns)]
    for turn, node in zip(turns, nodes, strict=True):
        whole = node.parent != tree.ROOT and node.prefix_len == nodes[node.parent].path_len
        assert turn["cause"] != "extend" or whole
        assert not turn["foreign"]


def check_faults(bench: Bench, case: Case, faults: list[str]) -> dict[str, dict[str, Any]]:
    rows = bench.play(case.spec, {fault: case.script(fault) for fault in faults})
    assert set(rows) == set(faults)
    for fault, row in rows.items():
        said = [x if isinstance(x, str) else x.get("text") for x in case.script(fault)]
        check(bench, row, [text for text in said if text is not None])
        assert row["blame"] == "model", (fault, row["detail"])
        assert sum(not t["delivered"] for t in row["turns"]) <= (fault == "cut")
        if fault in case.shapes:
            assert [(t["cause"], t["parent"]) for t in row["turns"]] == case.shapes[fault], (case.spec, fault)
    return rows


def check_faults_and_replay(bench: Bench, case: Case, faults: list[str]) -> None:
    rows = check_faults(bench, case, faults)
    if not case.replayed:
        return
    # Nothing of a refusal or a cut is in the record, and nothing of it is in the tree.
    again, said = bench.replay(case.spec, faults)
    assert {key: comparable(row) for key, row in again.items()} == {key: comparable(row) for key, row in rows.items()}
    count = sum(len(row["turns"]) for row in rows.values())
    assert said == f"lego-serve: {count} of {count} recorded turns replayed, in {len(rows)} sessions"


@pytest.mark.podman
@pytest.mark.harness
@pytest.mark.parametrize("case", [c for c in CASES if c.often], ids=lambda case: case.spec)
def test_the_tree_under_the_most_telling_faults(bench: Bench, case: Case) -> None:
    check_faults_and_replay(bench, case, list(case.often))


# What no two runs have in common.
VARYING = ("request_id", "request_digest", "started_at", "queue_s", "prefill_s", "decode_s")


def comparable(row: dict[str, Any]) -> tuple[Any, ...]:
    """The tree and what came of the attempt, without times and random ids."""
    turns = [{k: v for k, v in turn.items() if k not in VARYING} for turn in row["turns"]]
    for turn in turns:
        turn["tool_calls"] = [{**c, "id": ""} for c in turn["tool_calls"]]
        turn["messages"] = re.sub(r"call_\w+", "", turn["messages"])
    return row["outcome"], row["patch"], row["weights"], turns


@pytest.mark.slow
@pytest.mark.podman
@pytest.mark.harness
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec)
def test_the_tree_under_every_other_fault(bench: Bench, case: Case) -> None:
    check_faults_and_replay(bench, case, [fault for fault in SHAPES if fault not in case.often])


# -- several conversations in one attempt --------------------------------------------------------------------------


@pytest.mark.podman
@pytest.mark.harness
def test_a_sub_agent_of_claude_code_is_a_branch_of_its_own(bench: Bench) -> None:
    """The sub-agent runs in the background: the main conversation goes on, and hears of the result later."""
    bash = call("Bash", description="x")
    agent = {"description": "count", "prompt": "Count the files here.", "subagent_type": "general-purpose"}
    inside = "You are an agent for Claude Code"
    script: Script = [
        {"system": inside, "text": bash("ls")},
        {"system": inside, "text": "One file."},
        f"<tool_call>\n{json.dumps({'name': 'Agent', 'arguments': agent})}\n</tool_call>",
        "I wait for it.",
        "Done.",
    ]
    (row,) = bench.play("claude-code", {"agent": script}).values()
    check(bench, row)
    turns = row["turns"]
    branch = {t["index"] for t in turns if t["text"] in (script[0]["text"], script[1]["text"])}  # type: ignore[index]
    main = [t["index"] for t in turns if t["index"] not in branch]
    assert len(branch) == 2 and len(main) == 3, [t["text"] for t in turns]
    first, second = sorted(branch)
    assert turns[first]["cause"] == "rewrite" and turns[first]["prefix_len"] < 100
    assert (turns[second]["cause"], turns[second]["parent"]) == ("extend", first)
    assert [(turns[k]["cause"], turns[k]["parent"]) for k in main] == [
        ("root", -1), *(("extend", k) for k in main[:-1])]  # fmt: skip


@pytest.mark.podman
@pytest.mark.harness
def test_a_compaction_of_pi_is_a_summary_and_a_history_anew(bench: Bench, tmp_path: Path) -> None:
    text = (HARNESSES / "pi.toml").read_text()
    changed = text.replace('{"enabled": false}', '{"enabled": true, "reserveTokens": 1000, "keepRecentTokens": 100}')
    assert changed != text
    (tmp_path / "pi.toml").write_text(changed)
    script: Script = [
        BASH("echo hi > hello.txt; seq 1 900"),
        BASH("seq 1 800"),
        {"fault": "overflow"},
        "SUMMARY: hello.txt is written.",
        BASH("ls"),
        "Done.",
    ]
    (row,) = bench.play(str(tmp_path / "pi.toml"), {"compaction": script}).values()
    check(bench, row)
    turns = row["turns"]
    assert [t["text"] for t in turns] == [x for x in script if isinstance(x, str)]
    assert [(t["cause"], t["parent"]) for t in turns] == [
        ("root", -1), ("extend", 0), ("rewrite", 0), ("rewrite", 0), ("extend", 3)]  # fmt: skip
    assert "SUMMARY" in turns[3]["messages"]


@pytest.mark.slow
@pytest.mark.podman
@pytest.mark.harness
def test_a_title_request_of_opencode_is_at_the_side(bench: Bench, tmp_path: Path) -> None:
    text = (HARNESSES / "opencode.toml").read_text()
    changed = text.replace('"title": {"disable": true}, ', "")
    assert changed != text
    (tmp_path / "opencode.toml").write_text(changed)
    script: Script = [
        {"system": "^You are a title generator", "text": "A title"},
        BASH("echo hi > hello.txt"),
        "Done.",
    ]
    (row,) = bench.play(f"{tmp_path / 'opencode.toml'}:small", {"title": script}).values()
    check(bench, row)
    (title,) = [t for t in row["turns"] if t["text"] == "A title"]
    assert title["cause"] == "side" and title["drops"][0]["length"] == len(title["completion_ids"])
    assert {t["cause"] for t in row["turns"] if t is not title} <= {"root", "rewrite", "extend"}
