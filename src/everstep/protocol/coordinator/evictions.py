"""How a life comes to its end: it is evicted, dismissed, or goes after its last words. Pure."""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.agents import Agent
from everstep.protocol.coordinator.alarms import FailedDue, LinksDue
from everstep.protocol.coordinator.desk import SECOND_NS
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.words import describe
from everstep.protocol.messages import Dismissed, KillWorker, Saved, WorkerFailed

KILL_AGAIN_NS = 5 * SECOND_NS


def evict(
    job: JobState,
    worker: Worker,
    why: Why,
    *,
    kill: bool,
    notice_ns: int = 0,
    died_unix_ns: int | None = None,
) -> None:
    """This life is over, or is made to be: fence it, say why, and break the plan it was part of.

    kill: it may still run. notice_ns: how long ago the fault happened, as far as is known.
    """
    key, agent = worker.key, job.agents.of(worker)
    job.membership.remove(key, why)
    job.healing.forget(key)
    job.agreement.forget(key.worker_id)
    job.speeds.forget(key.worker_id)
    fields = {
        "worker_id": key.worker_id,
        "incarnation": key.incarnation,
        "pid": worker.pid,
        "step": worker.step,
        "generation": job.agreement.in_force,
    }
    if worker.member is None:
        early = Why(why.cause, f"{describe(key)} ended before it was ready: {why.reason}")
        job.desk.report("warning", early, **fields)
    else:
        job.desk.report("worker_evicted", why, died_unix_ns=died_unix_ns, **fields)
    job.desk.send(worker.connection, Dismissed(cause=why.cause, reason=why.reason, drained=False))
    if kill and agent is not None:
        kill_life(job, agent, key, why)
    if job.agreement.in_any_plan(key):
        whose = Why(why.cause, f"{describe(key)}: {why.reason}")
        job.agreement.break_off(whose)
        job.recovery.begin(whose, key=key, notice_ns=notice_ns, died_unix_ns=died_unix_ns)
        _shrink(job, key, why.cause)


def _shrink(job: JobState, key: WorkerKey, cause: Cause) -> None:
    slots = job.slots
    if job.desk.config.on_failure != "shrink" or not slots.wanted(key.worker_id):
        return
    if slots.target > slots.least:
        reason = f"{describe(key)} was lost and on_failure is 'shrink'"
        slots.want(slots.target - 1, slots.ids() - {key.worker_id}, Why(cause, reason))


def kill_life(job: JobState, agent: Agent, key: WorkerKey, why: Why) -> None:
    """Ask the agent for SIGKILL, at most once per `KILL_AGAIN_NS`."""
    if agent.may_kill(key, job.desk.now, KILL_AGAIN_NS):
        who = {"worker_id": key.worker_id, "incarnation": key.incarnation}
        job.desk.send(agent.connection, KillWorker(**who, cause=why.cause, reason=why.reason))


def dismiss(job: JobState, worker: Worker, why: Why) -> None:
    """A worker is no longer wanted: it leaves without fault."""
    job.membership.remove(worker.key, why)
    job.healing.forget(worker.key)
    job.desk.send(worker.connection, Dismissed(cause=why.cause, reason=why.reason, drained=True))


# ---- last words


def worker_failed(job: JobState, worker: Worker, message: WorkerFailed) -> None:
    """A worker ends by an exception."""
    if job.failures.last_words(worker, message):
        evict(job, worker, Why(message.cause, message.reason), kill=False)


def failed_early(job: JobState, connection: str, message: WorkerFailed) -> None:
    """The same of one that never said hello: its task cannot even be built."""
    worker = job.membership.alive(WorkerKey(message.worker_id, message.incarnation))
    if worker is not None:
        worker_failed(job, worker, message)


def saved(job: JobState, worker: Worker, message: Saved) -> None:
    """A checkpoint has ended, one way or the other: that before a worker is let go, or one that was asked for."""
    plan = job.agreement.plan
    if job.failures.staying and job.saving.ending is None and plan is not None and plan.save:
        _let_go(job)
    else:
        job.saving.saved(message)


def failed_due(job: JobState, alarm: FailedDue) -> None:
    """The time for a checkpoint before workers are let go is over."""
    _let_go(job)


def _let_go(job: JobState) -> None:
    for worker, why in job.failures.let_go():
        evict(job, worker, why, kill=False)


# ---- links


def links_due(job: JobState, alarm: LinksDue) -> None:
    """All who have lost a peer had the time to say so: no death explains what they accuse each other of."""
    if job.progress.ended is None:
        for worker, why in job.links.close_window():
            evict(job, worker, why, kill=True)
