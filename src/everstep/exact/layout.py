"""Place of each gradient in the one flat float32 vector of a step, the same for any number of workers.

Apart because transports need it without the model: everything here but `build`, `untie` and `align_parameters` is plain
data. Units follow each other, each beginning at a block; inside a unit the parameters come first, then the running
statistics of its BatchNorm-like modules; each entry begins at a 64-byte boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from everstep.base.errors import ConfigError, check
from everstep.exact.digest import digest_bytes

BLOCK_ELEMENTS = 65_536
"""Elements of a block: 256 KiB of float32."""
ALIGN_BYTES = 64
ALIGN_ELEMENTS = ALIGN_BYTES // 4
_ACCUMULATED = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Entry:
    """One gradient, or one running statistic, in the flat vector. Sizes and offsets in elements.

    kind: 'param', or 'buffer' for a running statistic; the element after a buffer's `numel` holds the number of lanes
    that changed it, so that the mean is taken over those. stride: of the flat view; a dense parameter keeps its own.
    tied_to: index of the entry of the first place where the same parameter is used, -1 if this is the first.
    """

    name: str
    unit: int
    kind: Literal["param", "buffer"]
    shape: tuple[int, ...]
    numel: int
    offset: int
    stride: tuple[int, ...]
    dtype: str
    tied_to: int = -1

    @property
    def stop(self) -> int:
        return self.offset + self.numel + (1 if self.kind == "buffer" else 0)

    def view(self, flat: Tensor) -> Tensor:
        """The entry's part of a whole flat vector, in its shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class UnitRange:
    """A unit's part of the flat vector: parameters in [start, params_stop), statistics after them, all before `stop`.

    `start` is the beginning of a block; the next unit begins at the first block boundary at or after `stop`.
    """

    start: int
    params_stop: int
    stop: int


