"""Models, optimizers and schedulers that cannot be trained exactly: each is refused by name before the start, with a
remedy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel

from everstep.base.errors import ConfigError
from everstep.checkpoint.tensor_file import form_of, refuse_dtype
from everstep.exact.extra_state import refuse_uncarried
from everstep.exact.layout import memory_of
from everstep.exact.several import optimizers_of, schedulers_of

_NOTHING = 1e-9
"""Part of the learning rate that trains nothing any more."""
_FEW_UPDATES = 10
"""A job of fewer updates per epoch says nothing about what a schedule was made for."""


def refuse_unsupported(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Check the arguments of a job. Raises: ConfigError for unsupported ones."""
    if not isinstance(model, nn.Module):
        several = isinstance(model, list | tuple | dict)
        remedy = "put them into one (torch.nn.ModuleDict or ModuleList)" if several else "give one"
        raise ConfigError(f"expected a torch.nn.Module as the model, got {_named(model)}: {remedy}")
    if not isinstance(optimizer, Optimizer):
        several = isinstance(optimizer, list | tuple | dict)
        remedy = "give one optimizer with several parameter groups" if several else "give a torch.optim.Optimizer"
        raise ConfigError(f"expected one optimizer, got {_named(optimizer)}: {remedy}")
    for one in schedulers_of(scheduler):
        if isinstance(one, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau needs a metric at each step, which the update does not have: write a loop of your "
                "own, give it to join, and call scheduler.step(metric) there, or use one that counts steps"
            )
        _refuse_scheduler(one)
    for member in optimizers_of(optimizer).values():
        _refuse_optimizer(member)
    _refuse_wrapper(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is compiled by torch.jit, whose passes cannot be followed: give the module "
                "itself, or torch.compile it"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _refuse_embedding(name or "the model", module)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        _refuse_tensor(name, tensor)
    _refuse_unwritable(model)
    if not any(tensor.is_meta for _, tensor in tensors):  # else it was built to be looked at
        _refuse_shared_memory(tensors)
        refuse_uncarried(model)


def _refuse_unwritable(model: nn.Module) -> None:
    """Raises: ConfigError naming what final/, which is written after the last step, could not hold."""
    for path, module in model.named_modules():
        kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is not None:
                refuse_dtype(f"{path}.{name}" if path else name, form_of(tensor)[0])


def refuse_short_schedule(scheduler: Any, last: int) -> None:
    """Check that a schedule lasts as long as the job. Raises: ConfigError for a OneCycleLR that does not, which torch
    refuses to step any further. last: number of the last step."""
    for one in schedulers_of(scheduler):
        if isinstance(one, LRScheduler):
            _refuse_short(one, getattr(one, "last_epoch", 0) + last, last)


def schedule_of_epochs(scheduler: Any, epochs: int | None, last: int) -> str:
    """A remark on the first schedule that was made for one step an epoch, as far as its numbers show; "" if none was.
    last: number of the last update."""
    for one in schedulers_of(scheduler):
        why = _of_epochs(one, epochs or 0, last)
        if why:
            return (
                f"{type(one).__name__} is stepped once per update, {last} times in this job, and {why}: for one step "
                "per epoch give join(state={'scheduler': scheduler}) instead of scheduler=, and write "
                "'if step.epochs_over: scheduler.step()' after the batches"
            )
    return ""


def _of_epochs(one: Any, epochs: int, last: int) -> str:
    decays = last if isinstance(one, ExponentialLR) else last // one.step_size if isinstance(one, StepLR) else 0
    if decays and 0 < one.gamma < 1 and decays * math.log(one.gamma) < math.log(_NOTHING):
        return f"gamma={one.gamma:g} makes the learning rate nothing by its end"
    if 0 < _length(one) == epochs <= last // _FEW_UPDATES:
        return f"it is over after {epochs} steps, the number of epochs"
    if isinstance(one, MultiStepLR) and one.milestones and max(one.milestones) < epochs <= last // _FEW_UPDATES:
        return f"its milestones ({', '.join(map(str, sorted(one.milestones)))}) look like those of {epochs} epochs"
    return ""


def _length(one: Any) -> int:
    """Steps after which a cosine, alone or as the last of several, is at its end; 0 for other schedules."""
    if isinstance(one, SequentialLR):
        length = _length(one._schedulers[-1])
        return length and length + one._milestones[-1]
    return int(one.T_max) if isinstance(one, CosineAnnealingLR) else 0


def _refuse_short(scheduler: Any, reached: int, last: int) -> None:
    """reached: how often it has been stepped at the end, at most."""
    if isinstance(scheduler, OneCycleLR) and reached > scheduler.total_steps:
        total = int(scheduler.total_steps)
        raise ConfigError(
            f"OneCycleLR has total_steps={total}, but the job's last step is {last}, and by then it is stepped "
            f"{reached} times: give it total_steps={reached}, or the job steps={last - reached + total}"
        )
    inner = getattr(scheduler, "_schedulers", ())
    starts = getattr(scheduler, "_milestones", None)  # of a SequentialLR: one of its parts is stepped, the others stand
    for n, one in enumerate(inner):
        begins = 0 if starts is None or not n else starts[n - 1]
        ends = reached if starts is None or n == len(starts) else min(reached, starts[n] - 1)
        _refuse_short(one, ends - begins, last)


def refuse_scaler(extras: Mapping[str, Any]) -> None:
    """Check `state` of join. Raises: ConfigError for a GradScaler that is in use."""
    for name, extra in extras.items():
        if isinstance(extra, torch.amp.GradScaler) and extra.is_enabled():
            raise ConfigError(
                f"state[{name!r}] is a GradScaler: remove it, and give join(precision='fp16'), which scales the loss "
                "and carries the scale, or precision='bf16', which needs no scaling"
            )


def refuse_group() -> None:
    """Check for a process group. Raises: ConfigError if the script has one of several processes."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"torch.distributed is initialised, for {dist.get_world_size()} processes: workers compute different "
            "micro-batches, and come and go, so that collectives between them would hang: remove init_process_group"
        )


def refuse_unmade(model: nn.Module) -> None:
    """Check that the model has memory. Raises: ConfigError naming a parameter or buffer that has none yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"{name} is on the meta device: initialise the model first (model.to_empty(device='cpu'), and then its "
                "values), or write an everstep.Task with meta_init: true"
            )


