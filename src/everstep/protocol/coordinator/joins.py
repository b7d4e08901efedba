"""Changes of membership while training goes on: who heals, who leaves, and when the plan for it is prepared. Pure.

`reconcile` compares what is wanted (target, slots) with what is there and moves one step towards it: it hands out
tickets to joiners, and prepares a plan once joiners have healed or members are to leave.
"""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.base.plan import Member, Seat
from everstep.protocol.coordinator.alarms import JoinsDue
from everstep.protocol.coordinator.health import evict
from everstep.protocol.coordinator.plans import candidates, dismiss, prepare
from everstep.protocol.coordinator.state import MILLISECOND_NS, SECOND_NS, Join, State, Worker, describe, listed
from everstep.protocol.messages import Heal, HealFailed, WorkerHealed

BATCH_NS = 250 * MILLISECOND_NS
RETRY_NS = 200 * MILLISECOND_NS
RETRY_MOST_NS = 5 * SECOND_NS
MOST_FAILURES = 10


def reconcile(state: State) -> None:
    """Move one step towards the wanted membership."""
    if state.ended is not None:
        return
    if not state.in_grace:
        _dismiss_unwanted(state)
    if state.plan is None or state.broken or not state.entered or state.in_grace:
        return
    leaving = leavers(state)
    _choose_joiners(state, leaving)
    for _, join in sorted(state.joins.items()):
        if join.retry_ns is not None and state.now >= join.retry_ns:
            _send_heal(state, join)
    if state.prepared is None:
        _prepare_if_due(state, leaving)


def leavers(state: State) -> list[Worker]:
    """Members whose slots are not wanted any more, as many as may leave, in id order."""
    return [w for w in state.survivors() if not state.slot_wanted(w.key.worker_id)]


def _dismiss_unwanted(state: State) -> None:
    if state.slots is None:
        return
    for _, worker in sorted(state.workers.items()):
        wanted = state.slot_wanted(worker.key.worker_id)
        if worker.ready and not wanted and not state.in_any_plan(worker.key):
            text = f"its slot is not wanted any more (workers wanted: {state.target})"
            dismiss(state, worker, Why(_asked(state, [worker]), text))


def _choose_joiners(state: State, leaving: list[Worker]) -> None:
    """Give tickets to as many ready workers as there are vacancies; take back those of others."""
    plan, prepared = state.plan, state.prepared
    if plan is None:
        return
    coming = set(prepared.joining) if prepared is not None else set()
    vacancies = state.target - (len(state.survivors()) - len(leaving)) - len(coming)
    found = [w for w in candidates(state) if w.key.worker_id not in coming]
    # Who has begun to heal goes on; a life that replaced another begins anew.
    found.sort(key=lambda w: w.key.worker_id not in state.joins)
    chosen = found[: max(0, vacancies)]
    keep = {w.key.worker_id for w in chosen} | coming
    for worker_id in [i for i in state.joins if i not in keep]:
        del state.joins[worker_id]
    for worker in sorted(chosen, key=lambda w: w.key):
        if worker.key.worker_id not in state.joins:
            join = state.joins[worker.key.worker_id] = Join(worker.key, 0)
            _send_heal(state, join)


def donors(state: State, attempt: int, stage: int = 0) -> list[Member]:
    """Who may give a stage's state, the preferred first: the backups, another one at each attempt, then the leader."""
    plan = state.plan
    if plan is None:
        return []
    leader = plan.leader(stage)
    pool = {s.worker_id for s in plan.pool(stage)}
    alive = [w.member for w in state.survivors() if w.member is not None and w.key.worker_id in pool]
    backups = [m for m in alive if m.worker_id != leader]
    turn = attempt % len(backups) if backups else 0
    return backups[turn:] + backups[:turn] + [m for m in alive if m.worker_id == leader]


def _stages_for(state: State, join: Join) -> tuple[int, ...]:
    """Where a joiner will sit, if nothing else changes: what it has to copy."""
    plan = state.plan
    if plan is None or state.config.stages == 1:
        return (0,)
    on_the_way = [j for j in state.joins.values() if j.key != join.key and j.ticket]
    seats = [*plan.seats, *(Seat(j.key.worker_id, k, "standby", ()) for j in on_the_way for k in j.stages)]
    staying = {w.key.worker_id for w in state.survivors()} - {w.key.worker_id for w in leavers(state)}
    ids = sorted(staying | {j.key.worker_id for j in on_the_way} | {join.key.worker_id})
    found = state.seats(ids, seats, anew=True)
    return tuple(s.stage for s in found if s.worker_id == join.key.worker_id)


def _send_heal(state: State, join: Join) -> None:
    worker = state.alive(join.key)
    if worker is None or state.plan is None:
        return
    state.ticket += 1
    state.persist("ticket", ticket=state.ticket, worker_id=join.key.worker_id, incarnation=join.key.incarnation)
    join.stages = _stages_for(state, join)
    join.ticket, join.retry_ns, join.healed_ns = state.ticket, None, None
    worker.ordered_ns = state.now
    by_stage = [donors(state, state.ticket, stage) for stage in join.stages]
    everybody = list({m.worker_id: m for found in by_stage for m in found}.values())
    holders = [[m.worker_id for m in found] for found in by_stage]
    heal = Heal(ticket=join.ticket, plan=state.plan, donors=everybody, stages=list(join.stages), holders=holders)
    state.send(worker.connection, heal)


