"""A lane's way through the pools, and from it the list of operations of each worker. Pure.

Each worker has, for each stage that it holds, the canonical schedule (`schedules.py`) over its own lanes in ascending
order. So pools whose members hold the same lanes are pipelines side by side, each as fast as one alone, and the regular
case (one worker per stage, all lanes) is exactly the published table.

If lanes are spread differently from stage to stage (after a repair), such lists could wait for each other in a circle:
one worker has a backward pass of lane 0 before the forward pass of lane 3, another the other way round. So the lists
are played through, all workers at once, with instant messages. If no worker can go on, the lowest remaining pass is
done first: of the forward passes the one of the lowest lane at the earliest part, else of the backward passes the
lowest lane at the latest part. Its inputs are always there, because they are lower still. The lists given out are the
played ones: parts of one possible run, so they cannot wait for each other in any real run, whatever the times, provided
that sending never blocks. A worker with several stages does one thing at a time in that play, by preference a backward
pass, then the later part; that merges its lists.

Every worker plays the same from the same plan, so nothing is exchanged about it. Within a part forward passes come in
lane order, and so do backward passes.

A worker of several processes does a pass of several lanes at a time, in *turns*; an operation bears the lowest lane of
its turn. Then the lowest remaining pass may wait for others, and the lowest that can be done goes first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise

from everstep.base.errors import check
from everstep.base.pipeline.kind import Shape
from everstep.base.pipeline.schedule_table import KINDS
from everstep.base.plan import Plan, Seat
from everstep.placement.ranks import rounds
from everstep.placement.schedules import PipeOp, order, with_recompute

Turn = tuple[int, ...]
"""Lanes that go through a part at the same time, ascending."""
_TIME: Mapping[str, int] = {"forward": 1, "backward": 2}


def ops(
    plan: Plan,
    worker_id: int,
    lanes_to_run: Iterable[int],
    *,
    kind: str = "1f1b",
    chunks: int = 1,
    recompute: bool = False,
    at_once: int = 1,
) -> tuple[PipeOp, ...]:
    """Operations of a worker, in order: the passes of these lanes through the parts that its seats hold.

    lanes_to_run: equal at every worker (all lanes of a step, or those to be done again), in any order. kind: a
    schedule's name. chunks: parts per stage. recompute: keep inputs only, and compute activations again directly before
    a backward pass that does not follow its own forward pass. at_once: lanes of a turn.

    Raises: InvariantViolation if a lane has no holder in some stage.
    """
    lanes = tuple(sorted(set(lanes_to_run)))
    return _all_ops(plan.seats, plan.stages, lanes, kind, chunks, recompute, at_once).get(worker_id, ())


def turns(plan: Plan, worker_id: int, lanes_to_run: Iterable[int], at_once: int) -> dict[tuple[int, int], Turn]:
    """The lanes of each turn of a worker, by stage and the lowest of them; arguments as of `ops`."""
    own = (seat for seat in plan.seats if seat.worker_id == worker_id)
    return {(seat.stage, turn[0]): turn for seat in own for turn in _turns(seat, frozenset(lanes_to_run), at_once)}


def _turns(seat: Seat, wanted: frozenset[int], at_once: int) -> list[Turn]:
    return [tuple(turn) for turn in rounds(sorted(wanted.intersection(seat.lanes)), at_once)]


def holder(plan: Plan, part: int, lane: int) -> int:
    """worker_id of the worker that computes this lane's passes through this part."""
    return plan.holder(part % plan.stages, lane)


@lru_cache(maxsize=64)
def _all_ops(
    seats: tuple[Seat, ...], stages: int, lanes: tuple[int, ...], kind: str, chunks: int, recompute: bool, at_once: int
) -> dict[int, tuple[PipeOp, ...]]:
    owner = {(seat.stage, lane): seat.worker_id for seat in seats for lane in seat.lanes}
    for stage in range(stages):
        for lane in lanes:
            check((stage, lane) in owner, f"lane {lane} has no holder in stage {stage}")
    lists: dict[tuple[int, int], deque[PipeOp]] = {}
    wanted = frozenset(lanes)
    together: dict[tuple[int, int], Turn] = {}
    for seat in seats:
        own = _turns(seat, wanted, at_once)
        together.update(((seat.stage, lane), turn) for turn in own for lane in turn)
        if own:
            hops = max(_hops_behind(owner, seat, lane, stages) for turn in own for lane in turn)
            lists[seat.worker_id, seat.stage] = deque(
                PipeOp(op.kind, op.chunk * stages + op.stage, op.stage, own[op.micro_batch][0])
                for op in order(KINDS[kind], seat.stage, Shape(stages, hops, len(own), chunks))
            )
    played = _Play(owner, lists, stages, stages * chunks, together).run()
    return {worker_id: tuple(with_recompute(done)) if recompute else tuple(done) for worker_id, done in played.items()}


