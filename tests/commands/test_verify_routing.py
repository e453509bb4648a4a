"""lego-inspect verify on the experts of a sparse model: coverage, agreement, and planted faults."""

import builders
import numpy as np
import pytest
from commands.inspecting import inspect
from commands.test_verify import SHAPE, counted, read
from commands.train_rows import World, tiny_llama
from moe import KINDS, native_experts, tiny_moe

from legorl import routing, tree
from legorl.routing import Shape


@pytest.fixture(scope="module", params=KINDS)
def world(request, tmp_path_factory):
    return sparse_world(request.param, tmp_path_factory.mktemp("model") / "m")


def sparse_world(kind, folder):
    from transformers import AutoModelForCausalLM

    world = World(tiny_moe(kind, folder))
    world.model = AutoModelForCausalLM.from_pretrained(folder).eval()  # its experts cannot run in float64
    return world


@pytest.fixture
def row(world):
    return routed(world, SHAPE)


def routed(world, shape):
    """A row with the experts that transformers itself gives for each turn."""
    world.rng = np.random.default_rng(0)
    row = counted(world.row("task-a", 0, None, shape))
    row["turns"][-2]["cause"] = "rewrite"
    nodes = tree.nodes_of(row["turns"])
    for node, turn in zip(nodes, row["turns"], strict=True):
        experts = native_experts(world.model, tree.path_ids(nodes, node.index))
        span = routing.positions(node.prefix_len, node.prompt_len, len(node.completion_ids))
        turn["routing"] = routing.pack(Shape(experts.shape[1], 2, 8), span, [(0, experts)])
    return row


@pytest.fixture
def verify(tmp_path):
    """(exit code, line over all, lines of turns, faults) of `lego-inspect verify` on rows."""

    def verify(row, *options):
        done = inspect("verify", "--turns", "--json", builders.shard(tmp_path / "a.parquet", [row]), *options)
        slices, turns, faults = read(done)
        return done.returncode, slices["all"], turns, [(fault["turn"], fault["fault"]) for fault in faults]

    return verify


def edited(turn, change):
    """Let `change(experts, valid)` edit a copy of the turn's record in place."""
    experts, valid = (array.copy() for array in routing.unpack(turn["routing"]))
    change(experts, valid)
    turn["routing"] |= {"data": experts.tobytes(), "valid": valid.astype(np.uint8).tobytes()}


def test_recorded_experts_agree_with_the_model(row, verify):
    def swap(experts, valid):
        experts[:] = experts[..., ::-1].copy()  # in which order the experts stand means nothing

    edited(row["turns"][0], swap)
    code, everything, turns, faults = verify(row, "--min-routing", 1)
    assert (code, faults, everything["routing"], everything["routing_equal"]) == (0, [], 1, 1)
    assert [(turn["routing"], turn["routing_equal"]) for turn in turns] == [(1, 1)] * len(SHAPE)


def test_a_greedy_turn_is_compared_too(row, verify):
    row["turns"][2] |= {"support": "greedy", "temperature": 0.0}
    edited(row["turns"][2], lambda experts, valid: np.copyto(experts[1], (experts[1] + 1) % 8))
    code, everything, _, faults = verify(row)
    assert (code, everything["not_comparable"], [turn for turn, _ in faults]) == (4, 3, [2])


def test_rows_that_are_not_valid_are_counted_and_not_compared(row, verify):
    rows = routing.wanted_rows(row["turns"][0])
    for turn in (0, 1):
        edited(row["turns"][turn], lambda experts, valid: (experts.fill(7), valid.fill(False)))
    code, everything, turns, faults = verify(row)
    total = sum(routing.wanted_rows(turn) for turn in row["turns"])
    assert (code, faults, everything["routing_equal"], turns[0]["routing_equal"]) == (0, [], 1, None)
    assert everything["routing"] == pytest.approx(1 - (rows + routing.wanted_rows(row["turns"][1])) / total)
    code, _, _, faults = verify(row, "--min-routing", 0.9)
    assert code == 4 and any("below 0.9" in text for _, text in faults)


def test_a_model_whose_experts_were_not_recorded_has_coverage_0(row, verify):
    for turn in row["turns"]:
        turn["routing"] = None
    code, everything, turns, faults = verify(row)
    assert (code, faults, everything["routing"], everything["routing_equal"]) == (0, [], 0, None)
    assert {turn["routing"] for turn in turns} == {0}


def expert_changed(row):
    """Of one row in one layer: to one that the router ranks lower."""
    edited(row["turns"][1], choose_others)
    return 1, "the experts of 1 of 8 input positions are not the model's; most at position 13"


def choose_others(experts, valid):
    experts[4, -1] = [k for k in range(8) if k not in experts[4, -1]][:2]


def expert_twice(row):
    edited(row["turns"][3], lambda experts, valid: np.copyto(experts[0, 0], experts[0, 0, 0]))
    return 3, "by inf of its router's logits"


def expert_unknown(row):
    edited(row["turns"][0], lambda experts, valid: experts[2, 0].put([0, 1], [0, 8]))
    return 0, "by inf of its router's logits"


def row_dropped(row):
    record = row["turns"][1]["routing"]
    size = len(record["data"]) // record["rows"]
    record |= {"rows": 7, "data": record["data"][size:], "valid": record["valid"][1:]}
    return 1, "7 rows of routing for 8 input positions"


def row_dropped_and_the_last_one_doubled(row):
    def shift(experts, valid):
        experts[2:-1] = experts[3:].copy()

    edited(row["turns"][0], shift)
    return 0, "are not the model's"


def record_dropped(row):
    row["turns"][2]["routing"] = None
    return 2, "no routing record, though other turns"


def layer_dropped(row):
    for turn in row["turns"]:
        experts, _ = routing.unpack(turn["routing"])
        turn["routing"] |= {"layers": experts.shape[1] - 1, "data": experts[:, 1:].tobytes()}
    return 4, "are recorded, and the model has"


def bytes_missing(row):
    row["turns"][4]["routing"]["data"] = row["turns"][4]["routing"]["data"][1:]
    return 4, "its routing record is not rows x layers x topk"


FAULTS = [
    expert_changed, expert_twice, expert_unknown, row_dropped, row_dropped_and_the_last_one_doubled, record_dropped,
    layer_dropped, bytes_missing,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(fault, row, verify):
    turn, text = fault(row)
    code, everything, _, faults = verify(row)
    assert code == 4
    assert any(found == turn and text in words for found, words in faults), faults
    assert everything["compared"] == everything["tokens"]  # the tokens themselves are sound


def test_experts_in_the_record_of_a_dense_model_are_a_fault(tmp_path, verify):
    world = World(tiny_llama(tmp_path / "m"))
    row = counted(world.row("task-a", 0, None))
    for turn in row["turns"]:
        rows = range(routing.wanted_rows(turn))
        turn["routing"] = routing.pack(Shape(2, 2, 4), rows, [(0, np.zeros((len(rows), 2, 2), int))])
    code, _, _, faults = verify(row)
    assert code == 4 and [turn for turn, text in faults if "the model is dense" in text] == [0, 1]


def test_experts_that_are_all_but_tied_are_no_fault_up_to_a_limit(row, verify):
    """A sampler whose rounding differs may choose the other of two such experts."""
    edited(row["turns"][1], choose_others)
    code, everything, turns, _ = verify(row, "--max-gap", 1e6)
    assert code == 0
    assert turns[1]["routing_equal"] == pytest.approx(7 / 8) and everything["routing_equal"] < 1
