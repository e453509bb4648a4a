"""Hand-made rows, valid under legorl.schema, for tests that need shards without running anything.

row = trajectory("rename", 0, turns=[turn(), turn(1, 0)], reward=1.0)
shard(folder / "a.parquet", [row])
shard(folder / "updates.parquet", update_rows(row), kind=schema.UPDATE_FORMAT)
"""

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from legorl import outcomes, schema, shards, tree

EPOCH = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)


def blank(arrow_schema: Any) -> dict[str, Any]:
    """One row of `arrow_schema` (a schema or a struct type) with every column null."""
    return {field.name: None for field in arrow_schema}


def turn(
    index: int = 0,
    parent: int = tree.ROOT,
    prefix_len: int | None = None,
    context_ids: Sequence[int] | None = None,
    completion_ids: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    **fields: Any,
) -> dict[str, Any]:
    """One row of schema.TURN. Without ids it gets some of its own, distinct by index; all sampled by `version`.

    `prefix_len` defaults to 5 tokens a turn, the whole path of the default parent, so that `turn(k, k - 1)` extends.
    """
    context_ids = [100 * index + k for k in range(3)] if context_ids is None else list(context_ids)
    completion_ids = [100 * index + 50 + k for k in range(2)] if completion_ids is None else list(completion_ids)
    if logprobs is None:
        logprobs = [-0.25 - 0.125 * k for k in range(len(completion_ids))]
    if prefix_len is None:
        prefix_len = 0 if parent == tree.ROOT else 5 * (parent + 1)
    return blank(schema.TURN) | {
        "index": index,
        "parent": parent,
        "prefix_len": prefix_len,
        "cause": "root" if parent == tree.ROOT else "extend",
        "context_ids": context_ids,
        "completion_ids": completion_ids,
        "logprobs": list(logprobs),
        "temperature": 1.0,
        "support": "full",
        "versions": [{"start": 0, "length": len(completion_ids), "version": version}],
        "request_id": f"request-{index}",
        "request_digest": f"digest-{index}",
        "protocol": "openai-chat",
        "streamed": False,
        "delivered": True,
        "requested": "{}",
        "applied": '{"temperature": 1.0}',
        "finish_reason": "stop",
        "stop_token_sampled": True,
        "tool_calls": [],
        "text": f"answer {index}",
        "messages": f'[{{"role": "user", "content": "question {index}"}}]',
        "started_at": EPOCH + datetime.timedelta(seconds=index),
        "queue_s": 0.0,
        "prefill_s": 0.25,
        "decode_s": 0.5,
        "cached_tokens": prefix_len,
        "foreign": False,
        "drops": [],
        **fields,
    }


