"""From paths to rows: find legorl's files under any mix of files and folders, and keep one row an attempt.

files = find(paths)
connection = metrics.connect(trajectories=best_rows(files.trajectories), updates=rows(files.updates))
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl import schema, shards
from legorl.rows import standing
from legorl.shards import Shard, ShardError


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
        schema.UPDATE_1_FORMAT: files.updates,
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


def check_readable(files: Files) -> None:
    """Read every page of every file. Raises ShardError, which names the file, for one that is damaged."""
    for shard in [*files.trajectories, *files.updates, *files.metrics]:
        shard.table()


def _below(folder: Path) -> list[Path]:
    found = []
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(at, name) for name in names if name.endswith(".parquet") and not name.startswith(".")]
    if not found:
        raise ShardError(f"{folder}: no .parquet file in this folder or below it")
    return sorted(found)


def rows(found: list[Shard]) -> Any:
    """Return a pyarrow Dataset over all rows of the files, all of one kind; None for no files.

    A column that an older format lacks is null.
    """
    from pyarrow import dataset

    if not found:
        return None
    kind = found[0].meta["format"]
    checked = dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
    return dataset.dataset(
        [str(shard.path) for shard in found],
        format=dataset.ParquetFileFormat(default_fragment_scan_options=checked),
        schema=schema.UPDATE if kind == schema.UPDATE_1_FORMAT else schema.SCHEMAS[kind],
    )


def best_rows(found: list[Shard]) -> Any:
    """Return a pyarrow Dataset with one row an attempt; None for no files.

    Files whose rows all stand are read when asked, files whose rows are all superseded never, and only files with some
    of each are held in memory. Raises what `standing` raises.
    """
    import pyarrow as pa
    from pyarrow import dataset

    if not found:
        return None
    whole, partly = [], []
    for shard, kept in zip(found, standing(found), strict=True):
        if len(kept) == shard.row_count:
            whole.append(shard)
        elif kept:
            partly.append(shard.table().cast(schema.TRAJECTORY).take(kept))
    parts = ([rows(whole)] if whole else []) + ([dataset.dataset(pa.concat_tables(partly))] if partly else [])
    return dataset.dataset(parts) if parts else None
