"""The trained objects, and cutting them up: where to cut, and how one stage's share is made of the whole.

The whole model is built first, in the same way by every worker, so every stage begins with the very bits of the unsplit
job; then the parts of other stages are dropped, and their memory with them. Names stay those of the whole model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.base.pool_wish import parse_cut
from everstep.base.stage_map import parse_map
from everstep.exact.layout import GradientLayout, align_parameters, untie
from everstep.exact.reduce import Tied, TiePlace
from everstep.exact.seeding import module_seed, preserve_rng, seed_all
from everstep.exact.shard_plan import whole_at_borders
from everstep.exact.shard_sums import ShardMesh
from everstep.exact.state import Share
from everstep.placement.cuts import ModelCut, choose, of_sizes
from everstep.train.task import Task, calling
from everstep.train.touched import Touched, memory_in


@dataclass(frozen=True)
class Parts:
    """The user's objects: everything that is trained, and its companions. extras: more state to keep. mesh: of a model
    that is cut into virtual shards. as_made: whether parameters are known to be as their modules made them, one by one,
    so that code that has run since has changed none. named: name of an optimizer that is alone in a list or dict. fill:
    parameters have no values yet; gives those of every `step`-th module, beginning with number `first`, by name, to the
    first argument; `first` and `step` are the others."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    units: Sequence[nn.Module]
    extras: Mapping[str, Any] = field(default_factory=dict)
    mesh: ShardMesh | None = None
    as_made: bool = False
    named: str = ""
    fill: Callable[[Callable[[str, Tensor], None], int, int], None] | None = None


@dataclass(frozen=True)
class StageSpec:
    """One stage of a job. cut: of the whole model; part p belongs to stage p % stages.

    ties: parameters that are used in this stage and in others. share: None if there is one stage.
    """

    stage: int
    stages: int
    cut: ModelCut
    ties: tuple[Tied, ...] = ()
    share: Share | None = None

    @staticmethod
    def whole(n_units: int) -> StageSpec:
        return StageSpec(0, 1, ((0, n_units),))

    @property
    def n_parts(self) -> int:
        return len(self.cut)

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of the stage's parts."""
        return tuple(range(self.stage, self.n_parts, self.stages))

    @property
    def units(self) -> tuple[int, ...]:
        """Numbers of the stage's units in the whole model, in order."""
        return tuple(unit for part in self.parts for unit in range(*self.cut[part]))

    @property
    def tied(self) -> frozenset[int]:
        """Ids of the parameters that other stages have, too, as the optimizer has them."""
        return frozenset(id(tied.parameter) for tied in self.ties)

    @property
    def is_split(self) -> bool:
        """Whether lanes are handed from part to part."""
        return self.n_parts > 1

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return (self.n_parts - 1) % self.stages == self.stage


def build_model(
    task: Task,
    config: Config,
    device: torch.device,
    wanted: Iterable[int] | None = None,
    there: There | None = None,
) -> tuple[nn.Module, list[nn.Module]]:
    """The task's model and its units; with `meta_init` made module by module, and only the units `wanted`. there: as of
    `build_by_module`."""
    if config.meta_init:
        build, units_of = partial(calling, task, "build_model"), partial(calling, task, "units")
        return build_by_module(build, units_of, config.seed, device, wanted, there)
    model = calling(task, "build_model").to(device)
    return model, calling(task, "units", model)


def cut_into_shards(task: Task, model: nn.Module, config: Config) -> ShardMesh | None:
    """Have the model compute by virtual shards, as the task's plan says; None if it has one shard, the whole.

    Raises: ConfigError for a model that cannot be cut so.
    """
    if config.cell.shards == 1:
        return None
    mesh = ShardMesh(config.cell.shards, sequence=config.cell.sp)
    calling(task, "parallelize", model, mesh)
    if not mesh.cuts:
        raise ConfigError(
            f"cell.shards: {type(task).__name__}.parallelize has cut nothing, got {mesh.shards} shards: let it call "
            "shard_model(model, plan, mesh), or set cell.tp=1 and cell.shards=1"
        )
    return mesh


