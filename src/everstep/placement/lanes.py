"""Lane placement: which worker sits in which stage, and computes which lanes. Pure, a function of its arguments alone.

No choice made here changes a bit of the result (the lane tree sees to that); it changes only how long a step takes.

At the start each worker goes to its home stage in the wish, or they are spread evenly and in order. Later as little as
possible moves, because a worker that moves must copy a stage's state. Survivors stay. Newcomers go where they are
needed most. A stage that lost its whole pool takes a worker from a pool that has more than one; if there is none, a
worker of a stage nearby serves both stages.

If workers are on several hosts, members of a pool should be in different failure domains (`domains`): at the start by
how they are dealt out, later by where newcomers go, unless the wish names the homes one by one.

A fresh placement gives every worker one run of lanes, next to those of its host. A repair lets survivors keep their
lanes, because they may have computed them already, and moves only the lost lanes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from everstep.base.errors import ConfigError, InvariantViolation, check
from everstep.base.plan import Seat
from everstep.base.pool_wish import PoolWish, even_homes
from everstep.placement.domain_spread import Crowd, DomainsOf, dealt, hosts_in_order
from everstep.placement.tree import run_nodes

Pools = list[list[int]]
NOWHERE: DomainsOf = {}
_MANY = 128
"""With more workers, finding the run sizes that suit their hosts best takes too long."""


def seat_pools(
    ids: Sequence[int],
    stages: int,
    previous: Sequence[Seat],
    wish: PoolWish,
    *,
    settle: bool,
    domains: DomainsOf = NOWHERE,
) -> Pools:
    """Worker ids of every stage, ascending. Every worker sits somewhere, and no stage is empty.

    ids: ascending and distinct, at least one. previous: the seats before; empty: a start. settle: a worker in several
    stages leaves those that other workers hold, too (not while these may still have to copy the state from it).
    domains: of each worker.
    """
    if not ids:
        raise ConfigError("expected at least 1 active worker, got 0: start more workers")
    if stages == 1:
        return [list(ids)]
    domains = domains if len(hosts_in_order(ids, domains)) > 1 else NOWHERE
    sat = {(s.stage, s.worker_id) for s in previous}
    pools = [[i for i in ids if (stage, i) in sat] for stage in range(stages)]
    if not any(pools):
        pools = _start(ids, stages, wish, domains)
    seated = _seats(pools)
    waiting = [i for i in ids if i not in seated]
    waiting = _fill_empty(pools, waiting, wish)
    waiting = _share_loaded_stages(pools, waiting, wish)
    for newcomer in waiting:
        pools[_neediest(pools, newcomer, wish, domains)].append(newcomer)
    for stage in range(stages):
        if not pools[stage]:
            _cover(pools, stage, {s.worker_id for s in previous if s.role == "standby"}, domains)
    if settle:
        _drop_extra_seats(pools, wish)
    return [sorted(pool) for pool in pools]


def _start(ids: Sequence[int], stages: int, wish: PoolWish, domains: DomainsOf) -> Pools:
    """Pools without previous seats: home, if the wish names homes one by one; else as far apart as possible, if there
    are several hosts; else home, if all workers of all homes are there; else evenly."""
    at_home = {i for pool in wish.homes for i in pool}
    if wish.homes and (wish.named or wish.homes != even_homes(len(at_home), stages)):
        return [[i for i in pool if i in ids] for pool in wish.homes]
    if stages <= len(ids) and domains:
        return dealt(ids, stages, domains)
    if wish.homes and at_home == set(ids):
        return [[i for i in pool if i in ids] for pool in wish.homes]
    return [[ids[position] for position in pool] for pool in even_homes(len(ids), stages)]


def _seats(pools: Pools) -> Counter[int]:
    """Number of stages in which each worker sits."""
    return Counter(i for pool in pools for i in pool)


def _fill_empty(pools: Pools, waiting: list[int], wish: PoolWish) -> list[int]:
    """Seat newcomers in stages without workers, at home if possible. Returns the newcomers left over."""
    for at_home in (True, False):
        for stage, pool in enumerate(pools):
            fitting = [i for i in waiting if not at_home or stage in wish.homes_of(i)]
            if not pool and fitting:
                pool.append(fitting[0])
                waiting = [i for i in waiting if i != fitting[0]]
    return waiting


def _share_loaded_stages(pools: Pools, waiting: list[int], wish: PoolWish) -> list[int]:
    """Seat newcomers in stages whose members all have other stages, too: half of the newcomers each, at home if
    possible.

    Returns the newcomers left over.
    """
    while waiting:
        counts = _seats(pools)
        extras = [k for k, pool in enumerate(pools) if pool and all(counts[i] > 1 for i in pool)]
        if not extras:
            break
        newcomer = next((i for i in waiting if set(wish.homes_of(i)) & set(extras)), waiting[0])
        home = [k for k in extras if k in wish.homes_of(newcomer)]
        there = [i for k in home[:1] or extras for i in pools[k]]
        overloaded = min(there, key=lambda i: (-counts[i], i))
        own = [k for k in extras if overloaded in pools[k]]
        if home:
            own.sort(key=lambda k: (min(abs(k - h) for h in home), k))
        elif newcomer > overloaded:
            own.reverse()
        for stage in own[: max(1, counts[overloaded] // 2)]:
            pools[stage].append(newcomer)
        waiting = [i for i in waiting if i != newcomer]
    return waiting


def _neediest(pools: Pools, newcomer: int, wish: PoolWish, domains: DomainsOf) -> int:
    """Stage that lacks most workers against the wish. Among equals: the one where fewest would die with the newcomer,
    then its home, then the smallest, then the first. But its home comes first if it lacks workers, and the wish names
    it or all workers are on one host."""
    lacking = [wish.size(stage) - len(pool) for stage, pool in enumerate(pools)]
    at_home = [k for k in wish.homes_of(newcomer) if lacking[k] > 0 and (wish.named or not domains)]
    crowded = [Crowd(pool, domains).near_worker(newcomer) if domains else () for pool in pools]

    def need(stage: int) -> tuple[int, tuple[int, ...], bool, int, int]:
        away = stage not in wish.homes_of(newcomer)
        return -max(0, lacking[stage]), crowded[stage], away, len(pools[stage]), stage

    return min(at_home or range(len(pools)), key=need)


def _cover(pools: Pools, stage: int, standby: Collection[int], domains: DomainsOf) -> None:
    """Seat a worker in a stage that lost its whole pool: from a larger pool, else from nearby in addition."""
    counts = _seats(pools)
    free = [(k, i) for k, pool in enumerate(pools) if len(pool) > 1 for i in pool if counts[i] == 1]
    if free:
        # A standby moves no lanes. Among several: from the largest pool, the one nearest to others, then the last.
        crowds = [Crowd(pool, domains) for pool in pools]
        near = {(k, i): crowds[k].near_worker(i) for k, i in free}
        source, mover = max(free, key=lambda c: (c[1] in standby, len(pools[c[0]]), -c[0], near[c], c[1]))
        pools[source].remove(mover)
        pools[stage].append(mover)
        return
    nearby = [(abs(k - stage), counts[i], k, i) for k, pool in enumerate(pools) for i in pool]
    pools[stage].append(min(nearby)[3])


def _drop_extra_seats(pools: Pools, wish: PoolWish) -> None:
    """A worker in several stages leaves those where a worker with fewer stages sits, too, the largest pool first. One
    always stays."""
    while True:
        counts = _seats(pools)
        leaving = [
            (-counts[i], stage in wish.homes_of(i), i, -len(pool), stage)
            for stage, pool in enumerate(pools)
            for i in pool
            if counts[i] > 1 and any(j != i and (counts[j], j) < (counts[i], i) for j in pool)
        ]
        if not leaving:
            return
        _, _, worker_id, _, stage = min(leaving)
        pools[stage].remove(worker_id)


def actives(
    pool: Sequence[int], stage: int, previous: Sequence[Seat], wish: PoolWish, most: int | None = None
) -> list[int]:
    """Members of a pool that may get lanes, ascending: all, or as many as the wish says, at most `most`.

    Members that had lanes before (`previous`; empty for a fresh placement) come first, then members that the wish does
    not name as standby, then the others: so a standby is promoted when an active member is gone.
    """
    wished = wish.active[stage] if stage < len(wish.active) else len(pool)
    most = wished if most is None else min(wished, most)
    had = {s.worker_id for s in previous if s.stage == stage and s.lanes}
    preferred = sorted(pool, key=lambda i: (i not in had, i in wish.standby, i))
    return sorted(preferred[: max(1, most)])


def leaders(seats: Sequence[Seat], wish: PoolWish) -> tuple[int | None, ...]:
    """Leader that the wish names, by stage; None where it is not a member; empty if it names none."""
    sitting = {(s.stage, s.worker_id) for s in seats}
    found = tuple(i if (stage, i) in sitting else None for stage, i in enumerate(wish.leaders))
    return found if any(i is not None for i in found) else ()


NO_WISH = PoolWish()


def place(
    worker_ids: Iterable[int],
    lanes: int,
    *,
    stages: int = 1,
    speeds: Mapping[int, float] | None = None,
    previous: Sequence[Seat] = (),
    wish: PoolWish = NO_WISH,
    anew: bool = False,
    domains: DomainsOf = NOWHERE,
) -> tuple[Seat, ...]:
    """Seats for the workers, by stage and then by worker id; every lane is taken exactly once in every stage.

    Fresh (`previous` empty): each worker gets one run of lanes. Without speeds (or with equal ones) the sizes differ by
    at most one and the runs are those with the fewest tree nodes, of hosts and then of workers; with speeds the slowest
    worker finishes as early as possible. The runs of a host's workers lie side by side. Repair: survivors keep their
    stages and every lane; only lanes of workers that are gone move, to where the slowest finishes earliest, by
    preference beside lanes of the same owner. Workers without lanes before get lanes only from the lost ones; workers
    for whom none is left become standby.

    worker_ids: distinct, in any order. lanes: number of lanes. speeds: samples per second by worker id; a missing, zero
    or non-finite speed is unknown and counts as the mean of the others. wish: who is wanted where, and how many of a
    pool active. anew: stages are kept as in a repair, but the lanes are laid out afresh, and a worker in several stages
    leaves those that others hold, too. domains: of each worker, as far as known.

    Raises: ConfigError if there is no worker for lanes, or, at a start, a stage has more active workers than there are
    lanes; later the surplus of a pool is standby.
    """
    given = list(worker_ids)
    ids = sorted(set(given))
    check(len(ids) == len(given), f"worker ids must be distinct, got {sorted(given)}")
    if lanes < 1 or stages < 1:
        raise ConfigError(f"expected at least 1 lane and 1 stage, got {lanes} and {stages}: raise them")
    before: list[list[Seat]] = [[] for _ in range(stages)]
    for seat in previous:
        before[seat.stage].append(seat)
    seats: list[Seat] = []
    for stage, pool in enumerate(seat_pools(ids, stages, previous, wish, settle=anew, domains=domains)):
        kept = [] if anew else before[stage]
        active = actives(pool, stage, kept, wish, most=lanes if previous else None)
        _check_size(active, lanes, stage, stages)
        known = _speeds(active, speeds)
        held = _held(active, lanes, kept)
        taken = _repair(active, lanes, known, held) if held else _fresh(active, lanes, known, domains)
        for worker_id in pool:
            own = tuple(sorted(taken.get(worker_id, ())))
            seats.append(Seat(worker_id, stage, "active" if own else "standby", own))
    return tuple(seats)


def _check_size(active: list[int], lanes: int, stage: int, stages: int) -> None:
    where = "" if stages == 1 else f" in stage {stage}"
    if len(active) > lanes:
        raise ConfigError(
            f"expected at most as many active workers as lanes{where}, got {len(active)} for {lanes} lanes: "
            f"use fewer workers, raise 'lanes', or make {len(active) - lanes} of them standby"
        )


def _speeds(active: list[int], speeds: Mapping[int, float] | None) -> dict[int, float]:
    """A usable speed for every active worker."""
    given = {i: float((speeds or {}).get(i, 0.0)) for i in active}
    known = {i: v for i, v in given.items() if math.isfinite(v) and v > 0}
    return dict.fromkeys(active, sum(known.values()) / len(known) if known else 1.0) | known


def _held(active: list[int], lanes: int, previous: Sequence[Seat]) -> dict[int, list[int]]:
    """Lanes that active workers had before and keep; empty if none are kept."""
    seen: set[int] = set()
    for seat in previous:
        if any(not 0 <= lane < lanes for lane in seat.lanes):
            raise InvariantViolation(f"previous seat {seat} does not fit {lanes} lanes")
        if not seen.isdisjoint(seat.lanes):
            raise InvariantViolation(f"previous seats share lanes: {seat}")
        seen.update(seat.lanes)
    staying = set(active)
    return {s.worker_id: list(s.lanes) for s in previous if s.lanes and s.worker_id in staying}


# ---- fresh placement


def _fresh(active: list[int], lanes: int, speeds: Mapping[int, float], domains: DomainsOf) -> dict[int, list[int]]:
    """One run of lanes per worker, in id order; runs of one host's workers lie side by side."""
    hosts = hosts_in_order(active, domains)
    order = [i for there in hosts for i in there]
    if len(set(speeds.values())) == 1:
        sizes = _even_sizes([len(there) for there in hosts] if len(active) <= _MANY else [len(active)], lanes)
    else:
        shares = _fill(dict.fromkeys(active, 1), lanes - len(active), speeds)
        sizes = [shares[i] for i in order]
    taken: dict[int, list[int]] = {}
    first = 0
    for worker_id, size in zip(order, sizes, strict=True):
        taken[worker_id] = list(range(first, first + size))
        first += size
    return taken


