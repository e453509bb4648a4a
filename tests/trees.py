"""Conversation trees for hypothesis."""

import numpy as np
from builders import turn
from hypothesis import strategies as st

from legorl import tree


@st.composite
def trees(draw):
    """Turns that share any prefix with any earlier turn, over few tokens, so that coincidences happen."""
    turns = []
    for index in range(draw(st.integers(1, 7))):
        nodes = tree.nodes_of(turns)
        parent = draw(st.integers(-1, index - 1))
        length = 0 if parent < 0 else draw(st.integers(0, nodes[parent].path_len))
        context = draw(st.lists(st.integers(0, 2), min_size=0 if length else 1, max_size=4))
        prompt = np.concatenate(
            [tree.path_ids(nodes, parent, length) if parent >= 0 else tree.ids([]), tree.ids(context)]
        )
        parent, length = tree.place(nodes, prompt)
        completion = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        turns.append(turn(index, parent, length, completion_ids=completion) | {"context_ids": prompt[length:].tolist()})
    return turns
