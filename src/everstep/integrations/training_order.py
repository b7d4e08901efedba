"""The order of a `transformers.Trainer` in one process, as a dataset without shuffling.

All epochs follow one another. Where an epoch's last update has fewer samples than the others, the rest of its global
batch is absent, as it is there; so a position of this dataset is a sample, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset


class Absent:
    """What stands for a sample where there is none; the class itself, which survives being sent to a process."""


class TrainingOrder(Dataset[Any]):
    """Samples of all updates. batch: samples per forward pass there; accumulation: passes per update; seed: of the
    first epoch's order, None for the dataset's own."""

    def __init__(
        self, dataset: Any, batch: int, accumulation: int, seed: int | None, *, drop_last: bool = False
    ) -> None:
        self._dataset, self.seed = dataset, seed
        size = len(dataset)
        passes = size // batch if drop_last else -(-size // batch)
        self.used = min(size, passes * batch)
        """Samples of an epoch."""
        self.global_batch, self._accumulation = batch * accumulation, accumulation
        self.passes = passes
        """Forward passes of an epoch."""
        self.per_epoch = max(1, -(-passes // accumulation))
        """Updates of an epoch."""
        self.steps = 0
        self._order = -1, torch.empty(0, dtype=torch.int64)

    def end_after(self, steps: int) -> None:
        """Set the number of updates."""
        self.steps = steps

    def passes_of(self, step: int) -> int:
        """Number of forward passes in an update; updates count from 1."""
        before = (step - 1) % self.per_epoch * self._accumulation
        return min(self._accumulation, self.passes - before)

    def __len__(self) -> int:
        return self.steps * self.global_batch

    def __getitem__(self, position: int) -> Any:
        """The sample at this position of the row; `Absent` where there is none."""
        epoch, at = divmod(position, self.per_epoch * self.global_batch)
        return self._dataset[self._index(epoch, at)] if at < self.used else Absent

    def _index(self, epoch: int, at: int) -> int:
        """Source: accelerate.data_loader.SeedableRandomSampler, by which a Trainer shuffles: seed + epoch."""
        if self.seed is None:
            return at
        found = self._order  # threads may read at once
        if epoch != found[0]:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = found = epoch, torch.randperm(len(self._dataset), generator=generator)
        return int(found[1][at])


class PresentSamples:
    """Collates the samples that are there; an empty dict if none is."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        present = [sample for sample in samples if sample is not Absent]
        return self._collate(present) if present else {}