def _even_sizes(hosts: Sequence[int], lanes: int) -> list[int]:
    """Run sizes that differ by at most one, for these numbers of workers per host. They give the fewest tree nodes of
    hosts, then of workers; among equals the first workers have more.

    Dynamic programming over (workers seated, larger runs used), from the last worker back, for each number of larger
    runs that the workers after it on its host use: these give the position of a run.
    """
    workers = sum(hosts)
    size, larger = divmod(lanes, workers)
    if larger == 0:
        return [size] * workers
    rest: dict[int, _Sizes] = {larger: _Sizes((0, 0), None, False)}  # for the workers not yet seated, by larger runs
    seated = workers
    for there in reversed(hosts):
        seated -= there
        rest = _host_sizes(rest, seated, there, size, larger, lanes)
    found, at = [], rest[0]
    while at.after is not None:
        found.append(size + at.large)
        at = at.after
    return found


class _Sizes(NamedTuple):
    """How the workers from one on are served: nodes of hosts and workers; whether the first has a larger run."""

    nodes: tuple[int, int]
    after: _Sizes | None
    large: bool


def _host_sizes(
    rest: Mapping[int, _Sizes], seated: int, there: int, size: int, larger: int, lanes: int
) -> dict[int, _Sizes]:
    """Best sizes with one more host of `there` workers before the others."""
    best: dict[int, _Sizes] = {}
    for end_used in sorted(rest, reverse=True):
        end = (seated + there) * size + end_used
        within: dict[int, _Sizes] = {end_used: rest[end_used]}
        for position in reversed(range(seated, seated + there)):
            now: dict[int, _Sizes] = {}
            for used, later in within.items():
                for large in (True, False):
                    before = used - large
                    if not 0 <= before <= min(position, larger):
                        continue
                    first = position * size + before
                    nodes = later.nodes[0], later.nodes[1] + run_nodes(first, first + size + large, lanes)
                    if before not in now or nodes < now[before].nodes or (nodes == now[before].nodes and large):
                        now[before] = _Sizes(nodes, later, large)
            within = now
        for used, found in within.items():
            start = seated * size + used
            nodes = found.nodes[0] + run_nodes(start, end, lanes), found.nodes[1]
            if used not in best or nodes < best[used].nodes:
                best[used] = found._replace(nodes=nodes)
    return best


