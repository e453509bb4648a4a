import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl import routing
from legorl.routing import RoutingError, Shape


@given(st.data())
def test_what_was_delivered_comes_back_and_nothing_else(data):
    draw = data.draw
    shape = Shape(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([4, 256, 257, 60_000])))
    span = range(start := draw(st.integers(0, 5)), start + draw(st.integers(1, 12)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    pieces, wanted = [], {}
    for at, length in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=4)):
        rows = rng.integers(0, shape.experts, (length, shape.layers, shape.topk))
        pieces.append((at, rows))
        wanted |= {at + k: row for k, row in enumerate(rows)}
    record = routing.pack(shape, span, pieces)
    assert record["dtype"] == ("uint8" if shape.experts <= 256 else "uint16")
    assert len(record["data"]) == len(span) * shape.layers * shape.topk * (1 if shape.experts <= 256 else 2)
    experts, valid = routing.unpack(record)
    assert [position for position, ok in zip(span, valid, strict=True) if ok] == sorted(set(wanted) & set(span))
    for position, row, ok in zip(span, experts, valid, strict=True):
        assert np.array_equal(row, wanted[position] if ok else np.zeros_like(row))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.data())
def test_every_position_of_a_path_but_the_last_has_a_row(context, sampled, more, data):
    """Two turns: the child begins anywhere in its parent, behind its last token too."""
    length = context + 1 + sampled
    parent = routing.positions(0, context + 1, sampled)
    prefix = data.draw(st.integers(1, length))
    child = routing.positions(prefix, prefix + more, 2)
    rows = {*(p for p in parent if p < prefix), *child}
    assert rows == set(range(prefix + more + 1))  # the path has prefix + more + 2 tokens
    assert len(child) == 1 + more + 1


def test_positions_are_the_last_shared_token_the_context_and_the_sampled_but_one():
    assert routing.positions(0, 4, 3) == range(0, 6)
    assert routing.positions(10, 14, 3) == range(9, 16)
    assert routing.positions(10, 10, 1) == range(9, 10)  # the same prompt again
    assert routing.positions(10, 14, 0) == range(9, 14)  # failed before its first token
    assert routing.wanted_rows({"prefix_len": 10, "context_ids": [1] * 4, "completion_ids": [1] * 3}) == 7
    assert (routing.valid_rows({"valid": b"\1\0\1"}), routing.valid_rows(None)) == (2, 0)


def test_rows_that_the_model_cannot_have_are_refused():
    shape = Shape(2, 2, 4)
    with pytest.raises(RoutingError, match="outside 0 to 3"):
        routing.pack(shape, range(2), [(0, np.full((2, 2, 2), 4))])
    with pytest.raises(RoutingError, match="outside 0 to 3"):
        routing.pack(shape, range(2), [(0, np.full((2, 2, 2), -1))])
    with pytest.raises(RoutingError, match="model of"):
        routing.pack(shape, range(2), [(0, np.zeros((2, 3, 2), int))])


@pytest.mark.parametrize(
    "change", [{"dtype": "int64"}, {"dtype": None}, {"rows": 3}, {"layers": 0}, {"valid": b"\1"}, {"data": None}]
)
def test_a_damaged_record_is_refused(change):
    record = routing.pack(Shape(2, 2, 4), range(2), [(0, np.ones((2, 2, 2), int))])
    routing.unpack(record)
    with pytest.raises(RoutingError):
        routing.unpack(record | change)
