"""Structure of a model, which cannot be carried as data: its modules, their classes, their own parameters, and hooks.

A script sets these up alike before its loop in every life. A change inside the loop would be missing in a worker that
is resumed or healed, so it is refused by name in the step in which it is made. Values (`settings`) are carried.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

from torch import nn
from torch.nn.modules import module as _torch_module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from everstep.base.errors import Restructured

_KINDS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_GRADIENT_KINDS = {"_backward_hooks": "gradient hook", "_post_accumulate_grad_hooks": "gradient hook (accumulated)"}
_values = methodcaller("values")
_at_gradients, _after_gradients = map(attrgetter, _GRADIENT_KINDS)
_STEP_KINDS = {"_optimizer_step_pre_hooks": "step pre-hook", "_optimizer_step_post_hooks": "step post-hook"}
_REMEDY = (
    "a worker that is resumed or healed would lack that, as only values are carried: do it before the loop, in every "
    "life, and let a buffer or an attribute of the model say from when on it counts"
)


class Structure:
    """Structure of a model and its optimizer at the time when this was made."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._walk()

    def _walk(self) -> None:
        """Remember the structure, and where to look for changes."""
        named = dict(self._model.named_modules())
        self.modules = named
        self._parameters = list(self._model.named_parameters())
        self._trees = [m._modules for m in named.values()]
        self._own = [m._parameters for m in named.values()]
        hooks = [vars(m)[kind] for m in named.values() for kind in _KINDS if kind in vars(m)]
        self._hooks = [*hooks, *(getattr(_torch_module, f"_global{kind}") for kind in _KINDS)]
        self._hooked = [found for found in self._hooks if found]
        self._leaves = [parameter for _, parameter in self._parameters]
        self._seen = self._look()
        self._facts = self._describe()

    def _look(self) -> tuple[Any, ...]:
        """Identities of all parts, fast."""
        self._registered = RemovableHandle.next_id
        groups = self._optimizer.param_groups
        return (
            self._tree(),
            [*map(type, self.modules.values())],
            [*map(id, chain.from_iterable(map(_values, self._own)))],
            [*map(len, self._hooks)],
            [*map(tuple, self._hooked)],
            [tuple(found) for found in map(_at_gradients, self._leaves) if found],
            [tuple(found) for found in map(_after_gradients, self._leaves) if found],
            [*map(tuple, (getattr(self._optimizer, kind, ()) for kind in _STEP_KINDS))],
            [len(group["params"]) for group in groups],
        )

    def _tree(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(_values, self._trees)))]

    def check(self, lanes: bool = True) -> bool:
        """Whether the structure is the same. lanes: forward passes have run. These may make modules without parameters;
        then only the changes they can make are looked for: modules, and whether torch has numbered another hook.

        Raises: Restructured naming a change that cannot be carried.
        """
        if lanes and self._registered == RemovableHandle.next_id and self._tree() == self._seen[0]:
            return True
        if self._look() == self._seen:
            return True
        before, known = self._facts, self.modules
        self._walk()
        now = self._facts
        for key in [*before, *(key for key in now if key not in before)]:
            if before.get(key) != now.get(key) and not (lanes and self._made_by_forward(key, known)):
                raise Restructured(f"{_change_text(key, before.get(key), now.get(key))}; {_REMEDY}")
        return False

    def _made_by_forward(self, key: tuple[str, str], known: Mapping[str, nn.Module]) -> bool:
        """Whether the module was not there when the loop began, and has nothing to train."""
        of, name = key
        module = self.modules.get(name)
        return of == "module" and name not in known and module is not None and not module.state_dict()

    def _describe(self) -> dict[tuple[str, str], Any]:
        """The structure by name, for words: class, own parameters, hooks."""
        facts: dict[tuple[str, str], Any] = {}
        for name, module in self.modules.items():
            facts["module", name] = _called(type(module))
            facts["parameters", name] = [(k, id(p)) for k, p in module._parameters.items() if p is not None]
            for kind, word in _KINDS.items():
                facts[word, name] = _names(vars(module).get(kind))
        for name, parameter in self._parameters:
            for kind, word in _GRADIENT_KINDS.items():
                facts[word, name] = _names(getattr(parameter, kind, None))
        for kind, word in _STEP_KINDS.items():
            facts[word, "the optimizer"] = _names(getattr(self._optimizer, kind, None))
        for kind, word in _KINDS.items():
            facts[word, "all modules"] = _names(getattr(_torch_module, f"_global{kind}"))
        facts["group sizes", "the optimizer"] = [len(group["params"]) for group in self._optimizer.param_groups]
        return {key: fact for key, fact in facts.items() if fact}


def _names(hooks: Any) -> list[str]:
    return [_called(hook) for hook in (hooks or {}).values() if not _is_ours(hook)]


def _inner(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _is_ours(hook: Any) -> bool:
    return str(getattr(_inner(hook), "__module__", "")).startswith("everstep.")


def _called(thing: Any) -> str:
    inner = _inner(thing)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def _change_text(key: tuple[str, str], before: Any, now: Any) -> str:
    """Description of a change that the loop made."""
    of, name = key
    name = name or "the model"
    if of == "module" and before is None:
        return f"module {name} ({now}) was put into the model in the loop"
    if of == "module":
        gone = "was taken out of the model" if now is None else f"was made a {now}"
        return f"module {name} ({before}) {gone} in the loop"
    if of == "parameters":
        return f"{', '.join(_changed(before, now))} of module {name} got another parameter in the loop"
    if of == "group sizes":
        return f"the optimizer's groups held {before} parameters and hold {now} since the loop began"
    added = [hook for hook in now or () if hook not in (before or ())]
    if added:
        return f"a {of} ({', '.join(added)}) was registered on {name} in the loop"
    return f"a {of} ({', '.join(before or ('?',))}) of {name} was removed or replaced in the loop"


def _changed(before: Any, now: Any) -> Iterator[str]:
    one, other = dict(before or ()), dict(now or ())
    return (name for name in {**one, **other} if one.get(name) != other.get(name))
