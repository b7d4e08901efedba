"""The rendezvous store that the process groups of a generation meet through. Pure.

Keys live as long as their generation is the current or the prepared one. An asker waits until all its keys are set,
or is told that the generation has been superseded, which frees a group's constructor at once.
"""

from __future__ import annotations

from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.messages import StoreGet, StoreSet, StoreValues


class RendezvousStore:
    """Values by (generation, key), and the connections that wait for them."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._values: dict[int, dict[str, bytes]] = {}
        self._waiting: list[tuple[str, StoreGet]] = []
        self._oldest = 0

    def set(self, message: StoreSet) -> None:
        """Keep a value and answer the connections that waited for it."""
        if message.generation >= self._oldest:
            self._values.setdefault(message.generation, {})[message.key] = message.value
            self._answer_waiting()

    def get(self, connection: str, message: StoreGet) -> None:
        """Answer now, when all keys are set, or with None once the generation is superseded."""
        if not self._answer(connection, message):
            self._waiting.append((connection, message))

    def advance(self, oldest: int) -> None:
        """Generations before `oldest` are superseded: forget their keys and answer the connections that wait for
        them."""
        if oldest > self._oldest:
            self._oldest = oldest
            self._values = {g: v for g, v in self._values.items() if g >= oldest}
            self._answer_waiting()

    def forget(self, connection: str) -> None:
        """A connection ended; it asks again when it is back."""
        self._waiting = [(name, get) for name, get in self._waiting if name != connection]

    def _answer_waiting(self) -> None:
        self._waiting = [(name, get) for name, get in self._waiting if not self._answer(name, get)]

    def _answer(self, connection: str, get: StoreGet) -> bool:
        """Returns whether there was an answer."""
        known = self._values.get(get.generation, {})
        values = None if get.generation < self._oldest else [known[key] for key in get.keys if key in known]
        if values is not None and len(values) < len(get.keys):
            return False
        self._env.send(connection, StoreValues(request=get.request, values=values))
        return True
