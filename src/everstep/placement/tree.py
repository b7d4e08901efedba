"""The one fixed binary tree over the lanes: which lanes are added to which, in any placement. Pure.

Floating-point addition is not associative, so the bits of a sum are those of its tree. This tree depends on the number
of lanes alone. A worker adds up every complete subtree that it holds (`cover`), the finisher of the tree does the
remaining merges (`fold_order`), and the result equals that of one worker doing everything (`fold`).

The shape is that of RFC 6962, section 2.1: aligned runs of a power of two are nodes for any number of lanes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

from everstep.base.errors import InvariantViolation, check
from everstep.base.ports import Node

T = TypeVar("T")


class Merge(NamedTuple):
    """Add the sum of `right` to the sum of `left`; the result is the sum of `into`, their parent."""

    left: Node
    right: Node
    into: Node


def root(n_lanes: int) -> Node:
    """The node of all lanes."""
    check(n_lanes >= 1, f"a lane tree has at least 1 lane, got {n_lanes}")
    return Node(0, n_lanes)


@lru_cache(maxsize=65536)
def children(node: Node) -> tuple[Node, Node]:
    """The two parts of an inner node: the left has the largest power of two of lanes that leaves some for the right."""
    size = node.hi - node.lo
    check(size > 1, f"a leaf has no children: {node}")
    middle = node.lo + (1 << ((size - 1).bit_length() - 1))
    return Node(node.lo, middle), Node(middle, node.hi)


def cover(lanes: Iterable[int], n_lanes: int) -> tuple[Node, ...]:
    """Maximal nodes all of whose lanes are in the set, ascending: the sums of a worker with these lanes."""
    ascending = sorted(set(lanes))
    top = root(n_lanes)
    if not ascending:
        return ()
    check(ascending[0] >= 0 and ascending[-1] < n_lanes, f"lanes {ascending} are not all in 0..{n_lanes - 1}")
    found: list[Node] = []
    _cover(top, ascending, 0, len(ascending), found)
    return tuple(found)


def _cover(node: Node, lanes: list[int], first: int, last: int, found: list[Node]) -> None:
    """`lanes[first:last]` are those of the set inside `node`; recursion is as deep as the tree (log2 of the lanes)."""
    if first == last:
        return
    if last - first == node.hi - node.lo:
        found.append(node)
        return
    left, right = children(node)
    middle = bisect_left(lanes, left.hi, first, last)
    _cover(left, lanes, first, middle, found)
    _cover(right, lanes, middle, last, found)


@lru_cache(maxsize=65536)
def run_nodes(lo: int, hi: int, n_lanes: int) -> int:
    """Number of nodes that cover the run lo..hi-1: the sums that a worker with this run has to hand over."""
    return len(cover(range(lo, hi), n_lanes))


@lru_cache(maxsize=65536)
def path_to(top: Node, lane: int) -> tuple[Node, ...]:
    """The nodes from `top` down to the lane."""
    path = [top]
    while path[-1].hi - path[-1].lo > 1:
        left, right = children(path[-1])
        path.append(left if lane < left.hi else right)
    return tuple(path)


def fold_order(n_lanes: int, nodes: Iterable[Node]) -> list[Merge]:
    """Merges that finish the tree from disjoint nodes that together cover all lanes, children before parents.

    Raises: InvariantViolation if they are not nodes of this tree, overlap, or leave lanes out.
    """
    given = list(nodes)
    held = set(given)
    if len(held) != len(given):
        raise InvariantViolation(f"a node was given twice: {sorted(given)}")
    merges: list[Merge] = []
    used = _descend(root(n_lanes), held, merges)
    if used != len(held):
        raise InvariantViolation(f"nodes overlap or are not of the tree over {n_lanes} lanes: {sorted(held)}")
    return merges


def _descend(node: Node, held: set[Node], merges: list[Merge]) -> int:
    """Append the merges below and at `node` in postorder; returns the number of held nodes that they use."""
    if node in held:
        return 1
    if node.hi - node.lo == 1:
        raise InvariantViolation(f"lane {node.lo} is covered by no node of {sorted(held)}")
    left, right = children(node)
    used = _descend(left, held, merges) + _descend(right, held, merges)
    merges.append(Merge(left, right, node))
    return used


def fold(n_lanes: int, values: Mapping[int, T], add: Callable[[T, T], T]) -> T:
    """The reference: one value per lane, added along the whole tree. Absent lanes are the identity, not a zero.

    Raises: InvariantViolation if there is no value at all, or one of a lane that does not exist.
    """
    check(len(values) > 0, "a fold needs at least one value")
    if min(values) < 0 or max(values) >= n_lanes:
        raise InvariantViolation(f"lanes {sorted(values)} are not all in 0..{n_lanes - 1}")
    return _fold(root(n_lanes), values, add)[0]


def _fold(node: Node, values: Mapping[int, T], add: Callable[[T, T], T]) -> tuple[T, ...]:
    """The sum of the node; nothing if all its lanes are absent."""
    if node.hi - node.lo == 1:
        return (values[node.lo],) if node.lo in values else ()
    left, right = children(node)
    first, second = _fold(left, values, add), _fold(right, values, add)
    return (add(first[0], second[0]),) if first and second else first or second


def total_sumsq(values: Iterable[float]) -> float:
    """Sum of block norms, exactly rounded (so their order and grouping do not matter). NaN and inf pass through."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # inf - inf
        return math.nan
