"""Weights from elsewhere into a model and its optimizer: every name must fit, and what does not is said by name.

Apart from the formats because it is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.base.errors import ConfigError
from everstep.checkpoint.interchange import Weights, memory_of
from everstep.exact.digest import bytes_of

_NAMED = 5


def take_weights(weights: Weights, model: nn.Module, optimizer: Optimizer | None = None) -> str:
    """Copies weights into the model, and the optimizer's state too where there is some; returns what was taken.

    A tied parameter may come under any of its names, or several with equal values.

    Raises: ConfigError naming missing, unexpected and mis-shaped tensors; nothing is changed then.
    """
    targets = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    ties: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in targets.items():
        ties.setdefault(memory_of(name, tensor), []).append(name)
    chosen = _choose(weights.model, targets, list(ties.values()))
    state = None if weights.optimizer is None or optimizer is None else _states(weights.optimizer, model, optimizer)
    with torch.no_grad():
        for name, tensor in chosen.items():
            targets[name].detach().copy_(tensor)
    if state is None or optimizer is None:
        return f"{len(chosen)} tensors, optimizer state fresh"
    groups, per_parameter = state
    optimizer.state.clear()
    for parameter, values in per_parameter.items():
        optimizer.state[parameter] = values
    for group, loaded in zip(optimizer.param_groups, groups, strict=True):
        group.update(loaded)
    return f"{len(chosen)} tensors, optimizer state of {len(per_parameter)} parameters"


def _choose(found: Mapping[str, Tensor], targets: Mapping[str, Tensor], ties: list[list[str]]) -> dict[str, Tensor]:
    """One name of each tie, with the tensor to put there."""
    chosen: dict[str, Tensor] = {}
    missing, shapes, apart = [], [], []
    for names in ties:
        here = [name for name in names if name in found]
        if not here:
            missing.append(names[0])
            continue
        tensor, target = found[here[0]], targets[here[0]]
        if tuple(tensor.shape) != tuple(target.shape) or tensor.dtype != target.dtype:
            shapes.append(f"{here[0]} ({_kind(tensor)} there, {_kind(target)} in the model)")
            continue
        if any(bytes_of(found[other]) != bytes_of(tensor) for other in here[1:]):
            apart.append(" and ".join(here))
            continue
        chosen[here[0]] = tensor
    unexpected = sorted(set(found) - set(targets))
    problems = [
        f"{words}: {_listed(names)}"
        for words, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another type or shape", shapes),
            ("tied in the model but different there", apart),
        )
        if names
    ]
    if problems:
        raise ConfigError(f"the weights do not fit the task's model; {'; '.join(problems)}")
    return chosen


def _states(
    loaded: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> tuple[list[dict[str, Any]], dict[nn.Parameter, dict[str, Any]]]:
    """The groups' values and each parameter's state, by name or (as `Optimizer.state_dict` has it) by number."""
    try:
        states, groups = dict(loaded["state"]), list(loaded["param_groups"])
        theirs = [list(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the optimizer's part is not as torch writes it: no {error}") from None
    by_memory: dict[tuple[Any, ...], list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_memory.setdefault(memory_of(str(id(parameter)), parameter), []).append(name)
    parameters: dict[Any, nn.Parameter] = {}
    number = 0
    if len(theirs) != len(optimizer.param_groups):
        raise ConfigError(f"the optimizer has {len(optimizer.param_groups)} groups, the weights' one has {len(theirs)}")
    for k, group in enumerate(optimizer.param_groups):
        allowed: set[Any] = set()
        for parameter in group["params"]:
            keys = [*by_memory.get(memory_of(str(id(parameter)), parameter), []), number]
            parameters |= dict.fromkeys(keys, parameter)
            allowed |= set(keys)
            number += 1
        if set(theirs[k]) - allowed or len(theirs[k]) != len(group["params"]):
            raise ConfigError(f"the optimizer's group {k} holds other parameters than the one of the weights")
    lost = [key for key in states if key not in parameters]
    if lost:
        raise ConfigError(f"the optimizer's part has state for {lost[0]}, which the optimizer does not have")
    values = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return values, {parameters[key]: _own(parameters[key], state) for key, state in states.items()}


def _own(parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state in memory of its own, with the parameter's layout where it has its shape."""
    own: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            own[key] = torch.empty_like(parameter, dtype=value.dtype).detach().copy_(value)
        else:
            own[key] = value.clone() if isinstance(value, Tensor) else value
    return own


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
