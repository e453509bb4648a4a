"""lego-inspect over run folders: which files and rows stand, queries, tables, and bad input."""

import csv
import io
import json
import os
import pty
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import group, shard, turn
from commands.inspecting import PROGRAM, good, inspect, objects

from legorl import metrics
from legorl.commands.inspect import load, table


def test_a_run_folder_gives_one_row_an_attempt_graded_over_ungraded(run_folder):
    rows = objects("sql", "--json", "select attempt_id, step, reward from trajectories order by 1, 2", run_folder)
    assert len(rows) == 9
    assert [row["reward"] for row in rows if row["step"] == 1] == [1, 1, 0]
    assert objects("sql", "--json", "select count(*) as n from tokens", run_folder) == [{"n": 36}]
    assert objects("sql", "--json", "select count(*) as n from updates", run_folder) == [{"n": 24}]
    assert objects("sql", "--json", "select * from metrics", run_folder) == [
        {"run": "r1", "step": 0, "name": "loss", "value": 0.5}
    ]


def best(*groups, tmp_path):
    """(try, reward) of each attempt that stands after reading one file a group."""
    paths = [shard(tmp_path / f"{n}.parquet", rows) for n, rows in enumerate(groups)]
    connection = metrics.connect(load.best_rows(load.find(paths).trajectories))
    return connection.execute('select "try", reward from trajectories order by attempt_id').fetchall()


def test_rows_of_one_file_can_stand_in_part(tmp_path):
    rows = group([0.0, 0.0, 0.0])
    newer = group([1.0, 1.0, 1.0])[1] | {"graded_at": rows[0]["graded_at"].replace(hour=13)}
    assert best(rows, [newer], tmp_path=tmp_path) == [(0, 0.0), (0, 1.0), (0, 0.0)]


def test_different_tokens_under_one_name_are_a_failed_check(tmp_path):
    rows = group([1.0, 0.0])
    other = group([1.0, 0.0])[1]
    paths = [shard(tmp_path / "a.parquet", rows), shard(tmp_path / "b.parquet", [other])]
    assert good("summary", *paths)
    other["turns"][1]["completion_ids"][1] = 7
    shard(paths[1], [other])
    done = inspect("summary", *paths)
    assert done.returncode == 4
    assert all(text in done.stderr for text in (other["attempt_id"], "a.parquet", "b.parquet"))
    assert len(done.stderr.splitlines()) == 1


def test_the_same_file_counts_once_however_often_it_is_named(run_folder, tmp_path):
    checkpoint = run_folder / "step-0000" / "checkpoint"
    (tmp_path / "link").symlink_to(checkpoint)
    query = "select count(*) as n from updates"
    assert objects("sql", "--json", query, checkpoint, checkpoint / "updates.parquet", tmp_path / "link") == [{"n": 24}]


def test_hidden_folders_are_unfinished_work(tmp_path):
    shard(tmp_path / "a.parquet", group([1.0]))
    shard(tmp_path / ".partial" / "b.parquet", group([1.0], task_id="task-b"))
    assert objects("sql", "--json", "select count(*) as n from trajectories", tmp_path) == [{"n": 1}]


# Bad input.


