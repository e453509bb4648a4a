"""Outcome and blame names of an attempt, and which outcome carries which blame.

An attempt ends with one outcome. Its blame says who answers for it: only `model` is ever graded into a reward;
`infra` has reward null and is tried again; `task` sets the task aside. Blame is `model` unless evidence from
outside the container shows otherwise, because whatever the container's own content can cause is the policy's doing.
docs/outcomes.md says what causes each outcome and what shows it.
"""

from typing import Literal

Blame = Literal["model", "infra", "task"]

BLAME: dict[str, Blame] = {
    # The harness ran to its own end, whatever that end was.
    "finished": "model",
    "no_changes": "model",
    "text_only": "model",
    "step_limit": "model",
    "token_limit": "model",
    "context_overflow": "model",
    "time_limit": "model",
    "no_tool_loop": "model",
    "harness_crash": "model",
    # Limits of the sandbox that the container's own content ran into; see OF_THE_HOST.
    "out_of_memory": "model",
    "disk_full": "model",
    "too_many_processes": "model",
    "patch_unusable": "model",
    # Ours: seen from outside the container.
    "sandbox_setup_failed": "infra",
    "sandbox_lost": "infra",
    "engine_lost": "infra",
    "weights_lost": "infra",
    "capture_incomplete": "infra",
    "image_missing": "infra",
    "grader_crash": "infra",
    "grader_timeout": "infra",
    "interrupted": "infra",
    # The task's own fault.
    "task_broken": "task",
}

# Where the kernel counted a process killed, or a fork refused, although the sandbox was within its own limits, the host
# had run out, or a cgroup around several sandboxes (a neighbour's hunger): these outcomes then have blame infra.
OF_THE_HOST = frozenset({"out_of_memory", "too_many_processes"})

# Reasons for which a sampled token is not trained. The first block is written into `drops` by the stage that knows
# it (lego-serve); the second is decided by lego-train and written into updates.parquet.
DROP_REASONS = {
    "cut": "the answer was cut by us (engine stopped, session closed) before the policy ended it",
    "support": "sampled from a restricted support (top_p, top_k, grammar, greedy) that the trainer does not apply",
    "side": "a side request of the harness (title, summary of usage), not part of the task",
    "foreign": "somebody in the sandbox called the API by hand",
}
TRAIN_REASONS = {
    "trained": "a target of this step",
    "infra": "the attempt failed for infrastructure reasons",
    "task": "the task was set aside",
    "ungraded": "the attempt has no reward",
    "canary": "its task is impossible, there to find out who cheats",
    "incomplete": "another attempt of its group was lost, or is missing, and --groups whole was given",
    "no_variance": "every attempt of its group got the same reward",
    "alone": "the only valid attempt of its group",
    "unrewarded": "nothing to learn from it: its reward is not 1 (sft), or no reward differs from 0 (reinforce)",
    "stale": "sampled by weights further back than --max-lag",
    "too_long": "its path does not fit the model's context or the token budget of one row",
    "masked": "its importance weight left the allowed bounds",
}


def blame_of(outcome: str, of_the_host: bool = False) -> Blame:
    """Return the blame of `outcome`; raise ValueError for a name that is not in the table.

    `of_the_host`: evidence from outside the container shows that the host, not the sandbox, ran out.
    """
    try:
        return "infra" if of_the_host and outcome in OF_THE_HOST else BLAME[outcome]
    except KeyError:
        raise ValueError(f"unknown outcome {outcome!r}; known: {', '.join(sorted(BLAME))}") from None
