"""Which plan comes next: the start, plans for at once, prepared plans, and the switch to one. Pure.

Every plan is made here, and nowhere else. A plan for at once takes the members of the current plan that live (and
newcomers only where there would be too few); a prepared one changes the membership at a step boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.plan import Plan, Seat, WorkerKey
from everstep.protocol.coordinator import recovery
from everstep.protocol.coordinator.journal import plan_to_entry, record_plan, restore_member
from everstep.protocol.coordinator.state import SECOND_NS, State, Worker, describe, listed
from everstep.protocol.messages import Dismissed, PlanNow, PlanPrepared

START_PATIENCE_NS = 10 * SECOND_NS


def reconcile(state: State) -> None:
    """Make the plan that is due, or say what is waited for."""
    if state.ended is not None:
        return
    if state.plan is None:
        _start(state)
    elif state.broken:
        _regroup(state)


# ---- plans for at once


def candidates(state: State) -> list[Worker]:
    """Ready workers outside the current plan whose slots are wanted; those that would rather be spares last."""
    found = [
        w
        for w in state.workers.values()
        if w.ready and state.slot_wanted(w.key.worker_id) and not (state.plan is not None and state.plan.has(w.key))
    ]
    return sorted(found, key=lambda w: (w.wants_spare, w.key))


def _too_few_came(state: State) -> bool:
    """Whether the start must wait anyway: so that a thousand hellos need not look at a thousand workers each."""
    some_missing = len(state.greeted) < state.target and state.slots is None and not state.lost_slots
    first = state.first_hello_ns
    patient = not state.greeted if first is None else state.now < first + START_PATIENCE_NS
    return some_missing and patient


def _start(state: State) -> None:
    _await(state)
    if _too_few_came(state):
        if state.first_hello_ns is not None:
            state.alarms.set("start", state.first_hello_ns + START_PATIENCE_NS)
        return
    ready = candidates(state)
    if ready and state.first_hello_ns is None:
        state.first_hello_ns = state.now
    expected = state.expected()
    # The slots from 0 are the job's workers, those beyond are its spares.
    willing = [w for w in ready if not w.wants_spare and w.key.worker_id < state.config.workers]
    all_there = len(willing) >= expected or (bool(state.lost_slots) and len(ready) >= expected)
    if all_there and expected >= state.min_workers:
        some = willing if len(willing) >= expected else ready
        _make_now(state, some[:expected], Why(Cause.STARTED, "all workers are there"), fresh=True)
    elif state.first_hello_ns is not None:
        patient_until = state.first_hello_ns + START_PATIENCE_NS
        if state.now < patient_until:
            state.alarms.set("start", patient_until)
        elif len(ready) >= state.min_workers:
            some = ready[: state.target]
            text = f"{len(some)} of {state.target} workers came within {START_PATIENCE_NS // SECOND_NS} s"
            _make_now(state, some, Why(Cause.STARTED, text), fresh=True)


def _regroup(state: State) -> None:
    survivors = state.survivors()
    to_come = {m.key for p in (state.plan, state.prepared) if p is not None for m in p.members}
    if state.in_grace and any(w.key in to_come and not w.greeted for w in state.workers.values()):
        # Who is not back yet may follow a newer plan than the journal knows, or have switched to the prepared one.
        return
    if not survivors:
        _fall_back(state)
        return
    cause, text = state.broken[0].cause, _said(state)
    wait_for_all = state.config.on_failure == "wait"
    needed = state.min_workers
    if wait_for_all and state.plan is not None:
        needed = max(needed, min(state.expected(), len(state.plan.members)))
    lost = _lost_stages(state, survivors)
    members = survivors + _newcomers(state, survivors, needed, lost)
    if len(members) >= needed:
        newcomers = {w.key.worker_id for w in members[len(survivors) :]}
        if newcomers:
            text += f"; worker {listed(newcomers)} takes part from here"
        if lost:
            text += f"; stage {listed(set(lost))} has lost its whole pool: every stage goes back to the newest copy"
        if not state.entered:  # what was to be restored before may still be nowhere
            lost = sorted({*lost, *state.lost_stages})
        _make_now(state, members, Why(cause, text), fresh=False)
        state.lost_stages = list(lost)
        return
    policy = "on_failure is 'wait'" if needed > state.min_workers else "min_workers is the least the job may run with"
    text = f"{text}. {len(members)} of {needed} workers are ready ({policy}): waiting for more"
    _await(state, Why(cause, text))


def _said(state: State) -> str:
    """All that broke the plan, in words."""
    return "; ".join(why.reason for why in state.broken)


def _lost_stages(state: State, survivors: Sequence[Worker]) -> list[int]:
    """The stages of the plan that no survivor holds. Who joined in this plan and has not settled holds nothing yet."""
    plan = state.plan
    if plan is None or plan.stages == 1:
        return []
    new = set(plan.joining) - state.entered
    held = {stage for w in survivors if w.key.worker_id not in new for stage in plan.stages_of(w.key.worker_id)}
    return [stage for stage in range(plan.stages) if stage not in held]


def _newcomers(state: State, survivors: Sequence[Worker], needed: int, lost: Sequence[int]) -> list[Worker]:
    """Who is taken in at once: whoever has little to copy; any others only where there would be too few.

    A joiner that follows a stage of which nobody else is left comes first: it saves everybody from going back.
    """
    room = max(0, state.target - len(survivors))
    ready = candidates(state)[:]
    saving = [w for w in ready if _followed(state, w) & set(lost)]
    small = [w for w in ready if 0 <= w.state_bytes <= state.config.small_state_bytes and w not in saving]
    large = [w for w in ready if w not in small and w not in saving]
    chosen = (saving + small)[:room]
    wanted = max(len(lost), needed - len(survivors)) if len(survivors) < needed or lost else 0
    if len(survivors) + len(chosen) < needed:
        return (chosen + large)[:room]
    return chosen + large[: max(0, min(wanted, room) - len(chosen))]


def _followed(state: State, worker: Worker) -> set[int]:
    """The stages whose newest state a worker outside the plan is known to hold, as a joiner."""
    join, prepared = state.joins.get(worker.key.worker_id), state.prepared
    if state.plan is not None and state.plan.has(worker.key):
        return set()
    if join is not None and join.key == worker.key and join.healed_ns is not None:
        return set(join.stages)
    return set(prepared.stages_of(worker.key.worker_id)) if prepared is not None and prepared.has(worker.key) else set()


def _fall_back(state: State) -> None:
    ending = state.ending
    if ending is not None:
        text = f"{ending.why.reason}; no checkpoint: nobody is left"
        state.end(ending.state, Why(ending.why.cause, text), ending.exit_code)
        return
    if not state.fallback:
        state.fallback = True
        state.first_hello_ns = None
    # A joiner that follows the members is the next best: it may even have switched with them already.
    ready = sorted(candidates(state), key=lambda w: -_held_step(state, w))
    if ready and state.first_hello_ns is None:
        state.first_hello_ns = state.now
    wait_for_all = state.config.on_failure == "wait"
    expected = max(state.min_workers, state.expected())
    patient = state.first_hello_ns is not None and state.now < state.first_hello_ns + START_PATIENCE_NS
    enough = len(ready) >= expected or (len(ready) >= state.min_workers and not patient and not wait_for_all)
    cause, text = state.broken[0].cause, f"every worker that held the training state is gone ({_said(state)}): "
    if not enough:
        _await(state, Why(cause, f"{text}waiting for workers to start over"))
        if patient and state.first_hello_ns is not None:
            state.alarms.set("start", state.first_hello_ns + START_PATIENCE_NS)
        return
    step = _held_step(state, ready[0])
    if step:
        text += f"worker {ready[0].key.worker_id}, which had healed, goes on from step {step} or later"
    else:
        text += "starting over from step 0, or from the newest copy that is left"
    fell_from = 0 if step else max(state.fell_from, state.step)
    if not fell_from:  # otherwise it is told when it is known how many steps are done again
        state.report("fallback", Why(cause, text), step=step or None, generation=state.generation + 1)
    state.fell_from, state.step, state.lost_stages = fell_from, step, []
    _make_now(state, ready[: state.target], Why(cause, text), fresh=True)


def _held_step(state: State, worker: Worker) -> int:
    """The step that a worker outside the plan is known to hold: none, unless it has said that it has healed."""
    join = state.joins.get(worker.key.worker_id)
    healed = join is not None and join.key == worker.key and join.healed_ns is not None
    prepared = state.prepared is not None and state.prepared.has(worker.key)
    return worker.step if healed or prepared else 0


def _make_now(state: State, members: Sequence[Worker], why: Why, *, fresh: bool) -> None:
    old = state.plan
    repaired = old is not None and not fresh
    ids = sorted(w.key.worker_id for w in members)
    followed = [Seat(w.key.worker_id, k, "standby", ()) for w in members for k in sorted(_followed(state, w))]
    seats = state.seats(ids, [*old.seats, *followed] if old is not None and repaired else ())
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
    _announce(state, old)


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


def _await(state: State, why: Why | None = None) -> None:
    if state.quorum_since_ns is None:
        state.quorum_since_ns = state.now
    if why is not None and why != state.waiting:
        state.waiting = why
        state.report("waiting", why, step=state.step, generation=state.generation)
    state.alarms.set("quorum", state.quorum_since_ns + state.config.quorum_wait_ns)


def check_quorum(state: State) -> None:
    """Give up when too few workers came for too long."""
    since = state.quorum_since_ns
    if since is None or state.ended is not None or (state.plan is not None and not state.broken):
        return
    if state.now < since + state.config.quorum_wait_ns:
        state.alarms.set("quorum", since + state.config.quorum_wait_ns)
        return
    waited = state.config.quorum_wait_ns / 1e9
    came = f"{len(candidates(state))} of {state.expected()} workers came"
    text = f"gave up after waiting {waited:g} s for workers: {state.waiting.reason if state.waiting else came}"
    state.end("failed", Why(Cause.QUORUM, text), 3)


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


def on_entered(state: State, worker: Worker, generation: int, step: int, phases_ms: dict[str, float]) -> None:
    """A worker says that it has settled in a generation and computes `step` next."""
    if state.prepared is not None and generation == state.prepared.generation:
        _switch(state)
    plan = state.plan
    if plan is None or generation != plan.generation or not plan.has(worker.key):
        return
    _note_step(state, plan, step - 1)
    if plan.sound == state.sound:
        state.sound = -1  # all members know
    if worker.key.worker_id not in state.entered:
        if not state.entered:  # decisions ask only whether anybody has: a thousand members need not decide each
            state.dirty = True
        state.entered.add(worker.key.worker_id)
        if worker.key.worker_id in plan.joining:
            _report_healed(state, worker, step)
    recovery.entered(state, generation, phases_ms)


def _note_step(state: State, plan: Plan, step: int) -> None:
    """The step that a member has settled at; the first of a generation knows whether there was a way back."""
    if not state.entered and (state.fell_from or state.lost_stages):
        _tell_fallback(state, plan, step)
    if state.entered or plan.prepared or step >= state.step:
        state.step = max(state.step, step)
        state.doubt = None if state.entered else state.doubt
        return
    if state.doubt:
        _tell_fallback(state, plan, step)
    state.step, state.doubt = step, None


def _tell_fallback(state: State, plan: Plan, step: int) -> None:
    """State was lost, or is in doubt: what the members go on from, and how many steps are done again."""
    reached, lost = state.fell_from or state.step, state.lost_stages
    source = f"a copy of step {step}" if step else "step 0, for there is no copy"
    if state.fell_from:
        source = f"the checkpoint of step {step}" if step else "step 0, for there is no checkpoint"
        what = f"every worker that held the training state was gone: all go on from {source}"
    elif state.doubt:
        what = f"{state.doubt.reason}; all go back to {source}"
    else:
        who = "; ".join(f"worker {listed({s.worker_id for s in plan.pool(k)})} takes stage {k}" for k in lost)
        what = f"stage {listed(set(lost))} had lost its whole pool: {who}, and every stage goes on from {source}"
    redone = max(0, reached - step)
    text = f"{what}: {redone} step{'s are' if redone != 1 else ' is'} done again, to the same bits"
    cause = state.recovery.why.cause if state.recovery is not None else plan.cause
    state.report(
        "fallback",
        Why(state.doubt.cause if state.doubt and not state.fell_from else cause, text),
        step=step,
        generation=plan.generation,
        steps_redone=redone,
        source="start" if not step else "checkpoint" if state.fell_from else "copy",
    )
    state.fell_from, state.lost_stages, state.doubt = 0, [], None


def follow(state: State, generation: int) -> None:
    """Something shows that the members have switched to this generation, if it is the prepared one."""
    if state.prepared is not None and generation == state.prepared.generation:
        _switch(state)


def left_in_order(state: State, key: WorkerKey) -> None:
    """A process ended because its work was done: whom the prepared plan leaves out has therefore switched to it."""
    plan, prepared = state.plan, state.prepared
    if plan is not None and prepared is not None and plan.has(key) and not prepared.has(key):
        _switch(state)


def back_in(state: State, worker: Worker) -> None:
    """A member's hello shows that it has settled in the present plan."""
    plan, worker_id = state.plan, worker.key.worker_id
    if plan is None or worker_id in state.entered:
        return
    state.dirty = state.dirty or not state.entered
    state.entered.add(worker_id)
    if worker_id in plan.joining and plan.generation == state.switched:  # else it was told before a restart
        _report_healed(state, worker, worker.step + 1)