def refuse_elsewhere(model: nn.Module, device: torch.device) -> None:
    """Check the model's device. Raises: ConfigError naming a parameter that is not on the batches' device."""
    for name, parameter in model.named_parameters():
        there = parameter.device
        if there.type != device.type or device.index not in (None, there.index):
            raise ConfigError(
                f"expected the model on device {device}, got {name} on {there}: move it (model.to('{device}')) before "
                f"its optimizer is built, or set device={there}"
            )


def _refuse_scheduler(scheduler: Any) -> None:
    if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"expected a scheduler with step(), state_dict() and load_state_dict(), got {_named(scheduler)}: add them"
        )
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        raise ConfigError(
            f"{_named(scheduler)}.step needs an argument, which the update does not have: give it a default, or give "
            "the scheduler to join as state={'scheduler': ...}, and step it in the loop"
        ) from None
    except ValueError:  # of no known signature
        return


def _refuse_optimizer(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ConfigError(
            f"{kind} evaluates the loss several times per update; use an optimizer without closures (step() alone)"
        )
    if isinstance(optimizer, SparseAdam):
        raise ConfigError(
            "SparseAdam takes sparse gradients, which are not summed exactly: use Adam, and sparse=False in embeddings"
        )
    for k, group in enumerate(optimizer.param_groups):
        if group.get("capturable") and any(p.device.type == "cpu" for p in group["params"]):
            raise ConfigError(
                f"{kind}: group {k} has capturable=True, which is for CUDA graphs: leave it out on the CPU"
            )


def _refuse_wrapper(model: nn.Module) -> None:
    kind = type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}: give the module in it (.module); "
                "Everstep itself shares the batches out"
            )
    if isinstance(model, AveragedModel):
        raise ConfigError(
            f"{kind} is the average of a model, not the model to train: give the model itself, and the average as "
            "state={'average': ...}, updated after each step"
        )


def _refuse_tensor(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ConfigError(f"{name} has no shape yet (a lazy module): run the model once on a batch before training")
    if tensor.is_quantized:
        raise ConfigError(f"{name} is quantized ({tensor.dtype}): train in floating point, and quantize the result")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name} is {tensor.layout}; only dense tensors can be carried: keep it dense (.to_dense())")


def _refuse_shared_memory(named: Sequence[tuple[str, Tensor]]) -> None:
    """Check for shared memory. Raises: ConfigError naming tensors that overlap without being one."""
    spans = []
    for name, tensor in named:
        if tensor.numel():
            size = 1 + sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            if size < tensor.numel():
                raise ConfigError(f"elements of {name} share memory with each other (expand?): make it .contiguous()")
            start = tensor.data_ptr()
            spans.append((start, start + size * tensor.element_size(), name, tensor))
    end, holder, held = -1, "", torch.empty(0)
    for start, stop, name, tensor in sorted(spans, key=lambda span: span[:2]):
        if start < end and memory_of(tensor) != memory_of(held):
            raise ConfigError(
                f"{holder} and {name} share memory without being one tensor; tie whole parameters (a.weight = "
                "b.weight), or give each memory of its own (.clone())"
            )
        if stop > end:
            end, holder, held = stop, name, tensor


def _refuse_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    kind = type(module).__name__
    if module.sparse:
        raise ConfigError(f"{name} ({kind}) has sparse gradients, which are not summed exactly: use sparse=False")
    if module.max_norm is not None:
        raise ConfigError(
            f"{name} ({kind}) has max_norm={module.max_norm:g}: it changes its weight in every forward pass, so lanes "
            "would affect each other: leave max_norm out, and scale its output in the model"
        )


def _named(value: Any) -> str:
    return type(value).__name__ if value is not None else "nothing"