def _fill(
    shares: Mapping[int, int], more: int, speeds: Mapping[int, float], favoured: Collection[int] = ()
) -> dict[int, int]:
    """Shares after `more` lanes are handed out one by one, each to the worker that would finish it first.

    Ties go to the favoured, then to the lowest id.

    This minimises the time of the slowest worker: no exchange of a lane can lower it.
    """
    filled = dict(shares)
    heap = [((share + 1) / speeds[i], i not in favoured, i) for i, share in filled.items()]
    heapq.heapify(heap)
    for _ in range(more):
        _, last, worker_id = heap[0]
        filled[worker_id] += 1
        heapq.heapreplace(heap, ((filled[worker_id] + 1) / speeds[worker_id], last, worker_id))
    return filled


# ---- repair


def _repair(
    active: list[int], lanes: int, speeds: Mapping[int, float], held: Mapping[int, list[int]]
) -> dict[int, list[int]]:
    """Lanes per worker: those held, plus the lost lanes spread over the active workers."""
    owner: dict[int, int] = {lane: i for i, own in held.items() for lane in own}
    n_lost = lanes - len(owner)
    newcomers = [i for i in active if i not in held][:n_lost]
    start = {i: len(held[i]) if i in held else 1 for i in active if i in held or i in newcomers}
    shares = _fill(start, n_lost - len(newcomers), speeds, newcomers)
    for newcomer in newcomers:
        _seat_newcomer(newcomer, shares[newcomer], lanes, owner)
    spare = _spare(start, shares, speeds, held)
    while len(owner) < lanes:
        lane, worker_id = _next_move(lanes, owner, spare, speeds, start)
        owner[lane] = worker_id
        spare[worker_id] -= 1
        start[worker_id] += 1
    taken: dict[int, list[int]] = {}
    for lane, worker_id in owner.items():
        taken.setdefault(worker_id, []).append(lane)
    return taken


