"""Cutting a model up: from everything that is trained to what one stage of the job trains.

The whole model is built first, in the same way by everybody, so every stage begins with the very bits of the unsplit
job; then what belongs to other stages is dropped, and its memory with it. Names stay those of the whole model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.exact.layout import GradientLayout, align_parameters, untie
from everstep.exact.reduce import Tied, TiePlace
from everstep.exact.state import Share
from everstep.placement.cuts import ModelCut
from everstep.train.calling import calling
from everstep.train.composition import check_units
from everstep.train.meta_init import build_by_module
from everstep.train.model_call import Loss
from everstep.train.parts import Parts, StageSpec
from everstep.train.replica import StageReplica, make_replica
from everstep.train.task import Task


def build_stages(
    make: Callable[[], Parts],
    cut: ModelCut,
    stages: int,
    wanted: Iterable[int],
    *,
    config: Config,
    device: torch.device,
    loss: Loss,
    batch: Any = None,
) -> dict[int, StageReplica]:
    """The wanted stages of a job, each with a model, an optimizer and a scheduler of its own.

    make: builds all of it from the build seed, the same each time; called once per wanted stage. cut: of the units,
    one run per part. batch: of one lane; if given, the units are first compared with the model's own forward pass.

    Raises: ConfigError for a model that cannot be cut like this.
    """
    replicas: dict[int, StageReplica] = {}
    for stage in wanted:
        parts = make()
        if len(cut) == 1:
            replicas[stage] = make_replica(parts, config, device)
            continue
        if batch is not None:
            check_units(parts, loss, batch, config, device, cut)
            batch = None
        parts, spec = cut_out(parts, cut, stages, stage)
        replicas[stage] = StageReplica(parts, config, device, spec, loss)
    return replicas


def build_model(
    task: Task, config: Config, device: torch.device, wanted: Iterable[int] | None = None
) -> tuple[nn.Module, list[nn.Module]]:
    """The task's model and its units; with `meta_init` made module by module, and only the units `wanted`."""
    if config.meta_init:
        return build_by_module(
            lambda: calling(task, "build_model"), lambda m: calling(task, "units", m), config.seed, device, wanted
        )
    model = calling(task, "build_model").to(device)
    return model, calling(task, "units", model)


def cut_out(whole: Parts, cut: ModelCut, stages: int, stage: int) -> tuple[Parts, StageSpec]:
    """What one stage trains. `whole` is used up: what is not the stage's is dropped.

    Raises: ConfigError for more parts than units, or parameters that are shared in a way that cannot be cut.
    """
    n_units = len(whole.units)
    if len(cut) > n_units or cut[-1][1] != n_units:
        raise ConfigError(
            f"stages: expected a cut of the model's {n_units} units, got {len(cut)} parts that end with unit "
            f"{cut[-1][1] - 1}: use at most {n_units} parts, or let Task.units name finer units"
        )
    spec = StageSpec(stage, stages, tuple(cut))
    stage_of = _stage_of(cut, stages)
    names = _first_names(whole.model)
    refuse_hidden_ties(whole, cut, stages)
    untie(whole.model, whole.units)
    align_parameters(whole.model)
    leaves = _leaves(whole.units)
    own = spec.units
    foreign = {
        names[id(places[0][1])]: places[0][1]
        for places in leaves
        if stage_of[places[0][0]] != stage and any(stage_of[unit] == stage for unit, _ in places)
    }
    shared = [places for places in leaves if {stage_of[unit] for unit, _ in places} - {stage} and len(places) > 1]
    ties = [
        (names[id(places[0][1])], places)
        for places in shared
        if any(stage_of[unit] == stage for unit, _ in places) and places[0][1].requires_grad
    ]
    units = [whole.units[k] for k in own]
    _drop_foreign(whole, units, foreign.values())
    positions = _filter_optimizer(whole, {id(p) for p in (*whole.model.parameters(), *foreign.values())})
    share = Share(own, n_units, foreign, positions)
    parts = Parts(whole.model, whole.optimizer, whole.scheduler, units, whole.extras)
    layout = GradientLayout.build(whole.model, units)
    spec = StageSpec(stage, stages, tuple(cut), _tied(ties, whole.model, layout, stage_of), share)
    gc.collect()
    return parts, spec


def _stage_of(cut: ModelCut, stages: int) -> dict[int, int]:
    return {unit: part % stages for part, run in enumerate(cut) for unit in range(*run)}


_Leaves = list[tuple[int, nn.Parameter]]
"""The leaves of one parameter: (unit, leaf) per place of use, in unit order."""


@dataclass(frozen=True)
class _Holder:
    """Where a tensor is registered. unit: -1 outside all units."""

    tensor: Tensor
    name: str
    unit: int


