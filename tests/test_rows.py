"""Which row stands for an attempt, and that rows of one try must agree in what was sampled."""

import datetime

import pytest
from builders import EPOCH, group, shard, trajectory, turn

from legorl import rows, schema, shards

LATER = {"graded_at": EPOCH + datetime.timedelta(days=1)}


def standing(tmp_path, *files):
    paths = [shard(tmp_path / f"{number}.parquet", rows) for number, rows in enumerate(files)]
    return rows.standing(list(shards.open_shards(paths)))


def test_a_graded_row_stands_before_an_ungraded_one_and_the_newest_grade_first(tmp_path):
    files = [[trajectory(reward=1.0, **LATER)], [trajectory(reward=0.5)], [trajectory()]]
    assert standing(tmp_path, *files) == [[0], [], []]
    assert standing(tmp_path, *files[::-1]) == [[], [], [0]]


def test_a_later_try_stands_whether_graded_or_not_and_whatever_it_sampled(tmp_path):
    early = trajectory(reward=0.0, turns=[turn(completion_ids=[1])])
    late = trajectory() | {"try": 1}
    assert standing(tmp_path, [early], [late]) == [[], [0]]
    assert standing(tmp_path, [late], [early]) == [[0], []]


def test_rows_of_one_file_can_stand_in_part(tmp_path):
    whole = group([0.0, 0.0, 0.0])
    assert standing(tmp_path, whole, [group([1.0, 1.0])[1] | LATER]) == [[0, 2], [0]]


def test_no_shards_and_empty_shards():
    assert rows.standing([]) == []


CHANGES = {
    "completion_ids": [7, 51],
    "context_ids": [7, 8, 9],
    "logprobs": [-0.25, float("nan")],
    "prefix_len": 4,
    "temperature": 0.5,
    "support": "top_p",
    "versions": [{"start": 0, "length": 2, "version": 1}],
    "drops": [{"start": 0, "length": 1, "reason": "cut"}],
    "foreign": True,
    "routing": {"data": b"\1", "dtype": "uint8", "rows": 1, "layers": 1, "topk": 1, "valid": b"\1"},
}


@pytest.mark.parametrize("field", CHANGES)
def test_other_tokens_under_one_name_are_a_conflict_in_whatever_row(tmp_path, field):
    ours, other = group([1.0, 0.0]), group([1.0, 0.0])[1]
    assert standing(tmp_path, ours, [other]) == [[0, 1], []]
    other["turns"][1][field] = CHANGES[field]
    with pytest.raises(
        rows.ConflictError, match=r"task-a\.1: other tokens in .*1\.parquet than in .*0\.parquet"
    ) as got:
        standing(tmp_path, ours, [other])
    assert got.value.code == 4


def test_a_turn_more_is_a_conflict_and_what_grading_writes_is_none(tmp_path):
    row = trajectory(turns=[turn()], reward=1.0)
    graded = trajectory(turns=[turn()]) | {name: row[name] for name in schema.GRADE_COLUMNS} | LATER
    assert standing(tmp_path, [row], [graded]) == [[], [0]]
    with pytest.raises(rows.ConflictError):
        standing(tmp_path, [row], [trajectory(turns=[turn(), turn(1, 0)])])
    with pytest.raises(rows.ConflictError):
        standing(tmp_path, [row], [trajectory(turns=[])])


def test_two_verdicts_of_one_instant_are_a_conflict(tmp_path):
    row = trajectory(reward=0.0)
    assert standing(tmp_path, [row], [row]) == [[0], []]
    words = r"reward 0\.0 \(blame model\) in .*0\.parquet, but reward 1\.0"
    with pytest.raises(rows.ConflictError, match=words) as got:
        standing(tmp_path, [row], [row | {"reward": 1.0}])
    assert got.value.code == 4
    with pytest.raises(rows.ConflictError, match=r"blame infra"):
        standing(tmp_path, [row], [row | {"blame": "infra"}])


def test_a_broken_record_equals_itself(tmp_path):
    lost = trajectory(outcome="capture_incomplete", turns=[turn(logprobs=[float("nan")], versions=[], support=None)])
    assert standing(tmp_path, [lost], [lost]) == [[0], []]
