"""Which plan the members follow: what they say of it, the switch to a prepared one, plans that only they know. Pure."""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.coordinator import recovery, saving
from everstep.protocol.coordinator.alarms import GraceDue
from everstep.protocol.coordinator.journal import plan_to_entry, restore_member
from everstep.protocol.coordinator.plans import announce, dismiss
from everstep.protocol.coordinator.state import State, Worker, describe, listed
from everstep.protocol.messages import GenerationEntered, Progress, WorkerDone


def entered(state: State, worker: Worker, message: GenerationEntered) -> None:
    """A worker says that it has settled in a generation, and which step it computes next."""
    worker.step = max(worker.step, message.step - 1)
    _settled(state, worker, message.generation, message.step, message.phases_ms)
    if state.plan is not None and worker.key.worker_id == state.plan.leader(0):
        saving.remind(state)


def progressed(state: State, worker: Worker, message: Progress) -> None:
    """A worker says that a step is committed."""
    follow(state, message.generation)
    worker.step = max(worker.step, message.step)
    state.step = max(state.step, message.step)
    if message.step_ms > 0:
        state.step_times_ms.append(message.step_ms)
    if state.plan is not None and message.generation == state.plan.generation:
        if not state.entered:
            state.dirty = True
        state.entered.add(worker.key.worker_id)
        recovery.complete(state)


def done(state: State, worker: Worker, message: WorkerDone) -> None:
    """A worker says that the last step is committed; if the final state is written too, the job is over."""
    follow(state, message.generation)
    worker.step = max(worker.step, message.step)
    plan = state.plan
    if message.final_written and plan is not None and plan.has(worker.key):
        state.step = max(state.step, message.step)
        recovery.complete(state)
        state.end("completed", Why(Cause.COMPLETED, f"step {message.step} was the last"), 0)


def _settled(state: State, worker: Worker, generation: int, step: int, phases_ms: dict[str, float]) -> None:
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
    announce(state, old)
    for member in old.members:
        worker = state.alive(member.key)
        if worker is not None and not plan.has(member.key):
            dismiss(state, worker, Why(plan.cause, plan.reason))


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
    state.alarms.set(GraceDue(), state.grace_until_ns)
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
