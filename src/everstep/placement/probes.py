"""Which lanes of a step are computed again by other members, to check that they compute the same. Pure.

All members derive the same answer from the same plan. A *trial* is a lane that goes through the stages a second time,
at each stage through another member than its owner if the pool has one. A member new in the job has trials in its first
step; every so many steps another member has one, on another host if there is one. The result of a trial is compared and
thrown away.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from everstep.base.plan import Plan, Seat
from everstep.base.ports import MOST_LANES


@dataclass(frozen=True)
class ProbeRule:
    """When lanes are probed. seed: of the job; every: steps between probes, 0 for none; share: share of all lanes to
    probe beyond that; joins: whether new members are probed."""

    seed: int = 0
    every: int = 0
    share: float = 0.0
    joins: bool = False


@dataclass(frozen=True)
class Trial:
    """A lane that is computed again. holders: by stage, the member that does it; the owner if the pool has no other."""

    lane: int
    holders: tuple[int, ...]


def computing(plan: Plan) -> Sequence[Sequence[Seat]]:
    """Seats that have lanes, by stage."""
    return [[seat for seat in plan.pool(stage) if seat.lanes] for stage in range(plan.stages)]


def alone(plan: Plan) -> dict[int, int]:
    """worker_id of the member that computes all lanes of a stage, by stage; only stages with a single such member."""
    return {stage: pool[0].worker_id for stage, pool in enumerate(computing(plan)) if len(pool) == 1}


def probes(plan: Plan, step: int, rule: ProbeRule, unproven: Collection[int]) -> tuple[Trial, ...]:
    """Trials of a step. unproven: members that have not been compared yet.

    An unsplit model that one member computes has no trials: that member checks itself.
    """
    pools = computing(plan)
    widest = max(pools, key=len)
    if plan.stages == len(widest) == 1:
        return ()
    found = [*_joining(plan, pools, step, unproven)] if rule.joins else []
    lanes = _drawn(step, plan.lanes, rule)
    if rule.every and step % rule.every == 0:
        turn = step // rule.every
        owner = widest[turn % len(widest)]
        lanes.insert(0, owner.lanes[turn // len(widest) % len(owner.lanes)])
    for lane in lanes:
        seats = (_partner(plan, pool, _owner(plan, stage, lane)) for stage, pool in enumerate(pools))
        found.append(Trial(lane, tuple(seat.worker_id for seat in seats)))
    return tuple(dict.fromkeys(found))[: MOST_LANES - plan.lanes]


def once_more(plan: Plan, lane: int) -> tuple[Trial, ...]:
    """Trials of this lane by all members that have lanes, at each stage."""
    pools = computing(plan)
    owners = [_owner(plan, stage, lane) for stage in range(plan.stages)]
    others = [[s for s in pool if s is not o] or [o] for pool, o in zip(pools, owners, strict=True)]
    found = (Trial(lane, tuple(pool[k % len(pool)].worker_id for pool in others)) for k in range(max(map(len, others))))
    return tuple(found)[: MOST_LANES - plan.lanes]


def owed(trials: Collection[Trial], plan: Plan, worker_id: int) -> tuple[int, ...]:
    """Lanes whose results this worker has to report, for a model that is not split."""
    return tuple(sorted({t.lane for t in trials if worker_id in (plan.holder(0, t.lane), *t.holders)}))


def with_trials(plan: Plan, trials: Sequence[Trial]) -> Plan:
    """The plan with the trials as further lanes, numbered on from its own."""
    more: dict[tuple[int, int], list[int]] = {}
    for number, trial in enumerate(trials, plan.lanes):
        for stage, worker_id in enumerate(trial.holders):
            more.setdefault((worker_id, stage), []).append(number)
    own = ((seat, more.get((seat.worker_id, seat.stage), ())) for seat in plan.seats)
    return replace(plan, seats=tuple(replace(s, lanes=(*s.lanes, *numbers)) if numbers else s for s, numbers in own))


def _joining(plan: Plan, pools: Sequence[Sequence[Seat]], step: int, unproven: Collection[int]) -> Iterator[Trial]:
    """Trials until each new member has computed a lane of a proven one; if all are new, of the first."""
    proven = [[s for s in pool if s.worker_id not in unproven] or pool[:1] for pool in pools]
    right = [{seat.worker_id for seat in seats} for seats in proven]
    waiting = [deque(s for s in pool if s.worker_id not in known) for pool, known in zip(pools, right, strict=True)]
    for stage, new in enumerate(waiting):
        while new:
            by = _apart(plan, new[0], proven[stage])[0]
            lane = by.lanes[step % len(by.lanes)]
            holders = []
            for at, pool in enumerate(pools):
                owner = _owner(plan, at, lane)
                due = waiting[at] and owner.worker_id in right[at]
                holders.append(waiting[at].popleft() if due else _partner(plan, pool, owner))
            yield Trial(lane, tuple(seat.worker_id for seat in holders))


def _owner(plan: Plan, stage: int, lane: int) -> Seat:
    return plan.seat(plan.holder(stage, lane), stage)


def _partner(plan: Plan, pool: Sequence[Seat], owner: Seat) -> Seat:
    """Member that computes a lane of this owner, too: the one with the fewest lanes."""
    others = _apart(plan, owner, [seat for seat in pool if seat is not owner] or [owner])
    return min(others, key=lambda seat: len(seat.lanes))


def _apart(plan: Plan, one: Seat, seats: Sequence[Seat]) -> Sequence[Seat]:
    """The seats on other hosts than this one; all, if there are none."""
    host = plan.member(one.worker_id).host
    return [seat for seat in seats if plan.member(seat.worker_id).host != host] or seats


def _drawn(step: int, lanes: int, rule: ProbeRule) -> list[int]:
    if not rule.share:
        return []
    limit = round(rule.share * (1 << 64))

    def drawn(lane: int) -> int:
        said = f"probe {rule.seed} {step} {lane}".encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")

    return [lane for lane in range(lanes) if drawn(lane) < limit]
