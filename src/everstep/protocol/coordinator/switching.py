"""Which plan the members follow: what they say of it, the switch to a prepared one, plans that only they know. Pure."""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.coordinator.evictions import dismiss
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.plans import announce
from everstep.protocol.coordinator.words import describe, listed
from everstep.protocol.messages import GenerationEntered, PeerFault, Progress, SettleAgain, WorkerDone

# ---- what members say of a generation


def entered(job: JobState, worker: Worker, message: GenerationEntered) -> None:
    """A worker has settled in a generation; the message has the step that it computes next."""
    worker.reached(message.step - 1)
    follow(job, message.generation)
    plan = job.agreement.plan
    if plan is not None and message.generation == plan.generation and plan.has(worker.key):
        job.progress.settled(plan, message.step - 1, job.recovery.cause(plan.cause))
        job.progress.known_to_all(plan)
        if job.agreement.enter(worker.key.worker_id) and worker.key.worker_id in plan.joining:
            _report_healed(job, worker, message.step - 1)
        job.recovery.entered(message.generation, message.phases_ms)
    if plan is not None and worker.key.worker_id == plan.leader(0):
        job.saving.remind()


def progressed(job: JobState, worker: Worker, message: Progress) -> None:
    """A step is committed."""
    follow(job, message.generation)
    worker.reached(message.step)
    job.progress.reached(message.step)
    job.progress.took(message.step_ms)
    if job.agreement.plan is not None and message.generation == job.agreement.in_force:
        job.agreement.enter(worker.key.worker_id)
        job.recovery.complete(job.progress.step)


def done(job: JobState, worker: Worker, message: WorkerDone) -> None:
    """The last step is committed; if the final state is written too, the job is over."""
    follow(job, message.generation)
    worker.reached(message.step)
    if message.final_written and job.agreement.has(worker.key):
        job.progress.reached(message.step)
        job.recovery.complete(job.progress.step)
        job.progress.end("completed", Why(Cause.COMPLETED, f"step {message.step} was the last"), 0)


def peer_fault(job: JobState, worker: Worker, message: PeerFault) -> None:
    """A transfer between members has failed."""
    follow(job, message.generation)
    job.links.peer_fault(worker, message)


def settle_again(job: JobState, worker: Worker, message: SettleAgain) -> None:
    """What a member had stated does not hold: all settle in a new generation, with what holds.

    Where states differ, all go back to where they were alike, once. If they differ there again, that is no chance.
    """
    agreement, why = job.agreement, Why(message.cause, message.reason)
    if message.tainted:
        if job.progress.differed_before(message.tainted, message.decided_in):
            text = f"{message.reason}; this is the second time at this step, going back does not help"
            job.progress.end("failed", Why(message.cause, text), 1)
            return
        job.progress.in_doubt(why, message.sound)
    if message.generation != agreement.in_force or not agreement.has(worker.key):
        return
    text = message.reason if message.tainted else f"worker {worker.key.worker_id}: {message.reason}"
    agreement.break_off(Why(message.cause, text))
    job.recovery.begin(why)


# ---- the prepared plan


def follow(job: JobState, generation: int) -> None:
    """Something shows that the members have switched to this generation, if it is the prepared one."""
    prepared = job.agreement.prepared
    if prepared is not None and generation == prepared.generation:
        _switch(job, prepared)


def left_in_order(job: JobState, key: WorkerKey) -> None:
    """A process ended because its work was done: whom the prepared plan leaves out has therefore switched to it."""
    prepared = job.agreement.prepared
    if prepared is not None and job.agreement.has(key) and not prepared.has(key):
        _switch(job, prepared)


def _switch(job: JobState, plan: Plan) -> None:
    old = job.agreement.switch()
    behind = job.links.left_behind(plan)
    if behind is not None:
        job.agreement.break_off(behind)
    job.links.forget_accusations()
    for worker_id in plan.joining:
        job.healing.stop(worker_id)
    announce(job, old)
    for member in old.members:
        worker = job.membership.alive(member.key)
        if worker is not None and not plan.has(member.key):
            dismiss(job, worker, Why(plan.cause, plan.reason))


# ---- what a hello shows


def back_in(job: JobState, worker: Worker) -> None:
    """A member's hello shows that it has settled in the present plan."""
    agreement, worker_id = job.agreement, worker.key.worker_id
    plan = agreement.plan
    if plan is None or not agreement.enter(worker_id):
        return
    if worker_id in plan.joining and plan.generation == agreement.switched:  # else it was told before a restart
        _report_healed(job, worker, worker.step)


def _report_healed(job: JobState, worker: Worker, step: int) -> None:
    job.desk.report(
        "worker_healed",
        Why(Cause.JOINED, "it holds the state of the others and takes part"),
        worker_id=worker.key.worker_id,
        incarnation=worker.key.incarnation,
        pid=worker.pid,
        step=step,
        generation=job.agreement.in_force,
    )


def adopt(job: JobState, plan: Plan, source: WorkerKey) -> None:
    """A worker follows a plan that the journal does not know: believe it, and let its members come back."""
    agreement, membership = job.agreement, job.membership
    known = agreement.generation
    agreement.adopt(plan)
    job.healing.stop_all()
    job.quorum.met()
    membership.begin_grace()
    for member in plan.members:
        membership.restore(member, None)
        if membership.alive(member.key) is None:
            cause = membership.fenced_for(member.worker_id)
            agreement.break_off(Why(cause, f"{describe(member.key)} was evicted before"))
    text = (
        f"{describe(source)} follows generation {plan.generation} with workers {listed(set(plan.worker_ids))}, "
        f"of which the journal, at generation {known}, knows nothing: adopted"
    )
    job.desk.report("warning", Why(Cause.JOURNAL, text), generation=plan.generation)
