"""The optimizers and schedulers that a script gives to `join`: one each, or lists or dicts of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from everstep.base.errors import ConfigError
from everstep.exact.several import OptimizerSet, SchedulerSet, optimizers_of


def one_optimizer(given: Any) -> Any:
    """The optimizer, or those of a list or dict as one. Raises: ConfigError for anything else in these, or a parameter
    that two have."""
    members = {str(name): one for name, one in _items(given)} if isinstance(given, list | tuple | Mapping) else None
    for one in [given] if members is None else members.values():
        if type(one).__module__.partition(".")[0] == "accelerate":
            raise ConfigError(
                f"{type(one).__name__}: accelerate's prepare has wrapped the optimizer: leave Accelerator out, and "
                "give join the model, the optimizer and the DataLoader as they were"
            )
    if members is None:
        return given
    for name, one in members.items():
        if not isinstance(one, Optimizer):
            raise ConfigError(f"optimizer {name}: expected a torch.optim.Optimizer, got {type(one).__name__}: give one")
    if not members:
        raise ConfigError("expected at least one optimizer, got an empty collection: give a torch.optim.Optimizer")
    owners: dict[int, str] = {}
    for name, one in members.items():
        for parameter in (p for group in one.param_groups for p in group["params"]):
            if owners.setdefault(id(parameter), name) != name:
                raise ConfigError(
                    f"the optimizers {owners[id(parameter)]} and {name} hold the same parameter (of shape "
                    f"{tuple(parameter.shape)}): give each parameter to one of them"
                )
    return OptimizerSet(members) if len(members) > 1 else next(iter(members.values()))


def name_alone(given: Any) -> str:
    """The name of an optimizer that is alone in a list or dict; "" without one."""
    return str(_items(given)[0][0]) if isinstance(given, list | tuple | Mapping) and len(given) == 1 else ""


def schedulers_apart(given: Any, optimizer: Any, extras: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The scheduler that is stepped once per update (None: there is none); and what else is carried: extras, and the
    schedulers that go by a metric, which the loop steps.

    Raises: ConfigError for a scheduler of an optimizer that join was not given.
    """
    members = optimizers_of(optimizer).values() if isinstance(optimizer, Optimizer) else ()
    found = _flat(given)
    for one in found:
        drives = getattr(one, "optimizer", None)
        if isinstance(drives, Optimizer) and all(drives is not member for member in members):
            raise ConfigError(
                f"the scheduler {type(one).__name__} drives an optimizer that join was not given: give that, too"
            )
    by_metric = {f"everstep.scheduler{n}": one for n, one in enumerate(found) if isinstance(one, ReduceLROnPlateau)}
    rest = [one for one in found if not isinstance(one, ReduceLROnPlateau)]
    return SchedulerSet(rest) if len(rest) > 1 else next(iter(rest), None), {**extras, **by_metric}


def _items(given: Any) -> list[tuple[Any, Any]]:
    return list(given.items() if isinstance(given, Mapping) else enumerate(given))


def _flat(given: Any) -> list[Any]:
    if isinstance(given, list | tuple | Mapping):
        return [one for _, inner in _items(given) for one in _flat(inner)]
    return [] if given is None else [given]
