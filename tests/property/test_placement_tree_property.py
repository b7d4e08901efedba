from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from everstep.base.ports import Node
from everstep.placement.tree import children, cover, fold, fold_order, root


def add(a, b):
    """Neither associative nor commutative: the result spells out how it was made."""
    return (a, b)


def naive_nodes(node: Node) -> list[Node]:
    if node.hi - node.lo == 1:
        return [node]
    return [node, *itertools.chain.from_iterable(naive_nodes(child) for child in children(node))]


def naive_fold(node: Node):
    if node.hi - node.lo == 1:
        return node.lo
    left, right = children(node)
    return add(naive_fold(left), naive_fold(right))


@st.composite
def partitions(draw):
    """(number of lanes, owner of each lane): any partition, runs or not."""
    n = draw(st.integers(1, 17))
    workers = draw(st.integers(1, n))
    return n, draw(st.lists(st.integers(0, workers - 1), min_size=n, max_size=n))


@given(partitions())
def test_any_partition_folds_to_the_same(case):
    n, owner = case
    sums = {}
    for worker in set(owner):
        for node in cover([lane for lane in range(n) if owner[lane] == worker], n):
            sums[node] = naive_fold(node)
    for left, right, into in fold_order(n, sums):
        sums[into] = add(sums.pop(left), sums.pop(right))
    expected = naive_fold(root(n))
    assert sums == {root(n): expected}
    assert fold(n, {lane: lane for lane in range(n)}, add) == expected


@given(st.integers(1, 17), st.data())
def test_cover_is_the_set_of_maximal_nodes(n, data):
    lanes = data.draw(st.sets(st.integers(0, n - 1)))
    inside = [node for node in naive_nodes(root(n)) if set(range(node.lo, node.hi)) <= lanes]
    maximal = [a for a in inside if not any(b != a and b.lo <= a.lo and a.hi <= b.hi for b in inside)]
    assert list(cover(lanes, n)) == sorted(maximal)


@given(st.integers(1, 17), st.data())
def test_fold_drops_absent_lanes(n, data):
    present = data.draw(st.sets(st.integers(0, n - 1), min_size=1))

    def naive(node):
        if node.hi - node.lo == 1:
            return [node.lo] if node.lo in present else []
        parts = [part for child in children(node) for part in naive(child)]
        return [add(*parts)] if len(parts) == 2 else parts

    assert [fold(n, {lane: lane for lane in present}, add)] == naive(root(n))
