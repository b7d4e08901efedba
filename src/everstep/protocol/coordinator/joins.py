"""Changes of membership while training goes on: who heals, who leaves, and when the plan for it is prepared. Pure.

`reconcile` compares what is wanted (target, slots) with what is there and moves one step towards it: it hands out
tickets to joiners, and prepares a plan once joiners have healed or members are to leave.
"""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.base.plan import Member, Seat, WorkerKey
from everstep.protocol.coordinator.alarms import JoinsDue
from everstep.protocol.coordinator.desk import MILLISECOND_NS
from everstep.protocol.coordinator.evictions import dismiss, evict
from everstep.protocol.coordinator.healing import Join
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.plans import candidates, prepare
from everstep.protocol.coordinator.words import describe, listed
from everstep.protocol.messages import Heal, HealFailed, WorkerHealed

BATCH_NS = 250 * MILLISECOND_NS
MOST_FAILURES = 10


def reconcile(job: JobState) -> None:
    """Move one step towards the wanted membership."""
    if job.progress.ended is not None or job.membership.in_grace:
        return
    _dismiss_unwanted(job)
    if not job.agreement.running:
        return
    leaving = leavers(job)
    _choose_joiners(job, leaving)
    for _, join in sorted(job.healing.joins.items()):
        if join.retry_ns is not None and job.desk.now >= join.retry_ns:
            _send_heal(job, join.key)
        elif join.retry_ns is not None:
            job.desk.alarms.set(JoinsDue(), join.retry_ns)
    if job.agreement.prepared is None:
        _prepare_if_due(job, leaving)


def joins_due(job: JobState, alarm: JoinsDue) -> None:
    """Joiners were waited for long enough, or one may try again."""
    job.healing.moment_came()


def leavers(job: JobState) -> list[Worker]:
    """Members whose slots are not wanted any more, as many as may leave, in id order."""
    return [w for w in job.agreement.survivors() if not job.slots.wanted(w.key.worker_id)]


def _dismiss_unwanted(job: JobState) -> None:
    slots = job.slots
    if slots.as_started:
        return
    for worker_id, worker in sorted(job.membership.workers.items()):
        if worker.ready and not slots.wanted(worker_id) and not job.agreement.in_any_plan(worker.key):
            text = f"its slot is not wanted any more (workers wanted: {slots.target})"
            dismiss(job, worker, Why(slots.unwanted_for(worker_id), text))


def _choose_joiners(job: JobState, leaving: list[Worker]) -> None:
    """Give tickets to as many ready workers as there are vacancies; take back those of others."""
    agreement, healing = job.agreement, job.healing
    coming = set(agreement.prepared.joining) if agreement.prepared is not None else set()
    vacancies = job.slots.target - (len(agreement.survivors()) - len(leaving)) - len(coming)
    found = [w for w in candidates(job) if w.key.worker_id not in coming]
    # Who has begun to heal goes on; a life that replaced another begins anew.
    found.sort(key=lambda w: w.key.worker_id not in healing.joins)
    chosen = found[: max(0, vacancies)]
    healing.keep({w.key.worker_id for w in chosen} | coming)
    for worker in sorted(chosen, key=lambda w: w.key):
        if worker.key.worker_id not in healing.joins:
            _send_heal(job, worker.key)


def donors(job: JobState, attempt: int, stage: int = 0) -> list[Member]:
    """Who may give a stage's state, the preferred first: the backups, another one at each attempt, then the leader."""
    plan = job.agreement.plan
    if plan is None:
        return []
    leader = plan.leader(stage)
    pool = {s.worker_id for s in plan.pool(stage)}
    alive = [w.member for w in job.agreement.survivors() if w.member is not None and w.key.worker_id in pool]
    backups = [m for m in alive if m.worker_id != leader]
    turn = attempt % len(backups) if backups else 0
    return backups[turn:] + backups[:turn] + [m for m in alive if m.worker_id == leader]


def _stages_for(job: JobState, key: WorkerKey) -> tuple[int, ...]:
    """Where a joiner will sit, if nothing else changes: what it has to copy."""
    plan = job.agreement.plan
    if plan is None or plan.stages == 1:
        return (0,)
    on_the_way = [j for j in job.healing.joins.values() if j.key != key]
    seats = [*plan.seats, *(Seat(j.key.worker_id, k, "standby", ()) for j in on_the_way for k in j.stages)]
    staying = {w.key.worker_id for w in job.agreement.survivors()} - {w.key.worker_id for w in leavers(job)}
    ids = sorted(staying | {j.key.worker_id for j in on_the_way} | {key.worker_id})
    found = job.speeds.seats(ids, seats, anew=True)
    return tuple(s.stage for s in found if s.worker_id == key.worker_id)


