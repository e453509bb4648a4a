"""An engine without a model: samples again what a shard says was sampled, so that a harness plays the same attempt.

    engine = ReplayEngine(folder, version, read_record(shard, tokenizer_digest), context)

Tokens, log-probabilities, support, policy versions and finish reasons are those of the record as they are; nothing is
rendered or tokenised anew, and the weights named in the record stay those that sampled them.

A session replays the recorded attempt of its own id. If there is none of that id, it replays the one that differs by
run and step only, or the only one that the shard holds. Each new turn repeats the first recorded turn, not yet
repeated, with the same prompt. What a harness reports may differ from one run to the next (times, random names), and so
may its prompts: then it is, among the turns at the same place of the tree, the one whose prompt begins most like the
new one. Its tokens are fed and recorded as they are now, the tree has the same shape, and the answer is counted as one
to another prompt (`words`): its log-probabilities are those of the recorded prompt. Where there is no such turn the
harness has gone its own way, and the engine fails the session; unless all turns are replayed and the attempt ended with
a prompt too long for its context, which is not recorded: then what comes next is that prompt.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from legorl import tree
from legorl.commands.serve.engine import Ask, ContextOverflow, Delta, EngineError, EngineInfo, Sampling, Unsupported
from legorl.rows import standing
from legorl.shards import open_shards

COLUMNS = ["attempt_id", "run", "step", "outcome", "tokenizer_digest", "weights", "turns"]


@dataclass
class Recorded:
    """One recorded attempt. `tail`: its id without run and step; `overflowed`: its last prompt did not fit."""

    id: str
    tail: str
    overflowed: bool
    weights: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    nodes: list[tree.Node]
    prompts: list[np.ndarray]

    def extends(self, index: int) -> bool:
        """Does turn `index` go on from all of its parent?"""
        node = self.nodes[index]
        return node.parent != tree.ROOT and node.prefix_len == self.nodes[node.parent].path_len


@dataclass
class _Play:
    """One session's way through an attempt. `at`: its turns as numbers of recorded ones; `ends`: lengths of paths."""

    attempt: Recorded
    left: list[int]
    at: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)


def read_record(path: Path, tokenizer_digest: str) -> list[Recorded]:
    """Read the attempts of a shard, or of those in a folder.

    Raises ShardError for what cannot be read, and EngineError for another tokenizer's tokens or two weights under one
    policy version.
    """
    shards = list(open_shards([path]))
    attempts: list[Recorded] = []
    digests: dict[int, str] = {}
    for shard, numbers in zip(shards, standing(shards), strict=True):
        for row in shard.table(COLUMNS).take(numbers).to_pylist():
            if row["tokenizer_digest"] != tokenizer_digest:
                raise EngineError(f"{path}: {row['attempt_id']} was sampled with another tokenizer than MODEL has")
            for weights in row["weights"] or []:
                if digests.setdefault(weights["version"], weights["digest"]) != weights["digest"]:
                    raise EngineError(
                        f"{path}: holds two weights of version {weights['version']}; give the shard of one run"
                    )
            turns = row["turns"] or []
            nodes = tree.nodes_of(turns)
            prompts = [tree.prompt_ids(nodes, k) for k in range(len(nodes))]
            tail = row["attempt_id"].removeprefix(f"{row['run']}.{row['step']}.")
            overflowed = row["outcome"] == "context_overflow"
            attempts.append(Recorded(row["attempt_id"], tail, overflowed, row["weights"] or [], turns, nodes, prompts))
    return attempts


