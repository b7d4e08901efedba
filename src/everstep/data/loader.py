"""`LaneLoader`: the batches of this worker's lanes, ahead of time where loader processes are allowed.

Bits do not depend on it: `fetch` alone decides the content of a batch, in any process, at any time and in
any order; and a batch that was not prepared is loaded at once. If the loop has changed values of the dataset since the
loader processes were forked, they are forked again, and prepared batches are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from everstep.base.config_keys import LoaderConfig
from everstep.base.errors import Misused, TaskError
from everstep.base.readable import readable
from everstep.data.batch import aligned, pinned
from everstep.data.kept_values import kept_values
from everstep.data.loader_process import Failure, LoaderDied, LoaderProcess
from everstep.data.stream import StreamMark, StreamReader
from everstep.exact.seeding import derive, preserve_rng, sample_seed, seed_all
from everstep.order.cursor import Order, SampleId

_OUTSTANDING = 32
"""Most unanswered requests of a loader process, so that neither side ever waits in a send."""
_LIVES = 2
"""Number of loader processes that may die over the same batch."""

_COLLATE = 1 << 33
"""First number of the seeds for collating, so that they coincide with no others."""

LaneKey = tuple[int, int]
_T = TypeVar("_T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """Everything that a lane's batch is made from. dataset: map-style, or the reader of a stream. collate: list
    of samples -> batch."""

    dataset: Any
    order: Order
    collate: Callable[[list[Any]], Any]
    seed: int


def fetch(recipe: Recipe, step: int, lane: int, *, preserve: bool = True) -> tuple[Any, tuple[SampleId, ...]]:
    """(batch, its samples); (None, ()) for a lane without samples.

    Each sample is fetched, and the batch collated, with all generators seeded for it, and one intra-op thread. The
    caller's generators stay as they were, unless `preserve` is off (saves 0.1 ms where they are seeded next anyway).

    Raises: TaskError naming the sample that cannot be read, or saying that collate raised.
    """
    samples = recipe.order.samples(step, lane)
    if not samples:
        return None, ()
    with preserve_rng() if preserve else nullcontext(), _one_thread():
        items = [_sample(recipe, epoch, index) for epoch, index in samples]
        seed_all(derive(_COLLATE, recipe.seed, step, lane))
        try:
            return aligned(recipe.collate(items)), samples
        except Exception as error:
            indices = ", ".join(str(index) for _, index in samples)
            raise TaskError(
                f"collate raised {type(error).__name__}: {error} (step {step}, lane {lane}, samples {indices})"
            ) from error


def _sample(recipe: Recipe, epoch: int, index: int) -> Any:
    if isinstance(recipe.dataset, StreamReader):
        return recipe.dataset.read(epoch, index)
    seed_all(sample_seed(recipe.seed, epoch, index))
    try:
        return recipe.dataset[index]
    except Exception as error:
        said = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
        raise TaskError(f"sample {index} of the dataset cannot be read (epoch {epoch}): {said}") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """One intra-op thread: the bits of larger operations depend on the number, and loader processes have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Slot:
    """A loader process and its open requests, in order: ticket -> (step, lane)."""

    process: LoaderProcess
    asked: dict[int, LaneKey] = field(default_factory=dict)


class _Loaded(NamedTuple):
    """A batch, and a place in the stream before it, if it is from one."""

    batch: Any
    mark: StreamMark | None


