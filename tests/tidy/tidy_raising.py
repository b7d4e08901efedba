"""What functions say that they raise, and what they do: each call is followed, by name, through all of the package.

Annotations say of which class an object is; a call of a method goes to that class, what it derives from and what
derives from it. What a caller catches does not leave it. What the interpreter or a library raises is taken on trust, so
is what a function raises that was handed in.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tidy_rules import Source

NAMED = re.compile(r"(?<![`\w.])[A-Z][a-z]\w+(?=[ ,.;:)\n]|$)")
WORDS = re.compile(r"[A-Za-z_]\w*")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Names = frozenset[str]
NONE: Names = frozenset()
Bases = Mapping[str, set[str]]


@dataclass(eq=False)
class Body:
    """What a name stands for: a function, a class or a table. gives: classes of what it returns or holds. called:
    bodies, with what is caught around them. trusts: it calls what was handed in."""

    where: str
    name: str
    module: str
    node: ast.AST
    owner: str = ""
    given: ast.expr | None = None
    gives: Names | None = None
    raised: set[str] = field(default_factory=set)
    called: list[tuple[Body, Names]] = field(default_factory=list)
    trusts: bool = False


def untrue_raises(sources: Iterable[Source]) -> Iterator[str]:
    """Names after `Raises:` of our own types that are no exceptions, or that nothing raises which the function runs."""
    package = Package(list(sources))
    raised = package.raised()
    for body in package.bodies:
        for name in _said(body.node):
            if name in package.bases and "Exception" not in package.ancestors(name):
                yield f"{body.where}: {name} after Raises: is no exception"
            elif name in package.bases and not (
                body.trusts or any(name in package.ancestors(one) for one in raised[body])
            ):
                yield f"{body.where}: {body.name} says Raises: {name}, which nothing that it calls raises"


class Package:
    """All bodies of the package, and how they call each other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.bodies: list[Body] = []
        self.bases: dict[str, set[str]] = {}
        self.tops: dict[str, dict[str, Body]] = {}  # by module
        self.members: dict[str, dict[str, list[Body]]] = {}  # by class
        self.heirs: dict[str, set[str]] = {}
        self.imported: dict[str, dict[str, str]] = {}
        self._known: dict[str, Names] = {}
        self._methods: dict[tuple[Names, str], list[Body]] = {}
        self._notes: dict[tuple[str, str], Names] = {}
        for source in sources:
            self._read(source)
        for kind, bases in self.bases.items():
            if "Protocol" in bases:  # those that have its methods need not derive from it
                asked = {name for name, (one, *_) in self.members[kind].items() if isinstance(one.node, Function)}
                self.heirs.setdefault(kind, set()).update(k for k, has in self.members.items() if asked <= has.keys())
        self._attributes = {name for members in self.members.values() for name in members}
        for body in list(self.bodies):
            if not isinstance(body.node, ast.ClassDef):
                Reading(self, body).read()

    def _read(self, source: Source) -> None:
        names = self.imported[source.module] = {}
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom):
                own = source.module.split(".")[: -node.level] if node.level else []
                base = ".".join([*own, *([node.module] if node.module else [])])
                names |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
        self.tops[source.module] = {}
        for node in _statements(source.tree.body):
            for name, body in self._made(source, node, ""):
                self.tops[source.module][name] = body

    def _made(self, source: Source, node: ast.stmt, owner: str) -> Iterator[tuple[str, Body]]:
        made = [node.name] if isinstance(node, Function | ast.ClassDef) else _targets(node)
        for name in made:
            body = Body(f"{source.path}:{node.lineno}", name, source.module, node, owner)
            self.bodies.append(body)
            yield name, body
        if isinstance(node, ast.ClassDef):
            self.bases.setdefault(node.name, set()).update({_last(base) for base in node.bases} - {node.name})
            for base in node.bases:
                self.heirs.setdefault(_last(base), set()).add(node.name)
            members = self.members.setdefault(node.name, {})
            for inner in _statements(node.body):
                for name, found in self._made(source, inner, node.name):
                    members.setdefault(name, []).append(found)
                    if isinstance(inner, Function):
                        body.called.append((found, NONE))
                        for target, part in _set_on_self(inner):
                            held = Body(body.where, target, source.module, part, node.name)
                            members.setdefault(target, []).append(held)
                            held.given = _annotation_of(inner, part)
                            self.bodies.append(held)

    # ---- who raises what

    def raised(self) -> dict[Body, set[str]]:
        """What each body raises, by name."""
        callers: dict[Body, list[tuple[Body, Names]]] = {}
        for body in self.bodies:
            blank = isinstance(body.node, Function) and _is_blank(body.node)
            same = self.methods(frozenset({body.owner}), body.name) if blank else []
            if isinstance(body.node, ast.ClassDef):
                same = [one for name in self.members[body.name] for one in self.methods(frozenset({body.name}), name)]
                same += self.methods(frozenset({body.name}), "__init__")
            for called, masks in (*body.called, *((one, NONE) for one in same)):
                callers.setdefault(called, []).append((body, masks))
        found = {body: set(body.raised) for body in self.bodies}
        left = [body for body in self.bodies if body.raised]
        while left:
            called = left.pop()
            for caller, masks in callers.get(called, ()):
                more = {one for one in found[called] - found[caller] if masks.isdisjoint(self.ancestors(one))}
                if more:
                    found[caller] |= more
                    left.append(caller)
        return found

    def ancestors(self, name: str) -> Names:
        """A class and all that it derives from, by name."""
        if name not in self._known:
            kind = getattr(builtins, name, None)
            own = {c.__name__ for c in kind.__mro__} if name not in self.bases and isinstance(kind, type) else {name}
            self._known[name] = NONE
            self._known[name] = frozenset(own.union(*(self.ancestors(base) for base in self.bases.get(name, ()))))
        return self._known[name]

    def is_fault(self, name: str) -> bool:
        return name in self.bases and "BaseException" in self.ancestors(name)

    # ---- what names stand for

    def named(self, module: str, name: str) -> Body | None:
        """What a name stands for in a module, its own or imported; None for what is not ours."""
        for _ in range(5):
            if name in self.tops.get(module, {}):
                return self.tops[module][name]
            module, _, name = self.imported.get(module, {}).get(name, "").rpartition(".")
        return None

    def methods(self, kinds: Names, name: str) -> list[Body]:
        """What attributes of this name stand for, in these classes, what they derive from and what derives from
        them."""
        if not kinds or name not in self._attributes:
            return []
        if (kinds, name) not in self._methods:
            self._methods[kinds, name] = self._find(kinds, name)
        return self._methods[kinds, name]

    def _find(self, kinds: Names, name: str) -> list[Body]:
        found, left, seen = list[Body](), [(kind, True) for kind in kinds], set[str]()
        while left:
            kind, up = left.pop()
            if kind not in seen:
                seen.add(kind)
                own = self.members.get(kind, {}).get(name, [])
                found += own
                left += [(heir, False) for heir in self.heirs.get(kind, ())]
                left += [(base, True) for base in self.bases.get(kind, ()) if up and not own and base in self.members]
        return found

    def classes(self, words: Iterable[str], module: str, depth: int = 0) -> Names:
        """Our classes in an annotation, also by way of aliases; "Callable" among them."""
        found = set[str]()
        for word in words:
            body = self.named(module, word)
            if word == "Callable" or word in self.members:
                found.add(word)
            elif body is not None and depth < 4 and isinstance(body.node, ast.Assign | ast.AnnAssign):
                value = body.node.value
                if value is not None:
                    found |= self.classes(WORDS.findall(ast.unparse(value)), body.module, depth + 1)
        return frozenset(found)

    def noted(self, note: ast.expr | None, body: Body) -> Names:
        """Our classes in an annotation."""
        if note is None:
            return NONE
        key = ast.unparse(note).replace("Self", body.owner or "Self"), body.module
        if key not in self._notes:
            self._notes[key] = self.classes(WORDS.findall(key[0]), body.module)
        return self._notes[key]

    def gives(self, body: Body) -> Names:
        """Classes of what a function returns, or what a name holds."""
        node = body.node
        if isinstance(node, ast.ClassDef):
            return frozenset({node.name})
        if body.gives is None:
            body.gives = NONE  # while it is looked for
            note = node.returns if isinstance(node, Function) else getattr(node, "annotation", body.given)
            if note is not None:
                body.gives = self.noted(note, body)
            elif isinstance(node, ast.Assign):
                body.gives = Reading(self, body).kinds(node.value)
        return body.gives


