"""Reading the code of one round: statements and expressions, with the user's functions that they call.

Nothing is run. Both branches of a condition count, an inner loop is read twice, and a function is read where it is
called, with its arguments there. Results go into `flow_memory`; the effects of calls are in `flow_calls`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from everstep.script.flow_items import MISSING, namespace_of
from everstep.script.flow_memory import (
    LEADER,
    NOTHING,
    STEP,
    TRAINED,
    Origin,
    Point,
    RoundMemory,
    Value,
    items_of,
    joined,
    note_setting,
    sink_setting,
)
from everstep.script.flow_sources import Function, SyntaxTrees, gives, names_of
from everstep.script.flow_words import VIEWS

_DEEPEST = 10
_MOST_STATEMENTS = 30_000


@dataclass
class Scope:
    """Names of one function, or of a module. own: names that live here; cells: places and contents of free variables;
    parent: of a function that is defined in code that is read. lasting: the names outlive the round; is_round: a
    `break` ends the training. first: the first parameter. left, gone: dependences of whether the rest of the loop's
    body, or of the function, is done at all; skips, exits: states where it is not."""

    key: Any
    globals: Mapping[str, Any]
    own: frozenset[str] = frozenset()
    live: Mapping[str, Any] = field(default_factory=dict)
    cells: Mapping[str, tuple[Origin, Any]] = field(default_factory=dict)
    parent: Scope | None = None
    lasting: bool = False
    is_round: bool = False
    first: str = ""
    left: frozenset[Origin] = NOTHING
    gone: set[Origin] = field(default_factory=set)
    skips: list[Point] = field(default_factory=list)
    exits: list[Point] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)

    def leave(self, control: frozenset[Origin], state: Point) -> None:
        """Note that the rest of the loop's body is left out, in this state, under these conditions."""
        self.left |= control
        self.skips.append(state)

    def place(self, name: str) -> tuple[Origin, Any]:
        """Place of a name, and its value at the beginning."""
        if name in self.own:
            return ("name", self.key, name), self.live.get(name, MISSING)
        if name in self.cells:
            return self.cells[name]
        if self.parent is not None:
            return self.parent.place(name)
        found = self.globals.get(name, getattr(builtins, name, MISSING))
        return ("name", id(self.globals), name), found


@dataclass(frozen=True)
class Closure:
    """A function that is defined in the code that is read."""

    node: Function
    scope: Scope


class CallReader(Protocol):
    """Effects of calls."""

    def call(self, node: ast.Call, scope: Scope) -> Value:
        """The value of a call."""

    def iterate(self, value: Value, node: ast.expr) -> Value:
        """Each value that an iterable gives."""

    def updated(self) -> None:
        """Note that the step's batches are used up."""

    def operate(self, value: Value, name: str, given: Sequence[Value]) -> Value | None:
        """Result of a user's method that Python calls by itself; None if there is none."""


