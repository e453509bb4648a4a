"""Reading and writing trajectory shards: atomic files, the plan of a round, folders with one writer.

A shard is one Parquet file of whole groups. Its footer carries `legorl`, a JSON object: format, the resolved
configuration, versions, and the plan of the round (which groups, how many attempts each), so that any later stage
can tell a finished round from a cut one.

    with OutDir(out, config) as folder:                  # one writer; refuses other settings
        write_shard(folder.path / name, rows, meta(plan, config))
    for shard in open_shards(paths): shard.rows()
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl import __version__, schema


class ShardError(Exception):
    """A file is not a shard that this version can read, or a folder cannot be written to."""


class ForeignError(ShardError):
    """A whole Parquet file that is none of legorl's."""


@dataclass(frozen=True)
class Plan:
    """What one round set out to make: its groups and the attempts of each. Any stage can check itself against it."""

    run: str
    step: int
    groups: tuple[str, ...]
    attempts: int

    @property
    def digest(self) -> str:
        text = json.dumps([self.run, self.step, sorted(self.groups), self.attempts])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def attempt_ids(self) -> list[str]:
        return [f"{group}.{n}" for group in self.groups for n in range(self.attempts)]

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "step": self.step,
            "groups": list(self.groups),
            "attempts": self.attempts,
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        return cls(data["run"], data["step"], tuple(data["groups"]), data["attempts"])


@dataclass(frozen=True)
class Shard:
    """One readable shard: its path, footer and number of rows. Rows are read when asked for."""

    path: Path
    meta: dict[str, Any]
    row_count: int

    @property
    def plan(self) -> Plan | None:
        plan = self.meta.get("plan")
        return Plan.from_json(plan) if plan else None

    def table(self, columns: list[str] | None = None) -> Any:
        """Return the rows as a pyarrow.Table."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.read_table(self.path, columns=columns, partitioning=None, page_checksum_verification=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise ShardError(f"{self.path}: cannot be read ({_first_line(error)}); make it again") from error

    def rows(self, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows as plain Python dictionaries."""
        return self.table(columns).to_pylist()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def open_shard(path: Path | str, *kinds: str) -> Shard:
    """Read the footer of the shard at `path`, whose format must be one of `kinds` (default: trajectories).

    Raises ShardError for a missing, truncated or foreign file, or one of another format version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    kinds = kinds or (schema.TRAJECTORY_FORMAT,)
    if not path.exists():
        raise ShardError(f"{path}: no such file")
    try:
        footer = pq.read_metadata(path)
        columns = footer.schema.to_arrow_schema()
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardError(f"{path}: not a whole Parquet file ({_first_line(error)}); make it again") from error
    raw = columns.metadata or {}
    if b"legorl" not in raw:
        raise ForeignError(f"{path}: a Parquet file, but not one of legorl's (no 'legorl' key in its metadata)")
    meta = json.loads(raw[b"legorl"])
    kind = meta.get("format")
    if kind not in kinds:
        wanted = " or ".join(map(repr, kinds))
        raise ShardError(f"{path}: format {kind!r}, but {wanted} is wanted here; make it again or give another file")
    found = {field.name: field.type for field in columns}
    wrong = [field.name for field in schema.SCHEMAS[kind] if found.get(field.name) != field.type]
    if wrong:
        raise ShardError(f"{path}: says {kind!r}, but its columns {', '.join(wrong)} are not as that format has them")
    return Shard(path, meta, footer.num_rows)


def expand(path: Path | str) -> list[Path]:
    """A file stands for itself; a folder for the shards in it, sorted. Raises ShardError if there are none."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.glob("*.parquet") if not p.name.startswith("."))
    if not found:
        raise ShardError(f"{path}: no .parquet file in this folder")
    return found


def open_shards(paths: Iterable[Path | str]) -> Iterator[Shard]:
    """Open each shard as its path arrives; folders stand for the shards in them."""
    for path in paths:
        for file in expand(path):
            yield open_shard(file)


def make_meta(kind: str = schema.TRAJECTORY_FORMAT, plan: Plan | None = None, **fields: Any) -> dict[str, Any]:
    """Return the footer of a new file: format, writer version, plan, and whatever else the stage adds."""
    meta: dict[str, Any] = {"format": kind, "legorl": __version__, **fields}
    if plan:
        meta["plan"] = plan.to_json()
    return meta


def write_shard(path: Path, rows: list[dict[str, Any]] | Any, meta: dict[str, Any]) -> Path:
    """Write `rows` (dictionaries, or a pyarrow.Table) with the footer `meta` to `path`, which is returned.

    Temporary name, fsync, rename. The columns are those of `meta`'s format.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow_schema = schema.SCHEMAS[meta["format"]]
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=arrow_schema)
    table = table.cast(arrow_schema).replace_schema_metadata({b"legorl": json.dumps(meta, default=str).encode()})
    with atomic(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=3, write_page_checksum=True)
    return path


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; on success fsync and rename it, on failure remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_settings(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise ShardError, naming each difference, unless `out`, made with the settings `old`, suits those of `new`.

    `old` was read from JSON; `new` may hold what JSON makes something else of.
    """
    new = json.loads(json.dumps(new, default=str))
    changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    if changed:
        shown = "; ".join(f"{key}: was {old.get(key)!r}, now {new.get(key)!r}" for key in changed)
        raise ShardError(f"{out}: made with other settings ({shown}); use the old ones or give another --out")


def sync_tree(folder: Path) -> None:
    """Make `folder` and everything in it durable; links are not followed."""
    for root, _, names in os.walk(folder):
        for file in (Path(root, name) for name in names):
            if not file.is_symlink():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        sync_folder(Path(root))


class OutDir:
    """An output folder held by one writer (flock) and bound to one configuration.

    Raises ShardError if another process holds it (naming it), if it was made with other settings (naming them), or
    if the disk fills up while it is open: what libraries then say names neither the folder nor what to do.
    """

    def __init__(self, path: Path, config: dict[str, Any]):
        self.path = path
        self._config = config

    def __enter__(self) -> "OutDir":
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise ShardError(f"{self.path}: {owner} is writing here; wait for it or give another --out") from None
        try:
            self._bind()
        except BaseException:
            self._lock.close()
            raise
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"process {os.getpid()}")
        self._lock.flush()
        for left in self.path.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        return self

    def _bind(self) -> None:
        record = self.path / ".config.json"
        if record.exists():
            check_settings(self.path, json.loads(record.read_text()), self._config)
            return
        with atomic(record) as temporary:
            temporary.write_text(json.dumps(self._config, indent=1, default=str))

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ShardError(f"{self.path}: the disk is full; make room and run again, it continues") from error


class Tally:
    """Compares the attempts seen with the plans of the shards they came in."""

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}
        self._seen: set[str] = set()

    def add(self, shard: Shard, attempt_ids: Iterable[str]) -> None:
        if shard.plan:
            self._plans[shard.plan.digest] = shard.plan
        self._seen.update(attempt_ids)

    @property
    def planned(self) -> int:
        return len({a for plan in self._plans.values() for a in plan.attempt_ids})

    @property
    def missing(self) -> list[str]:
        return sorted({a for plan in self._plans.values() for a in plan.attempt_ids} - self._seen)

    def complaint(self) -> str | None:
        """One line if the round is incomplete ("37 of 64 attempts ..."), else None."""
        if not self.missing:
            return None
        have = self.planned - len(self.missing)
        return (
            f"{have} of {self.planned} attempts of the plan arrived; the stage before was cut: rerun it "
            f"(first missing: {self.missing[0]})"
        )
