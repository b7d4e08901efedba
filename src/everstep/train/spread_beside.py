"""Updated parameters that go between the members of a pool while the next lanes are computed."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from torch import nn


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


class UnitGate:
    """Where a pass through a stage of a split model waits for the parameters of its next unit."""

    def __init__(self, units: Sequence[nn.Module], numbers: Sequence[int]) -> None:
        """numbers: of the units in the whole model."""
        pairs = [(number, p) for number, unit in zip(numbers, units, strict=True) for p in unit.parameters()]
        self._units = {id(p): number for number, p in reversed(pairs)}
        self._parts: list[tuple[int, int]] = []
        self._wait: Callable[[int], None] | None = None

    def unit_of(self, parameter: nn.Parameter) -> int:
        """Number of the first unit that has a parameter; below all others if none has."""
        return self._units.get(id(parameter), -1)

    def shut(self, parts: Mapping[int, int], wait: Callable[[int], None]) -> None:
        """Parameters are on their way. parts: by its first unit, the number of parts that have come when that one has.
        wait: for so many of them."""
        self._parts, self._wait = sorted(parts.items()), wait

    def open(self) -> None:
        """All are there, or nobody may wait any more."""
        self._wait = None

    def enter(self, unit: int) -> None:
        """A unit is about to be computed: wait for its parameters. Raises: CollectiveAborted."""
        at = bisect_right(self._parts, (unit, 1 << 62))
        if self._wait is not None and at:
            self._wait(self._parts[at - 1][1])