def test_bad_files_get_one_line(tmp_path):
    foreign, cut = tmp_path / "foreign.parquet", tmp_path / "cut.parquet"
    pq.write_table(pa.table({"a": [1]}), foreign)
    shard(cut, group([1.0]))
    cut.write_bytes(cut.read_bytes()[:-50])
    (tmp_path / "empty").mkdir()
    for path in (foreign, cut, tmp_path / "missing", tmp_path / "empty"):
        done = inspect("summary", path)
        assert (done.returncode, done.stdout) == (1, "")
        assert str(path) in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_foreign_files_in_a_folder_are_passed_by_and_counted(tmp_path):
    shard(tmp_path / "a.parquet", group([1.0]))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    done = inspect("sql", "--json", "select count(*) as n from trajectories", tmp_path)
    assert (done.returncode, done.stdout) == (0, '{"n":1}\n')
    assert "foreign.parquet" in done.stderr


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("select nonsense from turns", 2),
        ("selec 1", 2),
        ("select * from nowhere", 2),
        ("select * from '/etc/passwd'", 2),
        ("select * from read_text('/etc/passwd')", 1),
        ("copy trajectories to 'stolen.parquet'", 1),
        ("select 'x'::integer", 1),
    ],
)
def test_a_wrong_query_gets_one_line(run_folder, tmp_path, monkeypatch, query, code):
    monkeypatch.chdir(tmp_path)
    done = inspect("sql", query, run_folder)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert "root:" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_page_is_named_by_its_file(tmp_path):
    shard(tmp_path / "good.parquet", group([1.0, 0.0]))
    bad = shard(tmp_path / "bad.parquet", group([1.0, 0.0], task_id="task-b"))
    raw = bytearray(bad.read_bytes())
    chunk = pq.ParquetFile(bad).metadata.row_group(0).column(0)
    raw[(chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 3] ^= 0xFF
    bad.write_bytes(raw)
    done = inspect("sql", "select count(distinct attempt_id) from trajectories", tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert str(bad) in done.stderr


def test_a_query_cannot_change_the_files(run_folder):
    files = {path: path.read_bytes() for path in run_folder.rglob("*.parquet")}
    inspect("sql", f"copy (select 1) to '{next(iter(files))}'", run_folder)
    assert {path: path.read_bytes() for path in files} == files


# Output.


def test_paths_from_stdin_and_a_reader_that_goes_away(run_folder, tmp_path):
    paths = "\n".join(str(path) for path in run_folder.rglob("*.parquet"))
    query = "select count(*) as n from trajectories"
    assert objects("sql", "--json", query, stdin=paths) == objects("sql", "--json", query, run_folder)
    pipe = f"'{PROGRAM}' sql --json 'select t.* from tokens t, range(10000)' '{run_folder}' | head -1"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, timeout=120, check=False)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_null_is_a_dash_in_a_table_null_in_json_and_empty_in_csv():
    columns, rows = ["a", "b"], [(None, 0), (1.5, None)]
    assert list(table.table_lines(columns, rows)) == ["  a  b", "---  -", "  -  0", "1.5  -"]
    assert list(table.json_lines(columns, rows)) == ['{"a":null,"b":0}', '{"a":1.5,"b":null}']
    assert list(table.csv_lines(columns, rows)) == ["a,b", ",0", "1.5,"]


def test_a_table_on_a_narrow_terminal_cuts_the_wide_columns_only():
    lines = list(table.table_lines(["id", "text"], [(1, "x" * 100), (2, "y")], width=20))
    assert lines == ["id  text", "--  ----------------", " 1  " + "x" * 15 + "…", " 2  y"]


def test_a_table_fits_the_terminal_and_is_whole_in_a_pipe(run_folder):
    argv = [str(PROGRAM), "sql", "select repeat('x', 300) as a", str(run_folder)]
    master, slave = pty.openpty()
    environment = os.environ | {"COLUMNS": "40", "LINES": "20"}
    with subprocess.Popen(argv, stdout=slave, env=environment) as process:
        os.close(slave)
        with os.fdopen(master, encoding="utf-8", newline="") as terminal:
            lines = [terminal.readline().rstrip("\r\n") for _ in range(3)]
        assert process.wait(60) == 0
    assert lines[2] == "x" * 39 + "…"
    assert "x" * 300 in good(*argv[1:])


def test_what_a_model_wrote_cannot_drive_the_terminal(tmp_path):
    evil = "\x1b[2J\x07\u202e"
    path = shard(tmp_path / "a.parquet", group([1.0], turns=[turn(text=evil, finish_reason=evil)], detail=evil))
    for argv in (
        ["sql", "select text, tool_calls from turns"],
        ["show", "--best"],
        ["sql", "select detail from trajectories"],
    ):
        shown = good(*argv, path)
        assert "\\x1b[2J" in shown
        assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_json_and_csv_give_values_back(tmp_path):
    row = group([1.0], patch=b"+\xff\n", detail='a "b",\nc')[0]
    path = shard(tmp_path / "a.parquet", [row])
    query = "select detail, patch, weights, started_at, reward from trajectories"
    wanted = {"detail": row["detail"], "patch": "+\\xff\n", "weights": row["weights"], "reward": 1.0}
    assert objects("sql", "--json", query, path) == [wanted | {"started_at": "2026-11-30T12:00:00+00:00"}]
    [found] = csv.DictReader(io.StringIO(good("sql", "--csv", query, path)))
    assert found["detail"] == row["detail"]
    assert json.loads(found["weights"]) == row["weights"]
