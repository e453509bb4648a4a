"""Decide an attempt's outcome from what was seen from outside its container.

Blame follows from the outcome (legorl.outcomes): it is the model's unless one of the first rules below, each resting on
evidence that no content of the container can forge, says otherwise. Exit codes and logs come from inside and only tell
one model outcome from another. Memory and processes that ran out are the model's too, unless the sandbox never reached
its own limit of them. A disk that is full is the sandbox's own, of a fixed size: the model's.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from legorl.outcomes import Blame, blame_of
from legorl.sandbox import Evidence

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
    box: Evidence = field(default_factory=Evidence)
    interrupted: bool = False  # the round was ended while the try ran


class Verdict(NamedTuple):
    """How a try ended, who answers for it, and the evidence in words."""

    outcome: str
    blame: Blame
    detail: str


def decide(seen: Seen) -> Verdict:
    """Return the verdict on a try whose harness was started."""
    outcome, detail, *of_the_host = _ending(seen)
    return Verdict(outcome, blame_of(outcome, *of_the_host), detail)


def _ending(seen: Seen) -> tuple[str, str] | tuple[str, str, bool]:
    """Return outcome and detail, and True where the host ran out."""
    if seen.interrupted:
        return "interrupted", "the round was ended while it ran"
    if seen.lost:
        return "engine_lost", seen.lost
    if seen.broken_capture:
        return "capture_incomplete", seen.broken_capture
    if seen.wrong_weights:
        return "weights_lost", seen.wrong_weights
    box, failing = seen.box, seen.exit_code != 0 or not seen.patch
    killed, refused = f"{box.oom_kills} processes killed at the", f"{box.process_refusals} processes refused at the"
    if box.oom_kills and (box.filled_up if seen.sandbox_lost else failing and not seen.stopped):
        return "out_of_memory", f"{killed} memory limit"
    if seen.sandbox_lost and box.filled_up:
        return "too_many_processes", f"{refused} limit; {seen.sandbox_lost}"
    if box.host_oom_kills and (seen.sandbox_lost or (failing and not seen.stopped)):
        killed = f"{box.host_oom_kills} processes killed within the"
        return "out_of_memory", f"{killed} sandbox's memory limit: the host had no memory left for it", True
    short = f"{box.host_refusals} processes refused within the sandbox's limit: the host had none left for it"
    if seen.sandbox_lost and box.host_refusals:
        return "too_many_processes", f"{short}; {seen.sandbox_lost}", True
    if seen.sandbox_lost:
        return "sandbox_lost", seen.sandbox_lost
    if seen.patch_error:
        return "patch_unusable", seen.patch_error
    if seen.stopped:
        return STOPS[seen.stopped], ""
    if seen.overflow:
        return "context_overflow", "the last request did not fit the model's context"
    if box.process_refusals and failing:
        return "too_many_processes", f"{refused} limit"
    if box.host_refusals and failing:
        return "too_many_processes", short, True
    if box.full_disks and failing:
        return "disk_full", f"no room left in {', '.join(box.full_disks)}"
    if seen.exit_code != 0:
        return "harness_crash", f"the harness ended with exit code {seen.exit_code}"
    if seen.patch:
        return "finished", ""
    if seen.turns and seen.tools_offered and not seen.tools_called:
        return "text_only", "answered in text, no tool was called"
    return "no_changes", ""