def _report_healed(state: State, worker: Worker, step: int) -> None:
    state.report(
        "worker_healed",
        Why(Cause.JOINED, "it holds the state of the others and takes part"),
        worker_id=worker.key.worker_id,
        incarnation=worker.key.incarnation,
        pid=worker.pid,
        step=step - 1,
        generation=state.plan.generation if state.plan is not None else 0,
    )


def _switch(state: State) -> None:
    old, plan = state.plan, state.prepared
    check(old is not None and plan is not None, "a switch needs a prepared plan")
    if old is None or plan is None:
        return
    state.persist("entered", generation=plan.generation)
    state.plan, state.prepared, state.entered = plan, None, set()
    state.switched = plan.generation
    behind = [i for i in sorted(state.accusations) if i in plan.worker_ids]
    if behind:
        # They lost a peer before they had decided the switch; in the new generation the others wait for them.
        text = f"worker {listed(behind)} could not follow to the switch: {state.accusation_reasons[0]}"
        state.broken.append(Why(Cause.LINK, text))
    state.accusations, state.accusation_reasons = {}, []
    state.dirty = True
    for worker_id in plan.joining:
        state.joins.pop(worker_id, None)
    _announce(state, old)
    for member in old.members:
        worker = state.alive(member.key)
        if worker is not None and not plan.has(member.key):
            dismiss(state, worker, Why(plan.cause, plan.reason))


