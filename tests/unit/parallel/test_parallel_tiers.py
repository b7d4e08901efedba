"""Members on several hosts: shared memory inside each, sockets between them; bits, bytes that cross, aborts."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from parallel_cases import fill, layout, member, plan_of, reduce_step, reference, same_bits, together, whole
from torch.distributed import HashStore

from everstep.base.errors import CollectiveAborted, ProtocolError
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Plan, Shard, WorkerKey
from everstep.base.ports import Node, Reduced, Tag
from everstep.exact.layout import BLOCK_ELEMENTS
from everstep.parallel import two_tiers
from everstep.parallel.either import EitherTransport
from everstep.parallel.nccl_links import Transfer
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.parallel.socket_mesh import BlockNote
from everstep.parallel.transport_kinds import KINDS, Site
from everstep.parallel.two_tiers import FinalBlocks, TieredTransport
from everstep.placement.shards import runs_of_numbers
from everstep.placement.tiers import Tiers, folded
from everstep.placement.tree import cover

LANES = 8
SHAPE = layout(11)
BLOCKS = SHAPE.n_blocks
LIMIT_S = 60
FOUR = {0: "a", 1: "a", 2: "b", 3: "b"}


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients here have few blocks."""
    monkeypatch.setattr(two_tiers, "TOLD_BLOCKS", 1)


