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
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.words import describe, listed
from everstep.protocol.messages import PlanNow, PlanPrepared

# ---- plans for at once


def candidates(job: JobState) -> list[Worker]:
    """Ready workers outside the current plan whose slots are wanted; those that would rather be spares last."""
    found = [
        w
        for w in job.membership.workers.values()
        if w.ready and job.slots.wanted(w.key.worker_id) and not job.agreement.has(w.key)
    ]
    return sorted(found, key=lambda w: (w.wants_spare, w.key))


def followed(job: JobState, worker: Worker) -> set[int]:
    """The stages whose newest state a worker outside the plan is known to hold, as a joiner."""
    join, prepared = job.healing.healed(worker.key), job.agreement.prepared
    if job.agreement.has(worker.key):
        return set()
    if join is not None:
        return set(join.stages)
    if prepared is not None and prepared.has(worker.key):
        return set(prepared.stages_of(worker.key.worker_id))
    return job.healing.left_behind(worker.key)


def make_now(job: JobState, members: Sequence[Worker], why: Why, *, fresh: bool) -> None:
    """Give out a plan for at once. fresh: nobody holds the state of the plan before; lanes are laid out anew."""
    agreement, config = job.agreement, job.desk.config
    old = agreement.plan
    repaired = None if fresh else old
    ids = sorted(w.key.worker_id for w in members)
    held = [Seat(w.key.worker_id, k, "standby", ()) for w in members for k in sorted(followed(job, w))]
    seats = job.speeds.seats(ids, [*repaired.seats, *held] if repaired is not None else ())
    newcomers = []
    if repaired is not None:
        still_new = agreement.empty_handed()
        newcomers = [w.key.worker_id for w in members if not repaired.has(w.key) or w.key.worker_id in still_new]
    plan = Plan(
        generation=agreement.generation + 1,
        reason=why.reason + (_promotions(repaired, seats) if repaired is not None else ""),
        members=tuple(w.member for w in sorted(members, key=lambda w: w.key) if w.member is not None),
        seats=seats,
        lanes=config.lanes,
        stages=config.stages,
        previous=repaired.generation if repaired is not None else 0,
        speeds=job.speeds.of(ids),
        joining=tuple(sorted(newcomers)),
        leaders=_leaders(config.wish.leaders, seats),
        save=_save_reason(job),
        cause=why.cause,
        sound=job.progress.sound,
    )
    job.healing.leave_behind({w.key: followed(job, w) for w in candidates(job) if not plan.has(w.key)})
    agreement.issue(plan)
    job.links.forget_accusations()
    job.quorum.met()
    for worker_id in plan.worker_ids:
        job.healing.stop(worker_id)
    job.recovery.decided(plan.generation)
    for member in plan.members:
        order(job, job.membership.workers[member.worker_id], PlanNow(plan=plan))
    announce(job, old)


def _save_reason(job: JobState) -> str:
    """Why the members of the next plan are to take a checkpoint at once; "": they are not."""
    if job.saving.ending is not None:
        return job.saving.ending.why.reason
    staying = sorted(job.failures.staying.items())
    return "; ".join(f"before the end of {describe(key)}: {why.reason}" for key, why in staying)


def _leaders(wished: Sequence[int | None], seats: Sequence[Seat]) -> tuple[int | None, ...]:
    """By stage: whom the config names, where it has a seat there; nothing if it names nobody."""
    sitting = {(s.stage, s.worker_id) for s in seats}
    named = tuple(i if (stage, i) in sitting else None for stage, i in enumerate(wished))
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


def order(job: JobState, worker: Worker, message: PlanNow | PlanPrepared) -> None:
    """Tell a worker what to do; if it is not connected, it hears of it in answer to its hello."""
    worker.ordered(job.desk.now)
    job.desk.send(worker.connection, message)


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
    job: JobState,
    joiners: Sequence[tuple[Worker, tuple[int, ...]]],
    leaving: Sequence[WorkerKey],
    why: Why,
    move: Move | None = None,
) -> None:
    """Hand out a plan to which the members switch by themselves, after an agree in which all hold it.

    joiners: with the stages whose state they hold. move: a member that goes to another pool; it copies the state when
    it settles there, while the others wait.
    """
    agreement, config, plan = job.agreement, job.desk.config, job.agreement.plan
    check(plan is not None and agreement.prepared is None, "a plan is prepared upon a current one, one at a time")
    if plan is None:
        return
    staying = [w for w in agreement.survivors() if w.key not in leaving]
    members = sorted([*staying, *(w for w, _ in joiners)], key=lambda w: w.key)
    healed = [Seat(w.key.worker_id, stage, "standby", ()) for w, stages in joiners for stage in stages]
    before = plan.seats if move is None else moved(plan.seats, move)
    seats = job.speeds.seats([w.key.worker_id for w in members], [*before, *healed], anew=True)
    prepared = Plan(
        generation=agreement.generation + 1,
        reason=why.reason,
        members=tuple(w.member for w in members if w.member is not None),
        seats=seats,
        lanes=config.lanes,
        stages=config.stages,
        speeds=job.speeds.of(w.key.worker_id for w in members),
        prepared=True,
        joining=tuple(sorted([*(w.key.worker_id for w, _ in joiners), *([] if move is None else [move.worker_id])])),
        leaders=_leaders(config.wish.leaders, seats),
        cause=why.cause,
    )
    agreement.issue(prepared)
    told = {w.key.worker_id: w for w in [*agreement.survivors(), *(w for w, _ in joiners)]}
    for _, worker in sorted(told.items()):
        order(job, worker, PlanPrepared(plan=prepared))


# ---- telling


def announce(job: JobState, old: Plan | None) -> None:
    """Tell that the plan in force has taken the place of `old`."""
    plan = job.agreement.plan
    if plan is None:
        return
    leader = plan.leader(0)
    job.desk.report(
        "generation_started",
        Why(plan.cause, plan.reason),
        generation=plan.generation,
        step=job.progress.step,
        workers=list(plan.worker_ids),
        leader=leader,
        lanes={str(seat.worker_id): list(seat.lanes) for seat in plan.pool(0)},
        seats=[[s.worker_id, s.stage, s.role, list(s.lanes)] for s in plan.seats],
        leaders=[plan.leader(stage) for stage in range(plan.stages)],
    )
    for stage in range(plan.stages):
        _announce_leader(job, plan, old, stage)


def _announce_leader(job: JobState, plan: Plan, old: Plan | None, stage: int) -> None:
    leader = plan.leader(stage)
    if old is None or old.member(old.leader(stage)).key == plan.member(leader).key:
        return
    where = f" of stage {stage}" if plan.stages > 1 else ""
    named = "the leader that the map names" if plan.leaders and plan.leaders[stage] == leader else "the first member"
    text = f"worker {leader} is {named}{where} of generation {plan.generation}: {plan.reason}"
    job.desk.report(
        "leader_changed",
        Why(plan.cause, text),
        generation=plan.generation,
        step=job.progress.step,
        worker_id=leader,
        incarnation=plan.member(leader).incarnation,
        stage=stage,
    )
