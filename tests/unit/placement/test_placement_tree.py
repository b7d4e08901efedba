from __future__ import annotations

import pytest

from everstep.base.errors import InvariantViolation
from everstep.base.ports import Node
from everstep.placement.tree import Merge, children, cover, fold, fold_order, root, run_nodes, total_sumsq


def test_children_split_at_the_largest_power_of_two_below_the_size():
    assert children(Node(0, 2)) == (Node(0, 1), Node(1, 2))
    assert children(Node(0, 3)) == (Node(0, 2), Node(2, 3))
    assert children(Node(0, 8)) == (Node(0, 4), Node(4, 8))
    assert children(Node(8, 13)) == (Node(8, 12), Node(12, 13))
    with pytest.raises(InvariantViolation):
        children(Node(3, 4))


def test_cover_takes_maximal_nodes():
    assert cover(range(8), 8) == (Node(0, 8),)
    assert cover([1, 2, 3], 8) == (Node(1, 2), Node(2, 4))
    assert cover([7, 0, 1, 5, 4], 8) == (Node(0, 2), Node(4, 6), Node(7, 8))
    assert cover([4], 5) == (Node(4, 5),)
    assert cover([4, 5, 6], 7) == (Node(4, 7),)  # the right edge is a node too
    assert cover([], 8) == ()
    assert run_nodes(1, 4, 8) == 2


def test_the_sum_of_norms_does_not_depend_on_their_order():
    values = [1.0] + [2.0**-54] * 5
    assert total_sumsq(values) == total_sumsq(values[::-1]) == 1.0 + 2.0**-52


def test_cover_refuses_lanes_that_do_not_exist():
    for lanes in ([8], [-1, 0]):
        with pytest.raises(InvariantViolation):
            cover(lanes, 8)


def test_fold_order_is_postorder():
    order = fold_order(4, [Node(0, 1), Node(1, 2), Node(2, 4)])
    assert order == [
        Merge(Node(0, 1), Node(1, 2), Node(0, 2)),
        Merge(Node(0, 2), Node(2, 4), Node(0, 4)),
    ]
    assert fold_order(4, [root(4)]) == []


@pytest.mark.parametrize(
    "nodes",
    [
        [Node(0, 2)],  # lanes left out
        [Node(0, 4), Node(0, 2)],  # overlap
        [Node(0, 2), Node(2, 4), Node(2, 4)],  # twice
        [Node(0, 1), Node(1, 3), Node(3, 4)],  # no node of the tree
    ],
)
def test_fold_order_refuses_what_does_not_tile_the_tree(nodes):
    with pytest.raises(InvariantViolation):
        fold_order(4, nodes)


def test_fold_follows_the_tree_and_absent_lanes_are_the_identity():
    def add(a, b):
        return f"({a}{b})"

    assert fold(5, dict(enumerate("abcde")), add) == "(((ab)(cd))e)"
    assert fold(5, {1: "b", 2: "c", 4: "e"}, add) == "((bc)e)"
    assert fold(1, {0: "a"}, add) == "a"
    assert fold(3, {2: -0.0}, lambda a, b: a + b).hex() == "-0x0.0p+0"
    with pytest.raises(InvariantViolation):
        fold(3, {}, add)
    with pytest.raises(InvariantViolation):
        fold(3, {3: "d"}, add)