def dismiss(state: State, worker: Worker, why: Why) -> None:
    """A worker is no longer wanted: it leaves without fault."""
    del state.workers[worker.key.worker_id]
    state.joins.pop(worker.key.worker_id, None)
    state.fence(worker.key, why)
    state.send(worker.connection, Dismissed(cause=why.cause, reason=why.reason, drained=True))
    state.dirty = True


# ---- telling, adopting


def _announce(state: State, old: Plan | None) -> None:
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


def adopt(state: State, plan: Plan, source: WorkerKey) -> None:
    """A worker follows a plan that the journal does not know: believe it, and let its members come back."""
    known = state.generation
    state.generation = plan.generation
    state.persist("plan", plan=plan_to_entry(plan), agents={}, adopted=True)
    state.plan, state.prepared = plan, None
    state.entered, state.joins, state.broken = set(), {}, []
    state.first_hello_ns = state.quorum_since_ns = None
    state.waiting, state.fallback = None, False
    state.grace_until_ns = state.now + state.config.grace_ns
    state.alarms.set("grace", state.grace_until_ns)
    state.dirty = True
    for member in plan.members:
        restore_member(state, member, None)
        if state.alive(member.key) is None:
            cause = state.fenced_for.get(member.worker_id, Cause.UNKNOWN)
            state.broken.append(Why(cause, f"{describe(member.key)} was evicted before"))
    text = (
        f"{describe(source)} follows generation {plan.generation} with workers {listed(set(plan.worker_ids))}, "
        f"of which the journal, at generation {known}, knows nothing: adopted"
    )
    state.report("warning", Why(Cause.JOURNAL, text), generation=plan.generation)
