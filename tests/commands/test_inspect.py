"""lego-inspect, through the real command, over hand-made run folders."""

import contextlib
import csv
import io
import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import group, plan_of, shard, trajectory, turn, update_rows
from commands.train_rows import World, tiny_llama

from legorl import metrics, schema
from legorl.commands.inspect import load, show, summary, table
from legorl.commands.inspect.cli import main

PROGRAM = Path(sys.executable).parent / "lego-inspect"


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def inspect(*argv, stdin=""):
    """Run the command in this process (a hundred interpreters would take minutes)."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        patch.setattr(sys, "argv", ["lego-inspect", *map(str, argv)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.setattr(signal, "signal", lambda *_: None)  # the handler of SIGTERM stays pytest's
        main()
    return Done(stop.value.code, out.getvalue(), err.getvalue())


def good(*argv, **kwargs):
    done = inspect(*argv, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(*argv, **kwargs):
    return [json.loads(line) for line in good(*argv, **kwargs).splitlines()]


def ungraded(rows):
    return [row | dict.fromkeys(schema.GRADE_COLUMNS) for row in rows]


def write_step(folder, rows, told=None, step=0):
    """A step as a recipe leaves it: rollout, graded, checkpoint."""
    base = folder / f"step-{step:04}"
    shard(base / "rollout" / "a.parquet", ungraded(rows), plan_of(rows))
    shard(base / "graded" / "a.parquet", rows, plan_of(rows))
    if told is not None:
        shard(base / "checkpoint" / "updates.parquet", told, kind=schema.UPDATE_FORMAT)
        figures = [{"run": "r1", "step": step, "name": "loss", "value": 0.5}]
        shard(base / "checkpoint" / "metrics.parquet", figures, kind=schema.METRIC_FORMAT)
    return base


LOST = {"outcome": "engine_lost", "blame": "infra"}
EARLIER = {"try": 0, "outcome": "engine_lost", "blame": "infra", "detail": "", "turns": 1, "tokens": 17, "wall_s": 1.0}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Two rounds: the first trained (one task without variance, one attempt lost, one tried twice), the second not."""
    folder = tmp_path_factory.mktemp("runs") / "r1"
    first = group([1.0, 0.0, None]) + group([0.0, 0.0, 0.0], task_id="task-b")
    first[2] |= LOST
    first[0] |= {"try": 1, "history": [EARLIER]}
    told = []
    for row in first:
        reason = "infra" if row["blame"] == "infra" else "no_variance" if row["task_id"] == "task-b" else "trained"
        told += update_rows(row, noise=0.01, reason=reason, step=1)
    write_step(folder, first, told)
    write_step(folder, group([1.0, 1.0, 0.0], step=1), step=1)
    return folder


# Which rows count.


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


# summary


def test_summary_counts_attempts_and_says_where_every_token_went(run_folder):
    first, second = objects("summary", "--json", run_folder)
    assert (first["planned"], first["attempts"], first["lost"], first["graded"]) == (6, 6, 1, 5)
    assert first["reward"] == pytest.approx(0.2)
    assert (first["passed"], first["judged"]) == (1, 5)
    assert first["outcomes"] == {"finished": 5, "engine_lost": 1}
    assert first["trained_tokens"] == 8
    assert first["dropped_tokens"] == {"infra": 4, "no_variance": 12, "earlier_try": 17}
    assert first["sampled_tokens"] == 8 + 4 + 12 + 17
    assert first["undecided_tokens"] == 0
    assert first["pearson"] > 0.9
    assert 0 < first["logprob_abs_diff_max"] < 0.1
    # The second round was not trained: nothing about training may look measured.
    assert second["sampled_tokens"] == second["undecided_tokens"] == 12
    assert second["trained_tokens"] is second["pearson"] is second["logprob_abs_diff_max"] is None
    assert second["reward_low"] is None  # one group says nothing about the spread over groups


def test_canaries_are_told_apart_from_what_was_achieved(tmp_path):
    rows = [*group([1.0, 0.0], "task-a"), *group([1.0, 0.0], "task-b")]
    wanted = objects("summary", "--json", shard(tmp_path / "a.parquet", rows))[0]
    assert wanted["canaries"] is wanted["canaries_passed"] is None
    flags = (["canary"], ["canary", "canary_passed"], ["canary"])
    canaries = group([0.0] * 3, "task-a-canary")
    rows += [row | {"flags": flag} for row, flag in zip(canaries, flags, strict=True)]
    path = shard(tmp_path / "b.parquet", rows)
    [found] = objects("summary", "--json", path)
    for name in ("reward", "reward_low", "reward_high", "passed", "judged", "graded", "pass_rate"):
        assert found[name] == wanted[name]
    assert (found["canaries"], found["canaries_passed"]) == (3, 1)
    assert "r1 0 cheating: 1 of 3 attempts at impossible tasks passed (33.3%)" in good("summary", path)


