"""One row an attempt, from any number of shards.

A later try of an attempt stands before an earlier one; of the same try, a graded row before an ungraded one, then the
newest grade. Rows of the same try must hold the same tokens: grading never touches them, so a difference means that two
rounds share a name, and no answer about them would be true. Nor can two verdicts of one instant both be true.

    for shard, numbers in zip(shards, standing(shards)): shard.table().take(numbers)
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from legorl.options import CHECK
from legorl.shards import Shard, ShardError

# What grading never touches, of each turn.
TOKEN_FIELDS = (
    "index", "parent", "prefix_len", "context_ids", "completion_ids", "logprobs", "temperature", "support", "versions",
)  # fmt: skip
# And what decides, beside them, which tokens are trained.
_UNTOUCHED = (*TOKEN_FIELDS, "routing", "foreign", "drops")


class ConflictError(ShardError):
    """Two rows of the same try of one attempt hold different tokens, or two verdicts of one instant differ."""

    code = CHECK


@dataclass(frozen=True)
class _Claim:
    """One row's claim to stand for its attempt: the row's place, its try (0 = the first), and when it was graded."""

    shard: int
    row: int
    tried: int
    graded_at: datetime | None
    verdict: tuple[str | None, float | None]  # blame and reward

    @property
    def rank(self) -> tuple[int, float]:
        return self.tried, self.graded_at.timestamp() if self.graded_at else float("-inf")


def standing(shards: Sequence[Shard]) -> list[list[int]]:
    """Return, for each of `shards`, the numbers of the rows that stand for their attempts, ascending.

    Of equal rows the first stands. Raises ShardError for a file that cannot be read, and ConflictError, naming both
    files. Token columns are read only where an attempt has more than one row.
    """
    claims: dict[str, list[_Claim]] = {}
    for number, shard in enumerate(shards):
        columns = shard.table(["attempt_id", "try", "graded_at", "blame", "reward"]).to_pydict().values()
        for row, (attempt, tried, graded_at, *verdict) in enumerate(zip(*columns, strict=True)):
            claims.setdefault(attempt, []).append(_Claim(number, row, tried or 0, graded_at, tuple(verdict)))
    rivalries = {attempt: rivals for attempt, rivals in claims.items() if len(rivals) > 1}
    _check_tokens(shards, rivalries)
    _check_verdicts(shards, rivalries)
    kept: list[list[int]] = [[] for _ in shards]
    for rivals in claims.values():
        best = max(rivals, key=lambda claim: claim.rank)
        kept[best.shard].append(best.row)
    return [sorted(numbers) for numbers in kept]


def _check_tokens(shards: Sequence[Shard], claims: dict[str, list[_Claim]]) -> None:
    """Raise ConflictError unless all rows of the same try of an attempt hold the same tokens."""
    wanted: dict[int, dict[int, tuple[str, int]]] = {}
    for attempt, rivals in claims.items():
        for claim in rivals:
            wanted.setdefault(claim.shard, {})[claim.row] = (attempt, claim.tried)
    first: dict[tuple[str, int], tuple[bytes, Path]] = {}
    for number, keys in wanted.items():
        path = shards[number].path
        turns = shards[number].table(["turns"]).column("turns")
        for row, key in keys.items():
            digest = _token_digest(turns[row].values)
            before, other = first.setdefault(key, (digest, path))
            if before != digest:
                raise ConflictError(
                    f"{key[0]}: other tokens in {path} than in {other}; two rounds share a name, so give only one"
                )


def _check_verdicts(shards: Sequence[Shard], claims: dict[str, list[_Claim]]) -> None:
    """Raise ConflictError if rows of one try that were graded at the same instant disagree."""
    for attempt, rivals in claims.items():
        first: dict[tuple[int, datetime], _Claim] = {}
        for claim in rivals:
            if claim.graded_at is None:
                continue
            other = first.setdefault((claim.tried, claim.graded_at), claim)
            if other.verdict != claim.verdict:
                told = [
                    f"reward {one.verdict[1]} (blame {one.verdict[0]}) in {shards[one.shard].path}"
                    for one in (other, claim)
                ]
                raise ConflictError(
                    f"{attempt}: {told[0]}, but {told[1]}, both graded at {claim.graded_at}; one was changed "
                    "afterwards, so give only the true one"
                )


def _token_digest(turns: Any) -> bytes:
    """Digest of the _UNTOUCHED fields of one row's turns (a pyarrow StructArray, or None)."""
    total = hashlib.sha256()
    for name in _UNTOUCHED if turns is not None else ():
        for part in _flat(turns.field(name)):
            total.update(repr((len(part), str(part.dtype))).encode())
            for piece in part if part.dtype == object else [part.tobytes()]:
                piece = piece if isinstance(piece, bytes) else repr(piece).encode()
                total.update(b"%d:" % len(piece) + piece)
    return total.digest()


def _flat(values: Any) -> Iterable[Any]:
    """The numpy arrays that a pyarrow array of numbers, strings, lists or structs consists of; null becomes NaN."""
    import pyarrow as pa

    if pa.types.is_list(values.type):
        yield from (*_flat(values.value_lengths()), *_flat(values.flatten()))
    elif pa.types.is_struct(values.type):
        for field in values.flatten():
            yield from _flat(field)
    else:
        yield values.to_numpy(zero_copy_only=False)
