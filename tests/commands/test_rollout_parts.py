"""The parts of lego-rollout that need no sandbox: verdicts, durable rows, scheduling."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import builders
import pytest
from builders import small_task
from hypothesis import given
from hypothesis import strategies as st

from legorl.commands.rollout.attempt import Job, own_seconds, patched_files
from legorl.commands.rollout.durable import Store
from legorl.commands.rollout.home import HOME, pack_home
from legorl.commands.rollout.schedule import make_all
from legorl.commands.rollout.verdict import STOPS, Seen, decide
from legorl.control import Session
from legorl.harness import HarnessError
from legorl.outcomes import BLAME, OF_THE_HOST
from legorl.sandbox import Evidence
from legorl.shards import Plan, open_shard
from legorl.task import load_task

# -- verdicts ----------------------------------------------------------------------------------------------------------

GOOD = {"exit_code": 0, "patch": b"diff", "turns": 2}
GONE = {"sandbox_lost": "gone", "patch": None, "exit_code": None}


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        ({}, "finished"),
        ({"patch": b""}, "no_changes"),
        ({"patch": b"", "tools_offered": True}, "text_only"),
        ({"patch": b"", "tools_offered": True, "tools_called": True}, "no_changes"),
        ({"stopped": "turns", "exit_code": None}, "step_limit"),
        ({"stopped": "tokens", "exit_code": None}, "token_limit"),
        ({"stopped": "time", "exit_code": None}, "time_limit"),
        ({"stopped": "seconds", "exit_code": 1}, "time_limit"),
        ({"stopped": "idle_turns", "exit_code": 1}, "no_tool_loop"),
        ({"overflow": True, "exit_code": 1}, "context_overflow"),
        ({"exit_code": 1}, "harness_crash"),
        ({"exit_code": 137, "box": Evidence(oom_kills=1)}, "out_of_memory"),
        ({"patch": b"", "box": Evidence(oom_kills=1)}, "out_of_memory"),
        ({"box": Evidence(oom_kills=1)}, "finished"),  # a command of its was killed; it went on and changed something
        ({"patch": b"", "box": Evidence(process_refusals=3)}, "too_many_processes"),
        ({"box": Evidence(process_refusals=3)}, "finished"),
        ({"exit_code": 1, "box": Evidence(full_disks=("/tmp",))}, "disk_full"),
        ({"patch": b"", "box": Evidence(full_disks=("/ws", "/tmp"))}, "disk_full"),
        ({"box": Evidence(full_disks=("/ws",))}, "finished"),
        ({"patch": None, "patch_error": "8 MiB"}, "patch_unusable"),
        ({**GONE}, "sandbox_lost"),
        ({**GONE, "box": Evidence(oom_kills=1, exit_code=137)}, "out_of_memory"),
        ({**GONE, "box": Evidence(oom_kills=1, exit_code=0), "stopped": "turns"}, "out_of_memory"),
        ({**GONE, "box": Evidence(oom_kills=1, exit_code=-9)}, "sandbox_lost"),  # Podman itself was killed
        ({**GONE, "box": Evidence(process_refusals=1, exit_code=0)}, "too_many_processes"),
        ({**GONE, "box": Evidence(process_refusals=1, exit_code=137)}, "sandbox_lost"),
        ({"interrupted": True, "lost": "engine died"}, "interrupted"),
        ({"lost": "engine died", "exit_code": 1}, "engine_lost"),
        ({"broken_capture": "turn 1"}, "capture_incomplete"),
        ({"wrong_weights": "x"}, "weights_lost"),
    ],
)
def test_outcome(seen: dict[str, Any], outcome: str) -> None:
    verdict = decide(Seen(**{**GOOD, **seen}))
    assert (verdict.outcome, verdict.blame) == (outcome, BLAME[outcome])


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        ({"exit_code": 137, "box": Evidence(host_oom_kills=1)}, "out_of_memory"),
        ({**GONE, "box": Evidence(host_oom_kills=1, exit_code=137)}, "out_of_memory"),
        ({"exit_code": 1, "box": Evidence(host_refusals=1)}, "too_many_processes"),
        ({**GONE, "box": Evidence(host_refusals=1, exit_code=0)}, "too_many_processes"),
    ],
)
def test_what_the_host_had_none_left_of_is_not_the_model_s(seen: dict[str, Any], outcome: str) -> None:
    verdict = decide(Seen(**{**GOOD, **seen}))
    assert verdict[:2] == (outcome, "infra") and outcome in OF_THE_HOST
    # It went on all the same, or did what ended it itself.
    assert decide(Seen(**{**GOOD, "box": seen["box"]})).blame == "model"
    assert decide(Seen(**{**GOOD, **seen, "sandbox_lost": None, "stopped": "turns"})).outcome == "step_limit"


@given(
    st.builds(
        Seen,
        exit_code=st.sampled_from([None, 0, 1, 137]),
        stopped=st.sampled_from(["", *STOPS]),
        patch=st.sampled_from([None, b"", b"diff"]),
        patch_error=st.sampled_from([None, "too large"]),
        overflow=st.booleans(),
        tools_offered=st.booleans(),
        tools_called=st.booleans(),
        box=st.builds(
            Evidence,
            oom_kills=st.integers(0, 2),
            process_refusals=st.integers(0, 2),
            full_disks=st.sampled_from([(), ("/ws",)]),
            exit_code=st.sampled_from([0, 137]),
        ),
        sandbox_lost=st.none(),
    )
    # A sandbox that its own content brought down: full to the brim, it is killed, or does not do what it is asked.
    | st.builds(
        Seen,
        stopped=st.sampled_from(["", *STOPS]),
        sandbox_lost=st.just("gone"),
        box=st.builds(Evidence, oom_kills=st.integers(1, 2), exit_code=st.sampled_from([0, 137]))
        | st.builds(Evidence, process_refusals=st.integers(1, 2), exit_code=st.just(0)),
    )
)
def test_nothing_that_a_container_can_bring_about_is_blamed_on_infrastructure(seen: Seen) -> None:
    assert decide(seen).blame == "model"


def test_the_clock_stands_while_a_turn_waits_or_runs() -> None:
    session = Session(None, "id", "key")  # type: ignore[arg-type]

    async def events() -> Any:
        for event in (
            {"event": "begin"},
            {"event": "begin"},
            {"event": "turn", "turns": 1, "tokens": 1, "engine_s": 0, "queue_s": 0},
        ):
            yield json.dumps(event)

    asyncio.run(session._follow(events()))
    assert session.state.running == 1 and session.state.busy_since is not None
    session.state.busy_since, session.state.busy_s = time.monotonic() - 5, 3.0
    assert own_seconds(session, 10.0) == pytest.approx(2.0, abs=0.5)
    assert own_seconds(session, 1.0) == 0.0


def test_harness_files_stay_in_the_home_folder() -> None:
    assert pack_home({HOME + "/.pi/agent/models.json": "{}"})
    for path in ("/etc/passwd", HOME + "/../../etc/x", HOME + "x/y"):
        with pytest.raises(HarnessError, match="only below"):
            pack_home({path: ""})


def test_patched_files() -> None:
    patch = b"diff --git a/x b/x\n+diff --git a/fake b/fake\n"
    patch += b'diff --git "a/\\303\\266" "b/\\303\\266"\ndiff --git a/p b/q b/p b/q\n'
    assert patched_files(patch) == ["x", "ö", "p b/q"]


# -- durable rows and scheduling ---------------------------------------------------------------------------------------

PLAN = Plan("r1", 0, ("r1.0.mini-swe-agent.a", "r1.0.mini-swe-agent.b"), 2)


def test_store_continues_where_a_killed_rollout_stopped(tmp_path: Path) -> None:
    tasks = [load_task(small_task(tmp_path / "t", x)) for x in "ab"]
    out = tmp_path / "out"
    out.mkdir()
    store = Store(out, PLAN, 1, {})
    assert [j.attempt_id for j in store.left(tasks)] == PLAN.attempt_ids
    assert store.keep(builders.trajectory("a", 0)) is None
    assert store.keep(builders.trajectory("b", 1, outcome="engine_lost"), again=True) is None
    # Killed here, and begun anew:
    store = Store(out, PLAN, 1, {})
    left = store.left(tasks)
    assert [(j.attempt_id[-3:], [t["outcome"] for t in j.history]) for j in left] == [
        ("a.1", []),
        ("b.0", []),
        ("b.1", ["engine_lost"]),
    ]
    assert list(store.whole()) == []
    path = store.keep(builders.trajectory("a", 1))
    assert path == out / f"{PLAN.groups[0]}.parquet"
    shard = open_shard(path)
    assert [r["attempt"] for r in shard.rows()] == [0, 1] and shard.plan == PLAN
    assert [p.name for p in (out / ".partial").iterdir()] == ["r1.0.mini-swe-agent.b.1.parquet"]
    # An attempt lost for good makes its group whole, and a rerun takes it up again, in the shard's place.
    store.keep(builders.trajectory("b", 0))
    assert store.keep(builders.trajectory("b", 1, outcome="engine_lost")) and store.lost == 1
    store = Store(out, PLAN, 1, {})
    assert [j.attempt_id[-3:] for j in store.left(tasks)] == ["b.1"]
    assert list(store.whole()) == [path]
    store.keep(builders.trajectory("b", 1, patch=b"now"))
    assert len(list(store.whole())) == 2 and store.lost == 0 and not list((out / ".partial").iterdir())
    assert [r["patch"] for r in open_shard(out / f"{PLAN.groups[1]}.parquet").rows()] == [b"", b"now"]
    assert Store(out, PLAN, 1, {}).left(tasks) == []


def test_several_groups_in_one_shard_named_by_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path, PLAN, 2, {})
    made = [store.keep(builders.trajectory(t, n)) for t in "ba" for n in (1, 0)]
    assert made == [None, None, None, tmp_path / f"{PLAN.groups[0]}.parquet"]
    assert [r["attempt_id"] for r in open_shard(made[-1]).rows()] == PLAN.attempt_ids


class Scripted:
    """Outcomes by attempt, in order; the last one repeats. Counts how many run at once."""

    def __init__(self, **outcomes: list[str]):
        self.outcomes, self.running, self.most = outcomes, 0, 0
        self.cancelled: list[str] = []

    async def make(self, job: Job) -> dict[str, Any]:
        name = job.attempt_id.removeprefix("r1.0.mini-swe-agent.").replace(".", "")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            planned = self.outcomes.get(name, ["finished"])
            outcome = planned[min(len(job.history), len(planned) - 1)]
            if outcome == "hang":
                await asyncio.Event().wait()
            if outcome == "raise":
                raise RuntimeError(name)
            row = builders.trajectory(job.task.id, job.n, outcome=outcome, history=list(job.history))
            return {**row, "try": len(job.history)}
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            self.running -= 1


def scheduled(tmp_path: Path, scripted: Scripted, check: Any = None) -> tuple[Store, list[tuple[str, str, bool]]]:
    tasks = [load_task(small_task(tmp_path / "t", x)) for x in "ab"]
    out = tmp_path / "out"
    out.mkdir()
    store, ended = Store(out, PLAN, 1, {}), []

    async def fine() -> None:
        pass

    def note(row: dict[str, Any], again: bool, _path: Path | None) -> None:
        ended.append((row["attempt_id"][-3:], row["outcome"], again))

    work = make_all(
        store.left(tasks), scripted.make, store, concurrency=2, retries=2, check_engine=check or fine, ended=note
    )
    try:
        asyncio.run(work)
    finally:
        scripted.left = [p.name for p in (out / ".partial").iterdir()]  # type: ignore[attr-defined]
    return store, ended


def test_lost_attempts_are_tried_again_at_the_end_up_to_the_limit(tmp_path: Path) -> None:
    scripted = Scripted(a0=["engine_lost", "finished"], b1=["sandbox_lost"], b0=["harness_crash"])
    store, ended = scheduled(tmp_path, scripted)
    assert scripted.most == 2
    assert [e for e in ended if e[0] == "a.0"] == [("a.0", "engine_lost", True), ("a.0", "finished", False)]
    assert [e[2] for e in ended if e[0] == "b.1"] == [True, True, False]
    assert [e for e in ended if e[0] == "b.0"] == [("b.0", "harness_crash", False)]  # the model's own doing stands
    assert store.lost == 1
    rows = {r["attempt_id"][-3:]: r for path in store.whole() for r in open_shard(path).rows()}
    assert [(t["try"], t["outcome"]) for t in rows["b.1"]["history"]] == [(0, "sandbox_lost"), (1, "sandbox_lost")]
    assert rows["a.0"]["try"] == 1 and len(rows) == 4


def test_an_error_stops_the_round_and_keeps_what_ended(tmp_path: Path) -> None:
    scripted = Scripted(a1=["hang"], b0=["raise"])
    with pytest.raises(RuntimeError, match="b0"):
        scheduled(tmp_path, scripted)
    assert scripted.cancelled == ["a1"] and scripted.running == 0
    assert scripted.left == ["r1.0.mini-swe-agent.a.0.parquet"]  # type: ignore[attr-defined]


def test_a_lost_engine_that_does_not_answer_ends_the_round(tmp_path: Path) -> None:
    async def gone() -> None:
        raise ConnectionError("nobody there")

    scripted = Scripted(a0=["engine_lost"], a1=["hang"])
    with pytest.raises(ConnectionError):
        scheduled(tmp_path, scripted, gone)
    assert scripted.left == ["r1.0.mini-swe-agent.a.0.parquet"]  # type: ignore[attr-defined]
