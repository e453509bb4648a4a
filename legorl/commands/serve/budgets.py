"""What a session may use, and what it has used: turns, sampled tokens, seconds, turns in a row without a tool call.

    budgets = Budgets(request)
    budgets.check(turns=3, tokens=900)     # before a new turn; raises BudgetSpent
    budgets.begin(); ...; budgets.end(turn)

Seconds are the harness's own, from its first request on: while a turn waits for the engine or runs, the clock stands.
Idle turns are those of the main line that were offered tools and called none: side and foreign requests, and requests
without tools (harnesses whose commands are text), neither count nor break the row.
"""

import time

from legorl.commands.serve.turn import Turn
from legorl.control import SessionRequest

NAMES = {
    "turns": "turns",
    "tokens": "sampled tokens",
    "idle_turns": "turns without a tool call",
    "seconds": "the harness's own time",
}


class BudgetSpent(Exception):
    """The session has used up `which` (a key of NAMES): its harness is to stop. `status` is the answer's."""

    def __init__(self, which: str, status: int):
        super().__init__(f"this session's budget of {NAMES[which]} is spent: it has ended")
        self.which, self.status = which, status


class Budgets:
    """The limits of one session and what counts towards them."""

    def __init__(self, limits: SessionRequest):
        self._limits = limits
        self._first_at: float | None = None  # time.monotonic() of the first request
        self._busy_s, self._busy_since, self._running = 0.0, 0.0, 0
        self._idle_turns = 0

    def check(self, turns: int, tokens: int) -> None:
        """Raise BudgetSpent if a further turn is over a limit."""
        limits, now = self._limits, time.monotonic()
        self._first_at = self._first_at or now
        busy_s = self._busy_s + (now - self._busy_since if self._running else 0.0)
        used = {
            "turns": (turns, limits.max_turns),
            "tokens": (tokens, limits.max_tokens),
            "idle_turns": (self._idle_turns, limits.max_idle_turns),
            "seconds": (now - self._first_at - busy_s, limits.max_seconds),
        }
        for which, (value, limit) in used.items():
            if limit is not None and value >= limit:
                raise BudgetSpent(which, limits.spent_status)

    def begin(self) -> None:
        """A turn is under way."""
        if not self._running:
            self._busy_since = time.monotonic()
        self._running += 1

    def end(self, turn: Turn) -> None:
        """The turn is over."""
        self._running -= 1
        if not self._running:
            self._busy_s += time.monotonic() - self._busy_since
        if turn.answer and turn.answer.get("tool_calls"):
            self._idle_turns = 0
        elif turn.answer and turn.request.tools and turn.cause != "side" and not turn.foreign:
            self._idle_turns += 1