def _send_heal(job: JobState, key: WorkerKey) -> None:
    worker, plan = job.membership.alive(key), job.agreement.plan
    if worker is None or plan is None:
        return
    join = job.healing.attempt(key, _stages_for(job, key))
    worker.ordered(job.desk.now)
    by_stage = [donors(job, join.ticket, stage) for stage in join.stages]
    everybody = list({m.worker_id: m for found in by_stage for m in found}.values())
    holders = [[m.worker_id for m in found] for found in by_stage]
    heal = Heal(ticket=join.ticket, plan=plan, donors=everybody, stages=list(join.stages), holders=holders)
    job.desk.send(worker.connection, heal)


def worker_healed(job: JobState, worker: Worker, message: WorkerHealed) -> None:
    """A joiner follows closely enough. An old ticket is void."""
    join = job.healing.of(worker.key, message.ticket)
    if join is not None and join.healed_ns is None:
        job.healing.succeed(join)
        worker.healed(message.step)


def heal_failed(job: JobState, worker: Worker, message: HealFailed) -> None:
    """A joiner lost its donor: try again, later each time; after too many failures it is replaced.

    If the members have switched to a plan with it, or may have, they wait for it in vain, and cannot feed it either.
    """
    plan, prepared = job.agreement.plan, job.agreement.prepared
    waits = plan is not None and plan.prepared and job.agreement.owes(worker.key)
    if waits or (prepared is not None and prepared.has(worker.key)):
        text = f"{describe(worker.key)} could not follow to the switch: {message.reason}"
        job.agreement.break_off(Why(message.cause, text))
        return
    join = job.healing.of(worker.key, message.ticket)
    if join is None:
        return
    if job.healing.fail(join) >= MOST_FAILURES:
        why = Why(message.cause, f"it could not heal in {MOST_FAILURES} attempts: {message.reason}")
        evict(job, worker, why, kill=True)


def _may_go(job: JobState, leaving: list[Worker], joiners: list[Join]) -> list[Worker]:
    """Of those who are to leave, the last ones for whom enough others stay: in all, and in each of their stages."""
    plan, survivors = job.agreement.plan, job.agreement.survivors()
    may_leave = len(survivors) + len(joiners) - job.slots.least
    going = leaving[-may_leave:] if may_leave > 0 else []
    if plan is None or plan.stages == 1:
        return going
    staying = [w.key.worker_id for w in survivors if w not in going]
    held = {stage for i in staying for stage in plan.stages_of(i)} | {k for j in joiners for k in j.stages}
    free = []
    for worker in reversed(going):
        own = set(plan.stages_of(worker.key.worker_id))
        if own <= held:
            free.append(worker)
        else:
            held |= own
    return sorted(free, key=lambda w: w.key)


def _prepare_if_due(job: JobState, leaving: list[Worker]) -> None:
    joins, alive = job.healing.joins, job.membership.alive
    healed_at = [j.healed_ns for j in joins.values() if j.healed_ns is not None]
    healing = [j for j in joins.values() if j.healed_ns is None and j.retry_ns is None]
    if healed_at and healing and job.desk.now < min(healed_at) + BATCH_NS:
        # Others are about to follow: one change of generation for all of them.
        job.desk.alarms.set(JoinsDue(), min(healed_at) + BATCH_NS)
        return
    healed = [j for _, j in sorted(joins.items()) if j.healed_ns is not None and alive(j.key) is not None]
    room = job.desk.config.room - len(job.agreement.survivors()) + len(leaving)
    healed = healed[: max(0, room)]
    joiners = [(w, j.stages) for w, j in ((alive(j.key), j) for j in healed) if w is not None]
    going = _may_go(job, leaving, healed)
    parts, cause = [], Cause.REBALANCED
    if not joiners and not going:
        plan = job.agreement.plan
        if plan is None or not job.speeds.idle_members(plan):
            return
        parts.append("members without lanes get their share")
    if joiners:
        cause = Cause.JOINED
        parts.append(f"worker {listed({w.key.worker_id for w, _ in joiners})} healed and joins")
    if going:
        cause = job.slots.unwanted_for(going[0].key.worker_id)
        parts.append(f"worker {listed({w.key.worker_id for w in going})} leaves as asked")
    prepare(job, joiners, [w.key for w in going], Why(cause, "; ".join(parts)))
