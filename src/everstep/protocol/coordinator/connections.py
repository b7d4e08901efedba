"""Who connects, says hello as a worker, and is cut off. Pure."""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.alarms import AgentDue, GoneDue
from everstep.protocol.coordinator.desk import SECOND_NS
from everstep.protocol.coordinator.evictions import evict
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.liveness import runs_elsewhere
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.coordinator.plans import order
from everstep.protocol.coordinator.switching import adopt, back_in, follow
from everstep.protocol.coordinator.types import Connected, Disconnected
from everstep.protocol.coordinator.words import describe
from everstep.protocol.messages import Dismissed, JobHello, PlanNow, PlanPrepared, WorkerHello


def connected(job: JobState, event: Connected) -> None:
    """Somebody who knows the token."""
    job.desk.connected(event.connection, event.role)


def disconnected(job: JobState, event: Disconnected) -> None:
    """A connection ended. Whoever it was may come back over another one."""
    name, alarms = event.connection, job.desk.alarms
    connection = job.desk.disconnected(name)
    job.store.forget(name)
    if connection is None:
        return
    if connection.agent_id is not None:
        agent = job.agents.known.get(connection.agent_id)
        if agent is not None and agent.connection == name:
            agent.leave()
            alarms.set(AgentDue(agent.agent_id), agent.detector.ceiling_at_ns)
    if connection.worker is not None:
        if not job.agents.run(connection.worker):
            job.slots.empty(connection.worker.worker_id)
        worker = job.membership.alive(connection.worker)
        if worker is not None and worker.connection == name:
            job.membership.left(worker, awaited=job.agreement.awaits(worker.key))
            if not job.agreement.in_any_plan(worker.key):
                job.healing.stop(worker.key.worker_id)
            alarms.set(GoneDue(worker.key.worker_id), job.desk.now + SECOND_NS)


def job_hello(job: JobState, name: str, hello: JobHello) -> None:
    """The process of the job itself is there (again): all it has to know is whether the job is over."""
    if job.progress.ended is not None:
        job.desk.send(name, job.progress.ended)


def worker_hello(job: JobState, name: str, hello: WorkerHello) -> None:
    """A worker says who it is and what it follows: welcome it, or send it away, and tell it what it has missed."""
    key, membership = hello.member.key, job.membership
    job.desk.introduce(name, worker=key)
    if job.progress.ended is not None:
        job.desk.send(name, job.progress.ended)
        return
    refusal = _refusal(job, hello)
    if refusal is not None:
        job.desk.send(name, Dismissed(cause=refusal.cause, reason=refusal.reason, drained=False))
        return
    known = membership.workers.get(key.worker_id)
    if known is not None and known.key != key:
        why = Why(Cause.REPLACED, f"its slot already runs incarnation {key.incarnation}")
        evict(job, known, why, kill=True)
    worker = membership.alive(key) or membership.add(key)
    if worker.connection is not None and worker.connection != name:
        job.desk.close(worker.connection, "replaced by a newer connection of the same worker")
    first = not worker.greeted and not job.agreement.in_any_plan(key)
    membership.greet(worker, name, hello, awaited=job.agreement.awaits(key))
    if first:
        _report_joined(job, worker)
    _catch_up(job, worker, hello)
    job.profiling.remind(worker)


def _refusal(job: JobState, hello: WorkerHello) -> Why | None:
    """Why this life has to go, if it has."""
    key, membership = hello.member.key, job.membership
    if membership.is_fenced(key):
        return Why(membership.fenced_for(key.worker_id), f"{describe(key)} was evicted or replaced")
    known = membership.workers.get(key.worker_id)
    if known is None or known.key == key:
        return None
    if membership.newer(key):
        return Why(Cause.REPLACED, f"{describe(key)} was evicted or replaced")
    if runs_elsewhere(job, known, hello.member.host):
        text = f"slot {key.worker_id} runs on host {known.host}, as incarnation {known.key.incarnation}"
        return Why(Cause.REPLACED, text)
    return None


def _report_joined(job: JobState, worker: Worker) -> None:
    job.desk.report(
        "worker_joined",
        Why(Cause.JOINED, "it is ready"),
        worker_id=worker.key.worker_id,
        incarnation=worker.key.incarnation,
        pid=worker.pid,
        **({"pids": list(worker.pids)} if len(worker.pids) > 1 else {}),
        host=worker.host,
        step=worker.step,
        generation=job.agreement.generation,
    )


def _catch_up(job: JobState, worker: Worker, hello: WorkerHello) -> None:
    """Bring together what the worker follows and what it should follow."""
    agreement = job.agreement
    generation = hello.plan.generation if hello.plan is not None else 0
    job.progress.reached(hello.step)
    if hello.step:
        job.healing.holds(worker.key, hello.stages)
    if hello.plan is not None and generation > agreement.generation:
        adopt(job, hello.plan, worker.key)
    follow(job, generation)
    if job.membership.alive(worker.key) is None:
        return
    plan, prepared = agreement.plan, agreement.prepared
    if plan is not None and plan.has(worker.key):
        if generation == plan.generation:
            back_in(job, worker)
        elif not agreement.broken:
            order(job, worker, PlanNow(plan=plan))
    if prepared is not None and agreement.in_any_plan(worker.key):
        order(job, worker, PlanPrepared(plan=prepared))
