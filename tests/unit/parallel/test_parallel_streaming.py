"""Blocks that leave before the reduction: the same bits whenever they leave, and nothing of a generation that ended."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from parallel_cases import fill, layout, member, plan_of, reference, same_bits, together, whole
from torch.distributed import HashStore

from everstep.base.config_keys import TlsConfig
from everstep.base.errors import CollectiveAborted, ProtocolError
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Node, Reduced
from everstep.exact.layout import BLOCK_ELEMENTS
from everstep.parallel.group import GroupTransport
from everstep.parallel.reduction import BlockFinisher
from everstep.parallel.socket_mesh import BlockNote
from everstep.parallel.streaming import LEAVING_BLOCKS, BlockCut, BlockStream, StepBlocks
from everstep.placement.shards import Division
from everstep.placement.tree import cover
from everstep.runtime.link.tls import Tls, shown_by

LANES = 8
SHAPE = layout(11)
BLOCKS = SHAPE.n_blocks


class Crew:
    """Members of one pool over sockets of our own, all in this process."""

    def __init__(self, tls: bool) -> None:
        self._store = HashStore()
        self._tls = Tls.of(shown_by(TlsConfig("on"), b"t" * 32, "127.0.0.1")) if tls else None
        self.transports: dict[int, GroupTransport] = {}
        self._filled: dict[tuple[int, int, int], dict[Node, bytes]] = {}

    def open(self, generation: int, ids: Sequence[int], runs: list[tuple[int, ...]] | None = None) -> Plan:
        for i in ids:
            if i not in self.transports:
                self.transports[i] = GroupTransport(
                    *(WorkerKey(i, 0), SHAPE, LANES, self._store, lambda: None), key=b"k" * 32, tls=self._tls
                )
        members = [member(self.transports[i], WorkerKey(i, 0), os.getpid()) for i in ids]
        plan = plan_of(generation, members, LANES, runs)
        opened = together(*(lambda i=i: self.transports[i].open(plan) for i in ids))
        assert opened == [None] * len(opened)
        return plan

    def offer(self, plan: Plan, i: int, step: int, draw: random.Random, share: float = 1.0) -> None:
        """Some of the blocks in which nothing is absent, in any order."""
        presence = self.fill(plan, i, step)
        offer = self.transports[i].offering(step)
        assert offer is not None
        runs = [(node, *run) for node in presence for run in whole_runs(presence[node])]
        for node, first, last in draw.sample(runs, round(share * len(runs))):
            offer(node, first, last)

    def fill(self, plan: Plan, i: int, step: int) -> dict[Node, bytes]:
        """Once: what has been offered does not change any more."""
        key = (plan.generation, i, step)
        if key not in self._filled:
            self._filled[key] = fill(self.transports[i], SHAPE, step, cover(plan.lanes_of(i), LANES))
        return self._filled[key]

    def reduce_one(self, plan: Plan, i: int, step: int) -> Reduced:
        return self.transports[i].reduce(step, self.fill(plan, i, step))

    def reduce(self, plan: Plan, step: int) -> None:
        calls = [lambda i=i: self.reduce_one(plan, i, step) for i in plan.worker_ids]
        expected, present = reference(SHAPE, LANES, step)
        for found in together(*calls):
            assert isinstance(found, Reduced), found
            assert found.presence == present and same_bits(whole(found), expected)


def whole_runs(row: bytes) -> list[tuple[int, int]]:
    """Single blocks, and one long run."""
    first = 0 if row[0] and row[1] else 1
    return [(k, k + 1) for k in range(first, 5)] + ([(5, BLOCKS)] if row[2] else [])


@pytest.fixture(params=["clear", "tls"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    found = Crew(request.param == "tls")
    yield found
    for transport in found.transports.values():
        transport.close()


RUNS: list[list[tuple[int, ...]] | None] = [None, [(0, 3, 5), (1, 2, 4, 6, 7), ()], [(0, 1, 2), (3, 4), (5, 6, 7)]]


@pytest.mark.parametrize("runs", RUNS)
def test_whatever_left_before_the_bits_are_the_same(crew: Crew, runs: list[tuple[int, ...]] | None) -> None:
    plan = crew.open(1, [0, 1, 2], runs)
    draw = random.Random(7)
    for step, share in ((1, 1.0), (2, 0.5), (3, 0.0), (4, 1.0), (5, 1.0)):
        early = draw.sample(plan.worker_ids, draw.randint(1, 3))
        for i in early:
            crew.offer(plan, i, step, draw, share)
        crew.reduce(plan, step)


def test_what_has_left_in_a_generation_that_ends_counts_for_nothing(crew: Crew) -> None:
    """Nodes of other lanes come in the next one, for the same step."""
    draw = random.Random(3)
    plan = crew.open(1, [0, 1, 2])
    crew.reduce(plan, 1)
    for i in plan.worker_ids:
        crew.offer(plan, i, 2, draw, share=0.0 if i == 2 else 0.6)
    for i in (0, 1):
        crew.transports[i].abort(1)
        with pytest.raises(CollectiveAborted):
            crew.reduce_one(plan, i, 2)
    plan = crew.open(2, [0, 1])
    crew.offer(plan, 1, 2, draw)
    crew.reduce(plan, 2)
    crew.transports[2].abort(1)
    plan = crew.open(3, [0, 1, 2])
    crew.offer(plan, 2, 3, draw)
    crew.reduce(plan, 3)


def test_offers_after_the_end_of_a_generation_do_nothing(crew: Crew) -> None:
    plan = crew.open(1, [0, 1])
    for transport in crew.transports.values():
        transport.abort(1)
    crew.offer(plan, 0, 1, random.Random(1))
    with pytest.raises(CollectiveAborted):
        crew.reduce_one(plan, 0, 1)


def test_nobody_offers_to_himself_alone() -> None:
    crew = Crew(tls=False)
    crew.open(1, [4])
    assert crew.transports[4].offering(1) is None
    crew.transports[4].close()


# ---- what a member may send


def step_blocks() -> StepBlocks:
    return StepBlocks(((2, 6),), 8, LANES, lambda: torch.empty(0))


def test_a_block_can_be_finished_once_all_lanes_of_it_are_there() -> None:
    blocks = step_blocks()
    blocks.add(0, Node(0, 4), torch.empty(0), 0)
    blocks.add(1, Node(4, 8), torch.empty(0), 0)
    assert blocks.come(Node(0, 4), 2, 5, whole=True) == []
    assert blocks.come(Node(4, 8), 3, 5, whole=True) == [3, 4]
    assert blocks.come(Node(4, 8), 2, 3, whole=False) == []
    assert blocks.tell() == [2]
    assert blocks.come(Node(0, 4), 5, 6, whole=False) == [] and blocks.come(Node(4, 8), 5, 6, whole=True) == [5]


def test_own_blocks_leave_once() -> None:
    blocks = step_blocks()
    assert blocks.leave(Node(0, 4), 3, 5) == ((3, 5),)
    assert blocks.leave(Node(0, 4), 0, 8) == ((0, 3), (5, 8))
    assert blocks.leave(Node(0, 4), 0, 8) == ()
    assert blocks.leave(Node(4, 6), 0, 8) == ((0, 8),)


@pytest.mark.parametrize("node", [Node(3, 5), Node(0, 4), Node(7, 9), Node(5, 5), Node(6, 4)])
def test_lanes_that_others_have_or_that_do_not_exist_are_refused(node: Node) -> None:
    blocks = step_blocks()
    blocks.add(0, Node(0, 4), torch.empty(0), 0)
    with pytest.raises(ProtocolError, match="sum of the lanes"):
        blocks.add(1, node, torch.empty(0), 0)


def test_nothing_comes_twice() -> None:
    blocks = step_blocks()
    blocks.add(0, Node(0, 4), torch.empty(0), 0)
    blocks.come(Node(0, 4), 2, 4, whole=True)
    with pytest.raises(ProtocolError, match="came twice"):
        blocks.come(Node(0, 4), 3, 5, whole=True)
    blocks.result(6, 8)
    with pytest.raises(ProtocolError, match="came twice"):
        blocks.result(7, 8)


def stream() -> BlockStream:
    """Of worker 1, which has the blocks 4 to 7 of 11."""
    owned = {0: ((0, 4),), 1: ((4, 8),), 2: ((8, 11),)}
    finisher = BlockFinisher(SHAPE, LANES, lambda: None)
    out = torch.empty(SHAPE.numel)
    division = Division.whole(owned, SHAPE.n_blocks)
    return BlockStream(1, [0, 1, 2], division, SHAPE, LANES, finisher, lambda _, n: torch.empty(n), lambda _: out)


def size(blocks: int) -> int:
    return 4 * BLOCK_ELEMENTS * blocks


@pytest.mark.parametrize(
    ("note", "size_bytes"),
    [
        (BlockNote(1, 0, 4, 3, True), size(1)),  # not this worker's
        (BlockNote(1, 0, 4, 7, True), size(2)),
        (BlockNote(1, 0, 4, 4, True), size(1) - 4),
        (BlockNote(1, 0, 4, 4, True), 0),
        (BlockNote(1, 0, 0, 4, True), size(1)),  # a result of another's blocks
        (BlockNote(1, 0, 9, 4, True), size(1)),
        (BlockNote(1, 0, 2**32 - 1, 4, True), size(1)),
        (BlockNote(-5, 0, 4, 4, True), size(1)),
    ],
)
def test_what_is_not_wanted_of_a_member_has_no_space(note: BlockNote, size_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        stream().space(0, note, size_bytes)


def test_a_sum_is_that_of_one_member_and_steps_come_one_after_the_other() -> None:
    one = stream()
    assert len(one.space(0, BlockNote(3, 0, 4, 5, True), size(2))) == size(2)
    assert len(one.space(2, BlockNote(3, 0, 0, 8, True), size(3))) == size(3)
    with pytest.raises(ProtocolError, match="that worker 0 has"):
        one.space(2, BlockNote(3, 0, 4, 4, True), size(1))
    one.space(2, BlockNote(4, 4, 8, 4, True), size(1))
    with pytest.raises(ProtocolError, match="are not over"):
        one.space(2, BlockNote(5, 4, 8, 4, True), size(1))


@pytest.mark.parametrize("ends", [False, True])
def test_what_comes_before_it_is_known_who_takes_what_waits_for_that(ends: bool) -> None:
    """Or for the end of the generation."""
    finisher, out = BlockFinisher(SHAPE, LANES, lambda: None), torch.empty(SHAPE.numel)
    memory: Any = (lambda _, n: torch.empty(n), lambda _: out)
    one = BlockStream(1, [0, 1], None, SHAPE, LANES, finisher, *memory)
    found: list[object] = []

    def receive() -> None:
        try:
            found.append(len(one.space(0, BlockNote(1, 0, 4, 5, True), size(2))))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    while thread.is_alive() and not one._known._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    assert not found
    if ends:
        one.leave()
    else:
        one.divide(1, Division.among({0: ((0, 4),), 1: ((4, SHAPE.n_blocks),)}, SHAPE.n_blocks))
    thread.join(60)
    assert isinstance(found[0], ProtocolError) if ends else found == [size(2)]
    if not ends:
        with pytest.raises(ProtocolError, match="expected some of"):
            one.space(0, BlockNote(1, 0, 4, 3, True), size(1))


def test_pieces_cover_a_run_and_leave_the_padding_of_units_out() -> None:
    """The first unit of `layout` has 1085 elements."""
    cut = BlockCut(SHAPE)
    assert list(cut.pieces(3, 3)) == [] and list(cut.pieces(3, 5)) == [(3, 5)]
    runs = list(cut.pieces(0, BLOCKS))
    assert [block for run in runs for block in range(*run)] == list(range(BLOCKS))
    assert runs[0] == (0, 1) and cut.stop(1) == 1085 and max(b - a for a, b in runs) == LEAVING_BLOCKS
    assert cut.last(0, 4 * 1085) == 1 and cut.last(1, size(3)) == 4
    flat = torch.ones(2 * BLOCK_ELEMENTS)
    cut.clear_padding(flat, 0, 0, 2)
    assert flat[:1085].all() and not flat[1085:BLOCK_ELEMENTS].any() and flat[BLOCK_ELEMENTS:].all()


@pytest.mark.parametrize(("first", "size_bytes"), [(0, size(1)), (0, 4 * 1084), (1, 0), (10, size(2)), (11, 4)])
def test_what_is_no_run_of_blocks_is_refused(first: int, size_bytes: int) -> None:
    with pytest.raises(ProtocolError, match="no run of blocks"):
        BlockCut(SHAPE).last(first, size_bytes)