def chosen_cut(config: Config, task: Task, model: nn.Module, unit_ms: Sequence[float] = ()) -> ModelCut:
    """The cut that this job trains with, equal at every worker: a function of these alone.

    model: whole; it may be on the meta device, as only the numbers of its parameters are used. unit_ms: measured once,
    before the job starts; its workers find the result in `cut`.

    Raises: ConfigError if there are more parts than units, or the config or the task names an impossible cut.
    """
    units = task.units(model)
    parts = config.stages * config.chunks
    if parts == 1:
        return ((0, len(units)),)
    rule = parse_cut(config.cut, parts)
    if isinstance(rule, tuple):
        return of_sizes(rule, len(units), "cut")
    if rule == "measured" and len(unit_ms) != len(units):
        raise ConfigError("cut: the time that the units take could not be measured: use cut=counted, or give the sizes")
    preferred = task.cuts(model, parts) if rule == "auto" else None
    if preferred is not None and not all(isinstance(size, int) for size in preferred):
        raise ConfigError(
            f"{type(task).__name__}.cuts: expected the number of units of each part, got {preferred!r:.80}"
        )
    costs = [float(n) for n in parameter_counts(units)] if rule != "measured" else list(unit_ms)
    stage_maps = parse_map(config.map, config.stages)
    return choose(costs, config.stages, config.chunks, stage_maps=stage_maps, preferred=preferred)


def parameter_counts(units: Sequence[nn.Module]) -> list[int]:
    """Parameter elements of each unit; a shared one counts in each unit, because each computes with it."""
    return [sum(p.numel() for p in unit.parameters()) for unit in units]


def cut_out(whole: Parts, cut: ModelCut, stages: int, stage: int) -> tuple[Parts, StageSpec]:
    """One stage's share. `whole` is used up: everything that is not the stage's is dropped.

    Raises: ConfigError for more parts than units, or parameters that are shared in a way that cannot be cut.
    """
    n_units = len(whole.units)
    if len(cut) > n_units or cut[-1][1] != n_units:
        raise ConfigError(
            f"stages: expected a cut of the model's {n_units} units, got {len(cut)} parts that end with unit "
            f"{cut[-1][1] - 1}: use at most {n_units} parts, or let Task.units name finer units"
        )
    spec = StageSpec(stage, stages, tuple(cut))
    if whole.mesh is not None:
        whole_at_borders(whole.mesh, whole.units, [cut[part] for part in spec.parts])
    names = {id(parameter): name for name, parameter in whole.model.named_parameters()}
    refuse_hidden_ties(whole, cut, stages)
    untie(whole.model, whole.units)
    align_parameters(whole.model)
    own = spec.units
    here = [places for places in _leaves(whole.units) if any(unit in own for unit, _ in places)]
    foreign = {names[id(places[0][1])]: places[0][1] for places in here if places[0][0] not in own}
    ties = [
        (names[id(places[0][1])], places)
        for places in here
        if any(unit not in own for unit, _ in places) and places[0][1].requires_grad
    ]
    units = [whole.units[k] for k in own]
    _drop_foreign(whole, units, foreign.values())
    positions = _filter_optimizer(whole, {id(p) for p in (*whole.model.parameters(), *foreign.values())})
    parts = replace(whole, units=units)
    layout = GradientLayout.build(whole.model, units)
    gc.collect()
    tied = _tied(ties, whole.model, layout, _stage_of(cut, stages))
    share = Share(own, n_units, foreign, positions, frozenset(id(one.parameter) for one in tied))
    return parts, replace(spec, ties=tied, share=share)


def _stage_of(cut: ModelCut, stages: int) -> dict[int, int]:
    return {unit: part % stages for part, run in enumerate(cut) for unit in range(*run)}


_Leaves = list[tuple[int, nn.Parameter]]
"""The leaves of one parameter: (unit, leaf) per place of use, in unit order."""


@dataclass(frozen=True)
class _Holder:
    """A tensor where it is registered. unit: -1 outside all units."""

    tensor: Tensor
    name: str
    unit: int


