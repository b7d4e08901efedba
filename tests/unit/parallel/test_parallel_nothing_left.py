"""What any way to move bytes must leave: nothing behind, others' memory in peace, no box that is read too late."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import layout, member, plan_of, reduce_step, reference, same_bits, together
from torch.distributed import HashStore

from everstep.base.errors import InvariantViolation
from everstep.base.extents import Runs
from everstep.base.plan import Plan, Shard, WorkerKey
from everstep.base.ports import Hop, Reduced, Tag
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.parallel.channel import Arena, GroupChannel, SharedMemoryChannel
from everstep.parallel.group import GroupTransport
from everstep.parallel.mapping import Attached
from everstep.parallel.shard_boxes import BoxExchange
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.parallel.transport_kinds import KINDS, Site
from process_resources import resources

LANES = 8
SHAPE = layout()
WAYS = ["one host", "sockets", "two hosts", "each its host", "channel of one host", "channel over sockets"]


class Members:
    """Members 0..n-1 in this process, with one of the ways to move bytes."""

    def __init__(self, way: str, machines: Mapping[int, str] | None = None) -> None:
        self._way, self._store, self._machines = way, HashStore(), machines or {}
        self.of: dict[int, Any] = {}
        self.carriers: dict[int, GroupTransport] = {}

    def _hire(self, i: int) -> Any:
        key = WorkerKey(i, 0)
        if self._way == "one host":
            return SharedMemoryTransport(key, SHAPE, LANES, _tick, record_bytes=4096)
        if self._way == "channel of one host":
            return SharedMemoryChannel(key, _tick)
        if self._way.endswith("sockets"):
            shape = SHAPE if self._way == "sockets" else GradientLayout((), (), 0)
            found = GroupTransport(key, shape, LANES, self._store, _tick, key=b"k" * 32)
            if self._way == "sockets":
                return found
            self.carriers[i] = found
            return GroupChannel(key, found)
        machine = self._machines.get(i) or (f"m{i // 2}" if self._way == "two hosts" else f"m{i}")
        site = Site(key, LANES, _tick, torch.device("cpu"), self._store, b"k" * 32, machine=machine)
        if self._way == "channel":
            records, channel = KINDS["auto"].meet(site)
            self.carriers[i] = records.far  # type: ignore[attr-defined]
            return channel
        return KINDS["auto"].pool(site, SHAPE, "stage0")

    def open(self, generation: int, ids: Sequence[int], shards: tuple[Shard, ...] = ()) -> Plan:
        for i in ids:
            self.of[i] = self.of.get(i) or self._hire(i)
        plan = plan_of(generation, [member(self.of[i], WorkerKey(i, 0), os.getpid()) for i in ids], LANES)
        plan = replace(plan, shards=shards)

        def one(i: int) -> None:
            if self.carriers:
                self.carriers[i].open(plan)
            self.of[i].open(plan)

        assert together(*(lambda i=i: one(i) for i in ids)) == [None] * len(ids)
        return plan

    def work(self, plan: Plan, step: int) -> list[Reduced]:
        """A step of a transport, or a message around all of a channel."""
        ids = plan.worker_ids
        if "channel" not in self._way:
            told = together(*(lambda i=i: self.of[i].exchange(Tag("agree", step, 0), b"%d" % i) for i in ids))
            assert told == [{i: b"%d" % i for i in ids}] * len(ids)
            return together(*(lambda i=i: reduce_step(self.of[i], SHAPE, plan, i, step) for i in ids))  # type: ignore
        key, sent = Hop(step, "act", 1, 0), torch.arange(step * 5000, step * 5000 + 40_000)
        self.of[ids[0]].send(ids[-1], key, [sent], b"m")
        [found], _ = self.of[ids[-1]].recv(ids[0], key)
        assert torch.equal(found, sent)
        return []

    def close(self) -> None:
        for one in (*self.of.values(), *self.carriers.values()):
            one.abort(9)
            one.close()


def _tick() -> None:
    pass


def life(way: str) -> None:
    """Members come and go, steps are done, and all is closed."""
    members = Members(way)
    for generation, ids in enumerate(([0, 1, 2], [0, 2]), 1):
        members.work(members.open(generation, ids), generation)
    members.close()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_what_was_closed(way: str) -> None:
    held = list[tuple[int, int, int]]()
    for _ in range(3):  # the first makes what stays for the life of a process
        life(way)
        gc.collect()
        found = resources()
        held.append((found["descriptors"], found["segments"], threading.active_count()))
    assert all(later <= before for before, later in zip(held[1], held[2], strict=True)), held


@pytest.mark.parametrize("kind", ["transport", "channel"])
def test_memory_is_mapped_on_its_own_machine_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which way the members are spread over three machines, and however they move."""
    mapped = set[tuple[int, int]]()
    meet = Attached.meet

    def counted(self: Any, plan: Plan, fence: Any) -> Any:
        mapped.update((self._me.worker_id, one.worker_id) for one in plan.members)
        return meet(self, plan, fence)

    monkeypatch.setattr(Attached, "meet", counted)
    machines = {0: "a", 1: "b", 2: "a", 3: "c", 4: "b"}
    members = Members(kind, machines)
    for generation, ids in enumerate(([0, 2], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 3]), 1):
        members.open(generation, ids)
    members.close()
    assert (0, 2) in mapped and all(machines[one] == machines[other] for one, other in mapped), mapped


