"""Reading the code of one round: statements and expressions, with the functions of the user's that they call.

Nothing is run. Both branches of a condition count, an inner loop is read twice, and a function is read where it is
called, with what it is given there. What is read into is `flow_memory`; what calls do is `flow_calls`.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from everstep.train.flow_memory import (
    MISSING,
    NOTHING,
    SCALARS,
    STEP,
    Origin,
    RoundMemory,
    Value,
    decided,
    joined,
)
from everstep.train.flow_sources import Function, SyntaxTrees, names_of
from everstep.train.flow_words import SHAPES

_DEEPEST = 10
_MOST_STATEMENTS = 30_000
_AGAIN = 2
_EACH = 8


@dataclass
class Scope:
    """Names of one function, or of a module. own: the names that live here; cells: places of free variables, with what
    is there; parent: of a function that is defined in code that is read. lasting: what is here outlives the round;
    is_round: a `break` ends the training. left, gone: on what it depends that the rest of the loop's body, or of the
    function, is done at all."""

    key: Any
    globals: Mapping[str, Any]
    own: frozenset[str] = frozenset()
    live: Mapping[str, Any] = field(default_factory=dict)
    cells: Mapping[str, tuple[Origin, Any]] = field(default_factory=dict)
    parent: Scope | None = None
    lasting: bool = False
    is_round: bool = False
    left: frozenset[Origin] = NOTHING
    gone: set[Origin] = field(default_factory=set)
    results: list[Value] = field(default_factory=list)

    def leave(self, control: frozenset[Origin]) -> None:
        """The rest of the loop's body is left out, under these conditions."""
        self.left |= control

    def place(self, name: str) -> tuple[Origin, Any]:
        """Where a name is, and what it stands for at the beginning."""
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
    """What a call does."""

    def call(self, node: ast.Call, scope: Scope) -> Value:
        """The value of a call."""

    def iterate(self, value: Value, node: ast.expr) -> Value:
        """Each value that an iterable gives."""

    def updated(self) -> None:
        """The step's batches are used up."""


