"""Who connects, says hello as a worker, and is cut off. Pure."""

from __future__ import annotations

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator import health, plans, profiling, switching
from everstep.protocol.coordinator.alarms import AgentDue, GoneDue
from everstep.protocol.coordinator.state import SECOND_NS, Connection, State, Worker, describe
from everstep.protocol.coordinator.types import Connected, Disconnected
from everstep.protocol.messages import Dismissed, PlanNow, PlanPrepared, WorkerHello


def connected(state: State, event: Connected) -> None:
    """Somebody who knows the token."""
    state.connections[event.connection] = Connection(event.role)


def disconnected(state: State, event: Disconnected) -> None:
    """A connection ended. Whoever it was may come back over another one."""
    name = event.connection
    connection = state.connections.pop(name, None)
    state.store.forget(name)
    if connection is None:
        return
    if connection.agent_id is not None:
        agent = state.agents.get(connection.agent_id)
        if agent is not None and agent.connection == name:
            agent.connection = None
            state.alarms.set(AgentDue(agent.agent_id), agent.detector.ceiling_at_ns)
    if connection.worker is not None:
        if all(connection.worker not in agent.lives for agent in state.agents.values()):
            state.retiring.discard(connection.worker.worker_id)
            state.dirty = True
        worker = state.alive(connection.worker)
        if worker is not None and worker.connection == name:
            worker.connection, worker.gone_ns = None, state.now
            if not state.in_any_plan(worker.key):
                state.joins.pop(worker.key.worker_id, None)
            state.dirty = True
            state.alarms.set(GoneDue(worker.key.worker_id), state.now + SECOND_NS)


def worker_hello(state: State, name: str, hello: WorkerHello) -> None:
    """A worker says who it is and what it follows: welcome it, or send it away, and tell it what it has missed."""
    key = hello.member.key
    state.connections[name].worker = key
    if state.ended is not None:
        state.send(name, state.ended)
        return
    known = state.workers.get(key.worker_id)
    if state.is_fenced(key) or (known is not None and known.key.incarnation > key.incarnation):
        cause = state.fenced_for[key.worker_id] if state.is_fenced(key) else Cause.REPLACED
        text = f"{describe(key)} was evicted or replaced"
        state.send(name, Dismissed(cause=cause, reason=text, drained=False))
        return
    if known is not None and known.key != key:
        if health.runs_elsewhere(state, known, hello.member.host):
            text = f"slot {key.worker_id} runs on host {known.host}, as incarnation {known.key.incarnation}"
            state.send(name, Dismissed(cause=Cause.REPLACED, reason=text, drained=False))
            return
        why = Why(Cause.REPLACED, f"its slot already runs incarnation {key.incarnation}")
        health.evict(state, known, why, kill=True)
        known = None
    worker = known or Worker(key)
    state.workers[key.worker_id] = worker
    if worker.connection is not None and worker.connection != name:
        state.close(worker.connection, "replaced by a newer connection of the same worker")
    first = not worker.greeted and not state.in_any_plan(key)
    worker.member, worker.connection, worker.gone_ns, worker.greeted = hello.member, name, None, True
    worker.pid, worker.host, worker.wants_spare = hello.member.pid, hello.member.host, hello.wants_spare
    worker.step = max(worker.step, hello.step)
    worker.state_bytes = hello.state_bytes
    state.greeted.add(key.worker_id)
    # A member that is back changes no decision, unless one waited for it.
    state.dirty = state.dirty or bool(state.broken) or state.plan is None or not state.plan.has(key)
    if first:
        _report_joined(state, worker)
    _catch_up(state, worker, hello)
    profiling.remind(state, worker)


def _report_joined(state: State, worker: Worker) -> None:
    state.report(
        "worker_joined",
        Why(Cause.JOINED, "it is ready"),
        worker_id=worker.key.worker_id,
        incarnation=worker.key.incarnation,
        pid=worker.pid,
        host=worker.host,
        step=worker.step,
        generation=state.generation,
    )


def _catch_up(state: State, worker: Worker, hello: WorkerHello) -> None:
    """Bring together what the worker follows and what it should follow."""
    generation = hello.plan.generation if hello.plan is not None else 0
    state.step = max(state.step, hello.step)
    if hello.plan is not None and generation > state.generation:
        switching.adopt(state, hello.plan, worker.key)
    switching.follow(state, generation)
    if state.alive(worker.key) is None:
        return
    plan, prepared = state.plan, state.prepared
    if plan is not None and plan.has(worker.key):
        if generation == plan.generation:
            switching.back_in(state, worker)
        elif not state.broken:
            plans.order(state, worker, PlanNow(plan=plan))
    if prepared is not None and (prepared.has(worker.key) or (plan is not None and plan.has(worker.key))):
        plans.order(state, worker, PlanPrepared(plan=prepared))