def restart(state: State) -> None:
    """The members have changed at once: whoever was healing begins again, with the new plan and new donors."""
    state.joins.clear()


def worker_healed(state: State, worker: Worker, message: WorkerHealed) -> None:
    """A joiner follows closely enough. An old ticket is void."""
    join = state.joins.get(worker.key.worker_id)
    if join is None or join.key != worker.key or join.ticket != message.ticket or join.healed_ns is not None:
        return
    join.healed_ns = state.now
    worker.step = message.step
    state.dirty = True


def heal_failed(state: State, worker: Worker, message: HealFailed) -> None:
    """A joiner lost its donor: try again, later each time; after too many failures it is replaced.

    If the members have switched to a plan with it, or may have, they wait for it in vain, and cannot feed it either.
    """
    plan = state.plan
    waits = plan is not None and plan.prepared and plan.has(worker.key) and worker.key.worker_id not in state.entered
    if waits or (state.prepared is not None and state.prepared.has(worker.key)):
        text = f"{describe(worker.key)} could not follow to the switch: {message.reason}"
        state.broken.append(Why(message.cause, text))
        state.dirty = True
        return
    join = state.joins.get(worker.key.worker_id)
    if join is None or join.key != worker.key or join.ticket != message.ticket:
        return
    worker.heal_failures += 1
    state.dirty = True
    if worker.heal_failures >= MOST_FAILURES:
        why = Why(message.cause, f"it could not heal in {MOST_FAILURES} attempts: {message.reason}")
        evict(state, worker, why, kill=True)
        return
    delay = 0 if worker.heal_failures == 1 else min(RETRY_NS << (worker.heal_failures - 2), RETRY_MOST_NS)
    join.healed_ns, join.retry_ns = None, state.now + delay
    state.alarms.set(JoinsDue(), join.retry_ns)


def _idle_members(state: State) -> bool:
    """Whether repairs have left seats without lanes that would have some if lanes were laid out anew."""
    plan = state.plan
    if plan is None or all(s.lanes for s in plan.seats):
        return False
    if state.idle[0] != plan.generation:
        without = {(s.worker_id, s.stage) for s in plan.seats if not s.lanes}
        again = state.seats(plan.worker_ids, plan.seats, anew=True)
        state.idle = (plan.generation, any((s.worker_id, s.stage) in without and s.lanes for s in again))
    return state.idle[1]


def _may_go(state: State, leaving: list[Worker], joiners: list[Join]) -> list[Worker]:
    """Of those who are to leave, the last ones for whom enough others stay: in all, and in each of their stages."""
    plan = state.plan
    may_leave = len(state.survivors()) + len(joiners) - state.min_workers
    going = leaving[-may_leave:] if may_leave > 0 else []
    if plan is None or plan.stages == 1:
        return going
    staying = [w.key.worker_id for w in state.survivors() if w not in going]
    held = {stage for i in staying for stage in plan.stages_of(i)} | {k for j in joiners for k in j.stages}
    free = []
    for worker in reversed(going):
        own = set(plan.stages_of(worker.key.worker_id))
        if own <= held:
            free.append(worker)
        else:
            held |= own
    return sorted(free, key=lambda w: w.key)


def _prepare_if_due(state: State, leaving: list[Worker]) -> None:
    healed_at = [j.healed_ns for j in state.joins.values() if j.healed_ns is not None]
    healing = [j for j in state.joins.values() if j.healed_ns is None and j.retry_ns is None]
    if healed_at and healing and state.now < min(healed_at) + BATCH_NS:
        # Others are about to follow: one change of generation for all of them.
        state.alarms.set(JoinsDue(), min(healed_at) + BATCH_NS)
        return
    healed = [j for _, j in sorted(state.joins.items()) if j.healed_ns is not None and state.alive(j.key) is not None]
    room = state.capacity - len(state.survivors()) + len(leaving)
    healed = healed[: max(0, room)]
    joiners = [(w, j.stages) for w, j in ((state.alive(j.key), j) for j in healed) if w is not None]
    going = _may_go(state, leaving, healed)
    parts, cause = [], Cause.REBALANCED
    if not joiners and not going:
        if not _idle_members(state):
            return
        parts.append("members without lanes get their share")
    if joiners:
        cause = Cause.JOINED
        parts.append(f"worker {listed({w.key.worker_id for w, _ in joiners})} healed and joins")
    if going:
        cause = _asked(state, going)
        parts.append(f"worker {listed({w.key.worker_id for w in going})} leaves as asked")
    prepare(state, joiners, [w.key for w in going], Why(cause, "; ".join(parts)))


def _asked(state: State, going: list[Worker]) -> Cause:
    """How the first of these was asked to leave."""
    return state.unwanted.get(going[0].key.worker_id, Cause.SCALED)