@dataclass
class Reader:
    """Of one round. notes: what could not be followed."""

    memory: RoundMemory
    sources: SyntaxTrees
    calls: CallReader | None = None
    notes: list[str] = field(default_factory=list)
    _active: list[Any] = field(default_factory=list)
    _count: int = 0
    _fresh: int = 0

    def ask(self, calls: CallReader) -> None:
        """What calls do is to be asked here."""
        self.calls = calls

    # ---- functions

    def inline(self, node: Function, scope: Scope, given: Sequence[Value], named: Mapping[str, Value]) -> Value | None:
        """The result of a function that is called with these; None if it is too deep. scope: its own, but for names."""
        if len(self._active) >= _DEEPEST or self._active.count(node) > 1:
            return None
        self._active.append(node)
        inner = replace(scope, key=self.fresh(), own=names_of(node), results=[], gone=set(), left=NOTHING)
        try:
            self._bind(node, inner, given, named)
            if isinstance(node, ast.Lambda):
                return self.value(node.body, inner)
            self.block(node.body, inner)
        finally:
            self._active.pop()
        return joined(inner.results) if inner.results else Value()

    def fresh(self) -> Origin:
        """The key of a scope that there was not before."""
        self._fresh += 1
        return ("call", self._fresh)

    def scope_of(self, function: types.FunctionType, frames: Iterable[tuple[types.FrameType, Any]]) -> Scope:
        """The scope of a live function. frames: with their keys, for a variable that one of them shares with it."""
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
        """One after the other; what follows a condition under which one leaves depends on that."""
        for statement in statements:
            self._count += 1
            if self._count > _MOST_STATEMENTS:
                if self._count == _MOST_STATEMENTS + 1:
                    self.notes.append(f"more than {_MOST_STATEMENTS} statements")
                return
            with (
                self.memory.reading(line=getattr(statement, "lineno", 0)),
                self.memory.under(scope.left | scope.gone),
            ):
                handler = _STATEMENTS.get(type(statement))
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
        """What a name stands for is now what is stored elsewhere, too."""
        if isinstance(source, ast.Name) and isinstance(target, ast.Subscript | ast.Attribute):
            place = scope.place(source.id)[0]
            if place in self.memory.values:
                self.memory.values[place] = self.memory.values[place].with_deps(
                    self.memory.use(self.value(target, scope))
                )

    def store(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """Put a value where the code says."""
        memory = self.memory
        if isinstance(target, ast.Name):
            place = scope.place(target.id)[0]
            lasting = place[1] != scope.key or scope.lasting
            if lasting:
                memory.read(place, scope.place(target.id)[1], target.id)
                memory.write(place, value, title=memory.titles.get(place, target.id))
            else:
                memory.values[place] = value.with_deps(memory.control)
        elif isinstance(target, ast.Attribute):
            self.store_attribute(self.value(target.value, scope), target.attr, value, target.value, scope)
        elif isinstance(target, ast.Subscript):
            base, index = self.value(target.value, scope), self.value(target.slice, scope)
            given = value.with_deps(memory.use(index) if index.key is None else NOTHING)
            memory.mutate(base, given, keys=_bare(index), sets=True)
            self.grow(target.value, base, given, scope)
        elif isinstance(target, ast.Tuple | ast.List):
            for k, inner in enumerate(target.elts):
                self.store(inner, part_of(value, k, len(target.elts)), scope)
        elif isinstance(target, ast.Starred):
            self.store(target.value, value, scope)

    def store_attribute(self, base: Value, name: str, value: Value, node: ast.expr, scope: Scope) -> None:
        memory = self.memory
        if base.flags & {"trained", "step"}:
            memory.sink(memory.use(value))
        if not base.objects:
            memory.mutate(base, value)
            self.grow(node, base, value, scope)
        for thing in base.objects:
            place, found = memory.attribute(thing, name)
            if place[0] == "attr" and place[1] != id(thing):
                place = ("attr", id(thing), name)
            memory.read(place, found, f"{base.title}.{name}")
            memory.write(place, value, title=memory.titles[place], strong=len(base.objects) == 1)

    def grow(self, node: ast.expr, base: Value, given: Value, scope: Scope) -> None:
        """What is made in this round holds something more: the name that it has knows."""
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

    def each(self, over: Value, node: ast.expr) -> Value:
        return self.calls.iterate(over, node) if self.calls is not None else Value(self.memory.use(over))

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """What an expression may be."""
        handler: Any = _EXPRESSIONS.get(type(node))
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
        """An attribute of what this may be."""
        memory = self.memory
        if base.flags & {"step", "run"}:
            key = frozenset((STEP,)) if name == "number" else None
            return Value(frozenset((STEP,)), key=key, title=f"{base.title}.{name}")
        found = []
        for thing in base.objects:
            place, inner = memory.attribute(thing, name)
            getter = inner.fget if isinstance(inner, property) else None
            if isinstance(getter, types.FunctionType) and self.calls is not None:
                found.append(self.run_function(getter, [base]))
            elif inner is MISSING and not memory.judge.of_user(thing) and place not in memory.values:
                found.append(replace(base, title=f"{base.title}.{name}", key=None))  # a view of the same
            else:
                value = memory.read(place, inner, f"{base.title}.{name}")
                found.append(value.with_deps(base.deps) if base.deps - value.deps else value)
        if found:
            return replace(joined(found), homes=joined(found).homes | base.homes)
        return replace(base, items=None, element=None, code=None, key=None, title=f"{base.title}.{name}")

    def run_function(self, function: types.FunctionType, given: Sequence[Value]) -> Value:
        """The result of a live function of the user's."""
        node = self.sources.function(function.__code__)
        found = self.inline(node, self.scope_of(function, ()), given, {}) if node is not None else None
        return found or Value(frozenset().union(*(self.memory.use(v) for v in given)))


# ---- statements and expressions, by kind


def _assign(reader: Reader, node: ast.Assign, scope: Scope) -> None:
    value = reader.value(node.value, scope)
    for target in node.targets:
        reader.store(target, value, scope)
        reader.same(node.value, target, scope)


def _annotated(reader: Reader, node: ast.AnnAssign, scope: Scope) -> None:
    if node.value is not None:
        reader.store(node.target, reader.value(node.value, scope), scope)


def _augmented(reader: Reader, node: ast.AugAssign, scope: Scope) -> None:
    read = ast.copy_location(_loaded(node.target), node.target)
    old, added = reader.value(read, scope), reader.value(node.value, scope)
    deps = reader.memory.use(old) | reader.memory.use(added)
    in_place = any(not isinstance(thing, SCALARS) for thing in old.objects) or "trained" in old.flags
    if in_place:
        reader.memory.mutate(old, added)
    kept = old if in_place else Value()
    reader.store(node.target, replace(kept, deps=frozenset(deps), key=None), scope)


def _if(reader: Reader, node: ast.If, scope: Scope) -> None:
    deps = reader.memory.use(reader.value(node.test, scope))
    with reader.memory.under(deps):
        reader.memory.branches((lambda: reader.block(node.body, scope), lambda: reader.block(node.orelse, scope)))


def _leave(reader: Reader, node: ast.Continue | ast.Break, scope: Scope) -> None:
    scope.leave(reader.memory.control)
    if scope.is_round and isinstance(node, ast.Break):
        reader.memory.sink(NOTHING)


def _return(reader: Reader, node: ast.Return, scope: Scope) -> None:
    value = reader.value(node.value, scope) if node.value is not None else Value()
    scope.results.append(value.with_deps(reader.memory.control))
    scope.gone.update(reader.memory.control)
    if scope.lasting:
        reader.memory.sink(NOTHING)


def _loop(reader: Reader, node: ast.For | ast.While, scope: Scope) -> None:
    memory = reader.memory
    over = reader.value(node.iter, scope) if isinstance(node, ast.For) else None
    trains = over is not None and bool(over.flags & {"run", "step"})

    def once() -> None:
        if over is not None and isinstance(node, ast.For):
            deps = NOTHING if trains else memory.use(over)
            reader.store(node.target, reader.each(over, node.iter), scope)
        else:
            deps = memory.use(reader.value(node.test, scope)) if isinstance(node, ast.While) else NOTHING
        inner = replace(scope, left=NOTHING, is_round=False)
        with memory.under(deps | scope.left):
            reader.block(node.body, inner)
        if trains:
            memory.sink(inner.left)

    for _ in range(_AGAIN):
        memory.branches((once, lambda: None))
    if trains and reader.calls is not None:
        reader.calls.updated()
    reader.block(node.orelse, scope)


def _match(reader: Reader, node: ast.Match, scope: Scope) -> None:
    value = reader.value(node.subject, scope)
    for case in node.cases:
        for pattern in ast.walk(case.pattern):
            name = getattr(pattern, "name", None) or getattr(pattern, "rest", None)
            if isinstance(name, str):
                reader.store(ast.Name(name, ast.Store()), Value(reader.memory.use(value)), scope)
    guards = [reader.memory.use(reader.value(case.guard, scope)) for case in node.cases if case.guard is not None]
    with reader.memory.under(reader.memory.use(value).union(*guards)):
        reader.memory.branches([lambda c=c: reader.block(c.body, scope) for c in node.cases])  # type: ignore[misc]


def _try(reader: Reader, node: ast.Try, scope: Scope) -> None:
    reader.block(node.body, scope)
    handlers = [lambda h=h: reader.block(h.body, scope) for h in node.handlers]
    reader.memory.branches([*handlers, lambda: reader.block(node.orelse, scope)])
    reader.block(node.finalbody, scope)


def _with(reader: Reader, node: ast.With, scope: Scope) -> None:
    for item in node.items:
        value = reader.value(item.context_expr, scope)
        if item.optional_vars is not None:
            reader.store(item.optional_vars, value, scope)
    reader.block(node.body, scope)


def _define(reader: Reader, node: ast.FunctionDef, scope: Scope) -> None:
    reader.store(ast.Name(node.name, ast.Store()), Value(code=Closure(node, scope)), scope)


def _delete(reader: Reader, node: ast.Delete, scope: Scope) -> None:
    for target in node.targets:
        if isinstance(target, ast.Subscript):
            reader.memory.mutate(reader.value(target.value, scope), reader.value(target.slice, scope), forgets=True)


def _name(reader: Reader, node: ast.Name, scope: Scope) -> Value:
    place, thing = scope.place(node.id)
    if place in reader.memory.values:
        return reader.memory.values[place]
    if place[1] == scope.key and not scope.lasting:
        return Value(title=node.id)
    return reader.memory.read(place, thing, node.id)


def _attribute(reader: Reader, node: ast.Attribute, scope: Scope) -> Value:
    base = reader.value(node.value, scope)
    return _shape(reader, base, node) if node.attr in SHAPES else reader.attribute_of(base, node.attr)


def _shape(reader: Reader, base: Value, node: ast.expr) -> Value:
    """What says nothing of a batch's numbers: the same in every step, as far as it is told apart by its value."""
    found = reader.attribute_of(base, node.attr) if isinstance(node, ast.Attribute) else base
    deps = reader.memory.use(found)
    if base.objects:
        return found
    key = frozenset((("arg", "shape", id(node)),))
    return Value(key | {d for d in deps if not reader.memory.is_plain(d)}, key=key, title=found.title)


def _subscript(reader: Reader, node: ast.Subscript, scope: Scope) -> Value:
    base, index = reader.value(node.value, scope), reader.value(node.slice, scope)
    memory = reader.memory
    title = f"{base.title}[{ast.unparse(node.slice)}]"
    deps = memory.use(base) | memory.use(index)
    if base.key and isinstance(node.slice, ast.Constant) and all(d[:2] == ("arg", "shape") for d in base.key):
        return _shape(reader, base, node)
    if base.items is not None and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
        return part_of(base, node.slice.value, len(base.items))
    inner = [found for thing in base.objects if (found := _item(thing, node.slice)) is not MISSING]
    contents = frozenset(("object", id(t)) for t in base.objects if not isinstance(t, SCALARS))
    lasting = base.flags & {"trained", "copy"}
    if inner:
        lives = joined([memory.live(thing, title) for thing in inner])
        scalar = all(isinstance(thing, SCALARS) for thing in inner)
        flags = lives.flags if scalar else lives.flags | lasting
        return replace(lives, deps=deps, homes=base.homes | (NOTHING if scalar else contents), flags=flags)
    return Value(deps, homes=base.homes | contents, flags=lasting, title=title)


def _constant(reader: Reader, node: ast.Constant, scope: Scope) -> Value:
    return Value(objects=(node.value,)) if isinstance(node.value, str) else Value()


def _tuple(reader: Reader, node: ast.Tuple | ast.List, scope: Scope) -> Value:
    items = tuple(reader.value(e, scope) for e in node.elts)
    keys = [_bare(item) for item in items]
    key = frozenset().union(*keys) if all(i.key is not None or not reader.memory.use(i) for i in items) else None
    deps = frozenset().union(*(reader.memory.use(i) for i in items))
    return Value(deps, items=items, key=key, flags=frozenset(f for i in items for f in i.flags & {"copy"}))


def _choice(reader: Reader, node: ast.IfExp, scope: Scope) -> Value:
    deps = decided(reader.memory.use(reader.value(node.test, scope)))
    return joined([reader.value(node.body, scope), reader.value(node.orelse, scope)]).with_deps(deps)


def _comprehension(reader: Reader, node: Any, scope: Scope) -> Value:
    deps: frozenset[Origin] = NOTHING
    own = frozenset(n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name))
    inner = Scope(reader.fresh(), scope.globals, own, parent=scope)
    for generator in node.generators:
        over = reader.value(generator.iter, inner)
        deps |= reader.memory.use(over)
        reader.store(generator.target, reader.each(over, generator.iter), inner)
        for test in generator.ifs:
            deps |= reader.memory.use(reader.value(test, inner))
    parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    values = [reader.value(part, inner) for part in parts]
    deps = deps.union(*(reader.memory.use(v) for v in values))
    return Value(deps, homes=values[-1].homes, flags=values[-1].flags, element=values[-1])


