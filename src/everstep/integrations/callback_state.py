"""What a `transformers.TrainerCallback` keeps from step to step: its attributes, as state of a job.

Tensors, arrays, random generators and objects with a state_dict (`AveragedModel`) are carried, and compared between
workers. Numbers, texts and containers of these are carried and not compared: times and counts of calls may differ
between workers, and nothing is trained by them. Objects of the user's own classes are followed into their attributes.
"""

from __future__ import annotations

import copy
import time
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler

from everstep.base.errors import ConfigError
from everstep.exact.jsonable import TypedValues, Undigested, encode
from everstep.script.loop_values import LoopValues, has_state
from everstep.script.reachable import Carried, Fact, Survey, users_class

_NO_STATE = (Dataset, DataLoader, Sampler, type, types.ModuleType)
_MOST_OBJECTS = 100
_LOOK_S = 0.02
_MOST_TENSOR_BYTES = 1 << 16


class CallbackState:
    """State of one callback. carried: what the job carries already; others: objects that a callback may lead to, and
    that are not its own (the trainer, other callbacks)."""

    def __init__(self, callback: Any, carried: Carried, others: tuple[Any, ...]) -> None:
        self._callback, self._carried = callback, carried
        self._others = {id(thing) for thing in (callback, *others)}
        self._values = LoopValues()
        self._first: dict[str, Fact] = {}
        self._lost: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Its own state_dict; or what it exports (`ExportableState`), and its attributes if it is none of
        transformers' own. Empty if there is nothing."""
        callback = self._callback
        if callable(getattr(callback, "load_state_dict", None)):
            return {"own": callback.state_dict()}
        exports = callable(getattr(callback, "state", None))
        exported = dict(callback.state()["attributes"]) if exports else {}
        if _of_transformers(type(callback)):
            return exported
        plain, values, rest = self._parts()
        self._look(rest)
        vars(self._values).clear()
        vars(self._values).update({**plain, **values})
        said = self._values.state_dict()
        said["values"] = TypedValues({k: v for k, v in said["values"].items() if k not in plain})
        found = {"exported": exported, "state": said, "plain": Undigested(values=TypedValues(plain))}
        lost = {"lost": Undigested(names=sorted(self._lost))} if self._lost else {}
        return {**found, **lost} if plain or values or exported or lost else {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raises: ConfigError naming an attribute that cannot be restored."""
        callback = self._callback
        if callable(getattr(callback, "load_state_dict", None)):
            callback.load_state_dict(saved["own"])
        elif "state" not in saved:  # of one of transformers' own, or in an older checkpoint
            vars(callback).update(copy.deepcopy(saved))
        else:
            self._set(saved)
            vars(callback).update(copy.deepcopy(saved["exported"]))

    def _set(self, saved: dict[str, Any]) -> None:
        for name in saved.get("lost", {}).get("names", ()):
            raise ConfigError(self._objection(name, "has changed while it trained, and cannot be carried"))
        plain, values, _ = self._parts()
        present = {**plain, **values}
        holders = {path: vars(thing) for path, thing in self._objects()}
        state, kept = saved["state"], saved["plain"]["values"]
        for name in (*state["objects"], *state["values"], *kept):
            path = name.rpartition(".")[0]
            if path not in holders or (name in state["objects"] and not has_state(present.get(name))):
                raise ConfigError(self._objection(path or name, "was made while it trained"))
        self._values.__setstate__(present)
        self._values.load_state_dict({**state, "values": {**state["values"], **kept}})
        loaded = vars(self._values)
        for name in present.keys() - loaded.keys():
            path, _, key = name.rpartition(".")
            while path and not any(other.startswith(f"{path}.") for other in loaded):  # the whole object is newer
                path, _, key = path.rpartition(".")
            holders[path].pop(key, None)
        for name, value in loaded.items():
            path, _, key = name.rpartition(".")
            holders[path][key] = value

    def _objection(self, name: str, fact: str) -> str:
        return (
            f"{type(self._callback).__name__}.{name} {fact}: make it in __init__ or on_train_begin, out of numbers, "
            "tensors, containers of these, or objects with state_dict; or give the callback state_dict and "
            "load_state_dict"
        )

    # ---- attributes

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """The callback, and objects of the user's classes that its attributes lead to, each once, by path."""
        found, seen = [("", self._callback)], set(self._others)
        for path, thing in found:
            yield path, thing
            for key, value in vars(thing).items():
                if id(value) not in seen and _is_followed(value) and len(found) < _MOST_OBJECTS:
                    seen.add(id(value))
                    found.append((f"{path}.{key}" if path else key, value))

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        objects = list(self._objects())
        elsewhere = {id(thing) for _, thing in objects} | self._others
        for path, thing in objects:
            for key, value in vars(thing).items():
                if id(value) not in elsewhere and not self._is_carried(value):
                    yield f"{path}.{key}" if path else key, value

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Attributes: numbers and the like, with containers of these; others that can be carried; and the rest."""
        parts: tuple[dict[str, Any], ...] = {}, {}, {}
        for name, value in self._attributes():
            parts[_kind_of(name, value)][name] = value
        plain, values, rest = parts
        return plain, values, rest

    def _is_carried(self, value: Any) -> bool:
        """Whether this is the trained model, its optimizer or its scheduler, or shares memory with them."""
        if id(value) in self._carried.objects:
            return True
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
            return bool(tensors) and all(map(self._carried.has, tensors))
        return any(isinstance(leaf, Tensor) and self._carried.has(leaf) for leaf in tree_leaves(value))

    def _look(self, rest: dict[str, Any]) -> None:
        """Note which attributes that cannot be carried have changed since they were first seen."""
        rest = {name: value for name, value in rest.items() if not callable(value) and not isinstance(value, _NO_STATE)}
        if rest:
            until_s = time.thread_time() + _LOOK_S
            survey = Survey(self._carried, until_s=until_s, most_bytes=_MOST_TENSOR_BYTES)
            survey.look(rest.items())
            for name, fact in survey.facts.items():
                own = next((one for one in rest if name.startswith(one)), "")
                if own and self._first.setdefault(name, fact).digest != fact.digest:
                    self._lost.add(own)


def _is_followed(value: Any) -> bool:
    apart = isinstance(value, (nn.Module, *_NO_STATE)) or has_state(value)
    return users_class(type(value)) and hasattr(value, "__dict__") and not apart


def _of_transformers(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "transformers"


def _kind_of(name: str, value: Any) -> int:
    """0: numbers, texts and containers of these; 1: something else that can be carried; 2: what cannot."""
    if has_state(value):
        return 1
    tensors: dict[str, Tensor] = {}
    try:
        encode(TypedValues({name: value}), name, tensors)
    except (ConfigError, RecursionError):
        return 2
    return int(bool(tensors))
