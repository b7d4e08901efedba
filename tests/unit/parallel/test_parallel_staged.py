"""The transport of split models, members as threads: bits per pool, stages that move, aborts, one-member pools."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest
import torch
from parallel_cases import fill, layout, reference, same_bits, together, whole
from torch.distributed import HashStore

from everstep.base.errors import CollectiveAborted, ConfigError, InvariantViolation
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.base.ports import Hop, Node, Reduced, Tag
from everstep.exact.layout import GradientLayout
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.parallel.staged import StagedTransport
from everstep.parallel.two_tiers import TieredTransport
from everstep.placement.tree import cover

LANES = 8
SHAPES = {0: layout(7), 1: layout(3), 2: layout(1 + 1)}
Pools = dict[int, dict[int, tuple[int, ...]]]
"""stage -> worker id -> lanes"""


class Crew:
    """Transports of workers 0..n-1 in this process."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.store = HashStore()
        self.transports: dict[int, StagedTransport] = {}
        self.waiting = threading.Event()

    def tick(self) -> None:
        self.waiting.set()

    def hire(self, i: int) -> StagedTransport:
        self.transports[i] = StagedTransport(
            *(WorkerKey(i, 0), LANES, self.tick),
            kind="auto" if self.kind == "two machines" else self.kind,
            store=self.store,
            key=b"k",
            machine=f"m{i % 2}" if self.kind == "two machines" else "m",
        )
        return self.transports[i]

    def plan(self, generation: int, pools: Pools) -> Plan:
        ids = sorted({i for pool in pools.values() for i in pool})
        for i in ids:
            if i not in self.transports:
                self.hire(i)
        members = tuple(Member(i, 0, "here", os.getpid(), "127.0.0.1:1", self.transports[i].segment) for i in ids)
        seats = tuple(
            Seat(i, stage, "active" if lanes else "standby", lanes)
            for stage, pool in sorted(pools.items())
            for i, lanes in sorted(pool.items())
        )
        return Plan(generation, "a test", members, seats, LANES, stages=len(pools))

    def open(self, generation: int, pools: Pools) -> Plan:
        plan = self.plan(generation, pools)
        done = together(*(lambda i=i: self.transports[i].open(plan, held(plan, i)) for i in plan.worker_ids))
        assert done == [None] * len(done), done
        return plan

    def reduce(self, plan: Plan, step: int) -> dict[tuple[int, int], Reduced]:
        """By (stage, worker)."""

        def one(i: int) -> dict[int, Reduced]:
            return {stage: reduce_one(self.transports[i], plan, i, stage, step) for stage in held(plan, i)}

        found = together(*(lambda i=i: one(i) for i in plan.worker_ids))
        assert all(isinstance(f, dict) for f in found), found
        return {(s, i): r for i, f in zip(plan.worker_ids, found, strict=True) for s, r in f.items()}  # type: ignore

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


def held(plan: Plan, i: int) -> dict[int, GradientLayout]:
    return {s.stage: SHAPES[s.stage] for s in plan.seats if s.worker_id == i}


def shifted(stage: int, step: int) -> int:
    """Each stage has gradients of its own."""
    return step + 1000 * stage


def reduce_one(transport: StagedTransport, plan: Plan, i: int, stage: int, step: int) -> Reduced:
    class OfStage:
        def node(self, step: int, node: Node) -> torch.Tensor:
            return transport.node(stage, step - 1000 * stage, node)

    nodes = cover(plan.lanes_of(i, stage), LANES)
    presence = fill(OfStage(), SHAPES[stage], shifted(stage, step), nodes)  # type: ignore[arg-type]
    return transport.reduce(stage, step, presence)


def check_step(found: dict[tuple[int, int], Reduced], step: int) -> None:
    for (stage, _), reduced in found.items():
        expected, present = reference(SHAPES[stage], LANES, shifted(stage, step))
        assert reduced.step == step and reduced.presence == present and same_bits(whole(reduced), expected)


