"""The generation that a transport works for, and the newest generation that was aborted."""

from __future__ import annotations

import threading

from everstep.base.errors import CollectiveAborted, check


class Fence:
    """`abort` comes from any thread and is sticky: it counts for all generations up to the given one, also later.

    aborted: the newest generation that has been aborted.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.aborted = 0
        self._lock = threading.Lock()

    def enter(self, generation: int) -> None:
        """From now on operations belong to this generation."""
        check(generation >= self.generation, f"generation {generation} after {self.generation}")
        self.generation = generation

    def abort(self, generation: int) -> None:
        """End all operations of this generation and older ones."""
        with self._lock:
            self.aborted = max(self.aborted, generation)

    @property
    def down(self) -> bool:
        """Whether the current generation has been aborted."""
        return self.aborted >= self.generation

    def check(self) -> None:
        """Raises: CollectiveAborted if the current generation has been aborted."""
        if self.down:
            raise CollectiveAborted(f"generation {self.generation} has ended")
