"""Updated parameters that go between the members of a pool while the next lanes are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class SpreadBeside:
    """The exchange after one step's update, in a thread of its own. generation, step: to which it belongs.

    Nothing else may write to the parameters before it has ended; who reads some of them waits for their part.
    """

    def __init__(self, generation: int, step: int, parts: Sequence[Callable[[], None]]) -> None:
        """parts: exchange a part of the parameters each, one after the other. They raise CollectiveAborted if their
        generation is cut."""
        self.generation, self.step = generation, step
        self._parts, self._came = parts, 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="everstep-spread", daemon=True)
        self._thread.start()

    def wait(self, number: int | None = None) -> None:
        """Wait until so many parts have come; None: all. Raises: what has ended it before."""
        wanted = len(self._parts) if number is None else number
        with self._changed:
            self._changed.wait_for(lambda: self._came >= wanted or self._error is not None)
            error = self._error
        if self._came < wanted and error is not None:
            raise error
        if wanted == len(self._parts):
            self._thread.join()

    def end(self) -> None:
        """Wait until it has ended, whether or not all have come: nothing is written any more."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for number, exchange in enumerate(self._parts, 1):
                exchange()
                with self._changed:
                    self._came = number
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
