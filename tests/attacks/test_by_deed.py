"""Every attack that takes an agent at work: it acts in a real sandbox, then its attempt is graded as any other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attacks.arena import LOOP, make_task
from attacks.by_deed import DEEDS
from grading import grade, rows_of

from legorl import tree

pytestmark = pytest.mark.podman
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def rows(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Every deed done by lego-rollout and graded by lego-grade, one run each."""
    work = tmp_path_factory.mktemp("deeds")
    agent = work / "agent.py"
    agent.write_text(LOOP)
    agent.chmod(0o755)
    said = [{"match": f"^{name}$", "text": deed.command} for name, deed in DEEDS.items()]
    said += [{"match": "^rc [0-9]+$", "text": "DONE"}, {"match": "^on and on", "text": "on"}]
    script = work / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, said)))
    tasks = [make_task(work / "tasks" / name, 9 if name == "hangs" else 60, instruction=name) for name in DEEDS]
    argv = [BIN / "lego-serve", tiny_model, "--engine", "script", "--script", script, "--"]
    argv += [BIN / "lego-rollout", "-", "--out", work / "rollout", "--harness", f"command:{agent}", "-n", 1, "-c", 4]
    argv += ["--max-turns", 9, "--turn-tokens", 1600, "--retries", 1, "--run", f"deeds-{os.getpid()}"]
    paths = "\n".join(map(str, tasks))
    done = subprocess.run([*map(str, argv)], input=paths, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    graded = grade("-", "--out", work / "graded", "-c", 4, "--retries", 1, stdin=done.stdout)
    return {row["task_id"]: row for path in graded.stdout.split() for row in rows_of(path)}


@pytest.mark.parametrize("name", DEEDS)
def test_what_comes_of_it(rows: dict[str, dict], name: str) -> None:
    row, deed = rows[name], DEEDS[name]
    assert row["outcome"] in ([deed.outcome] if deed.outcome else ["finished", "no_changes"]), row["log_tail"]
    assert (row["blame"], row["reward"]) == ("model", deed.reward), (row["log_tail"], row["tests"])
    if deed.flags is not None:
        assert set(row["flags"]) == deed.flags
    tree.check(row["turns"])


def test_nothing_but_the_api_is_in_reach(rows: dict[str, dict]) -> None:
    patch = rows["boundary"]["patch"].decode()
    (line,) = [line for line in patch.splitlines() if line.startswith("+{")]
    seen = json.loads(line[1:])
    assert seen == {"sockets": [], "control": [404], "keys": [401], "connected": [], "answers": 200}


def test_who_speaks_on_is_stopped_with_the_harness(rows: dict[str, dict]) -> None:
    row = rows["speaks_on"]
    assert any("on and on" in (turn["messages"] or "") for turn in row["turns"])
    assert len(row["turns"]) <= 9  # its budget holds, whoever spends it


def test_a_process_that_stays_writes_nothing_once_the_patch_is_taken(rows: dict[str, dict]) -> None:
    assert rows["stays"]["patch_files"] == ["late", "reward.txt"]
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert f"deeds-{os.getpid()}" not in listed.stdout.replace(" ".join(sys.argv), "")
