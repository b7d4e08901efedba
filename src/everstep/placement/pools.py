"""Which worker sits in the pool of which stage, and who of a pool is active. Pure, a function of its arguments alone.

At the start everybody goes home: where the wish wants it, else evenly and in order. Afterwards as little as possible
moves, because moving a worker means to copy a stage's state: survivors stay; newcomers go where they are needed most; a
stage that has lost its whole pool takes a worker from a pool that can do without, and only if there is none, a worker
of a stage nearby serves it in addition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from everstep.base.errors import ConfigError
from everstep.base.plan import Seat
from everstep.base.pool_wish import PoolWish, even_homes

Pools = list[list[int]]


def seat_pools(ids: Sequence[int], stages: int, previous: Sequence[Seat], wish: PoolWish, *, settle: bool) -> Pools:
    """The worker ids of every stage, ascending; everybody sits somewhere, and no stage is empty.

    ids: ascending and distinct, at least one. previous: the seats before; empty: a start. settle: whoever sits in
    several stages leaves those that others hold as well (not while those may still have to copy the state from it).
    """
    if not ids:
        raise ConfigError("expected at least 1 active worker, got 0: start more workers")
    if stages == 1:
        return [list(ids)]
    sat = {(s.stage, s.worker_id) for s in previous}
    pools = [[i for i in ids if (stage, i) in sat] for stage in range(stages)]
    if not any(pools):
        pools = _start(ids, stages, wish)
    seated = _seats(pools)
    waiting = [i for i in ids if i not in seated]
    waiting = _fill_empty(pools, waiting, wish)
    waiting = _relieve(pools, waiting, wish)
    for newcomer in waiting:
        pools[_neediest(pools, newcomer, wish)].append(newcomer)
    for stage in range(stages):
        if not pools[stage]:
            _cover(pools, stage, {s.worker_id for s in previous if s.role == "standby"})
    if settle:
        _leave_extras(pools, wish)
    return [sorted(pool) for pool in pools]


def _start(ids: Sequence[int], stages: int, wish: PoolWish) -> Pools:
    """Without anybody's past: home, if all homes are there; else evenly, unless the homes are named one by one."""
    at_home = {i for pool in wish.homes for i in pool}
    if wish.homes and (at_home == set(ids) or wish.homes != even_homes(len(at_home), stages)):
        return [[i for i in pool if i in ids] for pool in wish.homes]
    return [[ids[position] for position in pool] for pool in even_homes(len(ids), stages)]


def _seats(pools: Pools) -> Counter[int]:
    """In how many stages each worker sits."""
    return Counter(i for pool in pools for i in pool)


def _fill_empty(pools: Pools, waiting: list[int], wish: PoolWish) -> list[int]:
    """Newcomers for the stages that nobody holds, their home if possible. Returns those who are left."""
    for at_home in (True, False):
        for stage, pool in enumerate(pools):
            fitting = [i for i in waiting if not at_home or stage in wish.homes_of(i)]
            if not pool and fitting:
                pool.append(fitting[0])
                waiting = [i for i in waiting if i != fitting[0]]
    return waiting


def _relieve(pools: Pools, waiting: list[int], wish: PoolWish) -> list[int]:
    """Newcomers for the stages whose every member has others too: half of them each, its home if possible.

    Returns those who are left.
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


def _neediest(pools: Pools, newcomer: int, wish: PoolWish) -> int:
    """The stage that lacks most against the wish; of equals the newcomer's home, then the smallest, then the first."""

    def need(stage: int) -> tuple[int, bool, int, int]:
        lacking = wish.size(stage) - len(pools[stage])
        return -max(0, lacking), stage not in wish.homes_of(newcomer), len(pools[stage]), stage

    lacks_at_home = [k for k in wish.homes_of(newcomer) if wish.size(k) > len(pools[k])]
    return min(lacks_at_home or range(len(pools)), key=need)


def _cover(pools: Pools, stage: int, standby: Collection[int]) -> None:
    """Somebody for a stage whose whole pool is gone: from a pool that can do without, else from nearby in addition."""
    counts = _seats(pools)
    free = [(k, i) for k, pool in enumerate(pools) if len(pool) > 1 for i in pool if counts[i] == 1]
    if free:
        # A standby moves no lanes. Of several: from the largest pool, of it the last.
        source, mover = max(free, key=lambda c: (c[1] in standby, len(pools[c[0]]), -c[0], c[1]))
        pools[source].remove(mover)
        pools[stage].append(mover)
        return
    near = [(abs(k - stage), counts[i], k, i) for k, pool in enumerate(pools) for i in pool]
    pools[stage].append(min(near)[3])


def _leave_extras(pools: Pools, wish: PoolWish) -> None:
    """Who sits in several stages leaves those where somebody with fewer stages sits too, the largest pool first; one
    always stays.
    """
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
    """Who of a pool may get lanes, ascending: all, or as many as the wish says, at most `most`.

    Those who had lanes before (`previous`: empty for a placement anew) come first, then those whom the wish does not
    name as standby, then the others: so a standby is promoted when an active member is gone.
    """
    wished = wish.active[stage] if stage < len(wish.active) else len(pool)
    most = wished if most is None else min(wished, most)
    had = {s.worker_id for s in previous if s.stage == stage and s.lanes}
    preferred = sorted(pool, key=lambda i: (i not in had, i in wish.standby, i))
    return sorted(preferred[: max(1, most)])


def leaders(seats: Sequence[Seat], wish: PoolWish) -> tuple[int | None, ...]:
    """By stage: the leader that the wish names, None where it is not a member; empty if it names nobody."""
    sitting = {(s.stage, s.worker_id) for s in seats}
    found = tuple(i if (stage, i) in sitting else None for stage, i in enumerate(wish.leaders))
    return found if any(i is not None for i in found) else ()
