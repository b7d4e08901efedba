"""The order of a coordinator's effects while its journal is being written: effects wait for the entries before them.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from everstep.protocol.coordinator.types import CoordinatorEffect, Persist, Send
from everstep.protocol.lease.requests import JournalEntry
from everstep.protocol.messages import Pong


class HeldEffects:
    """Releases effects in the order in which they came, each when all entries before it are written. Answers to
    pings do not wait: a silent coordinator would be taken for dead."""

    def __init__(self) -> None:
        self._put = self._written = 0
        self._held: deque[tuple[int, CoordinatorEffect]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, effects: Iterable[CoordinatorEffect]) -> tuple[list[JournalEntry], list[CoordinatorEffect]]:
        """Returns the entries to write, and the effects to carry out now, both in order."""
        entries: list[JournalEntry] = []
        at_once: list[CoordinatorEffect] = []
        for effect in effects:
            if isinstance(effect, Persist):
                self._put += 1
                entries.append(effect.entry)
            elif isinstance(effect, Send) and isinstance(effect.message, Pong):
                at_once.append(effect)
            else:
                self._held.append((self._put, effect))
        return entries, [*at_once, *self._release()]

    def written(self, count: int) -> list[CoordinatorEffect]:
        """This many further entries are written. Returns the effects to carry out now."""
        self._written += count
        return self._release()

    def _release(self) -> list[CoordinatorEffect]:
        ready: list[CoordinatorEffect] = []
        while self._held and self._held[0][0] <= self._written:
            ready.append(self._held.popleft()[1])
        return ready
