"""Meaning of statements and expressions, by kind, in the code of a round that is read.

Apart from `flow_reader`, which reads functions and knows names, because this is a table.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.script.flow_items import MISSING, namespace_of, rounds_of
from everstep.script.flow_memory import CHOSEN, NOTHING, SCALARS, Origin, Value, decided, entry_of, joined, keep_content
from everstep.script.flow_reader import Closure, Reader, Scope, bare, item_of, part_of
from everstep.script.flow_words import FORMS, OPERATORS, SHAPES

_AGAIN = 2
_MOST_CHOICES = 32


def _assign(reader: Reader, node: ast.Assign, scope: Scope) -> None:
    value = reader.value(node.value, scope)
    for target in node.targets:
        _replace_given(reader, target, value, scope)
        reader.store(target, value, scope)
        if isinstance(target, ast.Attribute) and _is_same(node.value, target):
            keep_content(reader.memory, reader.value(target.value, scope), target.attr)
        reader.same(node.value, target, scope)


def _is_same(node: ast.expr, target: ast.expr) -> bool:
    """Whether this is the target itself, moved or in another form: `x.mask.to(device)`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FORMS:
        node = node.func.value
    return ast.unparse(node) == ast.unparse(target)


def _replace_given(reader: Reader, target: ast.expr, value: Value, scope: Scope) -> None:
    """Note names of what `join` has read that stand for something else from then on."""
    memory, found = reader.memory, []
    if isinstance(target, ast.Tuple | ast.List):
        for k, inner in enumerate(target.elts):
            _replace_given(reader, inner, part_of(value, k, len(target.elts)), scope)
    elif isinstance(target, ast.Name):
        place, thing = scope.place(target.id)
        if place not in memory.values or memory.values[place].key == frozenset((place,)):  # not yet something else
            found = [(place, thing)]
    elif isinstance(target, ast.Attribute):
        base = reader.value(target.value, scope)
        found = [memory.attribute(thing, target.attr) for thing in base.objects]
    for place, thing in found:
        if "given" in memory.judge.flags(thing) and not any(one is thing for one in value.objects):
            memory.sinks.add(("given", place))


def _annotated(reader: Reader, node: ast.AnnAssign, scope: Scope) -> None:
    if node.value is not None:
        reader.store(node.target, reader.value(node.value, scope), scope)


def _augmented(reader: Reader, node: ast.AugAssign, scope: Scope) -> None:
    read = ast.copy_location(_loaded(node.target), node.target)
    old, added = reader.value(read, scope), reader.value(node.value, scope)
    deps = reader.memory.use(old) | reader.memory.use(added)
    deps |= reader.operate(old, (f"__i{n.strip('_')}__" for n in OPERATORS.get(type(node.op).__name__, ())[:1]), added)
    deps |= reader.operate(old, OPERATORS.get(type(node.op).__name__, ())[:1], added)
    in_place = any(not isinstance(thing, SCALARS) for thing in old.objects) or "trained" in old.flags
    if in_place:
        reader.memory.mutate(old, added)
    kept = old if in_place else Value()
    reader.store(node.target, replace(kept, deps=frozenset(deps), key=None), scope)


def _if(reader: Reader, node: ast.If, scope: Scope) -> None:
    deps = reader.truth(node.test, scope)
    with reader.memory.under(deps):
        reader.memory.branches((lambda: reader.block(node.body, scope), lambda: reader.block(node.orelse, scope)))


def _leave(reader: Reader, node: ast.Continue | ast.Break, scope: Scope) -> None:
    scope.leave(reader.memory.control, reader.memory.point())
    if scope.is_round and isinstance(node, ast.Break):
        reader.memory.sink(NOTHING)


def _return(reader: Reader, node: ast.Return, scope: Scope) -> None:
    value = reader.value(node.value, scope) if node.value is not None else Value()
    scope.results.append(value.with_deps(reader.memory.control))
    scope.gone.update(reader.memory.control)
    scope.exits.append(reader.memory.point())
    if scope.lasting:
        reader.memory.sink(NOTHING)