def _spare(
    start: Mapping[int, int], shares: Mapping[int, int], speeds: Mapping[int, float], held: Mapping[int, list[int]]
) -> dict[int, int]:
    """Further lanes that each survivor can take without finishing later than the slowest that must take any."""
    limit = max((shares[i] / speeds[i] for i in held if shares[i] > start[i]), default=0.0)
    spare: dict[int, int] = {}
    for i in held:
        most = int(limit * speeds[i]) + 1
        while most / speeds[i] > limit:
            most -= 1
        spare[i] = max(0, most - start[i])
    return spare


def _gaps(lanes: int, owner: Mapping[int, int]) -> list[tuple[int, int]]:
    """Runs [lo, hi) of lanes without an owner, ascending."""
    edges = [-1, *sorted(owner), lanes]
    return [(a + 1, b) for a, b in pairwise(edges) if b - a > 1]


def _seat_newcomer(newcomer: int, share: int, lanes: int, owner: dict[int, int]) -> None:
    """Give the newcomer the run of lost lanes with the fewest nodes in it and beside it; several if none fits."""

    def nodes(lo: int, hi: int) -> int:
        return run_nodes(lo, hi, lanes) if lo < hi else 0

    while share > 0:
        gaps = _gaps(lanes, owner)
        size = min(share, max(hi - lo for lo, hi in gaps))
        _, first = min(
            (nodes(lo, at) + nodes(at, at + size) + nodes(at + size, hi), at)
            for lo, hi in gaps
            for at in range(lo, hi - size + 1)
        )
        owner.update(dict.fromkeys(range(first, first + size), newcomer))
        share -= size


def _next_move(
    lanes: int,
    owner: Mapping[int, int],
    spare: Mapping[int, int],
    speeds: Mapping[int, float],
    loads: Mapping[int, int],
) -> tuple[int, int]:
    """(lane, worker id): a lost lane next to one of a survivor that can take it; without such, the first lost lane.

    Among several: to the worker that finishes first with it, then the lowest lane.
    """
    gaps = _gaps(lanes, owner)
    beside = [(lo, owner[lo - 1]) for lo, _ in gaps if lo > 0] + [(hi - 1, owner[hi]) for _, hi in gaps if hi < lanes]
    moves = [(lane, i) for lane, i in beside if spare.get(i, 0) > 0]
    if not moves:
        moves = [(gaps[0][0], i) for i, room in spare.items() if room > 0]
    check(bool(moves), f"nobody can take the lanes {gaps}")
    return min(moves, key=lambda move: ((loads[move[1]] + 1) / speeds[move[1]], *move))
