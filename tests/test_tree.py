"""The conversation tree against a naive oracle, on random conversations; each way to break a recorded tree is found."""

import copy

import numpy as np
import pytest
from builders import turn
from hypothesis import given
from hypothesis import strategies as st

from legorl import tree

few_ids = st.lists(st.integers(0, 3), max_size=5)  # few token ids, so that conversations share prefixes by chance too


def turn_at(nodes, prompt, completion):
    """Store a call with this prompt and completion as lego-serve does: placed in the tree, only what is new kept."""
    parent, prefix_len = tree.place(nodes, tree.ids(prompt))
    return turn(
        len(nodes),
        parent,
        prefix_len,
        cause=tree.cause_of(nodes, parent, prefix_len),
        context_ids=prompt[prefix_len:],
        completion_ids=completion,
    )


@st.composite
def conversations(draw):
    """(turns, prompts): turns as recorded, and the whole prompts that they were recorded from."""
    turns, prompts, paths = [], [], []
    for _ in range(draw(st.integers(1, 7))):
        base = draw(st.sampled_from([[], *paths]))
        kept = draw(st.sampled_from([len(base), draw(st.integers(0, len(base)))]))
        prompt = [*base[:kept], *draw(few_ids)] or [0]
        completion = draw(st.lists(st.integers(0, 3), max_size=4))
        turns.append(turn_at(tree.nodes_of(turns), prompt, completion))
        prompts.append(prompt)
        paths.append([*prompt, *completion])
    return turns, prompts


def shared(a, b):
    """Length of the longest common prefix, the slow and obvious way."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@given(conversations())
def test_turns_give_back_prompts_and_paths(conversation):
    turns, prompts = conversation
    nodes = tree.nodes_of(turns)
    tree.check(turns)
    for k, prompt in enumerate(prompts):
        path = [*prompt, *turns[k]["completion_ids"]]
        assert tree.prompt_ids(nodes, k).tolist() == prompt
        assert tree.path_ids(nodes, k).tolist() == path
        assert nodes[k].path_len == len(path)
        for length in range(len(path) + 1):
            assert tree.path_ids(nodes, k, length).tolist() == path[:length]


@given(conversations())
def test_the_parent_shares_the_longest_prefix_and_is_the_earliest_such(conversation):
    turns, prompts = conversation
    paths = [[*prompt, *t["completion_ids"]] for prompt, t in zip(prompts, turns, strict=True)]
    for k, prompt in enumerate(prompts):
        lengths = [shared(prompt, path) for path in paths[:k]]
        best = max(lengths, default=0)
        wanted = (lengths.index(best), best) if best else (tree.ROOT, 0)
        assert (turns[k]["parent"], turns[k]["prefix_len"]) == wanted


@given(conversations())
def test_the_home_of_a_turn_is_the_end_of_a_path_that_holds_all_of_it(conversation):
    """Of several such paths that of the first branch, so that siblings do not hold the turn twice."""
    turns, _ = conversation
    nodes = tree.nodes_of(turns)
    homes = tree.homes(nodes)
    for node, home in zip(nodes, homes, strict=True):
        children = [n for n in nodes if n.parent == node.index and n.prefix_len == node.path_len]
        assert home == (homes[children[0].index] if children else node.index)
        assert tree.path_ids(nodes, home)[: node.path_len].tolist() == tree.path_ids(nodes, node.index).tolist()


@given(conversations())
def test_cause(conversation):
    turns, _ = conversation
    nodes = tree.nodes_of(turns)
    for t in turns:
        whole = t["parent"] != tree.ROOT and t["prefix_len"] == nodes[t["parent"]].path_len
        assert t["cause"] == ("root" if t["parent"] == tree.ROOT else "extend" if whole else "rewrite")


def test_no_turns():
    tree.check([])
    assert tree.homes([]) == []
    assert tree.place([], tree.ids([1])) == (tree.ROOT, 0)


GOOD = [
    turn(0, context_ids=[1, 2, 3], completion_ids=[4, 5]),
    turn(1, 0, 5, context_ids=[6], completion_ids=[7, 8]),
    turn(2, 0, 4, cause="rewrite", context_ids=[9], completion_ids=[4]),
]


def fault_index(turns):
    turns[1]["index"] = 2


def fault_later_parent(turns):
    turns[1]["parent"] = 1


def fault_parent_below_root(turns):
    turns[0]["parent"] = -2


def fault_prefix_beyond_parent(turns):
    turns[1]["prefix_len"] = 6


def fault_root_with_prefix(turns):
    turns[0]["prefix_len"] = 1


def fault_lost_logprob(turns):
    turns[1]["logprobs"].pop()


def fault_version_gap(turns):
    turns[1]["versions"][0]["length"] = 1


def fault_drop_outside(turns):
    turns[1]["drops"] = [{"start": 1, "length": 2, "reason": "cut"}]


def fault_negative_drop(turns):
    turns[1]["drops"] = [{"start": -1, "length": 1, "reason": "cut"}]


def fault_nan(turns):
    turns[1]["logprobs"][0] = float("nan")


def fault_infinite(turns):
    turns[1]["logprobs"][0] = float("-inf")


def fault_positive_logprob(turns):
    turns[1]["logprobs"][0] = 0.01


def fault_shared_tokens_stored_again(turns):
    turns[1]["prefix_len"] = 4
    turns[1]["context_ids"] = [5, 6]


def fault_extension_stored_as_root(turns):
    turns[1] |= {"parent": -1, "prefix_len": 0, "context_ids": [1, 2, 3, 4, 5, 6]}


FAULTS = [value for name, value in list(globals().items()) if name.startswith("fault_")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.removeprefix("fault_"))
def test_check_finds_each_fault(fault):
    turns = copy.deepcopy(GOOD)
    tree.check(turns)
    fault(turns)
    with pytest.raises(tree.TreeError, match="turn"):
        tree.check(turns)


def test_drop_reasons_of_overlapping_spans_are_those_of_the_first():
    one = turn(0, completion_ids=[1, 2, 3, 4])
    one["drops"] = [{"start": 0, "length": 2, "reason": "cut"}, {"start": 1, "length": 2, "reason": "side"}]
    assert tree.drop_reasons(one) == ["cut", "cut", "side", None]


def test_ids_are_int32():
    assert tree.ids([1]).dtype == np.int32
    assert tree.path_ids(tree.nodes_of(GOOD), 1, 0).dtype == np.int32
