"""The control plane's machine: who takes part, in which generation, and why. Pure.

`handle` takes one event with its time and returns effects. Events change the knowledge (`job`), as the tables here
say. Then the decisions run until nothing more follows: plans for at once (`plans`), joins and leaves (`joins`),
slots (`agents`). So every decision depends on the knowledge alone, not on the order in which it came.

The tables list everything that can happen to the coordinator: each function takes the job, the subject, and the
event. Events that are in no table have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.protocol import messages as m
from everstep.protocol.coordinator import (
    awaited_hosts,
    fault_orders,
    hosts,
    joins,
    liveness,
    permits,
    plans,
    port_checks,
    types,
    user_commands,
    workers,
)
from everstep.protocol.coordinator.agreement import NO_PLAN
from everstep.protocol.coordinator.environment import MILLISECOND_NS, Alarm
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Agent, Worker
from everstep.protocol.coordinator.restoring import restore
from everstep.protocol.following import PlanShown, StatesAlike
from everstep.protocol.messages_base import CellSought

LATE_NS = 500 * MILLISECOND_NS
_MOST_ROUNDS = 20

# From any client, on a new connection or an old one: before the end of the job and after it.
FROM_ANYBODY: dict[type, Callable[[JobState, str, Any], object]] = {
    m.WorkerHello: workers.worker_hello,
    CellSought: workers.cell_sought,
    m.AgentHello: liveness.agent_hello,
    m.JobHello: user_commands.job_hello,
    m.Command: user_commands.command,
}

FROM_AGENTS: dict[type, Callable[[JobState, Agent, Any], None]] = {
    m.Heartbeat: liveness.heartbeat,
    m.WorkerStarted: liveness.worker_started,
    m.WorkerExited: liveness.worker_exited,
    m.SlotLost: liveness.slot_lost,
    m.HostFailed: liveness.host_failed,
    m.HostLeaving: hosts.leaving,
    m.HostEmptied: hosts.emptied,
    m.HostRefused: hosts.stays_out,
    m.HostsProbed: workers.hosts_probed,
}

# By lives of slots that are the present ones, and not known to be dead.
FROM_WORKERS: dict[type, Callable[[JobState, Worker, Any], None]] = {
    m.GenerationEntered: workers.entered,
    m.Progress: workers.progressed,
    m.WorkerDone: workers.done,
    m.LoopLeft: workers.loop_left,
    m.PeerFault: workers.peer_fault,
    m.WorkerHealed: joins.worker_healed,
    m.HealFailed: joins.heal_failed,
    m.WorkerFailed: workers.worker_failed,
    m.StrikeDue: fault_orders.strike_due,
    m.SettleAgain: workers.settle_again,
    StatesAlike: lambda job, worker, message: job.progress.alike(message.step, message.digests),
    m.Saved: workers.saved,
    m.Imported: workers.imported,
    m.Divided: workers.divided,
    m.Profiled: lambda job, worker, message: job.profiling.profiled(worker, message),
    m.StoreSet: lambda job, worker, message: job.store.set(message),
    PlanShown: workers.plan_shown,
}

ALARMS: dict[Alarm, Callable[[JobState, Any], None]] = {
    Alarm.AGENT: liveness.agent_due,
    Alarm.ASKED: lambda job, about: None,  # after each event the next worker to ask is chosen
    Alarm.END: lambda job, about: job.saving.end_due(),
    Alarm.FAILED: workers.failed_due,
    Alarm.GONE: liveness.gone_due,
    Alarm.GRACE: liveness.grace_due,
    Alarm.HOSTS: awaited_hosts.hosts_due,
    Alarm.JOINS: lambda job, about: job.env.change(),
    Alarm.PROBE_PORT: port_checks.port_probe_due,
    Alarm.LEFT: lambda job, about: job.saving.leaving.due(),
    Alarm.LINKS: workers.links_due,
    Alarm.QUORUM: plans.quorum_due,
    Alarm.SPREAD: hosts.spread_due,
    Alarm.SPEEDS: joins.speeds_due,
    Alarm.START: lambda job, about: job.env.change(),
}


def received(job: JobState, event: types.Received) -> None:
    """A message came; its sender decides which table handles it."""
    name, message = event.connection, event.message
    connection, kind = job.env.connections.get(name), type(message)
    if connection is None:
        return
    refused = "" if event.permitted else permits.refusal(job, name, message)
    if refused:
        job.env.close(name, refused, foul=True)
    elif kind in FROM_ANYBODY:
        FROM_ANYBODY[kind](job, name, message)
    elif job.progress.ended is not None:
        return
    elif connection.worker is not None and isinstance(message, m.StoreGet):
        # By any life, also one that is over: it may be the only one that knows that it was replaced.
        job.store.get(name, message)
    elif connection.worker is not None:
        worker = job.membership.alive(connection.worker)
        known = worker is not None and kind in FROM_WORKERS
        if worker is not None and known and not job.agreement.claims.defers(worker.key, name, message):
            FROM_WORKERS[kind](job, worker, message)
    elif connection.agent_id is not None:
        agent = job.agents.known.get(connection.agent_id)
        if agent is not None and kind in FROM_AGENTS:
            FROM_AGENTS[kind](job, agent, message)
    elif isinstance(message, m.WorkerFailed):
        workers.failed_early(job, message)
    else:
        job.env.close(name, f"expected a hello before {kind.__name__}")


EVENTS: dict[type, Callable[[JobState, Any], None]] = {
    types.Connected: lambda job, event: job.env.connected(event.connection, event.role, event.who),
    types.Received: received,
    types.Disconnected: liveness.disconnected,
    types.PortProbed: port_checks.port_probed,
    types.Tick: lambda job, event: None,
}


class Coordinator:
    """The only arbiter of membership and generations. journal: the entries of earlier lives of this coordinator,
    oldest first; entries that make no sense are skipped, and reported. told: the generation whose start they were the
    last to report; None: that of the journal."""

    def __init__(
        self, config: types.CoordinatorConfig, journal: Iterable[dict[str, Any]] = (), told: int | None = None
    ) -> None:
        self.job, self._restored, self._aside = restore(config, journal)
        self.job.progress.tell(self.job.agreement.plan.generation if told is None else told)
        self._begun = False
        self._decided: tuple[int, ...] = ()  # the job's version when decisions were last made

    @property
    def next_deadline_ns(self) -> int | None:
        """Latest time to call with `Tick` if nothing happens before, in ns; None: nothing is timed."""
        return None if self.job.progress.ended is not None else self.job.env.alarms.next_ns

    def refusal(self, connection: str, message: m.AnyMessage) -> str:
        """Why a message may not come over this connection, "" if it may; `handle` then ends the connection."""
        return permits.refusal(self.job, connection, message)

    def status(self) -> dict[str, Any]:
        """The data of `status --json`, without the coordinator's own pid."""
        return user_commands.status(self.job)

    def handle(self, now_ns: int, event: types.CoordinatorEvent) -> list[types.CoordinatorEffect]:
        """Take one event. Returns effects, those that persist first. Time never runs backwards."""
        job = self.job
        self._advance_clock(now_ns)
        EVENTS[type(event)](job, event)
        for due, about in job.env.alarms.due(job.env.now):
            ALARMS[due](job, about)
        workers.ask_for_plan(job)
        for connection, message in job.agreement.claims.take_said():
            received(job, types.Received(connection, message, permitted=True))
        self._decide()
        job.saving.give_up()
        return job.env.take_effects()

    # ---- time

    def _advance_clock(self, now_ns: int) -> None:
        env = self.job.env
        before, deadline = env.now, env.alarms.next_ns
        env.advance(now_ns)
        if not self._begun:
            self._begun = True
            self._begin()
        elif deadline is not None and env.now - deadline > LATE_NS:
            # It was this process that was away (stopped, starved): the silence is its own.
            since = max(deadline, before)
            liveness.pardon(self.job, env.now - since, since - before)

    def _begin(self) -> None:
        job = self.job
        if job.agreement.plan is NO_PLAN or job.agreement.broken:
            job.quorum.begin()
        if self._aside:
            more = f"; and {len(self._aside) - 3} more" if len(self._aside) > 3 else ""
            text = f"entries of the journal that make no sense are set aside: {'; '.join(self._aside[:3])}{more}"
            job.env.report("warning", Why(Cause.JOURNAL, f"{text}; the workers have the missing part"))
            job.agreement.hear_of(job.agreement.newest.generation + len(self._aside))  # each may have been a plan
        if self._restored:
            job.membership.grace.begin()
            liveness.expect_agents(job)
            job.saving.stop_again()

    def _decide(self) -> None:
        """Run the decisions. They depend on the parts' knowledge: if that is unchanged, so are they."""
        job = self.job
        if job.agreement.claims.wanted is not None:  # their basis is out of date
            return
        for _ in range(_MOST_ROUNDS):
            if job.version == self._decided or job.progress.ended is not None:
                return
            self._decided = job.version
            before = job.agreement.plan
            liveness.lose_worn(job)
            workers.form_cells(job)
            plans.reconcile(job)
            if job.agreement.plan is not before:  # the members have changed at once: all who heal begin again
                job.healing.keep(())
                job.links.forget_old()
            joins.reconcile(job)
            job.share_out()
            hosts.let_go(job)
            job.store.advance(job.agreement.plan.generation)
        check(job.version == self._decided, "the coordinator's decisions must come to rest")
