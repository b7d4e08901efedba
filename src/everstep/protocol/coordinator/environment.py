"""The shared tools of the coordinator's parts: settings, time, alarms, messages, effects. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from typing import Any

from everstep.base.cause import Why
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.coordinator.types import (
    Close,
    CoordinatorConfig,
    CoordinatorEffect,
    Knows,
    Persist,
    ProbePort,
    Remember,
    Report,
    Send,
)
from everstep.protocol.messages import AnyMessage
from everstep.protocol.roles import PEOPLE

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000


def describe(key: WorkerKey) -> str:
    """One life of a worker, in plain words."""
    return f"worker {key.worker_id} (incarnation {key.incarnation})"


def listed(ids: Iterable[int]) -> str:
    """Worker ids, slots or stages in plain words."""
    return ", ".join(str(i) for i in sorted(set(ids))) or "none"


class Alarm(IntEnum):
    """Reasons for which the coordinator wakes up; alarms due at one moment ring in this order."""

    AGENT = auto()  # this agent may have been silent for too long
    ASKED = auto()  # the worker asked for a plan may have had enough time to send it
    END = auto()  # the time for a checkpoint before the end may be over
    FAILED = auto()  # the time for a checkpoint before workers that have raised are let go may be over
    GONE = auto()  # this worker may have been without a connection for too long
    GRACE = auto()  # the time to come back after the coordinator's restart may be over
    HOSTS = auto()  # hosts may have been waited for in vain
    JOINS = auto()  # joiners have been waited for long enough, or one may try again
    PROBE_PORT = auto()  # hosts that have lost all connections may be back, or dead
    LEFT = auto()  # all had the time to leave their loops after the same step
    LINKS = auto()  # all who have lost a peer had the time to say so
    QUORUM = auto()  # workers may have been waited for in vain
    SPREAD = auto()  # hosts may have slots that others have had too few of for long enough
    SPEEDS = auto()  # time to look at the workers' speeds
    START = auto()  # all workers had the time to come; begin with those that are there


AlarmAbout = tuple[Alarm, str | int]
"""The alarm, and its subject: an agent's id, a worker's, or 0."""


class Alarms:
    """Alarms that are set, each for one moment. One may ring early: its handler looks at the facts again."""

    def __init__(self) -> None:
        self._at: dict[AlarmAbout, int] = {}
        self._heap: list[tuple[int, AlarmAbout]] = []

    def set(self, due: Alarm, at_ns: int, about: str | int = 0) -> None:
        """Ring at `at_ns` at the latest."""
        alarm = (due, about)
        known = self._at.get(alarm)
        if known is None or at_ns < known:
            self._at[alarm] = at_ns
            heapq.heappush(self._heap, (at_ns, alarm))

    def due(self, now_ns: int) -> list[AlarmAbout]:
        """Take the alarms that are due: in order of time, `Alarm` and subject. Alarms set meanwhile for the past
        ring in the next call."""
        found = []
        while (next_ns := self.next_ns) is not None and next_ns <= now_ns:
            _, alarm = heapq.heappop(self._heap)
            del self._at[alarm]
            found.append(alarm)
        return found

    @property
    def next_ns(self) -> int | None:
        """When the next alarm rings, in ns; None if none is set."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


@dataclass(frozen=True)
class Connection:
    """A control connection, with the role and name that it has proved; `worker` or `agent_id` is known from the
    hello on."""

    role: str
    who: str | None = None
    worker: WorkerKey | None = None
    agent_id: str | None = None


class Environment:
    """Collects the effects of all parts.

    now: time of the present event, on the coordinator's clock, in ns. version: changes with everything that
    decisions depend on. connections: open ones, by name. fresh_ns: this process was away, and messages before that
    time may have waited for it. lanes_told: a script has said the number of lanes.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.now = 0
        self.version = 0
        self.fresh_ns = 0
        self.lanes_told = False
        self.alarms = Alarms()
        self.connections: dict[str, Connection] = {}
        self._persists: list[CoordinatorEffect] = []
        self._effects: list[CoordinatorEffect] = []
        self._number = 0

    def advance(self, now_ns: int) -> None:
        """Set the time, which never runs backwards."""
        self.now = max(self.now, now_ns)

    def change(self) -> None:
        self.version += 1

    def distrust(self, span_ns: int) -> None:
        """Messages that arrive within this time may have waited for this process."""
        self.fresh_ns = self.now + span_ns

    def number(self) -> int:
        """A number that no life of this coordinator has given out before."""
        self._number = max(self.now, self._number + 1)
        return self._number

    def takes_lanes(self, lanes: int) -> None:
        """Set the job's number of lanes: the first script that joins says it, before there is a plan."""
        self.config, self.lanes_told = replace(self.config, lanes=lanes), True

    # ---- connections

    def connected(self, name: str, role: str, who: str | None) -> None:
        self.connections[name] = Connection(role, who)

    def introduce(self, name: str, **who: Any) -> None:
        """Note the owner of a connection (`worker` or `agent_id`), as a hello has told."""
        self.connections[name] = replace(self.connections[name], **who)

    def disconnected(self, name: str) -> Connection | None:
        """A connection has ended. Returns it; None if it was closed from here."""
        return self.connections.pop(name, None)

    # ---- effects

    def persist(self, kind: str, **fields: Any) -> None:
        """Append to the journal, before any other effect of the same event."""
        self._persists.append(Persist({"kind": kind, **fields}))

    def report(self, kind: str, why: Why, **fields: Any) -> None:
        self._effects.append(Report(kind, {"cause": why.cause, "reason": why.reason, **fields}))

    def remember(self, **facts: Any) -> None:
        """Keep these facts for later runs of this job, and for its next coordinator."""
        self._effects.append(Remember(facts))

    @property
    def said(self) -> int:
        """Number of effects of this event so far."""
        return len(self._effects)

    def send(self, connection: str | None, message: AnyMessage, at: int | None = None) -> None:
        """Send over a connection, if it is open. at: insert before the effects after this number."""
        if connection is not None and connection in self.connections:
            self._effects.insert(self.said if at is None else at, Send(connection, message))

    def knows(self, connection: str, plan: Plan) -> None:
        """Note that the other end of the connection has this plan."""
        self._effects.append(Knows(connection, plan))

    def send_all(self, message: AnyMessage) -> None:
        for name, connection in sorted(self.connections.items()):
            if connection.role not in PEOPLE:
                self.send(name, message)

    def probe_port(self, key: WorkerKey, address: str) -> None:
        """Have this worker's port checked."""
        self._effects.append(ProbePort(key, address))

    def close(self, connection: str | None, reason: str, *, foul: bool = False) -> None:
        """End a connection, if it is open. foul: because of a bad message; the rest of the coordinator sees an
        ordinary end."""
        if connection is not None and foul and connection in self.connections:
            self._effects.append(Close(connection, reason, foul))
        elif connection is not None and self.connections.pop(connection, None) is not None:
            self._effects.append(Close(connection, reason))

    def take_effects(self) -> list[CoordinatorEffect]:
        """All effects since the last call; those that persist come first, so the journal is synced once per event."""
        effects = self._persists + self._effects
        self._persists, self._effects = [], []
        return effects
