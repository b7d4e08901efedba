"""Which samples make up (step, lane). Pure, and without state: the cursor is the number of the step.

The samples of all epochs form one endless row, each epoch in its own order. Step s takes the s-th global batch of the
row, lane l the l-th micro-batch of that. So an epoch's tail is filled up with the head of the next one, no sample is
dropped, and the number of workers plays no part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from everstep.base.errors import ConfigError, check
from everstep.order.permutation import permutation

SampleId = tuple[int, int]
"""One use of one sample: (epoch, index); epochs count from 0, the index is the dataset's."""


_MOST_FOUND = 256
"""Lanes whose samples are remembered: several callers ask for the same ones, one after the other."""


LaneSamples = tuple[SampleId, ...]
"""Samples of a lane in a step; at the end of the last epoch fewer than micro_batch, or none."""


def last_step(dataset_size: int | None, global_batch: int, steps: int | None, epochs: int | None) -> int | None:
    """Number of the last step: where steps and epochs both end the job, whichever comes first. None where nothing says
    it, and for epochs of a dataset whose size is not known."""
    if epochs is None:
        return steps
    if dataset_size is None:
        return None
    last = -(-epochs * dataset_size // global_batch)
    return last if steps is None else min(steps, last)


class Order(Protocol):
    """An order of samples, as far as loading needs to know it."""

    @property
    def total_steps(self) -> int:
        """Number of the last step."""

    def samples(self, step: int, lane: int) -> LaneSamples:
        """Samples of a lane in a step; steps count from 1."""


class SampleOrder:
    """The sample order of a job.

    dataset_size: in samples. lanes, micro_batch: their product is the global batch. steps, epochs: where the job ends;
    if both are given, whichever comes first. With `steps` alone every step is full. shuffle: each epoch has an order
    that follows from the seed; otherwise the dataset's own.

    Raises: ConfigError if neither steps nor epochs is given, or the dataset is smaller than a global batch.
    """

    def __init__(
        self,
        seed: int,
        dataset_size: int,
        lanes: int,
        micro_batch: int,
        steps: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        for name, value in (("lanes", lanes), ("micro_batch", micro_batch), ("steps", steps), ("epochs", epochs)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}: raise it")
        self.seed = seed
        self.dataset_size = dataset_size
        self.lanes = lanes
        self.micro_batch = micro_batch
        self.shuffle = shuffle
        self.global_batch = lanes * micro_batch
        if dataset_size < self.global_batch:
            raise ConfigError(
                f"expected a dataset of at least one global batch, {self.global_batch} samples ({lanes} lanes x "
                f"{micro_batch}), got {dataset_size} samples: lower --batch-size (or 'lanes'), or use more data"
            )
        last = last_step(dataset_size, self.global_batch, steps, epochs)
        if last is None:
            raise ConfigError("expected 'steps' or 'epochs' to say where the job ends, got neither: set one of them")
        self.total_samples = None if epochs is None else epochs * dataset_size
        """Number of samples to use, None if only steps are limited."""
        self.total_steps = last
        """The last step."""
        self._found: dict[tuple[int, int], LaneSamples] = {}

    def samples(self, step: int, lane: int) -> LaneSamples:
        """Samples of a lane in a step; steps count from 1."""
        found = self._found.get((step, lane))
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            found = self._found[step, lane] = self._find(step, lane)
        return found

    def _find(self, step: int, lane: int) -> LaneSamples:
        check(1 <= step <= self.total_steps, f"step {step} is not in 1..{self.total_steps}")
        check(0 <= lane < self.lanes, f"lane {lane} is not in 0..{self.lanes - 1}")
        at = (step - 1) * self.global_batch + lane * self.micro_batch
        stop = at + self.micro_batch
        if self.total_samples is not None:
            stop = min(stop, self.total_samples)
        found: list[SampleId] = []
        while at < stop:
            epoch, position = divmod(at, self.dataset_size)
            last = min(self.dataset_size, position + stop - at)
            run: Iterable[int] = range(position, last)
            if self.shuffle:
                order = permutation(self.seed, epoch, self.dataset_size)
                run = order.run(position, last)
            found += [(epoch, index) for index in run]
            at += last - position
        return tuple(found)

    def samples_before(self, step: int) -> int:
        """Number of samples that all steps before this one use together."""
        used = (step - 1) * self.global_batch
        return used if self.total_samples is None else min(used, self.total_samples)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, in which a step begins."""
        return self.samples_before(step) // self.dataset_size

    def epochs_over(self, step: int) -> int:
        """Epochs that are over after a step, if it is the last one of an epoch; else 0."""
        after = self.epoch_of(step + 1)
        return after if after != self.epoch_of(step) else 0
