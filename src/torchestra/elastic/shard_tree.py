"""The fixed tree by which the shards of a step are summed, whoever computes them.

Floating-point addition is not associative, so a sum has the same bits on any number of ranks only if its
parentheses are the same. Here they are a binary tree over the shards of a step, as in pairwise summation
(Higham 1993): the sum of consecutive shards is that of the first half plus that of the rest. A rank may add
up whatever subtrees it has whole, and keeps one tensor for each: two to the power of n ranks that divide the
shards equally have one each, and a rank with any consecutive ones at most 2 log2(shards), not one a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

Node = tuple[int, int]
"""The shards of a subtree: the first one, and the one after the last."""

_Value = TypeVar("_Value")


class _Relatives(NamedTuple):
    """Name the parent of a node, and the node that is added to it."""

    parent: Node
    sibling: Node


class ShardTree:
    """Know the tree over a number of shards.

    Attributes:
        root: the node of all shards.
    """

    def __init__(self, shards: int) -> None:
        self.root: Node = (0, shards)
        self._children: dict[Node, tuple[Node, Node]] = {}
        self._upwards: dict[Node, _Relatives] = {}
        self._divide(self.root)

    def _divide(self, node: Node) -> None:
        first, end = node
        if end - first == 1:
            return
        middle = (first + end) // 2
        left, right = (first, middle), (middle, end)
        self._children[node] = left, right
        self._upwards[left], self._upwards[right] = _Relatives(node, right), _Relatives(node, left)
        self._divide(left)
        self._divide(right)

    def cover(self, shards: Collection[int]) -> list[Node]:
        """Return the largest subtrees of which all shards are given, in their order."""
        return self._cover(self.root, frozenset(shards))

    def _cover(self, node: Node, shards: frozenset[int]) -> list[Node]:
        have = sum(each in shards for each in range(*node))
        if have == node[1] - node[0]:
            return [node]
        if have == 0:
            return []
        return [part for child in self._children[node] for part in self._cover(child, shards)]

    def insert(
        self, values: dict[Node, _Value], node: Node, value: _Value, add: Callable[[_Value, _Value], _Value]
    ) -> None:
        """Enter the value of a node, and add up what it makes whole.

        Args:
            values: by node; siblings in it are replaced by their parent.
            node, value: the node, whose shards ``values`` does not have, and its value.
            add: returns the sum of two siblings, given in any order (of two numbers the sum has the same
                bits in both); it may overwrite either.
        """
        while (above := self._upwards.get(node)) is not None and (near := above.sibling) in values:
            value = add(values.pop(near), value)
            node = above.parent
        values[node] = value


def assign(done: list[frozenset[int]], shards: int) -> list[list[int]]:
    """Return which shards each rank is to compute, by rank; all ranks find the same.

    Args:
        done: by rank, the shards that it has computed already.
        shards: how many there are.
    """
    have = frozenset().union(*done)
    missing = [shard for shard in range(shards) if shard not in have]
    ranks = len(done)
    if not have:
        return [list(range(rank * shards // ranks, (rank + 1) * shards // ranks)) for rank in range(ranks)]
    wanted: list[list[int]] = [[] for _ in done]
    for shard in missing:  # to whoever has the fewest; the lowest of these
        rank = min(range(ranks), key=lambda each: (len(done[each]) + len(wanted[each]), each))
        wanted[rank].append(shard)
    return wanted
