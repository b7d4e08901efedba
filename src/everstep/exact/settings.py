"""Settings of a model: modes, `requires_grad`, plain attributes of modules, hyperparameters, flags of torch. They are
state without tensors that a script may change between steps.

Only differences from the beginning of the loop are carried; a script sets up the rest alike in every life. A step has
three moments here: `before_lanes`, `digests` once the lanes are computed, and `after_update`. A change between the
update and the next lanes was made by the loop. An attribute of a user's own class that changes while lanes are computed
(a counter of calls, the size of a cache) depends on which worker computed them, so it is left out.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.base.errors import CheckpointCorrupt, ConfigError, Uncarried
from everstep.exact import flags
from everstep.exact.attributes import added
from everstep.exact.extra_state import has_extra_state
from everstep.exact.group_values import SCALARS, hyperparameters, is_fixed, put_values, told_value
from everstep.exact.jsonable import decode, encode
from everstep.exact.structure import Structure
from everstep.protocol.converter import converter

_CONTAINERS = frozenset({list, tuple, dict})
_INTERNAL = frozenset(vars(nn.Module()))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
_COMPUTED = (Tensor, np.ndarray, np.generic, complex, set, frozenset, deque, type, types.SimpleNamespace, *_FUNCTIONS)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MOST_ITEMS, _MOST_TEXT = 64, 4096
_DRIVEN = 2
"""Times that the loop changes a value until it is certainly the loop's: an evaluation may change a count once."""
_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")

_Key = tuple[str, str]  # name of a module, and of its attribute


class _Packed(NamedTuple):
    """Content of a small container."""

    text: str


class _Other(NamedTuple):
    """A value that cannot be carried. at: its identity, so that it is seen if another one takes its place; 0 for an
    object of a library, which may exchange its own."""

    type_name: str
    at: int


