"""lego-inspect show, schema, align, behaviour and losses."""

import pyarrow.parquet as pq
import pytest
from builders import group, shard, trajectory, turn
from commands.inspecting import good, inspect, objects

from legorl import metrics
from legorl.commands.inspect import show


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
