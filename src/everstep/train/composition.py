"""Looking at a whole model before it is cut: do its units make it up, and how long does each of them take?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.exact.buffers import BufferGuard
from everstep.exact.digest import tensor_digest
from everstep.exact.seeding import UnitSeeder, preserve_rng
from everstep.exact.trees import bundle
from everstep.train.model_call import EntryHolder, Loss, ModelCall
from everstep.train.parts import Parts
from everstep.train.precision import autocast


def check_units(whole: Parts, loss: Loss, batch: Any, config: Config, device: torch.device) -> None:
    """See that the units, one after the other, are the model's whole forward pass: same output, same buffers, bitwise.

    whole: before it is cut, in training mode; it is left as it was. batch: of one lane.

    Raises: ConfigError if they are not. TaskError if the loss does what cannot be split.
    """
    outcomes = []
    with preserve_rng(), _lane_of(whole, loss, batch) as (args, kwargs), _guarded(whole.model) as guard:
        for through in (whole.model, _Chain(whole.units)):
            guard.begin_lane()
            seeder = UnitSeeder(whole.units, config.seed)
            try:
                seeder.begin_lane(0, 0)
                with autocast(config.precision, device):
                    output = through(*args, **kwargs)
            finally:
                seeder.end_lane()
                seeder.close()
            buffers = {name: tensor_digest(b) for name, b in whole.model.named_buffers()}
            outcomes.append((list(_facts(output, "output")), buffers))
            del output
        guard.begin_lane()
        _refuse_outside(whole, outcomes[0][1])
    (model, model_buffers), (chain, chain_buffers) = outcomes
    if model == chain and model_buffers == chain_buffers:
        return
    where = next(
        (a[0] for a, b in zip(model, chain, strict=False) if a != b), "output" if model != chain else "buffers"
    )
    raise ConfigError(
        f"units: applied one after the other, x = unit(x), they must be the model's whole forward pass to the bit, but "
        f"{where} differs; let model.forward itself call the units (they are seeded apart), in order, or use stages: 1"
    )


def measure_costs(whole: Parts, loss: Loss, batch: Any, config: Config, device: torch.device) -> list[float]:
    """Seconds that each unit takes for one lane, forward and backward; the median of three times.

    whole: before it is cut; it is left as it was. For choosing a cut, at one place: no two machines measure the same.
    """
    with preserve_rng(), _lane_of(whole, loss, batch) as (args, kwargs), _guarded(whole.model) as guard:
        runs = []
        for _ in range(3):
            guard.begin_lane()
            runs.append(_time_units(whole.units, args, kwargs, config, device))
        for parameter in whole.model.parameters():
            parameter.grad = None
        guard.begin_lane()
    return [statistics.median(seconds) for seconds in zip(*runs, strict=True)]


def _time_units(
    units: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any], config: Config, device: torch.device
) -> list[float]:
    seconds: list[float] = []
    x: Any = None
    for k, unit in enumerate(units):
        begin = _now(device)
        with autocast(config.precision, device):
            out = unit(*args, **kwargs) if k == 0 else unit(x)
        if k == len(units) - 1:
            roots = [t for t in _tensors(out) if t.requires_grad]
            _backward(roots)
            return [*seconds, _now(device) - begin]
        parcel = bundle(out, lambda k=k: f"the output of unit {k}")  # type: ignore[misc]
        _backward([t for t in parcel.tensors if t.requires_grad])
        seconds.append(_now(device) - begin)
        wanted = parcel.wants_gradient
        entered = iter(EntryHolder([t.detach() for t, w in zip(parcel.tensors, wanted, strict=True) if w]).enter())
        x = parcel.tree([next(entered) if w else t for t, w in zip(parcel.tensors, wanted, strict=True)])
    return seconds


def _backward(roots: Sequence[Tensor]) -> None:
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Chain:
    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._units = units

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = self._units[0](*args, **kwargs)
        for unit in self._units[1:]:
            x = unit(x)
        return x


@contextmanager
def _lane_of(whole: Parts, loss: Loss, batch: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the loss calls the model with."""
    call = ModelCall(whole.model)
    try:
        arguments = call.arguments(loss, batch)
    finally:
        call.release()
    yield arguments


@contextmanager
def _guarded(model: nn.Module) -> Iterator[BufferGuard]:
    guard = BufferGuard(model)
    guard.begin_step(0)
    try:
        yield guard
    finally:
        guard.abandon()


def _refuse_outside(whole: Parts, after: Mapping[str, str]) -> None:
    inside = {id(b) for unit in whole.units for b in unit.buffers()}
    for name, buffer in whole.model.named_buffers():
        if id(buffer) not in inside and tensor_digest(buffer) != after[name]:
            raise ConfigError(
                f"buffer {name} lies outside all units and changes in the forward pass; with stages, Task.units must "
                "hold it, or use stages: 1"
            )


def _facts(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Tensor):
        yield path, tensor_digest(tree)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _facts(value, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for key, value in enumerate(tree):
            yield from _facts(value, f"{path}[{key}]")
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _facts(getattr(tree, field.name), f"{path}.{field.name}")
    else:
        yield path, repr(tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
