"""Batch and learning rate that follow the number of workers (`batch: per_worker`). This voids exactness.

By default nothing does: the global batch is constant. With it the lanes stay, and each takes more or fewer samples.
The number of workers that counts for a step is that of the step before, as its agree records show it, so that all
workers know it; position, batch and learning rate are part of the healed state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.data.stream import StreamReader
from everstep.order.cursor import LaneSamples, SampleId, SampleOrder
from everstep.order.permutation import MAX_SIZE, index_at


@dataclass(eq=False)
class ElasticOrder:
    """Like `order.SampleOrder`, with a micro-batch that changes between steps.

    `base_workers` use `base_micro_batch` samples per lane; other numbers in proportion, at least 1.
    """

    seed: int
    dataset_size: int
    lanes: int
    base_micro_batch: int
    base_workers: int
    steps: int | None
    epochs: int | None
    shuffle: bool = True
    position: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.end = None if self.epochs is None else self.epochs * self.dataset_size
        self.micro_batch = self.base_micro_batch
        self.workers = self.base_workers

    @property
    def global_batch(self) -> int:
        return self.lanes * self.micro_batch

    @property
    def total_steps(self) -> int:
        """The last step, as things are now."""
        if self.end is None:
            return self.steps or 0
        left = self.step + -(-max(0, self.end - self.position) // self.global_batch)
        return left if self.steps is None else min(left, self.steps)

    def samples(self, step: int, lane: int) -> LaneSamples:
        """Samples of a coming step, if the number of workers stays as it is."""
        first = self.position + (step - self.step - 1) * self.global_batch + lane * self.micro_batch
        last = first + self.micro_batch
        if self.end is not None:
            first, last = min(first, self.end), min(last, self.end)
        return tuple(self._sample(position) for position in range(first, last))

    def _sample(self, position: int) -> SampleId:
        epoch, at = divmod(position, self.dataset_size)
        return epoch, index_at(self.seed, epoch, self.dataset_size, at) if self.shuffle else at

    def advance(self, step: int, samples: int, workers: int) -> None:
        """A step has been applied that used this many samples and was computed by this many workers."""
        self.step = step
        self.position += samples
        self.workers = workers
        self.micro_batch = max(1, round(self.base_micro_batch * workers / self.base_workers))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "position": self.position, "workers": self.workers, "micro": self.micro_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.position = int(state["step"]), int(state["position"])
        self.workers, self.micro_batch = int(state["workers"]), int(state["micro"])


AnyOrder = SampleOrder | ElasticOrder


def sample_order(config: Config, dataset: Any) -> AnyOrder:
    """Which samples make up a lane, as the config's `batch` says; those of a stream in the order in which they come.

    Raises: ConfigError if the dataset has no length, or is smaller than a global batch."""
    if isinstance(dataset, StreamReader):
        return _stream_order(config, dataset)
    try:
        size = len(dataset)
    except TypeError:
        kind = type(dataset).__name__
        raise ConfigError(f"the dataset must be map-style, with __len__ and __getitem__; got {kind}") from None
    length = config.steps, config.epochs, config.shuffle
    order = SampleOrder(config.seed, size, config.lanes, config.micro_batch, *length)
    if config.batch == "per_worker":
        if config.loader.workers:
            raise ConfigError(
                f"batch: per_worker changes the lanes during the run, so it needs loader.workers=0, "
                f"got {config.loader.workers}"
            )
        return ElasticOrder(config.seed, size, config.lanes, config.micro_batch, config.workers, *length)
    return order


def _stream_order(config: Config, reader: StreamReader) -> SampleOrder:
    if config.batch == "per_worker":
        raise ConfigError(
            f"batch: per_worker needs a map-style dataset, got the stream {reader.stream.name}: use batch=constant"
        )
    # Nobody knows the length only if steps end the job, or in a rehearsal, which ends by itself.
    size = MAX_SIZE if reader.stream.size is None else reader.stream.size
    steps = MAX_SIZE if config.steps is None and reader.stream.size is None else config.steps
    epochs = None if reader.stream.size is None else config.epochs
    return SampleOrder(config.seed, size, config.lanes, config.micro_batch, steps, epochs, False)


@dataclass(eq=False)
class LrPolicy:
    """The factor on the scheduled learning rate.

    rule: 'none' (1), 'linear' (batch ratio) or 'sqrt'. The factor moves linearly from its old to its new value over
    `warmup_steps` updates after a change.
    Source: linear rule and gradual warm-up, Goyal et al. (2017), sections 2.1 and 2.2; square root, Krizhevsky (2014).
    """

    rule: str
    base_workers: int
    warmup_steps: int
    begin: float = 1.0
    target: float = 1.0
    since: int = 0

    def __post_init__(self) -> None:
        self.workers = self.base_workers

    def advance(self, workers: int) -> float:
        """One update made with this many workers; returns the factor for it."""
        if workers != self.workers:
            along = min(1.0, self.since / self.warmup_steps) if self.warmup_steps > 0 else 1.0
            self.begin += (self.target - self.begin) * along
            ratio = workers / self.base_workers
            self.target = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.rule]
            self.workers, self.since = workers, 0
        self.since += 1
        if self.since > self.warmup_steps:
            return self.target
        return self.begin + (self.target - self.begin) * self.since / self.warmup_steps

    def state_dict(self) -> dict[str, Any]:
        return {"workers": self.workers, "begin": self.begin, "target": self.target, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.workers, self.since = int(state["workers"]), int(state["since"])
        self.begin, self.target = float(state["begin"]), float(state["target"])
