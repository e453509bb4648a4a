"""lego-rollout: run a harness on tasks in sandboxes, against the model that lego-serve serves."""

import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from legorl.harness import load_harness
from legorl.options import (
    LOST,
    Failure,
    command,
    each_path,
    emit,
    explain,
    explain_option,
    max_lost_option,
    option,
    out_option,
    podman_option,
    run,
    say,
    seed_option,
    shard_option,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LONGEST = 200  # bytes of a group's id: file names end at 255


def _name(_context: click.Context, _param: click.Parameter, value: str) -> str:
    if not NAME.fullmatch(value):
        raise click.BadParameter("may hold only letters, digits, '.', '_' and '-'")
    return value


@command("lego-rollout")
@click.argument("paths", nargs=-1, metavar="[TASK]...")
@out_option
# What is run
@option("--harness", required=True, help="NAME, NAME:PRESET, a .toml file, or command:PROGRAM.")
@option("--run", default="run", callback=_name, help="Name of the run; begins every attempt's id.")
@option("--step", type=click.IntRange(0), default=0, help="Training step that this round is for.")
@option("--attempts", "-n", type=click.IntRange(1), default=4, help="Attempts a task.")
@option("--groups-per-shard", type=click.IntRange(1), default=1, help="Groups (tasks) in one shard.")
# The model
@option("--serve", type=click.Path(path_type=Path), help="Control socket of lego-serve (in its COMMAND it is set).")
@option(
    "--policy", type=click.Path(path_type=Path), help="Checkpoint whose weights must be served; loaded if they are not."
)
@option("--temperature", type=click.FloatRange(0), default=1.0, help="Sampling temperature.")
@option("--turn-tokens", type=click.IntRange(1), default=512, help="Most sampled tokens of one turn.")
# Limits of one attempt
@option("--max-turns", type=click.IntRange(1), default=16, help="Most turns.")
@option("--max-tokens", type=click.IntRange(1), default=8192, help="Most sampled tokens.")
@option(
    "--max-idle-turns",
    type=click.IntRange(1),
    help="Most turns in a row that are offered tools and call none. [default: no limit]",
)
@option(
    "--time-limit",
    type=click.FloatRange(1),
    default=120.0,
    help="Seconds of the harness's own time, engine time left out.",
)
# The round
@option("--concurrency", "-c", type=click.IntRange(1), default=4, help="Attempts at once.")
@option("--retries", type=click.IntRange(0), default=2, help="Further tries of an attempt lost to infrastructure.")
@max_lost_option
@podman_option
@shard_option
@seed_option
@explain_option
def main(paths: tuple[str, ...], out: Path, **wanted: Any) -> int:
    """Run a harness on each TASK, N attempts each, and write what happened as trajectory shards.

    \b
    Examples:
      lego-serve MODEL -- lego-rollout TASK --out out --harness mini-swe-agent
      lego-tasks list SET --split train | lego-rollout - --out out --harness pi -n 8 -c 4
      lego-rollout - --out out --harness pi -c 64 --podman ssh://me@big/run/user/1000/podman/podman.sock < tasks.list

    TASK is a task folder; - or none reads paths from stdin. Each attempt runs in a sandbox of its own, where nothing
    but the model can be reached. The path of each shard goes to stdout as soon as its groups are whole. Run again, it
    continues: finished groups stay, attempts lost to infrastructure are made again.
    """
    explained = wanted.pop("explain")
    harness = load_harness(wanted["harness"])
    config = {
        **{k: wanted[k] for k in SETTINGS},
        "harness": harness.label,
        "harness_version": harness.version,
        "harness_digest": harness.digest,
        "shard": wanted["shard"].setting,
    }
    if explained:
        explain({**wanted, **config, "out": out, "install": str(harness.folder)})
        return 0
    harness.make_ready()
    tasks = _tasks(paths)
    return run(_rollout(tasks, harness, out, config, wanted))


# Settings that make an --out what it is; the others only say how the work is done.
SETTINGS = (
    "run", "step", "attempts", "groups_per_shard", "temperature", "turn_tokens", "max_turns", "max_tokens",
    "max_idle_turns", "time_limit", "seed",
)  # fmt: skip


def _tasks(paths: tuple[str, ...]) -> list[Any]:
    """Load every task. Raises TaskError, or Failure for two tasks with one id."""
    from legorl.task import load_task

    tasks: dict[str, Any] = {}
    for path in each_path(paths):
        task = load_task(path)
        if task.id in tasks:
            raise Failure(f"{path}: the task id {task.id!r} stands for {tasks[task.id].path} already; leave one out")
        tasks[task.id] = task
    if not tasks:
        raise Failure("no task given: the list of paths is empty")
    return list(tasks.values())


async def _rollout(tasks: list[Any], harness: Any, out: Path, config: dict[str, Any], wanted: dict[str, Any]) -> int:
    from legorl.checkpoint import open_checkpoint
    from legorl.commands.rollout.attempt import Settings, run_attempt
    from legorl.commands.rollout.durable import Store
    from legorl.commands.rollout.schedule import make_all
    from legorl.control import Control
    from legorl.sandbox import prepare
    from legorl.sandbox.hosts import open_hosts
    from legorl.shards import OutDir, Plan

    policy = open_checkpoint(wanted["policy"]) if wanted["policy"] else None
    digest = policy.digest if policy else None
    settings = Settings(
        **{k: config[k] for k in SETTINGS if k not in ("attempts", "groups_per_shard")},
        harness=harness,
        policy_digest=digest,
    )
    plan = Plan(wanted["run"], wanted["step"], tuple(settings.group_id(t) for t in tasks), wanted["attempts"])
    if long := [g for g in plan.groups if len(g.encode()) > LONGEST]:
        raise Failure(f"the group id {long[0]} is longer than {LONGEST} bytes; shorten --run")
    config = {**config, "policy": digest, "tasks": {t.id: t.digest for t in tasks}}
    if wanted["serve"] is None:
        raise Failure("no lego-serve to talk to: run this under `lego-serve MODEL -- ...`, or give --serve SOCKET")
    own = wanted["shard"].of(tasks)
    if not own:
        say(f"lego-rollout: no task in part {wanted['shard']}")
        return 0
    groups = [settings.group_id(t) for t in own]
    total = len(groups) * plan.attempts
    async with Control(wanted["serve"]) as control, open_hosts(wanted["podman"]) as hosts:
        health = await control.health()
        await hosts.ensure_ready({t.limits for t in own})
        await prepare([t.image for t in own], say)
        with OutDir(out, config):
            if policy and (health.digest, health.version) != (policy.digest, policy.version):
                health = await _load(policy, control)
            if health.routing not in (None, "recorded"):
                say(f"lego-rollout: the experts of this sparse model are not recorded: {health.routing}")
            meta = {"config": config, "engine": health.engine, "model": health.name}
            store = Store(out, plan, wanted["groups_per_shard"], meta, groups)
            jobs = store.left(own)
            for path in store.whole():
                emit(str(path))
            with _Progress(total, total - len(jobs)) as progress:
                try:
                    await make_all(
                        jobs,
                        lambda job: run_attempt(job, settings, control, health, hosts.open),
                        store,
                        concurrency=wanted["concurrency"],
                        retries=wanted["retries"],
                        check_engine=control.health,
                        ended=progress.ended,
                    )
                finally:
                    progress.tell_all(*store.lengths())
    share = store.lost / total
    if store.lost:
        count = f"{store.lost} of {total} attempts"
        say(f"lego-rollout: {count} were lost to infrastructure; rerun to try them again")
    return LOST if share > wanted["max_lost"] else 0


async def _load(policy: Any, control: Any) -> Any:
    """Have the checkpoint `policy` served; return the server's Health then. Raises Failure if it is not."""
    say(f"lego-rollout: loading {policy.path} (version {policy.version})")
    await control.load_weights(policy.path, policy.version)
    health = await control.health()
    if health.digest != policy.digest:
        raise Failure(f"lego-serve holds weights {health.digest} after loading {policy.path} ({policy.digest})")
    return health


def _mean(lengths: Sequence[Any]) -> str:
    """`6.5 turns, 1200 tokens, 31.0 s`: the means of some durable.Length."""
    turns, tokens, seconds = (fmean(getattr(one, n) for one in lengths) for n in ("turns", "tokens", "seconds"))
    return f"{turns:.1f} turns, {tokens:.0f} tokens, {seconds:.1f} s"


class _Progress:
    """Tells of each attempt: a bar on a terminal, else a line for each attempt that was lost and each whole group."""

    def __init__(self, total: int, before: int):
        self._total, self._made, self._begun = total, before, time.monotonic()
        self._outcomes: dict[str, Counter[str]] = {}
        self._routed, self._inputs = 0, 0  # input positions with recorded experts, and all, of sparse models
        self._bar: Any = None

    def __enter__(self) -> "_Progress":
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, initial=self._made, unit="attempt", file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def ended(self, row: dict[str, Any], again: bool, shard: Path | None) -> None:
        group, outcome = row["group_id"], row["outcome"]
        if row["blame"] == "infra":
            self._say(f"{row['attempt_id']}: {outcome} ({row['detail']}){', trying again' if again else ''}")
        if not again:
            self._made += 1
            self._outcomes.setdefault(group, Counter())[outcome] += 1
            self._count_routing(row["turns"] or [])
            if self._bar is not None:
                self._bar.update()
        if shard is not None:
            emit(str(shard))
            if self._bar is None:
                counts = ", ".join(f"{n} {name}" for name, n in self._outcomes[group].most_common())
                spent = time.monotonic() - self._begun
                self._say(f"{group}: {counts} ({self._made} of {self._total} attempts, {spent:.0f} s)")

    def tell_all(self, kept: Sequence[Any] = (), lost: Sequence[Any] = ()) -> None:
        """Sum up what this call made, and how long (durable.Length) the round's kept attempts and lost tries were.

        Losses that depend on length bias what is trained on.
        """
        total = sum(self._outcomes.values(), Counter())
        if total:
            counts = ", ".join(f"{n} {name}" for name, n in total.most_common())
            now = "" if total.total() == self._made else f"; {total.total()} now"
            self._say(f"{self._made} of {self._total} attempts{now}: {counts}")
        if self._inputs:
            share = self._routed / self._inputs
            self._say(f"experts recorded for {self._routed} of {self._inputs} input positions ({share:.2%})")
        if lost:
            one = "1 try of the round was" if len(lost) == 1 else f"{len(lost)} tries of the round were"
            against = f", against {_mean(kept)} of the {len(kept)} attempts kept" if kept else ""
            self._say(f"{one} lost to infrastructure: {_mean(lost)} on average{against}")

    def _count_routing(self, turns: list[dict[str, Any]]) -> None:
        from legorl import routing

        if any(turn["routing"] for turn in turns):
            self._routed += sum(routing.valid_rows(turn["routing"]) for turn in turns)
            self._inputs += sum(routing.wanted_rows(turn) for turn in turns)

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        say(f"lego-rollout: {line}")
