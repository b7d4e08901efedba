"""Several optimizers, or several schedulers, as one: the rest of a job sees the groups and the state of all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial, wraps
from itertools import chain
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.base.errors import ConfigError


class OptimizerSet(Optimizer):
    """Optimizers that are stepped one after the other. members: by name, in that order; none shares a parameter with
    another."""

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        self.members = dict(members)  # nothing of torch's own: groups, state and hooks are those of the members
        self.defaults = {}
        self.state = _States(self.members)  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for member in self.members.values() for group in member.param_groups]

    @property
    def _optimizer_step_pre_hooks(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return self._hooks("_optimizer_step_pre_hooks")

    @property
    def _optimizer_step_post_hooks(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return self._hooks("_optimizer_step_post_hooks")

    def _hooks(self, kind: str) -> OrderedDict[int, Any]:
        return OrderedDict(chain.from_iterable(getattr(member, kind).items() for member in self.members.values()))


class _States(MutableMapping[Tensor, Any]):
    """State of the members' parameters. Raises: ConfigError if a member keeps something beside that."""

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        self._members = members
        self._owners = {id(p): m for m in members.values() for group in m.param_groups for p in group["params"]}

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owners[id(parameter)].state[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._owners[id(parameter)].state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owners[id(parameter)].state[parameter]

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._owners and parameter in self._owners[id(parameter)].state

    def __iter__(self) -> Iterator[Tensor]:
        for name, member in self._members.items():
            for key in member.state:
                if not isinstance(key, Tensor):
                    raise ConfigError(
                        f"the optimizer {name} ({type(member).__name__}) keeps state that belongs to no parameter "
                        f"({key!r:.40}), which is carried for a single optimizer alone: give join that one, or another"
                    )
                yield key

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members.values())

    def clear(self) -> None:
        for member in self._members.values():
            member.state.clear()


class SchedulerSet:
    """Schedulers that are stepped one after the other. members: in that order."""

    def __init__(self, members: list[Any]) -> None:
        self.members = members

    def step(self) -> None:
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(n): member.state_dict() for n, member in enumerate(self.members)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: ConfigError for another number of schedulers."""
        if len(state) != len(self.members):
            raise ConfigError(f"the state is of {len(state)} schedulers, and join was given {len(self.members)}")
        for n, member in enumerate(self.members):
            member.load_state_dict(state[str(n)])


def optimizers_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that this one consists of, by name; itself, if it is no set."""
    return optimizer.members if isinstance(optimizer, OptimizerSet) else {"": optimizer}


def schedulers_of(scheduler: Any) -> list[Any]:
    """The schedulers that this one consists of; itself, if it is no set, and nothing for None."""
    return scheduler.members if isinstance(scheduler, SchedulerSet) else [] if scheduler is None else [scheduler]


def before_each_step(kind: type, act: Callable[[Any, bool], None]) -> Callable[[], None]:
    """Have `act` called before each step of schedulers of this class, with the scheduler, and whether it is told a
    place, whatever was stepped before. Returns what undoes that. At the class, since torch takes an object's attributes
    for its state."""
    step, own = getattr(kind, "step", None), "step" in vars(kind)
    if not isinstance(step, FunctionType):
        return lambda: None

    @wraps(step)
    def guarded(scheduler: Any, *args: Any, **more: Any) -> Any:
        act(scheduler, any(value is not None for value in (*args, *more.values())))
        return step(scheduler, *args, **more)

    setattr(kind, "step", guarded)  # noqa: B010
    return partial(setattr, kind, "step", step) if own else partial(delattr, kind, "step")


def with_inner(scheduler: Any) -> list[Any]:
    """The schedulers that this one consists of, and those that torch's `SequentialLR` and `ChainedScheduler` hold."""
    found = schedulers_of(scheduler)[:]
    for one in found:  # it grows
        found += getattr(one, "_schedulers", ()) if isinstance(one, LRScheduler) else ()
    return found
