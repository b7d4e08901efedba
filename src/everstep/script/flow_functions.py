"""The user's functions that a loop calls, in code that is read: each is read in turn, with its arguments.

Apart from `flow_calls`, which knows the effects of all other functions.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.script.flow_memory import NOTHING, RoundMemory, Value, joined
from everstep.script.flow_reader import Closure, Reader, Scope
from everstep.script.reachable import of_user

_MOST_WRAPPED = 10


@dataclass(frozen=True)
class Given:
    """Arguments of a call."""

    plain: tuple[Value, ...]
    named: Mapping[str, Value]

    @property
    def all(self) -> tuple[Value, ...]:
        return (*self.plain, *self.named.values())


@dataclass
class Functions:
    """Functions of one reader. forwards: the user's modules in a module of a class that is not the user's. frames: of
    the loop, with their keys."""

    reader: Reader
    forwards: Callable[[Any], Iterable[Any]]
    frames: Sequence[tuple[types.FrameType, Any]] = ()

    @property
    def memory(self) -> RoundMemory:
        return self.reader.memory

    def is_users(self, thing: Any) -> bool:
        return isinstance(thing, types.FunctionType) and self.memory.judge.of_user(unwrapped(thing))

    def live(self, thing: Any, callee: Value, given: Given) -> Value | None:
        """Result of calling this object, if its code can be read."""
        memory = self.memory
        if isinstance(thing, functools.partial):
            bound = [memory.live(v, f"{callee.title}.args") for v in thing.args]
            named = {name: memory.live(v, f"{callee.title}.{name}") for name, v in thing.keywords.items()}
            return self.live(thing.func, callee, Given((*bound, *given.plain), {**named, **given.named}))
        if isinstance(thing, functools._lru_cache_wrapper):
            return self._cached(thing, callee.title, given)
        if isinstance(thing, types.FunctionType | types.MethodType | staticmethod | classmethod):
            return self._function_of(thing, given.plain, given.named)
        if isinstance(thing, type):
            return self._instance(thing, given) if memory.judge.of_user(thing) else None
        method = method_of(type(thing), "forward") or method_of(type(thing), "__call__")
        if method is not None and memory.judge.of_user(thing):
            return self.run(method, [memory.live(thing, callee.title), *given.plain], given.named)
        inner = [m for m in self.forwards(thing) if method_of(type(m), "forward") is not None][:16]
        if inner:
            one = joined(given.plain) if given.plain else Value()
            for module in inner:
                one = self.run(method_of(type(module), "forward"), [memory.live(module, callee.title), one], {})
            return one.with_deps(memory.use(callee))
        return None

    def _function_of(self, thing: Any, plain: Sequence[Value], named: Mapping[str, Value]) -> Value | None:
        if isinstance(thing, types.MethodType):
            return self._function_of(thing.__func__, [self.memory.live(thing.__self__, "self"), *plain], named)
        function = getattr(thing, "__func__", thing)
        return self.run(function, plain, named) if self.is_users(function) else None

    def run(self, function: Any, plain: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """Result of a live function of the user's."""
        memory, reader = self.memory, self.reader
        function = unwrapped(function)
        node = reader.sources.function(function.__code__) if isinstance(function, types.FunctionType) else None
        found = None
        if node is not None:
            given = {**self._defaults(function), **named}
            with memory.reading(function.__code__.co_filename):
                found = reader.inline(node, reader.scope_of(function, self.frames), plain, given)
        else:
            reader.notes.append(getattr(function, "__qualname__", "a function"))
        if found is None:
            return Value(frozenset().union(*(memory.use(v) for v in (*plain, *named.values()))))
        return found

    def _defaults(self, function: types.FunctionType) -> dict[str, Value]:
        """Live defaults: a list in one of them lasts."""
        code, found = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(found) :]
        name = function.__name__
        return {names[k]: self.memory.live(v, f"{name}.default{k}") for k, v in enumerate(found)}

    def closure(self, closure: Closure, plain: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """Result of a function that is defined in the code that is read."""
        scope = Scope(None, closure.scope.globals, parent=closure.scope)
        found = self.reader.inline(closure.node, scope, plain, named)
        return found or Value(frozenset().union(*(self.memory.use(v) for v in (*plain, *named.values()))))

    def handed(self, value: Value, plain: Sequence[Value]) -> Value:
        """Result of a function that is an argument, and is called by its receiver."""
        found = [self.closure(code, plain, {}) for code in value.codes]
        for thing in value.objects:
            if isinstance(thing, types.FunctionType | types.MethodType | functools.partial):
                found.append(self.live(thing, value, Given(tuple(plain), {})) or Value())
        return joined(found) if found else Value()

    def handed_on(self, given: Given, base: Value | None = None) -> None:
        """Note that a receiver may call the functions among its arguments, with any of the other arguments."""
        values = [*given.all, *([base] if base is not None else [])]
        functions = [v for v in values if v.codes or any(map(callable, v.objects))]
        for function in functions:
            rest = [v for v in values if v is not function]
            flags = frozenset(f for v in rest for f in v.flags & {"trained", "copy", "grad"})
            one = joined(rest) if rest else Value()
            self.handed(
                function, [replace(one, deps=one.deps.union(*map(self.memory.use, rest)), flags=flags, items=None)]
            )

    def operate(self, value: Value, name: str, given: Sequence[Value]) -> Value | None:
        found = []
        for thing in value.objects:
            method = method_of(type(thing), name) if self.memory.judge.of_user(thing) else None
            if method is not None and not isinstance(thing, type | types.FunctionType) and self.is_users(method):
                found.append(self.run(method, [self.memory.live(thing, value.title), *given], {}))
        return joined(found) if found else None

    def upwards(self, scope: Scope, name: str, given: Given) -> tuple[Value, Value | None]:
        """`super().name(...)`: the object, and the result if a method of the user's is meant."""
        (_, home), own = scope.place("__class__"), scope.first
        me = self.memory.values.get(("name", scope.key, own), Value())
        for kind in home.__mro__[1:] if isinstance(home, type) else ():
            method = vars(kind).get(name)
            if isinstance(method, classmethod | staticmethod):
                break
            if method is not None:
                return me, self.run(method, [me, *given.plain], given.named) if self.is_users(method) else None
        return me, None

    def autograd(self, kind: type, given: Given) -> Value:
        """Result of `torch.autograd.Function.apply`: both passes are read."""
        passes = [vars(kind).get(name) for name in ("forward", "setup_context", "backward")]
        found = [self.run(one.__func__, [Value(), *given.plain], {}) for one in passes if isinstance(one, staticmethod)]
        return Value(NOTHING.union(*(self.memory.use(v) for v in (*found, *given.all))))

    def _cached(self, thing: Any, title: str, given: Given) -> Value:
        """Result of `functools.cache`: the same for the same arguments, if it depends on nothing else."""
        memory, place = self.memory, ("object", id(thing))
        memory.live(thing, title)
        keys = [frozenset((("arg", id(thing), k),)) for k in range(len(given.all))]
        unknown = [
            replace(v, deps=v.deps | k if v.objects and memory.use(replace(v, deps=NOTHING)) else k, key=k)
            for v, k in zip(given.all, keys, strict=True)
        ]
        plain, names = unknown[: len(given.plain)], dict(zip(given.named, unknown[len(given.plain) :], strict=True))
        with memory.unconditionally():
            result = self.run(thing, plain, names)
            memory.write(place, Value(memory.use(result)), title=title, strong=False, keys=frozenset().union(*keys))
        together = frozenset().union(*(memory.use(v) for v in given.all))
        return Value(frozenset((place,)) | together)

    def _instance(self, kind: type, given: Given) -> Value:
        """An object that is made in this round."""
        made = types.SimpleNamespace()
        self.memory.made[id(made)] = made
        value = Value(objects=(made,))
        method = method_of(kind, "__init__")
        if method is not None:
            self.run(method, [value, *given.plain], given.named)
        flags = frozenset(f for v in given.all for f in v.flags & {"copy"})
        if "copies" in self.memory.judge.flags(kind) and any(v.flags & {"trained"} for v in given.all):
            flags |= {"copy"}
        mine = [v for p, v in self.memory.values.items() if p[:2] == ("attr", id(made))]
        flags |= {f for v in mine for f in v.flags & {"copy"}}
        return Value(frozenset().union(*(self.memory.use(v) for v in given.all)), flags=flags)


def unwrapped(function: Any) -> Any:
    """The user's function inside `functools.wraps`, a library's decorator or a method."""
    for _ in range(_MOST_WRAPPED):
        inner = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)
        if inner is None or (isinstance(function, types.FunctionType) and of_user(function.__code__.co_filename)):
            break
        function = inner
    return function


def method_of(kind: type, name: str) -> Any:
    """A method that is written in Python by the user's class, or a base of it; None for others."""
    for base in kind.__mro__:
        found = vars(base).get(name)
        if found is None:
            continue
        found = getattr(found, "__func__", found)
        return found if isinstance(found, types.FunctionType) or hasattr(found, "__wrapped__") else None
    return None
