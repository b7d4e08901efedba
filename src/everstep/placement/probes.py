"""Which lanes of a step are computed by a second member, to see that it computes the same. Pure.

All members come to the same answer from the same plan. A lane is probed by who is new in the job, in its first step,
and every so many steps by somebody else than its owner, on another host where there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from everstep.base.plan import Plan, Seat


@dataclass(frozen=True)
class ProbeRule:
    """When lanes are probed. seed: of the job; every: steps between probes, 0 for none; share: of all lanes, those that
    are probed beyond that; joins: whether new members are probed."""

    seed: int = 0
    every: int = 0
    share: float = 0.0
    joins: bool = False


def probes(plan: Plan, step: int, rule: ProbeRule, unproven: Collection[int]) -> dict[int, tuple[int, ...]]:
    """By lane, who computes it: its owner first. unproven: members that nobody has compared yet.

    Of a model that is split, and of a pool in which one member has all lanes, there are none.
    """
    pool = [seat for seat in plan.pool(0) if seat.lanes] if plan.stages == 1 else []
    if len(pool) < 2:
        return {}
    found: dict[int, set[int]] = {}
    proven = [seat for seat in pool if seat.worker_id not in unproven] or pool[:1]
    for seat in pool if rule.joins else ():
        if seat.worker_id in unproven and seat not in proven:
            by = _apart(plan, seat, proven)[0]
            found.setdefault(by.lanes[step % len(by.lanes)], set()).add(seat.worker_id)
    if rule.every and step % rule.every == 0:
        turn = step // rule.every
        owner = pool[turn % len(pool)]
        _add(plan, pool, owner.lanes[turn // len(pool) % len(owner.lanes)], found)
    for lane in _drawn(step, range(plan.lanes), rule):
        _add(plan, pool, lane, found)
    owners = {lane: seat.worker_id for seat in pool for lane in seat.lanes}
    return {lane: (owners[lane], *sorted(who - {owners[lane]})) for lane, who in sorted(found.items())}


def _add(plan: Plan, pool: Sequence[Seat], lane: int, found: dict[int, set[int]]) -> None:
    """The member that is to compute this lane, too: the one with the fewest lanes."""
    owner = next(seat for seat in pool if lane in seat.lanes)
    others = _apart(plan, owner, [seat for seat in pool if seat is not owner])
    fewest = min(len(seat.lanes) for seat in others)
    found.setdefault(lane, set()).add(next(seat.worker_id for seat in others if len(seat.lanes) == fewest))


def _apart(plan: Plan, one: Seat, seats: Sequence[Seat]) -> list[Seat]:
    """Of these, those on other hosts than this one; all, if there is none."""
    host = plan.member(one.worker_id).host
    return [seat for seat in seats if plan.member(seat.worker_id).host != host] or list(seats)


def _drawn(step: int, lanes: Iterable[int], rule: ProbeRule) -> list[int]:
    if not rule.share:
        return []
    limit = round(rule.share * (1 << 64))

    def drawn(lane: int) -> int:
        said = f"probe {rule.seed} {step} {lane}".encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")

    return [lane for lane in lanes if drawn(lane) < limit]
