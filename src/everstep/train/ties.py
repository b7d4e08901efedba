"""The exchange by which every stage gets the reduced gradients of the parameters that it shares with others.

Between reduction and agree: what is sent here is part of what a worker must hold before it may contribute.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch import Tensor

from everstep.base.plan import Plan
from everstep.base.ports import Hop, Reduced
from everstep.exact.reduce import TiePlace
from everstep.parallel.staged import StagedTransport
from everstep.train.replica import StageReplica

_Told = dict[TiePlace, Tensor | None]


def exchange_ties(
    me: int,
    plan: Plan,
    step: int,
    stages: Mapping[int, StageReplica],
    reduced: Mapping[int, Reduced],
    transport: StagedTransport,
) -> dict[int, _Told]:
    """Tell others what was reduced here, and hear what was reduced elsewhere; by own stage, by place in other stages.

    Raises: CollectiveAborted.
    """
    tied = {k: stages[k] for k in reduced if stages[k].spec.ties}
    if not tied:
        return {}
    told: dict[int, _Told] = {k: _from_elsewhere(replica.tied_out(reduced[k])) for k, replica in tied.items()}
    partners = {k: {s for t in replica.spec.ties for s in t.stages} - {k} for k, replica in tied.items()}
    for stage, out in told.items():
        places = [[p.name, p.unit, p.stage, t is not None] for p, t in out.items()]
        for to in _receivers(plan, stage, partners[stage]):
            if _sender(plan, stage, to) == me:
                present = [t for t in out.values() if t is not None]
                transport.channel.send(to, Hop(step, "tied", stage, 0), present, msgspec.msgpack.encode(places))
    for stage in sorted({s for near in partners.values() for s in near} - set(told)):
        tensors, meta = transport.channel.recv(_sender(plan, stage, me), Hop(step, "tied", stage, 0))
        there = iter(tensors)
        told[stage] = {
            TiePlace(name, unit, at): next(there) if present else None
            for name, unit, at, present in msgspec.msgpack.decode(meta)
        }
    return {
        k: {p: t for near in partners[k] for p, t in told[near].items() if _wanted(replica, p)}
        for k, replica in tied.items()
    }


def _from_elsewhere(out: Mapping[TiePlace, Tensor | None]) -> _Told:
    """The places as other stages call them."""
    return {TiePlace(p.name, p.unit, p.stage): t for p, t in out.items()}


def _wanted(replica: StageReplica, place: TiePlace) -> bool:
    return any(t.name == place.name for t in replica.spec.ties)


def _receivers(plan: Plan, stage: int, partners: set[int]) -> list[int]:
    """Members that have a partner stage, and not this one."""
    here = {seat.worker_id for seat in plan.pool(stage)}
    return sorted({seat.worker_id for k in partners for seat in plan.pool(k)} - here)


def _sender(plan: Plan, stage: int, to: int) -> int:
    """Who of a stage's pool tells this worker: they take turns."""
    pool = plan.pool(stage)
    return pool[plan.worker_ids.index(to) % len(pool)].worker_id
