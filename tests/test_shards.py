"""Shards: whole or absent, refused where they are not what they should be; folders with one writer; cut rounds."""

import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import group, plan_of, shard, trajectory, turn, update_rows

from legorl import schema, shards
from legorl.shards import OutDir, Plan, ShardError, Tally


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [*group([1.0, 0.0]), trajectory("b", turns=[turn(0, completion_ids=[], context_ids=[5])])]
    path = shard(tmp_path / "a.parquet", rows, plan_of(rows))
    back = shards.open_shard(path)
    assert back.rows() == rows
    assert back.plan == plan_of(rows)
    assert back.meta["format"] == schema.TRAJECTORY_FORMAT
    assert back.rows(["attempt_id"]) == [{"attempt_id": row["attempt_id"]} for row in rows]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(pa.ArrowInvalid):
        shard(tmp_path / "a.parquet", [trajectory(step="not a number")])
    with pytest.raises(ZeroDivisionError), shards.atomic(tmp_path / "b.txt") as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path):
    (tmp_path / "b.txt").write_text("old")
    with pytest.raises(ZeroDivisionError), shards.atomic(tmp_path / "b.txt") as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "b.txt").read_text() == "old"


def truncated(path):
    shard(path, group([1.0]))
    path.write_bytes(path.read_bytes()[:-100])


def text_file(path):
    path.write_text("attempt_id\n1\n")


def empty_file(path):
    path.write_bytes(b"")


def foreign(path):
    pq.write_table(pa.table({"a": [1]}), path)


def says_it_is(kind, path):
    metadata = {b"legorl": json.dumps({"format": kind}).encode()}
    pq.write_table(pa.table({"attempt_id": [1]}).replace_schema_metadata(metadata), path)


def other_version(path):
    says_it_is("trajectory/99", path)


def other_kind(path):
    shard(path, update_rows(trajectory()), kind=schema.UPDATE_FORMAT)


def other_columns(path):
    says_it_is(schema.TRAJECTORY_FORMAT, path)


def missing(path):
    pass


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (truncated, "not a whole Parquet file"),
        (text_file, "not a whole Parquet file"),
        (empty_file, "not a whole Parquet file"),
        (foreign, "not one of legorl's"),
        (other_version, "'trajectory/99'"),
        (other_kind, "'update/2'"),
        (other_columns, "columns attempt_id, group_id"),
        (missing, "no such file"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_not_a_shard_is_refused_by_name(tmp_path, make, says):
    path = tmp_path / "x.parquet"
    make(path)
    with pytest.raises(ShardError) as error:
        shards.open_shard(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_rows_of_a_file_that_broke_behind_its_footer_are_refused(tmp_path):
    path = shard(tmp_path / "a.parquet", group([1.0, 0.0, 1.0]))
    data = bytearray(path.read_bytes())
    data[4:400] = os.urandom(396)
    path.write_bytes(data)
    with pytest.raises(ShardError, match="cannot be read"):
        shards.open_shard(path).table()


def test_a_changed_byte_does_not_go_unseen(tmp_path):
    path = shard(tmp_path / "a.parquet", [trajectory(patch=os.urandom(50_000))])
    whole = path.read_bytes()
    place = len(whole) // 2  # within bytes that zstd could not make shorter: they decompress, whatever they are
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ShardError, match="cannot be read"):
        shards.open_shard(path).rows()


def test_a_folder_stands_for_its_shards_in_order_and_not_for_hidden_files(tmp_path):
    for name in ("b", "a", ".hidden"):
        shard(tmp_path / f"{name}.parquet", group([1.0]))
    (tmp_path / ".partial").mkdir()
    shard(tmp_path / ".partial" / "c.parquet", group([1.0]))
    assert [s.path.name for s in shards.open_shards([tmp_path])] == ["a.parquet", "b.parquet"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardError, match=r"no \.parquet file"):
        list(shards.open_shards([tmp_path / "empty"]))


def test_shards_are_opened_as_their_paths_arrive(tmp_path):
    first = shard(tmp_path / "a.parquet", group([1.0]))

    def paths():
        yield first
        raise ZeroDivisionError

    opened = shards.open_shards(paths())
    assert next(opened).path == first
    with pytest.raises(ZeroDivisionError):
        next(opened)


def test_the_second_writer_fails_and_names_the_first(tmp_path):
    second = OutDir(tmp_path / "out", {"a": 1})
    with OutDir(tmp_path / "out", {"a": 1}), pytest.raises(ShardError, match=f"process {os.getpid()} is writing"):
        second.__enter__()
    with OutDir(tmp_path / "out", {"a": 1}):  # the first has gone
        pass


def test_a_killed_writer_holds_nothing_back(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from legorl.shards import OutDir\n"
        f"with OutDir(Path({str(tmp_path / 'out')!r}), {{'a': 1}}): print('holds', flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == "holds\n"
        with pytest.raises(ShardError, match=f"process {writer.pid} "):
            OutDir(tmp_path / "out", {"a": 1}).__enter__()
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    (tmp_path / "out" / ".left.tmp").write_text("half")
    with OutDir(tmp_path / "out", {"a": 1}):
        assert not (tmp_path / "out" / ".left.tmp").exists()


def test_other_settings_are_refused_with_the_difference(tmp_path):
    with OutDir(tmp_path, {"temperature": 1.0, "seed": 0}):
        pass
    with pytest.raises(ShardError) as error:
        OutDir(tmp_path, {"temperature": 0.5, "seed": 0}).__enter__()
    assert "temperature: was 1.0, now 0.5" in str(error.value)
    assert "seed" not in str(error.value)
    with OutDir(tmp_path, {"temperature": 1.0, "seed": 0}):  # the refusal has let go of the lock
        pass


def test_a_plan_knows_its_attempts_and_its_digest_ignores_the_order_of_groups():
    plan = Plan("r", 3, ("r.3.h.b", "r.3.h.a"), 2)
    assert plan.attempt_ids == ["r.3.h.b.0", "r.3.h.b.1", "r.3.h.a.0", "r.3.h.a.1"]
    assert plan.digest == Plan("r", 3, ("r.3.h.a", "r.3.h.b"), 2).digest
    assert plan.digest != Plan("r", 3, ("r.3.h.a", "r.3.h.b"), 3).digest
    assert Plan.from_json(plan.to_json()) == plan


def test_a_cut_round_is_told_from_a_whole_one(tmp_path):
    rows = group([1.0, 0.0]) + group([0.0, 0.0], task_id="b")
    plan = plan_of(rows)
    tally = Tally()
    for name, part in (("a", rows[:2]), ("b", rows[2:3])):
        one = shards.open_shard(shard(tmp_path / f"{name}.parquet", part, plan))
        tally.add(one, one.table(["attempt_id"]).column("attempt_id").to_pylist())
    assert tally.missing == [rows[3]["attempt_id"]]
    assert "3 of 4 attempts" in tally.complaint()
    assert rows[3]["attempt_id"] in tally.complaint()
    tally.add(one, [rows[3]["attempt_id"]])
    assert tally.complaint() is None


def test_a_tally_over_two_rounds_adds_their_plans(tmp_path):
    tally = Tally()
    for step in (0, 1):
        rows = group([1.0, 0.0], step=step)
        one = shards.open_shard(shard(tmp_path / f"{step}.parquet", rows[: 2 - step], plan_of(rows)))
        tally.add(one, [row["attempt_id"] for row in one.rows(["attempt_id"])])
    assert tally.planned == 4
    assert len(tally.missing) == 1