def trajectory(
    task_id: str = "task-a",
    attempt: int = 0,
    *,
    run: str = "r1",
    step: int = 0,
    harness: str = "mini-swe-agent",
    turns: Iterable[dict[str, Any]] | None = None,
    outcome: str = "finished",
    reward: float | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """One row of schema.TRAJECTORY: `turns` defaults to two, one extending the other. A reward makes it graded."""
    group_id = f"{run}.{step}.{harness}.{task_id}"
    turns = [turn(), turn(1, 0)] if turns is None else list(turns)
    used = {"turns": len(turns), "tokens": sum(len(one["completion_ids"] or []) for one in turns), "seconds": 2}
    row = blank(schema.TRAJECTORY) | {
        "attempt_id": f"{group_id}.{attempt}",
        "group_id": group_id,
        "run": run,
        "step": step,
        "task_id": task_id,
        "task_path": f"tasks/{task_id}",
        "task_digest": "0" * 32,
        "split": "train",
        "attempt": attempt,
        "try": 0,
        "harness": harness,
        "harness_version": "1",
        "harness_digest": "1" * 32,
        "model": "tiny",
        "weights": [{"version": 0, "digest": "2" * 32, "path": "models/tiny"}],
        "tokenizer_digest": "3" * 32,
        "template_digest": "4" * 32,
        "seed": attempt,
        "outcome": outcome,
        "blame": outcomes.blame_of(outcome),
        "detail": "",
        "exit_code": 0,
        "budgets": {name: {"limit": 100.0, "used": float(value)} for name, value in used.items()},
        "history": [],
        "started_at": EPOCH,
        "wall_s": 3.0,
        "setup_s": 0.5,
        "harness_s": 1.0,
        "engine_s": 1.5,
        "queue_s": 0.0,
        "collect_s": 0.25,
        "patch": b"",
        "patch_files": [],
        "log_tail": "",
        "turns": turns,
    }
    if reward is not None:
        row |= {
            "reward": reward,
            "resolved": reward == 1,
            "fail_to_pass": {"passed": int(reward == 1), "total": 1},
            "pass_to_pass": {"passed": 0, "total": 0},
            "tests": [
                {"id": "tests/test_task.py::test_it", "wanted": "pass", "got": "pass" if reward == 1 else "fail"}
            ],
            "flags": [],
            "grader": "test/1",
            "graded_at": EPOCH + datetime.timedelta(minutes=1),
            "grade_s": 0.5,
        }
    return row | fields


def group(rewards: Sequence[float | None], task_id: str = "task-a", **fields: Any) -> list[dict[str, Any]]:
    """Siblings of one group, one a reward."""
    return [trajectory(task_id, n, reward=reward, **fields) for n, reward in enumerate(rewards)]


def plan_of(rows: Iterable[dict[str, Any]]) -> shards.Plan:
    """The plan that exactly `rows` (of one run and step) fulfil."""
    rows = list(rows)
    return shards.Plan(
        rows[0]["run"],
        rows[0]["step"],
        tuple(dict.fromkeys(row["group_id"] for row in rows)),
        1 + max(row["attempt"] for row in rows),
    )


def shard(path: Path, rows: list[dict[str, Any]], plan: shards.Plan | None = None, kind: str = "") -> Path:
    """Write `rows` as a shard of format `kind` (default: trajectories, with the plan that `rows` fulfil)."""
    kind = kind or schema.TRAJECTORY_FORMAT
    if kind == schema.TRAJECTORY_FORMAT:
        plan = plan or plan_of(rows)
    return shards.write_shard(path, rows, shards.make_meta(kind, plan))


def update_rows(row: dict[str, Any], noise: float = 0.0, seed: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """One row of schema.UPDATE for each sampled token of `row`: the trainer agrees with the sampler up to `noise`."""
    rng = np.random.default_rng(seed)
    out = []
    for one in row["turns"]:
        drops = tree.drop_reasons(one)
        for position, (token, logprob) in enumerate(zip(one["completion_ids"], one["logprobs"], strict=True)):
            old = float(np.float32(logprob + noise * rng.standard_normal()))
            out.append(
                {
                    "run": row["run"],
                    "step": row["step"],
                    "digest_in": "5" * 32,
                    "digest_out": "6" * 32,
                    "attempt_id": row["attempt_id"],
                    "turn": one["index"],
                    "position": position,
                    "token": token,
                    "train_logprob": old,
                    "old_logprob": old,
                    "sampler_logprob": logprob,
                    "ratio": 1.0,
                    "weight": 1.0,
                    "advantage": 0.5,
                    "clipped": False,
                    "lag": 0,
                    "reason": drops[position] or "trained",
                    **fields,
                }
            )
    return out


def small_task(folder: Path, ident: str, instruction: str = "do it") -> Path:
    """A task folder that wants the file hello.txt with the text hi."""
    root = folder / ident
    (root / "repo").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "repo" / "a.txt").write_text("hello\n")
    (root / "instruction.md").write_text(instruction + "\n")
    (root / "tests" / "test_task.py").write_text("def test_it():\n    assert open('hello.txt').read() == 'hi\\n'\n")
    (root / "task.toml").write_text(
        f'format = "task/1"\nid = "{ident}"\nfamily = "shell"\nkind = "create"\nsplit = "train"\n'
        '[grade]\nrunner = "pytest"\nfail_to_pass = ["tests/test_task.py::test_it"]\n'
        "[sandbox]\nmemory_mb = 256\ndisk_mb = 32\nprocesses = 64\n"
    )
    return root
