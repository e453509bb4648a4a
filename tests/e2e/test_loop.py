"""The main job as it is: vLLM, mini-swe-agent, Podman, hidden tests, GRPO, new weights, and a second round with them.

One lego-serve and one run of the demo's recipe, made small; the tests below ask different things of what it left.
"""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from e2e.driving import BIN, Run, rows

from legorl import tree
from legorl.checkpoint import open_checkpoint
from legorl.model import load_model, target_logprobs
from legorl.task import load_task

pytestmark = [pytest.mark.podman, pytest.mark.vllm]

ROUNDS, TASKS, ATTEMPTS = 2, 2, 3
SETTINGS = [
    f"ROUNDS={ROUNDS}", f"TASKS={TASKS}", f"ATTEMPTS={ATTEMPTS}",
    "ROLLOUT=-c 3 --temperature 0.5 --max-turns 2 --turn-tokens 48 --time-limit 240",
    # A step large enough that the new weights cannot be taken for the old ones.
    "TRAINER=--loss grpo --lr 1e-4",
]  # fmt: skip


@pytest.fixture(scope="module")
def loop(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = Run(tmp_path_factory.mktemp("loop") / "e2e")
    make = ["make", "-f", "recipes/demo.mk", f"RUN={run.folder}", f"MODEL={real_model}", *SETTINGS]
    done = run.do(BIN / "lego-serve", real_model, "--context", "2048", "--", *make)
    assert done.returncode == 0, done.stderr + run.logs()
    weights = [open_checkpoint(real_model), *(open_checkpoint(run.folder / f"step-{k:04d}/checkpoint") for k in (1, 2))]
    graded = {k: rows(run.folder / f"step-{k:04d}/graded") for k in (1, 2)}
    yield SimpleNamespace(run=run, done=done, weights=weights, graded=graded)
    run.end()


def test_both_rounds_are_whole_and_nothing_is_left(loop: Any) -> None:
    loop.run.wait_gone()
    assert loop.run.left() == []
    for k, made in loop.graded.items():
        tasks = [Path(line).name for line in (loop.run.folder / f"step-{k:04d}/tasks.list").read_text().split()]
        group = f"e2e.{k}.mini-swe-agent-small"
        assert {row["attempt_id"] for row in made} == {f"{group}.{t}.{n}" for t in tasks for n in range(ATTEMPTS)}
        assert len(made) == TASKS * ATTEMPTS
        assert {row["blame"] for row in made} == {"model"} and all(row["turns"] for row in made)
        assert {row["reward"] for row in made} <= {0.0, 1.0}


def test_every_sampled_token_is_trained_or_has_a_reason(loop: Any) -> None:
    sampled = loop.run.sql("select step, attempt_id, turn, position, token, logprob from tokens order by all")
    accounted = loop.run.sql(
        "select step, attempt_id, turn, position, token, sampler_logprob as logprob from updates order by all"
    )
    assert sampled == accounted and len(sampled) > 0
    by_hand = sorted(
        (k, row["attempt_id"], turn["index"], position, token)
        for k, made in loop.graded.items()
        for row in made
        for turn in row["turns"]
        for position, token in enumerate(turn["completion_ids"])
    )
    assert [(s["step"], s["attempt_id"], s["turn"], s["position"], s["token"]) for s in sampled] == by_hand
    assert loop.run.sql("select count(*) as n from updates where reason is null") == [{"n": 0}]
    record = json.loads((loop.weights[1].path / "legorl.json").read_text())
    reasons = loop.run.sql("select reason, count(*) as n from updates where step = 1 group by all")
    assert {r["reason"]: r["n"] for r in reasons} == record["tokens"]
    # A group is trained exactly where its rewards differ.
    assert loop.run.sql(
        """
        with spread as (select group_id, min(reward) < max(reward) as differ from trajectories group by all)
        select differ, reason, count(*) > 0 as some from updates
        join trajectories using (attempt_id) join spread using (group_id)
        where (reason = 'trained') <> differ group by all
        """
    ) == []  # fmt: skip


def test_versions_move_and_digests_chain(loop: Any) -> None:
    assert loop.run.sql("select distinct step, version from tokens order by all") == [
        {"step": 1, "version": 0},
        {"step": 2, "version": 1},
    ]
    for k, made in loop.graded.items():
        before = loop.weights[k - 1]
        assert {(w["version"], w["digest"]) for row in made for w in row["weights"]} == {(k - 1, before.digest)}
        chain = loop.run.sql(f"select distinct digest_in, digest_out from updates where step = {k}")
        assert chain == [{"digest_in": before.digest, "digest_out": loop.weights[k].digest}]


def forced(model: Any, made: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(recorded, teacher-forced) log-probabilities of every token sampled in the rows, float64; one pass a leaf."""
    import torch

    recorded, found = [], []
    for row in made:
        nodes, seen = tree.nodes_of(row["turns"]), set()
        for leaf in sorted(set(tree.homes(nodes))):
            whole = torch.tensor(tree.path_ids(nodes, leaf)).long()[None]
            chain = [leaf]
            while (node := nodes[chain[-1]]).parent != tree.ROOT and node.prefix_len == nodes[node.parent].path_len:
                chain.append(node.parent)
            new = sorted(set(chain) - seen)
            positions = torch.cat([torch.arange(nodes[k].prompt_len, nodes[k].path_len) - 1 for k in new])
            temperatures = torch.cat(
                [torch.full((len(nodes[k].completion_ids),), row["turns"][k]["temperature"]) for k in new]
            )
            with torch.no_grad():
                zeros = torch.zeros_like(positions)
                values = target_logprobs(model, whole, zeros, positions, whole[0, positions + 1], temperatures)
            recorded += [np.array(row["turns"][k]["logprobs"]) for k in new]
            found.append(values.double().numpy())
            seen |= set(chain)
        assert seen == set(range(len(nodes)))
    return np.concatenate(recorded), np.concatenate(found)


def test_the_weights_that_sampled_a_token_give_it_the_recorded_probability(loop: Any) -> None:
    for k, made in loop.graded.items():
        recorded, found = forced(load_model(loop.weights[k - 1].folder, "fp32"), made)
        assert np.corrcoef(np.exp(recorded), np.exp(found))[0, 1] >= 0.9999
        assert np.abs(recorded - found).mean() <= 1e-4
    # If there was something to learn, those of the last round are the new weights' and not the old ones'.
    trained = loop.run.sql("select count(*) as n from updates where step = 1 and reason = 'trained'")[0]["n"]
    assert (loop.weights[0].digest != loop.weights[1].digest) == (trained > 0)
    if trained:
        recorded, found = forced(load_model(loop.weights[0].folder, "fp32"), made[:1])
        assert np.abs(recorded - found).mean() > 1e-3


def test_nothing_hidden_reached_a_harness(loop: Any) -> None:
    for made in loop.graded.values():
        for row in made:
            task = load_task(row["task_path"])
            hidden = re.findall(r"def (test_\w+)", (task.tests / "test_task.py").read_text())
            shown = row["log_tail"] + json.dumps([t["messages"] for t in row["turns"]])
            assert hidden and not [name for name in hidden if name in shown]
            assert not any(turn["foreign"] for turn in row["turns"])


def test_the_summary_and_what_it_says_to_try_next(loop: Any) -> None:
    table, _, rest = loop.done.stdout.partition("Files: ")
    assert re.search(r"\b1\b.*\b6\b", table) and str(loop.run.folder) in rest
    commands = [line.strip() for line in rest.splitlines() if line.startswith("  bin/")]
    assert len(commands) >= 2
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=BIN.parent, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.strip(), (command, done.stderr)