class Said(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Carried settings, as JSON: those that differ from the beginning of the loop, by name. hyperparameters: those that
    the loop has ever changed, by number of the group and name."""

    modes: dict[str, bool] = {}
    requires_grad: dict[str, bool] = {}
    attributes: dict[str, dict[str, Any]] = {}
    flags: dict[str, Any] = {}
    hyperparameters: dict[str, dict[str, Any]] = {}


_said = converter(Said)


class _Watched:
    """Attributes of one module: at the beginning of the loop, and at the last look."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.of_torch = type(module).__module__.startswith("torch.")
        self.first = self.look()

    def look(self) -> dict[str, Any]:
        self.now = _attributes(self.module)
        return self.now


class _Attributes:
    """Attributes of all modules. They are looked at twice in each step, so all plain ones are compared at once."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.of = {name: _Watched(module) for name, module in modules.items()}
        self._anew: set[_Key] = set()
        self.begun = False
        """Whether a lane has been computed since the loop began."""
        self._seen: tuple[list[int], list[Any]] | None = None
        self.remember()

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Take over modules that were exchanged for others of their kind."""
        for name, watched in self.of.items():
            if modules.get(name, watched.module) is not watched.module:
                watched.module, self._seen = modules[name], None

    def remember(self) -> None:
        """Remember the last look, which later looks are compared with."""
        self._fields, self._plain, self._packed, self._others = [], [], [], []
        for watched in self.of.values():
            fields = vars(watched.module)
            packed = {k: v for k, v in watched.now.items() if isinstance(v, _Packed) and not is_fixed(fields[k])}
            plain = [k for k, v in watched.now.items() if not isinstance(v, _Other) and k not in packed]
            self._fields.append(fields)
            self._plain += [(itemgetter(*plain), fields)] if plain else []
            self._packed += [(fields, k, v) for k, v in packed.items()]
            # The values themselves: no other one gets the identity of a value that is held.
            self._others += [(fields, k, fields[k]) for k, v in watched.now.items() if isinstance(v, _Other) and v.at]
        self._seen = self._look()

    def _look(self) -> tuple[list[int], list[Any]]:
        return [*map(len, self._fields)], [get(fields) for get, fields in self._plain]

    def is_anew(self, key: _Key) -> bool:
        """Whether the loop sets this value before its first lanes, as it does in each life."""
        if not self.begun:
            self._anew.add(key)
        return key in self._anew

    def same(self) -> bool:
        """Whether all is unchanged: values by value, others by identity, those of libraries by their number alone."""
        try:
            if self._look() != self._seen:
                return False
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or is a tensor now
            return False
        if any(fields.get(k) is not value for fields, k, value in self._others):
            return False
        return all(k in fields and _pack(fields[k]) == v for fields, k, v in self._packed)

    def changed(self) -> dict[_Key, tuple[Any, Any]]:
        """Attributes that differ from the last look: (before, now). None stands for a missing one, too."""
        if self.same():
            return {}
        found: dict[_Key, tuple[Any, Any]] = {}
        for name, watched in self.of.items():
            before, now = watched.now, watched.look()
            keys = (key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
            found |= {(name, key): (before.get(key), now.get(key)) for key in keys}
        self.remember()
        return found


class _Modes(NamedTuple):
    """Settings that are looked at in every step."""

    modes: bytes
    requires_grad: bytes
    flags: tuple[Any, ...]
    groups: tuple[dict[str, Any], ...]


class Moment:
    """Settings at a moment. held: values, at that moment, of attributes that have changed since."""

    def __init__(self, modes: _Modes) -> None:
        self.modes = modes
        self.held: dict[_Key, Any] = {}


class Settings:
    """Settings of one model and its optimizer. Before `begin` nothing is carried, compared or refused."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._structure: Structure | None = None
        self._lanes, self._refused = False, ""
        self._changed: dict[_Key, Any] = {}
        self._by_lanes: set[_Key] = set()
        self._times: Counter[_Key] = Counter()
        self._driven: set[tuple[int, str]] = set()
        self._at_entry: tuple[bool, ...] | None = None
        self._digested: tuple[_Modes | None, list[bytes]] = (None, [])

    def begin(self) -> None:
        """The loop is about to begin: present settings are the same in every life."""
        if self._optimizer is None:
            return
        self._structure = Structure(self._model, self._optimizer)
        self._attributes = _Attributes(self._structure.modules)
        self._modules = self._attributes.of
        self._parameters = dict(self._model.named_parameters())
        self._plain, self._own = list(self._structure.modules.values()), list(self._parameters.values())
        self._first = self._look()
        self._updated = Moment(self._first)
        self._entered = [self._updated]
        self._added = _comparable(added(self._optimizer))
        self._autocast, self._at_entry = flags.autocast(), None

    # ---- the moments of a step

    def enter(self) -> Moment | None:
        """The loop's body is about to be entered, for the next step. The last two moments are kept."""
        if self._structure is None:
            return None
        self._by_loop()
        self._at_entry = flags.autocast()
        self._entered = [Moment(self._look()), *self._entered[:1]]
        return self._entered[0]

    def before_lanes(self) -> None:
        """The loop asks for a step. Raises: Uncarried for a change of the loop that cannot be carried."""
        if self._structure is not None and not self._lanes:
            if not self._structure.check(lanes=False):
                self._follow(self._structure)
            self._by_loop()
            if (self._at_entry or flags.autocast()) != self._autocast:
                raise Uncarried(
                    "torch.autocast was left on or off by the loop; a worker that is resumed or healed would not know: "
                    "write 'with torch.autocast(...)' around the forward pass of every step"
                )
            if self._refused:
                raise Uncarried(self._refused)
            self._lanes = self._attributes.begun = True

    def digests(self) -> bytes:
        """Digests of all settings that members must have alike, as listed in `SETTINGS` of
        `protocol/driver/records.py`.

        Raises: Uncarried for a change that cannot be carried.
        """
        if self._structure is None:
            return b""
        if not self._structure.check():
            self._follow(self._structure)
        now = self._look()
        before, parts = self._digested
        if now != before:
            groups = repr([sorted(group.items()) for group in now.groups])
            parts = [_short(now.modes), _short(now.requires_grad), _short(repr(now.flags)), _short(groups)]
            self._digested = now, parts
        return b"".join([*parts, _short(repr(sorted(self._changed.items(), key=str)))])

    def after_update(self) -> None:
        """The state is that of a step, and the loop does not know it yet."""
        if self._structure is None:
            return
        if self._lanes:
            self._by_forward()
        else:
            self._by_loop()  # no lane was computed here
        looked = self._digested[0] if self._lanes else None  # with the lanes; updates change groups alone
        now = looked._replace(groups=self._groups()) if looked is not None else self._look()
        self._updated, self._lanes = Moment(now), False

    # ---- what changes

    def _look(self) -> _Modes:
        return _Modes(
            bytes(map(_training, self._plain)),
            bytes(map(_requires_grad, self._own)),
            flags.read(),
            self._groups(),
        )

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []

    def _groups(self) -> tuple[dict[str, Any], ...]:
        return tuple([hyperparameters(group) for group in self._param_groups])

    def _follow(self, structure: Structure) -> None:
        """A forward pass made modules, or exchanged some for others of their kind."""
        self._attributes.follow(structure.modules)
        self._plain = [watched.module for watched in self._modules.values()]

    def _differing(self) -> dict[_Key, tuple[Any, Any]]:
        return {key: pair for key, pair in self._attributes.changed().items() if key not in self._by_lanes}

    def _by_loop(self) -> None:
        """Note the changes since the update: the loop made them."""
        self._modules_by_loop()
        for k, (mine, before) in enumerate(zip(self._groups(), self._updated.modes.groups, strict=False)):
            if mine != before:
                self._driven |= {(k, key) for key in mine if mine[key] != before.get(key)}

    def _modules_by_loop(self) -> None:
        """Note those of modules, and of the optimizer's attributes."""
        for (name, key), (before, now) in self._differing().items():
            if isinstance(now, _Other):
                if isinstance(before, _Other) and self._attributes.is_anew((name, key)):
                    continue
                self._refused = (
                    f"the loop has set {_called(name, key)} to a {now.type_name}, "
                    "which a worker that is resumed or healed would lack: make it a buffer of the model before the "
                    "loop, set it before the batches of each step, or keep it elsewhere"
                )
                continue
            self._hold((name, key), before)
            self._set(name, key, now)
            self._times[name, key] += 1
        self._by_optimizer()

    def _by_optimizer(self) -> None:
        now = _comparable(added(self._optimizer)) if self._optimizer is not None else {}
        for name in now.keys() | self._added.keys():
            if now.get(name) != self._added.get(name):
                self._refused = (
                    f"the loop has set the optimizer's attribute {name}, which a worker that is resumed or healed "
                    f"would lack: write kept = everstep.state({name}=...), give it to join as state=kept, and use "
                    f"kept.{name} in the loop instead"
                )

    def _by_forward(self) -> None:
        """Note the changes made while lanes were computed."""
        for (name, key), (before, now) in self._differing().items():
            if self._modules[name].of_torch and not isinstance(now, _Other):
                self._hold((name, key), before)
                self._set(name, key, now)  # its own forward pass did not set it
            else:
                if self._times[name, key] >= _DRIVEN:
                    self._refused = (
                        f"the loop has set {_called(name, key)}, and now a forward pass has, so that a worker that is "
                        f"resumed or healed would lack it: let one of them set {key}, and the other read it"
                    )
                self._by_lanes.add((name, key))
                self._changed.pop((name, key), None)

    def _hold(self, key: _Key, before: Any) -> None:
        for moment in (self._updated, *self._entered):
            moment.held.setdefault(key, before)

    def _set(self, name: str, key: str, now: Any) -> None:
        watched = self._modules[name]
        first = watched.first
        if key in watched.now and (key not in first or first[key] != now or type(first[key]) is not type(now)):
            self._changed[name, key] = now
        else:  # as at the beginning, or removed
            self._changed.pop((name, key), None)

    # ---- carried settings

    def now(self) -> dict[str, Any]:
        """Present settings as JSON; empty if all are as when the loop began."""
        if self._structure is None:
            return {}
        if not self._lanes:
            self._by_loop()
        return self._said(self._look(), self._changed)

    def after(self) -> dict[str, Any]:
        """Settings right after the newest update, as JSON; a loop that takes them goes on from there."""
        return {} if self._structure is None else self.as_of(self._updated)

    def as_of(self, moment: Moment) -> dict[str, Any]:
        """Settings of a moment as JSON, by present knowledge."""
        if not self._lanes:
            self._by_loop()
        attributes = dict(self._changed)
        for (name, key), before in moment.held.items():
            attributes.pop((name, key), None)
            if self._modules[name].first.get(key) != before and not isinstance(before, _Other):
                attributes[name, key] = before
        return self._said(moment.modes, attributes)

    def _said(self, now: _Modes, attributes: Mapping[_Key, Any]) -> dict[str, Any]:
        first, said = self._first, Said()
        if now.modes != first.modes:
            said.modes = {n: bool(b) for n, _, b in _apart(self._modules, first.modes, now.modes)}
        if now.requires_grad != first.requires_grad:
            apart = _apart(self._parameters, first.requires_grad, now.requires_grad)
            said.requires_grad = {n: bool(b) for n, _, b in apart}
        if now.flags != first.flags:
            said.flags = {n: encode(b, n, {}) for n, _, b in _apart(flags.NAMES, first.flags, now.flags)}
        for (name, key), value in sorted(attributes.items()):
            said.attributes.setdefault(name, {})[key] = _node(value)
        for k, key in sorted(self._driven):
            if key in now.groups[k]:
                said.hyperparameters.setdefault(str(k), {})[key] = told_value(key, now.groups[k][key])
        found: dict[str, Any] = msgspec.to_builtins(said)
        return found

    def restore(self, given: Mapping[str, Any]) -> None:
        """Restore settings that `now` or `after` gave in a worker whose loop began alike. Groups may have been loaded
        by now: their values are not the loop's.

        Raises: CheckpointCorrupt if they are malformed; ConfigError if this model has no such setting.
        """
        if self._structure is None:
            if given:
                raise ConfigError(
                    f"the loop changed settings of the state ({_listed(given)}), and this job cannot take them on: "
                    "resume it the way it was started"
                )
            return
        try:
            said = _said(dict(given))
        except msgspec.ValidationError as error:
            raise CheckpointCorrupt(f"settings of a model are not as Everstep writes them: {error}") from None
        (self._by_forward if self._lanes else self._modules_by_loop)()
        self._put_modes(said)
        first_flags = dict(zip(flags.NAMES, self._first.flags, strict=True))
        wanted = {**first_flags, **{name: decode(node, {}) for name, node in said.flags.items()}}
        now = dict(zip(flags.NAMES, flags.read(), strict=True))
        flags.write({name: value for name, value in wanted.items() if name not in now or now[name] != value})
        self._put_attributes({(n, k): node for n, values in said.attributes.items() for k, node in values.items()})
        groups = self._param_groups
        told: list[dict[str, Any]] = [{} for _ in groups]
        for number, values in said.hyperparameters.items():
            k = int(number) if number.isdecimal() else len(groups)
            if k >= len(groups) or not values.keys() <= groups[k].keys() - {"params"}:
                raise ConfigError(f"the state sets {list(values)[:5]} of group {number[:20]!a}, which is not there")
            told[k] = {key: decode(node, {}) for key, node in values.items()}
            self._driven |= {(k, key) for key in values}
        put_values(groups, told)
        self._attributes.changed()
        self._updated, self._lanes = Moment(self._look()), False

    def _put_modes(self, said: Said) -> None:
        modules, parameters = self._modules, self._parameters
        strangers = [*(said.modes.keys() - modules.keys()), *(said.requires_grad.keys() - parameters.keys())]
        strangers += [name for name in said.attributes if name not in modules]
        if strangers:
            raise ConfigError(f"the state has settings of {strangers[0][:100]!a}, which the model does not have")
        for (name, watched), mode in zip(modules.items(), self._first.modes, strict=True):
            watched.module.training = said.modes.get(name, bool(mode))
        for (name, parameter), grad in zip(parameters.items(), self._first.requires_grad, strict=True):
            if parameter.requires_grad != said.requires_grad.get(name, bool(grad)):
                parameter.requires_grad_(not parameter.requires_grad)

    def _put_attributes(self, nodes: Mapping[_Key, Any]) -> None:
        for name, key in self._changed.keys() - nodes.keys():
            watched = self._modules[name]
            if key in watched.first:
                setattr(watched.module, key, decode(_node(watched.first[key]), {}))
            else:
                vars(watched.module).pop(key, None)
        self._changed = {}
        for (name, key), node in nodes.items():
            module = self._modules[name].module
            fits = key.isidentifier() and not key.startswith("__") and key not in _INTERNAL
            if not fits or hasattr(type(module), key) or key in module._modules.keys() | module._parameters.keys():
                raise ConfigError(f"the state sets {key[:100]!a} of module {name!a}, which is no plain attribute")
            setattr(module, key, decode(node, {}))
            self._changed[name, key] = _attributes(module).get(key)
            self._times[name, key] = _DRIVEN


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all of the model into eval mode; afterwards each module is in its own mode again, and has done what its own
    `train` does."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, training in modes:
            module.training = training


def _apart(names: Iterable[str], one: Iterable[Any], other: Iterable[Any]) -> list[tuple[str, Any, Any]]:
    """(name, value, other value) of the differing ones."""
    return [(n, a, b) for n, a, b in zip(names, one, other, strict=True) if a != b]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module's own: scalars as they are, small containers packed, others by type.

    Empty for a module with extra state: that decides by itself what is carried, and setting it changes attributes.
    """
    if has_extra_state(module):
        return {}
    return _comparable({key: value for key, value in vars(module).items() if key not in _INTERNAL})


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        kind: Any = type(value)
        if kind in SCALARS:
            found[key] = value
        else:
            packed = _pack(value) if kind in _CONTAINERS else None
            found[key] = packed or _Other(kind.__name__, 0 if _of_library(kind) else id(value))
    return found


def _called(name: str, key: str) -> str:
    return f"{name}.{key}" if name else f"{key} of the model"


@cache
def _of_library(kind: Any) -> bool:
    """Whether a class is neither the user's nor one of a value that a forward pass computes with."""
    if issubclass(kind, (*_CONTAINERS, *_COMPUTED)):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "builtins" or (file is not None and str(file).startswith(_LIBRARIES))


def _pack(value: Any) -> _Packed | None:
    """Packed form of a small container of plain values; None for anything else."""
    tensors: dict[str, Tensor] = {}
    if len(value) > _MOST_ITEMS:
        return None
    try:
        text = msgspec.json.encode(encode(value, "", tensors)).decode()
    except ConfigError:
        return None
    return None if tensors or len(text) > _MOST_TEXT else _Packed(text)


def _node(value: Any) -> Any:
    return msgspec.json.decode(value.text) if isinstance(value, _Packed) else encode(value, "", {})


def _short(data: bytes | str) -> bytes:
    return xxhash.xxh32_digest(data.encode() if isinstance(data, str) else data)


def _listed(given: Mapping[str, Any]) -> str:
    return ", ".join(sorted(str(key)[:40] for key in given))
