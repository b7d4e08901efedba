"""What ties one simulated worker to the coordinator and to its agent.

What arrives is treated as in production: a message of the coordinator is asked at once whether it interrupts the
operation under way, and handed in; the driver takes it in when it may.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from everstep.base.cause import Cause
from everstep.base.plan import Member
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import interrupts
from everstep.sim.life import Life
from everstep.sim.mesh import Mesh
from everstep.sim.world import MS, Process, SimConnection, connect


class Server(Process, ABC):
    """The process at the other end."""

    @abstractmethod
    def accept(self, connection: SimConnection, role: str) -> None:
        """Somebody connects; the empty message says that it has proved the token."""


FindServer = Callable[[], Server | None]


class SimControlClient:
    """A connection to the coordinator that is always being kept up, once begun: hello first, then what waits."""

    def __init__(
        self,
        owner: Process,
        server: FindServer,
        role: str,
        hello: Callable[[], Sequence[wire.AnyMessage]],
        deliver: Callable[[Any], None],
    ) -> None:
        self.owner, self.role, self.hello, self.deliver = owner, role, hello, deliver
        self._server = server
        self.connection: SimConnection | None = None
        self.queue: list[wire.AnyMessage] = []
        self.closed = True

    def begin(self) -> None:
        """Find the coordinator."""
        self.closed = False
        self._try()

    def _try(self) -> None:
        if self.closed or self.connection is not None:
            return
        server = self._server()
        connection = connect(self.owner.world, self.owner, server, timeout_ns=2000 * MS)
        if connection is None or server is None:
            self.owner.soon(20 * MS, 300 * MS, self._try)
            return
        self.connection = connection
        connection.listen(self.owner, lambda body: self.deliver(wire.decode(body)), self._lost)
        server.accept(connection, self.role)
        connection.send(self.owner, b"")
        waiting, self.queue = self.queue, []
        for message in [*self.hello(), *waiting]:
            connection.send(self.owner, wire.encode(message))

    def _lost(self) -> None:
        self.connection = None
        self.owner.soon(20 * MS, 100 * MS, self._try)

    def send(self, message: wire.AnyMessage) -> None:
        """Now, or once connected again; heartbeats and progress only now."""
        if self.connection is not None and self.connection.open:
            self.connection.send(self.owner, wire.encode(message))
        elif not self.closed and not isinstance(message, wire.Heartbeat | wire.Progress):
            self.queue.append(message)

    def close(self) -> None:
        self.closed = True
        if self.connection is not None:
            self.connection.close(self.owner)


class Ties:
    """The connection to the coordinator, what is said over it, and what the agent reads."""

    def __init__(self, life: Life, server: FindServer, mesh: Mesh) -> None:
        self.life = life
        self.mesh = mesh
        self.client = SimControlClient(life, server, "worker", self._hello, self.deliver)
        life.install({do.Tell: self._tell, do.Outvoted: self._outvoted})

    def _hello(self) -> list[wire.AnyMessage]:
        """Everything that the coordinator may have missed, anew."""
        life, standing = self.life, self.life.driver.standing
        member = Member(life.me.worker_id, life.me.incarnation, life.host, life.pid, life.name)
        size = life.job.state_bytes
        hello = wire.WorkerHello(member=member, step=standing.step, plan=standing.plan, state_bytes=size)
        return [hello, *standing.messages]

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still be sent or expected here."""
        return self.client.connection is connection

    def pulse(self) -> wire.WorkerPulse:
        """What the agent reads of it from shared memory."""
        life = self.life
        still = 0 if life.frozen_ns is None else (life.world.now_ns - life.frozen_ns) // MS
        return wire.WorkerPulse(
            worker_id=life.me.worker_id,
            incarnation=life.me.incarnation,
            step=life.driver.machine.step,
            phase=str(life.driver.machine.phase),
            still_ms=still,
            samples_per_s=100.0 / life.slowness,
            compute_ms_per_lane=2.0 * life.slowness,
        )

    def deliver(self, message: wire.AnyMessage) -> None:
        """A message of the coordinator."""
        life = self.life
        if isinstance(message, wire.PlanNow | wire.PlanPrepared):
            life.site.checks.records.plan(message.plan)
        life.world.seen["messages", type(message).__name__] += 1
        newest = interrupts(message)
        if newest is not None:
            self._interrupt(newest)
        life.handle(do.Heard(message, life.world.now_ns))
        if isinstance(life.operation, do.Watch):
            life.soon(0, MS, life.done, life.operation, ())

    def _interrupt(self, generation: int) -> None:
        """The transfers of this generation and older ones are over."""
        life, operation = self.life, self.life.operation
        life.cut(generation)
        if life.world.rng.random() < 0.5:
            self.mesh.leave(generation)
        if operation is not None and operation.generation <= generation:
            life.soon(0, 2 * MS, life.abort, operation)

    def fail(self, reason: str, cause: Cause = Cause.EXCEPTION, sound: int = -1) -> None:
        """End by an exception, with last words."""
        self.client.send(self.life.last_words(cause, reason, sound=sound))
        self.life.end(cause, reason)

    def _tell(self, effect: do.Tell) -> None:
        if isinstance(effect.message, wire.PeerFault):
            self.life.world.log(self.life.name, "accuses", effect.message.accused)
        self.client.send(effect.message)

    def _outvoted(self, effect: do.Outvoted) -> None:
        self.fail(effect.reason, Cause.CORRUPT, effect.sound)
