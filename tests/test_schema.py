"""The contract between stages: columns change only together with the format string."""

import hashlib

import pytest

from legorl import schema

# One digest a released format. A failure here means: give the changed format a new version string, and add its digest.
FROZEN = {
    "trajectory/1": "2653cdff2ca012af",
    "update/1": "255970e1af726c69",
    "update/2": "5fbdddfbdc631198",
    "metric/1": "c4668b844c249111",
}


def digest(arrow_schema):
    return hashlib.sha256("\n".join(f"{f.name}: {f.type}" for f in arrow_schema).encode()).hexdigest()[:16]


@pytest.mark.parametrize("kind", sorted(schema.SCHEMAS))
def test_a_format_is_what_its_version_says(kind):
    assert digest(schema.SCHEMAS[kind]) == FROZEN[kind]


def test_grade_columns_stand_together_in_the_trajectory_schema():
    names = schema.TRAJECTORY.names
    first = names.index(schema.GRADE_COLUMNS[0])
    assert tuple(names[first : first + len(schema.GRADE_COLUMNS)]) == schema.GRADE_COLUMNS


def test_token_columns_are_int32_and_float32():
    turn = {field.name: field.type for field in schema.TURN}
    assert str(turn["context_ids"].value_type) == str(turn["completion_ids"].value_type) == "int32"
    assert str(turn["logprobs"].value_type) == "float"