def _leaves(units: Sequence[nn.Module]) -> list[_Leaves]:
    """Leaves of every parameter in the units, after `untie`."""
    found: dict[tuple[Any, ...], _Leaves] = {}
    for number, unit in enumerate(units):
        for parameter in unit.parameters():
            storage = parameter.untyped_storage()._cdata  # also of one on the meta device
            key = (storage, parameter.storage_offset(), tuple(parameter.shape), parameter.stride())
            found.setdefault(key if parameter.numel() else (id(parameter),), []).append((number, parameter))
    return list(found.values())


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
    """Check that memory which several stages would write to is one Parameter object, so that all stages see the tie.

    Raises: ConfigError naming both places.
    """
    stage_of = _stage_of(cut, stages)
    holders = _holders(whole)
    outside = {id(h.tensor) for h in holders if h.unit < 0}
    spans: list[tuple[int, int, _Holder]] = []
    for holder in holders:
        tensor = holder.tensor
        if holder.unit >= 0 and id(tensor) in outside:
            raise ConfigError(
                f"{holder.name} is used by unit {holder.unit} and outside all units; with stages, Task.units must hold "
                "all places where it is used"
            )
        if tensor.numel() and not tensor.is_meta:
            size = 1 + sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + size * tensor.element_size(), holder))
    active: list[tuple[int, _Holder]] = []
    for start, stop, holder in sorted(spans, key=lambda span: span[:2]):
        active = [(end, other) for end, other in active if end > start]
        for _, other in active:
            together = stage_of.get(other.unit) == stage_of.get(holder.unit)
            if not together and not (other.tensor is holder.tensor and isinstance(other.tensor, nn.Parameter)):
                raise ConfigError(
                    f"{other.name} (unit {other.unit}, stage {stage_of.get(other.unit, '?')}) and {holder.name} (unit "
                    f"{holder.unit}, stage {stage_of.get(holder.unit, '?')}) share memory and would come to different "
                    "stages; make them one nn.Parameter, or cut the model where both are in one stage"
                )
        active.append((stop, holder))
    first: dict[int, _Holder] = {}
    for holder in holders:
        earlier = first.setdefault(id(holder.tensor), holder)
        if holder.unit < earlier.unit:
            raise ConfigError(
                f"{earlier.name} in unit {earlier.unit} is tied to {holder.name} in unit {holder.unit}, which comes "
                "first in the forward pass but later in the model; register the modules in the order of the units"
            )


def _drop_foreign(whole: Parts, units: Sequence[nn.Module], kept_tensors: Iterable[Tensor]) -> None:
    """Make other stages' modules None in their parents, and free their memory."""
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
    """Take other stages' parameters out of the optimizer; returns the places of the remaining ones, by group."""
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


# ---- models that no single host could hold: on the meta device first, then module by module, each by itself


There = Callable[[str, nn.Parameter], Tensor | None]
"""The values of a parameter, by its name and what is like it; None if they are to be made."""


