"""The state of an optimizer that the members have divided, as the user's code sees it: not at all."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from everstep.base.errors import ConfigError

_ALLOWED = ("everstep.", "torch.optim.")


class DividedState(defaultdict[Tensor, Any]):
    """`optimizer.state`, for this package, for torch's optimizers, and for the optimizer's own code during an update.
    Elements whose state other workers hold are zeros here: any other code is refused."""

    def __init__(self, optimizer: Optimizer, stepping: Callable[[], bool]) -> None:
        """Holds what the optimizer's state holds now. stepping: whether the optimizer is being stepped."""
        super().__init__(dict, optimizer.state)
        self._name, self._stepping = type(optimizer).__name__, stepping
        self._own = frozenset(kind.__module__ for kind in type(optimizer).__mro__)

    def _look(self) -> None:
        """Raises: ConfigError if the caller's caller may not see it."""
        module = str(sys._getframe(2).f_globals.get("__name__", ""))
        if not module.startswith(_ALLOWED) and not (self._stepping() and module in self._own):
            raise ConfigError(
                f"zero.stage: no worker has all of the state of {self._name}, so the loop cannot read "
                "optimizer.state: keep what it needs of it in a tensor of its own, or set zero.stage=0"
            )

    def __getitem__(self, parameter: Tensor) -> Any:
        self._look()
        return super().__getitem__(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        self._look()
        return super().__iter__()

    def get(self, parameter: Tensor, default: Any = None) -> Any:  # type: ignore[override]
        """As of any mapping. Raises: ConfigError for code that may not see it."""
        self._look()
        return super().get(parameter, default)

    def items(self) -> ItemsView[Tensor, Any]:  # type: ignore[override]
        """As of any mapping. Raises: ConfigError for code that may not see it."""
        self._look()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """As of any mapping. Raises: ConfigError for code that may not see it."""
        self._look()
        return super().values()

    def setdefault(self, parameter: Tensor, default: Any = None) -> Any:  # type: ignore[override]
        """As of any mapping. Raises: ConfigError for code that may not see it."""
        self._look()
        return super().setdefault(parameter, default)

    def pop(self, parameter: Tensor, *default: Any) -> Any:  # type: ignore[override]
        """As of any mapping. Raises: ConfigError for code that may not see it."""
        self._look()
        return super().pop(parameter, *default)

    def clear(self) -> None:
        """As of any mapping. Raises: ConfigError for code that may not see it."""
        self._look()
        super().clear()
