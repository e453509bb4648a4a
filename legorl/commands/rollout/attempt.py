"""One try of one attempt: a session, a sandbox, the harness in it, then the diff, the turns and the verdict.

The session's key reaches the harness through its environment and files inside the container only. It dies with the
session, before anything that the container leaves behind is read.

Time: `--time-limit` counts the harness's own time; while a turn waits for the engine or runs, the clock stands. Behind
it stands a hard limit on wall time, which is no fault of the model's: an engine so slow counts as lost.
"""

import asyncio
import contextlib
import hashlib
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from legorl import schema, tree
from legorl.commands.rollout.home import HOME, REPO, import_files, pack_home
from legorl.commands.rollout.verdict import Seen, Verdict, decide
from legorl.control import Closed, Control, Health, ServeError, Session, SessionRequest
from legorl.harness import BASE_URL, Harness, Launch
from legorl.options import printable
from legorl.outcomes import blame_of
from legorl.sandbox import (
    BASE_IMAGE,
    ImageBroken,
    ImageMissing,
    LimitsError,
    PatchUnusable,
    PodmanMissing,
    Sandbox,
    SandboxError,
    Spec,
    open_sandbox,
)
from legorl.sandbox.container import Opener
from legorl.sandbox.errors import HostsGone
from legorl.task import Task, pack

