"""The store with which a gloo or NCCL group finds together: kept by the coordinator, per generation.

Apart because two threads meet here: the training thread waits for keys, the control thread brings them, or the news
that the generation is over, which frees whoever waits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from everstep.protocol import messages as wire

_FOREVER = 1 << 62


class Rendezvous:
    """Sets and gets keys through control messages; keys begin with "generation<g>/"."""

    def __init__(self, tell: Callable[[wire.AnyMessage], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._newest = 0
        self._requests = itertools.count(1)
        self._asked: dict[int, wire.StoreGet] = {}
        self._answers: dict[int, list[bytes] | None] = {}
        self._set: dict[str, wire.StoreSet] = {}

    # ---- training thread

    def set_key(self, key: str, value: bytes) -> None:
        """Returns at once."""
        message = wire.StoreSet(generation=_generation(key), key=key, value=value)
        with self._changed:
            self._set = {k: m for k, m in self._set.items() if m.generation >= message.generation}
            self._set[key] = message
        self._tell(message)

    def get_keys(self, keys: list[str]) -> list[bytes] | None:
        """Blocks until all are set; None once a newer plan has come."""
        generation = _generation(keys[0])
        request = next(self._requests)
        message = wire.StoreGet(request=request, generation=generation, keys=keys)
        with self._changed:
            self._asked[request] = message
        self._tell(message)
        with self._changed:
            self._changed.wait_for(lambda: request in self._answers or self._newest > generation)
            self._asked.pop(request, None)
            return self._answers.pop(request, None)

    def over(self) -> bool:
        """Whether the job has ended for this worker; a superseded generation is noticed key by key."""
        return self._newest == _FOREVER

    # ---- control thread

    def observe(self, message: wire.AnyMessage) -> None:
        """See everything that comes from the coordinator."""
        with self._changed:
            if isinstance(message, wire.StoreValues):
                if message.request in self._asked:
                    self._answers[message.request] = message.values
            elif isinstance(message, wire.PlanNow):
                self._newest = max(self._newest, message.plan.generation)
            elif isinstance(message, wire.JobEnded | wire.Dismissed):
                self._newest = _FOREVER
            else:
                return
            self._changed.notify_all()

    def repeat(self) -> None:
        """After a reconnect: a coordinator that was restarted has an empty store."""
        with self._changed:
            again: list[wire.AnyMessage] = [*self._set.values(), *self._asked.values()]
        for message in again:
            self._tell(message)


def _generation(key: str) -> int:
    return int(key.partition("/")[0].removeprefix("generation"))
