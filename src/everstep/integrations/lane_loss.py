"""The loss of a lane, such that a step's loss is that of a `transformers.Trainer` in one process.

There, the loss of an update is the sum over its forward passes. A loss that is told the number of items (tokens) of the
whole update divides by that; one that is not is a mean, and the Trainer divides by the number of passes. A lane knows
its own items alone: it divides by them, and they are its weight.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from everstep.base.errors import ConfigError
from everstep.exact import flags
from everstep.exact.seeding import preserve_rng
from everstep.train.run import Step

_Batch = Mapping[str, Any]

_MOST_ELEMENTS = 50_000_000
"""A model of more is tried as it is, with so many elements of its gradient, and fewer classes."""
_MOST_CLASSES = 64
_MOST_RELABELLED = 4
"""Batches with other classes, of a model of more elements."""
_CLASS_NAMES = ("labels", "label", "targets", "target", "y")
_POSITIONS = ("start_positions", "end_positions")
"""Labels that are no classes: a row must be long enough for them."""
_HALVES = (torch.bfloat16, torch.float16)
_ATTENTION = "scaled_dot_product_attention"
_KEEPERS = frozenset({list, dict, set, deque, defaultdict, OrderedDict, Counter})
"""What a loss may keep something in; a class of the user's own need not be fit to be emptied and filled again."""
_LEVELS, _MOST_KEPT = 3, 1000
"""Containers in containers are looked for so deep, and in those of no more items: larger ones hold data."""
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class LaneLoss:
    """Loss of lanes. trainer: a `transformers.Trainer`; samples: some of it; collate: makes a batch of them, on the
    device; passes: per update; shifts: the first label of a row has no prediction.

    why: why a lane has all samples of one forward pass, because its loss is no sum over items or samples, or the model
    normalises over the samples of a pass; "" if lanes can share a pass. Where it cannot be found out, a lane has all.
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
        self._shifts, self._trains, self._divided, self._partly = shifts, False, False, False
        self._large = sum(p.numel() for p in trainer.model.parameters()) > _MOST_ELEMENTS
        self.why = ""
        halves = not self._large and any(p.dtype in _HALVES for p in trainer.model.parameters())
        with preserve_rng(), _exact_products(), _as_before(trainer):
            for wide in (True, False) if halves else (False,):
                failed = self._failure(samples, collate, passes, wide=wide)
                if not failed:
                    return
            self.why = f"its loss could not be computed for other numbers of samples ({failed})"
            if passes > 1:
                self._see_division(collate(_copies(samples[: trainer.args.per_device_train_batch_size])), passes)

    @property
    def whole(self) -> bool:
        """Whether a lane has all samples of one forward pass."""
        return bool(self.why)

    def _failure(
        self, samples: Sequence[Any], collate: Callable[[Sequence[Any]], _Batch], passes: int, *, wide: bool
    ) -> str:
        """Try the loss; the kind of the error that it ended with, "" if with none. wide: on weights in float32, since
        rounding of shorter ones hides small parts of a loss."""
        try:
            with _in_float32(self._trainer.model, changes=wide):
                batch, rows, classes = self._probe(
                    samples, (lambda given: _widened(collate(given))) if wide else collate
                )
                self._trains = self._is_steady(batch)
                self._see_division(batch, passes)
                self.why = self._why_whole(batch, rows, classes, passes)
        except ConfigError:
            raise
        except Exception as error:  # of the user's collation or loss, which single samples need not suit
            return type(error).__name__
        return ""

    def _probe(
        self, samples: Sequence[Any], collate: Callable[[Sequence[Any]], _Batch]
    ) -> tuple[_Batch, list[_Batch], Mapping[str, int]]:
        """A batch of no more samples than a forward pass has, for which there is memory; its samples, each as a batch,
        none if it cannot be taken apart; and the number of classes of each kind of label."""
        rows = [collate(_copies([sample])) for sample in samples]
        classes = self._classes(rows)
        size = min(len(rows), max(2, self._trainer.args.per_device_train_batch_size))
        order = sorted(range(len(rows)), key=lambda k: _elements(rows[k]))  # the shortest and the longest are in it
        kept = [order[k * (len(rows) - 1) // max(1, size - 1)] for k in range(size)]
        samples, rows = [samples[k] for k in kept], [rows[k] for k in kept]
        batch, again = collate(_copies(samples)), collate(_copies(samples))
        if not _same(batch, again):  # the collation is random, so rows are those of one batch
            rows = _rows_of(batch, len(samples))
        return batch, rows, classes

    def _is_steady(self, batch: _Batch) -> bool:
        """Whether the model computes the same twice in train mode, so that it can be tried in that."""
        self._trains = True
        try:
            with self._mode(), torch.no_grad():
                first, second = (float(self._loss(batch, self._items(batch))) for _ in range(2))
        except Exception:  # torch's or the model's own
            return False
        return abs(first - second) <= 1e-6 * abs(first)

    def _why_whole(self, batch: _Batch, rows: Sequence[_Batch], classes: Mapping[str, int], passes: int) -> str:
        model = self._trainer.model
        if "return_loss" in inspect.signature(model.forward).parameters:
            return "this model compares the samples of a forward pass with each other"
        if passes > 1 and not self._divided:
            return "this model's loss is a mean over each forward pass"
        if self._partly:
            return "a part of this model's loss (an auxiliary one, say) is not divided by the number of items"
        with _changed(model, trains=True):
            if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
                return "this model normalises over the samples of a forward pass"
        if not rows:
            return "its batches do not have one row for each sample"
        compared = self._compared()
        cases = [(batch, rows, compared)]
        if not self._divided:  # by a number that has no weights
            most = _MOST_RELABELLED if self._large else _MOST_CLASSES
            cases.extend((*case, compared[-4:]) for case in _with_all_classes(batch, rows, classes, most))
        if all(self._adds_up(*case) for case in cases):
            return ""
        return "the loss of a forward pass is not the mean of its samples' own"

    def _classes(self, rows: Sequence[_Batch]) -> dict[str, int]:
        """Number of classes that each kind of label may be of, as far as is known."""
        own = [name for name in self._trainer.label_names or () if name not in _POSITIONS]
        known = getattr(getattr(self._trainer.model, "config", None), "num_labels", None)
        found = {}
        for name in dict.fromkeys((*_CLASS_NAMES, *own)):
            seen = [1 + int(row[name].max()) for row in rows if _is_class(row.get(name))]
            if seen:
                least = known if isinstance(known, int) and (name in _CLASS_NAMES or own == [name]) else 0
                found[name] = min(_MOST_CLASSES, max(least, *seen))
        return found

    def _compared(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are compared: the smallest come first where not all can be."""
        trained = [p for p in self._trainer.model.parameters() if p.requires_grad]
        found: set[int] = set()
        elements = 0
        for parameter in sorted(trained, key=torch.Tensor.numel):
            elements += parameter.numel()
            if found and elements > _MOST_ELEMENTS:
                break
            found.add(id(parameter))
        return [p for p in trained if id(p) in found]

    def _adds_up(self, batch: _Batch, rows: Sequence[_Batch], compared: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the loss of a batch, and its gradient, is the mean of its samples' own; not if classes have weights,
        samples are compared with each other, or are filled up to equal lengths and nothing masks that."""
        parts = [self._part(row) for row in rows]
        if len(rows) < 2 or not sum(parts):
            return True
        rest = self._slopes(batch, compared)
        limit = 0.05 if any(value.dtype in _HALVES for value in rest) else 1e-4
        scales = [torch.zeros_like(value.flatten()[0]) for value in rest]
        for row, part in zip(rows, parts, strict=True):
            for k, value in enumerate(self._slopes(row, compared) if part else ()):
                rest[k] -= value * (part / sum(parts))
                scales[k] += value.norm() * (part / sum(parts))
        far, near = [float(value.norm()) for value in rest], [float(scale) for scale in scales]
        floor = 0.01 * max(near[1:])  # a gradient may be nothing but rounding
        return far[0] <= limit * near[0] and all(
            d <= limit * (scale + floor) for d, scale in zip(far[1:], near[1:], strict=True)
        )

    def _slopes(self, batch: _Batch, compared: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """The loss of a batch, and its gradients."""
        with self._mode(), torch.enable_grad(), preserve_rng():
            loss = self._loss(batch, self._items(batch))
            slopes = torch.autograd.grad(loss, compared, allow_unused=True)
        each = (torch.zeros_like(p) if slope is None else slope for p, slope in zip(compared, slopes, strict=True))
        return [loss.detach().clone(), *(value.detach().to_dense() for value in each)]

    def _see_division(self, batch: _Batch, passes: int) -> None:
        """Find out whether the loss depends on the number of items that it is told, and whether only a part of it does.
        An honest quotient by twice the number is half of it to the last bit, in each precision.

        Raises: ConfigError if only a part of it does, so that passes do not add up."""
        items = self._items(batch)
        if not items:
            return
        found = []
        for times in (1, 2):
            with self._mode(), torch.no_grad(), preserve_rng():
                found.append(float(self._loss(batch, times * items)))
        first, second = found
        self._divided = abs(first - second) > 1e-3 * abs(first)
        self._partly = self._divided and abs(2 * second - first) > 1e-6 * abs(first)
        if self._partly and passes > 1:
            raise ConfigError(
                f"gradient_accumulation_steps: expected 1, got {passes}, because a part of this model's loss (an "
                "auxiliary one, say) is not divided by the number of items: raise per_device_train_batch_size instead"
            )

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

    def _mode(self) -> Any:
        return _changed(self._trainer.model, trains=self._trains)

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


@contextmanager
def _as_before(trainer: Any) -> Iterator[None]:
    """Afterwards, a trainer has what it had: what its loss logs is told to no callback, and what it keeps there is
    forgotten."""
    before = dict(vars(trainer))
    kept = [(value, copy.copy(value)) for value in _containers(v for k, v in before.items() if "dataset" not in k)]
    state, silent = copy.copy(trainer.state), copy.copy(trainer.callback_handler)
    vars(state).update(log_history=list(state.log_history))
    vars(silent).update(callbacks=[])
    vars(trainer).update(state=state, control=copy.copy(trainer.control), callback_handler=silent)
    try:
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(before)
        for value, copied in kept:
            _put_back(value, copied)


def _containers(values: Iterable[Any]) -> list[Any]:
    """Those among some values, and a little way in them, that can be changed in place."""
    found: dict[int, Any] = {}
    for _ in range(_LEVELS):
        new = {id(value): value for value in values if type(value) in _KEEPERS and id(value) not in found}
        found |= new
        small = [value for value in new.values() if len(value) <= _MOST_KEPT]
        values = chain.from_iterable(value.values() if isinstance(value, dict) else value for value in small)
    return list(found.values())


def _put_back(value: Any, copied: Any) -> None:
    value.clear()
    if isinstance(value, dict | set):
        value.update(copied)
    else:
        value.extend(copied)


@contextmanager
def _in_float32(model: torch.nn.Module, *, changes: bool) -> Iterator[None]:
    """A model's 16-bit weights and buffers as float32; afterwards they are as before. changes: False for no change."""
    weights = [(p, p.data) for p in model.parameters() if p.dtype in _HALVES] if changes else []
    buffers = [(module, dict(module._buffers)) for module in model.modules()] if changes else []
    try:
        for weight, value in weights:
            weight.data = value.float()
        for module, before in buffers:
            module._buffers.update(_widened(before))
        yield
    finally:
        for weight, value in weights:
            weight.data = value
        for module, before in buffers:
            module._buffers.update(before)


def _widened(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.float() if isinstance(v, torch.Tensor) and v.dtype in _HALVES else v for k, v in values.items()}


@contextmanager
def _without_dropout() -> Iterator[None]:
    """Functions of dropout, which modules of torch call, too, pass their input on."""
    before = {name: value for name, value in vars(functional).items() if name in (*_DROPOUTS, _ATTENTION)}
    attention = before[_ATTENTION]

    def passed_on(*args: Any, **named: Any) -> Any:
        return args[0] if args else named["input"]

    def undropped(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **named: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0 * dropout_p, *more, **named)

    try:
        vars(functional).update({**dict.fromkeys(_DROPOUTS, passed_on), _ATTENTION: undropped})
        yield
    finally:
        vars(functional).update(before)


@contextmanager
def _changed(model: torch.nn.Module, *, trains: bool) -> Iterator[None]:
    """All of a model in train mode, but without dropout, or in eval mode; afterwards, its modules and buffers are as
    before."""
    modes = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    recurrent = [(module, module.dropout) for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    try:
        model.train(trains)
        for module, _ in recurrent:
            vars(module).update(dropout=0.0)
        with _without_dropout() if trains else nullcontext():
            yield
    finally:
        for module, chance in recurrent:
            vars(module).update(dropout=chance)
        for each, training, buffers in modes:
            each.training = training
            each._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


@contextmanager
def _exact_products() -> Iterator[None]:
    """A GPU's products in all bits of float32: those of TF32 depend on the number of samples."""
    before = {name: value for name, value in zip(flags.NAMES, flags.read(), strict=True) if _is_of_gpu(name)}
    flags.write(dict.fromkeys(before, "ieee"))
    try:
        yield
    finally:
        flags.write(before)


def _is_of_gpu(flag: str) -> bool:
    return flag in ("cuda_matmul_fp32_precision", "cuda_conv_fp32_precision")


def _with_all_classes(
    batch: _Batch, rows: Sequence[_Batch], classes: Mapping[str, int], most: int
) -> Iterator[tuple[_Batch, Sequence[_Batch]]]:
    """The same with labels of all classes, if labels are classes: the weight of a rare one shows by its labels alone.
    The first sample is of class 0, and the others of the next ones, so that each class is compared with that one.
    most: batches for each kind of label."""
    for name, count in classes.items():
        labels: Any = batch.get(name)
        if len(rows) < 2 or not _is_class(labels) or len(labels) != len(rows):
            continue
        for first in range(1, count, len(rows) - 1)[:most]:
            each = torch.tensor([0, *((first + k) % count for k in range(len(rows) - 1))], device=labels.device)
            others = [{**row, name: _relabelled(row[name], each[k : k + 1])} for k, row in enumerate(rows)]
            yield {**batch, name: _relabelled(labels, each)}, others


def _is_class(labels: Any) -> bool:
    return (
        isinstance(labels, torch.Tensor) and labels.dtype == torch.int64 and labels.dim() > 0 and int(labels.max()) >= 0
    )


def _relabelled(labels: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    """Labels of one class for each row; negative ones stand for none."""
    return torch.where(labels < 0, labels, each.view(-1, *[1] * (labels.dim() - 1)))


def _copies(samples: Sequence[Any]) -> list[Any]:
    """Samples for one collation, which may change them."""
    try:
        return copy.deepcopy(list(samples))
    except Exception:  # of the user's own classes
        return [copy.copy(sample) for sample in samples]


def _elements(batch: _Batch) -> int:
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))


def _same(one: _Batch, other: _Batch) -> bool:
    return all(torch.equal(v, other[k]) for k, v in one.items() if isinstance(v, torch.Tensor))


def _rows_of(batch: _Batch, count: int) -> list[_Batch]:
    """The samples of a batch, each as a batch; none if it does not consist of their tensors alone."""
    if not all(isinstance(value, torch.Tensor) and value.dim() and len(value) == count for value in batch.values()):
        return []
    return [_cut({key: value[at : at + 1] for key, value in batch.items()}) for at in range(count)]


def _cut(row: _Batch) -> _Batch:
    """One sample of a batch without what fills it up."""
    mask = row.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not mask.any():
        return row
    seen = mask[0].nonzero().flatten()
    first, last = int(seen[0]), int(seen[-1]) + 1
    return {k: v[:, first:last] if v.dim() > 1 and v.shape[1] == mask.shape[1] else v for k, v in row.items()}
