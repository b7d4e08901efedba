"""The whole state of a training process as named tensors and JSON: read, hashed, copied, restored.

Apart because healing, checkpoints and digests must mean the same by "state": parameters once each, buffers, the
optimizer's tensors per parameter, and as JSON the optimizer's groups, the scheduler and all other objects with a state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from everstep.base.errors import CheckpointCorrupt, ConfigError
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Divides
from everstep.exact.attributes import assign
from everstep.exact.digest import bytes_of, named_digest
from everstep.exact.divisible import block_range, divided_parameters, divisible, keeps_any, whole_spots
from everstep.exact.extra_state import SUFFIX, give, has_extra_state, keepers, packed
from everstep.exact.group_values import put_values
from everstep.exact.image import (
    BESIDE,
    BLOCK_BYTES,
    FOREIGN,
    MODEL,
    OUTSIDE,
    STRIDES,
    VALUES,
    Arrangement,
    BlockSource,
    Image,
    Outline,
    Scatter,
    Spot,
    StateEntry,
    block_count,
    entries_of,
    write_blocks,
)
from everstep.exact.jsonable import decode, encode
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, aligned_like, dense_stride, memory_of, round_up
from everstep.exact.recollect import Collected, Recollection, encode_further, encode_groups
from everstep.exact.settings import Settings
from everstep.exact.snapshot import Snapshot, SnapshotMemory, StateInPlace
from everstep.exact.state_memory import StateMemory
from everstep.placement.shards import ends_of

_MODEL, _OPTIMIZER = "model/", "optimizer/"
_T = TypeVar("_T", bound=Tensor)


@dataclass(frozen=True)
class Share:
    """The part of a whole job's state that one stage holds.

    units: numbers of its units in the whole model, in order. n_units: of the whole model. foreign: tied parameters
    whose first place of use is in another stage, by their first names. positions: for each optimizer group, the place
    of each of its parameters in the group of the whole optimizer. tied: ids of trained parameters that other stages
    hold, too; the optimizer's state of these is not divided.
    """

    units: tuple[int, ...]
    n_units: int
    foreign: Mapping[str, nn.Parameter]
    positions: tuple[tuple[int, ...], ...]
    tied: frozenset[int] = frozenset()


class ModelState:
    """Reads and writes the state of a model, its optimizer, its scheduler and further objects with `state_dict`.

    Names are the model's own; a parameter that is used in several places has the first of its names and is there once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        extras: Mapping[str, Any] | None = None,
        units: Sequence[nn.Module] = (),
        share: Share | None = None,
        settings: Settings | None = None,
        memory: StateMemory | None = None,
        divides: Divides | None = None,
    ) -> None:
        """extras: name -> object with state_dict() and load_state_dict(). units: as for `GradientLayout.build`, whose
        grid the planes of the state lie on; without them all is `rest`. Parameters that require a gradient when this is
        made keep a place on it.

        share: given if the model is one stage of a larger one. settings: of the model; carried, too. memory: for the
        optimizer's state, and for snapshots. divides: members divide the optimizer's state, of which only what they
        divide has a place on the grid: `elements` of parameters; `matrices`, whole parameters, which lie on a grid of
        their own, where none crosses the border of a block unless it begins at one; or `nothing`. None: they do not.

        Raises: ConfigError for an optimizer that needs closures, or that holds a foreign parameter or a tied one twice;
        and for units as the layout does.
        """
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.extras = dict(extras or {})
        self._keepers = dict(keepers(model))
        self._units = list(units)
        self._share = share
        self.settings = settings or Settings(model, optimizer)
        self.memory = memory or StateMemory()
        self.divides = divides
        self._foreign = dict(share.foreign) if share is not None else {}
        self.outline = Outline()
        """Outline of the state that `live_tensors` described last."""
        self.part_names: tuple[str, ...] = ()
        self._image: Image | None = None
        self._arena: SnapshotMemory | None = None
        self._recollection = Recollection(model, optimizer, scheduler, self.extras)
        self._now: list[int] = []
        for key, extra in self.extras.items():
            if not hasattr(extra, "state_dict") or not hasattr(extra, "load_state_dict"):
                raise ConfigError(
                    f"state {key}: expected an object with state_dict and load_state_dict, got {type(extra).__name__}: "
                    "keep plain values in everstep.state(...)"
                )
        if isinstance(optimizer, LBFGS):
            raise ConfigError("LBFGS evaluates the loss several times per update; use an optimizer without closures")
        self._param_names()
        self._layout = GradientLayout.build(model, units) if units else None
        self._spots, self._unit_blocks = self._find_spots()

    # ---- reading

    def placed(self) -> Iterator[tuple[str, nn.Parameter, Spot]]:
        """Parameters that have a place on the grid, by their names."""
        for name, parameter in self._unique_params().items():
            if name in self._spots:
                yield name, parameter, self._spots[name]

    @property
    def divides_whole(self) -> bool:
        """Whether members divide the optimizer's state by whole parameters."""
        return self.divides == "matrices"

    def divided(self, gradients: Collection[Tensor] = frozenset()) -> list[tuple[nn.Parameter, Spot]]:
        """Parameters whose optimizer's state members divide, in the order of the grid. gradients: parameters that the
        first update gets gradients of; it is these while there is no state."""
        optimizer = self.optimizer
        if optimizer is None or self.divides not in ("elements", "matrices"):
            return []
        tied = self._share.tied if self._share is not None else frozenset()
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]} - tied
        placed = {id(p): (p, spot) for _, p, spot in self.placed() if id(p) in updated and divisible(p)}
        parameters = [p for p, _ in placed.values()]
        if keeps_any(optimizer):
            parameters = divided_parameters(optimizer, parameters)
        else:
            parameters = [p for p in parameters if p in gradients]
        return sorted((placed[id(p)] for p in parameters), key=lambda one: one[1].offset)

    @property
    def shape(self) -> Outline:
        self.live_tensors(settings=False)
        return self.outline

    @property
    def n_blocks(self) -> int:
        """Number of blocks of the image that `manifest` made last."""
        return self._live().n_blocks

    def manifest(self) -> dict[str, Any]:
        """JSON that describes the present state, with a digest per block. `read_block` belongs to the last one."""
        entries, tensors, values, outline = self._collect()
        outline = outline._replace(settings=self._settings_now())
        self._image = Image.of_tensors(entries, tensors, values, outline, self.memory)
        return self._image.manifest

    def read_block(self, index: int) -> memoryview:
        """A block of the state that `manifest` described; valid while the state does not change."""
        return self._live().read_block(index)

    def model_digest(self) -> str:
        """Digest of parameters and persistent buffers (`state_dict` with tied ones once). 32 hex digits."""
        return named_digest(self._persistent())

    def state_digest(self, step: int) -> str:
        """Digest of everything, and the step. 32 hex digits. Equal for any number of workers."""
        return self.image().digest(step)

    def part_digests(self, step: int, planes: frozenset[str] | None = None) -> tuple[str, dict[str, str]]:
        """`state_digest`, and the digests of all its parts, by name; sets `part_names`. planes: those that count; None:
        all."""
        digest, parts = self.image().part_digests(step, planes=planes)
        self.part_names = tuple(name.removeprefix(_MODEL) for name in parts)
        return digest, parts

    @property
    def names(self) -> frozenset[str]:
        """Names of parameters and buffers (registered places, too) that are held here, for `topology.select`."""
        return frozenset((*self._unique_params(), *self._buffer_slots(), *self._keepers))

    def clone_snapshot(self, there: Extents = WHOLE) -> Snapshot:
        """A copy of the state, or of these blocks of it, made by a background thread once `start` is called.

        Buffers and JSON are taken now; parameters and optimizer state must not change before `wait` has returned.
        """
        entries, tensors, values, now = self.live_tensors()
        spans = [(lo * BLOCK_BYTES, hi * BLOCK_BYTES) for lo, hi in there.spans((("", block_count(entries)),))]
        arena, self._arena = self._arena, None
        return Snapshot(entries, tensors, values, self.outline, now, arena, self._take_back, self.memory, spans)

    def in_place(self, *, shared: bool = True) -> StateInPlace:
        """The state as it lies, until its next update. shared: as of `StateInPlace`."""
        entries, tensors, values, now = self.live_tensors()
        changing = {k: tensors[k].detach().clone() for k in now}  # lanes change buffers meanwhile
        found = [changing.get(k, tensor) for k, tensor in enumerate(tensors)]
        return StateInPlace(Image.of_tensors(entries, found, values, self.outline, self.memory), shared)

    def live_tensors(
        self, settings: bool = True
    ) -> tuple[tuple[StateEntry, ...], list[Tensor], dict[str, Any], list[int]]:
        """Entries, their tensors, the JSON values, and indices of the tensors that may change before the next update;
        the others change in updates alone. settings: whether to put them into the outline."""
        found = self._recollection.recall()
        known = found is not None
        entries, tensors, values, outline = found = found or self._collect()
        self.outline = outline._replace(settings=self._settings_now() if settings else {})
        if not known:
            if not self._keepers:  # extra state is asked for each time
                self._recollection.remember(found)
            live, lasting = {id(t) for t in self._unique_buffers().values()}, (_MODEL, _OPTIMIZER)
            changing = (k for k, t in enumerate(tensors) if id(t) in live or not entries[k].name.startswith(lasting))
            self._now = list(changing)
        return entries, tensors, values, self._now

    def _take_back(self, arena: SnapshotMemory) -> None:
        self._arena = arena

    def image(self) -> Image:
        """The present state as bytes; valid while it does not change."""
        return Image.of_tensors(*self._collect(), self.memory)

    def _live(self) -> Image:
        if self._image is None:
            self._image = self.image()
        return self._image

    def _persistent(self) -> Iterable[tuple[str, Tensor]]:
        kept = self.model.state_dict(keep_vars=True)
        for name, tensor in (*self._unique_params().items(), *self._unique_buffers().items()):
            if name in kept:
                yield name, tensor
        yield from self._extra_state()

    def _extra_state(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, packed(name, module)) for name, module in self._keepers.items())

    def _collect(self) -> Collected:
        """Entries with their tensors, by plane, the JSON values, and the outline."""
        pulled: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        mine: dict[str, dict[str, Tensor]] = {}
        if self.optimizer is not None:
            values |= self._collect_optimizer(self.optimizer, mine, pulled)
        values |= encode_further(self.optimizer, self.scheduler, self.extras, pulled)
        unit_of = self._unit_of_names()
        arrangement = Arrangement((*self._unit_numbers(), OUTSIDE, VALUES, FOREIGN))
        divided = self.divided() if mine else []
        own = {id(p) for p, _ in divided}
        for name, parameter in self._unique_params().items():
            label = FOREIGN if name in self._foreign else unit_of.get(name, OUTSIDE)
            spot, prefix = self._spots.get(name), f"{_OPTIMIZER}{name}/"
            arrangement.add(_MODEL + name, parameter.detach(), label, MODEL, spot)
            on_grid = spot if not self.divides or id(parameter) in own else None
            for full, tensor in mine.get(name, {}).items():
                arrangement.add(full, tensor, label, _OPTIMIZER + full.removeprefix(prefix), on_grid)
        buffers = self._unique_buffers()
        for name, buffer in buffers.items():
            arrangement.add(_MODEL + name, buffer, unit_of.get(name, OUTSIDE))
        for name, tensor in self._extra_state():
            arrangement.add(_MODEL + name, tensor, unit_of.get(name, OUTSIDE))
        for name, tensor in pulled.items():
            arrangement.add(name, tensor, VALUES)
        entries, tensors, groups, planes = arrangement.done()
        kept = {*self.model.state_dict(keep_vars=True), *self._foreign}
        transient = sorted(_MODEL + name for name in (*self._unique_params(), *buffers) if name not in kept)
        whole = [block_range(p, spot.offset) for p, spot in divided] if self.divides_whole else []
        ends = ends_of((one.start, one.stop) for one in whole)
        outline = Outline(groups, planes, tuple(transient), self._stage_facts(), ends=ends)
        return entries, tensors, values, outline

    def _settings_now(self) -> dict[str, Any]:
        return self.settings.now()

    def _stage_facts(self) -> dict[str, Any] | None:
        share = self._share
        if share is None:
            return None
        return {
            "units": list(share.units),
            "n_units": share.n_units,
            "extents": list(self._unit_blocks),
            "positions": [list(p) for p in share.positions],
        }

    def _find_spots(self) -> tuple[dict[str, Spot], list[int]]:
        """Places of the parameters on the grid, by their names here; a tied one has the place of its first use. And the
        number of element blocks of each unit."""
        layout = self._layout
        if layout is None:
            return {}, []
        leaves = dict(self.model.named_parameters(remove_duplicate=False))
        firsts = {memory_of(p): name for name, p in self._unique_params().items() if p.numel()}
        numbers = self._unit_numbers()
        spots: dict[str, Spot] = {}
        for entry in (layout.entries[k] for k in layout.params):
            name = firsts.get(memory_of(leaves[entry.name]), "") if entry.numel else ""
            if name and name not in self._foreign:
                spot = Spot(numbers[entry.unit], layout.units[entry.unit].start, entry.offset, entry.shape)
                spots.setdefault(name, spot)
        sizes = [round_up(unit.stop - unit.start, BLOCK_ELEMENTS) // BLOCK_ELEMENTS for unit in layout.units]
        if not self.divides_whole:
            return spots, sizes
        spots, found = whole_spots(spots)
        return spots, [found.get(unit, 0) for unit in numbers]

    def _collect_optimizer(
        self, optimizer: Optimizer, mine: dict[str, dict[str, Tensor]], pulled: dict[str, Tensor]
    ) -> dict[str, Any]:
        names = self._param_names()
        states: dict[str, Any] = {}
        other: dict[Any, Any] = {}
        turned: list[list[Any]] = []
        for key, state in optimizer.state.items():
            if not isinstance(key, Tensor):
                other[key] = state
            elif state:  # empty state was looked up, and never filled
                if id(key) not in names:
                    raise ConfigError("the optimizer keeps state for a tensor that is not among its parameters")
                name = names[id(key)]
                mine[name] = {}
                states[name] = encode(state, f"{_OPTIMIZER}{name}", mine[name])
                own = [(full, tensor, key if full.count("/") == 2 else None) for full, tensor in mine[name].items()]
                turned += [[full, [*tensor.stride()]] for full, tensor, like in own if _turned(tensor, like)]
        members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        groups = encode_groups(optimizer, members, pulled)
        ordered = [[name, states[name]] for name in names.values() if name in states]
        found = {"groups": groups, "state": {"dict": ordered}, "other": encode(other, "other", pulled)}
        return found | ({STRIDES: sorted(turned)} if turned else {})

    # ---- names

    def _unique_params(self) -> dict[str, nn.Parameter]:
        """First name -> parameter; leaves that share storage (ties) once. Those of other stages last."""
        unique = _unique([*self._foreign.items(), *self.model.named_parameters()])
        return {name: p for name, p in unique.items() if name not in self._foreign} | self._foreign

    def _unique_buffers(self) -> dict[str, Tensor]:
        return _unique(self.model.named_buffers())

    def _param_names(self) -> dict[int, str]:
        """id -> name of the optimizer's parameters, in its order."""
        if self.optimizer is None:
            return {}
        known = {id(p): name for name, p in self._unique_params().items()}
        names: dict[int, str] = {}
        for k, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ConfigError(
                        f"the optimizer's group {k} holds a parameter of shape {tuple(parameter.shape)} that is not "
                        "the model's, or a second leaf of a tied one; make its owner a part of the model (for a loss "
                        "with parameters: model.loss = loss), and build the optimizer over model.parameters()"
                    )
                names[id(parameter)] = known[id(parameter)]
        return names

    def _unit_numbers(self) -> Sequence[int]:
        return self._share.units if self._share is not None else range(len(self._units))

    def _unit_of_names(self) -> dict[str, int]:
        """Name of a parameter or buffer -> number of its unit (the first one)."""
        modules: dict[int, int] = {}
        for number, unit in zip(self._unit_numbers(), self._units, strict=True):
            for module in unit.modules():
                modules.setdefault(id(module), number)
        result: dict[str, int] = {}
        for prefix, module in self.model.named_modules():
            if id(module) in modules:
                extra = (SUFFIX,) if has_extra_state(module) else ()
                for attribute in (*module._parameters, *module._buffers, *extra):
                    result[f"{prefix}.{attribute}" if prefix else attribute] = modules[id(module)]
        return result

    # ---- writing

    def load(self, manifest: Mapping[str, Any], blocks: BlockSource) -> None:
        """Take on the state that a manifest describes; `blocks(i)` gives the bytes of its block i.

        Tensors are written in place if they exist; missing optimizer state is created. After an error the state is
        partly written: load again before using it.

        Raises: CheckpointCorrupt if a digest does not match. ConfigError if it is the state of another model.
        """
        self.load_with(manifest, lambda scatter: write_blocks(manifest, scatter, blocks))

    def load_with(self, manifest: Mapping[str, Any], fill: Callable[[Scatter], None]) -> None:
        """`load`, with a function `fill` that writes all blocks of the manifest to their places, and verifies them."""
        self.memory.changes()
        entries = entries_of(manifest)
        values = manifest["values"]
        self._image = None
        self._refuse_foreign(entries, values)
        tensors = self._targets(entries, dict(values.get(STRIDES, ())))
        staged: dict[str, Tensor] = {}
        memory: list[memoryview] = []
        for entry in entries:
            target = tensors[entry.name]
            if target.device.type != "cpu" or not target.is_contiguous():
                staged[entry.name] = target
                target = torch.empty(entry.shape, dtype=target.dtype)
                tensors[entry.name] = target
            memory.append(bytes_of(target))
        scatter = Scatter(entries, memory, self.memory)
        fill(scatter)
        scatter.end()
        with torch.no_grad():
            for name, target in staged.items():
                tensors[name] = target.copy_(tensors[name])
        if self.optimizer is not None:
            self._load_optimizer(values, tensors)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(decode(values["scheduler"], tensors))
        for name, module in self._keepers.items():
            give(module, tensors[_MODEL + name])
        for key, extra in self.extras.items():
            extra.load_state_dict(decode(values.get(f"extras/{key}", {"dict": []}), tensors))
        self.settings.restore(manifest.get("settings", {}))

    def _refuse_foreign(self, entries: Sequence[StateEntry], values: Mapping[str, Any]) -> None:
        theirs = {e.name: e for e in entries}
        buffers = self._buffer_slots()
        for name, parameter in self._unique_params().items():
            entry = theirs.get(_MODEL + name)
            dtype, shape = str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape)
            if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
                what = f"{entry.dtype} {entry.shape}" if entry else "nothing"
                raise ConfigError(f"the state has {what} for parameter {name}; the model {dtype} {shape}")
        known = {_MODEL + name for name in (*self._unique_params(), *buffers, *self._keepers)}
        for name in theirs:
            if name.startswith(_MODEL) and name not in known:
                raise ConfigError(f"the state holds {name.removeprefix(_MODEL)}, which the model does not have")
        for kind, names in (("buffer", self._unique_buffers()), ("extra state", self._keepers)):
            for name in names:
                if _MODEL + name not in theirs:
                    raise ConfigError(f"the state has no {kind} {name}, which the model has")
        mine = {"groups": self.optimizer, "scheduler": self.scheduler, **{f"extras/{key}": key for key in self.extras}}
        lacking = {key for key, thing in mine.items() if thing is not None} - {*values, f"extras/{BESIDE}"}
        if lacking:
            raise ConfigError(f"the state holds no {min(lacking)}, which this job has")

    def _buffer_slots(self) -> dict[str, tuple[nn.Module, str]]:
        """Every place of a buffer by name, also empty ones (registered as None)."""
        return {
            (f"{prefix}.{attribute}" if prefix else attribute): (module, attribute)
            for prefix, module in self.model.named_modules()
            for attribute in module._buffers
        }

    def _targets(self, entries: Sequence[StateEntry], strides: Mapping[str, Any]) -> dict[str, Tensor]:
        """Memory for each entry: the existing tensor, if it is alike, or a new one. strides: where not as usual."""
        params, slots = self._unique_params(), self._buffer_slots()
        targets: dict[str, Tensor] = {}
        for entry in entries:
            top, _, name = entry.name.partition("/")
            owner, _, key = name.rpartition("/")
            if top == "model" and name in self._keepers:
                targets[entry.name] = torch.empty(entry.shape, dtype=_dtype(entry))
            elif top == "model":
                targets[entry.name] = params[name].detach() if name in params else _buffer_target(entry, *slots[name])
            elif top == "optimizer" and owner in params and self.optimizer is not None:
                targets[entry.name] = self._optimizer_target(entry, params[owner], key, entry.name in strides)
            else:
                targets[entry.name] = torch.empty(entry.shape, dtype=_dtype(entry))
            if entry.name in strides:
                targets[entry.name] = _strided(entry.name, targets[entry.name], strides[entry.name])
        return targets

    def _optimizer_target(self, entry: StateEntry, parameter: nn.Parameter, key: str, turned: bool) -> Tensor:
        optimizer: Optimizer = self.optimizer  # type: ignore[assignment]
        existing = optimizer.state[parameter].get(key) if parameter in optimizer.state else None
        alike = isinstance(existing, Tensor) and existing.dtype == _dtype(entry) and existing.shape == entry.shape
        if isinstance(existing, Tensor) and alike and (turned or not _turned(existing, parameter)):
            return existing
        if key == "step":
            group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
            stays = not group.get("capturable") and not group.get("fused")
            return torch.empty(entry.shape, dtype=_dtype(entry), device="cpu" if stays else parameter.device)
        if entry.shape == tuple(parameter.shape):
            room = self.memory.room(parameter, key) if entry.dtype == "float32" else None
            return self.memory.make(parameter.detach().to(_dtype(entry))) if room is None else room
        return torch.empty(entry.shape, dtype=_dtype(entry), device=parameter.device)

    def _load_optimizer(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        optimizer: Optimizer = self.optimizer  # type: ignore[assignment]
        groups = [decode(group, tensors) for group in values["groups"]]
        names = self._param_names()
        mine = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if mine != [group["params"] for group in groups]:
            raise ConfigError("the state's optimizer groups hold other parameters than this optimizer's")
        put_values(optimizer.param_groups, [group["values"] for group in groups])
        states = decode(values["state"], tensors)
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        if set(states) - set(parameters):
            raise CheckpointCorrupt("the state has optimizer state for parameters that are in none of its groups")
        optimizer.state.clear()
        for name, state in states.items():
            optimizer.state[parameters[name]] = state
        optimizer.state.update(decode(values["other"], tensors))
        assign(optimizer, decode(values.get("attributes", {"dict": []}), tensors))


def _buffer_target(entry: StateEntry, module: nn.Module, attribute: str) -> Tensor:
    buffer = module._buffers[attribute]
    if buffer is None or buffer.dtype != _dtype(entry) or buffer.shape != entry.shape:
        neighbour = buffer if buffer is not None else next(module.parameters(), None)
        device = neighbour.device if neighbour is not None else torch.device("cpu")
        buffer = module._buffers[attribute] = torch.empty(entry.shape, dtype=_dtype(entry), device=device)
    return buffer.detach()


def _turned(tensor: Tensor, parameter: Tensor | None) -> bool:
    """Whether what an optimizer keeps has other strides than what is made for its state. parameter: that it is for."""
    like = parameter if parameter is not None and parameter.shape == tensor.shape else None
    if tensor.layout is not torch.strided or (tensor.is_contiguous() and (like is None or like.is_contiguous())):
        return False
    stride = tuple(tensor.stride())
    return stride == dense_stride(tensor) and (like is None or stride != dense_stride(like))


def _strided(name: str, target: Tensor, stride: Any) -> Tensor:
    """The target, or memory like it with these strides. Raises: CheckpointCorrupt."""
    try:
        fits = dense_stride(torch.empty_strided(target.shape, stride, device="meta")) == tuple(stride)
    except (RuntimeError, TypeError):
        fits = False
    if not fits:
        raise CheckpointCorrupt(f"{name} of shape {tuple(target.shape)} cannot have the strides {str(stride)[:80]}")
    return target if target.stride() == tuple(stride) else aligned_like(target.new_empty_strided(target.shape, stride))


def _unique(named: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    firsts: dict[tuple[object, ...], tuple[str, _T]] = {}
    for name, tensor in named:
        firsts.setdefault(memory_of(tensor), (name, tensor))
    return dict(firsts.values())


def _dtype(entry: StateEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorrupt(f"{entry.name} has an unknown type {entry.dtype}")
    return dtype
