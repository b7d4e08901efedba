"""The control plane's machine: who takes part, in which generation, and why. Pure.

`handle` takes one event with the time at which it happened and returns what is to be done about it. Events change what
is known (`coordinator_state`); then the decisions run until nothing more follows from it: plans for at once
(`coordinator_plans`), joins and leaves (`coordinator_joins`), slots (`coordinator_commands`). So every decision depends
on the present state alone, not on the order in which its parts became known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.plan import WorkerKey
from everstep.protocol import coordinator_commands as commands
from everstep.protocol import coordinator_failures as failures
from everstep.protocol import coordinator_health as health
from everstep.protocol import coordinator_joins as joins
from everstep.protocol import coordinator_links as links
from everstep.protocol import coordinator_plans as plans
from everstep.protocol import coordinator_profiling as profiling
from everstep.protocol import coordinator_recovery as recovery
from everstep.protocol import coordinator_saving as saving
from everstep.protocol import coordinator_speeds as speeds
from everstep.protocol import messages as m
from everstep.protocol.coordinator_journal import replay
from everstep.protocol.coordinator_state import (
    MILLISECOND_NS,
    SECOND_NS,
    Alarm,
    Connection,
    Place,
    State,
    Worker,
    describe,
)
from everstep.protocol.coordinator_store import RendezvousStore
from everstep.protocol.coordinator_types import (
    Connected,
    CoordinatorConfig,
    CoordinatorEffect,
    CoordinatorEvent,
    Disconnected,
    Received,
)

LATE_NS = 500 * MILLISECOND_NS
_MOST_ROUNDS = 20


class Coordinator:
    """The only arbiter of membership and generations.

    place: `placement.lanes.place`. journal: the entries persisted by earlier lives of this coordinator, oldest first.
    Raises: ProtocolError if the journal holds a plan that is none.
    """

    def __init__(self, config: CoordinatorConfig, place: Place, journal: Iterable[dict[str, Any]] = ()) -> None:
        self._state = State(config, place)
        self._store = RendezvousStore()
        self._restored = replay(self._state, journal)
        self._begun = False

    @property
    def next_deadline_ns(self) -> int | None:
        """When to call with `Tick` at the latest, if nothing happens before; None: nothing is timed."""
        return None if self._state.ended is not None else self._state.alarms.next_ns

    def status(self) -> dict[str, Any]:
        """The shape of `status --json`, without the coordinator's own pid."""
        return commands.status(self._state)

    def handle(self, now_ns: int, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        """Take one event. What is to be persisted comes first in the answer. Time never runs backwards."""
        state = self._state
        self._advance_clock(now_ns)
        if isinstance(event, Received):
            self._received(event.connection, event.message)
        elif isinstance(event, Connected):
            state.connections[event.connection] = Connection(event.role)
        elif isinstance(event, Disconnected):
            self._disconnected(event.connection)
        for alarm in state.alarms.due(state.now):
            self._ring(alarm)
        self._decide()
        if state.ended is not None and state.save_requests:
            saving.job_ended(state)
        return state.take_effects()

    # ---- time

    def _advance_clock(self, now_ns: int) -> None:
        state = self._state
        deadline = state.alarms.next_ns
        state.now = max(state.now, now_ns)
        if not self._begun:
            self._begun = True
            self._begin()
        elif deadline is not None and state.now - deadline > LATE_NS:
            # It was this process that was away (stopped, starved): the silence is its own.
            health.pardon(state, state.now - deadline)

    def _begin(self) -> None:
        state = self._state
        state.quorum_since_ns = state.now if state.plan is None or state.broken else None
        if not self._restored:
            return
        state.grace_until_ns = state.now + state.config.grace_ns
        state.alarms.set("grace", state.grace_until_ns)
        if state.plan is None:
            return
        self._store.advance(state, state.plan.generation)
        for worker_id, worker in sorted(state.workers.items()):
            if worker.agent_id is not None:
                state.slot_owner.setdefault(worker_id, worker.agent_id)
            if worker.agent_id is not None and worker.agent_id not in state.agents:
                state.agents[worker.agent_id] = health.watch_agent(state, worker.agent_id, worker.host)
                state.agents[worker.agent_id].lives.add(worker.key)
            if worker.agent_id is not None:
                state.agents[worker.agent_id].restored.add(worker.key)

    def _ring(self, alarm: Alarm) -> None:
        state = self._state
        kind, who = alarm
        if kind == "agent":
            health.check_agent(state, who)
        elif kind == "gone":
            health.check_gone(state, int(who))
        elif kind == "grace":
            health.end_of_grace(state)
        elif kind == "links":
            links.close_window(state)
        elif kind == "speeds":
            speeds.look(state)
        elif kind == "quorum":
            plans.check_quorum(state)
        elif kind == saving.ALARM:
            saving.ring(state)
        elif kind == failures.ALARM:
            failures.let_go(state)
        else:
            state.dirty = True

    def _decide(self) -> None:
        state = self._state
        for _ in range(_MOST_ROUNDS):
            if not state.dirty or state.ended is not None:
                return
            state.dirty = False
            generation = state.plan.generation if state.plan is not None else 0
            plans.reconcile(state)
            if state.plan is not None and state.plan.generation != generation:
                if not state.plan.prepared:
                    joins.restart(state)
                links.forget_old(state)
            joins.reconcile(state)
            commands.sync_slots(state)
            if state.plan is not None:
                self._store.advance(state, state.plan.generation)
        check(not state.dirty, "the coordinator's decisions must come to rest")

    # ---- connections

    def _disconnected(self, name: str) -> None:
        state = self._state
        connection = state.connections.pop(name, None)
        self._store.forget(name)
        if connection is None:
            return
        if connection.agent_id is not None:
            agent = state.agents.get(connection.agent_id)
            if agent is not None and agent.connection == name:
                agent.connection = None
                state.alarms.set("agent", agent.detector.ceiling_at_ns, agent.agent_id)
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
                state.alarms.set("gone", state.now + SECOND_NS, str(worker.key.worker_id))

    def _received(self, name: str, message: m.AnyMessage) -> None:
        state = self._state
        connection = state.connections.get(name)
        if connection is None:
            return
        if isinstance(message, m.WorkerHello):
            self._worker_hello(name, connection, message)
        elif isinstance(message, m.AgentHello):
            health.agent_hello(state, name, message)
        elif isinstance(message, m.JobHello):
            if state.ended is not None:
                state.send(name, state.ended)
        elif isinstance(message, m.Command):
            commands.command(state, name, message)
        elif state.ended is not None:
            return
        elif connection.worker is not None:
            self._from_worker(name, connection.worker, message)
        elif connection.agent_id is not None:
            self._from_agent(connection.agent_id, message)
        elif isinstance(message, m.WorkerFailed):
            failures.failed_early(state, message)
        else:
            state.close(name, f"expected a hello before {type(message).__name__}")

    def _from_agent(self, agent_id: str, message: m.AnyMessage) -> None:
        state = self._state
        agent = state.agents.get(agent_id)
        if agent is None:
            return
        if isinstance(message, m.Heartbeat):
            health.heartbeat(state, agent, message)
        elif isinstance(message, m.WorkerStarted):
            health.worker_started(state, agent, message)
        elif isinstance(message, m.WorkerExited):
            if message.in_order:
                plans.left_in_order(state, WorkerKey(message.worker_id, message.incarnation))
            health.worker_exited(state, agent, message)
        elif isinstance(message, m.SlotLost):
            health.slot_lost(state, agent, message)
        elif isinstance(message, m.HostFailed):
            state.end("failed", Why(message.cause, message.reason), 1)

    def _from_worker(self, name: str, key: WorkerKey, message: m.AnyMessage) -> None:
        state = self._state
        worker = state.alive(key)
        if isinstance(message, m.StoreGet):
            self._store.get(state, name, message)
        elif worker is None:
            return
        elif isinstance(message, m.StoreSet):
            self._store.set(state, message)
        else:
            act = _WORKER_ACTS.get(type(message))
            if act is not None:
                act(state, worker, message)

    def _worker_hello(self, name: str, connection: Connection, hello: m.WorkerHello) -> None:
        state = self._state
        key = hello.member.key
        connection.worker = key
        if state.ended is not None:
            state.send(name, state.ended)
            return
        known = state.workers.get(key.worker_id)
        if state.is_fenced(key) or (known is not None and known.key.incarnation > key.incarnation):
            cause = state.fenced_for[key.worker_id] if state.is_fenced(key) else Cause.REPLACED
            text = f"{describe(key)} was evicted or replaced"
            state.send(name, m.Dismissed(cause=cause, reason=text, drained=False))
            return
        if known is not None and known.key != key:
            if health.runs_elsewhere(state, known, hello.member.host):
                text = f"slot {key.worker_id} runs on host {known.host}, as incarnation {known.key.incarnation}"
                state.send(name, m.Dismissed(cause=Cause.REPLACED, reason=text, drained=False))
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
            self._report_joined(worker)
        self._catch_up(worker, hello)
        profiling.remind(state, worker)

    def _report_joined(self, worker: Worker) -> None:
        self._state.report(
            "worker_joined",
            Why(Cause.JOINED, "it is ready"),
            worker_id=worker.key.worker_id,
            incarnation=worker.key.incarnation,
            pid=worker.pid,
            host=worker.host,
            step=worker.step,
            generation=self._state.generation,
        )

    def _catch_up(self, worker: Worker, hello: m.WorkerHello) -> None:
        """Bring together what the worker follows and what it should follow."""
        state = self._state
        generation = hello.plan.generation if hello.plan is not None else 0
        state.step = max(state.step, hello.step)
        if hello.plan is not None and generation > state.generation:
            plans.adopt(state, hello.plan, worker.key)
        plans.follow(state, generation)
        if state.alive(worker.key) is None:
            return
        plan, prepared = state.plan, state.prepared
        if plan is not None and plan.has(worker.key):
            if generation == plan.generation:
                plans.back_in(state, worker)
            elif not state.broken:
                plans.order(state, worker, m.PlanNow(plan=plan))
        if prepared is not None and (prepared.has(worker.key) or (plan is not None and plan.has(worker.key))):
            plans.order(state, worker, m.PlanPrepared(plan=prepared))


# ---- what workers say

_WorkerAct = Callable[[State, Worker, Any], None]


def _entered(state: State, worker: Worker, message: m.GenerationEntered) -> None:
    worker.step = max(worker.step, message.step - 1)
    plans.on_entered(state, worker, message.generation, message.step, message.phases_ms)
    if state.plan is not None and worker.key.worker_id == state.plan.leader(0):
        saving.remind(state)


def _progress(state: State, worker: Worker, message: m.Progress) -> None:
    plans.follow(state, message.generation)
    worker.step = max(worker.step, message.step)
    state.step = max(state.step, message.step)
    if message.step_ms > 0:
        state.step_times_ms.append(message.step_ms)
    if state.plan is not None and message.generation == state.plan.generation:
        if not state.entered:
            state.dirty = True
        state.entered.add(worker.key.worker_id)
        recovery.complete(state)


def _peer_fault(state: State, worker: Worker, message: m.PeerFault) -> None:
    plans.follow(state, message.generation)
    links.peer_fault(state, worker, message)


def _done(state: State, worker: Worker, message: m.WorkerDone) -> None:
    plans.follow(state, message.generation)
    worker.step = max(worker.step, message.step)
    plan = state.plan
    if message.final_written and plan is not None and plan.has(worker.key):
        state.step = max(state.step, message.step)
        recovery.complete(state)
        state.end("completed", Why(Cause.COMPLETED, f"step {message.step} was the last"), 0)


_WORKER_ACTS: dict[type[Any], _WorkerAct] = {
    m.WorkerHealed: joins.worker_healed,
    m.HealFailed: joins.heal_failed,
    m.GenerationEntered: _entered,
    m.Progress: _progress,
    m.PeerFault: _peer_fault,
    m.WorkerFailed: failures.worker_failed,
    m.WorkerDone: _done,
    m.SettleAgain: saving.settle_again,
    m.Saved: failures.saved,
    m.Profiled: profiling.profiled,
}
