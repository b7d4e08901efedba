"""Taking down old process groups off the critical path, one thread for all of them."""

from __future__ import annotations

import queue
import threading
from typing import Protocol

_BACKLOG = 8


class Retirable(Protocol):
    """What can be taken down."""

    def retire(self) -> None: ...


class Reaper:
    """Calls `retire` on what it is given, in turn. With more than a few waiting, giving blocks: nothing piles up."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Retirable | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._run, name="everstep-reaper", daemon=True)
        self._thread.start()

    def take(self, group: Retirable) -> None:
        """The caller must hold no other reference to what shall be freed."""
        self._queue.put(group)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish what is left, for `timeout_s` at most."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (group := self._queue.get()) is not None:
            try:
                group.retire()
            except RuntimeError:
                pass  # a group that was cut complains when it is shut down
            del group
