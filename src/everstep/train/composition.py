"""Checks of a whole model before it is cut: do its units make it up, and how long does each of them take?

They run before the job starts, too (`look_at_split`), though the workers find the same when they cut the model: a job
that cannot work never starts. And the time of each unit must be measured in one place only, because measurements differ
and all workers must cut alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everstep.base.config import Config
from everstep.base.errors import ConfigError, EverstepError, InvariantViolation, TaskError
from everstep.data.batch import to_device
from everstep.data.loader import Recipe, fetch
from everstep.exact.buffers import BufferGuard
from everstep.exact.digest import tensor_digest
from everstep.exact.extra_state import is_extra, keepers, packed
from everstep.exact.seeding import UnitSeeder, build_seed, preserve_rng, seed_all
from everstep.exact.trees import bundle
from everstep.placement.cuts import ModelCut
from everstep.train.job_data import read_by_order
from everstep.train.model_call import EntryHolder, Loss, ModelCall, tensors_in
from everstep.train.precision import computing, prepare_torch
from everstep.train.stage import Parts, chosen_cut, refuse_hidden_ties
from everstep.train.task import Task


@dataclass(frozen=True)
class SplitFacts:
    """Facts of a split. cut: of the units, one run per part. unit_ms: of a lane, both passes; empty if not wanted."""

    cut: ModelCut
    unit_ms: tuple[float, ...] = ()


def look_at_split(task: Task) -> SplitFacts | None:
    """Check that the task can be split as its config wants; with `cut: measured`, also measure its units.

    Runs one lane of the first step, forward, in this process. None if the task's own code raises: its workers meet that
    error, too, and say where.

    Raises: ConfigError, one line, if it cannot be split.
    """
    config: Config = task.config
    device = prepare_torch(config)
    try:
        seed_all(build_seed(config.seed))
        model = task.build_model().to(device)
        units = task.units(model)
        recipe = Recipe(*read_by_order(config, task.build_dataset("train")), task.collate, config.seed)
        batch = to_device(fetch(recipe, 1, 0)[0], device)
    except Exception:
        return None
    whole = Parts(model, None, None, units)  # type: ignore[arg-type]  # nothing is trained here
    try:
        return _look(whole, task, batch, config, device)
    except ConfigError:
        raise
    except EverstepError as error:  # things that a task may do only in one piece
        raise ConfigError(f"{error}; or use stages: 1") from None
    except Exception:
        return None


def _look(whole: Parts, task: Task, batch: Any, config: Config, device: torch.device) -> SplitFacts:
    unit_ms: tuple[float, ...] = ()
    if config.cut == "measured":
        check_units(whole, task.loss, batch, config, device)  # a model that does not work cannot be measured
        unit_ms = tuple(1e3 * s for s in measure_costs(whole, task.loss, batch, config, device))
    cut = chosen_cut(config, task, whole.model, unit_ms)
    refuse_hidden_ties(whole, cut, config.stages)
    output = check_units(whole, task.loss, batch, config, device, cut)
    with ModelCall(whole.model) as call, computing(config, device, whole.units):
        call.result(task.loss, batch, lambda: output)  # as the last stage runs it, on the units' output
    return SplitFacts(cut, unit_ms)


def check_units(
    whole: Parts, loss: Loss, batch: Any, config: Config, device: torch.device, cut: Sequence[tuple[int, int]] = ()
) -> Any:
    """Check that the units, one after the other, are the model's whole forward pass: same output, same buffers,
    bitwise.

    whole: before it is cut, in training mode; it is left as it was. batch: of one lane. cut: where it will be cut; then
    no unit may use a parameter of another part that is not among its own, and the output there must be one that can be
    handed on. Returns the output.

    Raises: ConfigError if they are not. TaskError if the loss does something that cannot be split; errors of the model
    itself.
    """
    with preserve_rng(), _guarded(whole.model) as guard:
        args, kwargs = _lane_of(whole, loss, batch)

        def outcome_of(forward: Callable[..., Any]) -> tuple[Any, list[tuple[str, str]], dict[str, str]]:
            guard.begin_lane()
            seeder = UnitSeeder(whole.units, config.seed)
            try:
                seeder.begin_lane(0, 0)
                with computing(config, device, whole.units):
                    output = forward(*args, **kwargs)
            finally:
                seeder.end_lane()
                seeder.close()
            buffers = {name: tensor_digest(b) for name, b in _kept_by(whole.model)}
            return output, list(_facts(output, "output")), buffers

        chain = _Chain(whole.units, cut, config.stages)
        output, units, unit_buffers = outcome_of(chain)
        _, model, model_buffers = outcome_of(whole.model)
        guard.begin_lane()
        _refuse_outside(whole, model_buffers)
    if model == units and model_buffers == unit_buffers:
        _refuse_hidden_uses(whole, chain.used, cut)
        return output
    where = next(
        (a[0] for a, b in zip(model, units, strict=False) if a != b), "output" if model != units else "buffers"
    )
    raise ConfigError(
        f"units: applied one after the other, x = unit(x), they must be the model's whole forward pass to the bit, but "
        f"{where} differs; let model.forward itself call the units (they are seeded apart), in order, or use stages: 1"
    )


def measure_costs(whole: Parts, loss: Loss, batch: Any, config: Config, device: torch.device) -> list[float]:
    """Seconds that each unit takes for one lane, forward and backward; the median of three times.

    whole: before it is cut; it is left as it was. For choosing a cut, at one place: no two machines measure the same.
    """
    with preserve_rng(), _guarded(whole.model) as guard:
        args, kwargs = _lane_of(whole, loss, batch)
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
        with computing(config, device, [unit]):
            out = unit(*args, **kwargs) if k == 0 else unit(x)
        if k == len(units) - 1:
            _backward(tensors_in(out))
            return [*seconds, _now(device) - begin]
        parcel = bundle(out, lambda k=k: f"the output of unit {k}")  # type: ignore[misc]
        _backward(parcel.tensors)
        seconds.append(_now(device) - begin)
        _, x = EntryHolder.enter(parcel, [t.detach() for t in parcel.tensors])
    return seconds


def _backward(tensors: Iterable[Tensor]) -> None:
    roots = [t for t in tensors if t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Chain:
    """The units one after the other. used: for each unit the parameters in its part of autograd's graph.

    cut: where the model will be cut, if it is known by now.
    """

    def __init__(self, units: Sequence[nn.Module], cut: Sequence[tuple[int, int]], stages: int) -> None:
        self._units = units
        self._stage_of = {unit: part % stages for part, run in enumerate(cut) for unit in range(*run)}
        self._ends = {last - 1 for _, last in cut[:-1]}
        self.used: list[list[Tensor]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = None
        for k, unit in enumerate(self._units):
            before_it = {t.grad_fn for t in tensors_in(x) if t.grad_fn is not None}
            came_in = _shapes(x if k else (args, kwargs))
            try:
                x = unit(x) if k else unit(*args, **kwargs)
            except (EverstepError, InvariantViolation):
                raise
            except Exception as error:
                came = f"what {self._name(k - 1)} returns" if k else "what the loss calls the model with"
                raise ConfigError(
                    f"units: {self._name(k)} cannot work on {came} ({came_in}): {type(error).__name__}: "
                    f"{str(error).partition(chr(10))[0]}; applied one after the other, x = unit(x), the units must be "
                    "the model's whole forward pass: correct the model or its units, or use stages: 1"
                ) from error
            self.used.append(_leaves_behind(x, before_it))
            if k in self._ends:
                self._check_cut(k, x)
        return x

    def _check_cut(self, k: int, x: Any) -> None:
        try:
            bundle(x, lambda: f"units: the output of {self._name(k)}")
        except TaskError as error:
            raise ConfigError(f"{error}; return such a thing, or cut the model elsewhere") from None

    def _name(self, k: int) -> str:
        stage = f" of stage {self._stage_of[k]}" if self._stage_of else ""
        return f"unit {k} ({type(self._units[k]).__name__}){stage}"


def _shapes(tree: Any) -> str:
    """Short description of a tree of tensors: float32 [4, 8], int64 [4]."""
    found = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors_in(tree)]
    return ", ".join(found[:4]) + (", ..." if len(found) > 4 else "") or type(tree).__name__


def _lane_of(whole: Parts, loss: Loss, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with which the loss calls the model."""
    with ModelCall(whole.model) as call:
        return call.arguments(loss, batch)


