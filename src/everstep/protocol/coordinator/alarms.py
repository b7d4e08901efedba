"""The moments at which the coordinator wants to be called: what for, and about whom. Pure.

One may ring early: whoever set it looks at the facts again. Those that are due at one moment ring in the order of
`KINDS`, and within a kind by what they are about, so that what follows does not depend on the order of setting.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class AgentDue:
    """This agent may have been silent for too long."""

    agent_id: str


@dataclass(frozen=True, order=True)
class EndDue:
    """The time for a checkpoint before the end may be over."""


@dataclass(frozen=True, order=True)
class FailedDue:
    """The time for a checkpoint before workers that have raised are let go may be over."""


@dataclass(frozen=True, order=True)
class GoneDue:
    """This worker may have been without a connection for too long."""

    worker_id: int


@dataclass(frozen=True, order=True)
class GraceDue:
    """The time to come back after the coordinator's restart may be over."""


@dataclass(frozen=True, order=True)
class JoinsDue:
    """Joiners have been waited for long enough, or one may try again."""


@dataclass(frozen=True, order=True)
class LinksDue:
    """All who have lost a peer had the time to say so."""


@dataclass(frozen=True, order=True)
class QuorumDue:
    """Workers may have been waited for in vain."""


@dataclass(frozen=True, order=True)
class SpeedsDue:
    """Time to look at the workers' speeds."""


@dataclass(frozen=True, order=True)
class StartDue:
    """All workers had the time to come; begin with those that are there."""


Alarm = AgentDue | EndDue | FailedDue | GoneDue | GraceDue | JoinsDue | LinksDue | QuorumDue | SpeedsDue | StartDue
KINDS: tuple[type[Alarm], ...] = (
    AgentDue,
    EndDue,
    FailedDue,
    GoneDue,
    GraceDue,
    JoinsDue,
    LinksDue,
    QuorumDue,
    SpeedsDue,
    StartDue,
)
_RANK = {kind: rank for rank, kind in enumerate(KINDS)}


class Alarms:
    """Which alarms are set, each for one moment."""

    def __init__(self) -> None:
        self._at: dict[Alarm, int] = {}
        self._heap: list[tuple[int, int, Alarm]] = []

    def set(self, alarm: Alarm, at_ns: int) -> None:
        """Ring at `at_ns` at the latest."""
        known = self._at.get(alarm)
        if known is None or at_ns < known:
            self._at[alarm] = at_ns
            heapq.heappush(self._heap, (at_ns, _RANK[type(alarm)], alarm))

    def due(self, now_ns: int) -> Iterator[Alarm]:
        """Take out what has become due; alarms set meanwhile for the past ring in the next call."""
        found = []
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, alarm = heapq.heappop(self._heap)
            if self._at.get(alarm) == at_ns:
                del self._at[alarm]
                found.append(alarm)
        return iter(found)

    @property
    def next_ns(self) -> int | None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
