"""Holders of the blocks of a stage, and the holder that does the work done once for each block. Pure.

The plan says who holds what (`Plan.shards`; a seat that is not named there holds all of its stage). Work that is done
once for a block, finishing its reduction or writing it to a checkpoint, follows from that by one rule: the holders of a
run of blocks divide it evenly.

Segments of a state that not every member holds are dealt to holders by `spread`: evenly, the copies of each in
different failure domains, and with as few moves as possible.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from everstep.base.errors import check
from everstep.base.extents import NONE, WHOLE, BlockRun, Extents, Runs, Sizes, ends_in
from everstep.base.plan import SEGMENTS, Plan, Shard
from everstep.placement.domain_spread import Crowd, DomainsOf, hosts_in_order

Holders = tuple[tuple[int, ...], ...]
"""For each segment the worker ids of its holders, ascending."""

Takers = Mapping[int, Runs]
"""Blocks of a step's reduced gradient that each member of a pool gets, by worker id; each block has a taker."""


def divided(of: Sizes, held: Mapping[int, Extents]) -> dict[int, Runs]:
    """Give each block of a state of these sizes to one of its holders: runs of blocks by worker id, in id order.

    held: by worker id. Neighbouring blocks with the same holders are cut into one run per holder; the runs differ by at
    most one block, larger ones first, and the first is for who has the fewest blocks so far, by id among equals. A
    worker without blocks has no runs. Raises: InvariantViolation if a block has no holder.
    """
    check(len(held) > 0, "expected holders of a state, got none")
    changes: dict[int, set[int]] = {}  # workers whose run of blocks begins or ends at this block
    for worker_id, extents in held.items():
        for edge in (edge for span in extents.spans(of) for edge in span):
            changes.setdefault(edge, set()).symmetric_difference_update({worker_id})
    edges = [0, *sorted(edge for edge, who in changes.items() if edge and who), sum(n for _, n in of)]
    found: dict[int, list[tuple[int, int]]] = {worker_id: [] for worker_id in sorted(held)}
    there: set[int] = set()
    has = Counter[int]()
    for lo, hi in pairwise(edges):
        there ^= changes.get(lo, set())
        check(bool(there) or lo == hi, f"blocks {lo} to {hi - 1} of {of} have no holder")
        turns = sorted(there, key=lambda worker_id: (has[worker_id], worker_id))
        for worker_id, run in zip(turns, _cut(lo, hi, len(there)), strict=True):
            has[worker_id] += run[1] - run[0]
            runs = found[worker_id]
            if runs and runs[-1][1] == run[0]:
                run = (runs.pop()[0], run[1])
            if run[0] < run[1]:
                runs.append(run)
    return {worker_id: tuple(runs) for worker_id, runs in found.items()}


def _cut(first: int, last: int, shares: int) -> Iterator[tuple[int, int]]:
    size, larger = divmod(last - first, max(1, shares))
    for k in range(shares):
        yield first, first + size + (k < larger)
        first += size + (k < larger)


_OPTIMIZER = "optimizer/"


def divided_planes(of: Sizes) -> tuple[str, ...]:
    """The planes of a state that are dealt out in segments: those of the optimizer's state in float32, of as many
    blocks as the largest of them has. All hold the others."""
    sizes = {plane: count for plane, count in of if plane.startswith(_OPTIMIZER) and ":" not in plane}
    most = max(sizes.values(), default=0)
    return tuple(plane for plane, count in sizes.items() if count == most)


