"""How a plan is made, checked, handed out and told: one for at once, or a prepared one. Pure.

Every plan is made here, and nowhere else. A plan for at once takes the members of the current plan that live (and
newcomers only where there would be too few); a prepared one changes the membership at a step boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from everstep.base.cause import Why
from everstep.base.errors import check
from everstep.base.plan import Plan, Seat, WorkerKey
from everstep.protocol.coordinator import recovery
from everstep.protocol.coordinator.journal import record_plan
from everstep.protocol.coordinator.state import State, Worker, describe, listed
from everstep.protocol.messages import Dismissed, PlanNow, PlanPrepared

# ---- plans for at once


def candidates(state: State) -> list[Worker]:
    """Ready workers outside the current plan whose slots are wanted; those that would rather be spares last."""
    found = [
        w
        for w in state.workers.values()
        if w.ready and state.slot_wanted(w.key.worker_id) and not (state.plan is not None and state.plan.has(w.key))
    ]
    return sorted(found, key=lambda w: (w.wants_spare, w.key))


def followed(state: State, worker: Worker) -> set[int]:
    """The stages whose newest state a worker outside the plan is known to hold, as a joiner."""
    join, prepared = state.joins.get(worker.key.worker_id), state.prepared
    if state.plan is not None and state.plan.has(worker.key):
        return set()
    if join is not None and join.key == worker.key and join.healed_ns is not None:
        return set(join.stages)
    return set(prepared.stages_of(worker.key.worker_id)) if prepared is not None and prepared.has(worker.key) else set()


def make_now(state: State, members: Sequence[Worker], why: Why, *, fresh: bool) -> None:
    """Give out a plan for at once. fresh: nobody holds the state of the plan before; lanes are laid out anew."""
    old = state.plan
    repaired = old is not None and not fresh
    ids = sorted(w.key.worker_id for w in members)
    held = [Seat(w.key.worker_id, k, "standby", ()) for w in members for k in sorted(followed(state, w))]
    seats = state.seats(ids, [*old.seats, *held] if old is not None and repaired else ())
    reason = why.reason + (_promotions(old, seats) if old is not None and repaired else "")
    newcomers = []
    if old is not None and not fresh:
        still_new = set(old.joining) - state.entered
        newcomers = [w.key.worker_id for w in members if not old.has(w.key) or w.key.worker_id in still_new]
    plan = Plan(
        generation=state.generation + 1,
        reason=reason,
        members=tuple(w.member for w in sorted(members, key=lambda w: w.key) if w.member is not None),
        seats=seats,
        lanes=state.config.lanes,
        stages=state.config.stages,
        previous=old.generation if old is not None and repaired else 0,
        speeds=_speeds_of(state, members),
        joining=tuple(sorted(newcomers)),
        leaders=_leaders(state, seats),
        save=_save_reason(state),
        cause=why.cause,
        sound=state.sound,
    )
    _issue(state, plan)
    state.plan, state.prepared = plan, None
    state.entered = set()
    state.broken, state.accusations, state.accusation_reasons = [], {}, []
    state.fallback = False
    state.first_hello_ns = state.quorum_since_ns = None
    state.waiting = None
    for worker_id in plan.worker_ids:
        state.joins.pop(worker_id, None)
    recovery.decided(state, plan.generation)
    for member in plan.members:
        order(state, state.workers[member.worker_id], PlanNow(plan=plan))
    announce(state, old)


def _save_reason(state: State) -> str:
    """Why the members of the next plan are to take a checkpoint at once; "": they are not."""
    if state.ending is not None:
        return state.ending.why.reason
    return "; ".join(f"before the end of {describe(key)}: {why.reason}" for key, why in sorted(state.failed.items()))


def _speeds_of(state: State, members: Sequence[Worker]) -> tuple[tuple[int, float], ...]:
    """Those of the speeds in force that the placement of these members was called with."""
    ids = sorted(w.key.worker_id for w in members)
    return tuple((i, state.speeds[i]) for i in ids if i in state.speeds)


def _leaders(state: State, seats: Sequence[Seat]) -> tuple[int | None, ...]:
    """By stage: whom the config names, where it has a seat there; nothing if it names nobody."""
    sitting = {(s.stage, s.worker_id) for s in seats}
    named = tuple(i if (stage, i) in sitting else None for stage, i in enumerate(state.config.wish.leaders))
    return named if any(i is not None for i in named) else ()


def _promotions(old: Plan, seats: Sequence[Seat]) -> str:
    """Which standbys take over whose lanes, as the end of a reason."""
    was = {(s.worker_id, s.stage): s for s in old.seats}
    staying = {(s.worker_id, s.stage) for s in seats}
    text = ""
    for seat in seats:
        before = was.get((seat.worker_id, seat.stage))
        if not seat.lanes or before is None or before.lanes:
            continue
        gone = {
            s.worker_id
            for s in old.pool(seat.stage)
            if (s.worker_id, s.stage) not in staying and set(s.lanes) & set(seat.lanes)
        }
        where = f" of stage {seat.stage}" if old.stages > 1 else ""
        whose = f"the lanes of worker {listed(gone)}" if gone else f"lanes {listed(set(seat.lanes))}"
        text += f"; worker {seat.worker_id}, standby{where}, takes {whose}"
    return text


def _issue(state: State, plan: Plan) -> None:
    """The checks and the journal entry that every new plan passes."""
    check(plan.generation > state.generation, f"generation {plan.generation} was given out before")
    for member in plan.members:
        check(not state.is_fenced(member.key), f"evicted worker {member.key} in the plan")
        check(state.alive(member.key) is not None, f"worker {member.key} is not known to live")
    check(bool(plan.members), "a plan needs members")
    check({s.worker_id for s in plan.seats} == set(plan.worker_ids), "every member has a seat, and nobody else")
    for stage in range(plan.stages):
        lanes = sorted(lane for seat in plan.pool(stage) for lane in seat.lanes)
        check(lanes == list(range(plan.lanes)), f"seats must cover each lane of stage {stage} once, got {lanes}")
    record_plan(state, plan)
    state.generation = plan.generation
    state.dirty = True


def order(state: State, worker: Worker, message: PlanNow | PlanPrepared) -> None:
    """Tell a worker what to do; if it is not connected, it hears of it in answer to its hello."""
    worker.ordered_ns = state.now
    state.send(worker.connection, message)


# ---- prepared plans


class Move(NamedTuple):
    """A member of one pool becomes one of another."""

    worker_id: int
    source: int
    target: int


def moved(seats: Sequence[Seat], move: Move) -> list[Seat]:
    """The seats with this member's in the other pool, without lanes yet."""
    staying = [s for s in seats if (s.worker_id, s.stage) != (move.worker_id, move.source)]
    return [*staying, Seat(move.worker_id, move.target, "standby", ())]


