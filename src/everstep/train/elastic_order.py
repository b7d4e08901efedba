"""Which samples make up a lane when the batch follows the number of workers (`batch: per_worker`).

The lanes stay; each takes more or fewer samples. The number of workers that counts for a step is that of the step
before, as its agree records show it, so that all workers know it; position and batch are part of the healed state.
"""

from __future__ import annotations

from typing import Any

from everstep.order.cursor import LaneSamples, SampleOrder
from everstep.order.permutation import index_at


class ElasticOrder:
    """Like `order.SampleOrder`, with a micro-batch that changes between steps.

    `base_workers` use `base_micro_batch` samples per lane; other numbers in proportion, at least 1.
    """

    def __init__(
        self,
        seed: int,
        dataset_size: int,
        lanes: int,
        base_micro_batch: int,
        base_workers: int,
        steps: int | None,
        epochs: int | None,
    ) -> None:
        self.seed = seed
        self.dataset_size = dataset_size
        self.lanes = lanes
        self.base_micro_batch = base_micro_batch
        self.base_workers = base_workers
        self.steps = steps
        self.end = None if epochs is None else epochs * dataset_size
        self.micro_batch = base_micro_batch
        self.workers = base_workers
        self.position = 0
        self.step = 0

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
        """Of a coming step, if the number of workers stays as it is."""
        first = self.position + (step - self.step - 1) * self.global_batch + lane * self.micro_batch
        last = first + self.micro_batch
        if self.end is not None:
            first, last = min(first, self.end), min(last, self.end)
        size = self.dataset_size
        indices = ((p // size, index_at(self.seed, p // size, size, p % size)) for p in range(first, last))
        return tuple(indices)

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
