"""The loss of a lane, such that a step's loss is that of a `transformers.Trainer` in one process.

There, the loss of an update is the sum over its forward passes. A loss that is told the number of items (tokens) of the
whole update divides by that; one that is not is a mean, and the Trainer divides by the number of passes. A lane knows
its own items alone: it divides by them, and they are its weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from everstep.exact.seeding import preserve_rng
from everstep.exact.settings import evaluating
from everstep.train.run import Step

_MOST_ROWS = 16


class LaneLoss:
    """Loss of lanes. trainer: a `transformers.Trainer`; first: its first batch, collated; passes: per update; shifts:
    the first label of a row has no prediction.

    whole: a lane has all samples of one forward pass, because its loss is no sum over items or samples.
    """

    def __init__(self, trainer: Any, first: Mapping[str, Any], passes: int, shifts: bool) -> None:
        self._trainer = trainer
        told = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        self._told = told if trainer.loss_is_scaled_for_ga is None else bool(trainer.loss_is_scaled_for_ga)
        contrasts = "return_loss" in inspect.signature(trainer.model.forward).parameters
        self._shifts = shifts
        self._divided = self._divides(first)
        self.whole = contrasts or (passes > 1 and not self._divided) or not self._adds_up(first)

    def _adds_up(self, batch: Mapping[str, Any]) -> bool:
        """Whether the loss of a batch is the mean of its samples' losses; not if classes have weights, or samples are
        compared with each other."""
        size = min(len(next(iter(batch.values()), ())), _MOST_ROWS)
        if size < 2 or not all(isinstance(value, torch.Tensor) and value.dim() for value in batch.values()):
            return True
        rows = [{key: value[at : at + 1] for key, value in batch.items()} for at in range(size)]
        with evaluating(self._trainer.model), torch.no_grad(), preserve_rng():
            weights = [self._part(row) for row in rows]
            found = sum(
                float(self._loss(row, self._items(row))) * weight for row, weight in zip(rows, weights, strict=True)
            )
            together = {key: value[:size] for key, value in batch.items()}
            whole = float(self._loss(together, self._items(together)))
        coarse = self._trainer.args.bf16 or self._trainer.args.fp16
        return not sum(weights) or not abs(found / sum(weights) - whole) > (0.05 if coarse else 1e-3) * abs(whole)

    def _divides(self, batch: Mapping[str, Any]) -> bool:
        """Whether the loss depends on the number of items that it is told."""
        items = self._items(batch)
        if not items:
            return False
        with evaluating(self._trainer.model), torch.no_grad(), preserve_rng():
            first, second = (self._loss(batch, n * items) for n in (1, 2))
        return bool((first - second).abs() > 1e-3 * first.abs())

    def _items(self, batch: Mapping[str, Any]) -> int | None:
        """Number of the batch's items; None where the loss is not told it."""
        counted = self._trainer._get_num_items_in_batch([batch], self._trainer.args.device) if self._told else None
        return None if counted is None else int(counted)

    def _loss(self, batch: Mapping[str, Any], items: int | None) -> torch.Tensor:
        trainer = self._trainer
        with trainer.compute_loss_context_manager():
            found: torch.Tensor = trainer.compute_loss(
                trainer.model, dict(batch), num_items_in_batch=None if items is None else max(1, items)
            )
        return found

    def backward(self, step: Step, batch: Mapping[str, Any], passes: int) -> None:
        """Loss and gradient of a lane. batch: empty if no sample of it is present; passes: of this update."""
        if not batch:
            parameter = next(p for p in self._trainer.model.parameters() if p.requires_grad)
            step.backward(parameter.flatten()[0] * 0.0, weight=0.0)
            return
        items = self._items(batch)
        loss = self._loss(batch, items)
        if self.whole:
            summed = items is not None or (self._told and self._trainer.compute_loss_func is not None)
            step.backward(loss * passes if summed else loss, weight=1.0)
            return
        weight = self._part(batch)
        step.backward(loss * weight if weight else torch.nan_to_num(loss) * 0.0, weight=float(weight))

    def _part(self, batch: Mapping[str, Any]) -> int:
        """What a lane's loss counts in the mean over all lanes."""
        items = self._items(batch)
        return items if self._divided and items is not None else self._weight(batch)

    def _weight(self, batch: Mapping[str, Any]) -> int:
        """Number of labels that a mean is taken over; of samples without labels."""
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor):
            return int((labels[..., 1:] if self._shifts else labels).ne(-100).sum())
        return len(next(iter(batch.values())))
