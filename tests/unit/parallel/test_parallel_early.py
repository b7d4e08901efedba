"""A reduction on one host that begins before `reduce`: the same bits, and nodes whose memory is given back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from parallel_cases import fill, layout, member, plan_of, reduce_step, reference, same_bits, together
from torch.distributed import HashStore

from everstep.base.errors import InvariantViolation
from everstep.base.extents import Runs
from everstep.base.plan import Plan, Shard, WorkerKey
from everstep.base.ports import Node, Reduced
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.parallel.group import GroupTransport
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.placement.tree import cover

LANES = 8
SHAPE = layout()
HOLDERS = tuple(Shard(i, 0, segments=((64 * i, 64 * i + 64),)) for i in range(4))
TAKES: dict[int, Runs] = {0: ((0, 2), (4, 5)), 1: ((0, 4),), 2: ((2, 5), (6, 7)), 3: ((5, 7),)}
LARGE = layout(33)
OF_LARGE: dict[int, Runs] = {0: ((0, 9),), 1: ((9, 18),), 2: ((18, 27),), 3: ((27, 33),)}
OF_LARGE_LATER: dict[int, Runs] = {0: ((0, 12),), 2: ((12, 27),), 3: ((20, 33),)}
TAKEN_LATER: dict[int, Runs] = {0: ((0, 4),), 2: ((2, 7),), 3: ((4, 6),)}
Rows = dict[int, dict[Node, bytes]]


class Host:
    """Members of one host in this process."""

    def __init__(self) -> None:
        self.transports: dict[int, SharedMemoryTransport] = {}
        self.plan = plan_of(1, [], 0, [])

    def open(self, generation: int, ids: Sequence[int], runs: list[tuple[int, ...]] | None = None) -> Plan:
        for i in ids:
            if i not in self.transports:
                self.transports[i] = SharedMemoryTransport(WorkerKey(i, 0), SHAPE, LANES, lambda: None)
        people = [member(self.transports[i], WorkerKey(i, 0), os.getpid()) for i in ids]
        self.plan = replace(plan_of(generation, people, LANES, runs), shards=HOLDERS)
        assert together(*(lambda i=i: self.transports[i].open(self.plan) for i in ids)) == [None] * len(ids)
        return self.plan

    def divide(self, step: int, takes: dict[int, Runs] | None = TAKES) -> None:
        for i in self.plan.worker_ids:
            self.transports[i].divide(step, takes, frees=True)

    def fill(self, step: int, ids: Sequence[int]) -> Rows:
        return {i: fill(self.transports[i], SHAPE, step, cover(self.plan.lanes_of(i), LANES)) for i in ids}

    def offer(self, step: int, rows: Rows) -> None:
        """All blocks but the first one, which some lanes lack; then each does its part, and looks what others did."""
        for _ in range(3):
            for i, nodes in rows.items():
                offer = self.transports[i].offering(step)
                assert offer is not None
                for node in nodes:
                    offer(node, 1, SHAPE.n_blocks)

    def kept(self, step: int, i: int) -> list[int]:
        """Blocks of a member's nodes that hold something."""
        nodes = [
            self.transports[i].node(step, node).split(BLOCK_ELEMENTS) for node in cover(self.plan.lanes_of(i), LANES)
        ]
        return [k for k in range(SHAPE.n_blocks) if any(bool(node[k].any()) for node in nodes)]

    def reduce(self, step: int, rows: Rows) -> list[Reduced]:
        found = together(*(lambda i=i: self.transports[i].reduce(step, rows[i]) for i in rows))
        assert all(isinstance(one, Reduced) for one in found), found
        return found  # type: ignore[return-value]


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host()
    yield found
    for transport in found.transports.values():
        transport.close()