def prepare(
    state: State,
    joiners: Sequence[tuple[Worker, tuple[int, ...]]],
    leaving: Sequence[WorkerKey],
    why: Why,
    move: Move | None = None,
) -> None:
    """Hand out a plan to which the members switch by themselves, after an agree in which all hold it.

    joiners: with the stages whose state they hold. move: a member that goes to another pool; it copies the state when
    it settles there, while the others wait.
    """
    plan = state.plan
    check(plan is not None and state.prepared is None, "a plan is prepared upon a current one, one at a time")
    if plan is None:
        return
    staying = [w for w in state.survivors() if w.key not in leaving]
    members = sorted([*staying, *(w for w, _ in joiners)], key=lambda w: w.key)
    healed = [Seat(w.key.worker_id, stage, "standby", ()) for w, stages in joiners for stage in stages]
    before = plan.seats if move is None else moved(plan.seats, move)
    seats = state.seats([w.key.worker_id for w in members], [*before, *healed], anew=True)
    prepared = Plan(
        generation=state.generation + 1,
        reason=why.reason,
        members=tuple(w.member for w in members if w.member is not None),
        seats=seats,
        lanes=state.config.lanes,
        stages=state.config.stages,
        speeds=_speeds_of(state, members),
        prepared=True,
        joining=tuple(sorted([*(w.key.worker_id for w, _ in joiners), *([] if move is None else [move.worker_id])])),
        leaders=_leaders(state, seats),
        cause=why.cause,
    )
    _issue(state, prepared)
    state.prepared = prepared
    told = {w.key.worker_id: w for w in [*state.survivors(), *(w for w, _ in joiners)]}
    for _, worker in sorted(told.items()):
        order(state, worker, PlanPrepared(plan=prepared))


def dismiss(state: State, worker: Worker, why: Why) -> None:
    """A worker is no longer wanted: it leaves without fault."""
    del state.workers[worker.key.worker_id]
    state.joins.pop(worker.key.worker_id, None)
    state.fence(worker.key, why)
    state.send(worker.connection, Dismissed(cause=why.cause, reason=why.reason, drained=True))
    state.dirty = True


# ---- telling


def announce(state: State, old: Plan | None) -> None:
    """Tell that the plan in force has taken the place of `old`."""
    plan = state.plan
    if plan is None:
        return
    leader = plan.leader(0)
    state.report(
        "generation_started",
        Why(plan.cause, plan.reason),
        generation=plan.generation,
        step=state.step,
        workers=list(plan.worker_ids),
        leader=leader,
        lanes={str(seat.worker_id): list(seat.lanes) for seat in plan.pool(0)},
        seats=[[s.worker_id, s.stage, s.role, list(s.lanes)] for s in plan.seats],
        leaders=[plan.leader(stage) for stage in range(plan.stages)],
    )
    for stage in range(plan.stages):
        _announce_leader(state, plan, old, stage)


def _announce_leader(state: State, plan: Plan, old: Plan | None, stage: int) -> None:
    leader = plan.leader(stage)
    if old is None or old.member(old.leader(stage)).key == plan.member(leader).key:
        return
    where = f" of stage {stage}" if plan.stages > 1 else ""
    named = "the leader that the map names" if plan.leaders and plan.leaders[stage] == leader else "the first member"
    text = f"worker {leader} is {named}{where} of generation {plan.generation}: {plan.reason}"
    state.report(
        "leader_changed",
        Why(plan.cause, text),
        generation=plan.generation,
        step=state.step,
        worker_id=leader,
        incarnation=plan.member(leader).incarnation,
        stage=stage,
    )
