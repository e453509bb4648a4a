"""Decide an attempt's outcome from what was seen from outside its container.

Blame follows from the outcome (legorl.outcomes): it is the model's unless one of the first rules below, each resting on
evidence that no content of the container can forge, says otherwise. Exit codes and logs come from inside and only tell
one model outcome from another.
"""

from dataclasses import dataclass

STOPS = {
    "turns": "step_limit",
    "tokens": "token_limit",
    "idle_turns": "no_tool_loop",
    "seconds": "time_limit",
    "time": "time_limit",
}


@dataclass(frozen=True)
class Seen:
    """One try, as seen from outside. `stopped`: why we ended the harness; a key of STOPS, lost, or "" (we did not)."""

    exit_code: int | None = None
    stopped: str = ""
    lost: str | None = None  # why the engine could not serve the session any more
    wrong_weights: str | None = None  # served by other weights than --policy asked for
    broken_capture: str | None = None  # what is wrong with the recorded turns
    sandbox_lost: str | None = None
    patch: bytes | None = None
    patch_error: str | None = None
    overflow: bool = False
    tools_offered: bool = False
    tools_called: bool = False
    turns: int = 0
    oom_kills: int = 0
    process_refusals: int = 0
    full_disks: tuple[str, ...] = ()


def decide(seen: Seen) -> tuple[str, str]:
    """Return (outcome, detail) of a try whose harness was started."""
    if seen.lost:
        return "engine_lost", seen.lost
    if seen.broken_capture:
        return "capture_incomplete", seen.broken_capture
    if seen.wrong_weights:
        return "weights_lost", seen.wrong_weights
    failing = seen.exit_code != 0 or not seen.patch
    if seen.oom_kills and failing and not seen.stopped:
        return "out_of_memory", f"{seen.oom_kills} processes killed at the memory limit"
    if seen.sandbox_lost:
        return "sandbox_lost", seen.sandbox_lost
    if seen.patch_error:
        return "patch_unusable", seen.patch_error
    if seen.stopped:
        return STOPS[seen.stopped], ""
    if seen.overflow:
        return "context_overflow", "the last request did not fit the model's context"
    if seen.process_refusals and failing:
        return "too_many_processes", f"{seen.process_refusals} processes refused at the limit"
    if seen.full_disks and failing:
        return "disk_full", f"no room left in {', '.join(seen.full_disks)}"
    if seen.exit_code != 0:
        return "harness_crash", f"the harness ended with exit code {seen.exit_code}"
    if seen.patch:
        return "finished", ""
    if seen.turns and seen.tools_offered and not seen.tools_called:
        return "text_only", "answered in text, no tool was called"
    return "no_changes", ""
