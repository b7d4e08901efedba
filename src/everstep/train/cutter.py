"""Ends what an operation waits for, from another thread, once its generation is over.

Apart because two threads meet here: the training thread waits on transports and connections, the control thread hears
that it need not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from everstep.runtime.peer import PeerConnection


class Cutter:
    """Knows which generations are over, and what is still open in which. Thread-safe."""

    def __init__(self, abort: Callable[[int], None]) -> None:
        """abort: of the transport, for this generation and older ones."""
        self._abort = abort
        self._lock = threading.Lock()
        self._newest = -1
        self._open: dict[PeerConnection, int] = {}

    def cut(self, generation: int) -> None:
        """This generation is over, and all before it: free whoever waits in one of them."""
        with self._lock:
            self._newest = max(self._newest, generation)
            over = [connection for connection, of in self._open.items() if of <= generation]
        for connection in over:
            connection.abort()
        self._abort(generation)

    def over(self, generation: int) -> bool:
        """Whether nothing more is to be done for this generation."""
        return generation <= self._newest

    @contextlib.contextmanager
    def guarded(self, connection: PeerConnection, generation: int) -> Iterator[PeerConnection]:
        """While inside, the connection ends with the generation; afterwards it is closed."""
        self.guard(connection, generation)
        try:
            yield connection
        finally:
            self.close(connection)

    def guard(self, connection: PeerConnection, generation: int) -> None:
        """The connection ends with the generation, or by `close`."""
        with self._lock:
            self._open[connection] = generation
            over = self.over(generation)
        if over:
            connection.abort()

    def close(self, connection: PeerConnection) -> None:
        """The conversation is over."""
        with self._lock:
            self._open.pop(connection, None)
        connection.close()
