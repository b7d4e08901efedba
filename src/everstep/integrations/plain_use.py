"""Training loops of other libraries in a script under `everstep run`: each worker would train a model of its own. They
are refused by the import, or the lines, to write instead.

The classes are found as the script imports them; nothing is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from everstep.base.errors import ConfigError
from everstep.integrations.accelerate import instead_of_accelerate
from everstep.train.foreign_trainers import after_import
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
    for name in _REFUSED:
        after_import(name, _guard)


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