class LaneLoader:
    """Loads (step, lane) batches.

    config: number of loader processes (0: load when asked), number of steps beyond the current one that they prepare,
    and whether batches go to pinned memory, if there is CUDA. The caller's generators are left anywhere: entering a
    lane seeds them all. The loader processes end with the thread that first asked for a batch or a schedule.
    """

    def __init__(self, recipe: Recipe, config: LoaderConfig) -> None:
        self._recipe = recipe
        self._config = config
        self._workers = config.workers
        self._slots: list[_Slot] = []
        self._ready: dict[LaneKey, Any] = {}
        self._taken: set[LaneKey] = set()
        self._wanted: list[LaneKey] = []
        self._deaths: dict[LaneKey, int] = {}
        self._tickets = 0
        self._forked_with: dict[str, Any] = {}
        self._told = False
        self._size = self._length()

    def schedule(self, step: int, lanes: Sequence[int]) -> None:
        """Prepare these lanes of `step`, and of the steps after it.

        Steps count from 1. Call it at each step and after each change of plan; prepared batches that are no longer
        wanted are dropped. Raises: Misused if the dataset has another length than it had, which its order goes by.
        """
        if (size := self._length()) != self._size:
            raise Misused(
                f"the dataset had {self._size} samples when the job began, and has {size} now, but their order was "
                "made then: let __len__ stay as it is, and __getitem__ choose among more of them"
            )
        if self._workers == 0:
            return
        self._renew()
        last = min(step + self._config.prefetch, self._recipe.order.total_steps)
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
            batch = self._load(step, lane)
        self._ask()
        if isinstance(batch, Failure):
            raise batch.error()
        if batch.mark is not None:
            self._recipe.dataset.add(batch.mark)
        return (pinned(batch.batch) if self._config.pin_memory else batch.batch), samples

    def close(self) -> None:
        """End the loader processes. Calling it again does nothing."""
        for slot in self._slots:
            slot.process.close()
        self._slots.clear()
        self._workers = 0

    def _length(self) -> int | None:
        """Of a map-style dataset; what a stream says of its own is compared where it ends."""
        data = self._recipe.dataset
        return None if isinstance(data, StreamReader) or not hasattr(data, "__len__") else len(data)

    def _values(self) -> dict[str, Any]:
        """Values that the loop may have changed. A stream changes its own, and its reader sees to them."""
        streamed = isinstance(self._recipe.dataset, StreamReader)
        return kept_values(None if streamed else self._recipe.dataset, self._recipe.collate)

    def _renew(self) -> None:
        """Give up processes and prepared batches that are older than a change of the dataset."""
        if not self._slots or (now := self._values()) == self._forked_with:
            return
        if not self._told:
            self._told = True
            before, none = self._forked_with, object()
            name = next(name for name in {**before, **now} if before.get(name, none) != now.get(name, none))
            log.warning("%s has changed in the loop: loader processes are started again after each such change", name)
        for slot in self._slots:
            slot.process.close()
        self._slots.clear()
        self._ready.clear()

    def _prepared(self, key: LaneKey) -> Any:
        """Batch that a loader process has made or is making; None if none was asked to."""
        while key not in self._ready:
            slot = next((s for s in self._slots if key in s.asked.values()), None)
            if slot is None:
                return None
            self._receive(slot)
        return self._ready.pop(key)

    def _collect(self) -> None:
        """Take in replies that are there, without waiting."""
        while ready := readable([slot.process.fileno() for slot in self._slots], 0.0):
            for slot in [slot for slot in self._slots if slot.process.fileno() in ready]:
                self._receive(slot)

    def _receive(self, slot: _Slot) -> None:
        answer = self._guarded(slot, LoaderProcess.receive)
        if answer is not None:
            key = slot.asked.pop(answer[0], None)
            if key is not None:
                self._ready[key] = answer[1]

    def _ask(self) -> None:
        """Request wanted batches that are neither ready nor asked for, each from the process with the least to do."""
        if self._workers == 0:
            return
        if not self._slots:
            self._forked_with = self._values()
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

    def _load(self, step: int, lane: int) -> _Loaded:
        batch, samples = fetch(self._recipe, step, lane, preserve=False)
        data = self._recipe.dataset
        return _Loaded(batch, data.mark(*samples[-1]) if isinstance(data, StreamReader) and samples else None)

    def _guarded(self, slot: _Slot, action: Callable[..., _T], *arguments: int) -> _T | None:
        """Run the action on the slot's process. If it is dead, start another, repeat the requests, and return None."""
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
        """Count a death against the batch that was being made; raise after too many."""
        self._deaths[key] = self._deaths.get(key, 0) + 1
        if self._deaths[key] >= _LIVES:
            indices = ", ".join(str(index) for _, index in self._recipe.order.samples(*key))
            raise TaskError(
                f"{_LIVES} loader processes ended by {how} while they loaded step {key[0]}, lane {key[1]} (samples "
                f"{indices}): one of these samples breaks the process that reads it, or memory is too small"
            )
