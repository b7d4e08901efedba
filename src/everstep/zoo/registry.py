"""The ready tasks by name. Importing this costs nothing: a task's own module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from everstep.base.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from everstep.train.task import Task

_TASKS = {
    "mlp-digits": ("digits", "MLPDigits"),
    **{f"resnet{n}-digits": ("digits", f"ResNet{n}Digits") for n in (18, 34, 50, 101, 152)},
    **{f"resnet{n}-folder": ("pictures", f"ResNet{n}Folder") for n in (18, 34, 50, 101, 152)},
    "transformer-text": ("text", "TransformerText"),
    "hf": ("huggingface", "HuggingFace"),
}


def names() -> tuple[str, ...]:
    """Names that `load` knows."""
    return tuple(_TASKS)


def load(name: str) -> type[Task]:
    """Class of a ready task. Tasks that read files take their PATH as the constructor's only argument.

    Raises: ConfigError for an unknown name.
    """
    if name not in _TASKS:
        raise ConfigError(f"expected a ready task ({', '.join(_TASKS)}), got {name!r}{did_you_mean(name, _TASKS)}")
    module, kind = _TASKS[name]
    return cast("type[Task]", getattr(importlib.import_module(f"everstep.zoo.{module}"), kind))