@dataclass(frozen=True)
class GradientLayout:
    """The flat vector of one stage; `numel` is a multiple of `BLOCK_ELEMENTS`. frozen: names without a place in it.
    rounds: to which parameters' gradients, and all sums of them, are rounded."""

    entries: tuple[Entry, ...]
    units: tuple[UnitRange, ...]
    numel: int
    frozen: tuple[str, ...] = ()
    rounds: torch.dtype = torch.float32

    @property
    def n_blocks(self) -> int:
        return self.numel // BLOCK_ELEMENTS

    @cached_property
    def params(self) -> tuple[int, ...]:
        """Indices of the entries that are parameters."""
        return tuple(i for i, e in enumerate(self.entries) if e.kind == "param")

    @cached_property
    def buffers(self) -> tuple[int, ...]:
        """Indices of the entries that are running statistics."""
        return tuple(i for i, e in enumerate(self.entries) if e.kind == "buffer")

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """End of each entry with its padding: the element where the next entry (or the vector's end) begins."""
        starts = [e.offset for e in self.entries[1:]]
        return (*starts, self.numel) if self.entries else ()

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) that are padding."""
        ends = [(e.stop, next_start) for e, next_start in zip(self.entries, self.boundaries, strict=True)]
        return tuple((stop, begin) for stop, begin in ends if stop < begin)

    @cached_property
    def block_params_stop(self) -> tuple[int, ...]:
        """End of the parameters in each block, in elements; running statistics and padding come after."""
        stops = []
        for unit in self.units:
            for start in range(unit.start, round_up(unit.stop, BLOCK_ELEMENTS), BLOCK_ELEMENTS):
                stops.append(min(max(unit.params_stop, start), start + BLOCK_ELEMENTS))
        return tuple(stops)

    def alike(self, start: int, stop: int) -> Iterator[tuple[int, int, torch.dtype]]:
        """Cut a range where the type changes to which sums are rounded: running statistics are float32."""
        if self.rounds == torch.float32:
            yield start, stop, self.rounds
            return
        ends = sorted({end for unit in self.units for end in (unit.start, unit.params_stop) if start < end < stop})
        for lo, hi in pairwise([start, *ends, stop]):
            param = any(unit.start <= lo < unit.params_stop for unit in self.units)
            yield lo, hi, self.rounds if param else torch.float32

    def fingerprint(self) -> str:
        """Equal for equal layouts: workers compare it before they exchange gradients. 32 hex digits."""
        rows = [(e.name, e.unit, e.kind, e.shape, e.offset, e.stride, e.dtype, e.tied_to) for e in self.entries]
        return digest_bytes("".join(map(repr, (*rows, (self.units, self.numel)))).encode())

    @staticmethod
    def build(model: nn.Module, units: Sequence[nn.Module], rounds: torch.dtype = torch.float32) -> GradientLayout:
        """Lay out every parameter that requires a gradient, and the running statistics.

        units: modules of the model, or wrappers that only join some, in order, without overlap; call `untie` with the
        same ones before. Parameters that do not require a gradient when training begins stay out (`frozen`).

        Raises: ConfigError naming a float64 or complex parameter, one outside all units, or a module in two units.
        """
        check(len(units) > 0, "a model has at least one unit")
        _refuse_overlap(model, units)
        names = _parameter_names(model)
        entries: list[Entry] = []
        ranges: list[UnitRange] = []
        first_use: dict[tuple[object, ...], int] = {}
        seen: set[int] = set()
        offset = 0
        for number, unit in enumerate(units):
            start = offset
            for parameter in unit.parameters():
                check(id(parameter) not in seen, "a parameter is in two units: untie(model, units) comes first")
                seen.add(id(parameter))
                if parameter.requires_grad:
                    name = names[id(parameter)]
                    if parameter.dtype not in _ACCUMULATED:
                        raise ConfigError(
                            f"gradients are accumulated in float32; parameter {name} is {parameter.dtype}: "
                            "make it float32, bfloat16 or float16"
                        )
                    tied_to = first_use.setdefault(memory_of(parameter), len(entries))
                    tied_to = -1 if tied_to == len(entries) else tied_to
                    entries.append(_entry(name, number, "param", parameter, offset, tied_to))
                    offset = round_up(entries[-1].stop, ALIGN_ELEMENTS)
            params_stop = offset if offset == start else entries[-1].stop
            for name, statistic in running_statistics(model, unit):
                if statistic.dtype not in _ACCUMULATED:
                    raise ConfigError(f"the running statistics are summed in float32; {name} is {statistic.dtype}")
                entries.append(_entry(name, number, "buffer", statistic, offset))
                offset = round_up(entries[-1].stop, ALIGN_ELEMENTS)
            stop = entries[-1].stop if offset > start else start
            ranges.append(UnitRange(start, params_stop, stop))
            offset = round_up(stop, BLOCK_ELEMENTS)
        _refuse_uncovered(model, names, seen, {e.name for e in entries})
        frozen = tuple(names[id(p)] for p in model.parameters() if not p.requires_grad)
        return GradientLayout(tuple(entries), tuple(ranges), offset, frozen, rounds)


def add_rounded(left: Tensor, right: Tensor, out: Tensor, rounds: torch.dtype) -> None:
    """out = left + right, as the type has it. All are float32."""
    torch.add(left, right, out=out)
    if rounds != torch.float32:
        out.copy_(out.to(rounds))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def running_statistics(model: nn.Module, unit: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating running means and variances of a unit's BatchNorm-like modules, by their names in the model."""
    names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    for module in unit.modules():
        if not isinstance(module, _NormBase) or not module.track_running_stats:
            continue
        for kind in ("running_mean", "running_var"):
            statistic = getattr(module, kind)
            if isinstance(statistic, Tensor) and statistic.dtype.is_floating_point:
                yield f"{names[id(module)]}.{kind}".removeprefix("."), statistic


def untie(model: nn.Module, units: Sequence[nn.Module]) -> int:
    """Give a parameter that an earlier unit uses already a leaf of its own in every later unit; returns the number of
    new leaves.

    The new leaf shares the storage (and version counter), so the value stays one while each place of use gets its own
    gradient. Build the optimizer before, over the tied parameters, and call `align_parameters` before, too.

    Raises: ConfigError if units overlap; and naming a tied parameter with a hook on its gradient, which would get that
    of its first place alone.
    """
    _refuse_overlap(model, units)
    owned: set[int] = set()
    made = 0
    for unit in units:
        fresh: dict[int, nn.Parameter] = {}
        mine: set[int] = set()
        for module in unit.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in owned and parameter is not None:
                    if id(parameter) not in fresh:
                        _refuse_hooks(model, parameter)
                        fresh[id(parameter)] = _own_leaf(parameter)
                    module._parameters[name] = fresh[id(parameter)]
                mine.add(id(module._parameters[name]))
        owned |= mine
        made += len(fresh)
    return made