@contextmanager
def _guarded(model: nn.Module) -> Iterator[BufferGuard]:
    guard = BufferGuard(model)
    guard.begin_step(0)
    try:
        yield guard
    finally:
        guard.abandon()


def _refuse_outside(whole: Parts, after: Mapping[str, str]) -> None:
    inside = {id(b) for unit in whole.units for b in (*unit.buffers(), *unit.modules())}
    apart = {name for name, module in keepers(whole.model) if id(module) not in inside}
    apart |= {name for name, buffer in whole.model.named_buffers() if id(buffer) not in inside}
    for name, buffer in _kept_by(whole.model):
        if name in apart and tensor_digest(buffer) != after[name]:
            kind = "extra state" if is_extra(name) else "buffer"
            raise ConfigError(
                f"{kind} {name} lies outside all units and changes in the forward pass; with stages, Task.units must "
                "hold it, or use stages: 1"
            )


def _kept_by(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers and extra state, by name."""
    yield from model.named_buffers()
    yield from ((name, packed(name, module)) for name, module in keepers(model))


def _leaves_behind(tree: Any, stop: set[Any]) -> list[Tensor]:
    """Leaves that a unit's output depends on, without those of its input (`stop`: where that was made)."""
    seen = set(stop)
    waiting = [t.grad_fn for t in tensors_in(tree) if t.grad_fn is not None and t.grad_fn not in seen]
    found: list[Tensor] = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [after for after, _ in node.next_functions if after is not None and after not in seen]
    return found


def _refuse_hidden_uses(whole: Parts, used: Sequence[Sequence[Tensor]], cut: Sequence[tuple[int, int]]) -> None:
    part_of = {unit: part for part, run in enumerate(cut) for unit in range(*run)}
    home = {id(p): number for number in reversed(range(len(whole.units))) for p in whole.units[number].parameters()}
    names = {id(p): name for name, p in whole.model.named_parameters()}
    for number, found in enumerate(used):
        own = {id(p) for p in whole.units[number].parameters()}
        for leaf in found:
            at = home.get(id(leaf))
            if at is not None and id(leaf) not in own and part_of.get(at) != part_of.get(number):
                kind = type(whole.units[number]).__name__
                raise ConfigError(
                    f"unit {number} ({kind}) uses parameter {names[id(leaf)]} of unit {at}, which comes to another "
                    "stage, without having it as its own: register it in both (self.weight = other.weight), or cut the "
                    "model where both are in one stage"
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
