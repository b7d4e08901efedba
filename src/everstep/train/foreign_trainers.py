"""What an imported package of others may not do in a worker: form a process group of the workers, or train by itself.

Apart because none of these packages is imported here. A script imports them, and what follows waits for that moment.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from everstep.base.errors import ConfigError
from everstep.base.foreign import left_alone

_OURS = "everstep.integrations.huggingface"
_INSTEAD = (
    "{name}.train() would train in each worker by itself: write 'from everstep.integrations.huggingface import "
    "Trainer' in place of 'from transformers import Trainer'"
)


def one_process() -> None:
    """From here on, Accelerate (which `transformers.TrainingArguments` starts) takes this process for the only one,
    whatever a launcher, or the job, says in the environment."""
    after_import("accelerate.state", _apart)


def watch_trainers() -> None:
    """In a worker: `one_process`, and a trainer that would train by itself is refused when its `train` is called."""
    one_process()
    after_import("transformers.trainer", _guarded)


def _apart(module: ModuleType) -> None:
    def alone(begin: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        with _no_launcher():
            begin(self, *args, **kwargs)

    _wrap(module.PartialState, "__init__", alone)


def _guarded(module: ModuleType) -> None:
    def refusing(train: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = sys.modules.get(_OURS)
        if ours is None or not isinstance(self, ours.Trainer):
            raise ConfigError(_INSTEAD.format(name=type(self).__name__))
        return train(self, *args, **kwargs)

    _wrap(module.Trainer, "train", refusing)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Have calls of a method go through `around(method, self, ...)`, once."""
    method = vars(owner)[name]
    if getattr(method, "__wrapped__", None) is None:
        found = functools.wraps(method)(lambda self, *args, **kwargs: around(method, self, *args, **kwargs))
        type.__setattr__(owner, name, found)


@contextmanager
def _no_launcher() -> Iterator[None]:
    """In the body, the environment lacks the variables about one process among several."""
    before = dict(os.environ)
    kept = left_alone(before)
    for name in before.keys() - kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update({name: text for name, text in before.items() if name not in kept})


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Do this with a module once it has been imported, or now, if it has been."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    waiting = next((one for one in sys.meta_path if isinstance(one, _Waiting)), None)
    if waiting is None:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
    waiting.acts[name] = act


class _Waiting(MetaPathFinder):
    """Finds modules as the other finders do. acts: what to do with a module once it has been run, by its name."""

    def __init__(self) -> None:
        self.acts: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the finder of importlib."""
        act = self.acts.get(fullname)
        if act is None:
            return None
        others = (one for one in sys.meta_path if one is not self)
        found = next(filter(None, (one.find_spec(fullname, path, target) for one in others)), None)
        if found is not None and found.loader is not None:
            vars(found).update(loader=_Acting(found.loader, act))
        return found


class _Acting(Loader):
    """A module's loader, and what is done once it has run the module."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader, self._act = loader, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader of importlib."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the loader of importlib."""
        self._loader.exec_module(module)
        self._act(module)
