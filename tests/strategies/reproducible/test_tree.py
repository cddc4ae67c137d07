"""The tree of logical ranks: its shape, and one and the same tree on any number of hosts. Sums are texts here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.job.logical_workers import hosted_ranks
from fleet.strategies.reproducible.tree import TreeStack, splits, tree_sum, whole_nodes
from tests.strategies.reproducible.turns import summed

SIZES = range(1, 21)


class Text(str):
    """A sum that shows its order."""

    def __add__(self, other: str) -> Text:
        return Text(f"({self}+{other})")


def stack_of(num: int) -> TreeStack[Text]:
    return TreeStack(num, lambda left, right: left + right)


@pytest.mark.parametrize(
    ("num", "tree"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_shapes(num: int, tree: str) -> None:
    """Acceptance 4: another order of the tree fails here."""
    stack = stack_of(num)
    for rank in range(num):
        stack.push((rank, rank + 1), Text(rank))
    assert stack.sums == [((0, num), tree)]
    assert summed([Text(rank) for rank in range(num)]) == tree  # the definition, by recursion


@pytest.mark.parametrize("num", SIZES)
def test_any_number_of_hosts_makes_one_tree(num: int) -> None:
    """A host adds its leaves, and an owner of a slice adds what the hosts send."""
    expected = summed([Text(rank) for rank in range(num)])
    for num_hosts in range(1, num + 1):
        whole = stack_of(num)
        for host in range(num_hosts):
            own = stack_of(num)
            ranks = hosted_ranks(num, num_hosts, host)
            for rank in ranks:
                own.push((rank, rank + 1), Text(rank))
            assert [node for node, _ in own.sums] == [*whole_nodes(num, ranks)]
            for node, value in own.sums:
                whole.push(node, value)
        assert whole.sums == [((0, num), expected)], num_hosts


@pytest.mark.parametrize("num", SIZES)
def test_a_host_keeps_few_sums(num: int) -> None:
    """At most log2(V / N) + 1 where V and N are powers of two, and never more than twice the depth of the tree."""
    for num_hosts in range(1, num + 1):
        for host in range(num_hosts):
            ranks = hosted_ranks(num, num_hosts, host)
            own = stack_of(num)
            most = 0
            for rank in ranks:
                own.push((rank, rank + 1), Text(rank))
                most = max(most, len(own.sums))
            powers = num & (num - 1) == 0 and num_hosts & (num_hosts - 1) == 0
            assert len(own.sums) == 1 or not powers
            assert most <= (len(ranks).bit_length() if powers else 2 * len(ranks).bit_length())


@given(st.integers(1, 20), st.data())
def test_whole_nodes_cover_any_ranks(num: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, num - 1))
    ranks = range(first, data.draw(st.integers(first + 1, num)))
    nodes = [*whole_nodes(num, ranks)]
    assert [rank for begin, end in nodes for rank in range(begin, end)] == [*ranks]
    known = {*splits(num), *((rank, rank + 1) for rank in range(num))}
    assert known.issuperset(nodes)
    assert all((a, d) not in known for (a, b), (_, d) in zip(nodes, nodes[1:], strict=False))


def test_splits_are_the_largest_powers_of_two_below() -> None:
    assert splits(1) == {}
    assert splits(6) == {(0, 6): 4, (0, 4): 2, (4, 6): 5, (0, 2): 1, (2, 4): 3}


def test_a_node_beside_another_waits() -> None:
    stack = stack_of(4)
    assert not stack.completes((1, 2))
    stack.push((1, 2), Text(1))
    assert not stack.completes((2, 3))
    stack.push((2, 3), Text(2))
    assert stack.completes((3, 4))
    stack.push((3, 4), Text(3))
    assert stack.sums == [((1, 2), "1"), ((2, 4), "(2+3)")]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_numbers_are_added_in_the_tree(values: list[float]) -> None:
    assert tree_sum(values) == summed(values)


def test_the_order_shows_in_the_bits() -> None:
    values = [1e16, 1.0, -1e16, 1.0, 1.0]
    assert tree_sum(values) == summed(values) == 1.0
    assert sum(values) == 2.0