def _loop(reader: Reader, node: ast.For | ast.While, scope: Scope) -> None:
    memory = reader.memory
    over = reader.value(node.iter, scope) if isinstance(node, ast.For) else None
    trains = over is not None and bool(over.flags & {"run", "step"})
    if rounds := rounds_of(node):
        for body in rounds:
            reader.block(body, scope)
        reader.block(node.orelse, scope)
        return
    left: list[frozenset[Origin]] = []

    def once() -> None:
        if over is not None and isinstance(node, ast.For):
            deps = NOTHING if trains else memory.use(over)
            reader.store(node.target, reader.each(over, node.iter), scope)
        else:
            deps = reader.truth(node.test, scope) if isinstance(node, ast.While) else NOTHING
        inner = replace(scope, left=NOTHING, skips=[], is_round=False)
        with memory.under(deps | scope.left), memory.reading(each="batch" if trains else ""):
            reader.block(node.body, inner)
        memory.meet([memory.point(), *inner.skips])
        left.append(inner.left)
        if trains:
            memory.sink(inner.left)

    for _ in range(_AGAIN):
        memory.branches((once, lambda: None))
    if trains and reader.calls is not None:
        reader.calls.updated()
    with memory.under(NOTHING.union(*left)):
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
        cases = [lambda c=c: reader.block(c.body, scope) for c in node.cases]
        reader.memory.branches(cases if _takes_all(node.cases[-1]) else [*cases, lambda: None])


def _takes_all(case: ast.match_case) -> bool:
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and case.guard is None


def _try(reader: Reader, node: ast.Try, scope: Scope) -> None:
    memory = reader.memory
    before = memory.point()
    with memory.attempt() as attempt:
        reader.block(node.body, scope)

    def handle(handler: ast.ExceptHandler) -> None:
        memory.meet([before, memory.point()])  # any part of the body may have been done
        reader.block(handler.body, scope)

    with memory.under(attempt.raised | attempt.surprised):
        handlers = [lambda h=h: handle(h) for h in node.handlers]
        memory.branches([*handlers, lambda: reader.block(node.orelse, scope)])
    if not node.handlers:
        memory.may_raise(attempt.raised, surely=True)
    reader.block(node.finalbody, scope)


def _raise(reader: Reader, node: ast.Raise, scope: Scope) -> None:
    for part in (node.exc, node.cause):
        if part is not None:
            reader.value(part, scope)
    reader.memory.may_raise(surely=True)


def _assert(reader: Reader, node: ast.Assert, scope: Scope) -> None:
    reader.memory.may_raise(reader.truth(node.test, scope), surely=True)


def _with(reader: Reader, node: ast.With, scope: Scope) -> None:
    calls, entered, before = reader.calls, [], reader.memory.point()
    for item in node.items:
        value = reader.value(item.context_expr, scope)
        own = calls.operate(value, "__enter__", ()) if calls is not None else None
        entered.append(value)
        if item.optional_vars is not None:
            given = own or value.element or value  # a function that `contextmanager` has made yields it
            reader.store(item.optional_vars, given.with_deps(reader.memory.use(value)) if own else given, scope)
    reader.block(node.body, scope)
    if any(value.title == "suppress" for value in entered):
        reader.memory.meet([before, reader.memory.point()])
    for value in reversed(entered):
        if calls is not None:
            calls.operate(value, "__exit__", [Value(), Value(), Value()])


def _define(reader: Reader, node: ast.FunctionDef, scope: Scope) -> None:
    reader.store(ast.Name(node.name, ast.Store()), Value(codes=(Closure(node, scope),)), scope, defines=True)


def _delete(reader: Reader, node: ast.Delete, scope: Scope) -> None:
    for target in node.targets:
        if isinstance(target, ast.Subscript):
            _lose_entry(reader, target.value, target.slice, scope)


def _alone(reader: Reader, node: ast.Expr, scope: Scope) -> None:
    match node.value:
        case ast.Call(ast.Attribute(container, "pop"), [key, *_]):
            if (found := reader.value(container, scope).objects) and all(isinstance(one, dict) for one in found):
                return _lose_entry(reader, container, key, scope)
    reader.value(node.value, scope)


