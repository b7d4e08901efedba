"""When lanes are laid out anew, or a worker goes to another pool, because some are slower than others. Pure.

Moving lanes costs a change of generation, so it is done only for a gain that lasts: a plan by speeds must promise steps
that are a fifth shorter, at every look for half a minute, and not within half a minute of another one.

A pool that has lost members for good, and by that has become what all others wait for, gets one from another pool if
that makes the steps a fifth shorter than lanes by speed would. The member copies the stage at the switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan
from everstep.protocol.coordinator.alarms import SpeedsDue
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.plans import Move, moved, prepare
from everstep.protocol.coordinator.speeds import by_speed, reason, step_ms

LEAST_GAIN = 0.2


def speeds_due(job: JobState, alarm: SpeedsDue) -> None:
    """Take the present speeds down; prepare a plan once the gain has lasted."""
    speeds, plan = job.speeds, job.agreement.plan
    speeds.look_later()
    change = _gain(job, plan) if plan is not None else None
    if change is None:
        speeds.even()
    elif speeds.uneven():
        worker = job.membership.workers[change.move.worker_id] if change.move is not None else None
        speeds.change(change.speeds, worker.key if worker is not None else None)
        prepare(job, [], [], change.why, change.move)


@dataclass(frozen=True)
class _Change:
    """What would make the steps shorter."""

    speeds: dict[int, float]
    why: Why
    move: Move | None = None


def _gain(job: JobState, plan: Plan) -> _Change | None:
    """What would make the steps shorter, if anything does, nothing else is under way, and all speeds are known."""
    agreement = job.agreement
    if agreement.broken or agreement.prepared is not None or job.healing.joins or job.progress.ended is not None:
        return None
    found = job.speeds.measured(plan)
    if found is None or len(agreement.entered) < len(plan.members):
        return None
    return _better(job, plan, found)


def _better(job: JobState, plan: Plan, found: Mapping[int, float]) -> _Change | None:
    """Lanes by speed, or a move, if that makes the steps shorter by `LEAST_GAIN`; of both, lanes by speed."""
    speeds = by_speed(found)
    now_ms = step_ms(plan.seats, found)
    then_ms = step_ms(job.speeds.seats(plan.worker_ids, plan.seats, anew=True, speeds=speeds), found)
    best: tuple[float, _Change] | None = None
    for move in _moves(job, plan):
        there = {**found, move.worker_id: _in_other_pool(plan, found, move)}
        seats = job.speeds.seats(plan.worker_ids, moved(plan.seats, move), anew=True, speeds=by_speed(there))
        moved_ms = step_ms(seats, there)
        if moved_ms <= min(now_ms, then_ms) * (1 - LEAST_GAIN) and (best is None or moved_ms < best[0]):
            text = (
                f"worker {move.worker_id} goes from stage {move.source} to stage {move.target}, which has lost members "
                f"and makes all others wait: the busiest worker is to compute {moved_ms:.0f} ms per step instead of "
                f"{now_ms:.0f} ms"
            )
            best = moved_ms, _Change(by_speed(there), Why(Cause.REBALANCED, text), move)
    if best is not None:
        return best[1]
    if then_ms > now_ms * (1 - LEAST_GAIN):
        return None
    return _Change(speeds, Why(Cause.SLOW if speeds else Cause.REBALANCED, reason(found, now_ms, then_ms)))


def _moves(job: JobState, plan: Plan) -> list[Move]:
    """Who could help out a pool that lacks members which nobody is going to replace, the last of each pool first."""
    if plan.stages == 1 or len(plan.members) < job.slots.expected():
        return []
    pools = [[seat.worker_id for seat in plan.pool(stage)] for stage in range(plan.stages)]
    found = []
    for target, pool in enumerate(pools):
        if len(pool) >= job.desk.config.wish.size(target):
            continue
        for source, others in enumerate(pools):
            free = [i for i in others if len(plan.seats_of(i)) == 1 and i != plan.leader(source)]
            if source != target and free:
                found.append(Move(free[-1], source, target))
    return found


def _in_other_pool(plan: Plan, ms_per_lane: Mapping[int, float], move: Move) -> float:
    """What a lane would take it there: as the members there, by as much slower as it is than its own pool."""
    own, there = (median(ms_per_lane[s.worker_id] for s in plan.pool(k)) for k in (move.source, move.target))
    return there * ms_per_lane[move.worker_id] / own if own > 0 else there
