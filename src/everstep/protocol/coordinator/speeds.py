"""When lanes are laid out anew, or a worker goes to another pool, because some are slower than others. Pure.

Moving lanes costs a change of generation, so it is done only for a gain that lasts: a plan by speeds must promise steps
that are a fifth shorter, at every look for half a minute, and not within half a minute of another one. What counts as a
worker's speed is the time of its forward and backward passes per lane; how many lanes it has, and how long it waits for
others, says nothing about it.

A pool that has lost members for good, and by that has become what all others wait for, gets one from another pool if
that makes the steps a fifth shorter than lanes by speed would. The member copies the stage at the switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan, Seat
from everstep.protocol.coordinator.alarms import SpeedsDue
from everstep.protocol.coordinator.plans import Move, moved, prepare
from everstep.protocol.coordinator.state import State

LEAST_GAIN = 0.2
_ABOUT_EQUAL = 1.1


def step_ms(seats: Sequence[Seat], ms_per_lane: Mapping[int, float]) -> float:
    """How long the busiest worker computes in a step, all its stages together; the others wait for it."""
    busy: dict[int, float] = {}
    for seat in seats:
        busy[seat.worker_id] = busy.get(seat.worker_id, 0.0) + len(seat.lanes) * ms_per_lane[seat.worker_id]
    return max(busy.values(), default=0.0)


def look(state: State, alarm: SpeedsDue) -> None:
    """Take the present speeds down; prepare a plan once the gain has lasted."""
    state.alarms.set(SpeedsDue(), state.now + state.config.look_ns)
    plan = state.plan
    if plan is None or state.broken or state.prepared is not None or state.joins or state.ended is not None:
        state.uneven_since_ns = None
        return
    found = _measured(state, plan)
    if found is None or len(state.entered) < len(plan.members):
        state.uneven_since_ns = None
        return
    change = _better(state, plan, found)
    if change is None:
        state.uneven_since_ns = None
        return
    if state.uneven_since_ns is None:
        state.uneven_since_ns = state.now
    lasting_ns = state.config.lasting_ns
    lasted = state.now - state.uneven_since_ns >= lasting_ns
    if not lasted or (state.rebalanced_ns is not None and state.now - state.rebalanced_ns < lasting_ns):
        return
    state.uneven_since_ns, state.rebalanced_ns = None, state.now
    state.speeds = change.speeds
    if change.move is not None:
        worker = state.workers[change.move.worker_id]
        worker.lane_times_ms.clear()  # those of another stage
    prepare(state, [], [], change.why, change.move)


@dataclass(frozen=True)
class _Change:
    """What would make the steps shorter."""

    speeds: dict[int, float]
    why: Why
    move: Move | None = None


def _better(state: State, plan: Plan, found: Mapping[int, float]) -> _Change | None:
    """Lanes by speed, or a move, if that makes the steps shorter by `LEAST_GAIN`; of both, lanes by speed."""
    speeds = by_speed(found)
    now_ms = step_ms(plan.seats, found)
    then_ms = step_ms(state.seats(plan.worker_ids, plan.seats, anew=True, speeds=speeds), found)
    best: tuple[float, _Change] | None = None
    for move in _moves(state, plan):
        there = {**found, move.worker_id: _in_other_pool(plan, found, move)}
        seats = state.seats(plan.worker_ids, moved(plan.seats, move), anew=True, speeds=by_speed(there))
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


def _moves(state: State, plan: Plan) -> list[Move]:
    """Who could help out a pool that lacks members which nobody is going to replace, the last of each pool first."""
    if plan.stages == 1 or len(plan.members) < state.expected():
        return []
    pools = [[seat.worker_id for seat in plan.pool(stage)] for stage in range(plan.stages)]
    found = []
    for target, pool in enumerate(pools):
        if len(pool) >= state.config.wish.size(target):
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


def by_speed(ms_per_lane: Mapping[int, float]) -> dict[int, float]:
    """Lanes per second by worker; none if all are about equally fast, so that lanes are spread evenly again."""
    slowest, fastest = max(ms_per_lane.values()), min(ms_per_lane.values())
    return {} if slowest <= fastest * _ABOUT_EQUAL else {i: 1000.0 / ms for i, ms in sorted(ms_per_lane.items())}


def reason(ms_per_lane: Mapping[int, float], now_ms: float, then_ms: float) -> str:
    """Why the lanes move."""
    slowest = max(ms_per_lane, key=lambda i: (ms_per_lane[i], -i))
    typical = median(ms_per_lane.values())
    return (
        f"lanes by speed: worker {slowest} takes {ms_per_lane[slowest]:.0f} ms per lane, the median is {typical:.0f};"
        f" the busiest worker is to compute {then_ms:.0f} ms per step instead of {now_ms:.0f} ms"
    )


def _measured(state: State, plan: Plan) -> dict[int, float] | None:
    """The median over the looks, by member; None while one is not known. Without lanes one counts as the others."""
    known: dict[int, float] = {}
    for member in plan.members:
        worker = state.alive(member.key)
        if worker is None:
            return None
        if worker.ms_per_lane > 0:
            worker.lane_times_ms.append(worker.ms_per_lane)
        if worker.lane_times_ms:
            known[member.worker_id] = median(worker.lane_times_ms)
        elif any(seat.lanes for seat in plan.seats_of(member.worker_id)):
            return None
    if not known:
        return None
    typical = median(known.values())
    return {i: known.get(i, typical) for i in plan.worker_ids}
