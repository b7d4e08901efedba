"""What modules and optimizers of `state=` keep beside their `state_dict`: modes, `requires_grad`, buffers that are not
persistent, attributes; of optimizers those of the user's own class. Attributes without tensors are carried once they
differ from the beginning: others may be of one machine.

Apart from `settings`, which is of the trained model, because any code may change these at any moment, and because they
are in no digest: a count of calls differs between workers, and may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from operator import methodcaller
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from everstep.base.errors import ConfigError
from everstep.exact.attributes import Watched, assign, encoded, is_apart, of_torch, plain, storage_of, storages
from everstep.exact.extra_state import has_extra_state
from everstep.exact.group_values import in_place, is_fixed
from everstep.exact.jsonable import Undigested, decode

_INTERNAL = frozenset(vars(nn.Module()))
_HELD = "held"


class BesideState:
    """What these modules and optimizers keep beside their state, by name. model: the trained one; its own parts are
    left out. known: storages of tensors that are carried otherwise; attributes in these are left out, too."""

    __slots__ = ("_first", "_known", "_model", "_things", "_watched")

    def __init__(
        self, model: nn.Module, things: Callable[[], Mapping[str, Any]], known: Callable[[], set[int]]
    ) -> None:
        self._model, self._things, self._known = model, things, known
        modules = [module for thing in things().values() for module in self._modules(thing).values()]
        self._first = {id(m): (m, {key: node for key, (node, _) in self._fields(m).items()}) for m in modules}
        own = {n: t for n, t in things().items() if isinstance(t, Optimizer) and not (of_torch(t) or defines_state(t))}
        self._watched = {name: Watched(optimizer) for name, optimizer in own.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that is kept beside now. Raises: ConfigError for what an optimizer has changed, and cannot be carried."""
        for name, watched in self._watched.items():
            if lost := watched.changed():
                raise ConfigError(
                    f"state: {lost[0]} of the optimizer {name} has changed and cannot be carried: keep it in self.state"
                )
        found: dict[str, Any] = {}
        for name, thing in self._things().items():
            if isinstance(thing, Optimizer):
                found[name] = {} if defines_state(thing) else plain(thing)
                continue
            modules = self._modules(thing)
            found[name] = {
                "modes": [module.training for module in modules.values()],
                "grads": [p.requires_grad for module in modules.values() for p in module.parameters(False)],
                "fields": {path: fields for path, m in modules.items() if (fields := self._changed(m))},
            }
        return {_HELD: Undigested(found)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it, in the tensors that are there. Raises: ConfigError for an attribute that is none."""
        for name, saved in state[_HELD].items():
            thing = self._things()[name]
            if isinstance(thing, Optimizer):
                assign(thing, saved)
                continue
            modules = self._modules(thing)
            for module, mode in zip(modules.values(), saved["modes"], strict=False):
                module.training = mode
            parameters = (p for module in modules.values() for p in module.parameters(False))
            for parameter, grad in zip(parameters, saved["grads"], strict=False):
                if parameter.requires_grad != grad:
                    parameter.requires_grad_(grad)
            for path, module in modules.items():
                self._put(module, saved["fields"].get(path, {}))

    def _modules(self, thing: Any) -> dict[str, nn.Module]:
        trained = {id(module) for module in self._model.modules()}
        modules = thing.named_modules() if isinstance(thing, nn.Module) else ()
        return {path: module for path, module in modules if id(module) not in trained}

    def _changed(self, module: nn.Module) -> dict[str, Any]:
        """What differs from the beginning, and all that holds tensors."""
        first = self._first.get(id(module), (module, {}))[1]
        return {k: v for k, (node, v) in self._fields(module).items() if node is ... or first.get(k, ...) != node}

    def _fields(self, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        """Attributes and other buffers that can be carried: as JSON (`...` if there are tensors), and the value."""
        found: dict[str, tuple[Any, Any]] = {}
        known = cache(self._known)
        for key, value in beside(module):
            said = (value, {}) if is_fixed(value) else encoded(key, value)
            if said is not None and (not said[1] or key in module._buffers or is_apart(said[1], known())):
                found[key] = ... if said[1] else said[0], value
        return found

    def _put(self, module: nn.Module, wanted: Mapping[str, Any]) -> None:
        known, first = id(module) in self._first, self._first.get(id(module), (module, {}))[1]
        for key, (node, _) in self._fields(module).items() if known else ():
            if key not in wanted and key not in first:
                delattr(module, key)
            elif key not in wanted and first[key] not in (node, ...):
                setattr(module, key, first[key] if is_fixed(first[key]) else decode(first[key], {}))
        for key, value in wanted.items():
            default = getattr(type(module), key, None)
            taken = key in _INTERNAL or key in module._parameters or key in module._modules or key.startswith("__")
            if taken or callable(default) or isinstance(default, property):
                raise ConfigError(f"the state sets {key[:100]!a} of a {type(module).__name__}, which is no attribute")
            where = next((t.device for t in (*module.parameters(), *module.buffers())), None)
            moved = tree_map_only(Tensor, methodcaller("to", where), value)
            setattr(module, key, in_place(getattr(module, key, None), moved))


def known_storages(things: Iterable[Any]) -> set[int]:
    """Storages of all tensors of these modules and optimizers, attributes aside."""
    modules = [thing for thing in things if isinstance(thing, nn.Module)]
    found = {storage_of(t) for module in modules for t in (*module.parameters(), *module.buffers())}
    return found.union(*(storages(thing) for thing in things if isinstance(thing, Optimizer)))


def kept_beside(thing: Any) -> list[Any]:
    """Values that are carried beside the `state_dict` of a module or an optimizer."""
    if isinstance(thing, Optimizer):
        return [] if defines_state(thing) else list(plain(thing).values())
    modules = thing.modules() if isinstance(thing, nn.Module) else ()
    return [value for module in modules for key, value in beside(module) if encoded(key, value) is not None]


def beside(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes, unless the class defines its state itself; and buffers that are not persistent."""
    if not defines_state(module):
        yield from ((key, value) for key, value in vars(module).items() if key not in _INTERNAL)
    yield from ((name, module._buffers[name]) for name in sorted(module._non_persistent_buffers_set))


def defines_state(thing: nn.Module | Optimizer) -> bool:
    """Whether the class says itself what the state of this module or optimizer is."""
    if isinstance(thing, Optimizer):
        return type(thing).state_dict is not Optimizer.state_dict
    return has_extra_state(thing) or type(thing).state_dict is not nn.Module.state_dict
