"""Cells of a pipeline, in the abstract: hops between heads, gates before passes, deaths and cuts, in any order. Nobody
waits for one that has left, and what is not cut is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from everstep.base.plan import Member, Plan, Seat
from everstep.placement.routes import holder, ops, turns
from everstep.placement.schedules import PipeOp

SEEDS = int(os.environ.get("EVERSTEP_TEST_SCHEDULES", "400"))
Waits = Iterator[Callable[[], bool]]
"""Steps of one rank; before each it waits for this."""


@dataclass
class Pipeline:
    """Cells of so many ranks. sent: hops under way; counts: points at which ranks are; shut: cells whose gate is."""

    plan: Plan
    ranks: int
    cut: bool = False
    sent: set[tuple[str, int, int]] = field(default_factory=set)
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    shut: set[int] = field(default_factory=set)
    passed: list[tuple[str, int, int]] = field(default_factory=list)

    def rank(self, cell: int, me: int) -> Waits:
        """One rank of a cell, as `CellPasses` and `LimbPasses` have it."""
        together = turns(self.plan, cell, range(self.plan.lanes), self.ranks)
        point = 0
        for op in ops(self.plan, cell, range(self.plan.lanes), at_once=self.ranks):
            turn, point = together[op.stage, op.lane], point + 3
            if self.receives(me):
                for lane in turn if me == 0 else turn[me : me + 1]:
                    yield self.arrival(op, lane)
            if self.leaves(me):
                return
            if me == 0 and self.cut:
                self.shut.add(cell)
            yield from self.meet(cell, me, point)
            if cell in self.shut:
                return
            yield from self.meet(cell, me, point + 1)  # what the ranks exchange in a pass
            yield from self.meet(cell, me, point + 2)
            if me == 0:
                self.passed += [(op.kind, op.part, lane) for lane in turn]
                self.sent |= {(op.kind, op.part, lane) for lane in turn}
            yield lambda: True

    def receives(self, me: int) -> bool:
        return me == 0

    def leaves(self, me: int) -> bool:
        return False

    def arrival(self, op: PipeOp, lane: int) -> Callable[[], bool]:
        """Whether what a lane needs of another part is there, or the generation has ended."""
        before = op.part - 1 if op.kind == "forward" else op.part + 1
        needed = 0 <= before < self.plan.stages
        return lambda: not needed or self.cut or (op.kind, before, lane) in self.sent

    def meet(self, cell: int, me: int, point: int) -> Waits:
        self.counts[cell, me] = point
        others = [(cell, rank) for rank in range(self.ranks)]
        yield lambda: all(self.counts.get(one, 0) >= point for one in others)


def drawn(rng: Random) -> Plan:
    """Lanes lie anyhow in each stage; a worker may hold several."""
    lanes, stages, workers = rng.randint(1, 9), rng.randint(2, 3), rng.randint(1, 4)
    owners = [[rng.randrange(workers) for _ in range(lanes)] for _ in range(stages)]
    seats = [
        Seat(worker, stage, "active", tuple(lane for lane in range(lanes) if own[lane] == worker))
        for stage, own in enumerate(owners)
        for worker in sorted(set(own))
    ]
    there = sorted({seat.worker_id for seat in seats})
    return Plan(1, "", tuple(Member(i, 0, "h") for i in there), tuple(seats), lanes, stages)


def problem(kind: type[Pipeline], seed: int) -> str:
    """Run one schedule; says what is wrong, "" for nothing."""
    rng = Random(seed)
    line = kind(drawn(rng), rng.randint(2, 3))
    running = {(cell, me): line.rank(cell, me) for cell in line.plan.worker_ids for me in range(line.ranks)}
    waits: dict[tuple[int, int], Callable[[], bool]] = dict.fromkeys(running, lambda: True)
    dies_at = rng.choice((None, rng.randint(0, 80)))
    cut_at = None if dies_at is None else dies_at + rng.randint(0, 40)
    for now in range(100_000):
        if now == dies_at:
            dead = rng.choice(line.plan.worker_ids)
            running = {who: rank for who, rank in running.items() if who[0] != dead}
        able = [who for who in running if waits[who]()]
        if now == cut_at or (not able and cut_at is not None and not line.cut):
            line.cut = True
        elif not able:
            break
        else:
            who = rng.choice(able)
            try:
                waits[who] = next(running[who])
            except StopIteration:
                del running[who]
    if running:
        return f"ranks {sorted(running)} wait for one that has left"
    wanted = 2 * line.plan.stages * line.plan.lanes
    if cut_at is None and (len(line.passed) != wanted or len(set(line.passed)) != wanted):
        return f"{len(line.passed)} passes of {wanted} were made"
    assert all(holder(line.plan, part, lane) in line.plan.worker_ids for _, part, lane in line.passed)
    return ""


def test_all_schedules_end() -> None:
    assert [seed for seed in range(SEEDS) if problem(Pipeline, seed)] == []


class NoGate(Pipeline):
    """Each rank awaits what its own lane needs, and leaves by itself at a cut."""

    def receives(self, me: int) -> bool:
        return True

    def leaves(self, me: int) -> bool:
        return self.cut


class HeadAloneHears(Pipeline):
    """The head leaves at a cut, and leaves the gate as it is."""

    def leaves(self, me: int) -> bool:
        return me == 0 and self.cut


class NoTurns(Pipeline):
    """Cells go through lists that were made for workers of one process, but several lanes at a time."""

    def rank(self, cell: int, me: int) -> Waits:
        together = turns(self.plan, cell, range(self.plan.lanes), self.ranks)
        for op in ops(self.plan, cell, range(self.plan.lanes)):
            for lane in together.get((op.stage, op.lane), ()):
                yield self.arrival(op, lane)
                self.sent.add((op.kind, op.part, lane))
            self.passed += [(op.kind, op.part, lane) for lane in together.get((op.stage, op.lane), ())] * (me == 0)


@pytest.mark.parametrize("bug", [NoGate, HeadAloneHears, NoTurns])
def test_planted_bugs_are_noticed(bug: type[Pipeline]) -> None:
    assert any(problem(bug, seed) for seed in range(SEEDS))
