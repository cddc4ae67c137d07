"""The order in which the gradients of logical workers are added: one binary tree, on any hosts of its leaves.

[Note: The tree]
The leaves are the logical ranks. A node over ``n`` leaves has on its left the largest power of two below ``n`` of them,
on its right the rest: of 8 leaves ((0 1)(2 3))((4 5)(6 7)), of 6 ((0 1)(2 3))(4 5). A process adds what forms whole
nodes and sends these; the owner of a slice adds the nodes above in the same tree. Every sum has the same two
terms on any number of processes, and so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Generic, TypeVar

Sum = TypeVar("Sum")


@cache
def splits(num_leaves: int) -> dict[tuple[int, int], int]:
    """Returns the tree over ``num_leaves``: for each inner node (its first leaf, one past its last) where it divides.

    Example:
        >>> splits(3)
        {(0, 3): 2, (0, 2): 1}
    """
    found: dict[tuple[int, int], int] = {}
    nodes = [(0, num_leaves)]
    for begin, end in nodes:
        if end - begin < 2:
            continue
        middle = begin + (1 << (end - begin - 1).bit_length() - 1)
        found[begin, end] = middle
        nodes += [(begin, middle), (middle, end)]
    return found


def whole_nodes(num_leaves: int, ranks: range) -> Iterator[tuple[int, int]]:
    """Yields the largest nodes that lie within ``ranks``, from the left.

    Example:
        >>> list(whole_nodes(8, range(3, 6)))
        [(3, 4), (4, 6)]
    """
    stack = TreeStack[None](num_leaves, lambda left, right: None)
    for rank in ranks:
        stack.push((rank, rank + 1), None)
    yield from (node for node, _ in stack.sums)


def kept_sums(num_leaves: int, ranks: range) -> int:
    """Returns how many sums wait, at most, while all of the leaves ``ranks`` but the last are added one by one.

    Example:
        >>> [kept_sums(8, range(size)) for size in (1, 2, 4, 8)]
        [0, 1, 2, 3]
    """
    stack = TreeStack[None](num_leaves, lambda left, right: None)
    most = 0
    for rank in ranks[:-1]:
        stack.push((rank, rank + 1), None)
        most = max(most, len(stack.sums))
    return most


class TreeStack(Generic[Sum]):
    """Sums of nodes of the tree, from the left; two that make up a node are added at once.

    Args:
        num_leaves: the leaves of the whole tree.
        add: returns the sum of a node from those of its left and right parts; may reuse the left one.

    Attributes:
        sums: the nodes that wait for their right neighbour, and their sums.

    Example:
        >>> stack = TreeStack(3, lambda left, right: f"({left}{right})")
        >>> for rank in range(3):
        ...     stack.push((rank, rank + 1), f"{rank}")
        >>> stack.sums
        [((0, 3), '((01)2)')]
    """

    def __init__(self, num_leaves: int, add: Callable[[Sum, Sum], Sum]) -> None:
        self._splits = splits(num_leaves)
        self._add = add
        self.sums: list[tuple[tuple[int, int], Sum]] = []

    def completes(self, node: tuple[int, int]) -> bool:
        """Returns whether ``node`` and the last sum make up a node."""
        if not self.sums:
            return False
        (begin, middle), _ = self.sums[-1]
        return middle == node[0] and self._splits.get((begin, node[1])) == middle

    def push(self, node: tuple[int, int], value: Sum) -> None:
        """Adds ``value``, the sum of ``node``, on the right."""
        while self.completes(node):
            (begin, _), left = self.sums.pop()
            node = begin, node[1]
            value = self._add(left, value)
        self.sums.append((node, value))


def tree_sum(values: list[float]) -> float:
    """Returns the sum of ``values`` in the order of the tree.

    Example:
        >>> tree_sum([1.0, 2.0, 3.0])
        6.0
    """
    stack = TreeStack[float](len(values), lambda left, right: left + right)
    for rank, value in enumerate(values):
        stack.push((rank, rank + 1), value)
    return stack.sums[0][1]
