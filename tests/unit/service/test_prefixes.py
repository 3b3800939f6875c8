"""The longest prefix that is there, against a search through all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_rl.service.prefixes import Node, Prefixes

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def in_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_tree(tree: Prefixes, there: dict[int, list[int]]) -> None:
    """All that is there is in it once, by its own tokens, and no node is there for nothing."""
    found: dict[int, list[int]] = {}

    def walk(node: Node, before: list[int]) -> None:
        mine = before + node.tokens.tolist()
        for number in node.ends:
            assert number not in found
            found[number] = mine
        if node.parent is not None:
            assert len(node.tokens) and (node.ends or len(node.children) > 1)
        for token, child in node.children.items():
            assert child.parent is node and child.tokens[0] == token
            walk(child, mine)
        assert node.newest == max(node.sequences(), default=-1)

    walk(tree.root, [])
    assert found == there


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(TOKENS, st.booleans()), max_size=12),
    st.lists(TOKENS, min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_any_order_of_adding_and_removing_keeps_what_is_there(steps, asked, draw):
    tree, there, nodes = Prefixes(), dict[int, list[int]](), dict[int, Node]()
    for number, (tokens, removes) in enumerate(steps):
        nodes[number] = tree.add(np.array(tokens, np.int32), number)
        there[number] = tokens
        if removes:
            gone = draw.choice(sorted(there))
            tree.remove(nodes.pop(gone), gone)
            del there[gone]
        check_tree(tree, there)
    for tokens in [*asked, *there.values()]:
        node, common = tree.match(np.array(tokens, np.int32))
        lengths = {number: in_common(tokens, one) for number, one in there.items()}
        assert common == max(lengths.values(), default=0)
        if common:
            as_long = {number for number, length in lengths.items() if length == common}
            assert set(node.sequences()) == as_long and node.newest == max(as_long)
        else:
            assert node is tree.root


def test_what_a_sequence_was_cut_from_is_not_kept():
    whole = np.arange(1000, dtype=np.int32)
    node = Prefixes().add(whole[:10], 0)
    assert node.tokens.base is None