def _hops_behind(owner: Mapping[tuple[int, int], int], seat: Seat, lane: int, stages: int) -> int:
    """Number of times that the lane changes workers behind this stage: so many forward passes run ahead."""
    way = [owner[stage, lane] for stage in range(seat.stage, stages)]
    return sum(a != b for a, b in pairwise(way))


class _Play:
    """A run of all workers through their lists, with instant messages and unit times; it keeps each one's order."""

    def __init__(
        self,
        owner: Mapping[tuple[int, int], int],
        lists: dict[tuple[int, int], deque[PipeOp]],
        stages: int,
        parts: int,
        together: Mapping[tuple[int, int], Turn],
    ) -> None:
        """together: the turn of each lane, by stage and lane."""
        self.owner = owner
        self.together = together
        self.lists = lists
        self.stages = stages
        self.parts = parts
        self.now = 0
        self.done: set[PipeOp] = set()
        self.played: dict[int, list[PipeOp]] = {worker_id: [] for worker_id, _ in lists}
        self.stages_of: dict[int, list[int]] = {}
        for worker_id, stage in lists:
            self.stages_of.setdefault(worker_id, []).append(stage)
        self.busy: set[int] = set()
        self.ends: list[tuple[int, int, PipeOp]] = []
        self.left = sorted((op for own in lists.values() for op in own), key=self._rank, reverse=True)

    def run(self) -> dict[int, list[PipeOp]]:
        """Run until all lists are empty."""
        idle = set(self.played)
        while True:
            for worker_id in sorted(idle):
                self._begin(worker_id)
            idle.clear()
            if not self.ends:
                if not self._advance_lowest():
                    return self.played
                idle.update(self.played)
                continue
            self.now = self.ends[0][0]
            while self.ends and self.ends[0][0] == self.now:
                _, worker_id, op = heapq.heappop(self.ends)
                self.done.add(op)
                self.busy.discard(worker_id)
                idle.add(worker_id)
                idle.update(self._waiting_for(op))
            idle -= self.busy

    def _rank(self, op: PipeOp) -> tuple[bool, int, int]:
        backward = op.kind == "backward"
        return backward, op.lane, -op.part if backward else op.part

    def _begin(self, worker_id: int) -> None:
        heads = [self.lists[worker_id, stage][0] for stage in self.stages_of[worker_id] if self.lists[worker_id, stage]]
        ready = [op for op in heads if self._inputs_done(op)]
        if not ready:
            return
        op = min(ready, key=lambda op: (op.kind != "backward", -op.part, op.lane))
        self.lists[worker_id, op.stage].popleft()
        self.played[worker_id].append(op)
        self.busy.add(worker_id)
        heapq.heappush(self.ends, (self.now + _TIME[op.kind], worker_id, op))

    def _inputs_done(self, op: PipeOp) -> bool:
        if op.kind == "forward":
            return op.part == 0 or self._all_done(op, op.part - 1)
        if op._replace(kind="forward") not in self.done:
            return False
        return op.part + 1 == self.parts or self._all_done(op, op.part + 1)

    def _waiting_for(self, op: PipeOp) -> Iterator[int]:
        """Workers that may go on after this operation."""
        after = op.part + 1 if op.kind == "forward" else op.part - 1
        if 0 <= after < self.parts:
            for lane in self.together[op.stage, op.lane]:
                yield self.owner[after % self.stages, lane]

    def _all_done(self, op: PipeOp, part: int) -> bool:
        """Whether the turn's lanes have been through another part."""
        stage = part % self.stages
        lanes = self.together[op.stage, op.lane]
        return all(PipeOp(op.kind, part, stage, self.together[stage, lane][0]) in self.done for lane in lanes)

    def _advance_lowest(self) -> bool:
        """No worker can go on: move the lowest remaining pass that can to the front of its list. False: nothing is
        left."""
        while self.left and self.left[-1] in self.done:
            self.left.pop()
        if not self.left:
            return False
        op = next((op for op in reversed(self.left) if op not in self.done and self._inputs_done(op)), self.left[-1])
        check(self._inputs_done(op), f"nothing can go on, not even {op}")
        own = self.lists[self.owner[op.stage, op.lane], op.stage]
        own.remove(op)
        own.appendleft(op)
        return True
