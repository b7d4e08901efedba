"""When lanes are laid out anew because some workers are slower than others. Pure.

Moving lanes costs a change of generation, so it is done only for a gain that lasts: a plan by speeds must promise steps
that are a fifth shorter, at every look for half a minute, and not within half a minute of another one. What counts as a
worker's speed is the time of its forward and backward passes per lane; how many lanes it has, and how long it waits for
others, says nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from everstep.base.plan import Plan, Seat
from everstep.protocol.coordinator_plans import prepare
from everstep.protocol.coordinator_state import LOOK_NS, SECOND_NS, State

LEAST_GAIN = 0.2
LASTING_NS = 30 * SECOND_NS
_ABOUT_EQUAL = 1.1


def step_ms(seats: Sequence[Seat], ms_per_lane: Mapping[int, float]) -> float:
    """How long the busiest worker computes in a step, all its stages together; the others wait for it."""
    busy: dict[int, float] = {}
    for seat in seats:
        busy[seat.worker_id] = busy.get(seat.worker_id, 0.0) + len(seat.lanes) * ms_per_lane[seat.worker_id]
    return max(busy.values(), default=0.0)


def look(state: State) -> None:
    """Take the present speeds down; prepare a plan once the gain has lasted."""
    state.alarms.set("speeds", state.now + LOOK_NS)
    plan = state.plan
    if plan is None or state.broken or state.prepared is not None or state.joins or state.ended is not None:
        state.uneven_since_ns = None
        return
    found = _measured(state, plan)
    if found is None or len(state.entered) < len(plan.members):
        state.uneven_since_ns = None
        return
    speeds = by_speed(found)
    seats = state.seats(plan.worker_ids, plan.seats, anew=True, speeds=speeds)
    now_ms, then_ms = step_ms(plan.seats, found), step_ms(seats, found)
    if then_ms > now_ms * (1 - LEAST_GAIN):
        state.uneven_since_ns = None
        return
    if state.uneven_since_ns is None:
        state.uneven_since_ns = state.now
    lasted = state.now - state.uneven_since_ns >= LASTING_NS
    if not lasted or (state.rebalanced_ns is not None and state.now - state.rebalanced_ns < LASTING_NS):
        return
    state.uneven_since_ns, state.rebalanced_ns = None, state.now
    state.speeds = speeds
    prepare(state, [], [], reason(found, now_ms, then_ms))


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