def _lose_entry(reader: Reader, container: ast.expr, key: ast.expr, scope: Scope) -> None:
    """Nothing gets the entry. If it depends on its key alone, it is made again, and a cache may be bounded so."""
    memory, base = reader.memory, reader.value(container, scope)
    is_first = ast.unparse(key) == f"next(iter({ast.unparse(container)}))"  # looking for it changes nothing
    memory.may_raise(memory.use(base))
    memory.mutate(base, Value() if is_first else reader.value(key, scope), forgets=True, whole=False)
    memory.items.bounded.update(id(thing) for thing in base.objects)


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
    """A property of a batch that does not depend on its numbers: equal in every step, if told apart by its value."""
    found = reader.attribute_of(base, node.attr) if isinstance(node, ast.Attribute) else base
    if base.objects:
        return found
    deps = NOTHING if getattr(node, "attr", "") == "device" else reader.memory.use(found)
    key = frozenset((("arg", "shape", id(node)),))
    return Value(key | {d for d in deps if not reader.memory.is_plain(d)}, key=key, title=found.title)


def _subscript(reader: Reader, node: ast.Subscript, scope: Scope) -> Value:
    base, index = reader.value(node.value, scope), reader.value(node.slice, scope)
    memory = reader.memory
    if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        spaces = [space for thing in base.objects if (space := namespace_of(thing)) is not None]
        if spaces:
            named = ast.copy_location(ast.Name(node.slice.value, ast.Load()), node)
            return joined([_name(reader, named, Scope(None, space)) for space in spaces])
    if any(thing is sys.modules for thing in base.objects):
        found = [sys.modules.get(key) for key in index.objects if isinstance(key, str)]
        return joined([memory.live(module, module.__name__) for module in found if module is not None] or [Value()])
    title = f"{base.title}[{ast.unparse(node.slice)}]"
    if (item := item_of(base, node.slice)) in memory.values:
        set_here = memory.values[item]
        return replace(set_here, homes=set_here.homes | {item}, title=title).with_deps(base.deps)
    deps = entry_of(memory, base, bare(index)) | memory.use(index)
    if base.key and isinstance(node.slice, ast.Constant) and all(d[:2] == ("arg", "shape") for d in base.key):
        return _shape(reader, base, node)
    if base.items is not None and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
        return part_of(base, node.slice.value, len(base.items))
    own = reader.operate(base, ("__getitem__",), index)
    if isinstance(node.ctx, ast.Load):
        memory.may_raise(deps | own)
    if not isinstance(node.slice, ast.Constant):
        chosen = [memory.live(one, title) for thing in base.objects for one in _callables(thing)]
        chosen += [item for item in base.items or () if item.codes or any(map(callable, item.objects))]
        chosen += [base.element] if base.element is not None and base.element.codes else []
        if chosen:
            one = joined(chosen).with_deps(deps)
            return replace(one, flags=one.flags | CHOSEN)
    deps |= own
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
    keys = [bare(item) for item in items]
    key = frozenset().union(*keys) if all(i.key is not None or not reader.memory.use(i) for i in items) else None
    deps = frozenset().union(*(reader.memory.use(i) for i in items))
    return Value(deps, items=items, key=key, flags=frozenset(f for i in items for f in i.flags & {"copy"}))


def _choice(reader: Reader, node: ast.IfExp, scope: Scope) -> Value:
    deps = decided(reader.truth(node.test, scope))
    found: list[Value] = []
    acts = [lambda part=part: found.append(reader.value(part, scope)) for part in (node.body, node.orelse)]
    with reader.memory.under(deps):
        reader.memory.branches(acts)  # type: ignore[arg-type]
    return joined(found).with_deps(deps)


def _both(reader: Reader, node: ast.BoolOp, scope: Scope) -> Value:
    """Read `and` and `or`: later operands are read under the condition of the earlier ones."""
    deps = reader.truth(node.values[0], scope)
    flags = frozenset[str]()
    for part in node.values[1:]:
        found: list[Value] = []
        with reader.memory.under(deps):
            reader.memory.branches((lambda p=part, f=found: f.append(reader.value(p, scope)), lambda: None))  # type: ignore[misc]
        value = found[0]
        deps |= reader.memory.use(value) | reader.operate(value, ("__bool__", "__len__"))
        flags |= value.flags & {"copy"}
    return Value(deps, flags=flags)


