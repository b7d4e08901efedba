"""What differs around a lane that was computed twice with different results: an attribute of a module, or a value that
one batch leaves to the next. So the error can name it, with its line.

Apart because it reads the user's code and values, and only where something is wrong.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from everstep.base.errors import DeterminismError, LaneCarried
from everstep.exact.digest import tensor_digest
from everstep.script.flow_sources import SyntaxTrees
from everstep.script.reachable import GENERATORS, generator_state, of_user, users_class

_DEEP = 3
_MOST_ITEMS = 1000
_MOST_NAMED = 3
_INTERNAL = frozenset(vars(nn.Module()))


class LaneWitness:
    """Values before a lane is computed for the first time."""

    def __init__(self, model: nn.Module, frames: Sequence[FrameType]) -> None:
        """frames: of the user's code, the one that takes the batches first."""
        self._model, self._frames = model, frames[:1]
        self._attributes = self._look_at_modules()
        self._values = self._look_at_loop()

    def explained(self, error: DeterminismError) -> DeterminismError:
        """The error with what has changed meanwhile as its reason; the same one if nothing is found."""
        head = str(error).partition(": ")[0]
        now, before = self._look_at_modules(), self._attributes
        found = [f"{title}{place}" for title, (digest, place) in now.items() if digest != before.get(title, ("",))[0]]
        if found:
            return LaneCarried(
                f"{head}: {_listed(found)} changes with each forward pass, and a lane must not depend on those before "
                "it: keep such a count in the loop (step.number), or in a buffer that all batches change alike"
            )
        present = self._look_at_loop()
        found = [f"{name}{place}" for name, (digest, place) in present.items() if digest != self._values[name][0]]
        drawn = [f"{name}{place}" for name, (_, place) in present.items() if isinstance(self._value(name), GENERATORS)]
        moved = [f"{name}{place}" for name, (_, place) in present.items() if hasattr(self._value(name), "__next__")]
        if found and set(found) <= set(drawn):
            return LaneCarried(
                f"{head}: {_listed(found)} goes on from one batch to the next, and a lane must not depend on those "
                "before it: draw from torch's, numpy's or random's global generators, which are seeded for each lane"
            )
        if found:
            return LaneCarried(
                f"{head}: {_listed(found)} is carried from one batch to the next, and a lane must not depend on those "
                "before it, which other workers may compute: reset it in each batch, or change it once per step, after "
                "the batches"
            )
        if moved:
            return LaneCarried(
                f"{head}: {_listed(moved)} goes on from one batch to the next, and a lane must not depend on those "
                "before it: give join one dataset whose samples hold the items of both"
            )
        return error

    def _look_at_modules(self) -> dict[str, tuple[str, str]]:
        """Digest and place, by name, of attributes of modules of the user's own classes."""
        found: dict[str, tuple[str, str]] = {}
        for path, module in self._model.named_modules():
            if users_class(type(module)):
                for name, value in vars(module).items():
                    if name not in _INTERNAL:
                        title = f"{path or type(module).__name__}.{name}"
                        found[title] = _picture(value, _DEEP), _place_in_class(type(module), name)
        return found

    def _value(self, name: str) -> Any:
        return next((f.f_locals.get(name, f.f_globals.get(name)) for f in self._frames), None)

    def _look_at_loop(self) -> dict[str, tuple[str, str]]:
        """Digest and place, by name, of values that the code for a batch may read before it writes them."""
        found: dict[str, tuple[str, str]] = {}
        for frame in self._frames:
            loop = SyntaxTrees().loop(frame)
            file = os.path.basename(frame.f_code.co_filename)
            for name, line in _carried(loop).items() if loop is not None else ():
                value = self._value(name)
                if not (isinstance(value, nn.Module) or callable(value) or inspect.ismodule(value)):
                    found[name] = _picture(value, _DEEP), f" ({file}:{line})"
        return found


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


def _carried(loop: ast.For | ast.While) -> dict[str, int]:
    """Names that a round of the loop reads before it writes them, with the line of the last place."""
    targets = ast.walk(loop.target) if isinstance(loop, ast.For) else ()
    written = {node.id for node in targets if isinstance(node, ast.Name)}
    carried: dict[str, int] = {}
    for statement in _statements(loop.body):
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        adds = isinstance(statement, ast.AugAssign)
        for node in names:
            first = node.id not in written and (adds or isinstance(node.ctx, ast.Load))
            if first or node.id in carried:
                carried[node.id] = node.lineno
        written.update(node.id for node in names if isinstance(node.ctx, ast.Store))
    return carried


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Simple statements and headers of compound ones, in the order of the text."""
    for statement in body:
        inner = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
        if not any(inner):
            yield statement
            continue
        for field in ("test", "iter", "target", "items"):
            part = getattr(statement, field, None)
            yield from part if isinstance(part, list) else [part] if part is not None else []
        for one in inner:
            yield from _statements(one)


def _place_in_class(kind: type, attribute: str) -> str:
    """The last line where a method of the class assigns to the attribute, as " (file.py:12)"; "" if it is not found."""
    try:
        file = inspect.getsourcefile(kind) or ""
    except (TypeError, OSError):  # of a program that is no file
        file = next((f.__code__.co_filename for f in vars(kind).values() if inspect.isfunction(f)), "")
    tree = SyntaxTrees().tree(file) if of_user(file) else None
    lines = [
        node.lineno
        for one in (ast.walk(tree) if tree is not None else ())
        if isinstance(one, ast.ClassDef) and one.name == kind.__name__
        for node in ast.walk(one)
        if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store)
    ]
    return f" ({os.path.basename(file)}:{max(lines)})" if lines else ""


def _picture(value: Any, depth: int) -> str:
    """A comparable form of a value; objects that cannot be compared are all alike."""
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, GENERATORS):
        state = generator_state(value)
        return tensor_digest(state) if isinstance(state, Tensor) else repr(state)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    fields = vars(value) if depth and users_class(type(value)) and hasattr(value, "__dict__") else None
    items: Mapping[Any, Any] | Sequence[Any] | None = value if isinstance(value, dict | list | tuple) else fields
    if not depth or items is None or len(items) > _MOST_ITEMS:
        return f"{type(value).__name__} of {len(items)}" if items is not None else type(value).__name__
    pairs = items.items() if isinstance(items, Mapping) else enumerate(items)
    return repr([(str(key), _picture(inner, depth - 1)) for key, inner in pairs])
