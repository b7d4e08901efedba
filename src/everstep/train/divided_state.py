"""The state of an optimizer that the members have divided, as the user's code sees it: not at all."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from everstep.base.errors import ConfigError

_ALLOWED = ("everstep.", "torch.optim.")


def _looked_at(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a mapping, for those who may see its content."""

    def called(state: DividedState, *given: Any) -> Any:
        state.look()
        return method(state, *given)

    return called


class DividedState(defaultdict[Tensor, Any]):
    """`optimizer.state`, for this package, for torch's optimizers, and for the optimizer's own code during an update.
    Elements whose state other workers hold are zeros here: any other code is refused."""

    def __init__(self, optimizer: Optimizer, stepping: Callable[[], bool]) -> None:
        """Holds what the optimizer's state holds now. Whoever has that mapping under another name, which is not kept up
        from here on, finds this one in it. stepping: whether the optimizer is being stepped."""
        before = optimizer.state
        super().__init__(dict, before)
        self._name, self._stepping = type(optimizer).__name__, stepping
        self._own = frozenset(kind.__module__ for kind in type(optimizer).__mro__)
        for group in optimizer.param_groups:
            before.update(dict.fromkeys(group["params"], self))

    def look(self) -> None:
        """Raises: ConfigError if the caller's caller may not see it."""
        module = str(sys._getframe(2).f_globals.get("__name__", ""))
        if not module.startswith(_ALLOWED) and not (self._stepping() and module in self._own):
            raise ConfigError(
                f"zero.stage: no worker has all of the state of {self._name}, so the loop cannot read "
                "optimizer.state: keep what it needs of it in a tensor of its own, or set zero.stage=0"
            )

    __getitem__, __iter__, __contains__, get, items, values, setdefault, pop, clear = (  # type: ignore[assignment]
        _looked_at(getattr(defaultdict, name))
        for name in ("__getitem__", "__iter__", "__contains__", "get", "items", "values", "setdefault", "pop", "clear")
    )