def _yield(reader: Reader, node: ast.Yield | ast.YieldFrom, scope: Scope) -> Value:
    if node.value is not None:
        value = reader.value(node.value, scope)
        element = reader.each(value, node.value) if isinstance(node, ast.YieldFrom) else value
        scope.results.append(Value(element.deps | reader.memory.control, element=element))
    return Value()


def _call(reader: Reader, node: ast.Call, scope: Scope) -> Value:
    return reader.calls.call(node, scope) if reader.calls is not None else reader.anything(node, scope)


def _walrus(reader: Reader, node: ast.NamedExpr, scope: Scope) -> Value:
    value = reader.value(node.value, scope)
    reader.store(node.target, value, scope)
    return value


def _lambda(reader: Reader, node: ast.Lambda, scope: Scope) -> Value:
    return Value(code=Closure(node, scope))


def _starred(reader: Reader, node: ast.Starred, scope: Scope) -> Value:
    return reader.value(node.value, scope)


def _bare(value: Value) -> frozenset[Origin]:
    return value.key if value.key is not None else NOTHING


def part_of(value: Value, k: int, count: int) -> Value:
    """Item k of what is taken apart into so many."""
    if value.items is not None and len(value.items) == count and -count <= k < count:
        return value.items[k].with_deps(value.deps - value.items[k].deps) if value.deps else value.items[k]
    flags = value.flags & {"trained", "copy", "step"}
    return Value(value.deps, homes=value.homes, flags=flags, key=value.key, title=value.title, element=value.element)