def ends_of(spans: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """After which blocks a segment ends, if none of these spans of blocks may be cut. spans: (first, one beyond the
    last), on any grid. The ends count the blocks that lie in spans alone."""
    ends: list[int] = []
    count, last = 0, 0
    for lo, hi in sorted(spans):
        if lo >= last:
            ends.append(count)
        count += max(0, hi - max(lo, last))
        last = max(last, hi)
    ends = [*ends[1:], count]
    return tuple(dict.fromkeys(SegmentBlocks(count, ends).stops)) if count else ()


class SegmentBlocks:
    """In which segment each block of a plane of so many lies. stops: one beyond the last block of each segment."""

    def __init__(self, n_blocks: int, ends: Sequence[int] = ()) -> None:
        """Segments have equally many blocks, but for one; where there are fewer blocks than segments, the first
        segments have one each. ends: blocks after which a segment may end, ascending up to all, if not after any:
        then each ends with the first of them that is not before its end as above, and some have no blocks."""
        few = n_blocks < SEGMENTS
        stops = [min(n + 1, n_blocks) if few else n_blocks * (n + 1) // SEGMENTS for n in range(SEGMENTS)]
        self.stops = [ends[bisect_left(ends, stop)] for stop in stops] if ends else stops

    def segment(self, block: int) -> int:
        """Number of the block's segment."""
        return bisect_right(self.stops, block)

    def blocks(self, segments: Runs) -> Runs:
        begins = [0, *self.stops]
        runs = [(begins[lo], begins[hi]) for lo, hi in segments]
        return tuple(run for run in runs if run[0] < run[1])

    @property
    def filled(self) -> int:
        """Number of the first segments, after which none has blocks."""
        return bisect_left(self.stops, self.stops[-1]) + 1


def share(shard: Shard, of: Sizes) -> Extents:
    """What a seat holds of a state of these sizes; all of one whose sizes are not known yet."""
    planes = divided_planes(of) if shard.segments is not None else ()
    if shard.segments is None or not planes:
        return shard.state
    blocks = SegmentBlocks(dict(of)[planes[0]], ends_in(of)).blocks(shard.segments)
    runs = [BlockRun(plane, 0, count) for plane, count in of if plane not in planes]
    return Extents.part(of, [*runs, *(BlockRun(plane, lo, hi) for plane in planes for lo, hi in blocks)])


def fed_blocks(segments: Runs | None, rest: bool, of: Sizes) -> Extents:
    """Blocks of a state that a donor gives who feeds these segments of it; None: all. rest: and what is not dealt
    out."""
    if segments is None:
        return WHOLE
    given = share(Shard(0, 0, segments=segments), of)
    return given if rest else given - share(Shard(0, 0, segments=()), of)


def segment_shards(stage: int, holders: Holders, worker_ids: Iterable[int]) -> tuple[Shard, ...]:
    """Shards of a stage's pool whose segments have these holders; none where each of them holds all."""
    found = []
    for worker_id in sorted(worker_ids):
        mine = [n for n, who in enumerate(holders) if worker_id in who]
        if len(mine) < len(holders):
            found.append(Shard(worker_id, stage, segments=runs_of_numbers(mine)))
    return tuple(found)


def segment_holders(plan: Plan, stage: int, segments: int = SEGMENTS) -> Holders:
    """Holders of each of the first segments of a stage, by the plan."""
    found: list[list[int]] = [[] for _ in range(segments)]
    for seat in plan.pool(stage):
        held = plan.shard(seat.worker_id, stage).segments
        for lo, hi in ((0, segments),) if held is None else held:
            for holders in found[lo:hi]:
                holders.append(seat.worker_id)
    return tuple(map(tuple, found))


class Gift(NamedTuple):
    """Blocks, from `first` to before `stop`, whose parameters one member gives to those that have not updated them."""

    source: int
    takers: tuple[int, ...]
    first: int
    stop: int


def gifts(plan: Plan, stage: int, placed: SegmentBlocks) -> Iterator[Gift]:
    """What the members of a stage's pool give each other after an update, in the order of the blocks: the holders of a
    segment share its blocks, each of them first in turn."""
    pool = {seat.worker_id for seat in plan.pool(stage)}
    for segment, holders in enumerate(segment_holders(plan, stage, placed.filled)):
        takers = tuple(sorted(pool - {*holders}))
        for lo, hi in placed.blocks(((segment, segment + 1),)) if takers else ():
            edges = [lo + (hi - lo) * k // len(holders) for k in range(len(holders) + 1)]
            turn = segment % len(holders)
            givers = (*holders[turn:], *holders[:turn])
            yield from (Gift(i, takers, *run) for i, run in zip(givers, pairwise(edges), strict=True))


def merged_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """All blocks that lie in one of these runs."""
    found: list[tuple[int, int]] = []
    for lo, hi in sorted(runs):
        if found and lo <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], hi))
        else:
            found.append((lo, hi))
    return tuple(found)


def runs_of_numbers(numbers: Iterable[int]) -> Runs:
    """Runs of these numbers, which ascend."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n:
            runs[-1] = (runs[-1][0], n + 1)
        else:
            runs.append((n, n + 1))
    return tuple(runs)


def numbers_of_runs(runs: Runs) -> set[int]:
    """The numbers in these runs."""
    return {n for run in runs for n in range(*run)}


def finishers(pool: Plan, n_blocks: int) -> dict[int, Runs]:
    """Blocks of the gradient that each member finishes where all get all of it. pool: the plan as the pool of one stage
    sees it."""
    held = dict.fromkeys(pool.worker_ids, WHOLE) | {share.worker_id: share.gradient for share in pool.shards}
    return divided((("gradient", n_blocks),), held)


@dataclass(frozen=True)
class Division:
    """Work and results of a reduction by worker id, in blocks of the gradient. finishes: of each block one of its
    takers."""

    finishes: Takers
    takes: Takers

    @staticmethod
    def whole(finishes: Takers, n_blocks: int) -> Division:
        return Division(finishes, dict.fromkeys(finishes, ((0, n_blocks),) if n_blocks else ()))

    @staticmethod
    def among(takes: Takers, n_blocks: int) -> Division:
        """Takers of a block take turns to finish blocks."""
        of = (("gradient", n_blocks),)
        held = {i: Extents.part(of, (BlockRun("gradient", lo, hi) for lo, hi in runs)) for i, runs in takes.items()}
        return Division(divided(of, held), takes)

    def joined(self, of: Iterable[Collection[int]], n_blocks: int) -> Division:
        """The same for groups of members, each by its first: it takes for all of them, and finishes for them."""
        takes = {min(ids): merged_runs(run for i in ids for run in self.takes[i]) for ids in of}
        return Division.among(takes, n_blocks)


def writers(plan: Plan, stage: int, of: Sizes) -> dict[int, Runs]:
    """Blocks of a stage's state, of these sizes, that each member of its pool writes to a checkpoint."""
    return divided(of, {seat.worker_id: share(plan.shard(seat.worker_id, stage), of) for seat in plan.pool(stage)})