def test_summary_for_people_shows_the_same(run_folder):
    text = good("summary", run_folder)
    assert "sampled =" in text
    assert "r1 0 dropped: infra 4, no_variance 12, earlier_try 17" in text
    second = next(line for line in text.splitlines() if line.startswith("r1") and " 1 " in line[:10])
    assert " - " in second


def test_summary_of_a_checkpoint_alone_does_not_invent_attempts(run_folder):
    [one] = objects("summary", "--json", run_folder / "step-0000" / "checkpoint")
    assert one["attempts"] is one["lost"] is one["reward"] is None
    assert (one["trained_tokens"], one["sampled_tokens"]) == (8, 24)
    assert one["pearson"] > 0.9


def test_summary_says_when_a_round_is_cut(tmp_path):
    rows = group([1.0, 0.0])
    shard(tmp_path / "a.parquet", rows[:1], plan_of(rows))
    assert "1 of 2" in good("summary", tmp_path)


def lose(told):
    told.pop()


def double(told):
    told.append(told[0])


def invent(told):
    told.append(told[0] | {"position": 99})


def exchange(told):
    told[0]["token"] += 1


def unname(told):
    told[0]["reason"] = None


@pytest.mark.parametrize("fault", [lose, double, invent, exchange, unname], ids=lambda f: f.__name__)
def test_summary_fails_the_check_when_tokens_do_not_add_up(tmp_path, fault):
    rows = group([1.0, 0.0])
    told = [one for row in rows for one in update_rows(row)]
    write_step(tmp_path, rows, told)
    assert good("summary", tmp_path)
    fault(told)
    write_step(tmp_path, rows, told)
    done = inspect("summary", tmp_path)
    assert done.returncode == 4
    assert "1 tokens" in done.stderr
    assert done.stdout


def test_an_attempt_trained_twice_is_told_by_its_latest_step(tmp_path):
    rows = group([1.0, 0.0])
    # The older file is of a format without the column `flipped`.
    for step, reason, kind in ((1, "stale", schema.UPDATE_1_FORMAT), (2, "trained", schema.UPDATE_FORMAT)):
        told = [one for row in rows for one in update_rows(row, step=step, reason=reason, flipped=True)]
        shard(tmp_path / f"u{step}.parquet", told, kind=kind)
    shard(tmp_path / "a.parquet", rows)
    [one] = objects("summary", "--json", tmp_path)
    assert (one["sampled_tokens"], one["trained_tokens"], one["dropped_tokens"]) == (8, 8, {})
    counts = objects(
        "sql", "--json", "select step, flipped, count(*) as n from updates group by all order by 1", tmp_path
    )
    assert counts == [{"step": 1, "flipped": None, "n": 8}, {"step": 2, "flipped": True, "n": 8}]


def test_marked_spans_are_dropped_before_any_training(tmp_path):
    side = turn(1, 0, drops=[{"start": 0, "length": 2, "reason": "side"}])
    path = shard(tmp_path / "a.parquet", group([1.0], turns=[turn(), side]))
    [one] = objects("summary", "--json", path)
    assert (one["dropped_tokens"], one["undecided_tokens"], one["trained_tokens"]) == ({"side": 2}, 2, None)


def test_wilson_is_the_textbook_interval():
    assert summary.wilson(10, 24) == pytest.approx((0.2447, 0.6117), abs=1e-4)
    assert summary.wilson(0, 24) == pytest.approx((0, 0.1380), abs=1e-4)
    assert summary.wilson(0, 0) is None


def test_the_bootstrap_resamples_groups_and_not_attempts():
    same_within = [[0.0] * 8, [1.0] * 8] * 4  # 64 attempts, but only 8 independent draws
    low, high = summary.bootstrap(same_within)
    assert high - low > 0.5
    low, high = summary.bootstrap([[0.0, 1.0] * 4] * 8)
    assert (low, high) == (0.5, 0.5)
    assert summary.bootstrap([[1.0, 0.0]]) is None
    assert summary.bootstrap(same_within) == summary.bootstrap(same_within)


# show


def indent_of(lines, text):
    return next(line.index("●") for line in lines if text in line)


def test_show_sets_branches_in_where_they_leave(tmp_path):
    turns = [
        turn(0),
        turn(1, 0, 3, cause="side", drops=[{"start": 0, "length": 2, "reason": "side"}]),
        turn(2, 0, 5),
        turn(3, 2, 10),
        turn(4, 2, 10, cause="resample", context_ids=[9, 9]),
        turn(5, 1, 8, text="inside the side branch", cause="side"),
    ]
    lines = list(show.lines(trajectory(turns=turns, reward=1.0)))
    assert [indent_of(lines, f"turn {k}:") for k in range(6)] == [0, 2, 0, 2, 0, 4]
    order = [line for line in lines if "●" in line]
    assert [int(line.split("turn ")[1].split(":")[0]) for line in order] == [0, 1, 5, 2, 3, 4]
    assert "prompt 8 (+3), sampled 2, mean log p -0.312" in next(line for line in lines if "turn 2:" in line)
    assert any("not trained (side): tokens 0 to 1" in line for line in lines)


