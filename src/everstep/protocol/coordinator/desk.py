"""What all parts of the coordinator work with: settings, the time, alarms, and what leaves the coordinator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from everstep.base.cause import Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.alarms import Alarms
from everstep.protocol.coordinator.types import Close, CoordinatorConfig, CoordinatorEffect, Persist, Report, Send
from everstep.protocol.messages import AnyMessage

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Connection:
    """A control connection; `worker` or `agent_id` is known from the hello on."""

    role: str
    worker: WorkerKey | None = None
    agent_id: str | None = None


class Desk:
    """Takes what parts have to say to the outside. `now`: of the present event, on the coordinator's clock, in ns."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.now = 0
        self.alarms = Alarms()
        self._connections: dict[str, Connection] = {}
        self._persists: list[CoordinatorEffect] = []
        self._effects: list[CoordinatorEffect] = []
        self._number = 0

    def advance(self, now_ns: int) -> None:
        """It is that late; time never runs backwards."""
        self.now = max(self.now, now_ns)

    def number(self) -> int:
        """A number that no life of this coordinator has given out before."""
        self._number = max(self.now, self._number + 1)
        return self._number

    # ---- connections

    @property
    def connections(self) -> Mapping[str, Connection]:
        """All open connections, by name."""
        return self._connections

    def connected(self, name: str, role: str) -> None:
        """A connection was opened."""
        self._connections[name] = Connection(role)

    def introduce(self, name: str, *, worker: WorkerKey | None = None, agent_id: str | None = None) -> None:
        """Whose connection it is, as a hello has said."""
        known = self._connections[name]
        self._connections[name] = replace(known, worker=worker or known.worker, agent_id=agent_id or known.agent_id)

    def disconnected(self, name: str) -> Connection | None:
        """A connection has ended. Returns what it was; None if it was closed from here."""
        return self._connections.pop(name, None)

    # ---- effects

    def persist(self, kind: str, **fields: Any) -> None:
        """Put an entry into the journal, before anything else of the same event leaves."""
        self._persists.append(Persist({"kind": kind, **fields}))

    def report(self, kind: str, why: Why, **fields: Any) -> None:
        """Tell people: an event."""
        self._effects.append(Report(kind, {"cause": why.cause, "reason": why.reason, **fields}))

    def send(self, connection: str | None, message: AnyMessage) -> None:
        """Send over a connection, if there is one."""
        if connection is not None and connection in self._connections:
            self._effects.append(Send(connection, message))

    def send_all(self, message: AnyMessage) -> None:
        """Send to all workers and agents."""
        for name in sorted(self._connections):
            if self._connections[name].role != "client":
                self.send(name, message)

    def close(self, connection: str | None, reason: str) -> None:
        """End a connection, if there is one."""
        if connection is not None and self._connections.pop(connection, None) is not None:
            self._effects.append(Close(connection, reason))

    def take_effects(self) -> list[CoordinatorEffect]:
        """All effects since the last call, what must be persisted first: the journal is synced once per event."""
        effects = self._persists + self._effects
        self._persists, self._effects = [], []
        return effects