def align_parameters(model: nn.Module) -> int:
    """Move parameters and buffers that do not begin at a 64-byte boundary, keeping strides; returns the number moved.

    Kernels choose their path by alignment, and that changes bits (measured at offsets that are not multiples of 16
    bytes). Objects stay the same, so optimizers and ties keep their references.
    """
    moved: dict[tuple[object, ...], Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        if tensor.data_ptr() % ALIGN_BYTES:
            key = memory_of(tensor)
            if key not in moved:
                moved[key] = aligned_like(tensor).copy_(tensor.detach())
            tensor.data = moved[key]
    return len(moved)


def aligned_like(tensor: Tensor) -> Tensor:
    """Uninitialised tensor of the same shape, dtype, device and (if dense) strides, at a 64-byte boundary."""
    stride = dense_stride(tensor)
    item = tensor.element_size()
    spare = ALIGN_BYTES // item
    with torch.no_grad():
        raw = torch.empty(tensor.numel() + spare, dtype=tensor.dtype, device=tensor.device)
        shift = (-raw.data_ptr() % ALIGN_BYTES) // item
        return raw.as_strided(tensor.shape, stride, shift)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it covers its memory without holes or overlap, else those of a contiguous one."""
    own = tuple(tensor.stride())  # also those of dimensions of size 1: kernels look at them
    if tensor.is_contiguous():
        return own
    contiguous = _contiguous_stride(tuple(tensor.shape))
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return contiguous
        expected *= size
    return own


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _entry(
    name: str, unit: int, kind: Literal["param", "buffer"], tensor: Tensor, offset: int, tied_to: int = -1
) -> Entry:
    stride = dense_stride(tensor) if kind == "param" else _contiguous_stride(tuple(tensor.shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Entry(name, unit, kind, tuple(tensor.shape), tensor.numel(), offset, stride, dtype, tied_to)


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Identity of a tensor's memory and form: equal for leaves of a tie."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    start = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()
    return (start, tensor.device, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _own_leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    return leaf


def _refuse_hooks(model: nn.Module, parameter: nn.Parameter) -> None:
    hooks = [*(parameter._backward_hooks or {}).values()]
    hooks += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    changing = [h for h in hooks if not str(getattr(h, "__module__", "")).startswith("wandb.")]  # its `watch` reads
    if changing and parameter.requires_grad:
        raise ConfigError(
            f"parameter {_parameter_names(model)[id(parameter)]} has a hook on its gradient, but each unit that uses "
            "it has a gradient of its own: take the hook away, or make one unit that holds all its uses"
        )


def _parameter_names(model: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_lazy(parameter):
            raise ConfigError(f"parameter {name} has no shape yet; run the model once before training (lazy modules)")
        names.setdefault(id(parameter), name)
    return names


def _refuse_overlap(model: nn.Module, units: Sequence[nn.Module]) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    unit_of: dict[int, int] = {}
    for number, unit in enumerate(units):
        for module in unit.modules():
            if id(module) not in names:
                if not module._parameters and not module._buffers:
                    continue  # a wrapper that only joins modules of the model
                raise ConfigError(f"unit {number} holds a {type(module).__name__} that is no module of the model")
            other = unit_of.setdefault(id(module), number)
            if other != number:
                raise ConfigError(
                    f"module {names[id(module)] or 'the model itself'} is in units {other} and {number}; "
                    "make one unit that holds both uses"
                )


def _refuse_uncovered(model: nn.Module, names: dict[int, str], seen: set[int], laid_out: set[str]) -> None:
    for parameter in model.parameters():
        if id(parameter) not in seen and parameter.requires_grad:
            raise ConfigError(f"parameter {names[id(parameter)]} is in no unit; units() must hold all parameters")
    for name, _ in running_statistics(model, model):
        if name not in laid_out:
            raise ConfigError(f"running statistic {name} is in no unit; units() must hold all BatchNorm modules")
