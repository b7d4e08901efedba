"""Training loops of other libraries in a script under `everstep run`: each worker would train a model of its own. They
are refused by the import, or the lines, to write instead.

The classes are found as the script imports them; nothing is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from everstep.base.errors import ConfigError
from everstep.integrations.accelerate import instead_of_accelerate
from everstep.train.reachable import of_user

_LIGHTNING = (
    "{name}.Trainer under 'everstep run' would train one model in each worker: write 'from "
    "everstep.integrations.lightning import Trainer' (the same arguments), or 'import everstep.integrations.lightning "
    "as L'"
)


def _accelerate(arguments: dict[str, Any]) -> str:
    return instead_of_accelerate(arguments.get("mixed_precision"), arguments.get("gradient_accumulation_steps"))


_REFUSED: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "lightning.pytorch.trainer.trainer": ("Trainer", "fit", lambda given: _LIGHTNING.format(name="lightning")),
    "pytorch_lightning.trainer.trainer": ("Trainer", "fit", lambda given: _LIGHTNING.format(name="pytorch_lightning")),
    "accelerate.accelerator": ("Accelerator", "__init__", _accelerate),
}
"""By module: the class, the method that begins its loop, and what is said, by the arguments."""


def refuse_plain_use() -> None:
    """From here on, a script's own use of these classes raises ConfigError."""
    for name in _REFUSED.keys() & sys.modules.keys():
        _guard(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def _guard(module: ModuleType) -> None:
    name, method, words = _REFUSED[module.__name__]
    kind = getattr(module, name, None)
    before = getattr(kind, method, None)
    if before is None:
        return

    def refusing(self: Any, *args: Any, **given: Any) -> Any:
        if method == "fit" or of_user(sys._getframe(1).f_code.co_filename):  # other libraries have Accelerators, too
            raise ConfigError(words(given))
        return before(self, *args, **given)

    setattr(kind, method, refusing)


class _Finder(MetaPathFinder):
    """Finds the modules of the table, as Python does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec, with a loader that guards the module; None for other modules."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _REFUSED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _GuardingLoader(spec.loader)
        return spec


class _GuardingLoader(Loader):
    """Loads as another loader does, and guards the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader; then the class is guarded."""
        self._loader.exec_module(module)
        _guard(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and the like