def _leaves(units: Sequence[nn.Module]) -> list[_Leaves]:
    """Of every parameter in the units, after `untie`."""
    found: dict[tuple[Any, ...], _Leaves] = {}
    for number, unit in enumerate(units):
        for parameter in unit.parameters():
            storage = parameter.untyped_storage()._cdata  # also of one on the meta device
            key = (storage, parameter.storage_offset(), tuple(parameter.shape), parameter.stride())
            found.setdefault(key if parameter.numel() else (id(parameter),), []).append((number, parameter))
    return list(found.values())


def _first_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _holders(whole: Parts) -> list[_Holder]:
    unit_of: dict[int, int] = {}
    for number, unit in enumerate(whole.units):
        for module in unit.modules():
            unit_of.setdefault(id(module), number)
    return [
        _Holder(tensor, f"{prefix}.{attribute}" if prefix else attribute, unit_of.get(id(module), -1))
        for prefix, module in whole.model.named_modules()
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]


def refuse_hidden_ties(whole: Parts, cut: ModelCut, stages: int) -> None:
    """See that memory which several stages would write to is one Parameter object, so that everybody sees the tie.

    Raises: ConfigError naming both places.
    """
    stage_of = _stage_of(cut, stages)
    spans: list[tuple[int, int, _Holder]] = []
    outside = {id(h.tensor) for h in _holders(whole) if h.unit < 0}
    for holder in _holders(whole):
        tensor = holder.tensor
        if holder.unit >= 0 and id(tensor) in outside:
            raise ConfigError(
                f"{holder.name} is used by unit {holder.unit} and outside all units; with stages, Task.units must hold "
                "all places where it is used"
            )
        if tensor.numel() and not tensor.is_meta:
            size = 1 + sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + size * tensor.element_size(), holder))
    spans.sort(key=lambda span: span[:2])
    active: list[tuple[int, _Holder]] = []
    for start, stop, holder in spans:
        active = [(end, other) for end, other in active if end > start]
        for _, other in active:
            if not _may_share(other, holder, stage_of):
                raise ConfigError(
                    f"{other.name} (unit {other.unit}, stage {stage_of.get(other.unit, '?')}) and {holder.name} (unit "
                    f"{holder.unit}, stage {stage_of.get(holder.unit, '?')}) share memory and would come to different "
                    "stages; make them one nn.Parameter, or cut the model where both are in one stage"
                )
        active.append((stop, holder))
    _refuse_late_names(_holders(whole))


def _refuse_late_names(holders: Sequence[_Holder]) -> None:
    first: dict[int, _Holder] = {}
    for holder in holders:
        earlier = first.setdefault(id(holder.tensor), holder)
        if holder.unit < earlier.unit:
            raise ConfigError(
                f"{earlier.name} in unit {earlier.unit} is tied to {holder.name} in unit {holder.unit}, which comes "
                "first in the forward pass but later in the model; register the modules in the order of the units"
            )


def _may_share(a: _Holder, b: _Holder, stage_of: Mapping[int, int]) -> bool:
    if a.unit < 0 and b.unit < 0:
        return True
    same = stage_of.get(a.unit) == stage_of.get(b.unit)
    return same or (a.tensor is b.tensor and isinstance(a.tensor, nn.Parameter))


def _drop_foreign(whole: Parts, units: Sequence[nn.Module], kept_tensors: Iterable[Tensor]) -> None:
    """Other stages' modules become None in their parents, and give their memory back."""
    own = {id(m) for unit in units for m in unit.modules()}
    foreign = {id(m): m for unit in whole.units for m in unit.modules() if id(m) not in own}
    kept = {id(t) for unit in units for t in (*unit.parameters(), *unit.buffers())} | {id(t) for t in kept_tensors}
    for module in list(whole.model.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in foreign:
                module._modules[name] = None
    for module in foreign.values():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in kept:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        module._parameters.clear()
        module._buffers.clear()
        module._modules.clear()


def _filter_optimizer(whole: Parts, kept: set[int]) -> tuple[tuple[int, ...], ...]:
    """Takes other stages' parameters out of the optimizer; returns the places of those that stay, by group."""
    positions = []
    for group in whole.optimizer.param_groups:
        places = [k for k, p in enumerate(group["params"]) if id(p) in kept]
        for parameter in group["params"]:
            if id(parameter) not in kept:
                whole.optimizer.state.pop(parameter, None)
        group["params"] = [group["params"][k] for k in places]
        positions.append(tuple(places))
    return tuple(positions)


def _tied(
    shared: Sequence[tuple[str, _Leaves]], model: nn.Module, layout: GradientLayout, stage_of: Mapping[int, int]
) -> tuple[Tied, ...]:
    """The parameters that this stage and others use, with the places that are here found in the layout."""
    index = {entry.name: i for i, entry in enumerate(layout.entries) if entry.kind == "param"}
    entry_of = {id(p): index[n] for n, p in model.named_parameters(remove_duplicate=False) if n in index}
    return tuple(
        Tied(
            name,
            tuple(TiePlace(name, unit, stage_of[unit], entry_of.get(id(leaf), -1)) for unit, leaf in leaves),
            leaves[0][1],
        )
        for name, leaves in shared
    )
