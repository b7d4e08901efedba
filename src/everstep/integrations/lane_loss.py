"""The loss of a lane, such that a step's loss is that of a `transformers.Trainer` in one process.

There, the loss of an update is the sum over its forward passes. A loss that is told the number of items (tokens) of the
whole update divides by that; one that is not is a mean, and the Trainer divides by the number of passes. A lane knows
its own items alone: it divides by them, and they are its weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from everstep.base.errors import ConfigError
from everstep.exact.seeding import preserve_rng
from everstep.exact.settings import evaluating
from everstep.train.run import Step

_Batch = Mapping[str, Any]


class LaneLoss:
    """Loss of lanes. trainer: a `transformers.Trainer`; samples: some of it; collate: makes a batch of them, on the
    device; passes: per update; shifts: the first label of a row has no prediction.

    whole: a lane has all samples of one forward pass, because its loss is no sum over items or samples, or the model
    normalises over the samples of a pass.
    """

    def __init__(
        self,
        trainer: Any,
        samples: Sequence[Any],
        collate: Callable[[Sequence[Any]], _Batch],
        passes: int,
        shifts: bool,
    ) -> None:
        self._trainer = trainer
        told = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        self._told = told if trainer.loss_is_scaled_for_ga is None else bool(trainer.loss_is_scaled_for_ga)
        contrasts = "return_loss" in inspect.signature(trainer.model.forward).parameters
        self._shifts = shifts
        with preserve_rng():
            batch, again = collate(samples), collate(samples)
            rows = [collate([sample]) for sample in samples]
        if not _same(batch, again):  # the collation is random, so rows are those of one batch
            rows = _rows_of(batch, len(samples))
        self._divided = self._divides(batch, passes)
        self.whole = (
            contrasts
            or (passes > 1 and not self._divided)
            or any(isinstance(module, _BatchNorm) for module in trainer.model.modules())
            or not all(self._adds_up(*case) for case in ((batch, rows), *self._with_all_classes(batch, rows)))
        )

    def _with_all_classes(self, batch: _Batch, rows: Sequence[_Batch]) -> Iterator[tuple[_Batch, Sequence[_Batch]]]:
        """The same with labels of all classes, if labels are classes: weights of rare ones show by them alone."""
        labels, classes = batch.get("labels"), getattr(getattr(self._trainer.model, "config", None), "num_labels", 0)
        if not isinstance(labels, torch.Tensor) or labels.dtype != torch.int64 or not 0 <= int(labels.max()) < classes:
            return

        def other(labels: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            by = by.to(labels.device).view(-1, *[1] * (labels.dim() - 1))
            return torch.where(labels < 0, labels, (labels + by) % classes)

        every = torch.arange(len(rows))
        others = [{**row, "labels": other(row["labels"], every[k : k + 1])} for k, row in enumerate(rows)]
        yield {**batch, "labels": other(labels, every)}, others

    def _adds_up(self, batch: _Batch, rows: Sequence[_Batch]) -> bool:
        """Whether the loss of a batch, and its gradient, is the mean of its samples' own; not if classes have weights,
        samples are compared with each other, or are filled up to equal lengths and nothing masks that."""
        if len(rows) < 2:
            return True
        parts = [self._part(row) for row in rows]
        whole = self._slope(batch)
        if whole is None or not sum(parts):
            return True
        coarse = self._trainer.args.bf16 or self._trainer.args.fp16 or whole[1].dtype in (torch.bfloat16, torch.float16)
        means, scales = [torch.zeros_like(value) for value in whole], [0.0, 0.0]
        for row, part in zip(rows, parts, strict=True):
            for k, value in enumerate((self._slope(row) if part else None) or ()):
                means[k] += value * (part / sum(parts))
                scales[k] += float(value.norm()) * part / sum(parts)
        far = [float((mean - value).norm()) for mean, value in zip(means, whole, strict=True)]
        return all(d <= (0.05 if coarse else 1e-4) * scale for d, scale in zip(far, scales, strict=True))

    def _slope(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The loss of a batch, and its gradient by the last matrix that it depends on."""
        trained = reversed([p for p in self._trainer.model.parameters() if p.requires_grad])
        with evaluating(self._trainer.model), torch.enable_grad(), preserve_rng():
            loss = self._loss(batch, self._items(batch))
            for parameter in sorted(trained, key=lambda p: p.dim() < 2):
                (slope,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
                if slope is not None:
                    return loss.detach(), slope
        return None

    def _divides(self, batch: _Batch, passes: int) -> bool:
        """Whether the loss depends on the number of items that it is told. Raises: ConfigError if only a part of it
        does, so that passes do not add up."""
        items = self._items(batch)
        if not items:
            return False
        with evaluating(self._trainer.model), torch.no_grad(), preserve_rng():
            first, second = (float(self._loss(batch, n * items)) for n in (1, 2))
        divides = abs(first - second) > 1e-3 * abs(first)
        if divides and passes > 1 and abs(2 * second - first) > 0.01 * abs(first):
            raise ConfigError(
                f"gradient_accumulation_steps: expected 1, got {passes}, because a part of this model's loss (an "
                "auxiliary one, say) is not divided by the number of items: raise per_device_train_batch_size instead"
            )
        return divides

    def _items(self, batch: Mapping[str, Any]) -> int | None:
        """Number of the batch's items; None where the loss is not told it."""
        counted = self._trainer._get_num_items_in_batch([batch], self._trainer.args.device) if self._told else None
        return None if counted is None else int(counted)

    def _loss(self, batch: Mapping[str, Any], items: int | None) -> torch.Tensor:
        trainer = self._trainer
        inputs = trainer._prepare_inputs(dict(batch))
        with trainer.compute_loss_context_manager():
            found: torch.Tensor = trainer.compute_loss(
                trainer.model, inputs, num_items_in_batch=None if items is None else max(1, items)
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
        if self.whole and not self._divided:
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


def _same(one: _Batch, other: _Batch) -> bool:
    return all(torch.equal(v, other[k]) for k, v in one.items() if isinstance(v, torch.Tensor))


def _rows_of(batch: _Batch, count: int) -> list[_Batch]:
    """The samples of a batch, each as a batch; none if it does not consist of their tensors alone."""
    if not all(isinstance(value, torch.Tensor) and value.dim() and len(value) == count for value in batch.values()):
        return []
    return [{key: value[at : at + 1] for key, value in batch.items()} for at in range(count)]