class ReplayEngine:
    failure = None

    def __init__(self, folder: Path, version: int, record: list[Recorded], context: int | None):
        from transformers import AutoConfig, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.version = version
        config = AutoConfig.from_pretrained(folder)
        self._context = context or int(getattr(config, "max_position_embeddings", 8192))
        self._record = record
        self._plays: dict[str, _Play] = {}
        self._chosen: dict[str, dict[str, Any] | EngineError] = {}
        self._other: list[str] = []  # turns whose prompt is not the recorded one

    def info(self) -> EngineInfo:
        weights = {w["version"]: w for attempt in self._record for w in attempt.weights}
        return EngineInfo("replay", self._context, recorded=weights)

    def admit(self, ask: Ask) -> None:
        """Find the recorded turn that the new one repeats. What is wrong with it is raised when it is generated.

        Raises ContextOverflow where the record ends with one.
        """
        try:
            self._chosen[ask.request_id] = self._choose(ask)
        except EngineError as error:
            self._chosen[ask.request_id] = error

    def _choose(self, ask: Ask) -> dict[str, Any]:
        session, number = ask.request_id.split("/")
        if session not in self._plays:
            attempt = self._find(ask.attempt_id)
            self._plays[session] = _Play(attempt, list(range(len(attempt.turns))))
        play = self._plays[session]
        where = f"{play.attempt.id}, turn {number}"
        index, same = _repeated(play, ask)
        if index is None:
            if play.attempt.overflowed and not play.left:
                raise ContextOverflow
            done = f"{len(play.at)} of {len(play.attempt.turns)} recorded turns are replayed"
            raise EngineError(f"{where}: the harness goes another way than in the record ({done})")
        turn = play.attempt.turns[index]
        count, wanted = len(turn["completion_ids"]), ask.sampling
        if np.float32(turn["temperature"]) != np.float32(wanted.temperature):
            raise EngineError(
                f"{where}: was sampled at temperature {turn['temperature']:g}, and the session wants "
                f"{wanted.temperature:g}; give --temperature {turn['temperature']:g}"
            )
        if count > wanted.max_tokens:
            raise EngineError(
                f"{where}: {count} tokens were sampled, and the session and context leave room for {wanted.max_tokens};"
                " give the limits that it was recorded with"
            )
        play.left.remove(index)
        play.at[ask.node.index] = index
        play.ends[ask.node.index] = ask.node.prompt_len + count
        if not same:
            self._other.append(where)
        return turn

    def _find(self, attempt_id: str) -> Recorded:
        for fitting in (
            [a for a in self._record if a.id == attempt_id],
            [a for a in self._record if attempt_id.endswith("." + a.tail)],
            self._record,
        ):
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                break
        names = ", ".join(a.id for a in fitting[:3]) + (", ..." if len(fitting) > 3 else "")
        raise EngineError(f"which recorded attempt is {attempt_id} to replay? The record holds {names or 'none'}")

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, routing_from: int = 0
    ) -> AsyncIterator[Delta]:
        """Emit the recorded turn, token by token. Raises EngineError where there is none, or where it ended badly."""
        turn = self._chosen.pop(request_id)
        if isinstance(turn, EngineError):
            raise turn
        if len(prompt_ids) >= self._context:
            raise ContextOverflow
        versions = [span["version"] for span in turn["versions"] for _ in range(span["length"])]
        finish, cached = turn["finish_reason"], turn["cached_tokens"]
        ended = None if finish == "error" else finish
        rows = list(zip(turn["completion_ids"], turn["logprobs"], versions, strict=True))
        for k, (token, logprob, version) in enumerate(rows, 1):
            last = ended if k == len(rows) else None
            yield Delta([token], [logprob], version, last, cached, turn["support"])
        if ended is None:
            raise EngineError("this turn ended badly when it was recorded too")
        if not rows:
            yield Delta([], [], self.version, ended, cached, turn["support"])

    async def abort(self, request_id: str) -> None:
        """A recorded turn is short: it ends by itself."""

    async def load_weights(self, folder: Path, version: int) -> None:
        raise Unsupported("a replay has no weights to load: its record names those that sampled it")

    async def close(self) -> None:
        pass

    def words(self) -> str:
        """What came of it, for people."""
        done = sum(len(play.at) for play in self._plays.values())
        wanted = sum(len(play.attempt.turns) for play in self._plays.values())
        text = f"{done} of {wanted} recorded turns replayed, in {len(self._plays)} sessions"
        if self._other:
            text += f"; {len(self._other)} to other prompts than in the record (first: {self._other[0]})"
        return text


def _repeated(play: _Play, ask: Ask) -> tuple[int | None, bool]:
    """Return (recorded turn that `ask` repeats, whether its prompt is the recorded one), or None if there is none."""
    attempt, prompt = play.attempt, np.asarray(ask.prompt_ids)
    for index in play.left:
        if np.array_equal(attempt.prompts[index], prompt):
            return index, True
    parent = play.at.get(ask.node.parent, tree.ROOT)
    whole = ask.node.parent != tree.ROOT and ask.node.prefix_len == play.ends[ask.node.parent]
    fitting = [k for k in play.left if attempt.nodes[k].parent == parent and attempt.extends(k) == whole]
    return max(fitting, key=lambda k: _shared(attempt.prompts[k], prompt), default=None), False


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