def check_parts(
    reduced: Sequence[Reduced],
    step: int,
    takes: dict[int, Runs] | None,
    ids: Sequence[int],
    shape: GradientLayout = SHAPE,
) -> None:
    expected, present = reference(shape, LANES, step)
    for i, one in zip(ids, reduced, strict=True):
        there = [block for p in one.pieces for block in range(p.start // BLOCK_ELEMENTS, p.stop // BLOCK_ELEMENTS)]
        taken = ((0, shape.n_blocks),) if takes is None else takes[i]
        assert one.presence == present and there == [block for run in taken for block in range(*run)]
        assert all(same_bits(p.data, expected[p.start : p.stop]) for p in one.pieces)


@pytest.mark.parametrize("runs", [None, [(0,), (1, 2, 3), (4, 5, 6), (7,)], [(0, 2), (1, 3), (4, 6), (5, 7)]])
def test_sums_are_given_back_as_soon_as_they_are_added_up(host: Host, runs: list[tuple[int, ...]] | None) -> None:
    ids = host.open(1, [0, 1, 2, 3], runs).worker_ids
    for step, takes in ((1, None), (2, TAKES), (3, TAKES), (5, TAKES)):
        host.divide(step, takes)
        rows = host.fill(step, ids)
        host.offer(step, rows)
        assert all(host.kept(step, i) in ([], [0]) for i in ids)  # the first block has entries that no lane had
        check_parts(host.reduce(step, rows), step, takes, ids)
        assert not any(host.kept(step, i) for i in ids)
        assert not any(transport.given_back(step) for transport in host.transports.values())


def test_what_was_given_back_is_filled_again_in_another_generation(host: Host) -> None:
    """The one that added up blocks is dead; results that were there stay as they are."""
    ids = host.open(1, [0, 1, 2, 3]).worker_ids
    host.divide(2)
    rows = host.fill(2, ids)
    host.offer(2, rows)
    before = host.reduce(2, rows)
    left = host.open(2, [0, 2, 3]).worker_ids
    of_three = {i: host.transports[i].given_back(2) for i in left}
    assert of_three == {i: frozenset(rows[i]) for i in left}
    assert not any(host.transports[i].given_back(2) for i in left)  # told once
    host.divide(2, TAKEN_LATER)
    again = host.fill(2, left)
    host.offer(2, again)
    check_parts(host.reduce(2, again), 2, TAKEN_LATER, left)
    check_parts(before, 2, TAKES, ids)


def test_nodes_that_nobody_has_added_up_stay(host: Host) -> None:
    ids = host.open(1, [0, 1, 2, 3]).worker_ids
    host.divide(2)
    rows = host.fill(2, ids)
    host.offer(2, {i: rows[i] for i in (0, 1, 2)})
    assert all(host.kept(2, i)[-6:] == [1, 2, 3, 4, 5, 6] for i in ids)
    host.open(2, [0, 1, 2, 3])
    assert not any(transport.given_back(2) for transport in host.transports.values())
    host.divide(2)
    check_parts(host.reduce(2, rows), 2, TAKES, ids)


def test_nobody_overwrites_the_result_that_a_member_without_lanes_may_still_use(host: Host) -> None:
    ids = host.open(1, [0, 1, 2, 3], [(0, 1), (2, 3, 4), (5, 6, 7), ()]).worker_ids
    host.divide(2)
    results = host.reduce(2, host.fill(2, ids))
    host.divide(3)
    rows = host.fill(3, ids)
    host.offer(3, {i: rows[i] for i in (0, 1, 2)})
    check_parts(results, 2, TAKES, ids)
    check_parts(host.reduce(3, rows), 3, TAKES, ids)


def test_a_step_is_not_reduced_again_from_memory_that_was_given_back(host: Host) -> None:
    ids = host.open(1, [0, 1, 2, 3]).worker_ids
    host.divide(2)
    rows = host.fill(2, ids)
    host.reduce(2, rows)
    with pytest.raises(InvariantViolation, match="step 2 is reduced again"):
        host.transports[0].reduce(2, rows[0])


def test_over_sockets_sums_are_given_back_once_they_have_left() -> None:
    store, transports = HashStore(), dict[int, GroupTransport]()
    for i in range(4):
        key = WorkerKey(i, 0)
        transports[i] = GroupTransport(key, LARGE, LANES, store, lambda: None, key=b"k" * 32)

    def reduced(generation: int, ids: Sequence[int], takes: dict[int, Runs], step: int) -> None:
        people = [member(transports[i], WorkerKey(i, 0), os.getpid()) for i in ids]
        plan = replace(plan_of(generation, people, LANES), shards=HOLDERS)
        assert together(*(lambda i=i: transports[i].open(plan) for i in ids)) == [None] * len(ids)
        lost = [transports[i].given_back(step) for i in ids]
        assert lost == [frozenset(cover(range(2 * i, 2 * i + 2), LANES)) for i in ids if generation == 2] or not any(
            lost
        )
        for i in ids:
            transports[i].divide(step, takes, frees=True)
        found = together(*(lambda i=i: reduce_step(transports[i], LARGE, plan, i, step) for i in ids))
        check_parts(found, step, takes, ids, LARGE)  # type: ignore[arg-type]
        for i in ids:
            node = transports[i].node(step, cover(plan.lanes_of(i), LANES)[0])
            until = time.monotonic() + 60
            while bool(node.any()):  # a thread that sends gives it back
                assert time.monotonic() < until
                time.sleep(0.001)

    reduced(1, range(4), OF_LARGE, 2)
    reduced(2, (0, 2, 3), OF_LARGE_LATER, 2)
    reduced(3, (0, 2, 3), OF_LARGE_LATER, 3)
    for transport in transports.values():
        transport.close()
