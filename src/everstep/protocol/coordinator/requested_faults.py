"""Scripted faults of hosts that have struck, in any life of the coordinator, and requested faults of the
coordinator. Pure.
"""

from __future__ import annotations

from dataclasses import asdict

from everstep.base.strikes import Strike
from everstep.protocol.coordinator.environment import Environment

MOST_ASKED = 1000


class EarlierTargets:
    """Each fault strikes once in a job, however often workers repeat its step."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._known: set[int] = set()
        self._asked: dict[int, Strike] = {}

    def first(self, index: int) -> bool:
        """Whether this fault, by its place in the specification, has not struck yet. From now on it has."""
        if index in self._known:
            return False
        self.replay(index)
        self._env.persist("struck", index=index)
        return True

    def replay(self, index: int) -> None:
        self._known.add(index)

    def ask(self, strike: Strike) -> None:
        """A worker reports when this fault is due, by its index, which is unique."""
        self.replay_asked(strike)
        self._env.persist("strike_asked", strike=asdict(strike))

    def replay_asked(self, strike: Strike) -> None:
        self._asked[strike.index] = strike
        if len(self._asked) > MOST_ASKED:
            del self._asked[next(iter(self._asked))]

    def find(self, index: int) -> Strike | None:
        """The fault of this index: from the specification, or requested."""
        scripted = (one for one in self._env.config.hosts.strikes if one.index == index)
        return self._asked.get(index) or next(scripted, None)
