"""The control plane in the simulation: the coordinator's process, the agents of the hosts, and the user's commands.

The `Coordinator` is the very one of production; here is only what the runtime is there: connections, journal, timers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from everstep.base.cause import Cause
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.coordinator_types import (
    Close,
    Connected,
    CoordinatorEffect,
    CoordinatorEvent,
    Disconnected,
    Persist,
    Received,
    Report,
    Send,
    Tick,
)
from everstep.sim.checks import Checks
from everstep.sim.keep import Disk
from everstep.sim.world import MS, Connection, Process, World, connect

if TYPE_CHECKING:
    from everstep.sim.worker import SimWorker

CONTROL_HOST = "control"
_MOST_IDLE_TICKS = 5


class CoordinatorMachine(Protocol):
    """What the simulator needs of the coordinator."""

    @property
    def next_deadline_ns(self) -> int | None: ...

    def handle(self, now_ns: int, event: CoordinatorEvent) -> list[CoordinatorEffect]: ...

    def status(self) -> dict[str, Any]: ...


MakeCoordinator = Callable[[Sequence[dict[str, Any]]], CoordinatorMachine]


class CoordinatorProcess(Process):
    """One life of the coordinator. The journal outlives it; effects after a sync wait for it."""

    def __init__(self, world: World, site: Site) -> None:
        super().__init__(world, "coordinator", CONTROL_HOST)
        self.site = site
        self.machine = site.make(site.journal)
        self.peers: dict[str, Connection] = {}
        self.crash_after_effects: int | None = None
        self._tick_at: int | None = None
        self._queue: list[CoordinatorEffect] = []
        self._syncing = False
        self._idle_ticks = 0
        world.log(self.name, "STARTED", f"journal of {len(site.journal)}")
        self.feed(Tick())

    def accept(self, connection: Connection, role: str) -> None:
        """Somebody connects; the empty message says that it has proved the token."""
        self.site.connections += 1
        name = f"{role[0]}{self.site.connections}"
        connection.listen(self, lambda body: self._received(name, role, connection, body), lambda: self._lost(name))

    def _received(self, name: str, role: str, connection: Connection, body: bytes) -> None:
        if body:
            self.feed(Received(name, wire.decode(body)))
        else:
            self.peers[name] = connection
            self.feed(Connected(name, role))

    def _lost(self, name: str) -> None:
        if self.peers.pop(name, None) is not None:
            self.feed(Disconnected(name))

    def feed(self, event: CoordinatorEvent) -> None:
        """One event for the machine."""
        if self.world.tracing and not _is_routine(event):
            self.world.log(self.name, "<-", event)
        self._queue += self.machine.handle(self.world.now_ns, event)
        if not self._syncing:
            self._perform()
        self._set_timer()

    def _perform(self) -> None:
        while self._queue and self.alive:
            if self.crash_after_effects is not None:
                self.crash_after_effects -= 1
                if self.crash_after_effects < 0:
                    self.site.crash_coordinator("in the middle of its effects")
                    return
            effect = self._queue.pop(0)
            if isinstance(effect, Persist):
                self._syncing = True
                self.later(self.world.between(MS // 10, 2 * MS), self._synced, effect)
                return
            self._act(effect)

    def _synced(self, effect: Persist) -> None:
        self.site.journal.append(effect.entry)
        self._syncing = False
        self._perform()

    def _act(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Send(connection=name, message=message):
                if isinstance(message, wire.PlanNow | wire.PlanPrepared):
                    self.site.checks.plan(message.plan)
                if self.world.tracing and not isinstance(message, wire.Pong):
                    self.world.log(self.name, "->", name, message)
                if name in self.peers:
                    self.peers[name].send(self, wire.encode(message))
            case Close(connection=name, reason=reason):
                self.world.log(self.name, "closes", name, reason)
                connection = self.peers.pop(name, None)
                if connection is not None:
                    connection.close(self)
            case Report(kind=kind, fields=fields):
                self.world.log(self.name, "reports", kind, fields)
                self.site.report(kind, fields)

    def _set_timer(self) -> None:
        at = self.machine.next_deadline_ns
        if at is not None and (self._tick_at is None or at < self._tick_at):
            self._tick_at = at
            self.later(at - self.world.now_ns, self._tick, at)

    def _tick(self, at: int) -> None:
        if self._tick_at != at:
            return
        self._tick_at = None
        before = self.machine.next_deadline_ns
        self.feed(Tick())
        self._idle_ticks = self._idle_ticks + 1 if self.machine.next_deadline_ns == before else 0
        if self._idle_ticks > _MOST_IDLE_TICKS:
            raise AssertionError(f"the coordinator's deadline stays in the past: {before}")


def _is_routine(event: CoordinatorEvent) -> bool:
    return isinstance(event, Tick) or (isinstance(event, Received) and isinstance(event.message, wire.Heartbeat))


class ControlClient:
    """A connection to the coordinator that is always being kept up: hello first, then what waits."""

    def __init__(
        self,
        owner: Process,
        site: Site,
        role: str,
        hello: Callable[[], Sequence[wire.AnyMessage]],
        deliver: Callable[[Any], None],
    ) -> None:
        self.owner, self.site, self.role, self.hello, self.deliver = owner, site, role, hello, deliver
        self.connection: Connection | None = None
        self.queue: list[wire.AnyMessage] = []
        self.closed = False
        self._try()

    def _try(self) -> None:
        if self.closed or self.connection is not None:
            return
        server = self.site.coordinator
        connection = connect(self.owner.world, self.owner, server, timeout_ns=2000 * MS)
        if connection is None or server is None:
            self.owner.later(self.owner.world.between(20 * MS, 300 * MS), self._try)
            return
        self.connection = connection
        connection.listen(self.owner, self._deliver, self._lost)
        server.accept(connection, self.role)
        connection.send(self.owner, b"")
        waiting, self.queue = self.queue, []
        for message in [*self.hello(), *waiting]:
            connection.send(self.owner, wire.encode(message))

    def _deliver(self, body: bytes) -> None:
        self.deliver(wire.decode(body))

    def _lost(self) -> None:
        self.connection = None
        self.owner.later(self.owner.world.between(20 * MS, 100 * MS), self._try)

    def send(self, message: wire.AnyMessage) -> None:
        """Now, or once connected again; heartbeats and progress only now."""
        if self.connection is not None and self.connection.open:
            self.connection.send(self.owner, wire.encode(message))
        elif not isinstance(message, wire.Heartbeat | wire.Progress):
            self.queue.append(message)

    def close(self) -> None:
        self.closed = True
        if self.connection is not None:
            self.connection.close(self.owner)


class AgentProcess(Process):
    """The supervisor of one host's workers: starts them, sees them die, heartbeats for all of them."""

    def __init__(self, world: World, site: Site, host: str, worker_ids: Sequence[int], heartbeat_ns: int) -> None:
        super().__init__(world, f"agent-{host}", host)
        self.site = site
        self.slots = sorted(worker_ids)
        self.workers: dict[int, SimWorker] = {}
        self.heartbeat_ns = heartbeat_ns
        self.seq = 0
        self.ended = False
        self.client: ControlClient | None = None
        for worker_id in self.slots:
            self.start(worker_id)
        self.client = ControlClient(self, site, "agent", self._hello, self._deliver)
        self.later(heartbeat_ns, self._heartbeat)

    def _hello(self) -> list[wire.AnyMessage]:
        lives = [self._life(w) for _, w in sorted(self.workers.items()) if w.alive]
        return [wire.AgentHello(agent_id=self.name, host=self.host, workers=lives, slots=len(self.slots))]

    @staticmethod
    def _life(worker: SimWorker) -> wire.WorkerLife:
        return wire.WorkerLife(worker_id=worker.me.worker_id, incarnation=worker.me.incarnation, pid=worker.pid)

    def start(self, worker_id: int) -> None:
        """Start the slot's next life."""
        if self.ended or worker_id not in self.slots:
            return
        old = self.workers.get(worker_id)
        if old is not None and old.alive:
            return
        worker = self.site.new_worker(worker_id, self)
        self.workers[worker_id] = worker
        if self.client is not None:
            self.client.send(wire.WorkerStarted(agent_id=self.name, worker=self._life(worker)))

    def exited(self, worker: SimWorker, cause: Cause, reason: str, restart: bool, in_order: bool) -> None:
        """waitpid returned."""
        key = worker.me
        if self.client is not None:
            self.client.send(
                wire.WorkerExited(
                    agent_id=self.name,
                    worker_id=key.worker_id,
                    incarnation=key.incarnation,
                    cause=cause,
                    reason=reason,
                    died_unix_ns=self.world.now_ns,
                    in_order=in_order,
                )
            )
        if restart:
            self.later(self.world.between(5 * MS, 60 * MS), self.start, key.worker_id)

    def _heartbeat(self) -> None:
        self.later(self.heartbeat_ns, self._heartbeat)
        self.seq += 1
        pulses = [w.pulse() for _, w in sorted(self.workers.items()) if w.alive]
        if self.client is not None:
            self.client.send(wire.Heartbeat(agent_id=self.name, seq=self.seq, rtt_ms=1.0, workers=pulses))

    def _deliver(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.SetSlots(worker_ids=ids):
                self.slots = sorted(ids)
                for worker_id in self.slots:
                    self.start(worker_id)
            case wire.KillWorker(worker_id=worker_id, incarnation=incarnation, reason=reason):
                worker = self.workers.get(worker_id)
                if worker is not None and worker.me.incarnation == incarnation:
                    worker.die(f"killed by its agent: {reason}")
            case wire.JobEnded():
                self.ended = True

    def die(self, reason: str) -> None:
        """The host goes down, and its workers with it."""
        if self.alive:
            super().die(reason)
            for worker in self.workers.values():
                worker.die(reason)


class Client(Process):
    """The user at the command line."""

    def __init__(self, world: World, site: Site, name: str, args: dict[str, Any]) -> None:
        super().__init__(world, f"client-{name}-{site.connections}", CONTROL_HOST)
        self.command = wire.Command(request=1, name=name, args=args)
        self.link = ControlClient(self, site, "client", lambda: [self.command], self._deliver)

    def _deliver(self, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.CommandReply):
            self.world.log(self.name, "reply", message)
            self.link.close()


class Site:
    """What there is: the coordinator's journal and present life, the agents, every worker's life."""

    def __init__(self, world: World, checks: Checks, make: MakeCoordinator) -> None:
        self.world = world
        self.checks = checks
        self.make = make
        self.journal: list[dict[str, Any]] = []
        self.connections = 0
        self.coordinator: CoordinatorProcess | None = None
        self.agents: dict[str, AgentProcess] = {}
        self.lives: dict[WorkerKey, SimWorker] = {}
        self.incarnations: dict[int, int] = {}
        self.completed = False
        self.failed = ""
        self.stopped = False  # as the user asked
        self.reports: dict[str, int] = {}
        self.disk = Disk(checks.job.stages, None)
        self.went_back: list[int] = []  # to which steps
        self.make_worker: Callable[[WorkerKey, AgentProcess], SimWorker] | None = None
        self.phase_hooks: list[Callable[[SimWorker, str], None]] = []

    def start_coordinator(self) -> None:
        """The next life of the coordinator, if there is none now."""
        if self.coordinator is None or not self.coordinator.alive:
            self.coordinator = CoordinatorProcess(self.world, self)
            state = self.coordinator.machine.status()["state"]
            self.stopped = self.stopped or state == "interrupted"
            if state == "completed":
                self.completed = True  # it had crashed between journaling the end and telling of it

    def crash_coordinator(self, why: str) -> None:
        """An entry that was being written is there or not; nothing that depends on it has left."""
        process = self.coordinator
        if process is not None and process.alive:
            process.die(why)

    def new_worker(self, worker_id: int, agent: AgentProcess) -> SimWorker:
        """The next life of a slot, on the agent's host."""
        incarnation = self.incarnations.get(worker_id, -1) + 1
        self.incarnations[worker_id] = incarnation
        key = WorkerKey(worker_id, incarnation)
        if self.make_worker is None:
            raise AssertionError("the site knows no workers yet")
        worker = self.make_worker(key, agent)
        self.lives[key] = worker
        return worker

    def report(self, kind: str, fields: dict[str, Any]) -> None:
        self.reports[kind] = self.reports.get(kind, 0) + 1
        if kind == "worker_evicted":
            status = self.coordinator.machine.status() if self.coordinator is not None else {"workers": []}
            believed = [w for w in status["workers"] if w["role"] in ("leader", "active", "standby")]
            who = WorkerKey(fields["worker_id"], fields["incarnation"])
            self.checks.evicted(who, bool(believed) or self._cut_off(who, fields["cause"]))
        if kind == "job_completed":
            self.completed = True
        elif kind == "job_failed" and fields.get("state") == "interrupted":
            self.stopped = True
        elif kind == "job_failed":
            self.failed = str(fields.get("reason"))

    def _cut_off(self, who: WorkerKey, cause: Cause) -> bool:
        """Whether it was given up for its host's silence, while another host was heard."""
        life = self.lives.get(who)
        heard = {a.host for a in self.agents.values() if a.alive and self.world.reachable(a.host, "control")}
        return cause is Cause.HOST_LOST and life is not None and bool(heard - {life.host})

    def live_workers(self) -> list[SimWorker]:
        return [w for _, w in sorted(self.lives.items()) if w.alive]
