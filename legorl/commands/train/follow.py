"""Step after step on the rounds that arrive, with the policy in memory: the checkpoints of so many single commands.

    rounds = Rounds()
    for shard in open_shards(paths):
        if whole := rounds.add(shard): ...            # every attempt of its plan is there
    rounds.open                                       # those that were cut

    for out, record in follow(paths, policy, folder, step): ...     # folder/step-0001/checkpoint, ...

A round is a plan (legorl.shards), and is taken when its last attempt has come: in the order of the paths, whatever step
its plan names, so that one that is never whole holds up none. A checkpoint's folder is named by its version.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl.checkpoint import RECORD
from legorl.commands.train.policy import Policy
from legorl.commands.train.ranks import Channel, rank
from legorl.commands.train.rows import BatchError, read_rows
from legorl.shards import OutDir, Plan, Shard, ShardError, Tally, open_shards

Step = Callable[[list[dict[str, Any]], Path], dict[str, Any]]


class IncompleteError(BatchError):
    """The input ended with attempts of a plan missing."""


@dataclass
class Round:
    """The shards of one plan that have arrived, in that order."""

    plan: Plan
    shards: list[Shard] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    @property
    def name(self) -> str:
        return f"round {self.plan.step} of {self.plan.run}"

    @property
    def paths(self) -> list[str]:
        return [str(shard.path) for shard in self.shards]


class Rounds:
    """Puts shards together to rounds. `tell` gets words about shards that belong to none any more."""

    def __init__(self, tell: Callable[[str], object] = lambda words: None):
        self._tell = tell
        self._open: dict[str, Round] = {}
        self._done: dict[str, bool] = {}  # by digest of whole rounds: was it said that more of it comes?

    @property
    def open(self) -> list[Round]:
        """Rounds with attempts missing, in the order of their first shards."""
        return list(self._open.values())

    def add(self, shard: Shard) -> Round | None:
        """Return the round that `shard` makes whole, if it does. Raises ShardError if it has no plan."""
        if shard.plan is None:
            raise ShardError(
                f"{shard.path}: its metadata holds no plan, so nothing tells when its round is whole; train it by a "
                "command of its own, without --follow"
            )
        digest = shard.plan.digest
        if digest in self._done:
            if not self._done[digest]:
                name = Round(shard.plan).name
                self._tell(f"{shard.path}: {name} has had its step; what else comes of it is left out")
            self._done[digest] = True
            return None
        found = self._open.setdefault(digest, Round(shard.plan))
        found.shards.append(shard)
        found.tally.add(shard, shard.table(["attempt_id"]).column("attempt_id").to_pylist())
        if found.tally.missing:
            return None
        self._done[digest] = False
        return self._open.pop(digest)


def follow(
    paths: Iterable[str], policy: Policy, folder: Path, step: Step, partial: bool = False
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Take a step for each round of the shards at `paths`; yield the place and the record of each checkpoint.

    `step` gets the rows and the place, and leaves `policy` at the checkpoint there. `partial`: at the end, rounds with
    attempts missing are steps as well. Of several processes the first reads `paths` and yields.

    Raises what `step` raises; ShardError for a shard that cannot be read or has no plan; IncompleteError at the end, if
    a round is not whole or there was none.
    """
    channel = Channel()
    if rank() != 0:
        while (told := channel.tell()) is not None:
            names, at = told
            if Path(at) != policy.checkpoint.path:
                policy.moved_to(Path(at))
            _take(names, policy, folder, step)
        return
    with OutDir(folder, {}):
        rounds = Rounds(policy.tell)
        count = 0
        for found in _arriving(paths, rounds, partial, policy.tell):
            channel.tell((found.paths, str(policy.checkpoint.path)))
            yield _take(found.paths, policy, folder, step)
            count += 1
        channel.tell()
        if rounds.open and not partial:
            cut = "; ".join(f"{found.name}: {found.tally.complaint()}" for found in rounds.open)
            raise IncompleteError(f"{cut}; no step was taken on that (--partial takes it all the same)")
        if not count:
            raise IncompleteError("no shard came in; give the paths of graded shards")


def _arriving(
    paths: Iterable[str], rounds: Rounds, partial: bool, tell: Callable[[str], object]
) -> Iterator[Round]:  # fmt: skip
    for shard in open_shards(paths):
        if whole := rounds.add(shard):
            yield whole
    for found in rounds.open if partial else ():
        tell(f"going on with part of the round: {found.name}: {found.tally.complaint()}")
        yield found


def _take(names: list[str], policy: Policy, folder: Path, step: Step) -> tuple[Path, dict[str, Any]]:
    out = place(folder, policy.checkpoint.version + 1)
    rows = read_rows(open_shards(names), Tally())
    try:
        return out, step(rows, out)
    except BaseException as error:
        if isinstance(error, ShardError) and (out / RECORD).is_file():
            raise ShardError(f"{error}; to add steps to those there, give --model {newest_in(folder)}") from error
        with contextlib.suppress(OSError):  # what its writer made and left empty
            out.parent.rmdir()
        raise


def place(folder: Path, version: int) -> Path:
    """Where the checkpoint of that version goes: as in a recipe's run folder."""
    return folder / f"step-{version:04d}" / "checkpoint"


def newest_in(folder: Path) -> Path:
    """The checkpoint of the highest version that `follow` has left in `folder`, where there is one."""
    records = folder.glob(f"step-*/checkpoint/{RECORD}")
    return max(records, key=lambda path: int(json.loads(path.read_text())["version"])).parent
