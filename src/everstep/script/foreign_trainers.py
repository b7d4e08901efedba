"""What an imported package of others may not do in a worker: form a process group of the workers, or train by itself.

Apart because none of these packages is imported here. A script imports them, and what follows waits for that moment.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from everstep.base.errors import ConfigError
from everstep.base.foreign import left_alone
from everstep.script.reachable import of_user

_TRAINS = "{name} under 'everstep run' would train one model in each worker: write 'from {ours} import Trainer'"
_PRECISIONS = ("fp16", "bf16")


def instead_of_accelerate(mixed_precision: Any = None, accumulation: Any = 1) -> str:
    """What to write in place of a loop of Accelerate's with these arguments, in one line."""
    more = f", accumulate={accumulation}" if type(accumulation) is int and accumulation > 1 else ""
    if isinstance(mixed_precision, str) and mixed_precision in _PRECISIONS:
        more += f", precision={mixed_precision!r}"
    return (
        "accelerate.Accelerator is not carried, because its loop updates between batches that workers share here: "
        "instead of prepare, accumulate, clip_grad_norm_, step and zero_grad write 'run = everstep.join(model, "
        f"optimizer, dataloader, scheduler=scheduler{more}, clip_norm=1.0, epochs=3)', 'for step in run:', 'for batch "
        "in step:', 'step.backward(loss)'; for gather_for_metrics run.evaluate, for is_main_process run.is_main; leave "
        "out unwrap_model and save_state"
    )


def _of_accelerator(given: Mapping[str, Any]) -> str:
    return instead_of_accelerate(given.get("mixed_precision"), given.get("gradient_accumulation_steps"))


def _of_trainer(name: str, integration: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda given: _TRAINS.format(name=name, ours=f"everstep.integrations.{integration}")


_REFUSED: dict[str, tuple[str, str, Callable[[Mapping[str, Any]], str]]] = {
    "transformers.trainer": ("Trainer", "train", _of_trainer("transformers.Trainer", "huggingface")),
    "lightning.pytorch.trainer.trainer": ("Trainer", "fit", _of_trainer("lightning.Trainer", "lightning")),
    "pytorch_lightning.trainer.trainer": ("Trainer", "fit", _of_trainer("pytorch_lightning.Trainer", "lightning")),
    "accelerate.accelerator": ("Accelerator", "__init__", _of_accelerator),
}
"""By module: the class, the method that begins its loop, and what is said, by its arguments."""


def one_process() -> None:
    """From here on, Accelerate (which `transformers.TrainingArguments` starts) takes this process for the only one,
    whatever a launcher, or the job, says in the environment."""
    after_import("accelerate.state", _apart)


def watch_trainers() -> None:
    """In a worker: `one_process`, and a script's own use of classes that would train by themselves is refused."""
    one_process()
    for name in _REFUSED:
        after_import(name, _guarded)


def _apart(module: ModuleType) -> None:
    def alone(begin: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        with _no_launcher():
            begin(self, *args, **kwargs)

    _wrap(module.PartialState, "__init__", alone)


def _guarded(module: ModuleType) -> None:
    name, method, words = _REFUSED[module.__name__]

    def refusing(begin: Callable[..., Any], self: Any, *args: Any, **given: Any) -> Any:
        ours = any(kind.__module__.startswith("everstep.") for kind in type(self).__mro__)
        # other libraries have Accelerators, too: the frames behind this one are the wrapper's and its caller's
        if not ours and (method != "__init__" or of_user(sys._getframe(2).f_code.co_filename)):
            raise ConfigError(words(given))
        return begin(self, *args, **given)

    _wrap(getattr(module, name), method, refusing)


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
        """The spec, with a loader that acts; None for modules for which nothing waits."""
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
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run it as its own loader does, then act."""
        self._loader.exec_module(module)
        self._act(module)
