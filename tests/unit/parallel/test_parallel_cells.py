"""Cells of two ranks: each rank's transport meets those of the same rank, and nobody else's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from parallel_cases import fill, layout, reference, same_bits, together, whole
from torch.distributed import HashStore

from everstep.base.errors import MembershipError
from everstep.base.plan import Member, Plan, Rank, Seat, WorkerKey
from everstep.base.ports import Hop, Node, Reduced, Tag
from everstep.parallel.staged import StagedTransport
from everstep.placement.tree import cover

LANES, WORKERS, RANKS = 4, 2, 2
SHAPES = (layout(5), layout(3))
"""Ranks hold different shards."""
Place = tuple[int, int]
"""Worker id and rank."""


class Cells:
    """The transports of all ranks of all workers, in this process."""

    def __init__(self, kind: str) -> None:
        store = HashStore()
        self.transports = {
            (i, r): StagedTransport(WorkerKey(i, 0), LANES, lambda: None, kind=kind, store=store, key=b"k", cell_rank=r)
            for i in range(WORKERS)
            for r in range(RANKS)
        }

    def plan(self, generation: int) -> Plan:
        members = []
        for i in range(WORKERS):
            head, limb = (Rank(os.getpid(), "127.0.0.1:1", self.transports[i, r].segment) for r in range(RANKS))
            members.append(Member(i, 0, "here", head.pid, head.address, head.segment, (limb,)))
        half = LANES // WORKERS
        seats = tuple(Seat(i, 0, "active", tuple(range(i * half, (i + 1) * half))) for i in range(WORKERS))
        return Plan(generation, "a test", tuple(members), seats, LANES)

    def open(self, plan: Plan) -> None:
        done = together(*(lambda t=t, r=r: t.open(plan, {0: SHAPES[r]}) for (_, r), t in self.transports.items()))
        assert done == [None] * len(done), done

    def reduce(self, plan: Plan, step: int) -> list[object]:
        return together(*(lambda p=p, t=t: reduce_one(t, plan, p, step) for p, t in self.transports.items()))

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


@pytest.fixture(params=["shm", "sockets"])
def cells(request: pytest.FixtureRequest) -> Iterator[Cells]:
    found = Cells(request.param)
    yield found
    found.close()


def shifted(step: int, rank: int) -> int:
    """Each rank has gradients of its own."""
    return step + 1000 * rank


def reduce_one(transport: StagedTransport, plan: Plan, place: Place, step: int) -> Reduced:
    i, rank = place

    class OfRank:
        def node(self, _: int, node: Node) -> torch.Tensor:
            return transport.node(0, step, node)

    presence = fill(OfRank(), SHAPES[rank], shifted(step, rank), cover(plan.lanes_of(i), LANES))  # type: ignore[arg-type]
    return transport.reduce(0, step, presence)


def test_equal_ranks_reduce_their_shards_across_generations(cells: Cells) -> None:
    for generation in (1, 2):
        plan = cells.plan(generation)
        cells.open(plan)
        step = 10 * generation
        for (_, rank), reduced in zip(cells.transports, cells.reduce(plan, step), strict=True):
            expected, present = reference(SHAPES[rank], LANES, shifted(step, rank))
            assert isinstance(reduced, Reduced), reduced
            assert reduced.presence == present and same_bits(whole(reduced), expected)


def test_records_and_messages_stay_within_a_rank(cells: Cells) -> None:
    cells.open(cells.plan(1))
    tag, key = Tag("decide", 1, 0), Hop(1, "act", 0, 0)

    def talk(place: Place, transport: StagedTransport) -> tuple[dict[int, bytes], list[int]]:
        i, _ = place
        transport.channel.send(1 - i, key, [torch.tensor([10 * place[0] + place[1]])])
        records = transport.exchange(tag, repr(place).encode())
        tensors, _ = transport.channel.recv(1 - i, key)
        return records, tensors[0].tolist()

    found = together(*(lambda p=p, t=t: talk(p, t) for p, t in cells.transports.items()))
    for (i, rank), said in zip(cells.transports, found, strict=True):
        assert said == ({w: repr((w, rank)).encode() for w in range(WORKERS)}, [10 * (1 - i) + rank])


def test_a_cell_that_lacks_the_rank_is_refused(cells: Cells) -> None:
    plan = cells.plan(1)
    short = replace(plan, members=(plan.members[0], replace(plan.members[1], limbs=())))
    with pytest.raises(MembershipError, match=r"expected a rank 1 of worker 1\.0, it has 1"):
        cells.transports[0, 1].open(short, {0: SHAPES[1]})
