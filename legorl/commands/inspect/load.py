"""From paths to rows: find legorl's files under any mix of files and folders, and keep one row an attempt.

A later try of an attempt wins over an earlier one; of the same try, a graded row over an ungraded one, then the newest
grade. Rows of the same try must hold the same tokens: grading never touches them, so a difference means that two
rounds share a name, and no answer about them would be true.

    files = find(paths)
    connection = metrics.connect(trajectories=best_rows(files.trajectories), updates=rows(files.updates))
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl import options, schema, shards
from legorl.shards import Shard, ShardError


class ConflictError(ShardError):
    """Two rows of the same try of one attempt hold different tokens."""

    code = options.CHECK


@dataclass
class Files:
    """What was found: shards by format, and Parquet files in given folders that are not legorl's."""

    trajectories: list[Shard] = field(default_factory=list)
    updates: list[Shard] = field(default_factory=list)
    metrics: list[Shard] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)

    @property
    def plans(self) -> list[shards.Plan]:
        """The plans of the rounds that the trajectory shards belong to, each once."""
        return list({shard.plan.digest: shard.plan for shard in self.trajectories if shard.plan}.values())


def find(paths: Iterable[str | Path]) -> Files:
    """Open the files at `paths` by what their footers say; a folder stands for all files at any depth below it.

    Hidden folders hold unfinished work and are passed by. The same file counts once. Raises ShardError for a path that
    does not exist, a folder without any file, a file that cannot be read, or a given file that is not legorl's.
    """
    files = Files()
    lists = {
        schema.TRAJECTORY_FORMAT: files.trajectories,
        schema.UPDATE_FORMAT: files.updates,
        schema.METRIC_FORMAT: files.metrics,
    }
    seen: set[Path] = set()
    for path in map(Path, paths):
        inside = path.is_dir()
        for file in _below(path) if inside else [path]:
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            try:
                shard = shards.open_shard(file, *lists)
            except shards.ForeignError:
                if not inside:
                    raise
                files.foreign.append(file)
                continue
            lists[shard.meta["format"]].append(shard)
    return files


def _below(folder: Path) -> list[Path]:
    found = []
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(at, name) for name in names if name.endswith(".parquet") and not name.startswith(".")]
    if not found:
        raise ShardError(f"{folder}: no .parquet file in this folder or below it")
    return sorted(found)


def rows(found: list[Shard]) -> Any:
    """Return a pyarrow Dataset over all rows of the files, which share one format; None for no files."""
    from pyarrow import dataset

    if not found:
        return None
    return dataset.dataset(
        [str(shard.path) for shard in found], format="parquet", schema=schema.SCHEMAS[found[0].meta["format"]]
    )


@dataclass
class _Claim:
    """One row's claim to stand for its attempt."""

    shard: int
    row: int
    tried: int
    graded: tuple[bool, Any]


def best_rows(found: list[Shard]) -> Any:
    """Return a pyarrow Dataset with one row an attempt; None for no files.

    Files whose rows all stand are read when asked, files whose rows are all superseded never, and only files with some
    of each are held in memory. Raises ConflictError, naming both files.
    """
    import pyarrow as pa
    from pyarrow import dataset

    if not found:
        return None
    claims: dict[str, list[_Claim]] = {}
    counts = []
    for number, shard in enumerate(found):
        table = shard.table(["attempt_id", "try", "graded_at"])
        counts.append(len(table))
        for row, (attempt, tried, graded_at) in enumerate(zip(*(c.to_pylist() for c in table.columns), strict=True)):
            graded = (graded_at is not None, graded_at)
            claims.setdefault(attempt, []).append(_Claim(number, row, tried or 0, graded))
    _check_tokens(found, {attempt: rivals for attempt, rivals in claims.items() if len(rivals) > 1})
    standing: list[list[int]] = [[] for _ in found]
    for rivals in claims.values():
        best = max(rivals, key=lambda c: (c.tried, c.graded[0], c.graded[1].timestamp() if c.graded[0] else 0))
        standing[best.shard].append(best.row)
    whole = [shard for shard, kept, count in zip(found, standing, counts, strict=True) if len(kept) == count]
    partly = [
        shard.table().cast(schema.TRAJECTORY).take(sorted(kept))
        for shard, kept, count in zip(found, standing, counts, strict=True)
        if 0 < len(kept) < count
    ]
    parts = ([rows(whole)] if whole else []) + ([dataset.dataset(pa.concat_tables(partly))] if partly else [])
    return dataset.dataset(parts) if parts else None


def _check_tokens(found: list[Shard], claims: dict[str, list[_Claim]]) -> None:
    """Raise ConflictError unless all rows of the same try of an attempt hold the same tokens and log-probabilities."""
    wanted: dict[int, dict[int, tuple[str, int]]] = {}
    for attempt, rivals in claims.items():
        for claim in rivals:
            wanted.setdefault(claim.shard, {})[claim.row] = (attempt, claim.tried)
    first: dict[tuple[str, int], tuple[bytes, Path]] = {}
    for number, keys in wanted.items():
        path = found[number].path
        for row, digest in _token_digests(found[number].table(["turns"]).column("turns"), list(keys)):
            before, other = first.setdefault(keys[row], (digest, path))
            if before != digest:
                raise ConflictError(
                    f"{keys[row][0]}: other tokens in {path} than in {other}; two rounds share a name, so give only one"
                )


def _token_digests(turns: Any, wanted: list[int]) -> Iterator[tuple[int, bytes]]:
    for row in wanted:
        flat = turns[row].values
        total = hashlib.sha256()
        if flat is not None:
            for name in ("context_ids", "completion_ids", "logprobs"):
                lists = flat.field(name)
                total.update(lists.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                total.update(lists.flatten().to_numpy(zero_copy_only=False).tobytes())
        yield row, total.digest()