ENVIRONMENT = {
    "HOME": HOME,
    "TMPDIR": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
LOG_LIMIT = 64_000  # bytes of the harness's log that leave the sandbox
LOG_TAIL = 4096  # bytes of the harness's log that go into the row
GRACE_S = 5.0  # for a harness that has been told that a budget is spent, to end by itself
HARD_FACTOR, HARD_SLACK_S = 4.0, 1800.0  # hard wall limit = factor * time limit + slack

# What no attempt can get around: the whole command ends with it.
FATAL = (PodmanMissing, LimitsError, HostsGone)


@dataclass(frozen=True)
class Settings:
    """What every attempt of a round has in common."""

    run: str
    step: int
    harness: Harness
    temperature: float
    turn_tokens: int
    max_turns: int
    max_tokens: int
    max_idle_turns: int | None  # main turns in a row that are offered tools and call none
    time_limit: float  # seconds of the harness's own time
    seed: int
    policy_digest: str | None  # the weights every turn must come from, if --policy was given

    def group_id(self, task: Task) -> str:
        return f"{self.run}.{self.step}.{self.harness.label.replace(':', '-')}.{task.id}"

    def seed_of(self, attempt_id: str) -> int:
        """Seed of an attempt, 63 bits: siblings differ, a rerun repeats it."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}|{attempt_id}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Job:
    """One attempt to make: number `n` of the group of `task`; `history` holds its earlier tries (schema.TRY)."""

    task: Task
    group_id: str
    n: int
    history: tuple[dict[str, Any], ...] = ()

    @property
    def attempt_id(self) -> str:
        return f"{self.group_id}.{self.n}"

    @property
    def sandbox(self) -> str:
        """Name of this try's sandbox."""
        return "r-" + hashlib.sha256(f"{self.attempt_id}|{len(self.history)}".encode()).hexdigest()[:12]


class _Clock:
    """Seconds of the phases of a try: `begin` ends the phase before."""

    def __init__(self) -> None:
        self.started_at, self._start = datetime.now(UTC), time.monotonic()
        self.seconds = {"setup_s": 0.0, "harness_s": 0.0, "collect_s": 0.0, "rest": 0.0}
        self._phase, self._since = "setup_s", self._start

    def begin(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._start


@dataclass
class _Found:
    """What a try has brought so far; whatever it does not reach stays as it is here."""

    seen: Seen
    box: Sandbox | None = None
    started: bool = False
    setup_error: str | None = None
    setup_outcome: str = "sandbox_setup_failed"
    closed: Closed | None = None
    turns: list[dict[str, Any]] | None = None
    log: bytes = b""
    own_s: float = 0.0


async def run_attempt(
    job: Job, settings: Settings, control: Control, health: Health, open_box: Opener = open_sandbox
) -> dict[str, Any]:
    """Run one try and return its row (schema.TRAJECTORY), whatever came of it.

    Cancelled once its session is open, it ends what runs and returns its row as well: `interrupted`, with the turns so
    far. Raises ServeError if no session can be opened, and the sandbox errors in FATAL: then no attempt can run.
    """
    clock, found = _Clock(), _Found(Seen())
    request = SessionRequest(
        attempt_id=job.attempt_id,
        seed=settings.seed_of(job.attempt_id),
        harness=settings.harness.label,
        temperature=settings.temperature,
        turn_tokens=settings.turn_tokens,
        max_turns=settings.max_turns,
        max_tokens=settings.max_tokens,
        max_seconds=settings.time_limit,
        max_idle_turns=settings.max_idle_turns,
        spent_status=settings.harness.spent_status,
        side_patterns=settings.harness.side_patterns,
        user_agent=settings.harness.user_agent,
    )
    hard_s = HARD_FACTOR * settings.time_limit + HARD_SLACK_S
    spec = Spec(
        name=job.sandbox,
        run=settings.run,
        limits=job.task.limits,
        image=job.task.image or BASE_IMAGE,
        links=job.task.links,
        mounts=settings.harness.mounts,
        llm_dir=Path(health.llm_dir),
        lifetime_s=hard_s + 300,
        cpus_allowed=tuple(health.free_cores) or None,
    )
    async with control.session(request) as session:
        try:
            async with open_box(spec) as box:
                found.box = box
                launch = await _prepare(box, job, settings, health, session)
                found.started = True
                clock.begin("harness_s")
                await _play(box, launch, settings, session, hard_s, found)
                clock.begin("collect_s")
                await _close(session, found)
                await _collect(box, found)
        except FATAL:
            raise
        except (ImageMissing, ImageBroken) as error:
            found.setup_outcome = "task_broken" if isinstance(error, ImageBroken) else "image_missing"
            found.setup_error = str(error)
        except SandboxError as error:
            if found.started:
                found.seen = replace(found.seen, sandbox_lost=str(error))
            else:
                found.setup_error = str(error)
        except asyncio.CancelledError:
            collected = found.seen.patch is not None or found.seen.patch_error is not None
            found.seen, found.setup_error = replace(found.seen, interrupted=not collected), None
            if found.closed is None:
                await _close(session, found)
        clock.begin("rest")
    if found.box:  # what the outside saw, now that nothing can happen in it any more
        found.seen = replace(found.seen, box=found.box.evidence())
    return _row(job, settings, health, clock, found)


async def _prepare(box: Sandbox, job: Job, settings: Settings, health: Health, session: Session) -> Launch:
    """Put the repository and the harness's files into the sandbox."""
    launch = settings.harness.launch(
        {
            "task": job.task.instruction,
            "base_url": BASE_URL,
            "key": session.key,
            "model": health.name,
            "home": HOME,
            "max_turns": settings.max_turns,
            "turn_tokens": settings.turn_tokens,
            "context": health.context,
        }
    )
    await box.put(pack(job.task.repo), REPO)
    await box.commit(REPO)
    await box.put(pack_home({**import_files(job.task, settings.harness), **launch.files}), HOME)
    return replace(launch, env={**job.task.on_path(ENVIRONMENT), **launch.env})


async def _play(
    box: Sandbox, launch: Launch, settings: Settings, session: Session, hard_s: float, found: _Found
) -> None:
    """Run the harness until it ends or must be stopped. A sandbox that is lost on the way is evidence, not an error."""
    stop, begun = asyncio.Event(), time.monotonic()
    watcher = asyncio.create_task(_watch(session, stop, settings.time_limit))
    try:
        result = await box.run(launch.argv, env=launch.env, cwd=REPO, log_limit=LOG_LIMIT, until=stop, timeout_s=hard_s)
    except FATAL:
        raise
    except SandboxError as error:
        found.seen = replace(found.seen, sandbox_lost=str(error))
    else:
        found.log = result.log.replace(session.key.encode(), b"***")
        found.seen = replace(found.seen, exit_code=result.exit_code)
        if result.timed_out:
            session.state.lost = f"the engine was too slow: the harness was not done after {hard_s:.0f} s of wall time"
        elif session.state.lost is None and (result.stopped or session.state.budget):
            found.seen = replace(found.seen, stopped=session.state.budget or await watcher)
    finally:
        watcher.cancel()
        found.own_s = own_seconds(session, time.monotonic() - begun)
    found.seen = replace(found.seen, lost=session.state.lost)


async def _watch(session: Session, stop: asyncio.Event, time_limit: float) -> str:
    """Set `stop` when a budget is spent, the harness's own time is over, or the engine is lost; return which.

    A harness that asked for more than its budget has its answer (lego-serve's, an error that ends it), and a moment to
    end by itself.
    """
    begun, state = time.monotonic(), session.state
    while True:
        session.changed.clear()
        left = time_limit - own_seconds(session, time.monotonic() - begun)
        why = "lost" if state.lost else state.budget or ("time" if left <= 0 else "")
        if why:
            if state.budget and not state.lost:
                await asyncio.sleep(GRACE_S)
            stop.set()
            return why
        with contextlib.suppress(TimeoutError):
            # While a turn runs the clock stands: only an event can change anything.
            await asyncio.wait_for(session.changed.wait(), None if state.running else left)


def own_seconds(session: Session, elapsed: float) -> float:
    """Seconds of `elapsed` in which no turn of the session waited for the engine or ran."""
    state = session.state
    running = time.monotonic() - state.busy_since if state.busy_since is not None else 0.0
    return max(0.0, elapsed - state.busy_s - running)


async def _collect(box: Sandbox, found: _Found) -> None:
    """Take the patch."""
    try:
        if found.seen.sandbox_lost is None:
            found.seen = replace(found.seen, patch=await box.diff(REPO))
    except PatchUnusable as error:
        found.seen = replace(found.seen, patch_error=str(error))
    except FATAL:
        raise
    except SandboxError as error:
        found.seen = replace(found.seen, sandbox_lost=str(error))


async def _close(session: Session, found: _Found) -> None:
    """Close the session and check what it recorded."""
    try:
        closed = await session.close()
    except ServeError as error:
        found.seen = replace(found.seen, lost=found.seen.lost or str(error))
        return
    turns = closed.turns.to_pylist()[0]
    broken = None
    try:
        tree.check(turns)
    except tree.TreeError as error:
        broken = str(error)
    found.closed, found.turns = closed, turns
    found.seen = replace(
        found.seen,
        # A harness may have ended by itself before the event reached us.
        lost=found.seen.lost or closed.lost,
        stopped=found.seen.stopped or closed.budget or "",
        broken_capture=broken,
        overflow=closed.overflow,
        turns=len(turns),
        tools_offered=any(t["tools"] not in (None, "[]") for t in turns),
        tools_called=any(t["tool_calls"] for t in turns),
    )


def _row(job: Job, settings: Settings, health: Health, clock: _Clock, found: _Found) -> dict[str, Any]:
    closed, turns, seen = found.closed, found.turns or [], found.seen
    weights = closed.weights if closed else []
    wanted = settings.policy_digest
    if wanted and (others := sorted({w["digest"] for w in weights} - {wanted})):
        seen = replace(seen, wrong_weights=f"served by weights {', '.join(others)}, wanted {wanted}")
    setup = found.setup_error
    verdict = Verdict(found.setup_outcome, blame_of(found.setup_outcome), setup) if setup else decide(seen)
    tokens = sum(len(t["completion_ids"]) for t in turns)
    patch = seen.patch or b""
    row = dict.fromkeys(schema.TRAJECTORY.names)
    row.update(
        attempt_id=job.attempt_id,
        group_id=job.group_id,
        run=settings.run,
        step=settings.step,
        task_id=job.task.id,
        task_path=str(job.task.path),
        task_digest=job.task.digest,
        split=job.task.split,
        attempt=job.n,
        harness=settings.harness.label,
        harness_version=settings.harness.version,
        harness_digest=settings.harness.digest,
        model=health.name,
        weights=weights,
        tokenizer_digest=health.tokenizer_digest,
        template_digest=health.template_digest,
        seed=settings.seed_of(job.attempt_id),
        outcome=verdict.outcome,
        blame=verdict.blame,
        detail=printable(verdict.detail),
        exit_code=seen.exit_code,
        budgets={
            "turns": {"limit": settings.max_turns, "used": len(turns)},
            "tokens": {"limit": settings.max_tokens, "used": tokens},
            "seconds": {"limit": settings.time_limit, "used": found.own_s},
        },
        history=list(job.history),
        started_at=clock.started_at,
        wall_s=clock.wall_s,
        engine_s=closed.engine_s if closed else None,
        queue_s=closed.queue_s if closed else None,
        patch=patch,
        patch_files=patched_files(patch),
        log_tail=printable(found.log[-LOG_TAIL:].decode(errors="replace")),
        turns=turns,
        **{phase: spent for phase, spent in clock.seconds.items() if phase != "rest"},
    )
    row["try"] = len(job.history)
    return row


def patched_files(patch: bytes) -> list[str]:
    """Paths in a git diff made without rename detection, where both sides of `diff --git` carry the same name."""
    names = []
    for line in patch.split(b"\n"):
        if line.startswith(b"diff --git "):
            both = line.removeprefix(b"diff --git ")
            name = both[len(both) // 2 + 1 :]
            if name.startswith(b'"'):  # git escapes odd characters as in C
                name = name[1:-1].decode("unicode_escape").encode("latin-1")
            names.append(name.removeprefix(b"b/").decode(errors="backslashreplace"))
    return names


def as_try(row: dict[str, Any]) -> dict[str, Any]:
    """The short record (schema.TRY) of a finished row, for the history of the next try."""
    return {
        "try": row["try"],
        "outcome": row["outcome"],
        "blame": row["blame"],
        "detail": row["detail"],
        "turns": len(row["turns"] or []),
        "tokens": sum(len(t["completion_ids"]) for t in row["turns"] or []),
        "wall_s": row["wall_s"],
    }