def build_by_module(
    build: Callable[[], nn.Module],
    units_of: Callable[[nn.Module], Sequence[nn.Module]],
    seed: int,
    device: torch.device,
    wanted: Iterable[int] | None = None,
    there: There | None = None,
) -> tuple[nn.Module, list[nn.Module]]:
    """The model and its units. Only the units `wanted` (all by default), and modules outside all units, take memory.
    there: where another process has made a parameter already.

    Every module is initialised under generators seeded from the job's seed and the module's own path, so its initial
    values do not depend on which other modules are made here: the same bits in every topology.

    A module is initialised by the model's `fill_module(path, module)`, if it has that; else by its own
    `reset_parameters()`, then by the model's `_init_weights(module)`, as far as they exist. A tied parameter keeps the
    values of its first module.

    Raises: ConfigError naming a module that has parameters or buffers of its own and neither of the two.
    """
    with torch.device("meta"):
        model = build()
    units = list(units_of(model))
    owners = _owners(model)
    needed = _needed(model, units, wanted, owners)
    made: dict[int, nn.Parameter] = {}
    with preserve_rng():
        for path, module in model.named_modules():
            if id(module) in needed:
                _materialise(model, path, module, seed, device, owners, made, there)
    for module in model.modules():  # modules that are not made stay tied to made ones, so that every stage sees the tie
        if id(module) not in needed:
            tied = {name: made[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in made}
            module._parameters.update(tied)
    return model, units


def fill_by_module(
    model: nn.Module,
    units: Sequence[nn.Module],
    seed: int,
    device: torch.device,
    wanted: Iterable[int] | None,
    put: Callable[[str, Tensor], None],
    first: int,
    step: int,
) -> None:
    """Make each `step`-th module that `build_by_module` makes, from number `first` on, by itself; `put` takes its own
    parameters by their names. model: on the meta device, and is so afterwards.

    Raises: ConfigError as `build_by_module`, and for a module whose initialiser takes values of an earlier one."""
    owners = _owners(model)
    needed = _needed(model, units, wanted, owners)
    number, without = 0, set[int]()
    for path, module in model.named_modules():
        if id(module) not in needed:
            continue
        names = [name for name, p in module._parameters.items() if p is not None and owners[id(p)] is module]
        mine = bool(names) and number % step == first
        number += bool(names)
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        tensors = [one for one in (*parameters.values(), *buffers.values()) if one is not None]
        if not mine:
            without |= memory_in(tensors)
            continue
        with preserve_rng(), _left_alone(without, path, module):
            _materialise(model, path, module, seed, device, owners, {}, None)
        for name in names:
            put(f"{path}.{name}" if path else name, module._parameters[name].detach())  # type: ignore[union-attr]
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        without |= memory_in(tensors)


@contextmanager
def _left_alone(without: Set[int], path: str, module: nn.Module) -> Iterator[None]:
    """A module is made, while earlier modules, which would have values if one process made all, have none in this
    memory. Later ones have none either way. Raises: ConfigError if its initialiser takes some."""
    if not without:
        yield
        return
    failed: Exception | None = None
    with Touched(without) as seen:
        try:
            yield
        except Exception as error:
            if not seen.touched:
                raise
            failed = error
    if seen.touched:
        raise ConfigError(
            f"meta_init: initialising module {path or 'at the top'} ({type(module).__name__}) reads or writes "
            "parameters or buffers of another module, which may be made by another process of this worker: have it use "
            "its own, or set meta_init to false"
        ) from failed


def _needed(
    model: nn.Module, units: Sequence[nn.Module], wanted: Iterable[int] | None, owners: Mapping[int, nn.Module]
) -> set[int]:
    """Ids of the modules that are made: outside of all units, of those wanted, and where their parameters are from."""
    inside = {id(m) for unit in units for m in unit.modules()}
    needed = {id(m) for m in model.modules()} - inside
    needed |= {id(m) for k in (range(len(units)) if wanted is None else wanted) for m in units[k].modules()}
    return needed | {
        id(owners[id(p)]) for m in model.modules() if id(m) in needed for p in m._parameters.values() if p is not None
    }


def _owners(model: nn.Module) -> dict[int, nn.Module]:
    """id of each parameter -> the first module that has it."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), module)
    return owners


def _materialise(
    model: nn.Module,
    path: str,
    module: nn.Module,
    seed: int,
    device: torch.device,
    owners: dict[int, nn.Module],
    made: dict[int, nn.Parameter],
    there: There | None,
) -> None:
    ties: dict[str, nn.Parameter] = {}
    taken: dict[str, Tensor] = {}
    own = False
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if owners[id(parameter)] is not module or id(parameter) in made:
            ties[name] = made.get(id(parameter), parameter)
        else:
            found = None if there is None else there(f"{path}.{name}" if path else name, parameter)
            own = own or found is None
            if found is not None:
                taken[name] = found
            made[id(parameter)] = _scratch(parameter, device)
            made[id(parameter)].__dict__.update(parameter.__dict__)
        module._parameters[name] = _scratch(parameter, device) if name in ties else made[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            own = True
            module._buffers[name] = _empty(buffer, device)
    if own:
        _initialise(model, path, module, seed)
    for name, found in taken.items():
        module._parameters[name].data = found  # type: ignore[union-attr]
    module._parameters.update(ties)


def _initialise(model: nn.Module, path: str, module: nn.Module, seed: int) -> None:
    fill = getattr(model, "fill_module", None)
    if fill is not None:
        seed_all(module_seed(seed, path))
        with torch.no_grad():
            fill(path, module)
        return
    reset = getattr(module, "reset_parameters", None)
    rest = getattr(model, "_init_weights", None)
    if reset is None and rest is None:
        raise ConfigError(
            f"meta_init: module {path or 'at the top'} ({type(module).__name__}) has parameters or buffers of its own "
            "and no reset_parameters() to initialise them; give it one, or set meta_init to false"
        )
    seed_all(module_seed(seed, path))
    with torch.no_grad():
        if reset is not None:
            reset()
        if rest is not None:
            rest(module)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    """Zeros, so that values without any initialisation are the same everywhere."""
    return torch.zeros_like(tensor.detach(), device=device)


def _scratch(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Stand-in for a tied parameter while another module's initialiser runs over it."""
    return nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
