"""The sizes of a task's model, counted on torch's meta device: no parameter is made, no kernel runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from everstep.base.errors import ConfigError
from everstep.data.reading import first_samples
from everstep.exact.divisible import divided_parameters, divisible, tensor_bytes
from everstep.exact.layout import GradientLayout, untie
from everstep.exact.shard_sums import ShardMesh
from everstep.exact.wrapping import wrapped
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.train.optimizer_kind import OptimizerKind, kind_of
from everstep.train.precision import computing
from everstep.train.stage import cut_into_shards
from everstep.train.task import Task

_ASSUMED_OPTIMIZER = 8
_TRIED = 4
_TRIED_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Counted:
    """Number of trained parameters; bytes of all parameters, of buffers, of the optimizer's state, and of what one
    lane's forward pass keeps for its backward pass. forward_flops: operations of that pass, 0 where it cannot be
    counted. units: where the model may be cut. optimizer: which parts it can update apart, None if that cannot be
    tried. assumed: what was taken for granted where it cannot be counted. exchanged_bytes: gradients that processes of
    one worker exchange at once, by `cell.wrap`; unit_bytes: of the largest unit. shard_bytes: the largest tensor of all
    shards that ranks who compute a lane together exchange; activations are those of one rank. undivided: parameters,
    and bytes of the optimizer's state for these, that `zero.stage` leaves to each worker."""

    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    forward_flops: int
    units: int
    optimizer: OptimizerKind | None
    assumed: tuple[str, ...]
    exchanged_bytes: int = 0
    shard_bytes: int = 0
    unit_bytes: int = 0
    undivided: tuple[int, int] = (0, 0)


class _Shapes:
    """The exchange of a rank on the meta device. largest: bytes of what has come of all shards at once."""

    def __init__(self, shards: int) -> None:
        self.largest, self._shards = 0, shards

    def gather(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """A tensor for each shard."""
        self.largest = max(self.largest, self._shards * mine[0].nbytes)
        return [torch.empty_like(mine[0]) for _ in range(self._shards)]


def count_task(task: Task, micro_batch: int) -> Counted:
    """Count a task whose config is set. Raises: ConfigError if its model cannot be built on the meta device."""
    try:
        with torch.device("meta"):
            model = task.build_model()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model cannot be built on torch's meta device ({_line(error)}); give its size as --params 125M"
        ) from None
    model.to("meta")
    assumed: list[str] = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in parameters)
    if not count:
        raise ConfigError("the model has no parameter that is trained")
    try:
        optimizer_bytes, undivided = _optimizer_bytes(task, parameters)
    except Exception as error:
        optimizer_bytes, undivided = _ASSUMED_OPTIMIZER * count, (0, 0)
        assumed.append(
            f"{_ASSUMED_OPTIMIZER} bytes per parameter for the optimizer, which cannot be counted ({_line(error)})"
        )
    (exchanged, unit), units = _exchanged(task, model), _units(task, model)
    shards, degree = task.config.cell.shards, task.config.cell.tp
    seen = _Shapes(shards)
    mesh = cut_into_shards(task, model, task.config) or ShardMesh(1)
    activation_bytes = forward_flops = 0
    try:
        with mesh.among(0, degree, seen):
            activation_bytes, forward_flops = _of_forward(task, model, micro_batch)
    except Exception as error:
        assumed.append(f"no activations, which cannot be counted ({_line(error)})")
    kind = _kind(task, parameters)
    if kind is not None and (kind.divides == "nothing" or not kind.follows):
        undivided = count, optimizer_bytes
    return Counted(
        count,
        sum(p.numel() * p.element_size() for p in model.parameters()),
        sum(b.numel() * b.element_size() for b in model.buffers()),
        optimizer_bytes,
        activation_bytes,
        forward_flops,
        units,
        kind,
        tuple(assumed),
        exchanged,
        seen.largest,
        unit,
        undivided,
    )


def _optimizer_bytes(task: Task, parameters: list[nn.Parameter]) -> tuple[int, tuple[int, int]]:
    """State after the first update; and of what members do not divide, parameters and their state."""
    optimizer = task.build_optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    divided = {*divided_parameters(optimizer, filter(divisible, parameters))}
    kept = {p: tensor_bytes(optimizer.state.get(p)) for p in parameters}
    rest = [p for p in parameters if p not in divided]
    return sum(kept.values()), (sum(p.numel() for p in rest), sum(kept[p] for p in rest))


def _kind(task: Task, parameters: list[nn.Parameter]) -> OptimizerKind | None:
    """Found with an optimizer of the task's own over parameters like a few of these, large ones with fewer rows."""
    ordered = sorted(parameters, key=lambda p: (p.numel() > _TRIED_ELEMENTS, -p.numel()))
    shapes = list(dict.fromkeys((_smaller(tuple(p.shape)), p.dtype) for p in ordered))
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in shapes[:_TRIED]]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    try:
        unfit = NonfiniteRule.of(task.config).applies
        return kind_of(task.build_optimizer(made), seed=0, dealt=True, ahead=True, unfit=unfit)
    except Exception:
        return None


def _smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter, with no more rows than make `_TRIED_ELEMENTS`."""
    size = math.prod(shape)
    return shape if size <= _TRIED_ELEMENTS else (max(1, shape[0] * _TRIED_ELEMENTS // size), *shape[1:])


def _units(task: Task, model: nn.Module) -> int:
    try:
        return len(task.units(model) or [model])
    except Exception:
        return 1


def _exchanged(task: Task, model: nn.Module) -> tuple[int, int]:
    """Bytes of what is exchanged at once, and of the largest unit."""
    try:
        units = task.units(model) or [model]
        untie(model, units)
        layout = GradientLayout.build(model, units)
        found = [wrapped(layout, least) for least in (task.config.cell.least, None)]
    except Exception:
        whole = sum(4 * p.numel() for p in model.parameters())
        return whole, whole
    exchanged, unit = (4 * max((one.stop - one.start for one in some), default=0) for some in found)
    return exchanged, unit


def _of_forward(task: Task, model: nn.Module, micro_batch: int) -> tuple[int, int]:
    """Bytes that the forward pass of one lane keeps, and its operations."""
    samples = first_samples(task.build_dataset("train"), micro_batch)
    batch = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, task.collate(samples))
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in own:
            kept[place] = tensor  # held, so that no other storage gets its place
        return tensor

    passes = computing(replace(task.config, precision="fp32"), torch.device("meta"), task.units(model))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), FlopCounterMode(display=False) as flops:
        with passes:
            task.loss(model, batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), flops.get_total_flops()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
