"""Make all attempts, C at once over all groups, and try again what infrastructure lost.

Ended before its time (Ctrl-C, SIGTERM, an error), the round keeps the rows of what ran then: `interrupted`, blame
infra, made again by a rerun.

Retries go to the end of the queue: whatever was wrong has time to pass. An attempt whose engine was lost is only worth
another try while lego-serve still answers; if it does not, the whole round stops there, and a rerun continues it.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from legorl.commands.rollout.attempt import Job, as_try
from legorl.commands.rollout.durable import Store

Row = dict[str, Any]


async def make_all(
    jobs: Iterable[Job],
    make: Callable[[Job], Awaitable[Row]],
    store: Store,
    *,
    concurrency: int,
    retries: int,
    check_engine: Callable[[], Awaitable[Any]],
    ended: Callable[[Row, bool, Path | None], None],
) -> None:
    """Make every job; `ended(row, again, shard)` is told of each try: whether another follows, the shard it completed.

    Raises what `make` or `check_engine` raises; running attempts are then cancelled and waited for, and the rows that
    they still return are kept. Cancelled itself, it does the same.
    """
    queue, tries = deque(jobs), Counter[str]()
    running: dict[asyncio.Future[Row], Job] = {}
    try:
        while queue or running:
            while queue and len(running) < concurrency:
                job = queue.popleft()
                running[asyncio.ensure_future(make(job))] = job
            finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(finished, key=lambda t: t.exception() is not None):  # keep what ended well first
                job, row = running.pop(task), task.result()
                tries[job.attempt_id] += 1
                again = row["blame"] == "infra" and tries[job.attempt_id] <= retries
                if row["outcome"] == "engine_lost":
                    store.keep(row, again=True)
                    await check_engine()
                ended(row, again, store.keep(row, again))
                if again:
                    queue.append(replace(job, history=(*row["history"], as_try(row))))
    finally:
        for task in running:
            task.cancel()
        for cut in await asyncio.gather(*running, return_exceptions=True):
            if not isinstance(cut, BaseException):
                store.keep(cut, again=True)
