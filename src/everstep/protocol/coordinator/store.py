"""The rendezvous store that the process groups of a generation meet through. Pure.

Keys live as long as their generation is the current or the prepared one. An asker waits until all its keys are set,
or is told that the generation has been superseded, which frees a group's constructor at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.protocol.messages import AnyMessage, StoreGet, StoreSet, StoreValues


@dataclass(frozen=True)
class _Asker:
    connection: str
    get: StoreGet


class RendezvousStore:
    """Values by (generation, key), and who waits for them. send: to a connection, if there is one."""

    def __init__(self, send: Callable[[str, AnyMessage], None]) -> None:
        self._send = send
        self._values: dict[int, dict[str, bytes]] = {}
        self._askers: list[_Asker] = []
        self._oldest = 0

    def set(self, message: StoreSet) -> None:
        """Keep a value and answer those who waited for it."""
        if message.generation < self._oldest:
            return
        self._values.setdefault(message.generation, {})[message.key] = message.value
        waiting, self._askers = self._askers, []
        for asker in waiting:
            self._answer_or_keep(asker)

    def get(self, connection: str, message: StoreGet) -> None:
        """Answer now, or when all keys are set, or with None once the generation is superseded."""
        self._answer_or_keep(_Asker(connection, message))

    def advance(self, oldest: int) -> None:
        """Generations before `oldest` are superseded: forget their keys and free who waits for them."""
        if oldest <= self._oldest:
            return
        self._oldest = oldest
        self._values = {g: v for g, v in self._values.items() if g >= oldest}
        waiting, self._askers = self._askers, []
        for asker in waiting:
            self._answer_or_keep(asker)

    def forget(self, connection: str) -> None:
        """A connection ended; it asks again when it is back."""
        self._askers = [a for a in self._askers if a.connection != connection]

    def _answer_or_keep(self, asker: _Asker) -> None:
        get = asker.get
        if get.generation < self._oldest:
            self._send(asker.connection, StoreValues(request=get.request, values=None))
            return
        values = self._values.get(get.generation, {})
        if all(key in values for key in get.keys):
            found = [values[key] for key in get.keys]
            self._send(asker.connection, StoreValues(request=get.request, values=found))
        else:
            self._askers.append(asker)
