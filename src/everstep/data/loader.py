"""`LaneLoader`: the batches of this worker's lanes, ahead of time where loader processes are allowed.

Bits do not depend on it: what a batch holds is `fetch`'s business, and a batch that was not prepared is loaded at once.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.utils.data import default_collate

from everstep.base.errors import TaskError
from everstep.data.batch import pinned, to_device
from everstep.data.fetch import Recipe, fetch
from everstep.data.process import Failure, LoaderDied, LoaderProcess
from everstep.order.cursor import Order, SampleId

__all__ = ["LaneLoader", "to_device"]

_OUTSTANDING = 32
"""Most requests that a loader process has unanswered, so that neither side ever waits in a send."""
_LIVES = 2
"""How many loader processes may die over the same batch."""

LaneKey = tuple[int, int]
_T = TypeVar("_T")


@dataclass
class _Slot:
    """A loader process and what it was asked for, in order: ticket -> (step, lane)."""

    process: LoaderProcess
    asked: dict[int, LaneKey] = field(default_factory=dict)


class LaneLoader:
    """Loads (step, lane) batches.

    dataset: map-style. order: which samples a lane has. seed: the job's. collate: list of samples -> batch, torch's
    default_collate by default. workers: loader processes (0: load when asked). prefetch: how many steps beyond the
    current one they prepare. pin_memory: batches in pinned memory, where there is CUDA.
    preserve_generators: leave the caller's generators as they were; off for a caller who seeds them next.
    The loader processes end with the thread that first asked for a batch or a schedule.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        *,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        preserve_generators: bool = True,
    ) -> None:
        self._recipe = Recipe(dataset, order, collate or default_collate, seed)
        self._workers = workers
        self._prefetch = prefetch
        self._pin = pin_memory
        self._preserve = preserve_generators
        self._slots: list[_Slot] = []
        self._ready: dict[LaneKey, Any] = {}
        self._taken: set[LaneKey] = set()
        self._wanted: list[LaneKey] = []
        self._deaths: dict[LaneKey, int] = {}
        self._tickets = 0

    def schedule(self, step: int, lanes: Sequence[int]) -> None:
        """This worker is about to compute these lanes of `step`, and as far as anyone knows of the steps after it.

        Steps count from 1. Call it at each step and after each change of plan; what was prepared and is not wanted
        any more is dropped.
        """
        if self._workers == 0:
            return
        last = min(step + self._prefetch, self._recipe.order.total_steps)
        self._taken = {key for key in self._taken if key[0] >= step}
        self._wanted = [
            (s, lane) for s in range(step, last + 1) for lane in sorted(lanes) if (s, lane) not in self._taken
        ]
        wanted = set(self._wanted)
        self._ready = {key: batch for key, batch in self._ready.items() if key in wanted}
        self._collect()
        for slot in self._slots:
            for ticket in [t for t, key in slot.asked.items() if key not in wanted]:
                del slot.asked[ticket]
                self._guarded(slot, LoaderProcess.cancel, ticket)
        self._ask()

    def batch(self, step: int, lane: int) -> tuple[Any, tuple[SampleId, ...]]:
        """(batch, its samples) of a lane; (None, ()) where the lane has none in this step.

        Raises: TaskError naming the sample that cannot be read.
        """
        key = (step, lane)
        samples = self._recipe.order.samples(step, lane)
        if not samples:
            return None, ()
        self._taken.add(key)
        batch = self._prepared(key)
        if batch is None:
            batch = fetch(self._recipe, step, lane, preserve=self._preserve)[0]
        self._ask()
        if isinstance(batch, Failure):
            raise batch.error()
        return (pinned(batch) if self._pin else batch), samples

    def close(self) -> None:
        """End the loader processes. Calling it again does nothing."""
        for slot in self._slots:
            slot.process.close()
        self._slots.clear()
        self._workers = 0

    def _prepared(self, key: LaneKey) -> Any:
        """The batch that a loader process has made or is making; None if none was asked to."""
        while key not in self._ready:
            slot = next((s for s in self._slots if key in s.asked.values()), None)
            if slot is None:
                return None
            self._receive(slot)
        return self._ready.pop(key)

    def _collect(self) -> None:
        """Take in what has been answered, without waiting."""
        while self._slots and (readable := select.select([s.process for s in self._slots], [], [], 0)[0]):
            for slot in [s for s in self._slots if s.process in readable]:
                self._receive(slot)

    def _receive(self, slot: _Slot) -> None:
        answer = self._guarded(slot, LoaderProcess.receive)
        if answer is not None:
            key = slot.asked.pop(answer[0], None)
            if key is not None:
                self._ready[key] = answer[1]

    def _ask(self) -> None:
        """Hand out what is wanted and neither ready nor asked for, to the process with the least to do."""
        if self._workers == 0:
            return
        while len(self._slots) < self._workers:
            self._slots.append(_Slot(LoaderProcess(self._load)))
        asked = {key for slot in self._slots for key in slot.asked.values()}
        for key in self._wanted:
            if key in self._ready or key in asked or key in self._taken:
                continue
            slot = min(self._slots, key=lambda s: len(s.asked))
            if len(slot.asked) >= _OUTSTANDING:
                return
            self._tickets += 1
            ticket = self._tickets
            slot.asked[ticket] = key
            self._guarded(slot, LoaderProcess.ask, ticket, *key)

    def _load(self, step: int, lane: int) -> Any:
        return fetch(self._recipe, step, lane)[0]

    def _guarded(self, slot: _Slot, action: Callable[..., _T], *arguments: int) -> _T | None:
        """Run it on the slot's process; if that is dead, start another one, ask it for the same, and return None."""
        try:
            return action(slot.process, *arguments)
        except LoaderDied as death:
            how = death.how
        while True:
            if slot.asked:
                self._blame(next(iter(slot.asked.values())), how)
            slot.process = LoaderProcess(self._load)
            try:
                for ticket, key in slot.asked.items():
                    slot.process.ask(ticket, *key)
                return None
            except LoaderDied as death:
                how = death.how

    def _blame(self, key: LaneKey, how: str) -> None:
        """Count a death against the batch that was being made; raise once there have been too many."""
        self._deaths[key] = self._deaths.get(key, 0) + 1
        if self._deaths[key] >= _LIVES:
            indices = ", ".join(str(index) for _, index in self._recipe.order.samples(*key))
            raise TaskError(
                f"{_LIVES} loader processes ended by {how} while they loaded step {key[0]}, lane {key[1]} (samples "
                f"{indices}): one of these samples breaks the process that reads it, or memory is too small"
            )