def test_show_clips_long_texts_unless_full(tmp_path):
    path = shard(tmp_path / "a.parquet", group([1.0], turns=[turn(text="word\n" * 500)]))
    assert good("show", "--best", path).count("word") < 20
    assert good("show", "--best", "--full", path).count("word") == 500


def test_show_finds_the_best_the_worst_and_a_named_attempt(run_folder):
    graded = run_folder / "step-0000"
    assert good("show", "--best", graded).startswith("r1.0.mini-swe-agent.task-a.0\n")
    assert "reward 0" in good("show", "--worst", graded)
    assert good("show", "task-b.2", graded).startswith("r1.0.mini-swe-agent.task-b.2\n")
    [row] = objects("show", "--json", "r1.0.mini-swe-agent.task-b.2", graded)
    assert row["attempt_id"] == "r1.0.mini-swe-agent.task-b.2"
    for argv, says in ((["task-b"], "fits 3"), (["nobody"], "no attempt"), (["--best", run_folder / "x"], "no such")):
        done = inspect("show", *argv, *([] if "--best" in argv else [graded]))
        assert done.returncode == 1
        assert says in done.stderr


def test_show_of_a_lost_attempt_shows_what_was_not_measured_as_a_dash():
    nothing = dict.fromkeys(
        ("exit_code", "wall_s", "setup_s", "patch", "log_tail", "turns", "weights", "budgets", "history")
    )
    text = "\n".join(show.lines(trajectory(outcome="sandbox_setup_failed", detail="no space") | nothing))
    assert "policy version -" in text
    assert "setup -" in text
    assert "exit code -" in text
    assert "not graded" in text
    assert "0.00 s in all" not in text


def test_best_without_grades_says_so(tmp_path):
    done = inspect("show", "--best", shard(tmp_path / "a.parquet", group([None])))
    assert done.returncode == 1
    assert "lego-grade" in done.stderr


# schema, align, behaviour


def test_schema_gives_every_column_a_meaning():
    rows = objects("schema", "--json")
    connection = metrics.connect()
    for view in metrics.VIEWS:
        columns = [name for name, *_ in connection.execute(f"describe {view}").fetchall()]
        assert [row["column"] for row in rows if row["view"] == view] == columns
    assert all(row["meaning"] for row in rows)
    assert {row["view"] for row in objects("schema", "turns", "--json")} == {"turns"}
    assert inspect("schema", "nonsense").returncode == 2


def test_align_runs_the_same_query_as_the_gate(run_folder):
    told = pq.read_table(run_folder / "step-0000" / "checkpoint" / "updates.parquet")
    rows = objects("align", "--json", run_folder)
    assert rows[0]["slice"] == "all"
    assert rows[0]["pearson"] == pytest.approx(dict(metrics.run("align", updates=told))["align/pearson"])
    assert "harness=mini-swe-agent" in {row["slice"] for row in rows}


def test_behaviour_has_a_line_a_round_and_a_harness(run_folder):
    slices = {row["slice"]: row["attempts"] for row in objects("behaviour", "--json", run_folder)}
    assert slices == {"all": 8, "harness=mini-swe-agent": 8, "round=r1.0": 5, "round=r1.1": 3}


def test_losses_compare_the_lost_with_the_kept(run_folder):
    slices = {row["slice"]: (row["kept"], row["lost"]) for row in objects("losses", "--json", run_folder)}
    assert slices["all"] == (8, 2) and slices["round=r1.0"] == (5, 2) and slices["outcome=engine_lost"] == (0, 2)


def test_the_environment_does_not_leak_into_a_query(run_folder, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    done = inspect("sql", "select getenv('SECRET')", run_folder)
    assert done.returncode != 0
    assert "hunter2" not in done.stdout + done.stderr


def test_what_lego_train_wrote_adds_up_and_shows_the_figures_of_its_gate(tmp_path):
    """The two commands meet in files only, so one test has to hold them together."""
    world = World(tiny_llama(tmp_path / "model"))
    rows = [*world.group([1.0, 0.0, 0.0]), *world.group([1.0, 1.0], "task-b")]
    rows[2] |= {"reward": None, "graded_at": None, "history": [EARLIER]} | LOST
    graded = shard(tmp_path / "run" / "graded" / "a.parquet", rows, plan_of(rows))
    out = tmp_path / "run" / "checkpoint"
    argv = [str(PROGRAM.with_name("lego-train")), "--model", str(world.checkpoint.path), "--out", str(out), "--partial"]
    done = subprocess.run([*argv, str(graded)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "legorl.json").read_text())
    [one] = objects("summary", "--json", tmp_path / "run")
    assert one["trained_tokens"] == record["tokens"].pop("trained")
    assert one["dropped_tokens"] == record["tokens"] | {"earlier_try": 17}
    assert {"infra", "no_variance"} <= set(one["dropped_tokens"])
    assert one["undecided_tokens"] == 0
    assert one["pearson"] == pytest.approx(record["figures"]["align/pearson"])
    assert one["logprob_abs_diff_max"] == pytest.approx(record["figures"]["align/logprob_abs_diff_max"])
