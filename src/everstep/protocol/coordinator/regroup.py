"""The start, and what follows when the plan cannot go on: who takes part next, or what is waited for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.alarms import QuorumDue, StartDue
from everstep.protocol.coordinator.plans import candidates, followed, make_now
from everstep.protocol.coordinator.state import SECOND_NS, State, Worker, listed

START_PATIENCE_NS = 10 * SECOND_NS


def reconcile(state: State) -> None:
    """Make the plan that is due, or say what is waited for."""
    if state.ended is not None:
        return
    if state.plan is None:
        _start(state)
    elif state.broken:
        _regroup(state)


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
            state.alarms.set(StartDue(), state.first_hello_ns + START_PATIENCE_NS)
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
        make_now(state, some[:expected], Why(Cause.STARTED, "all workers are there"), fresh=True)
    elif state.first_hello_ns is not None:
        patient_until = state.first_hello_ns + START_PATIENCE_NS
        if state.now < patient_until:
            state.alarms.set(StartDue(), patient_until)
        elif len(ready) >= state.min_workers:
            some = ready[: state.target]
            text = f"{len(some)} of {state.target} workers came within {START_PATIENCE_NS // SECOND_NS} s"
            make_now(state, some, Why(Cause.STARTED, text), fresh=True)


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
        make_now(state, members, Why(cause, text), fresh=False)
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
    saving = [w for w in ready if followed(state, w) & set(lost)]
    small = [w for w in ready if 0 <= w.state_bytes <= state.config.small_state_bytes and w not in saving]
    large = [w for w in ready if w not in small and w not in saving]
    chosen = (saving + small)[:room]
    wanted = max(len(lost), needed - len(survivors)) if len(survivors) < needed or lost else 0
    if len(survivors) + len(chosen) < needed:
        return (chosen + large)[:room]
    return chosen + large[: max(0, min(wanted, room) - len(chosen))]


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
            state.alarms.set(StartDue(), state.first_hello_ns + START_PATIENCE_NS)
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
    make_now(state, ready[: state.target], Why(cause, text), fresh=True)


def _held_step(state: State, worker: Worker) -> int:
    """The step that a worker outside the plan is known to hold: none, unless it has said that it has healed."""
    join = state.joins.get(worker.key.worker_id)
    healed = join is not None and join.key == worker.key and join.healed_ns is not None
    prepared = state.prepared is not None and state.prepared.has(worker.key)
    return worker.step if healed or prepared else 0


def _await(state: State, why: Why | None = None) -> None:
    if state.quorum_since_ns is None:
        state.quorum_since_ns = state.now
    if why is not None and why != state.waiting:
        state.waiting = why
        state.report("waiting", why, step=state.step, generation=state.generation)
    state.alarms.set(QuorumDue(), state.quorum_since_ns + state.config.quorum_wait_ns)


def check_quorum(state: State, alarm: QuorumDue) -> None:
    """Give up when too few workers came for too long."""
    since = state.quorum_since_ns
    if since is None or state.ended is not None or (state.plan is not None and not state.broken):
        return
    if state.now < since + state.config.quorum_wait_ns:
        state.alarms.set(QuorumDue(), since + state.config.quorum_wait_ns)
        return
    waited = state.config.quorum_wait_ns / 1e9
    came = f"{len(candidates(state))} of {state.expected()} workers came"
    text = f"gave up after waiting {waited:g} s for workers: {state.waiting.reason if state.waiting else came}"
    state.end("failed", Why(Cause.QUORUM, text), 3)
