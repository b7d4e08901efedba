"""Which scripted faults of hosts have struck, in this life of the coordinator or in a former one, and which of the
coordinator were asked for while the job runs. Pure."""

from __future__ import annotations

from dataclasses import asdict

from everstep.base.strikes import Strike
from everstep.protocol.coordinator.environment import Environment

MOST_ASKED = 1000


class StruckBefore:
    """Each strikes once in a job, however often its workers return to its step."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._known: set[int] = set()
        self._asked: dict[int, Strike] = {}

    def first(self, index: int) -> bool:
        """Whether this fault, by its place in the specification, has not struck yet. It has from now on."""
        if index in self._known:
            return False
        self.replay(index)
        self._env.persist("struck", index=index)
        return True

    def replay(self, index: int) -> None:
        """The fault has struck."""
        self._known.add(index)

    def ask(self, strike: Strike) -> None:
        """Workers say when this one is due, by its index, which is of no other."""
        self.replay_asked(strike)
        self._env.persist("strike_asked", strike=asdict(strike))

    def replay_asked(self, strike: Strike) -> None:
        """The fault was asked for."""
        self._asked[strike.index] = strike
        if len(self._asked) > MOST_ASKED:
            del self._asked[next(iter(self._asked))]

    def find(self, index: int) -> Strike | None:
        """The fault of this index: at that place in the specification, or asked for."""
        scripted = (one for one in self._env.config.hosts.strikes if one.index == index)
        return self._asked.get(index) or next(scripted, None)
