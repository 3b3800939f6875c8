"""Token sequences, of which the longest that begins as another does is found.

A tree of what sequences have in common. No token is hashed, so that none is taken for another:

    1 2 3 4 5      [1 2 3] ─┬─ [4 5]          a node: the tokens from its parent's end on; numbers
    1 2 3 6                 └─ [6]            of the sequences that end with it

Tokens are int32 [n]; sequences have numbers, which grow as they are added.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Node:
    """`ends`: the sequences that end here, the oldest first. `newest`: of those that end here or
    below, -1 for none."""

    __slots__ = ("children", "ends", "newest", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: np.ndarray):
        self.parent, self.tokens = parent, tokens.copy()  # what it was cut from may go
        self.children: dict[int, Node] = {}
        self.ends: list[int] = []
        self.newest = -1

    def sequences(self) -> Iterator[int]:
        """All that end here or below."""
        nodes: list[Node] = [self]
        while nodes:
            node = nodes.pop()
            yield from node.ends
            nodes.extend(node.children.values())


class Prefixes:
    def __init__(self) -> None:
        self.root = Node(None, np.zeros(0, np.int32))

    def add(self, tokens: np.ndarray, number: int) -> Node:
        """The node that the sequence ends with; it goes on being that until it is removed."""
        node, at = self.match(tokens)
        if node.parent is not None and (inside := at - _end_of(node.parent)) < len(node.tokens):
            node = self._split(node, inside)
        if at < len(tokens):
            node = self._child(node, tokens[at:])
        node.ends.append(number)
        above: Node | None = node
        while above is not None:
            above.newest, above = number, above.parent
        return node

    def match(self, tokens: np.ndarray) -> tuple[Node, int]:
        """How many of the first tokens some sequence begins with, at most, and the uppermost node
        all of whose sequences do: the root for 0."""
        node, at = self.root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            common = _in_common(child.tokens, tokens[at:])
            node, at = child, at + common
            if common < len(child.tokens):
                break
        return node, at

    def above(self, node: Node) -> tuple[Node, int]:
        """The node that a node, which is not the root, is below, and how many tokens lead to it."""
        assert node.parent is not None
        return node.parent, _end_of(node.parent)

    def remove(self, node: Node, number: int) -> None:
        """Forgets a sequence, which `add` said to end with `node`."""
        node.ends.remove(number)
        above: Node | None = node
        while above is not None and above.newest == number:
            below = (child.newest for child in above.children.values())
            above.newest = max([*above.ends[-1:], *below], default=-1)
            above = above.parent
        self._tidy(node)

    def _child(self, parent: Node, tokens: np.ndarray) -> Node:
        child = parent.children[int(tokens[0])] = Node(parent, tokens)
        return child

    def _split(self, node: Node, inside: int) -> Node:
        """A node of the first tokens of `node`, above it."""
        parent = node.parent
        assert parent is not None
        upper = self._child(parent, node.tokens[:inside])
        node.parent, node.tokens = upper, node.tokens[inside:].copy()
        upper.children[int(node.tokens[0])] = node
        return upper

    def _tidy(self, node: Node) -> None:
        """From `node` upwards: no node without a sequence, and none that only leads to another."""
        while node.parent is not None and not node.ends and len(node.children) < 2:
            parent = node.parent
            if not node.children:
                del parent.children[int(node.tokens[0])]
                node = parent
                continue
            (child,) = node.children.values()
            parent.children[int(node.tokens[0])] = child
            child.parent, child.tokens = parent, np.concatenate([node.tokens, child.tokens])
            return


def _end_of(node: Node) -> int:
    """Tokens from the root to a node's end."""
    total, above = 0, node
    while above.parent is not None:
        total, above = total + len(above.tokens), above.parent
    return total


def _in_common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
