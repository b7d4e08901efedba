"""Both transports, several members as threads of one process: bits, exchanges, aborts, changes of generation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_cases import fill, layout, member, plan_of, reduce_step, reference, same_bits, together, whole
from torch.distributed import HashStore

from everstep.base.errors import CollectiveAborted
from everstep.base.extents import WHOLE, Extents, Runs
from everstep.base.plan import Plan, Shard, WorkerKey
from everstep.base.ports import Node, Reduced, Tag, Transport
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.parallel.group import GroupTransport
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.placement.shards import runs_of_numbers
from everstep.placement.tree import cover

LANES = 8
SHAPE = layout()


class Crew:
    """Transports of workers 0..n-1 in this process."""

    def __init__(self, kind: str, shape: GradientLayout = SHAPE) -> None:
        self.kind, self.shape = kind, shape
        self.store = HashStore()
        self.transports: dict[int, Transport] = {}
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1

    def hire(self, worker_id: int) -> Transport:
        key = WorkerKey(worker_id, 0)
        if self.kind == "shm":
            self.transports[worker_id] = SharedMemoryTransport(key, self.shape, LANES, self.tick, record_bytes=4096)
        else:
            self.transports[worker_id] = GroupTransport(key, self.shape, LANES, self.store, self.tick, key=b"k" * 32)
        return self.transports[worker_id]

    def plan(self, generation: int, ids: list[int], runs: list[tuple[int, ...]] | None = None) -> Plan:
        for i in ids:
            if i not in self.transports:
                self.hire(i)
        return plan_of(generation, [member(self.transports[i], WorkerKey(i, 0), os.getpid()) for i in ids], LANES, runs)

    def open(self, plan: Plan) -> None:
        raised = together(*(lambda i=i: self.transports[i].open(plan) for i in plan.worker_ids))
        assert raised == [None] * len(raised)

    def reduce(self, plan: Plan, step: int) -> list[Reduced]:
        shape, of = self.shape, self.transports
        found = together(*(lambda i=i: reduce_step(of[i], shape, plan, i, step) for i in plan.worker_ids))
        assert all(isinstance(r, Reduced) for r in found), found
        return found  # type: ignore[return-value]

    def count(self) -> list[int]:
        """Elements that members push from here on."""
        sent: list[int] = []
        for transport in self.transports.values():
            mesh = transport.mesh  # type: ignore[attr-defined]

            def pushed(to: int, note: object, tensor: torch.Tensor, push: Any = mesh.push) -> None:
                sent.append(tensor.numel())
                push(to, note, tensor)

            mesh.push = pushed
        return sent

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


@pytest.fixture(params=["shm", "sockets"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    found = Crew(request.param)
    yield found
    found.close()


def check_step(reduced: list[Reduced], step: int) -> None:
    expected, present = reference(SHAPE, LANES, step)
    for r in reduced:
        assert r.step == step and r.presence == present
        assert same_bits(whole(r), expected)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_bits_do_not_depend_on_how_many_share_the_work(crew: Crew, n: int) -> None:
    plan = crew.plan(1, list(range(n)))
    crew.open(plan)
    for step in (1, 2, 5):
        reduced = crew.reduce(plan, step)
        check_step(reduced, step)
        assert sorted(b for r in reduced for run in r.owned for b in range(*run)) == list(range(SHAPE.n_blocks))
    assert crew.ticks > 0 or n == 1


def test_who_finishes_blocks_here_and_there_gets_the_same_bits(crew: Crew) -> None:
    """As where the plan has members hold parts of the gradient: between the blocks of one lie those of others."""
    size = (("gradient", SHAPE.n_blocks),)
    turns = [Extents.numbered(size, range(k, SHAPE.n_blocks, 2)) for k in (0, 1)]
    plan = replace(crew.plan(1, [0, 1, 2]), shards=tuple(Shard(k, 0, WHOLE, turn) for k, turn in enumerate(turns)))
    crew.open(plan)
    for step in (1, 2, 3):
        reduced = crew.reduce(plan, step)
        check_step(reduced, step)
        assert sorted(b for r in reduced for run in r.owned for b in range(*run)) == list(range(SHAPE.n_blocks))
    assert max(len(r.owned) for r in reduced) > 1


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 3, 5), (1, 2, 4, 6, 7)],
        [(), (0, 1, 2, 3, 4, 5, 6, 7)],
        [(0,), (1, 2), (3, 4, 5, 6), (7,), ()],
    ],
)
def test_uneven_lanes_and_standbys(crew: Crew, runs: list[tuple[int, ...]]) -> None:
    plan = crew.plan(1, list(range(len(runs))), runs)
    crew.open(plan)
    check_step(crew.reduce(plan, 4), 4)


def test_results_stay_until_the_next_step_begins(crew: Crew) -> None:
    for generation, ids in ((1, [0]), (2, [0, 1, 2])):
        plan = crew.plan(generation, ids)
        crew.open(plan)
        base = 10 * generation
        results = crew.reduce(plan, base)
        for i in ids[1:]:  # others begin, and fill their nodes
            crew.transports[i].node(base + 1, Node(0, 8)).fill_(float("nan"))
            crew.transports[i].node(base + 1, Node(0, 4)).fill_(float("nan"))
        check_step(results[:1], base)
        check_step(crew.reduce(plan, base + 2), base + 2)


def test_same_node_is_the_same_memory_also_in_another_generation(crew: Crew) -> None:
    crew.open(crew.plan(1, [0, 1]))
    first = crew.transports[0].node(3, Node(0, 4))
    first.fill_(7.0)
    crew.open(crew.plan(2, [0, 1]))
    again = crew.transports[0].node(3, Node(0, 4))
    assert again.data_ptr() == first.data_ptr() and float(again[0]) == 7.0
    assert crew.transports[0].node(3, Node(4, 6)).data_ptr() != first.data_ptr()


def test_a_step_reduced_again_is_added_up_from_the_lanes_of_those_who_are_there(crew: Crew) -> None:
    """A member that computed otherwise has left: no block that was finished with its lanes counts."""
    plan, of = crew.plan(1, [0, 1, 2]), crew.transports
    crew.open(plan)

    def otherwise() -> Reduced:
        presence = fill(of[2], crew.shape, 7, cover(plan.lanes_of(2), plan.lanes))
        for node in presence:
            of[2].node(7, node).mul_(1.5)
        return of[2].reduce(7, presence)

    found = together(*(lambda i=i: reduce_step(of[i], crew.shape, plan, i, 7) for i in (0, 1)), otherwise)
    assert all(isinstance(one, Reduced) for one in found), found
    smaller = crew.plan(2, [0, 1])
    crew.open(smaller)
    check_step(crew.reduce(smaller, 7), 7)


@pytest.mark.parametrize("size", [0, 1, 4000, 4096, 50_000])
def test_exchange_gathers_records_of_any_size(crew: Crew, size: int) -> None:
    plan = crew.plan(1, [0, 2, 5])
    crew.open(plan)
    payloads = {i: bytes([i]) * (size * (i + 1) // 3) for i in plan.worker_ids}
    for seq in range(3):
        tag = Tag("decide", 9, seq)
        found = together(*(lambda i=i, t=tag: crew.transports[i].exchange(t, payloads[i]) for i in plan.worker_ids))
        assert found == [payloads] * 3


@pytest.mark.parametrize("operation", ["exchange", "reduce"])
def test_abort_frees_whoever_waits(crew: Crew, operation: str) -> None:
    plan = crew.plan(1, [0, 1])
    crew.open(plan)
    waiting = crew.transports[0]
    before = crew.ticks

    def wait() -> object:
        if operation == "exchange":
            return waiting.exchange(Tag("decide", 1, 0), b"alone")
        return reduce_step(waiting, SHAPE, plan, 0, 1)

    freed: list[float] = []

    def abort() -> None:
        while crew.ticks < before + 5:  # it waits, and says so
            time.sleep(0.001)
        freed.append(time.monotonic())
        waiting.abort(1)

    result = together(wait, abort)[0]
    assert isinstance(result, CollectiveAborted) and not result.accused
    assert time.monotonic() - freed[0] < 1.0
    with pytest.raises(CollectiveAborted):
        waiting.exchange(Tag("decide", 2, 0), b"")
    crew.transports[1].abort(1)
    again = crew.plan(2, [0, 1])
    crew.open(again)
    check_step(crew.reduce(again, 1), 1)


def test_abort_before_open_counts(crew: Crew) -> None:
    plan = crew.plan(3, [0, 1])
    crew.transports[0].abort(3)
    with pytest.raises(CollectiveAborted):
        crew.transports[0].open(plan)
        crew.transports[0].exchange(Tag("settle", 0, 0), b"")
    newer = crew.plan(4, [0, 1])
    crew.open(newer)
    found = together(*(lambda i=i: crew.transports[i].exchange(Tag("settle", 0, 0), b"x") for i in (0, 1)))
    assert found == [{0: b"x", 1: b"x"}] * 2


def test_an_old_abort_does_not_touch_a_new_generation(crew: Crew) -> None:
    plan = crew.plan(5, [0, 1])
    crew.open(plan)
    crew.transports[0].abort(4)
    check_step(crew.reduce(plan, 1), 1)


def test_prepared_switch_with_one_member_behind(crew: Crew) -> None:
    """0 reads the agree of the old generation and goes on to settle in the new one before 1 has read that agree."""
    old = crew.plan(1, [0, 1])
    crew.open(old)
    new = crew.plan(2, [0, 1, 2])
    transports = crew.transports
    agree, settle = Tag("decide", 4, 0), Tag("settle", 0, 0)
    slow = threading.Event()

    def fast_member() -> object:
        got = transports[0].exchange(agree, b"a0")
        transports[0].open(new)
        return got, transports[0].exchange(settle, b"s0")

    def slow_member() -> object:
        if crew.kind == "shm":  # publish, and look only when the other one is in the next generation
            real = transports[1]._await  # type: ignore[attr-defined]

            def late(ready: object, what: str) -> None:
                slow.wait(10)
                real(ready, what)

            transports[1]._await = late  # type: ignore[attr-defined]
        got = transports[1].exchange(agree, b"a1")
        transports[1].open(new)
        return got, transports[1].exchange(settle, b"s1")

    def joiner() -> object:
        transports[2].open(new)
        return transports[2].exchange(settle, b"s2")

    def signal() -> None:
        if crew.kind == "shm":
            key = __import__("everstep.parallel.mapping", fromlist=["record_key"]).record_key(2, settle)
            own = transports[0]._own  # type: ignore[attr-defined]
            deadline = time.monotonic() + 20
            while all(own.read(slot, key) is None for slot in (0, 1)) and time.monotonic() < deadline:
                time.sleep(0.0005)
        slow.set()

    agreed, settled = {0: b"a0", 1: b"a1"}, {0: b"s0", 1: b"s1", 2: b"s2"}
    found = together(fast_member, slow_member, joiner, signal)
    assert found[:3] == [(agreed, settled), (agreed, settled), settled]


def test_the_alone_result_zeroes_what_no_lane_had(crew: Crew) -> None:
    plan = crew.plan(1, [0])
    crew.open(plan)
    reduced = crew.reduce(plan, 5)[0]
    e = SHAPE.entries[1]
    assert reduced.presence == bytes([1, 0, 1])
    assert torch.count_nonzero(whole(reduced)[e.offset : e.offset + e.numel]) == 0


def check_parts(reduced: list[Reduced], step: int, takes: dict[int, Runs], ids: tuple[int, ...]) -> None:
    """Each has the bits of what it takes, and no more, and each block is told of by one that takes it."""
    expected, present = reference(SHAPE, LANES, step)
    for i, r in zip(ids, reduced, strict=True):
        assert r.presence == present
        there = [block for p in r.pieces for block in range(p.start // BLOCK_ELEMENTS, p.stop // BLOCK_ELEMENTS)]
        assert there == [block for run in takes[i] for block in range(*run)]
        assert all(same_bits(p.data, expected[p.start : p.stop]) for p in r.pieces)
        assert {block for run in r.owned for block in range(*run)} <= set(there)
    assert sorted(b for r in reduced for run in r.owned for b in range(*run)) == list(range(SHAPE.n_blocks))


HOLDERS = tuple(Shard(i, 0, segments=((64 * i, 64 * i + 64),)) for i in range(4))
TWO_EACH: dict[int, Runs] = {0: ((0, 2), (4, 5)), 1: ((0, 4),), 2: ((2, 5), (6, 7)), 3: ((5, 7),)}
ONE_EACH: dict[int, Runs] = {0: ((3, 5),), 1: (), 2: ((0, 3), (6, 7)), 3: ((5, 6),)}


def test_members_get_the_blocks_that_they_take_and_others_in_the_next_step(crew: Crew) -> None:
    plan = replace(crew.plan(1, [0, 1, 2, 3]), shards=HOLDERS)
    crew.open(plan)
    for step, takes in ((1, None), (2, TWO_EACH), (3, ONE_EACH), (5, TWO_EACH)):
        for transport in crew.transports.values():
            transport.divide(step, takes)
        reduced = crew.reduce(plan, step)
        if takes is None:
            check_step(reduced, step)
        else:
            check_parts(reduced, step, takes, plan.worker_ids)


def test_a_step_that_is_reduced_again_gives_others_what_they_take_then(crew: Crew) -> None:
    """Blocks that were finished or came before stay, others are made."""
    plan = replace(crew.plan(1, [0, 1, 2, 3]), shards=HOLDERS)
    crew.open(plan)
    for transport in crew.transports.values():
        transport.divide(7, ONE_EACH)
    before = crew.reduce(plan, 7)
    plan = replace(crew.plan(2, [0, 2, 3]), shards=HOLDERS)
    crew.open(plan)
    takes: dict[int, Runs] = {0: ((0, 4),), 2: ((2, 7),), 3: ((4, 6),)}
    for i in plan.worker_ids:
        crew.transports[i].divide(7, takes)
    check_parts(crew.reduce(plan, 7), 7, takes, plan.worker_ids)
    check_parts(before, 7, ONE_EACH, (0, 1, 2, 3))


def test_memory_of_results_that_others_finish_by_now_is_given_back() -> None:
    crew = Crew("shm")
    plan = replace(crew.plan(1, [0, 1, 2, 3]), shards=HOLDERS)
    crew.open(plan)
    for step, takes in ((1, None), (2, TWO_EACH), (3, TWO_EACH), (4, ONE_EACH)):
        for transport in crew.transports.values():
            transport.divide(step, takes)
        for i, r in zip(plan.worker_ids, crew.reduce(plan, step), strict=True):
            flat = crew.transports[i].own_result(step)  # type: ignore[attr-defined]
            written = [k for k, block in enumerate(flat.split(BLOCK_ELEMENTS)) if bool(block.any())]
            assert written == [block for run in r.owned for block in range(*run)]
    crew.close()


def test_blocks_of_a_step_wait_for_one_that_does_not_know_yet_what_it_takes() -> None:
    """Somebody else is faster: what it sends is taken once this member has come to the step."""
    crew = Crew("sockets")
    plan = replace(crew.plan(1, [0, 1]), shards=HOLDERS)
    crew.open(plan)
    takes: dict[int, Runs] = {0: ((0, 3),), 1: ((3, 7),)}
    crew.transports[0].divide(1, takes)
    presence = fill(crew.transports[0], SHAPE, 1, cover(plan.lanes_of(0), LANES))
    offer = crew.transports[0].offering(1)
    assert offer is not None
    for node in presence:
        offer(node, 1, SHAPE.n_blocks)

    def late() -> object:
        crew.transports[1].divide(1, takes)
        return reduce_step(crew.transports[1], SHAPE, plan, 1, 1)

    found = together(lambda: crew.transports[0].reduce(1, presence), late)
    check_parts(found, 1, takes, plan.worker_ids)  # type: ignore[arg-type]
    crew.transports[0].divide(2, takes)
    assert crew.transports[0].offering(2) is not None
    offer = crew.transports[0].offering(2)
    for node in fill(crew.transports[0], SHAPE, 2, cover(plan.lanes_of(0), LANES)):
        offer(node, 1, SHAPE.n_blocks)  # type: ignore[misc]
    crew.close()  # the other one never comes to it, and is freed


@pytest.mark.parametrize(("copies", "bytes_per_parameter"), [(1, 3.5), (2, 4.0), (8, 7.0)])
def test_bytes_on_the_wire_of_a_reduction_to_holders(copies: int, bytes_per_parameter: float) -> None:
    """Of eight members, each of which sends as much of a float32 gradient: every sum but the finisher's own goes to it
    once, and every result once to each other taker. An all-reduce is the last case."""
    n, shape = 8, layout(9)
    crew = Crew("sockets", shape)
    plan = replace(crew.plan(1, list(range(n))), shards=HOLDERS)
    crew.open(plan)
    sent = crew.count()
    takes: dict[int, Runs] = {
        i: runs_of_numbers(b for b in range(shape.n_blocks) if (i - b) % n < copies) for i in range(n)
    }
    for transport in crew.transports.values():
        transport.divide(1, takes)
    crew.reduce(plan, 1)
    crew.close()
    content = 1085 + (shape.n_blocks - 1) * BLOCK_ELEMENTS  # of the units, without padding
    assert 4 * sum(sent) / content / n == bytes_per_parameter


def test_of_a_result_a_member_keeps_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are never written take no memory."""
    flats: list[torch.Tensor] = []

    def noted(numel: int, device: torch.device) -> torch.Tensor:
        flats.append(torch.full((numel,), float("nan")))
        return flats[-1]

    monkeypatch.setattr("everstep.parallel.reduction.new_flat", noted)
    crew = Crew("sockets")
    plan = replace(crew.plan(1, [0, 1, 2, 3]), shards=HOLDERS)
    crew.open(plan)
    for transport in crew.transports.values():
        transport.divide(1, TWO_EACH)
    results = {p.data.data_ptr() - 4 * p.start for r in crew.reduce(plan, 1) for p in r.pieces[:1]}
    crew.close()
    written = [
        sum(not bool(block.isnan().all()) for block in flat.split(BLOCK_ELEMENTS))
        for flat in flats
        if flat.data_ptr() in results
    ]
    assert sorted(written) == sorted(sum(hi - lo for lo, hi in runs) for runs in TWO_EACH.values())
