"""The start, and what follows when the plan cannot go on: who takes part next, or what is waited for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.alarms import QuorumDue, StartDue
from everstep.protocol.coordinator.desk import SECOND_NS
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.plans import candidates, followed, make_now
from everstep.protocol.coordinator.quorum import START_PATIENCE_NS
from everstep.protocol.coordinator.words import listed

SMALL_STATE_BYTES = 32 << 20
"""Who has no larger state to copy is taken into a plan for at once, and copies it there."""


def reconcile(job: JobState) -> None:
    """Make the plan that is due, or say what is waited for."""
    if job.progress.ended is not None:
        return
    if job.agreement.plan is None:
        _start(job)
    elif job.agreement.broken:
        _regroup(job)


def start_due(job: JobState, alarm: StartDue) -> None:
    """All workers had the time to come."""
    job.quorum.patience_over()


def _too_few_came(job: JobState) -> bool:
    """Whether the start must wait anyway: so that a thousand hellos need not look at a thousand workers each."""
    came, slots, quorum = job.membership.came, job.slots, job.quorum
    some_missing = came < slots.target and slots.as_started and not slots.lost
    return some_missing and (quorum.patient if quorum.anybody else not came)


def _start(job: JobState) -> None:
    slots, quorum = job.slots, job.quorum
    quorum.wait()
    if _too_few_came(job):
        quorum.give_time()
        return
    ready = candidates(job)
    if ready:
        quorum.came()
    expected = slots.expected()
    # The slots from 0 are the job's workers, those beyond are its spares.
    willing = [w for w in ready if not w.wants_spare and w.key.worker_id < job.desk.config.workers]
    all_there = len(willing) >= expected or (bool(slots.lost) and len(ready) >= expected)
    if all_there and expected >= slots.least:
        some = willing if len(willing) >= expected else ready
        make_now(job, some[:expected], Why(Cause.STARTED, "all workers are there"), fresh=True)
    elif quorum.patient:
        quorum.give_time()
    elif quorum.anybody and len(ready) >= slots.least:
        some = ready[: slots.target]
        text = f"{len(some)} of {slots.target} workers came within {START_PATIENCE_NS // SECOND_NS} s"
        make_now(job, some, Why(Cause.STARTED, text), fresh=True)


def _regroup(job: JobState) -> None:
    agreement, slots = job.agreement, job.slots
    survivors = agreement.survivors()
    to_come = (w for w in job.membership.workers.values() if not w.greeted and agreement.in_any_plan(w.key))
    if job.membership.in_grace and any(to_come):
        # Who is not back yet may follow a newer plan than the journal knows, or have switched to the prepared one.
        return
    if not survivors:
        _fall_back(job)
        return
    cause, text = agreement.broken[0].cause, _said(job)
    needed = slots.least
    if job.desk.config.on_failure == "wait" and agreement.plan is not None:
        needed = max(needed, min(slots.expected(), len(agreement.plan.members)))
    lost = _lost_stages(job, survivors)
    members = survivors + _newcomers(job, survivors, needed, lost)
    if len(members) >= needed:
        newcomers = {w.key.worker_id for w in members[len(survivors) :]}
        if newcomers:
            text += f"; worker {listed(newcomers)} takes part from here"
        if lost:
            text += f"; stage {listed(lost)} has lost its whole pool: every stage goes back to the newest copy"
        if not agreement.entered:  # what was to be restored before may still be nowhere
            lost = sorted({*lost, *job.progress.lost_stages})
        make_now(job, members, Why(cause, text), fresh=False)
        job.progress.lose(lost)
        return
    policy = "on_failure is 'wait'" if needed > slots.least else "min_workers is the least the job may run with"
    text = f"{text}. {len(members)} of {needed} workers are ready ({policy}): waiting for more"
    job.quorum.wait_for(Why(cause, text), job.progress.step, agreement.generation)


def _said(job: JobState) -> str:
    """All that broke the plan, in words."""
    return "; ".join(why.reason for why in job.agreement.broken)


def _lost_stages(job: JobState, survivors: Sequence[Worker]) -> list[int]:
    """The stages of the plan that no survivor holds."""
    plan = job.agreement.plan
    if plan is None or plan.stages == 1:
        return []
    new = job.agreement.empty_handed()
    held = {stage for w in survivors if w.key.worker_id not in new for stage in plan.stages_of(w.key.worker_id)}
    return [stage for stage in range(plan.stages) if stage not in held]


def _newcomers(job: JobState, survivors: Sequence[Worker], needed: int, lost: Sequence[int]) -> list[Worker]:
    """Who is taken in at once: whoever has little to copy; any others only where there would be too few.

    A joiner that follows a stage of which nobody else is left comes first: it saves everybody from going back.
    """
    room = max(0, job.slots.target - len(survivors))
    ready = candidates(job)
    saving = [w for w in ready if followed(job, w) & set(lost)]
    small = [w for w in ready if 0 <= w.state_bytes <= SMALL_STATE_BYTES and w not in saving]
    large = [w for w in ready if w not in small and w not in saving]
    chosen = (saving + small)[:room]
    wanted = max(len(lost), needed - len(survivors)) if len(survivors) < needed or lost else 0
    if len(survivors) + len(chosen) < needed:
        return (chosen + large)[:room]
    return chosen + large[: max(0, min(wanted, room) - len(chosen))]


def _fall_back(job: JobState) -> None:
    """Nobody holds the state of the plan any more: start over with whoever comes, from the newest that is left."""
    if job.saving.ending is not None:
        job.saving.end_with("no checkpoint: nobody is left")
        return
    slots, quorum = job.slots, job.quorum
    quorum.start_over()
    # A joiner that follows the members is the next best: it may even have switched with them already.
    ready = sorted(candidates(job), key=lambda w: -_held_step(job, w))
    if ready:
        quorum.came()
    wait_for_all = job.desk.config.on_failure == "wait"
    expected = max(slots.least, slots.expected())
    enough = len(ready) >= expected or (len(ready) >= slots.least and not quorum.patient and not wait_for_all)
    cause = job.agreement.broken[0].cause
    text = f"every worker that held the training state is gone ({_said(job)}): "
    generation = job.agreement.generation
    if not enough:
        why = Why(cause, f"{text}waiting for workers to start over")
        quorum.wait_for(why, job.progress.step, generation)
        if quorum.patient:
            quorum.give_time()
        return
    step = _held_step(job, ready[0])
    if step:
        text += f"worker {ready[0].key.worker_id}, which had healed, goes on from step {step} or later"
    else:
        text += "starting over from step 0, or from the newest copy that is left"
    if not job.progress.fall_back(step):
        job.desk.report("fallback", Why(cause, text), step=step or None, generation=generation + 1)
    make_now(job, ready[: slots.target], Why(cause, text), fresh=True)


def _held_step(job: JobState, worker: Worker) -> int:
    """The step that a worker outside the plan is known to hold: none, unless it has said that it has healed."""
    prepared = job.agreement.prepared
    known = job.healing.healed(worker.key) is not None or (prepared is not None and prepared.has(worker.key))
    return worker.step if known else 0


def quorum_due(job: JobState, alarm: QuorumDue) -> None:
    """Give up when too few workers came for too long."""
    agreement, waiting = job.agreement, job.quorum.waiting
    if job.progress.ended is not None or (agreement.plan is not None and not agreement.broken) or not job.quorum.over():
        return
    waited_s = job.desk.config.quorum_wait_ns / 1e9
    came = f"{len(candidates(job))} of {job.slots.expected()} workers came"
    text = f"gave up after waiting {waited_s:g} s for workers: {waiting.reason if waiting else came}"
    job.progress.end("failed", Why(Cause.QUORUM, text), 3)
