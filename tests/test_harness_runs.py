"""The real harnesses in real sandboxes, against lego-serve with scripted answers: what they send is recorded as it is.

Each preset plays the same conversation (write, read, look, end), all against one lego-serve, two attempts at a time.
"""

import itertools
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from legorl import tree
from legorl.harness import load_harness
from legorl.shards import open_shard

BIN = Path(__file__).parents[1] / "bin"
CONTEXT = 32768
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def fence(language: str) -> Callable[[str], str]:
    return lambda command: f"Now this.\n\n```{language}\n{command}\n```"


def call(tool: str, argument: str = "command", **others: str) -> Callable[[str], str]:
    """A tool call whose arguments are not in the schema's order, so that an echo in that order shows."""
    return lambda command: (
        "I will use a tool. \n<tool_call>\n"
        + json.dumps({"name": tool, "arguments": {**others, argument: command}}, ensure_ascii=False)
        + "\n</tool_call>"
    )


@dataclass(frozen=True)
class Case:
    """A preset, and how a model speaks to it. opening: how its first message, if not by the task, is known."""

    spec: str
    protocol: str
    act: Callable[[str], str]
    end: str = "Done."
    opening: str = ""
    streamed: bool = True

    @property
    def ident(self) -> str:
        return self.spec.replace(":", "-")

    def script(self) -> list[dict[str, str]]:
        say, mark = f"echo {self.ident}", re.escape(self.ident)
        return [
            {
                "match": rf"\[{mark}\]" + (f"|{self.opening}" if self.opening else ""),
                "text": self.act(f"echo hi > hello.txt;  {say}-written"),
            },
            {"match": f"{mark}-written", "text": self.act(f"cat hello.txt; echo 'naïve é'; {say}-read")},
            {"match": f"{mark}-read", "text": self.act(f"ls; {say}-seen")},
            {"match": f"{mark}-seen", "text": self.end},
        ]


bash = call("bash")
CASES = [
    Case("mini-swe-agent", "openai-chat", bash, end=bash(SUBMIT), streamed=False),
    Case(
        "mini-swe-agent:text",
        "openai-chat",
        fence("mswea_bash_command"),
        end=fence("mswea_bash_command")(SUBMIT),
        streamed=False,
    ),
    Case("mini-swe-agent:small", "openai-chat", fence("bash"), end=fence("bash")(SUBMIT), streamed=False),
    Case("pi", "openai-chat", bash),
    Case("pi:anthropic", "anthropic", bash),
    Case("pi:responses", "openai-responses", bash),
    Case("pi:small", "openai-chat", bash),
    # Its first request ends with a message of the system's.
    Case("claude-code", "anthropic", call("Bash", description="é  x"), opening="Today's date is"),
    Case("claude-code:small", "anthropic", call("Bash", description="é  x")),
    Case("codex", "openai-responses", call("exec_command", "cmd", workdir="/ws/repo")),
    Case("codex:small", "openai-responses", call("exec_command", "cmd", workdir="/ws/repo")),
    *(
        pytest.param(Case(f"{name}{preset}", "openai-chat", act, **more), marks=pytest.mark.slow)
        for preset in ("", ":small")
        for name, act, more in (
            ("opencode", call("bash", description="é  x"), {}),
            ("qwen-code", call("run_shell_command", description="é  x"), {}),
            ("openhands", call("terminal"), {"end": call("finish", "message")("Done."), "streamed": False}),
        )
    ),
]


def make_task(folder: Path, ident: str) -> Path:
    root = folder / ident
    (root / "repo").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "repo" / "a.txt").write_text("hello\n")
    (root / "instruction.md").write_text(f"Create the file hello.txt with the text hi. [{ident}]\n")
    (root / "tests" / "test_task.py").write_text("def test_it():\n    assert open('hello.txt').read() == 'hi\\n'\n")
    (root / "task.toml").write_text(
        f'format = "task/1"\nid = "{ident}"\nfamily = "shell"\nkind = "create"\nsplit = "train"\n'
        '[grade]\nrunner = "pytest"\nfail_to_pass = ["tests/test_task.py::test_it"]\n'
        "[sandbox]\nmemory_mb = 1024\ndisk_mb = 32\nprocesses = 128\n"
    )
    return root