def shards_held(plan: Plan, worker_ids: Collection[int]) -> list[Shard]:
    """What these members hold, by the plan."""
    return [plan.shard(seat.worker_id, seat.stage) for seat in plan.seats if seat.worker_id in worker_ids]


def lost_stages(plan: Plan, worker_ids: Collection[int], others: Iterable[Shard] = ()) -> list[int]:
    """Stages of a plan of which these members together lack blocks, as far as the plan says. others: what more there
    is."""
    held, segments = dict.fromkeys(range(plan.stages), NONE), {k: set[int]() for k in range(plan.stages)}
    for shard in (*shards_held(plan, worker_ids), *others):
        held[shard.stage] |= shard.state
        runs = ((0, SEGMENTS),) if shard.segments is None else shard.segments
        segments[shard.stage].update(n for run in runs for n in range(*run))
    return [stage for stage, blocks in held.items() if not blocks.whole or len(segments[stage]) < SEGMENTS]


def spread(
    segments: int, copies: int, worker_ids: Iterable[int], domains: DomainsOf, before: Sequence[Sequence[int]] = ()
) -> Holders:
    """Holders of each segment: `copies` different workers (fewer if there are fewer workers).

    No worker has two segments more than another. Holdings from `before` stay where they are, as far as that allows; the
    rest goes to workers that die with the fewest of a segment's other holders. domains: by worker id.
    """
    ids = sorted(set(worker_ids))
    check(segments >= 0 and copies > 0 and len(ids) > 0, f"expected segments and workers, got {segments} and {ids}")
    copies, known = min(copies, len(ids)), set(ids)
    held = [[i for i in dict.fromkeys(who) if i in known][:copies] for who in before[:segments]]
    held += [[] for _ in range(segments - len(held))]
    room = _rooms(held, copies, ids, domains)
    crowd = cache(lambda others: Crowd(others, domains))  # hundreds of segments have few sets of holders
    nearness = cache(lambda others, i: crowd(others).near_worker(i))
    for i in ids:
        if room[i] < 0:
            # Segments that no other worker gives away: otherwise a single worker that comes could not take them all.
            most = [(len(who), nearness(frozenset(who) - {i}, i), s) for s, who in enumerate(held) if i in who]
            for *_, given in heapq.nlargest(-room[i], most):
                held[given].remove(i)
    room = _rooms(held, copies, ids, domains)
    lacking = [who for who in held if len(who) < copies]
    for who in lacking:
        while len(who) < copies and (free := [i for i in ids if room[i] > 0 and i not in who]):
            others = frozenset(who)
            taker = min(free, key=lambda i: (nearness(others, i), -room[i], i))
            who.append(taker)
            room[taker] -= 1
    for who in lacking:
        while len(who) < copies:
            _exchange(who, held, room)
    return tuple(tuple(sorted(who)) for who in held)


def _rooms(held: Sequence[Sequence[int]], copies: int, ids: Sequence[int], domains: DomainsOf) -> dict[int, int]:
    """Number of segments that each worker may take; below zero: it has to give some away. The workers with most may
    have one more, then one of each host after the other."""
    has = Counter(i for who in held for i in who)
    size, larger = divmod(len(held) * copies, len(ids))
    place = {i: k for there in hosts_in_order(ids, domains) for k, i in enumerate(there)}
    order = sorted(ids, key=lambda i: (-has[i], place[i], i))
    return {i: size + (k < larger) - has[i] for k, i in enumerate(order)}


def _exchange(who: list[int], held: Sequence[list[int]], room: dict[int, int]) -> None:
    """All workers that may take a segment hold this one already: one of them takes another segment, and its holder
    takes this one."""
    taker = min(i for i, free in room.items() if free > 0)
    other = next(one for one in held if taker not in one and not set(one) <= set(who))
    giver = min(set(other) - set(who))
    other[other.index(giver)] = taker
    who.append(giver)
    room[taker] -= 1