class Reading(ast.NodeVisitor):
    """Reads the inside of one body."""

    def __init__(self, package: Package, body: Body) -> None:
        self._package, self._body = package, body
        self._masks = NONE
        self._held: dict[str, Names] = {}
        self._seen: dict[ast.expr, Names] = {}
        if body.owner:
            self._held |= dict.fromkeys(("self", "cls"), frozenset({body.owner}))

    def read(self) -> None:
        node = self._body.node
        if isinstance(node, Function):
            self.visit_FunctionDef(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            self.visit(node.value)

    # ---- of which class something is

    def kinds(self, node: ast.expr | None) -> Names:
        """Our classes of which a value is, or of which it is made."""
        if node is None:
            return NONE
        if node not in self._seen:
            self._seen[node] = self._kinds(node)
        return self._seen[node]

    def _kinds(self, node: ast.expr) -> Names:
        match node:
            case ast.Name():
                if node.id in self._held:
                    return self._held[node.id]
                found = self._package.named(self._body.module, node.id)
                return NONE if found is None else self._package.gives(found)
            case ast.Attribute():
                owners = self.kinds(node.value)
                bodies = self._found(node)
                return frozenset().union(*map(self._package.gives, bodies)) if bodies else owners
            case ast.Call():
                known = self._called(node.func)
                if known:
                    return frozenset().union(*map(self._package.gives, known))
                return frozenset().union(self.kinds(node.func), *map(self.kinds, node.args))
            case ast.Constant() | ast.JoinedStr() | ast.Lambda() | ast.Compare():
                return NONE
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                self._loops(node.generators)
                return self.kinds(node.elt)
            case ast.DictComp():
                self._loops(node.generators)
                return self.kinds(node.value)
            case ast.Subscript() | ast.Starred() | ast.Await() | ast.NamedExpr():
                return self.kinds(node.value)
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        return frozenset().union(*map(self.kinds, parts))

    def _found(self, node: ast.Attribute) -> list[Body]:
        """What an attribute stands for."""
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id not in self._held:
            target = self._package.imported[self._body.module].get(owner.id, "")
            if target in self._package.tops:
                found = self._package.named(target, node.attr)
                return [found] if found is not None else []
        if isinstance(owner, ast.Call) and _last(owner.func) == "super":
            return self._package.methods(frozenset(self._package.bases.get(self._body.owner, ())), node.attr)
        return self._package.methods(self.kinds(owner), node.attr)

    def _called(self, func: ast.expr) -> list[Body]:
        if isinstance(func, ast.Attribute):
            return self._found(func)
        if isinstance(func, ast.Name) and func.id not in self._held:
            found = self._package.named(self._body.module, func.id)
            return [] if found is None else [found]
        return []

    def _hold(self, target: ast.expr, kinds: Names) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self._held[node.id] = self._held.get(node.id, NONE) | kinds

    def _loops(self, loops: Iterable[ast.comprehension]) -> None:
        for loop in loops:
            self._hold(loop.target, self.kinds(loop.iter))

    # ---- what it calls

    def _note(self, found: Iterable[Body]) -> None:
        for body in found:
            if not isinstance(body.node, ast.ClassDef):
                self._body.called.append((body, self._masks))
                continue
            if self._package.is_fault(body.name):
                self._body.raised.add(body.name)
            kind = frozenset({body.name})
            for name in ("__init__", "__post_init__", "__new__"):
                self._body.called += [(one, self._masks) for one in self._package.methods(kind, name)]

    def visit_FunctionDef(self, node: Function) -> None:
        for one in _arguments(node):
            self._held.setdefault(one.arg, self._package.noted(one.annotation, self._body))
        for part in (*node.args.defaults, *node.decorator_list, *node.body):
            self.visit(part)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for one in _arguments(node):
            self._held.setdefault(one.arg, NONE)
        self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self._hold(one, self.kinds(value))
            else:
                self._hold(target, self.kinds(node.value))
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._hold(node.target, self._package.noted(node.annotation, self._body))
        if node.value is not None:
            self.visit(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._hold(node.target, self.kinds(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._hold(node.target, self.kinds(node.iter))
        self._note(self._package.methods(self.kinds(node.iter), "__iter__"))
        for part in (*node.body, *node.orelse):
            self.visit(part)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._loops([node])
        for part in (node.iter, *node.ifs):
            self.visit(part)

    def visit_GeneratorExp(self, node: ast.expr) -> None:
        for loop in node.generators:  # type: ignore[attr-defined]
            self.visit(loop)
        for part in (getattr(node, name, None) for name in ("elt", "key", "value")):
            if part is not None:
                self.visit(part)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp

    def visit_Try(self, node: ast.Try) -> None:
        caught = {name for handler in node.handlers if not _raises_again(handler) for name in _caught(handler)}
        for part in node.body:
            self._under(caught, part)
        for part in (*node.orelse, *node.finalbody, *(part for handler in node.handlers for part in handler.body)):
            self.visit(part)

    def visit_With(self, node: ast.With) -> None:
        caught = set[str]()
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _last(call.func) == "suppress":
                caught |= {_last(arg) for arg in call.args}
            else:
                self.visit(call)
                self._note(self._package.methods(self.kinds(call), "__enter__"))
                self._note(self._package.methods(self.kinds(call), "__exit__"))
            if item.optional_vars is not None:
                self._hold(item.optional_vars, self.kinds(call))
        for part in node.body:
            self._under(caught, part)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            for pattern in ast.walk(case.pattern):
                if isinstance(pattern, ast.MatchAs | ast.MatchStar) and pattern.name:
                    kinds = [_last(p.cls) for p in ast.walk(case.pattern) if isinstance(p, ast.MatchClass)]
                    self._held[pattern.name] = self._package.classes(kinds, self._body.module) or self.kinds(
                        node.subject
                    )
            for part in (*([case.guard] if case.guard else []), *case.body):
                self.visit(part)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            self.visit(node.args[0])
            return
        known = self._called(node.func)
        held = [body for body in known if not isinstance(body.node, Function | ast.ClassDef)]
        handed_in = (
            "Callable" in self.kinds(node.func)
            if not known
            else any("Callable" in self._package.gives(body) for body in held)
        )
        self._body.trusts |= handed_in
        for kind in frozenset().union(*map(self._package.gives, held)) if held else NONE:
            self._note(self._package.methods(frozenset({kind}), "__call__"))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._note(self._called(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self._note(self._found(node))
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.value, ast.Name) or node.value.id in self._held:
            self._note(self._package.methods(self.kinds(node.value), "__getitem__"))
        self.generic_visit(node)

    def _under(self, caught: set[str], part: ast.AST) -> None:
        before, self._masks = self._masks, self._masks | caught
        self.visit(part)
        self._masks = before


def _statements(nodes: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under conditions, too."""
    for node in nodes:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _targets(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _set_on_self(function: Function) -> Iterator[tuple[str, ast.stmt]]:
    """Attributes that a method sets, each with a statement that sets it alone, from something else than a variable."""
    local = {one.id: value for one, value, _ in _sets(function) if isinstance(one, ast.Name)}
    for one, value, node in _sets(function):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
            value = local.get(value.id, value) if isinstance(value, ast.Name) else value
            yield one.attr, node if isinstance(node, ast.AnnAssign) else ast.Assign([one], value, lineno=node.lineno)


def _sets(function: Function) -> Iterator[tuple[ast.expr, ast.expr, ast.Assign | ast.AnnAssign]]:
    """Targets of assignments, with their values."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                each = (
                    node.value.elts
                    if isinstance(node.value, ast.Tuple) and len(parts) > 1
                    else [node.value] * len(parts)
                )
                yield from ((one, value, node) for one, value in zip(parts, each, strict=False))


def _annotation_of(function: Function, part: ast.stmt) -> ast.expr | None:
    """Of what is set on an object from an argument."""
    value = part.value if isinstance(part, ast.Assign) else None
    given = {one.arg: one.annotation for one in _arguments(function)}
    return given.get(value.id) if isinstance(value, ast.Name) else None


def _arguments(node: Function | ast.Lambda) -> list[ast.arg]:
    args = node.args
    more = [one for one in (args.vararg, args.kwarg) if one is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *more]


def _said(node: ast.AST) -> list[str]:
    text = (ast.get_docstring(node) or "") if isinstance(node, ast.ClassDef | Function) else ""
    return NAMED.findall(text.partition("Raises:")[2].partition("\n\n")[0])


def _is_blank(node: Function) -> bool:
    """Whether a function only says what others of its name do."""
    return all(
        isinstance(part, ast.Pass) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in node.body
    )


def _caught(handler: ast.ExceptHandler) -> list[str]:
    if handler.type is None:
        return ["BaseException"]
    return [_last(one) for one in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])]


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether what it catches may go on: it is raised again, kept or handed on."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise) and (node.exc is None or (handler.name and _last(node.exc) == handler.name)):
            return True
        kept = list[ast.expr | None]()
        if isinstance(node, ast.Assign | ast.Return):
            kept = [node.value]
        elif isinstance(node, ast.Call) and _last(node.func) not in ("str", "repr", "type", "one_line"):
            kept = [*node.args]
        if handler.name and any(part is not None and _last(part) == handler.name for part in kept):
            return True
    return False


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
