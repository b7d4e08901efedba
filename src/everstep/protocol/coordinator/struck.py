"""Which scripted faults of hosts have struck, in this life of the coordinator or in a former one. Pure."""

from __future__ import annotations

from everstep.protocol.coordinator.desk import Desk


class StruckBefore:
    """Each strikes once in a job, however often its workers return to its step."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._known: set[int] = set()

    def first(self, index: int) -> bool:
        """Whether this fault, by its place in the specification, has not struck yet. It has from now on."""
        if index in self._known:
            return False
        self.replay(index)
        self._desk.persist("struck", index=index)
        return True

    def replay(self, index: int) -> None:
        """It has struck."""
        self._known.add(index)
