"""What the tests of the transports share: a layout with gaps, lane gradients, and the dumb reference reduction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.base.ports import Node, Reduced, Transport
from everstep.exact.layout import BLOCK_ELEMENTS, Entry, GradientLayout, UnitRange
from everstep.placement.tree import children, cover, fold


def entry(name: str, unit: int, numel: int, offset: int) -> Entry:
    return Entry(name, unit, "param", (numel,), numel, offset, (1,), "float32")


def layout(blocks: int = 7) -> GradientLayout:
    """Two units: a small one of one block with two entries and gaps, and a big one that fills the other blocks."""
    big = (blocks - 1) * BLOCK_ELEMENTS
    entries = (entry("a", 0, 1000, 0), entry("b", 0, 77, 1008), entry("c", 1, big, BLOCK_ELEMENTS))
    units = (UnitRange(0, 1085, 1085), UnitRange(BLOCK_ELEMENTS, BLOCK_ELEMENTS + big, BLOCK_ELEMENTS + big))
    return GradientLayout(entries, units, blocks * BLOCK_ELEMENTS)


def leaf(shape: GradientLayout, step: int, lane: int) -> dict[int, torch.Tensor]:
    """A lane's gradients by entry; some lanes lack some entries, and at every fifth step nobody has the second."""
    generator = torch.Generator().manual_seed(step * 1000 + lane)
    found = {}
    for i, e in enumerate(shape.entries):
        value = torch.randn(e.numel, generator=generator)
        absent = (i == 1 and step % 5 == 0) or (i == 0 and (step + lane) % 3 == 0)
        if not absent:
            found[i] = value
    return found


def add(left: Mapping[int, torch.Tensor], right: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    both = {i: left[i] + right[i] for i in left.keys() & right.keys()}
    return {**left, **right, **both}


def node_sum(shape: GradientLayout, step: int, node: Node) -> dict[int, torch.Tensor]:
    if node.hi - node.lo == 1:
        return leaf(shape, step, node.lo)
    left, right = children(node)
    return add(node_sum(shape, step, left), node_sum(shape, step, right))


def fill(transport: Transport, shape: GradientLayout, step: int, nodes: tuple[Node, ...]) -> dict[Node, bytes]:
    """What a worker does before it reduces. Absent entries hold rubbish, as they may."""
    presence = {}
    for node in nodes:
        total = node_sum(shape, step, node)
        flat = transport.node(step, node)
        assert flat.numel() == shape.numel and flat.data_ptr() % 64 == 0
        flat.zero_()
        for i, e in enumerate(shape.entries):
            flat[e.offset : e.offset + e.numel] = total.get(i, float("nan"))
        presence[node] = bytes(i in total for i in range(len(shape.entries)))
    return presence


def reference(shape: GradientLayout, n_lanes: int, step: int) -> tuple[torch.Tensor, bytes]:
    """The whole reduction, by the dumb fold over the lanes."""
    total = fold(n_lanes, {lane: leaf(shape, step, lane) for lane in range(n_lanes)}, add)
    flat = torch.zeros(shape.numel)
    for i, value in total.items():
        flat[shape.entries[i].offset : shape.entries[i].offset + shape.entries[i].numel] = value
    return flat, bytes(i in total for i in range(len(shape.entries)))


def whole(reduced: Reduced) -> torch.Tensor:
    """The pieces side by side; fails if they leave a gap."""
    at = 0
    for piece in reduced.pieces:
        assert piece.start == at and piece.data.numel() == piece.stop - piece.start
        at = piece.stop
    return torch.cat([piece.data for piece in reduced.pieces])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def plan_of(
    generation: int, members: list[Member], lanes: int, runs: list[tuple[int, ...]] | None = None, **more: object
) -> Plan:
    """Even runs of lanes unless given."""
    n = len(members)
    runs = runs or [tuple(range(k * lanes // n, (k + 1) * lanes // n)) for k in range(n)]
    seats = tuple(
        Seat(m.worker_id, 0, "active" if run else "standby", run) for m, run in zip(members, runs, strict=True)
    )
    return Plan(generation, "a test", tuple(members), seats, lanes, **more)  # type: ignore[arg-type]


def member(transport: Transport, key: WorkerKey, pid: int) -> Member:
    return Member(key.worker_id, key.incarnation, "here", pid, "127.0.0.1:1", transport.segment)


def reduce_step(transport: Transport, shape: GradientLayout, plan: Plan, me: int, step: int) -> Reduced:
    nodes = cover(plan.lanes_of(me), plan.lanes)
    return transport.reduce(step, fill(transport, shape, step, nodes))


def together(*calls: Callable[[], object]) -> list[object]:
    """Runs all at once, in threads; returns results, or the exceptions raised."""
    results: list[object] = [None] * len(calls)

    def run(k: int) -> None:
        try:
            results[k] = calls[k]()
        except Exception as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "still waiting"
    return results
