"""The control plane in the simulation: the coordinator's process, the agents of the hosts, and the user's commands.

The `Coordinator` is that of production; this file replaces the runtime: connections, journal, timers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.coordinator.agreement import timed
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.restoring import end_in, sensible
from everstep.protocol.coordinator.types import (
    Close,
    Connected,
    CoordinatorEffect,
    CoordinatorEvent,
    Disconnected,
    Knows,
    Persist,
    PortProbed,
    ProbePort,
    Received,
    Remember,
    Report,
    Send,
    Tick,
)
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.roles import COMMANDS, JOB
from everstep.protocol.telling import parts_of
from everstep.sim.checks import Checks
from everstep.sim.fate import Fate
from everstep.sim.life import Life, SimSite
from everstep.sim.mesh import SimControlClient
from everstep.sim.orders import Orders, ScriptedStrikes, ended_doubt, tells_of_doubt
from everstep.sim.promises import require
from everstep.sim.rules import USUAL, Rules
from everstep.sim.sim_worker import SimWorker
from everstep.sim.world import MS, Process, SimConnection, World, connect

CONTROL_HOST = "control"
HEARTBEAT_NS = 200 * MS
KNOWN_LATE_NS = 2000 * MS
"""Time in which the coordinator may judge a process by what it was."""
FOUL = Cause.STORE
"""Cause in messages that the coordinator has to refuse; nothing else in the simulation has it."""
_MOST_IDLE_TICKS = 5


MakeDriver = Callable[[WorkerKey], Driver]
MakeCoordinator = Callable[[Sequence[dict[str, Any]], int, int], Coordinator]
"""Makes a coordinator from a journal, the number of workers with which the job begins, and the term of a lease (0:
there is none)."""


class SimCoordinator(Process):
    """One life of the coordinator. The journal outlives it; effects after a sync wait for it.

    After a crash an entry that was being written may be there or not; no effect that depends on it has left.
    """

    def __init__(self, world: World, control: Control, name: str = "coordinator", host: str = CONTROL_HOST) -> None:
        super().__init__(world, name, host)
        self.control = control
        self.machine = control.make(control.journal, control.size, 0)
        self.peers: dict[str, SimConnection] = {}
        self._told: dict[str, Plan | None] = {}
        self._crash_after: int | None = None
        self._tick_at: int | None = None
        self._queue: list[CoordinatorEffect] = []
        self._syncing = False
        self._idle_ticks = 0
        self._orders = Orders(control.running, control.checks.job.stages)
        self.begin()

    @property
    def term(self) -> int:
        """Term under which it writes; 0: there is no lease."""
        return 0

    def begin(self) -> None:
        self.world.log(self.name, "STARTED", f"journal of {len(self.control.journal)}")
        self.feed(Tick())

    def accept(self, connection: SimConnection, role: str) -> None:
        """Take a connection; its empty message says that the peer has proved the token."""
        name = f"{role[0]}{self.control.connected()}"
        connection.listen(self, lambda body: self._received(name, role, connection, body), lambda: self._lost(name))

    def _received(self, name: str, role: str, connection: SimConnection, body: bytes) -> None:
        if body:
            self.feed(Received(name, wire.decode(body)))
        else:
            self.peers[name] = connection
            proved, _, who = role.partition(" ")
            self.feed(Connected(name, proved, who or None))

    def _lost(self, name: str) -> None:
        if self.peers.pop(name, None) is not None:
            self.feed(Disconnected(name))

    def crash_after(self, effects: int | None) -> None:
        """Crash after this many further effects; None: never."""
        self._crash_after = effects

    def feed(self, event: CoordinatorEvent) -> None:
        if self.world.tracing and not _is_routine(event):
            self.world.log(self.name, "<-", event)
        self._orders.heard(event)
        if tells_of_doubt(event):
            self.control.checks.records.doubted()
        if isinstance(event, Received) and not isinstance(event.message, wire.Heartbeat):
            refused = self.machine.refusal(event.connection, event.message)
            self._orders.refuses(event.connection if refused else "")
        said = self.machine.handle(self.world.now_ns, event)
        self._orders.said(said)
        self.control.said(self.term, said, self.machine)
        self._queue += [*said, *ended_doubt(event, self.machine.job)]
        if not self._syncing:
            self._perform()
        self._set_timer()

    def _perform(self) -> None:
        while self._queue and self.alive:
            if self._crash_after is not None:
                self._crash_after -= 1
                if self._crash_after < 0:
                    self.die("in the middle of its effects")
                    return
            effect = self._queue.pop(0)
            if isinstance(effect, Persist):
                self._syncing = True
                self.soon(MS // 10, 2 * MS, self._synced, effect)
                return
            self._act(effect)

    def _synced(self, effect: Persist) -> None:
        self.control.journal.append(effect.entry)
        self.control.wrote(self.term, [effect.entry])
        self._syncing = False
        self._perform()

    def _act(self, effect: CoordinatorEffect) -> None:
        match effect:
            case int(generation):  # of `ended_doubt`
                self.control.checks.records.settled(generation)
            case Send(connection=name, message=message):
                if isinstance(message, wire.PlanNow | wire.PlanPrepared):
                    self.control.checks.records.plan(message.plan)
                    kinds = {member.host == self.control.site.foreign for member in message.plan.members}
                    alike = len(kinds) == 1 or self.control.rules.warns
                    require(alike, "P1", f"members of generation {message.plan.generation} have other kernels")
                if self.world.tracing and not isinstance(message, wire.Pong):
                    self.world.log(self.name, "->", name, message)
                if name in self.peers:
                    parts, self._told[name] = parts_of(message, self._told.get(name))
                    self.peers[name].send(self, [wire.encode(part) for part in parts])
            case Knows(connection=name, plan=plan):
                self._told[name] = self._told.get(name) or plan
            case Close(connection=name, reason=reason):
                self.world.log(self.name, "closes", name, reason)
                connection = self.peers.pop(name, None)
                if connection is not None:
                    connection.close(self)
                if effect.foul:  # else the coordinator has forgotten it already
                    self.world.seen["connections", "foul"] += 1
                    self.later(0, self.feed, Disconnected(name))
            case ProbePort(key=key):
                self.soon(MS, 5 * MS, self._port_probed, key)
            case Remember(facts=facts):
                self.control.site.facts.update(facts)
            case Report(kind=kind, fields=fields):
                self.world.log(self.name, "reports", kind, fields)
                require(fields.get("cause") is not FOUL, "P7", f"{kind} because of what nobody may say: {fields}")
                self.control.fate.report(kind, fields)
                self.world.note((kind, fields))
                told = timed(fields, self.world.now_ns) if kind == "recovery_completed" else fields
                self.control.site.tell(kind, **{"time_unix_ns": self.world.now_ns, **told})

    def _port_probed(self, key: WorkerKey) -> None:
        """Report the answer of this worker's host, if it can be heard."""
        worker = self.control.workers.get(key)
        if worker is not None and self.world.reachable(self.host, worker.host):
            self.world.seen["hosts", "port_probed"] += 1
            self.feed(PortProbed(key, worker.alive))

    def _set_timer(self) -> None:
        at = self.machine.next_deadline_ns
        if at is not None and (self._tick_at is None or at < self._tick_at):
            self._tick_at = at
            self.later(at - self.world.now_ns, self._tick, at)

    def _tick(self, at: int) -> None:
        if self._tick_at != at:
            return
        self._tick_at = None
        self.feed(Tick())
        next_ns = self.machine.next_deadline_ns
        self._idle_ticks = self._idle_ticks + 1 if next_ns is not None and next_ns <= self.world.now_ns else 0
        if self._idle_ticks > _MOST_IDLE_TICKS:
            raise AssertionError(f"the coordinator's deadline stays in the past: {next_ns}")


