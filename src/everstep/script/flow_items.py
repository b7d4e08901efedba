"""Which items of a list or dict a round sets: whether anything of the rounds before is left in it; names in the
namespaces of modules. Pure."""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_ROUNDS = 8

MISSING: Any = object()
KeysDone = Mapping[int, set[Any]]
"""By id of a container, the keys that have been set."""


@dataclass
class ContainerItems:
    """Keys of containers, by id. known: those that a container may have, MISSING if some are not known; grew: whether
    reading has found more, so that the code must be read again; done: set up to here; bounded: losing entries."""

    known: dict[int, set[Any]] = field(default_factory=dict)
    grew: bool = False
    done: KeysDone = field(default_factory=dict)
    bounded: set[int] = field(default_factory=set)

    def covers(self, thing: Any, key: Any) -> bool:
        """Whether, with this key, all items of a list or dict have been set in this round. key: of the item that is set
        now, MISSING if it is not a constant."""
        if type(thing) not in (list, dict):
            return False
        keys = self.known.setdefault(id(thing), set(thing if isinstance(thing, dict) else range(len(thing))))
        if isinstance(thing, dict) or key is not MISSING:
            self._add(id(thing), key)
        self.done = {**self.done, id(thing): self.done.get(id(thing), set()) | ({key} - {MISSING})}
        return self.done[id(thing)] >= keys

    def changed(self, container: int) -> None:
        """Note that it gets or loses items that the code does not name."""
        if container in self.known:
            self._add(container, MISSING)

    def meet(self, ends: Sequence[KeysDone]) -> None:
        """Go on from one of these states of `done`, and it is unknown from which."""
        self.done = {key: set.intersection(*(end.get(key, set()) for end in ends)) for key in ends[0]}

    def _add(self, container: int, key: Any) -> None:
        self.grew |= key not in self.known[container]
        self.known[container].add(key)


def rounds_of(node: ast.For | ast.While) -> list[list[ast.stmt]]:
    """The body of `for k in range(2)` for each k, which is a constant there; none if the loop is another."""
    over = node.iter if isinstance(node, ast.For) else None
    plain = isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "range"
    if not (plain and isinstance(over, ast.Call) and isinstance(node, ast.For) and isinstance(node.target, ast.Name)):
        return []
    bounds = [a.value for a in over.args if isinstance(a, ast.Constant) and type(a.value) is int]
    inner = [one for part in node.body for one in ast.walk(part)]
    name = node.target.id
    changes = any(isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Load) for one in inner)
    leaves = any(isinstance(one, ast.Break | ast.Continue | ast.FunctionDef | ast.Lambda) for one in inner)
    if len(bounds) != len(over.args) or not bounds or changes or leaves or len(range(*bounds)) > _MOST_ROUNDS:
        return []
    return [[_Named(name, k).visit(copy.deepcopy(part)) for part in node.body] for k in range(*bounds)]


class _Named(ast.NodeTransformer):
    """Puts a constant in place of a name."""

    def __init__(self, name: str, value: int) -> None:
        self._name, self._value = name, value

    def visit(self, node: ast.AST) -> Any:
        """A node, and those in it."""
        if isinstance(node, ast.Name) and node.id == self._name:
            return ast.copy_location(ast.Constant(self._value), node)
        return self.generic_visit(node)


def namespace_of(thing: Any) -> Mapping[str, Any] | None:
    """The names of a module, if this is one, or the dict that `globals()` gives."""
    if isinstance(thing, types.ModuleType):
        return vars(thing)
    return thing if type(thing) is dict and "__builtins__" in thing and "__name__" in thing else None
