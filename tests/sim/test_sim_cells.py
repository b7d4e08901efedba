"""The ranks of one worker, in the abstract: they meet, add up and leave in any order, and never wait for one that has
left. Values are nested tuples, so a sum tells which lanes and shards it is of, and in which order they were added."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from everstep.base.ports import Node
from everstep.placement.ranks import Add, Folding, SumPlace, rounds
from everstep.placement.tree import children, cover, fold

SEEDS = int(os.environ.get("EVERSTEP_TEST_SCHEDULES", "500"))
ATOMS = 12
"""Of each unit: ranges for two, three and four ranks consist of them."""
Waits = Iterator[Callable[[], bool]]
"""Steps of one rank; before each it waits for this."""


@dataclass
class Cell:
    """Ranks over one memory, with so many units that are exchanged. cut: the generation has ended."""

    ranks: int
    lanes: list[int]
    n_lanes: int
    units: int
    boxes: int = 2
    cut: bool = False
    go: bool = True
    counts: list[int] = field(default_factory=list)
    held: dict[tuple[SumPlace, int, int], Any] = field(default_factory=dict)
    slots: dict[Node, int] = field(default_factory=dict)
    """What the head has in the end."""

    def rank(self, me: int) -> Waits:
        """One rank, as `CellHead.passes` and `CellLimb.lanes` have it: a gate before each pass, whose word the head
        alone writes."""
        folding, point = Folding(cover(self.lanes, self.n_lanes)), 0
        for turn in rounds(self.lanes, self.ranks):
            point += 1
            if self.leaves_before(me):
                return
            if me == 0:
                self.go = self.gate()
            yield from self.meet(me, point, range(self.ranks))
            if not self.go:
                break
            adds = folding.round(turn)
            yield from self.passes(me, self.taking(turn), adds, point)
            point += self.units + 1
        if me == 0:
            self.slots = folding.slots

    def leaves_before(self, me: int) -> bool:
        return False

    def gate(self) -> bool:
        return not self.cut

    def taking(self, turn: Any) -> list[int]:
        return list(turn)

    def passes(self, me: int, turn: list[int], adds: list[Add], point: int) -> Waits:
        for unit in range(self.units) if me < len(turn) else ():
            for part in range(ATOMS):
                self.held[SumPlace("box", me), unit % self.boxes, part] = (turn[me], unit)
            yield from self.meet(me, point + 1 + unit, range(len(turn)))
            mine = range(me * ATOMS // len(turn), (me + 1) * ATOMS // len(turn))
            for add in self.folded(adds, turn):
                at = unit if add.into.kind == "slot" else unit % self.boxes
                for part in mine:
                    one = [self.value(place, unit, part) for place in (add.left, add.right) if place is not None]
                    self.held[add.into, at, part] = one[0] if len(one) == 1 else tuple(one)
                yield lambda: True

    def folded(self, adds: list[Add], turn: list[int]) -> list[Add]:
        return adds

    def value(self, place: SumPlace, unit: int, part: int) -> Any:
        return self.held[place, unit if place.kind == "slot" else unit % self.boxes, part]

    def meet(self, me: int, point: int, ranks: range) -> Waits:
        self.counts[me] = point
        yield lambda: all(self.counts[rank] >= point for rank in ranks)


def expected(node: Node, unit: int) -> Any:
    """The sum of a subtree by the canonical rule."""
    if node.hi - node.lo == 1:
        return node.lo, unit
    return tuple(expected(child, unit) for child in children(node))


def left_waiting(ranks: Mapping[int, Waits], rng: Random, moment: Callable[[int], object] = lambda now: None) -> str:
    """Let ranks go on in an order that is drawn, until none can. moment: called before each turn. Returns words about
    those that wait for ever, "" if none does."""
    running, waits = dict(ranks), dict.fromkeys(ranks, lambda: True)
    for now in range(100_000):
        moment(now)
        able = [me for me in running if waits[me]()]
        if not able:
            break
        me = rng.choice(able)
        try:
            waits[me] = next(running[me])
        except StopIteration:
            del running[me]
    return f"ranks {sorted(running)} wait for one that has left" if running else ""


def problem(kind: type[Cell], seed: int) -> str:
    """Run one schedule; says what is wrong, "" for nothing."""
    rng = Random(seed)
    n_lanes = rng.randint(1, 12)
    first = rng.randrange(n_lanes)
    cell = kind(rng.randint(2, 4), list(range(first, n_lanes)), n_lanes, rng.randint(1, 4))
    cell.counts = [0] * cell.ranks
    cut_at = rng.choice((None, rng.randint(0, 60)))

    def cut(now: int) -> None:
        cell.cut = cell.cut or now == cut_at

    if waiting := left_waiting({me: cell.rank(me) for me in range(cell.ranks)}, rng, cut):
        return waiting
    for node, slot in cell.slots.items():
        for unit in range(cell.units):
            parts = [v for (place, u, _), v in cell.held.items() if place == SumPlace("slot", slot) and u == unit]
            if any(value != expected(node, unit) for value in parts):
                return f"the sum of {node} is {parts}"
    return ""


@dataclass
class Seat:
    """Ranks that compute a lane together, each its own shards of it, which they exchange again and again by boxes that
    take turns, as `BoxExchange` and `ShardMesh.total` have them. came: ranks in the order in which they came to each
    point; leaver: raises before this exchange."""

    degree: int
    shards: int
    exchanges: int
    leaver: tuple[int, int] | None
    boxes: int = 2
    counts: list[int] = field(default_factory=list)
    came: dict[int, list[int]] = field(default_factory=dict)
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    totals: dict[tuple[int, int], Any] = field(default_factory=dict)
    broken: bool = False

    def mine(self, me: int) -> range:
        each = self.shards // self.degree
        return range(me * each, (me + 1) * each)

    def rank(self, me: int) -> Waits:
        for point in range(1, self.exchanges + 1):
            if (me, point) == self.leaver:
                self.leaves()
                return
            for shard in self.mine(me):
                self.held[shard, point % self.boxes] = (shard, point)
                yield lambda: True
            self.counts[me] = point
            self.came.setdefault(point, []).append(me)
            yield lambda point=point: self.broken or min(self.counts) >= point  # type: ignore[misc]
            if min(self.counts) < point:
                return
            found = {}
            for shard in range(self.shards):
                found[shard] = self.held[shard, point % self.boxes]
                yield lambda: True
            self.totals[me, point] = self.total(point, found)

    def leaves(self) -> None:
        self.broken = True

    def total(self, point: int, found: dict[int, Any]) -> Any:
        return fold(self.shards, found, lambda left, right: (left, right))


def seat_problem(kind: type[Seat], seed: int) -> str:
    """As `problem`, of ranks that compute a lane together."""
    rng = Random(seed)
    shards = rng.choice((2, 4, 6))
    degree = rng.choice([n for n in range(2, shards + 1) if shards % n == 0])
    seat = kind(degree, shards, rng.randint(1, 5), rng.choice((None, (rng.randrange(degree), rng.randint(1, 5)))))
    seat.counts = [0] * degree
    if waiting := left_waiting({me: seat.rank(me) for me in range(degree)}, rng):
        return waiting
    for (me, point), total in seat.totals.items():
        if total != fold(shards, {k: (k, point) for k in range(shards)}, lambda left, right: (left, right)):
            return f"the sum of rank {me} at {point} is {total}"
    return ""


def test_all_schedules_end_with_the_canonical_sums() -> None:
    assert [seed for seed in range(SEEDS) if problem(Cell, seed)] == []
    assert [seed for seed in range(SEEDS) if seat_problem(Seat, seed)] == []


class NoGate(Cell):
    """Each rank looks for itself whether the generation has ended."""

    def leaves_before(self, me: int) -> bool:
        return self.cut

    def gate(self) -> bool:
        return True


class HeadAloneHears(Cell):
    """The head leaves at a cut; its limbs are not told."""

    def leaves_before(self, me: int) -> bool:
        return me == 0 and self.cut

    def gate(self) -> bool:
        return True


class RepeatedLaneCounts(Cell):
    """A rank without a lane in the last round repeats one, and adds it."""

    def taking(self, turn: Any) -> list[int]:
        return [*turn, *[turn[0]] * (self.ranks - len(turn))]

    def folded(self, adds: list[Add], turn: list[int]) -> list[Add]:
        more = [Add(one.into, one.into, SumPlace("box", len(turn) - 1)) for one in adds[-1:]]
        return [*adds, *more] if len(set(turn)) < len(turn) else adds


@dataclass
class OneBox(Cell):
    """A rank puts the next unit where others still read the last one."""

    boxes: int = 1


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (NoGate, "wait for one that has left"),
        (HeadAloneHears, "wait for one that has left"),
        (RepeatedLaneCounts, "the sum of"),
        (OneBox, "the sum of"),
    ],
)
def test_planted_bugs_are_noticed(bug: type[Cell], said: str) -> None:
    assert any(said in problem(bug, seed) for seed in range(SEEDS))


class AsTheyCome(Seat):
    """Shards are added in the order in which their ranks came."""

    def total(self, point: int, found: dict[int, Any]) -> Any:
        order = [shard for me in self.came[point] for shard in self.mine(me)]
        return super().total(point, {k: found[shard] for k, shard in enumerate(order)})


class LeavesSilently(Seat):
    """A rank whose pass raises tells nobody."""

    def leaves(self) -> None:
        pass


@dataclass
class OneShardBox(Seat):
    """A rank puts its next shards where others still read the last ones."""

    boxes: int = 1


@pytest.mark.parametrize(
    ("bug", "said"),
    [(AsTheyCome, "the sum of"), (LeavesSilently, "wait for one that has left"), (OneShardBox, "the sum of")],
)
def test_planted_bugs_among_shards_are_noticed(bug: type[Seat], said: str) -> None:
    assert any(said in seat_problem(bug, seed) for seed in range(SEEDS))