def even(pools: dict[int, list[int]]) -> Pools:
    return {
        stage: {i: tuple(range(k * LANES // len(ids), (k + 1) * LANES // len(ids))) for k, i in enumerate(ids)}
        for stage, ids in pools.items()
    }


@pytest.fixture(params=["shm", "sockets", "two machines"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    found = Crew(request.param)
    yield found
    found.close()


@pytest.mark.parametrize(
    "pools",
    [
        {0: [0, 1], 1: [2, 3]},
        {0: [0], 1: [1], 2: [2]},
        {0: [0], 1: [0], 2: [0]},
        {0: [0, 1], 1: [1, 2], 2: [0, 2]},
        {0: [0, 1, 2], 1: [0, 1, 2]},
    ],
)
def test_each_pool_reduces_its_stage(crew: Crew, pools: dict[int, list[int]]) -> None:
    plan = crew.open(1, even(pools))
    for step in (1, 2):
        check_step(crew.reduce(plan, step), step)
        tag = Tag("decide", step, 0)
        records = together(
            *(lambda i=i, tag=tag: crew.transports[i].exchange(tag, bytes([i])) for i in plan.worker_ids)
        )
        assert records == [{i: bytes([i]) for i in plan.worker_ids}] * len(records)


def test_standbys_receive_what_their_pool_reduced(crew: Crew) -> None:
    plan = crew.open(1, {0: {0: tuple(range(8)), 1: ()}, 1: {2: (), 3: tuple(range(8))}})
    check_step(crew.reduce(plan, 4), 4)


def test_stages_move_between_workers_and_results_stay(crew: Crew) -> None:
    """Worker 1 goes from stage 0 to stage 1, then holds both, then the first alone again."""
    turns = [{0: [0, 1], 1: [2]}, {0: [0], 1: [1, 2]}, {0: [0, 1], 1: [1, 2]}, {0: [0, 1], 1: [2]}]
    kept = {}
    for generation, pools in enumerate(turns, 1):
        plan = crew.open(generation, even(pools))
        step = 10 + generation
        found = crew.reduce(plan, step)
        check_step(found, step)
        for before, results in kept.items():  # results of stages that a worker gave away have not changed
            check_step({k: r for k, r in results.items() if k not in found}, before)
        kept = {step: found}


def test_lane_sums_survive_a_change_of_generation(crew: Crew) -> None:
    crew.open(1, even({0: [0, 1], 1: [1, 2]}))
    sums = {stage: crew.transports[1].node(stage, 3, Node(0, 4)) for stage in (0, 1)}
    for stage, flat in sums.items():
        flat.fill_(7.0 + stage)
    crew.open(2, even({0: [1], 1: [1, 2]}))
    for stage, flat in sums.items():
        again = crew.transports[1].node(stage, 3, Node(0, 4))
        assert again.data_ptr() == flat.data_ptr() and float(again[0]) == 7.0 + stage


def test_messages_cross_pools_and_a_redo_finds_none_of_the_old(crew: Crew) -> None:
    for generation in (1, 2):
        crew.open(generation, even({0: [0], 1: [1, 2]}))
        given = torch.randn(2, 3, 4).transpose(1, 2)
        for to in (1, 2):
            crew.transports[0].channel.send(to, Hop(1, "act", 1, to), [given], b"%d" % generation)

        def one(i: int, generation: int = generation, given: torch.Tensor = given) -> None:
            (found,), meta = crew.transports[i].channel.recv(0, Hop(1, "act", 1, i))
            assert meta == b"%d" % generation and torch.equal(found, given) and found.stride() == given.stride()
            crew.transports[i].channel.send(0, Hop(1, "tied", 0, 0), [found * i])

        assert together(lambda one=one: one(1), lambda one=one: one(2)) == [None, None]
        for i in (2, 1):
            (tied,), _ = crew.transports[0].channel.recv(i, Hop(1, "tied", 0, 0))
            assert torch.equal(tied, given * i)


@pytest.mark.parametrize("where", ["exchange", "recv", "reduce", "open"])
def test_abort_frees_who_waits_in_any_of_them(crew: Crew, where: str) -> None:
    if crew.kind != "shm" and where == "open":
        pytest.skip("a store in memory cannot be told to give up; the real one is tried between processes")
    plan = crew.open(1, even({0: [0], 1: [1, 2]}))
    me = crew.transports[1]
    newer = crew.plan(2, even({0: [0], 1: [1, 2], 2: [1]}))
    calls = {
        "exchange": lambda: me.exchange(Tag("decide", 1, 0), b""),
        "recv": lambda: me.channel.recv(0, Hop(1, "act", 1, 0)),
        "reduce": lambda: reduce_one(me, plan, 1, 1, 1),
        "open": lambda: me.open(newer, held(newer, 1)),
    }
    crew.waiting.clear()

    def control() -> None:
        assert crew.waiting.wait(60)
        me.abort(2)

    fault, _ = together(calls[where], control)
    assert isinstance(fault, CollectiveAborted), fault
    for i in (0, 2):
        crew.transports[i].abort(2)
    pools = even({0: [0], 1: [1, 2]})
    check_step(crew.reduce(crew.open(3, pools), 1), 1)


def test_an_abort_before_the_generation_reaches_pools_made_for_it(crew: Crew) -> None:
    crew.hire(0).abort(1)
    plan = crew.plan(1, even({0: [0], 1: [0]}))
    with pytest.raises(CollectiveAborted):
        crew.transports[0].open(plan, held(plan, 0))


def test_random_pools_in_random_generations(crew: Crew) -> None:
    """Members, pools and lanes change at random; the bits never do."""
    draw = random.Random(11)
    for generation in range(1, 9):
        ids = sorted(draw.sample(range(4), draw.randint(1, 4)))
        pools: Pools = {}
        for stage in SHAPES:
            pool = sorted(draw.sample(ids, draw.randint(1, len(ids))))
            owner = [draw.choice(pool) for _ in range(LANES)]
            pools[stage] = {i: tuple(lane for lane in range(LANES) if owner[lane] == i) for i in pool}
        for i in set(ids) - {i for pool in pools.values() for i in pool}:
            pools[0][i] = ()
        plan = crew.open(generation, pools)
        check_step(crew.reduce(plan, generation), generation)


def test_layouts_must_be_those_of_the_seats(crew: Crew) -> None:
    plan = crew.plan(1, even({0: [0], 1: [0]}))
    with pytest.raises(InvariantViolation, match=r"stages \[0, 1\]"):
        crew.transports[0].open(plan, {0: SHAPES[0]})


def test_what_cannot_be_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="carrier pigeon"):
        StagedTransport(WorkerKey(0, 0), LANES, lambda: None, kind="carrier pigeon")
    with pytest.raises(ConfigError, match="store"):
        StagedTransport(WorkerKey(0, 0), LANES, lambda: None, kind="sockets")
    with pytest.raises(ConfigError, match="nccl with cuda"):
        StagedTransport(WorkerKey(0, 0), LANES, lambda: None, kind="nccl", store=HashStore())


def test_a_job_may_grow_from_one_machine_to_two_and_shrink_again_within_a_step() -> None:
    """Shared memory and sockets in turn, with the lane sums and the bits of the same step."""
    crew = Crew("two machines")
    one, two = even({0: [0, 2]}), even({0: [0, 1, 2]})
    plan = crew.open(1, one)
    check_step(crew.reduce(plan, 1), 1)
    pool = crew.transports[0]._pools[0]
    nodes = [pool.node(2, node).data_ptr() for node in cover(plan.lanes_of(0), LANES)]
    for generation, pools in enumerate((two, one, two, one), 2):
        plan = crew.open(generation, pools)
        check_step(crew.reduce(plan, 2), 2)
        assert type(pool._current) is (SharedMemoryTransport if pools is one else TieredTransport)
        if pools is one:
            assert nodes == [pool.node(2, node).data_ptr() for node in cover(plan.lanes_of(0), LANES)]
    together(*(lambda i=i: crew.transports[i].exchange(Tag("agree", 2, 0), b"x") for i in plan.worker_ids))
    assert pool._tiers._far._groups.links is None, "nobody needs the sockets any more"
    check_step(crew.reduce(plan, 3), 3)
    crew.close()