class Crew:
    """Transports of workers in this process, each said to be on a machine. sent: elements by (from, to)."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.transports: dict[int, EitherTransport] = {}
        self.machine_of: dict[int, str] = {}
        self.waiting = threading.Event()
        self.sent: Counter[tuple[int, int]] = Counter()
        self.pushed: queue.Queue[tuple[int, int, BlockNote]] = queue.Queue()

    def hire(self, i: int, machine: str) -> None:
        key = WorkerKey(i, 0)
        site = Site(key, LANES, self.waiting.set, torch.device("cpu"), self.store, b"k" * 32, machine=machine)
        self.machine_of[i] = machine
        self.transports[i] = KINDS["auto"].pool(site, SHAPE, "stage0")  # type: ignore[assignment]

    def open(
        self,
        generation: int,
        machines: dict[int, str],
        runs: Sequence[tuple[int, ...]] | None = None,
        shards: tuple[Shard, ...] = (),
    ) -> Plan:
        for i, machine in machines.items():
            if i not in self.transports:
                self.hire(i, machine)
        members = [member(self.transports[i], WorkerKey(i, 0), os.getpid()) for i in sorted(machines)]
        plan = plan_of(generation, members, LANES, list(runs) if runs is not None else None)
        plan = replace(plan, shards=shards)
        assert together(*(lambda i=i: self.transports[i].open(plan) for i in plan.worker_ids)) == [None] * len(members)
        for i in plan.worker_ids if len(set(machines.values())) > 1 else ():
            self._count(i)
        return plan

    def _count(self, i: int) -> None:
        current = self.transports[i]._current
        mesh = (current._far if isinstance(current, TieredTransport) else current).mesh  # type: ignore[union-attr]
        send = mesh.send

        def counted(transfers: Sequence[Transfer]) -> None:
            for tensor, to, _ in transfers:
                self.sent[i, to] += tensor.numel()
            send(transfers)

        mesh.send = counted  # type: ignore[method-assign]
        push = getattr(mesh, "push", None)  # of sockets alone: blocks that leave as they are finished

        def pushed(to: int, note: BlockNote, tensor: torch.Tensor) -> None:
            self.sent[i, to] += tensor.numel()
            self.pushed.put((i, to, note))
            push(to, note, tensor)

        if push is not None:
            mesh.push = pushed  # type: ignore[union-attr]

    def reduce_early(self, plan: Plan, step: int, draw: random.Random) -> list[object]:
        """All at once; some blocks leave before, in any order, and what is absent somewhere does not."""

        def one(i: int) -> Reduced:
            presence = fill(self.transports[i], SHAPE, step, cover(plan.lanes_of(i), LANES))
            self.offer(i, step, {node: draw.sample(range(1, BLOCKS), 6) for node in presence})
            return self.transports[i].reduce(step, presence)

        return together(*(lambda i=i: one(i) for i in plan.worker_ids))

    def offer(self, i: int, step: int, blocks: Mapping[Node, Sequence[int]]) -> None:
        offer = self.transports[i].offering(step)
        for node in blocks if offer is not None else ():
            for block in blocks[node]:
                offer(node, block, block + 1)

    def reduce(self, plan: Plan, step: int) -> list[Reduced]:
        found = together(*(lambda i=i: reduce_step(self.transports[i], SHAPE, plan, i, step) for i in plan.worker_ids))
        assert all(isinstance(r, Reduced) for r in found), found
        return found  # type: ignore[return-value]

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


@pytest.fixture
def crew() -> Iterator[Crew]:
    found = Crew()
    yield found
    found.close()


def check_step(reduced: Sequence[object], step: int) -> None:
    expected, present = reference(SHAPE, LANES, step)
    for r in reduced:
        assert isinstance(r, Reduced), r
        assert r.step == step and r.presence == present
        assert same_bits(whole(r), expected)


def crossing(plan: Plan, machine_of: dict[int, str]) -> int:
    """Elements that have to leave their hosts: each sum of a host once to each courier elsewhere, each result once to
    each other host."""
    two_tiers = Tiers.of(machine_of)
    total = 0
    for there in two_tiers.hosts:
        sums = folded([n for w in there for n in cover(plan.lanes_of(w), LANES)], LANES)
        for w, runs in two_tiers.shares(SHAPE.n_blocks).items():
            total += sum(hi - lo for lo, hi in runs) * BLOCK_ELEMENTS * (len(sums) + 1) if w not in there else 0
    return total


@pytest.mark.parametrize("machines", ["aaa", "abc", "aab", "abb"])
def test_members_that_hold_parts_of_the_gradient_tell_of_these(crew: Crew, machines: str) -> None:
    """Be it that they are on one host, on one each, or some of them on one."""
    size = (("gradient", SHAPE.n_blocks),)
    turns = [Extents.numbered(size, range(k, SHAPE.n_blocks, 2)) for k in (0, 1)]
    shards = tuple(Shard(k, 0, WHOLE, turn) for k, turn in enumerate(turns))
    plan = crew.open(1, dict(enumerate(machines)), shards=shards)
    for step in (1, 2):
        reduced = crew.reduce(plan, step)
        check_step(reduced, step)
        told = [[b for run in r.owned for b in range(*run)] for r in reduced]
        assert sorted(b for blocks in told for b in blocks) == list(range(SHAPE.n_blocks))
        assert all(b % 2 == k for k in (0, 1) for b in told[k])


@pytest.mark.parametrize("machines", ["aaaa", "abcd", "aabb", "abbb"])
def test_members_on_any_hosts_get_what_they_take_and_a_host_no_more(crew: Crew, machines: str) -> None:
    shards = tuple(Shard(i, 0, segments=((64 * i, 64 * i + 64),)) for i in range(4))
    plan = crew.open(1, dict(enumerate(machines)), shards=shards)
    draw = random.Random(5)
    for step, copies in ((1, 0), (2, 1), (3, 2), (4, 1)):
        takes = {i: runs_of_numbers(b for b in range(BLOCKS) if (i - b) % 4 < copies) for i in range(4)}
        for transport in crew.transports.values():
            transport.divide(step, takes if copies else None)
        crew.sent.clear()
        reduced = crew.reduce_early(plan, step, draw)
        if not copies:
            check_step(reduced, step)
            whole_sent = sum(crew.sent.values())
            continue
        assert sum(crew.sent.values()) < whole_sent or len(set(machines)) == 1
        expected, _ = reference(SHAPE, LANES, step)
        for i, r in enumerate(reduced):
            assert isinstance(r, Reduced), r
            there = [b for p in r.pieces for b in range(p.start // BLOCK_ELEMENTS, p.stop // BLOCK_ELEMENTS)]
            assert there == [b for run in takes[i] for b in range(*run)]
            assert all(same_bits(p.data, expected[p.start : p.stop]) for p in r.pieces)
            assert {b for run in r.owned for b in range(*run)} <= set(there)
        told = [b for r in reduced for run in r.owned for b in range(*run)]  # type: ignore[attr-defined]
        assert sorted(told) == list(range(BLOCKS))


def test_a_courier_that_does_not_know_yet_who_takes_what_lets_reports_wait(crew: Crew) -> None:
    """Others are faster: a member of its host has told of final blocks, and another host has sent some."""
    shards = tuple(Shard(i, 0, segments=((64 * i, 64 * i + 64),)) for i in range(4))
    plan, step = crew.open(1, FOUR, shards=shards), 4
    takes = {i: runs_of_numbers(b for b in range(BLOCKS) if b % 4 == i) for i in FOUR}
    presence = {i: fill(crew.transports[i], SHAPE, step, cover(plan.lanes_of(i), LANES)) for i in FOUR}
    for i in (0, 1, 3):
        crew.transports[i].divide(step, takes)
        crew.offer(i, step, {node: [2, 3, 4] for node in presence[i]})
    crew.pushed.get(timeout=LIMIT_S)  # from the first host to the second

    def late(i: int) -> Reduced:
        crew.transports[i].divide(step, takes)
        return crew.transports[i].reduce(step, presence[i])

    expected, _ = reference(SHAPE, LANES, step)
    for i, r in enumerate(together(*(lambda i=i: late(i) for i in FOUR))):
        assert isinstance(r, Reduced), r
        assert [p.start // BLOCK_ELEMENTS for p in r.pieces] == [lo for lo, _ in takes[i]]
        assert all(same_bits(p.data, expected[p.start : p.stop]) for p in r.pieces)


def test_any_members_on_any_hosts_get_the_same_bits_and_no_byte_crosses_twice(crew: Crew) -> None:
    rng = random.Random(3)
    for i in range(7):
        crew.hire(i, rng.choice("abc"))
    for generation in range(1, 7):
        ids = sorted(rng.sample(range(7), rng.randint(2, 7)))
        machines = {i: crew.machine_of[i] for i in ids}
        owner = [rng.randrange(len(ids)) for _ in range(LANES)]
        runs = [tuple(lane for lane in range(LANES) if owner[lane] == k) for k in range(len(ids))]
        plan = crew.open(generation, machines, runs if generation % 2 else None)
        for step in range(5 * generation, 5 * generation + 4):
            crew.sent.clear()
            check_step(crew.reduce_early(plan, step, rng) if step % 2 else crew.reduce(plan, step), step)
            inside = [pair for pair in crew.sent if machines[pair[0]] == machines[pair[1]]]
            assert not inside, "what is on one host does not take the sockets"
            if len(set(machines.values())) > 1:
                assert 0 < sum(crew.sent.values()) <= crossing(plan, machines), "padding need not leave"


def test_two_workers_on_each_of_three_hosts_send_half_of_what_single_ones_would(crew: Crew) -> None:
    plan = crew.open(1, {i: "abc"[i // 2] for i in range(6)}, [(0,), (1,), (2,), (3,), (4, 5), (6, 7)])
    check_step(crew.reduce(plan, 1), 1)
    by_host = {name: sum(n for (a, _), n in crew.sent.items() if crew.machine_of[a] == name) for name in "abc"}
    most = SHAPE.numel * 2 * 2 / 3  # an all-reduce's
    assert all(abs(n - most) < 4 * BLOCK_ELEMENTS for n in by_host.values()), by_host


def test_a_block_leaves_and_its_result_is_there_before_the_last_lane_is_done(crew: Crew) -> None:
    """Of hosts with two members each: no member has any other block of its nodes, and none reduces."""
    step, nodes = 4, {i: Node(2 * i, 2 * i + 2) for i in FOUR}
    plan = crew.open(1, FOUR)
    presence = {i: fill(crew.transports[i], SHAPE, step, (node,)) for i, node in nodes.items()}
    two_tiers = Tiers.of(FOUR)
    owner = next(w for w, runs in two_tiers.shares(BLOCKS).items() for first, last in runs if first <= 4 < last)
    [elsewhere] = two_tiers.outside(owner)
    courier = elsewhere[0]
    crew.offer(elsewhere[0], step, {nodes[elsewhere[0]]: [2, 3, 4]})
    crew.offer(elsewhere[1], step, {nodes[elsewhere[1]]: [4, 5]})
    sender, to, note = crew.pushed.get(timeout=LIMIT_S)
    top = Node(nodes[elsewhere[0]].lo, nodes[elsewhere[1]].hi)
    assert (sender, to, note) == (courier, owner, BlockNote(step, *top, 4, True)), (
        "the sum of both, of this block alone"
    )
    for w in FOUR:
        if w not in elsewhere:
            crew.offer(w, step, {nodes[w]: [4]})
    assert crew.pushed.get(timeout=LIMIT_S) == (owner, courier, BlockNote(step, 0, 0, 4, True)), "the result"
    assert crew.pushed.empty(), "of no other block all lanes have come"
    found = together(*(lambda i=i: crew.transports[i].reduce(step, presence[i]) for i in plan.worker_ids))
    check_step(found, step)
    assert sum(crew.sent.values()) <= crossing(plan, FOUR)


def test_final_blocks_are_told_several_at_once_and_all_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    class Near:
        generation = 3

        def __init__(self) -> None:
            self.told: list[tuple[int, int, Node, list[tuple[int, int]]]] = []

        def tell_final(
            self, whom: int, generation: int, step: int, node: Node, runs: Sequence[tuple[int, int]]
        ) -> None:
            assert whom == 2
            self.told.append((generation, step, node, list(runs)))

    monkeypatch.setattr(two_tiers, "TOLD_BLOCKS", 4)
    near, one, other = Near(), Node(0, 1), Node(1, 2)
    telling = FinalBlocks(near, 2, 7, 10)  # type: ignore[arg-type]
    for node, first, last in ((one, 8, 10), (other, 9, 10), (one, 5, 8), (one, 4, 5), (one, 0, 2)):
        telling.take(node, first, last)
    assert near.told == [(3, 7, one, [(8, 10), (5, 8)])], "five of ten; three more wait for others"
    telling.take(one, 2, 3)
    telling.take(one, 3, 4)
    assert near.told[1:] == [(3, 7, one, [(4, 5), (0, 2), (2, 3)]), (3, 7, one, [(3, 4)])], "the last one waits not"


@pytest.mark.parametrize("lost", [1, 2])
def test_what_left_in_a_generation_that_ends_counts_for_nothing(crew: Crew, lost: int) -> None:
    """A member of either host is lost while blocks leave; its lanes come from others, as other nodes."""
    rng = random.Random(lost)
    plan = crew.open(1, FOUR)
    check_step(crew.reduce_early(plan, 6, rng), 6)
    for i in plan.worker_ids:
        node = Node(2 * i, 2 * i + 2)
        fill(crew.transports[i], SHAPE, 7, (node,))
        crew.offer(i, 7, {node: range(1, BLOCKS if i != lost else 5)})
    crew.pushed.get(timeout=LIMIT_S)
    left = {i: FOUR[i] for i in FOUR if i != lost}
    for i in left:
        crew.transports[i].abort(1)
    crew.transports.pop(lost).close()
    again = crew.open(2, left)
    for step in (7, 8):
        check_step(crew.reduce_early(again, step, rng), step)
    plan = crew.open(3, {i: FOUR[i] for i in left if FOUR[i] == FOUR[lost]} | {4: FOUR[lost], 5: "c"})
    for step in (8, 9):
        check_step(crew.reduce_early(plan, step, rng), step)


def test_who_is_not_the_courier_may_send_nothing(crew: Crew) -> None:
    plan = crew.open(1, FOUR)
    stream = crew.transports[0]._tiers._stream  # type: ignore[union-attr]
    assert stream is not None
    [there] = Tiers.of(FOUR).outside(0)
    courier = there[0]
    top = cover([lane for w in there for lane in plan.lanes_of(w)], LANES)[0]
    size = 4 * BLOCK_ELEMENTS
    stream.space(courier, BlockNote(1, *top, 1, True), size)
    for w, node in ((1, top), (next(w for w in there if w != courier), top), (courier, Node(0, 2)), (1, Node(0, 0))):
        with pytest.raises(ProtocolError, match="another's"):
            stream.space(w, BlockNote(1, *node, 1, True), size)


@pytest.mark.parametrize(
    "machines",
    [{0: "a", 1: "a", 2: "a"}, {0: "a", 1: "b", 2: "c"}, {0: "a", 1: "a", 2: "b", 3: "b"}],
    ids=["one host", "sockets", "tiers"],
)
def test_a_result_stays_until_its_reader_begins_the_next_step(crew: Crew, machines: dict[int, str]) -> None:
    """Worker 1 has no lanes: all others are through with theirs, and have sent what they finished, before it begins."""
    others = [i for i in machines if i != 1]
    runs = {i: tuple(range(k * LANES // len(others), (k + 1) * LANES // len(others))) for k, i in enumerate(others)}
    plan = crew.open(1, machines, [runs.get(i, ()) for i in machines])

    def early(i: int, step: int) -> Reduced:
        presence = fill(crew.transports[i], SHAPE, step, cover(plan.lanes_of(i), LANES))
        crew.offer(i, step, {node: range(1, BLOCKS) for node in presence})
        return crew.transports[i].reduce(step, presence)

    for step in (1, 3, 5):
        held = crew.reduce(plan, step)[1]

        def late(step: int = step, held: Reduced = held) -> Reduced:
            if len(set(machines.values())) > 1:
                await_early_results(crew.transports[0 if machines[0] == machines[1] else 1], step + 1)
            check_step([held], step)
            return crew.transports[1].reduce(step + 1, {})

        check_step(together(late, *(lambda i=i, step=step: early(i, step + 1) for i in others)), step + 1)


def await_early_results(transport: EitherTransport, step: int) -> None:
    """Until all blocks that can be finished before the reduction are there."""
    current = transport._current
    assert not isinstance(current, SharedMemoryTransport) and current._stream is not None
    end_s = time.monotonic() + LIMIT_S
    while (blocks := current._stream._steps.get(step)) is None or blocks.open > 1:
        assert time.monotonic() < end_s, "no block came"
        time.sleep(0.002)


def test_one_result_area_is_enough_where_nothing_is_finished_early(crew: Crew) -> None:
    for generation, machines in enumerate(({0: "a"}, {0: "a", 1: "a"}, {0: "a", 2: "b"}), 1):
        plan = crew.open(generation, machines)
        places = {whole_piece(crew.reduce(plan, 10 * generation + k)[0]) for k in range(4)}
        assert len(places) == 1, machines


def whole_piece(reduced: Reduced) -> int:
    """Where a result begins in memory."""
    return int(reduced.pieces[0].data.data_ptr())


def test_a_step_reduced_again_gives_the_same_wherever_blocks_are_finished(crew: Crew) -> None:
    """Other owners, other couriers, and one host instead of three."""
    four = {0: "a", 1: "a", 2: "b", 3: "c"}
    plan = crew.open(1, four)
    check_step(crew.reduce(plan, 7), 7)
    for generation, ids in ((2, (0, 1, 3)), (3, (0, 1)), (4, (0, 1, 2))):
        again = crew.open(generation, {i: four[i] for i in ids})
        check_step(crew.reduce(again, 7), 7)


@pytest.mark.parametrize("waits", ["for one of its host", "for another host"])
def test_abort_frees_whoever_waits(crew: Crew, waits: str) -> None:
    plan = crew.open(1, {0: "a", 1: "a", 2: "b"})
    absent = 1 if waits == "for one of its host" else 2
    there = [i for i in plan.worker_ids if i != absent]

    def abort() -> None:
        crew.waiting.clear()
        assert crew.waiting.wait(30)
        for i in there:
            crew.transports[i].abort(1)

    found = together(*(lambda i=i: reduce_step(crew.transports[i], SHAPE, plan, i, 1) for i in there), abort)
    assert all(isinstance(f, CollectiveAborted) and not f.accused for f in found[:-1]), found
    crew.transports[absent].abort(1)
    again = crew.open(2, {0: "a", 1: "a", 2: "b"})
    check_step(crew.reduce(again, 1), 1)


def test_who_vanishes_in_the_middle_of_a_reduction_is_named_by_the_other_host(crew: Crew) -> None:
    plan = crew.open(1, {0: "a", 1: "a", 2: "b"})

    def vanish() -> None:
        nodes = cover(plan.lanes_of(2), LANES)
        fill(crew.transports[2], SHAPE, 1, nodes)
        crew.transports[2].close()

    found = together(*(lambda i=i: reduce_step(crew.transports[i], SHAPE, plan, i, 1) for i in (0, 1)), vanish)
    accused = [f.accused for f in found[:2] if isinstance(f, CollectiveAborted)]
    assert [2] in [list(a) for a in accused], found
    for i in (0, 1):
        crew.transports[i].abort(1)
    check_step(crew.reduce(crew.open(2, {0: "a", 1: "a"}), 1), 1)


def test_records_reach_all_whatever_their_host(crew: Crew) -> None:
    plan = crew.open(1, {0: "a", 2: "b", 5: "a"})
    payloads = {i: bytes([i]) * 1000 * i for i in plan.worker_ids}
    tag = Tag("decide", 9, 0)
    found = together(*(lambda i=i: crew.transports[i].exchange(tag, payloads[i]) for i in plan.worker_ids))
    assert found == [payloads] * 3