def _is_routine(event: CoordinatorEvent) -> bool:
    return isinstance(event, Tick) or (isinstance(event, Received) and isinstance(event.message, wire.Heartbeat))


def _life(life: Life) -> wire.WorkerLife:
    return wire.WorkerLife(worker_id=life.me.worker_id, incarnation=life.me.incarnation, pid=life.pid)


class AgentProcess(Process):
    """The agent of one host: it starts workers, sees them die, and sends heartbeats for all of them."""

    def __init__(self, world: World, control: Control, host: str, worker_ids: Sequence[int], process: str) -> None:
        super().__init__(world, f"agent-{host}", host)
        self.control = control
        self.process = process
        self.dismissed = self.leaving = self.drained = False
        self.failed: wire.HostFailed | None = None  # why it can do nothing more
        self.slots = sorted(worker_ids)
        self.lost: dict[int, wire.SlotLost] = {}  # slots that the agent has given up
        self.ranks: dict[int, int] = {}  # of a slot's next life, if the coordinator has said it
        self.waiting: set[int] | None = None  # slots to start when there is a fork server again
        self.workers: dict[int, SimWorker] = {}  # until it has told their ends
        self.seq = 0
        self._told_ns = 0
        self.ended = False
        self.client = SimControlClient(self, control.dial, f"agent {self.host}", self._hello, self._deliver)
        for worker_id in self.slots:
            self.start(worker_id)
        self.client.begin()
        self.later(HEARTBEAT_NS, self._heartbeat)

    def _hello(self) -> list[wire.AnyMessage]:
        lives = [_life(w) for _, w in sorted(self.workers.items()) if w.alive]
        lost = list(self.lost.values())
        number, says = self.control.hosts.index(self.host), self.control.rules.about
        about = {} if says == "nothing" and number else {"address": self.host}
        return [
            wire.AgentHello(
                agent_id=self.host,
                host=self.host,
                workers=lives,
                slots=0 if self.control.rules.shared else len(self.slots),
                lost=lost,
                leaving=self.leaving,
                failed=self.failed,
                room=self.control.rules.room,
                process=self.process,
                domains={"rack": f"rack{number // 2}"},
                about={**about, "node": f"node{number}"} if says == "node" else about,
            )
        ]

    def start(self, worker_id: int) -> None:
        """Start the slot's next life."""
        if self.ended or not self.alive or worker_id not in self.slots or worker_id in self.lost:
            return
        if self.waiting is not None:
            self.waiting.add(worker_id)
            return
        old = self.workers.get(worker_id)
        if old is not None and old.alive:
            return
        worker = self.control.new_worker(worker_id, self)
        self.workers[worker_id] = worker
        self.client.send(wire.WorkerStarted(agent_id=self.host, worker=_life(worker)))

    def give_up(self, worker: SimWorker) -> None:
        """Give up a slot: it gets no other life, unless a smaller one is asked for."""
        slot, why = worker.me.worker_id, "it died again and again"
        ranks = self.ranks.get(slot, self.control.rules.degree)
        self.lost[slot] = wire.SlotLost(
            agent_id=self.host, worker_id=slot, cause=Cause.CRASH_LOOP, reason=why, ranks=ranks
        )
        worker.die("it died once too often")
        self.client.send(self.lost[slot])

    def leave(self) -> None:
        if self.alive and not self.ended:
            self.leaving = True
            self.client.send(wire.HostLeaving(agent_id=self.host))

    def fail(self, reason: str) -> None:
        """Its host can do nothing more for the job."""
        if self.alive and not self.ended:
            self.failed = wire.HostFailed(agent_id=self.host, reason=reason, cause=Cause.DISK)
            self.client.send(self.failed)

    def end_alone(self, why: Why) -> None:
        """No coordinator answers: it starts nothing any more, and its workers save and leave by themselves."""
        self.ended = True
        for _, worker in sorted(self.workers.items()):
            worker.site.disk.staying.add(worker.me)
            worker.later(0, worker.handle, do.EndOrdered(why))

    def lose_fork_server(self) -> None:
        """The fork server dies. Its workers outlive it, except those that have not begun. No others start until it is
        replaced."""
        if self.alive and self.waiting is None:
            self.world.log(self.name, "FORK SERVER DIED")
            self.waiting = set()
            for _, worker in sorted(self.workers.items()):
                if worker.operation is None:
                    worker.die("its fork server died")

    def replace_fork_server(self) -> None:
        waiting, self.waiting = self.waiting or set(), None
        for worker_id in sorted(waiting):
            self.start(worker_id)

    def exited(self, key: WorkerKey, cause: Cause, reason: str, restart: bool, in_order: bool) -> None:
        self.soon(MS // 2, 4 * MS, self._reaped, key, cause, reason, restart, in_order)

    def _reaped(self, key: WorkerKey, cause: Cause, reason: str, restart: bool, in_order: bool) -> None:
        self.client.send(
            wire.WorkerExited(
                agent_id=self.host,
                worker_id=key.worker_id,
                incarnation=key.incarnation,
                cause=cause,
                reason=reason,
                died_unix_ns=self.world.now_ns,
                in_order=in_order,
                again=restart and cause == Cause.EXITED,
            )
        )
        newest = self.workers.get(key.worker_id)
        if newest is not None and newest.me == key:
            del self.workers[key.worker_id]
        self._answer_drained()
        if restart:
            self.soon(5 * MS, 60 * MS, self.start, key.worker_id)

    def _answer_drained(self) -> None:
        if self.drained and not self.workers:
            self.client.send(wire.HostEmptied(agent_id=self.host))

    def _heartbeat(self) -> None:
        self.later(HEARTBEAT_NS, self._heartbeat)
        self.seq += 1
        pulses = [w.ties.pulse() for _, w in sorted(self.workers.items()) if w.alive]
        waited_ms, self._told_ns = (self.waited_ns - self._told_ns) // MS, self.waited_ns
        self.client.send(
            wire.Heartbeat(
                agent_id=self.host, seq=self.seq, rtt_ms=float(self.seq > 1), workers=pulses, waited_ms=waited_ms
            )
        )

    def _deliver(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.SetSlots(worker_ids=ids, ranks=ranks, drained=drained):
                self.slots, self.drained = [] if drained else sorted(ids), drained
                self.ranks = dict(zip(ids, ranks, strict=False))
                smaller = {i for i, lost in self.lost.items() if self.ranks.get(i, lost.ranks) < lost.ranks}
                self.lost = {i: lost for i, lost in self.lost.items() if i not in smaller}
                for worker_id in self.slots:
                    self.start(worker_id)
                self._answer_drained()
            case wire.KillWorker(worker_id=worker_id, incarnation=incarnation, reason=reason):
                worker = self.workers.get(worker_id)
                if worker is not None and worker.me.incarnation == incarnation:
                    worker.die(f"killed by its agent: {reason}")
            case wire.ShowStacks(worker_id=worker_id):
                if worker_id in self.workers:
                    self.world.seen["hosts", "stacks"] += 1
                    self.workers[worker_id].ties.show_stacks()
            case wire.ProbeHosts(number=number, addresses=addresses):
                silent = [host for host in sorted(addresses) if not self.world.reachable(self.host, host)]
                self.world.seen["hosts", "silent" if silent else "answer"] += 1
                self.client.send(wire.HostsProbed(agent_id=self.host, number=number, silent=silent))
            case wire.JobEnded():
                self.ended = True
            case wire.AgentRefused():
                self.world.seen["hosts", "refused"] += 1
                self.dismissed = True
                self.die("its host was refused")
            case wire.HostDismissed():
                self.world.seen["hosts", "drained"] += 1
                self.dismissed = True
                self.die("its host was drained")

    def die(self, reason: str) -> None:
        """The host goes down, and its workers with it."""
        if self.alive:
            super().die(reason)
            for worker in self.workers.values():
                worker.die(reason)


class Client(Process):
    """The user at the command line, or the process of the job, which asks each coordinator for the end until it is
    there."""

    def __init__(self, world: World, control: Control, name: str, args: dict[str, Any], role: str) -> None:
        super().__init__(world, f"client-{name}-{control.connections}", CONTROL_HOST)
        self.control = control
        self.command = wire.Command(request=1, name=name, args=args)
        hello = wire.JobHello(asked=[self.command]) if role == JOB else self.command
        self.link = SimControlClient(self, control.dial, role, lambda: [hello], self._deliver)
        self.link.begin()

    def _deliver(self, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.CommandReply):
            self.world.log(self.name, "reply", message)
            if self.link.role != JOB or self.command.name != "stop":
                self.link.close()
        elif isinstance(message, wire.JobEnded):
            self.link.close()
        elif isinstance(message, wire.StrikeNow) and self.control.coordinator.alive:
            self.world.seen["strikes", "coordinator"] += 1
            self.control.coordinator.die("struck as it was scripted")
            self.world.later(100 * MS, self.control.start_coordinator)


def _evicted_key(fields: Mapping[str, Any]) -> WorkerKey:
    return WorkerKey(fields["worker_id"], fields["incarnation"])


class Control:
    """All processes: the coordinator's journal and present life, the agents of the hosts, every worker's life."""

    def __init__(
        self,
        site: SimSite,
        hosts: Sequence[str],
        size: tuple[int, int],
        make: MakeCoordinator,
        make_driver: MakeDriver,
        rules: Rules = USUAL,
    ) -> None:
        """size: number of workers, and number of spares."""
        self.site = site
        self.hosts = list(hosts)
        self.size, self.spares = size
        self.rules = rules
        self.fallen = False  # there is no job until it is resumed
        self.clients: list[Client] = []
        self.make = make
        self.make_driver = make_driver
        self.journal: list[dict[str, Any]] = []
        self.connections = 0
        self.agents: dict[str, AgentProcess] = {}
        self.workers: dict[WorkerKey, SimWorker] = {}
        self.fate = Fate(ScriptedStrikes(self.checks.records))
        self.coordinator = self.first_coordinator()

    def first_coordinator(self) -> SimCoordinator:
        """The coordinator at the start."""
        return SimCoordinator(self.world, self)

    @property
    def world(self) -> World:
        return self.site.world

    @property
    def checks(self) -> Checks:
        return self.site.checks

    def dial(
        self, owner: Process, role: str, receive: Callable[[Any], None], lost: Callable[[], None]
    ) -> SimConnection | None:
        """A connection to the present life of the coordinator; None if it cannot be reached."""
        there = self.answering()
        connection = connect(self.world, owner, there, timeout_ns=2000 * MS)
        if connection is not None and there is not None:
            connection.listen(owner, receive, lost)
            there.accept(connection, role)
        return connection

    def answering(self) -> SimCoordinator | None:
        """The coordinator that a caller reaches."""
        return self.coordinator

    def connected(self) -> int:
        """Count one more connection; returns its number."""
        self.connections += 1
        return self.connections

    def start_coordinator(self) -> None:
        """The next life of the coordinator, if there is none now."""
        if not self.coordinator.alive and not self.fallen:
            self.coordinator = SimCoordinator(self.world, self)
            self.began(self.coordinator)

    def began(self, coordinator: SimCoordinator) -> None:
        """A coordinator goes on with the content of the journal."""
        status, said = coordinator.machine.status(), end_in(self.journal)
        ended = ("", "") if said is None else (said.state, said.reason)
        require(said is None or ended == (status["state"], status["reason"]), "P6", f"{ended} in the journal: {status}")
        require(sensible(self.journal) or self.checks.records.forgetful, "P6", "the journal makes no sense")
        self.fate.began(status["state"], status["reason"])

    def mend(self) -> None:
        self.coordinator.crash_after(None)
        self.coordinator.thaw()

    def boot(self, host: str) -> None:
        """Start a host's agent, and with it its workers, unless it runs."""
        known = self.agents.get(host)
        if (known is None or not known.alive) and not self.fallen:
            first = [i for i in range(self.size + self.spares) if i % len(self.hosts) == self.hosts.index(host)]
            slots = ([] if self.rules.shared else first) if known is None else known.slots
            process = "first" if self.rules.reboots else ""
            if known is not None:  # one that was dismissed comes as a new process, which was not drained
                process = known.process + "+" * (known.dismissed or self.rules.reboots)
            self.agents[host] = AgentProcess(self.world, self, host, slots, process)

    def command(self, name: str, args: dict[str, Any], role: str = "") -> None:
        """Run a user's command. role: of the token that the user has; "": the one that the command needs."""
        self.world.log("user", name, args)
        self.clients.append(Client(self.world, self, name, args, role or COMMANDS[name]))

    def fall(self) -> None:
        """The job's process dies, and with it everything that it has started."""
        self.fallen = True
        for process in (self.coordinator, *self.agents.values(), *self.clients):
            process.die("its job is gone")
        self.clients.clear()

    def resume(self, size: int, stages: int) -> None:
        """Resume the job from its disk, with this many workers and stages, unless it runs."""
        if self.fallen and not self.fate.ended:
            self.world.log("user", "resumes with", size, stages)
            self.site.tell("job_started", workers=size, step=0)
            self.fallen, self.size = False, size
            self.journal.clear()
            self.agents.clear()
            self.checks.resumed(stages)
            self.fate.strikes.clear()
            self.site.disk.cut_anew(self.checks.job)
            self.site.edit()
            self.start_coordinator()
            for host in self.hosts:
                self.boot(host)

    def new_worker(self, worker_id: int, agent: AgentProcess) -> SimWorker:
        """The next life of a slot, on the agent's host."""
        lives = [key.incarnation for key in self.workers if key.worker_id == worker_id]
        key = WorkerKey(worker_id, max(lives, default=-1) + 1)
        spans, driver = self.rules.span > 1, self.make_driver(key)
        worker = SimWorker(self.site, agent.host, self.dial, driver, agent.exited, spans=spans)
        self.workers[key], self.site.lives[key] = worker, worker
        return worker

    def said(self, term: int, effects: Iterable[CoordinatorEffect], machine: Coordinator) -> None:
        """Judge the coordinator's new decisions by present facts; these may differ when it tells of them."""
        for effect in effects:
            if isinstance(effect, Persist) and effect.entry["kind"] == "evict":
                self.checks.given_up_by(term, _evicted_key(effect.entry), excused=False)
            elif isinstance(effect, Report) and effect.kind == "worker_evicted":
                believed = [w for w in machine.status()["workers"] if w["role"] in ("leader", "active", "standby")]
                who = _evicted_key(effect.fields)
                worker, cause = self.workers.get(who), effect.fields["cause"]
                if worker is not None and cause is Cause.HUNG:
                    worker = self.workers[worker.part.stands]
                    busy = worker.starved or worker.ties.compiles
                    require(not busy, "P8", f"{who} is taken for hung, but it waits for a processor, or compiles")
                    stood = worker.frozen_ns is not None or self.world.now_ns - worker.thawed_ns < KNOWN_LATE_NS
                    require(stood, "P8", f"{who} is taken for hung, but it is not what the others wait for")
                excused = bool(believed) or self._cut_off(who, effect.fields["cause"])
                self.checks.given_up_by(term, who, excused=excused)

    def wrote(self, term: int, entries: Iterable[dict[str, Any]]) -> None:
        """These entries are in the journal: they count, though their writer may die before it tells of them."""
        for entry in entries:
            if entry["kind"] == "evict":
                self.checks.evicted(term, _evicted_key(entry))
            elif entry["kind"] == "plan":
                self.checks.records.journaled(entry["plan"]["generation"])

    def _cut_off(self, who: WorkerKey, cause: Cause) -> bool:
        """Whether the life was given up for its host's silence, while another host was heard."""
        worker = self.workers.get(who)
        heard = {a.host for a in self.agents.values() if a.alive and self.world.reachable(a.host, CONTROL_HOST)}
        return cause is Cause.HOST_LOST and worker is not None and bool(heard - {worker.host})

    def running(self, host: str) -> list[WorkerKey]:
        """Live workers of this host's agent."""
        return [w.me for _, w in sorted(self.agents[host].workers.items()) if w.alive] if host in self.agents else []

    def live_workers(self) -> list[SimWorker]:
        live = [w for w in self.workers.values() if w.alive]
        return sorted(live, key=lambda w: (w.me.worker_id, w.me.incarnation))


def forget(control: Control, entries: int) -> None:
    """Let the journal lack its newest entries, though not the first; none: whatever it lacks by now."""
    journal = control.journal
    journal[:] = journal[: max(1, len(journal) - entries)]
    told = [entry["plan"]["generation"] for entry in journal if entry["kind"] == "plan"]
    control.checks.records.forget({n for n in told if isinstance(n, int)})