def rollout(task: Path, out: Path, harness: str, serve: str) -> dict[str, Any]:
    """Run one attempt and return its row."""
    argv = [BIN / "lego-rollout", task, "--out", out, "--harness", harness, "-n", "1", "--retries", "0"]
    argv += ["--time-limit", "400"]  # a busy machine is not a failure
    environment = {**os.environ, "LEGORL_SERVE": serve}
    done = subprocess.run(map(str, argv), env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (row,) = open_shard(done.stdout.strip()).rows()
    return row


@pytest.fixture(scope="module")
def lego_serve(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The control socket of one lego-serve with the answers for every case."""
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    cases = [case if isinstance(case, Case) else case.values[0] for case in CASES]
    cases.sort(key=lambda case: case.opening != "")  # others may hold those words somewhere too
    lines = [*itertools.chain.from_iterable(case.script() for case in cases), *PROGRAM_SCRIPT]
    script.write_text("\n".join(map(json.dumps, lines)))
    argv = [BIN / "lego-serve", tiny_model, "--engine", "script", "--script", script, "--context", str(CONTEXT)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def rows(
    lego_serve: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The row of every case that is to be tested, still being made."""
    folder = tmp_path_factory.mktemp("runs")
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [c.params["case"] for c in calls if c and "case" in c.params]
    pool = ThreadPoolExecutor(2)
    yield {
        case.spec: pool.submit(
            rollout, make_task(folder, case.ident), folder / "out" / case.ident, case.spec, lego_serve
        )
        for case in wanted
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.podman
@pytest.mark.harness
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.ident)
def test_a_harness_does_the_task_and_every_token_is_recorded_once(
    case: Case, rows: dict[str, Future[dict[str, Any]]]
) -> None:
    row, harness = rows[case.spec].result(), load_harness(case.spec)
    assert (row["outcome"], row["exit_code"], row["patch_files"]) == ("finished", 0, ["hello.txt"]), row["log_tail"]
    assert (row["harness"], row["harness_version"], row["harness_digest"]) == (
        case.spec,
        harness.version,
        harness.digest,
    )
    assert harness.protocol == case.protocol
    turns = row["turns"]
    tree.check(turns)
    assert [t["cause"] for t in turns] == ["root", "extend", "extend", "extend"]
    for turn, answer in zip(turns, case.script(), strict=True):
        assert turn["text"] == answer["text"]
        assert (turn["protocol"], turn["streamed"], turn["delivered"], turn["foreign"]) == (
            case.protocol,
            case.streamed,
            True,
            False,
        )
        assert [c["valid"] for c in turn["tool_calls"]] == [True] * ("<tool_call>" in answer["text"])
        # Scripted tokens are no policy's; nothing else keeps these from being trained.
        assert {d["reason"] for d in turn["drops"]} <= {"support"}
    # A turn goes on from all of the one before it, token by token, and adds what the tool said.
    nodes = tree.nodes_of(turns)
    for before, node, turn in zip(nodes, nodes[1:], turns[1:], strict=False):
        assert (node.parent, node.prefix_len) == (before.index, before.path_len)
        assert [m["role"] for m in json.loads(turn["messages"])] in (["tool"], ["user"])
    assert f"{case.ident}-read" in turns[2]["messages"]
    assert row["budgets"]["turns"]["used"] == 4
    assert row["budgets"]["tokens"]["used"] == sum(len(n.completion_ids) for n in nodes)


# -- any program -------------------------------------------------------------------------------------------------------

CHAT = """#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if answer == "DONE":
        break
    done = subprocess.run(["bash", "-c", answer], capture_output=True, text=True)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": done.stdout}]
"""
MESSAGES = """#!/bin/sh
# Everything comes from the environment; the program beside this one asks.
exec python3 "$(dirname "$0")/ask.py"
"""
ASK = """
import json, os, subprocess, urllib.request
body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 64}
body["messages"] = [{"role": "user", "content": os.environ["TASK"]}]
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
subprocess.run(["bash", "-c", reply["content"][0]["text"]], check=True)
"""
PROGRAM_SCRIPT = [
    {"match": r"\[chat\]", "text": "echo hi > hello.txt; echo chat-written"},
    {"match": "chat-written", "text": "DONE"},
    {"match": r"\[messages\]", "text": "echo hi > hello.txt"},
]


@pytest.mark.podman
def test_any_program_that_reads_the_usual_variables_is_a_harness(tmp_path: Path, lego_serve: str) -> None:
    (tmp_path / "agent.py").write_text(CHAT)
    (tmp_path / "agent.py").chmod(0o755)
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "run").write_text(MESSAGES)
    (folder / "run").chmod(0o755)
    (folder / "ask.py").write_text(ASK)
    for name, program, protocol in (
        ("chat", tmp_path / "agent.py", "openai-chat"),
        ("messages", folder, "anthropic"),
    ):
        row = rollout(make_task(tmp_path / "t", name), tmp_path / name, f"command:{program}", lego_serve)
        assert (row["outcome"], row["patch_files"]) == ("finished", ["hello.txt"]), row["log_tail"]
        assert row["harness"] == f"command:{program.name}"
        assert {(t["protocol"], t["foreign"]) for t in row["turns"]} == {(protocol, False)}
        tree.check(row["turns"])
