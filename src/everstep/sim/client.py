"""A connection to the coordinator, as workers, agents and users keep it up in the simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from everstep.protocol import messages as wire
from everstep.sim.world import MS, Process, SimConnection, connect


class Server(Process, ABC):
    """The process at the other end."""

    @abstractmethod
    def accept(self, connection: SimConnection, role: str) -> None:
        """Somebody connects; the empty message says that it has proved the token."""


FindServer = Callable[[], Server | None]


class SimControlClient:
    """A connection to the coordinator that is always being kept up: hello first, then what waits."""

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
        self.closed = False
        self._try()

    def _try(self) -> None:
        if self.closed or self.connection is not None:
            return
        server = self._server()
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
