"""Effects of calls in a loop's code that is read: on their arguments, on trained values, and their results.

The user's functions are read in turn (`flow_functions`); for all others the names decide (`flow_words`): a method that
changes its object, a function that changes its argument, a draw, a file. Unknown functions change nothing.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from everstep.script.flow_functions import Functions, Given, method_of
from everstep.script.flow_items import MISSING, namespace_of
from everstep.script.flow_memory import (
    CHOSEN,
    LEADER,
    NOTHING,
    RANDOM,
    SCALARS,
    STEP,
    Origin,
    RoundMemory,
    Value,
    entry_of,
    joined,
)
from everstep.script.flow_reader import Reader, Scope, acts, bare
from everstep.script.flow_words import (
    ALIASING,
    CHANGING,
    CONVERTS,
    COPIES,
    DRAWS,
    EXITS,
    FIRST_CHANGED,
    FORGETTING,
    LOOKING,
    MODES,
    MOVES,
    PASSING,
    READS,
    REFUSING,
    SEEDS,
    SETTING,
    SHOWING,
    SILENT,
    SILENT_HERE,
    TOGETHER,
    WRITES,
)
from everstep.script.reachable import of_user

_MOST_METHODS = 32
_OPENED = ("opened to read", "opened to write")


@dataclass(frozen=True)
class BesideLoop:
    """Code that runs beside the loop's own. samples: functions that make samples and batches, with their arguments;
    hooks: at each backward pass; updates: at each update; forwards: at each call of a module, by its id. data: objects
    that hold the samples."""

    samples: Sequence[tuple[types.FunctionType | partial[Any], tuple[Any, ...]]] = ()
    hooks: Sequence[tuple[types.FunctionType, tuple[Any, ...]]] = ()
    updates: Sequence[tuple[types.FunctionType, tuple[Any, ...]]] = ()
    data: Sequence[tuple[str, Any]] = ()
    forwards: Mapping[int, Sequence[tuple[types.FunctionType, tuple[Any, ...]]]] = field(default_factory=dict)


@dataclass
class Calls:
    """Calls of one reader."""

    reader: Reader
    feeds: BesideLoop
    functions: Functions

    @property
    def memory(self) -> RoundMemory:
        return self.reader.memory

    def iterate(self, value: Value, node: ast.expr) -> Value:
        """Each value that an iterable gives."""
        memory = self.memory
        if "run" in value.flags:
            return value.element or Value(frozenset((STEP,)), flags=frozenset(("step",)), title="step")
        if "step" in value.flags:
            return self._batch()
        for thing in value.objects:
            if hasattr(type(thing), "__next__"):
                memory.mutate(value, Value())
        deps = memory.use(value)
        if value.element is not None:
            return value.element.with_deps(value.deps)
        if value.items:
            return joined(value.items).with_deps(deps)
        found = [self._elements(thing, value.title) for thing in value.objects]
        flags = value.flags & {"trained"}
        if found:
            one = joined(found)
            contents = frozenset(("object", id(t)) for t in value.objects)
            return replace(one, deps=one.deps | deps, homes=value.homes | contents, flags=one.flags | flags)
        return Value(deps, homes=value.homes, flags=flags, title=value.title)

    def _elements(self, thing: Any, title: str) -> Value:
        memory, kind = self.memory, type(thing)
        method = method_of(kind, "__iter__")
        if method is not None and memory.judge.of_user(thing):
            found = self.functions.run(method, [memory.live(thing, title)], {})
            return found.element or found
        inner: list[Any] = []
        if kind.__module__ in ("builtins", "collections") and isinstance(thing, list | tuple | set):
            inner = list(thing)[:8]
        elif isinstance(getattr(thing, "_modules", None), dict):
            inner = list(thing._modules.values())[:8]
        lives = [memory.live(one, f"{title}[{k}]") for k, one in enumerate(inner)]
        return joined(lives) if lives else Value(title=title)

    def _batch(self) -> Value:
        """A batch, made by the dataset and collate: training depends on all that they read."""
        memory = self.memory
        deps: frozenset[Origin] = frozenset((STEP,))
        for title, thing in self.feeds.data:
            place = ("object", id(thing))
            memory.kept[id(thing)] = thing
            memory.titles.setdefault(place, title)
            deps |= memory.values[place].deps if place in memory.values else frozenset((place,))
        with memory.reading(each="beside"):
            for function, given in self.feeds.samples:
                deps |= memory.use(self._beside(function, given))
        memory.sink(deps)
        return Value(deps)

    def train_on_batch(self, loss: types.FunctionType, own: Sequence[Value]) -> None:
        """Note a batch of a task, whose loss is a function of these and the batch."""
        self._backward(Given((self.functions.run(loss, [*own, self._batch()], {}),), {}))

    def updated(self) -> None:
        """Note an update: schedulers and hooks of the optimizer run, which may change what they are given."""
        for function, given in self.feeds.updates:
            result = self._beside(function, given, frozenset(("grad",)))
            if not any(title == "optimizer" for title, _ in given):  # nothing uses the results of its hooks
                self.memory.sink(self.memory.use(result))

    def operate(self, value: Value, name: str, given: Sequence[Value]) -> Value | None:
        return self.functions.operate(value, name, given)

    def _beside(
        self,
        function: types.FunctionType | partial[Any],
        given: tuple[Any, ...],
        flags: frozenset[str] = frozenset(),
        deps: frozenset[Origin] = NOTHING,
    ) -> Value:
        if isinstance(function, partial):
            batch = Value(deps | {("arg", id(function), 0)}, flags=flags)
            all_given = (*(self.memory.live(thing, title) for title, thing in given), batch)
            return self.functions.live(function, Value(title="partial"), Given(all_given, {})) or Value()
        code = function.__code__
        own = [self.memory.live(thing, title) for title, thing in given]
        rest = [
            Value(deps | {("arg", id(code), k)}, flags=flags, key=frozenset((("arg", id(code), k),)))
            for k in range(code.co_argcount - len(own))
        ]
        return self.functions.run(function, [*own, *rest], {})

    def call(self, node: ast.Call, scope: Scope) -> Value:
        """The value of a call; its effects are noted."""
        reader = self.reader
        plain = tuple(reader.value(a, scope) for a in node.args)
        named = {k.arg or f"**{n}": reader.value(k.value, scope) for n, k in enumerate(node.keywords)}
        given = Given(plain, named)
        if isinstance(node.func, ast.Attribute):
            inner = node.func.value
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super":
                base, result = self.functions.upwards(scope, node.func.attr, given)
                return result or self._foreign_method(node.func, base, node.func.attr, given, scope)
            base = reader.value(inner, scope)
            return self._method(node, base, node.func.attr, given, scope)
        callee = reader.value(node.func, scope)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        return self._function(node, callee, name, given, scope)

    def _method(self, node: ast.Call, base: Value, name: str, given: Given, scope: Scope) -> Value:
        memory = self.memory
        if "step" in base.flags:
            if name == "backward":
                self._backward(given)
            return Value(frozenset((STEP,)))
        if "run" in base.flags:
            return self._of_run(name, given)
        func = node.func
        of_module = any(isinstance(t, types.ModuleType) for t in base.objects)
        found = []
        for thing in base.objects:
            if isinstance(thing, type) and issubclass(thing, torch.autograd.Function) and name == "apply":
                found.append(self.functions.autograd(thing, given))
            if isinstance(thing, type) and name in CHANGING and not memory.judge.of_user(thing) and given.plain:
                memory.mutate(given.plain[0], Value(together(memory, given)))  # dict.update(group, ...)
            raw = inspect.getattr_static(thing, name, None)
            if isinstance(raw, classmethod) and memory.judge.of_user(thing):
                kind = thing if isinstance(thing, type) else type(thing)
                found.append(self.functions.run(raw, [memory.live(kind, base.title), *given.plain], given.named))
                continue
            if isinstance(raw, staticmethod) and self.functions.is_users(raw.__func__):
                found.append(self.functions.run(raw, given.plain, given.named))
                continue
            if isinstance(thing, types.ModuleType | type):
                continue
            method = method_of(type(thing), name) if memory.judge.of_user(thing) else None
            if name in ALIASING and not self.functions.is_users(method):
                continue
            if method is not None and name not in getattr(thing, "__dict__", {}):
                found.append(self.functions.run(method, [memory.live(thing, base.title), *given.plain], given.named))
        if found:
            return joined(found)
        callee = self.reader.attribute_of(base, name)
        held = any(_is_held(memory.attribute(thing, name)[1]) for thing in base.objects)
        if callee.codes or held or any(self.functions.is_users(t) for t in callee.objects) or of_module:
            return self._function(node, callee, name, given, scope)
        if name == "__setitem__" and isinstance(func, ast.Attribute) and len(node.args) == len(given.plain) == 2:
            target = ast.copy_location(ast.Subscript(func.value, node.args[0], ast.Store()), node)
            self.reader.store(target, given.plain[1], scope)
            return Value()
        return self._foreign_method(func, base, name, given, scope)

    def _backward(self, given: Given) -> None:
        memory = self.memory
        memory.sink(frozenset().union(*(memory.use(v) for v in given.all)))
        for function, own in self.feeds.hooks:
            memory.sink(memory.use(self._beside(function, own, frozenset(("grad",)))))

    def _of_run(self, name: str, given: Given) -> Value:
        if name in ("stop", *TOGETHER):
            self.memory.sink(NOTHING)
        if name == "__iter__":
            return Value(flags=frozenset(("run",)))
        for value in given.plain:
            self.functions.handed(value, [Value()])
        return Value(frozenset((STEP,)))

    def _foreign_method(self, func: Any, base: Value, name: str, given: Given, scope: Scope) -> Value:
        memory = self.memory
        whole = together(memory, given)
        if name in CHANGING and any(namespace_of(thing) is not None for thing in base.objects):
            names = given.named.items() if name == "update" and not given.plain else ()
            for word, value_of in names:
                self.reader.store_names(base, ast.Constant(word), value_of)
            if not names:
                self.reader.store_names(base, None, Value(whole))
            return Value()
        flags = frozenset(f for v in given.all for f in v.flags & {"copy"})
        restless = any("restless" in memory.judge.flags(thing) for thing in base.objects)
        in_place = name.endswith("_") and not name.endswith("__")
        stored = name.startswith("execute") and _changes_tables(given)
        if name in CHANGING or in_place or restless or stored or name.startswith(("set_", "add_", "register_", "log_")):
            first = given.plain[0] if given.plain else Value()
            keys = first.key or NOTHING if name == "setdefault" else NOTHING
            value = Value(whole - keys if name == "setdefault" else whole, flags=flags)
            sets = (name in SETTING and not (name == "seek" and len(given.all) > 1)) or name == "setdefault"
            with memory.unconditionally(LEADER) if name in MODES else nullcontext():
                memory.mutate(base, value, keys=keys, sets=sets, forgets=name in FORGETTING, whole=name != "setdefault")
            self.reader.grow(func.value, base, value, scope)
            if any("drives" in memory.judge.flags(thing) for thing in base.objects):
                memory.sink(whole)
        if name == "backward" and "inputs" in given.named:
            memory.mutate(given.named["inputs"], Value(memory.use(base)))
        changes = isinstance(_only(base), np.ufunc) or name == "shuffle"
        self._changed_arguments(name if changes else "", given, whole)
        self.functions.handed_on(given, base)
        if name in REFUSING:
            memory.may_raise(memory.use(base))
        title = f"{base.title}.{name}()"
        if name in READS | WRITES:
            whole |= self._file(name, [(func.value, base)], memory.use(base) | whole)
        if name in SILENT or (name in SILENT_HERE and all(isinstance(t, dict | set | list) for t in base.objects)):
            return Value()
        if name in ("items", "values", "keys"):
            each = self.iterate(replace(base, items=None), func)
            key = Value(memory.use(base))
            inner = joined(
                [memory.live(v, base.title) for d in base.objects if isinstance(d, dict) for v in [*d.values()][:8]]
                or [each]
            )
            one = replace(inner, deps=each.deps, homes=each.homes, flags=each.flags | inner.flags)
            return Value(memory.use(base), element=Value(items=(key, one)) if name == "items" else one)
        flags = base.flags & {"trained", "copy", "grad"} if name in ALIASING else frozenset()
        if name.startswith("named_"):
            one = Value(memory.use(base), homes=_homes(base), flags=flags, title=base.title)
            return Value(memory.use(base), element=Value(items=(Value(), one)))
        if name in COPIES and "trained" in base.flags:
            flags |= {"copy"}
        homes = _homes(base) if name in ALIASING or in_place else NOTHING
        asked = bare(given.plain[0]) if name in LOOKING and given.plain else None
        return Value(
            (memory.use(base) if asked is None else entry_of(memory, base, asked)) | whole,
            homes=homes,
            flags=flags,
            title=title if not homes else base.title,
        )

    def _function(self, node: ast.Call, callee: Value, name: str, given: Given, scope: Scope) -> Value:
        memory = self.memory
        found = []
        chosen = "chosen" in callee.flags or len(callee.codes) + len(callee.objects) > 1
        with memory.under(callee.deps if chosen else NOTHING):
            acts: list[partial[Any]] = [
                partial(self.functions.closure, code, given.plain, given.named) for code in callee.codes
            ]
            acts += [partial(self.functions.live, thing, callee, given) for thing in callee.objects]
            results: list[Value | None] = []
            if acts:
                memory.branches([lambda act=act: results.append(act()) for act in acts])  # type: ignore[misc]
            found += [one for one in results if one is not None]
        if len(callee.objects) == 1 and not callee.codes:
            self._called(callee.objects[0], together(memory, given) | memory.use(callee))
        if found:
            return joined(found)
        whole = together(memory, given) | memory.use(callee)
        whole = whole.union(*(memory.fields(thing, callee.title) for thing in callee.objects))
        module = ast.unparse(node.func).split(".")[0] if isinstance(node.func, ast.Attribute) else ""
        special = _of_modules(self.reader, name, given, whole, scope) or self._special(name, node, given, whole, scope)
        if special is not None:
            return special
        if name in SEEDS or (name.startswith("set_") and module == "torch"):
            with memory.unconditionally(LEADER):  # the leader may draw for itself: each lane is seeded
                memory.sink(whole)
        if name in EXITS:
            memory.sink(NOTHING)
        if name in CONVERTS and given.plain:
            whole |= self.reader.operate(given.plain[0], CONVERTS[name])
        if name in READS | WRITES or name == "open":
            named = list(zip(node.args, given.plain, strict=False))
            named = named[:1] if name == "open" else named
            whole |= self._file(_opened(node) if name == "open" else name, named, whole)
        if name in MOVES and len(node.args) == len(given.plain) == 2:
            read = self._file("load", [(node.args[0], given.plain[0])], whole)
            self._file("save", [(node.args[1], given.plain[1])], whole | read)
        self._changed_arguments(name, given, whole)
        self.functions.handed_on(given)
        if name == "getenv":
            whole |= memory.use(memory.live(os.environ, "os.environ"))
        if name in DRAWS and "generator" not in given.named:
            whole |= {RANDOM}
        types_made = [t for t in callee.objects if isinstance(t, type)]
        drives = any("copies" in memory.judge.flags(t) for t in types_made) or name in COPIES
        flags = frozenset(f for v in given.all for f in v.flags & {"copy"})
        if drives and any(v.flags & {"trained", "copy"} for v in given.all):
            flags |= {"copy"}
        return Value(whole, flags=flags, title=name)

    def _called(self, thing: Any, deps: frozenset[Origin]) -> None:
        """Note that a module is called: its forward hooks run, and those of the modules that it surely calls."""
        for function, given in self.feeds.forwards.get(id(thing), ()):
            self._beside(function, given, deps=deps)
        for inner in thing if type(thing) is torch.nn.Sequential else ():
            self._called(inner, deps)

    def _special(
        self, name: str, node: ast.Call, given: Given, together: frozenset[Origin], scope: Scope
    ) -> Value | None:
        """Result of functions that share something with their arguments; None for all others."""
        plain = given.plain
        running = next((v for v in plain if "run" in v.flags or ("step" in v.flags and name in SHOWING)), None)
        if name == "enumerate" and plain:
            inner = self.iterate(plain[0], node)
            flags = frozenset(("run",)) if running is not None else frozenset()
            return Value(
                NOTHING if running else together,
                element=Value(items=(Value(self.memory.use(plain[0])), inner)),
                flags=flags,
            )
        if name == "zip" and plain:
            each = tuple(self.iterate(v, node) for v in plain)
            flags = frozenset(("run",)) if running is not None else frozenset()
            return Value(NOTHING if running else together, element=Value(items=each), flags=flags)
        if running is not None:
            return replace(running, objects=())
        if name == "next" and plain:
            if any(v.flags & {"step"} for v in plain):
                return self._batch()
            self.memory.mutate(plain[0], Value())
            self.memory.may_raise(self.memory.use(plain[0]))
            own = self.functions.operate(plain[0], "__next__", ())
            if own is not None:
                return own
            return self.iterate(plain[0], node).with_deps(self.memory.use(plain[0]))
        if name == "map" and len(plain) > 1:
            return Value(together, element=self.functions.handed(plain[0], [self.iterate(v, node) for v in plain[1:]]))
        if name in ("Path", "str", "fspath") and len(plain) == 1:
            return replace(plain[0], title=name)
        if name in PASSING and plain:
            return replace(joined(plain), deps=together, key=None)
        if name in ("getattr", "setattr") and len(plain) > 1:
            return self._named(name, node, plain, together, scope)
        if name == "Thread":
            by_name = {k.arg: k.value for k in node.keywords}
            target, args = by_name.get("target"), by_name.get("args")
            if target is not None and isinstance(args, ast.Tuple | None):
                call = ast.Call(target, args.elts if args is not None else [], [])
                return self.call(ast.copy_location(call, node), scope)
        return None

    def _named(self, name: str, node: ast.Call, plain: Any, whole: frozenset[Origin], scope: Scope) -> Value:
        """Result of `getattr` and `setattr`."""
        memory, key = self.memory, node.args[1] if len(node.args) > 1 else None
        if name == "getattr" and isinstance(key, ast.Constant):
            return joined([self.reader.attribute_of(plain[0], str(key.value)), *plain[2:]])
        if name == "getattr":
            inner = [memory.live(one, "") for thing in plain[0].objects for one in _methods(thing)]
            inner += [self.reader.attribute_of(plain[0], held) for held in _held_functions(memory, plain[0])]
            named = together(memory, Given(plain[1:], {}))  # of which one is called; whole, of a value
            return replace(joined([*inner, *plain[2:]] or [Value()]), deps=named, element=Value(whole), flags=CHOSEN)
        if isinstance(key, ast.Constant) and len(plain) > 2:
            self.reader.store_attribute(plain[0], str(key.value), plain[2], node.args[0], scope)
        elif any(isinstance(thing, types.ModuleType) for thing in plain[0].objects):
            self.reader.store_names(plain[0], key, Value(whole))
        else:
            memory.mutate(plain[0], Value(whole))
        return Value()

    def _changed_by_name(self, given: Given, whole: frozenset[Origin]) -> None:
        for key in ("generator", "out", "rng"):
            if key in given.named:
                self.memory.mutate(given.named[key], Value(whole))

    def _changed_arguments(self, name: str, given: Given, together: frozenset[Origin]) -> None:
        memory = self.memory
        self._changed_by_name(given, together)
        in_place = (name.endswith("_") and not name.startswith("_")) or (
            name.startswith("_foreach_") and name.endswith("_")
        )
        if given.plain and (name in FIRST_CHANGED or in_place):
            changed = given.plain[1] if name in ("vector_to_parameters",) and len(given.plain) > 1 else given.plain[0]
            memory.mutate(changed, Value(together))

    def _file(self, name: str, named: Iterable[tuple[ast.expr, Value]], deps: frozenset[Origin]) -> frozenset[Origin]:
        """Note that a file is written or read, known by its name, or by how the name is made. Returns the dependences
        of the content that is read."""
        found: frozenset[Origin] = NOTHING
        for node, value in named:
            paths = [str(t) for t in value.objects if isinstance(t, str) or hasattr(type(t), "__fspath__")]
            made = isinstance(node, ast.JoinedStr | ast.BinOp | ast.Call) or name in _OPENED
            for path in paths or ([ast.unparse(node)] if made else []):
                place = ("file", path)
                found |= self.memory.read(place, MISSING, path).deps
                if name in (*WRITES, _OPENED[1]):
                    self.memory.write(place, Value(deps | {place}), title=path, strong=False)
        reads = name in (*READS, _OPENED[0])
        if reads:
            self.memory.may_raise(found)
        return found if reads else NOTHING


def together(memory: RoundMemory, given: Given) -> frozenset[Origin]:
    """Everything that the arguments depend on."""
    return NOTHING.union(*(memory.use(v) for v in given.all))


def _of_modules(reader: Reader, name: str, given: Given, deps: frozenset[Origin], scope: Scope) -> Value | None:
    """Result of functions that give or change the names of modules; None for all others."""
    memory, plain = reader.memory, given.plain
    if name == "globals" or (name in ("locals", "vars") and not plain and not scope.own):
        return memory.live(scope.globals, name)
    if name == "exec":
        reader.store_names(memory.live(scope.globals, name), None, Value(deps))
        return Value()
    if name in ("import_module", "__import__") and plain:
        found = [sys.modules.get(key) for key in plain[0].objects if isinstance(key, str)]
        return joined([memory.live(one, one.__name__) for one in found if one is not None] or [Value()])
    return None


def _homes(base: Value) -> frozenset[Origin]:
    alone = base.objects if "trained" not in base.flags else ()
    return base.homes | {("object", id(t)) for t in alone if not isinstance(t, SCALARS)}


def _only(value: Value) -> Any:
    return value.objects[0] if len(value.objects) == 1 else None


def _methods(thing: Any) -> list[Any]:
    """The object's own methods written by the user, bound: a computed name may mean any of them."""
    found: list[Any] = []
    for kind in type(thing).__mro__:
        for name, one in vars(kind).items():
            if isinstance(one, types.FunctionType) and name[:2] != "__" and of_user(one.__code__.co_filename):
                found.append(types.MethodType(one, thing))
    inner = vars(thing).values() if isinstance(thing, types.ModuleType) else ()
    found += [one for one in list(inner) if isinstance(one, types.FunctionType) and of_user(one.__code__.co_filename)]
    return found[:_MOST_METHODS]


def _held_functions(memory: RoundMemory, base: Value) -> list[str]:
    """Names of attributes that can be called, and are no methods."""
    own = {id(thing): getattr(thing, "__dict__", {}) for thing in base.objects}
    found = {p[2] for p, v in memory.values.items() if p[0] == "attr" and p[1] in own and acts(v)}
    held = {name for names in own.values() if "__builtins__" not in names for name in names if callable(names[name])}
    return sorted(found | held)[:_MOST_METHODS]


def _changes_tables(given: Given) -> bool:
    """Whether a database statement changes data, as far as that can be read."""
    said = [t for v in given.plain[:1] for t in v.objects if isinstance(t, str)]
    return not any(text.lstrip().lower().startswith(("select", "pragma", "explain")) for text in said)


def _is_held(found: Any) -> bool:
    """Whether an attribute is an object of its own, not a method of its class."""
    return found is not MISSING and not isinstance(found, property) and not hasattr(type(found), "__get__")


def _opened(node: ast.Call) -> str:
    """Name of the act for which a file is opened."""
    given = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
    modes = [str(g.value) for g in given if isinstance(g, ast.Constant)]
    return _OPENED[bool(modes and set(modes[0]) & set("wax+"))]