def _operation(reader: Reader, node: Any, scope: Scope) -> Value:
    """Read operators; the user's own are read as functions."""
    parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else None
    parts = parts or ([node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right])
    values = [reader.value(part, scope) for part in parts]
    ops = node.ops if isinstance(node, ast.Compare) else [node.op]
    names = [name for op in ops for name in OPERATORS.get(type(op).__name__, ())]
    deps: frozenset[Origin] = NOTHING
    for k, value in enumerate(values):
        asked = k > 0 and isinstance(ops[k - 1], ast.In | ast.NotIn)
        deps |= entry_of(reader.memory, value, bare(values[k - 1])) if asked else reader.memory.use(value)
        deps |= reader.operate(value, names, *values[:k], *values[k + 1 :])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and isinstance(node.right, ast.Dict):
        return Value(deps, flags=_copies(reader, values[:1], values[1:]))
    return Value(deps, flags=frozenset(f for v in values for f in v.flags & {"copy"}))


def _dictionary(reader: Reader, node: ast.Dict, scope: Scope) -> Value:
    keys = [reader.value(key, scope) for key in node.keys if key is not None]
    values = [reader.value(value, scope) for value in node.values]
    deps = NOTHING.union(*(reader.memory.use(v) for v in (*keys, *values)))
    spread = [value for key, value in zip(node.keys, values, strict=True) if key is None]
    own = [value for key, value in zip(node.keys, values, strict=True) if key is not None]
    return Value(deps, flags=_copies(reader, spread, own), element=joined(values) if values else None)


def _copies(reader: Reader, spread: Sequence[Value], own: Sequence[Value]) -> frozenset[str]:
    """Whether a dict has copies of trained values. own: entries of its own beside the dicts that are spread into it: an
    entry that does not depend on those is made in each round, and carries nothing."""
    before = NOTHING.union(*(reader.memory.use(value) for value in spread))
    kept = [value for value in own if not spread or before & reader.memory.use(value)]
    return frozenset(f for value in (*spread, *kept) for f in value.flags & {"copy"})


def _comprehension(reader: Reader, node: Any, scope: Scope) -> Value:
    deps: frozenset[Origin] = NOTHING
    own = frozenset(n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name))
    inner = Scope(reader.fresh(), scope.globals, own, parent=scope)
    for generator in node.generators:
        over = reader.value(generator.iter, inner)
        deps |= reader.memory.use(over)
        reader.store(generator.target, reader.each(over, generator.iter), inner)
        for test in generator.ifs:
            deps |= reader.truth(test, inner)
    parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    values: list[Value] = []
    with reader.memory.under(deps):
        reader.memory.branches((lambda: values.extend(reader.value(part, inner) for part in parts), lambda: None))
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
    return Value(codes=(Closure(node, scope),))


def _starred(reader: Reader, node: ast.Starred, scope: Scope) -> Value:
    return reader.value(node.value, scope)


def _callables(thing: Any) -> list[Any]:
    """Callables in a container: one of them is chosen."""
    if type(thing).__module__ not in ("builtins", "collections") or not isinstance(thing, dict | list | tuple):
        return []
    inner = list(thing.values() if isinstance(thing, dict) else thing)[:_MOST_CHOICES]
    return [one for one in inner if callable(one)]


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
    """The target as an expression that is read."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    return ast.Subscript(target.value, target.slice, ast.Load()) if isinstance(target, ast.Subscript) else target


_STATEMENTS: dict[type, Callable[[Reader, Any, Scope], Any]] = {
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
    ast.Raise: _raise,
    ast.Assert: _assert,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.FunctionDef: _define,
    ast.Delete: _delete,
    ast.Expr: _alone,
}
_EXPRESSIONS: dict[type, Callable[[Reader, Any, Scope], Any]] = {
    ast.Name: _name,
    ast.Constant: _constant,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Tuple: _tuple,
    ast.List: _tuple,
    ast.IfExp: _choice,
    ast.BoolOp: _both,
    ast.BinOp: _operation,
    ast.UnaryOp: _operation,
    ast.Compare: _operation,
    ast.Dict: _dictionary,
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
SYNTAX: Mapping[type, Callable[[Reader, Any, Scope], Any]] = {**_STATEMENTS, **_EXPRESSIONS}