@dataclass
class Reader:
    """Reader of one round. syntax: handlers by kind of statement and expression. notes: things not followed."""

    memory: RoundMemory
    sources: SyntaxTrees
    syntax: Mapping[type, Callable[[Any, Any, Scope], Any]]
    calls: CallReader | None = None
    notes: list[str] = field(default_factory=list)
    _active: list[Any] = field(default_factory=list)
    _count: int = 0
    _fresh: int = 0

    def ask(self, calls: CallReader) -> None:
        self.calls = calls

    # ---- functions

    def inline(self, node: Function, scope: Scope, given: Sequence[Value], named: Mapping[str, Value]) -> Value | None:
        """Result of a function that is called with these; None if it is too deep. scope: its own, without its names."""
        if len(self._active) >= _DEEPEST or self._active.count(node) > 1:
            return None
        self._active.append(node)
        inner = replace(
            scope,
            key=self.fresh(),
            own=names_of(node),
            first=_first(node),
            results=[],
            gone=set(),
            left=NOTHING,
            skips=[],
            exits=[],
        )
        try:
            self._bind(node, inner, given, named)
            if isinstance(node, ast.Lambda):
                return self.value(node.body, inner)
            self.block(node.body, inner)
            if inner.exits:
                self.memory.meet([self.memory.point(), *inner.exits])
        finally:
            self._active.pop()
        return joined(inner.results) if inner.results and gives(node) else Value()

    def fresh(self) -> Origin:
        self._fresh += 1
        return ("call", self._fresh)

    def scope_of(self, function: types.FunctionType, frames: Iterable[tuple[types.FrameType, Any]]) -> Scope:
        """Scope of a live function. frames: with their keys, for variables shared with it."""
        cells = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                thing = cell.cell_contents
            except ValueError:
                continue
            shared = [
                key
                for frame, key in frames
                if name in (*frame.f_code.co_cellvars, *frame.f_code.co_freevars)
                and frame.f_locals.get(name, MISSING) is thing
            ]
            self.memory.kept[id(cell)] = cell
            self.memory.owners.setdefault(id(cell), id(function))
            cells[name] = (("name", shared[0] if shared else ("cell", id(cell)), name), thing)
        return Scope(None, function.__globals__, cells=cells)

    def _bind(self, node: Function, scope: Scope, given: Sequence[Value], named: Mapping[str, Value]) -> None:
        arguments = node.args
        parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        rest = joined([*given, *named.values()]) if given or named else Value()
        for k, name in enumerate(parameters):
            default = k - len(parameters) + len(arguments.defaults)
            value = given[k] if k < len(given) else named.get(name)
            if value is None:
                value = self.value(arguments.defaults[default], scope) if default >= 0 else rest
            self._put_name(name, value, scope)
        for keyword, default_node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            value = named.get(keyword.arg)
            value = self.value(default_node, scope) if value is None and default_node is not None else value or rest
            self._put_name(keyword.arg, value, scope)
        if arguments.vararg is not None:
            more = tuple(given[len(parameters) :])
            self._put_name(arguments.vararg.arg, Value(items=more), scope)
        if arguments.kwarg is not None:
            others = [v for k, v in named.items() if k not in parameters]
            self._put_name(arguments.kwarg.arg, joined(others) if others else Value(), scope)

    def _put_name(self, name: str, value: Value, scope: Scope) -> None:
        self.memory.values[scope.place(name)[0]] = value

    # ---- statements

    def block(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        """Read statements in order; statements after a conditional exit depend on its condition."""
        for statement in statements:
            self._count += 1
            if self._count > _MOST_STATEMENTS:
                if self._count == _MOST_STATEMENTS + 1:
                    self.notes.append(f"more than {_MOST_STATEMENTS} statements")
                return
            with (
                self.memory.reading(line=getattr(statement, "lineno", 0)),
                self.memory.under(scope.left | scope.gone | self.memory.raised),
            ):
                handler = self.syntax.get(type(statement))
                if handler is not None:
                    handler(self, statement, scope)
                else:
                    self._others(statement, scope)

    def _others(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, scope)
            elif isinstance(child, ast.stmt):
                self.block([child], scope)
            else:
                self._others(child, scope)

    def same(self, source: ast.expr, target: ast.expr, scope: Scope) -> None:
        """Note that a name now also stands for a value stored elsewhere."""
        if isinstance(source, ast.Name) and isinstance(target, ast.Subscript | ast.Attribute):
            place = scope.place(source.id)[0]
            if place in self.memory.values:
                self.memory.values[place] = self.memory.values[place].with_deps(
                    self.memory.use(self.value(target, scope))
                )

    def store(self, target: ast.expr, value: Value, scope: Scope, *, defines: bool = False) -> None:
        """Put a value where the code says. defines: by `def`."""
        memory = self.memory
        if isinstance(target, ast.Name):
            place = scope.place(target.id)[0]
            lasting = place[1] != scope.key or scope.lasting
            if lasting:
                memory.read(place, scope.place(target.id)[1], target.id)
                memory.write(place, value, title=memory.titles.get(place, target.id))
                if acts(value) and not (defines and scope.place(target.id)[1] is MISSING):
                    memory.sink((place,))  # its callers do something else from then on
            else:
                memory.values[place] = value.with_deps(memory.control)
        elif isinstance(target, ast.Attribute):
            self.store_attribute(self.value(target.value, scope), target.attr, value, target.value, scope)
        elif isinstance(target, ast.Subscript):
            base, index = self.value(target.value, scope), self.value(target.slice, scope)
            if any(namespace_of(thing) is not None for thing in base.objects):
                self.store_names(base, target.slice, value)
                return
            given = value.with_deps(memory.use(index) if index.key is None else NOTHING)
            own, whole = item_of(base, target.slice), _is_whole(memory, base, target.slice)
            kept = items_of(memory, own) if own else {}
            memory.mutate(base, given, keys=bare(index), sets=True, whole=whole)
            if own:
                memory.values.update({**kept, own: value.with_deps(memory.control)})
            self.grow(target.value, base, given, scope)
        elif isinstance(target, ast.Tuple | ast.List):
            for k, inner in enumerate(target.elts):
                self.store(inner, part_of(value, k, len(target.elts)), scope)
        elif isinstance(target, ast.Starred):
            self.store(target.value, value, scope)

    def store_names(self, base: Value, name: ast.expr | None, value: Value) -> None:
        """Set a name of a module. name: None if it is unknown, and so may be any that the training reads."""
        for space in filter(None, map(namespace_of, base.objects)):
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.store(ast.Name(name.value, ast.Store()), value, Scope(None, space))
            else:
                place = ("name", id(space), "")
                self.memory.write(place, value.with_deps(frozenset((place,))), title="globals()[...]", strong=False)
                self.memory.sink((place,))

    def store_attribute(self, base: Value, name: str, value: Value, node: ast.expr, scope: Scope) -> None:
        """Set an attribute, or run the user's class's own method for that."""
        memory = self.memory
        if base.flags & {"trained", "step"}:
            sink_setting(memory, value)
        note_setting(memory, base, name, value)
        if not base.objects:
            memory.mutate(base, value)
            self.grow(node, base, value, scope)
        for thing in base.objects:
            setter = getattr(getattr(type(thing), name, None), "fset", None) if memory.judge.of_user(thing) else None
            if isinstance(setter, types.FunctionType):
                self.run_function(setter, [memory.live(thing, base.title), value])
                continue
            if self.calls is not None:
                self.calls.operate(memory.live(thing, base.title), "__setattr__", [Value(), value])
            place, found = memory.attribute(thing, name)
            if acts(value) or (_is_shared(thing) and callable(found)):
                memory.sink((place,))
            if place[0] == "attr" and place[1] != id(thing):
                place = ("attr", id(thing), name)
            memory.read(place, found, f"{base.title}.{name}")
            memory.write(place, value, title=memory.titles[place], strong=len(base.objects) == 1)

    def grow(self, node: ast.expr, base: Value, given: Value, scope: Scope) -> None:
        """Note under its name that an object made in this round holds something more."""
        if isinstance(node, ast.Subscript | ast.Attribute):
            node = node.value
        if isinstance(node, ast.Name) and not base.objects:
            place = scope.place(node.id)[0]
            deps = self.memory.use(given) | self.memory.control
            value = self.memory.values.get(place)
            if value is not None:
                self.memory.values[place] = replace(value.with_deps(deps), flags=value.flags | given.flags & {"copy"})
                if "copy" in given.flags or "copy" in value.flags:
                    self.memory.copies.add(place)

    def operate(self, value: Value, names: Iterable[str], *given: Value) -> frozenset[Origin]:
        """Dependences of the user's own operators."""
        found = [self.calls.operate(value, name, given) for name in names] if self.calls is not None else []
        return NOTHING.union(*(self.memory.use(one) for one in found if one is not None))

    def truth(self, node: ast.expr, scope: Scope) -> frozenset[Origin]:
        """Dependences of whether this is true."""
        value = self.value(node, scope)
        return self.memory.use(value) | self.operate(value, ("__bool__", "__len__"))

    def each(self, over: Value, node: ast.expr) -> Value:
        return self.calls.iterate(over, node) if self.calls is not None else Value(self.memory.use(over))

    def value(self, node: ast.expr, scope: Scope) -> Value:
        handler: Any = self.syntax.get(type(node))
        found: Value = handler(self, node, scope) if handler is not None else self.anything(node, scope)
        return found

    def anything(self, node: ast.AST, scope: Scope) -> Value:
        deps: frozenset[Origin] = NOTHING
        flags: frozenset[str] = frozenset()
        for child in ast.iter_child_nodes(node):
            value = self.value(child, scope) if isinstance(child, ast.expr) else self.anything(child, scope)
            deps, flags = deps | self.memory.use(value), flags | value.flags & {"copy"}
        return Value(deps, flags=flags)

    def attribute_of(self, base: Value, name: str) -> Value:
        """An attribute of a value."""
        memory = self.memory
        if "run" in base.flags and name == "is_main":
            memory.titles.setdefault(LEADER, f"{base.title}.{name}")
            memory.written.setdefault(LEADER, memory.at)
            return Value(frozenset((LEADER,)), title=f"{base.title}.{name}")
        if base.flags & {"step", "run"}:
            number = frozenset((STEP,))  # all else depends on the parameters, too: a loss is no function of its step
            deps, key = (number, number) if name == "number" else (number | {TRAINED}, None)
            return Value(deps, key=key, title=f"{base.title}.{name}")
        found = []
        for thing in base.objects:
            place, inner = memory.attribute(thing, name)
            getter = inner.fget if isinstance(inner, property) else None
            mine = ("attr", id(thing), name)
            if name == "__dict__":
                found.append(base)
            elif name in VIEWS and isinstance(thing, Tensor):
                found.append(replace(base, objects=(thing,), title=f"{base.title}.{name}", key=None))
            elif isinstance(getter, types.FunctionType) and self.calls is not None:
                made = self.run_function(getter, [base])
                if not memory.judge.of_user(getter):
                    made = made.with_deps(memory.read(mine, MISSING, f"{base.title}.{name}").deps)
                found.append(made)
            elif isinstance(inner, functools.cached_property) and isinstance(inner.func, types.FunctionType):
                with memory.unconditionally():
                    made = self.run_function(inner.func, [base])
                    memory.write(mine, made, title=f"{base.title}.{name}", strong=False)
                found.append(made.with_deps(memory.values[mine].deps))
            elif inner is MISSING and not memory.judge.of_user(thing) and place not in memory.values:
                found.append(replace(base, title=f"{base.title}.{name}", key=None))  # a view of the same memory
            else:
                value = memory.read(place, inner, f"{base.title}.{name}")
                value = value if value.title else replace(value, title=f"{base.title}.{name}")
                whole = memory.values.get(("object", id(thing)), Value()).deps  # for setattr and vars
                found.append(value.with_deps(base.deps | whole))
        if found:
            return replace(joined(found), homes=joined(found).homes | base.homes)
        return replace(base, items=None, element=None, codes=(), key=None, title=f"{base.title}.{name}")

    def run_function(self, function: types.FunctionType, given: Sequence[Value]) -> Value:
        """Result of a live function of the user's."""
        node = self.sources.function(function.__code__)
        found = self.inline(node, self.scope_of(function, ()), given, {}) if node is not None else None
        return found or Value(frozenset().union(*(self.memory.use(v) for v in given)))


def acts(value: Value) -> bool:
    """Whether the value may be a function."""
    functions = (types.FunctionType, types.MethodType, functools.partial)
    return bool(value.codes) or any(isinstance(thing, functions) for thing in value.objects)


def _is_shared(thing: Any) -> bool:
    """Whether all code finds functions here: a class, or a module, but not one of Everstep's."""
    return isinstance(thing, type | types.ModuleType) and not _home_of(thing).startswith("everstep.")


def _home_of(thing: Any) -> str:
    return str(getattr(thing, "__name__" if isinstance(thing, types.ModuleType) else "__module__", ""))


def _first(node: Function) -> str:
    parameters = [*node.args.posonlyargs, *node.args.args]
    return parameters[0].arg if parameters else ""


def _is_whole(memory: RoundMemory, base: Value, index: ast.expr) -> bool:
    """Whether nothing is left of a container, of which the item or slice at this index is set."""
    if isinstance(index, ast.Slice):
        return index.lower is None and index.upper is None and index.step is None
    key = index.value if isinstance(index, ast.Constant) else MISSING
    return key is ... or (len(base.objects) == 1 and memory.items.covers(base.objects[0], key))


def item_of(base: Value, index: ast.expr) -> Origin | None:
    """Place of one item of a list or dict, if the code says which."""
    known = len(base.objects) == 1 and not base.homes and type(base.objects[0]) in (list, dict)
    if not known or not isinstance(index, ast.Constant):
        return None
    key = index.value
    return ("item", id(base.objects[0]), key)


def bare(value: Value) -> frozenset[Origin]:
    """The place whose bare value this is, if there is one."""
    return value.key if value.key is not None else NOTHING


def part_of(value: Value, k: int, count: int) -> Value:
    """Item k of a value that is unpacked into `count` items."""
    if value.items is not None and len(value.items) == count and -count <= k < count:
        return value.items[k].with_deps(value.deps - value.items[k].deps) if value.deps else value.items[k]
    flags = value.flags & {"trained", "copy", "step"}
    return Value(value.deps, homes=value.homes, flags=flags, key=value.key, title=value.title, element=value.element)