@pytest.mark.parametrize("way", WAYS[:4])
def test_of_two_divisions_of_one_step_the_first_counts(way: str) -> None:
    ids, n = [0, 1, 2, 3], SHAPE.n_blocks
    takes: list[dict[int, Runs]] = [{i: ((i, i + 1), (4, n)) if i == k else ((i, i + 1),) for i in ids} for k in ids]
    takes = [{**one, k: ((k, n),)} for k, one in enumerate(takes)]
    members = Members(way)
    plan = members.open(1, ids, tuple(Shard(i, 0, segments=((64 * i, 64 * i + 64),)) for i in ids))
    for step in (1, 2, 3):
        for i in ids:
            for one in (takes[step], None, takes[0]):
                members.of[i].divide(step, one)
        expected, _ = reference(SHAPE, LANES, step)
        for i, found in zip(ids, members.work(plan, step), strict=True):
            there = [b for p in found.pieces for b in range(p.start // BLOCK_ELEMENTS, p.stop // BLOCK_ELEMENTS)]
            assert there == [b for run in takes[step][i] for b in range(*run)]
            assert all(same_bits(p.data, expected[p.start : p.stop]) for p in found.pieces)
    members.close()


@pytest.mark.parametrize("room", [10, 16, 24, 40])
def test_a_place_is_refused_only_above_all_others(room: int) -> None:
    """In a memory so small that its gaps are used up: no two lie over each other even then."""
    for seed in range(100):
        draw = random.Random(seed)
        arena, taken, newest = Arena(64 * room), list[tuple[int, int, int]](), 3
        for _ in range(60):
            step, units = newest - draw.randrange(3), draw.randrange(10)
            if not units:
                newest += 1
                arena.forget(step)
                taken = [one for one in taken if one[0] > step]
                continue
            try:
                start = arena.take(step, 64 * units)
            except InvariantViolation:
                assert max((stop for *_, stop in taken), default=0) + 64 * units > 64 * room
                continue
            assert start >= 0 and start + 64 * units <= 64 * room
            assert all(start + 64 * units <= begin or stop <= start for _, begin, stop in taken)
            taken.append((step, start, start + 64 * units))


class _Gate:
    """Meetings of ranks at which, of those who may go on, each goes as far as it can before the next one goes on."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._come, self._changed = order, dict.fromkeys(order, 0), threading.Condition()

    def meet(self, rank: int, last: bool = False) -> None:
        with self._changed:
            self._come[rank] += 1 << 20 if last else 1
            mine = self._come[rank]
            self._changed.notify_all()
            before = self._order[: self._order.index(rank)]
            assert last or self._changed.wait_for(
                lambda: min(self._come.values()) >= mine and all(self._come[one] > mine for one in before), 30
            )


SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


@settings(max_examples=40)
@given(st.lists(SHAPES, min_size=2, max_size=2), st.permutations(range(2)), st.integers(0, 3), st.sampled_from(DTYPES))
def test_shards_arrive_whichever_rank_is_ahead(
    shapes: list[list[tuple[int, int]]], order: list[int], start: int, dtype: torch.dtype
) -> None:
    """Tensors of many sizes, one exchange after the other, through boxes of 64 bytes."""
    boxes = [[torch.zeros(128 + 64, dtype=torch.uint8) for _ in range(2)] for _ in order]
    rounds = min(map(len, shapes))
    given_to = [
        [torch.arange(a * b).reshape(a, b).add(100 * rank + k).to(dtype) for k, (a, b) in enumerate(shapes[rank])]
        for rank in range(2)
    ]
    gate = _Gate(order)

    def run(rank: int) -> list[list[torch.Tensor]]:
        exchange = BoxExchange(boxes, range(rank, rank + 1), lambda point: gate.meet(rank))
        exchange.start(start)
        found = [[t.clone() for t in exchange.gather([given_to[rank][k]])] for k in range(rounds)]
        gate.meet(rank, last=True)
        return found

    for found in together(*(lambda rank=rank: run(rank) for rank in range(2))):
        assert isinstance(found, list), found
        for k, tensors in enumerate(found):
            assert all(torch.equal(one, given_to[rank][k]) for rank, one in enumerate(tensors))
            assert [one.dtype for one in tensors] == [dtype] * 2