def _item(thing: Any, index: ast.expr) -> Any:
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub) and isinstance(index.operand, ast.Constant):
        key: Any = -index.operand.value  # type: ignore[operator]
    elif isinstance(index, ast.Constant):
        key = index.value
    else:
        return MISSING
    if type(thing).__module__ in ("builtins", "collections") and isinstance(thing, dict | list | tuple):
        try:
            return thing[key] if not isinstance(thing, dict) or key in thing else MISSING
        except (LookupError, TypeError):
            return MISSING
    return MISSING


def _loaded(target: ast.expr) -> ast.expr:
    """The same place, read."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    return ast.Subscript(target.value, target.slice, ast.Load()) if isinstance(target, ast.Subscript) else target


_Handler = Callable[[Reader, Any, Scope], Any]
_STATEMENTS: dict[type, _Handler] = {
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _loop,
    ast.AsyncFor: _loop,
    ast.While: _loop,
    ast.Continue: _leave,
    ast.Break: _leave,
    ast.Return: _return,
    ast.Match: _match,
    ast.Try: _try,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.FunctionDef: _define,
    ast.Delete: _delete,
}
_EXPRESSIONS: dict[type, _Handler] = {
    ast.Name: _name,
    ast.Constant: _constant,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Tuple: _tuple,
    ast.List: _tuple,
    ast.IfExp: _choice,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.DictComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.Yield: _yield,
    ast.YieldFrom: _yield,
    ast.Call: _call,
    ast.NamedExpr: _walrus,
    ast.Lambda: _lambda,
    ast.Starred: _starred,
}
