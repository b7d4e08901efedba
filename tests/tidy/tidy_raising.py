"""What functions say that they raise, and what they do: each call is followed, by name, through all of the package.

A call of an own method or of an imported name is one certain function; a call of another object's method may be of
every class that has one of that name. What a caller catches does not leave it. What the interpreter or a library raises
is taken on trust, and so is what a function raises that was handed in.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tidy_rules import PACKAGE, Source

NAMED = re.compile(r"(?<![`\w.])[A-Z][a-z]\w+(?=[ ,.;:)\n]|$)")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Masks = frozenset[str]
Bases = Mapping[str, set[str]]


@dataclass(eq=False)
class Body:
    """What a name stands for: a function, a class or a table. called: bodies, with what is caught around them. asked:
    names of methods of other objects. trusts: it calls what was handed in."""

    where: str
    name: str
    said: list[str]
    blank: bool = False
    raised: set[str] = field(default_factory=set)
    called: list[tuple[Body, Masks]] = field(default_factory=list)
    asked: list[tuple[str, Masks]] = field(default_factory=list)
    trusts: bool = False


@dataclass(eq=False)
class Kind:
    """A class: its bases by name, and its methods."""

    name: str
    bases: list[str]
    body: Body
    methods: dict[str, Body] = field(default_factory=dict)


def untrue_raises(sources: Iterable[Source]) -> Iterator[str]:
    """Names after `Raises:` of our own types that are no exceptions, or that nothing raises which the function runs."""
    package = Package(list(sources))
    package.follow()
    bases, raised = package.bases, package.raised()
    for body in package.bodies:
        for name in body.said:
            if name in bases and "Exception" not in ancestors(name, bases):
                yield f"{body.where}: {name} after Raises: is no exception"
            elif name in bases and not body.trusts and not any(name in ancestors(one, bases) for one in raised[body]):
                yield f"{body.where}: {body.name} says Raises: {name}, which nothing that it calls raises"


def ancestors(name: str, bases: Bases) -> set[str]:
    """A class and all that it derives from, by name; "Exception" for any of the interpreter's own."""
    if name not in bases:
        kind = getattr(builtins, name, None)
        return {c.__name__ for c in kind.__mro__} if isinstance(kind, type) else {name}
    return {name}.union(*(ancestors(base, bases) for base in bases[name]))


class Package:
    """All bodies of the package, and how they call each other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.bodies: list[Body] = []
        self.bases: dict[str, set[str]] = {}
        self.tops: dict[str, dict[str, Body]] = {}  # by module
        self.kinds: dict[str, list[Kind]] = {}  # by name
        self.heirs: dict[str, list[Kind]] = {}
        self.methods: dict[str, list[Body]] = {}
        self.imported: dict[str, dict[str, str]] = {}
        self._left: list[tuple[Body, str, Kind | None, ast.AST]] = []
        for source in sources:
            self._read(source)

    # ---- what there is

    def _read(self, source: Source) -> None:
        tops = self.tops.setdefault(source.module, {})
        names = self.imported[source.module] = {}
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom):
                own = source.module.split(".")[: -node.level] if node.level else []
                base = ".".join([*own, *([node.module] if node.module else [])])
                names |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0] for a in node.names}
        for node in _statements(source.tree.body):
            for name, body in self._made(source, node, None):
                tops[name] = body

    def _made(self, source: Source, node: ast.stmt, kind: Kind | None) -> Iterator[tuple[str, Body]]:
        where = f"{source.path}:{node.lineno}"
        if isinstance(node, ast.ClassDef):
            made = Kind(node.name, [_last(base) for base in node.bases], Body(where, node.name, _said(node)))
            self.bodies.append(made.body)
            self.kinds.setdefault(node.name, []).append(made)
            self.bases.setdefault(node.name, set()).update({*made.bases} - {node.name})
            for base in made.bases:
                self.heirs.setdefault(base, []).append(made)
            for inner in _statements(node.body):
                for name, body in self._made(source, inner, made):
                    made.methods[name] = body
                    self.methods.setdefault(name, []).append(body)
                    made.body.called.append((body, frozenset()))
            yield node.name, made.body
        elif isinstance(node, Function):
            body = Body(where, node.name, _said(node), _is_blank(node))
            self.bodies.append(body)
            self._left.append((body, source.module, kind, node))
            yield node.name, body
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    body = Body(where, target.id, [])
                    self.bodies.append(body)
                    self._left.append((body, source.module, kind, node.value))
                    yield target.id, body

    # ---- who calls whom

    def follow(self) -> None:
        """Read the insides of all bodies."""
        for body, module, kind, node in self._left:
            Reading(self, body, module, kind, node).read()

    def raised(self) -> dict[Body, set[str]]:
        """What each body raises, by name."""
        calls: dict[Body, list[tuple[Body, Masks]]] = {}
        callers: dict[Body, list[tuple[Body, Masks]]] = {}
        for body in self.bodies:
            asked = [(found, masks) for name, masks in body.asked for found in self.methods.get(name, ())]
            same = [(found, frozenset[str]()) for found in self.methods.get(body.name, ()) if body.blank]
            calls[body] = [*body.called, *asked, *same]
            for called, masks in calls[body]:
                callers.setdefault(called, []).append((body, masks))
        found = {body: set(body.raised) for body in self.bodies}
        left = [body for body in self.bodies if body.raised]
        while left:
            called = left.pop()
            for caller, masks in callers.get(called, ()):
                more = {one for one in found[called] - found[caller] if masks.isdisjoint(ancestors(one, self.bases))}
                if more:
                    found[caller] |= more
                    left.append(caller)
        return found

    def named(self, module: str, name: str) -> Body | None:
        """What a name stands for in a module, its own or imported; None for what is not ours."""
        for _ in range(5):
            if name in self.tops.get(module, {}):
                return self.tops[module][name]
            target = self.imported.get(module, {}).get(name, "")
            module, _, name = target.rpartition(".")
        return None

    def methods_of(self, kind: Kind, name: str) -> list[Body]:
        """An own method by name: of the class, or of what it derives from; and of all that derive from it."""
        found, seen = [], set[str]()
        up, down = [kind], list(self.heirs.get(kind.name, ()))
        for way, further in ((up, lambda k: [h for b in k.bases for h in self.kinds.get(b, ())]), (down, lambda k: self.heirs.get(k.name, []))):
            while way:
                one = way.pop(0)
                if name in one.methods:
                    found.append(one.methods[name])
                if one.name not in seen:
                    seen.add(one.name)
                    way += further(one)
        return found

    def is_fault(self, name: str) -> bool:
        return name in self.bases and "BaseException" in ancestors(name, self.bases)


class Reading(ast.NodeVisitor):
    """Reads the inside of one body."""

    def __init__(self, package: Package, body: Body, module: str, kind: Kind | None, node: ast.AST) -> None:
        self._package, self._body, self._module, self._kind, self._node = package, body, module, kind, node
        self._masks: Masks = frozenset()
        given = [n for n in ast.walk(node) if isinstance(n, ast.arg)]
        self._given = {one.arg for one in given}
        self._own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}

    def read(self) -> None:
        if isinstance(self._node, Function):
            for part in (*self._node.body, *self._node.args.defaults, *self._node.decorator_list):
                self.visit(part)
        else:
            self.visit(self._node)

    def visit_Try(self, node: ast.Try) -> None:
        caught = {name for handler in node.handlers if not _raises_again(handler) for name in _caught(handler)}
        for part in node.body:
            self._under(caught, part)
        for part in (*node.orelse, *node.finalbody):
            self.visit(part)
        for handler in node.handlers:
            for part in handler.body:
                self.visit(part)

    def visit_With(self, node: ast.With) -> None:
        caught = set[str]()
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _last(call.func) == "suppress":
                caught |= {_last(arg) for arg in call.args}
            else:
                self.visit(call)
        for part in node.body:
            self._under(caught, part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            self.visit(node.args[0])
            return
        if isinstance(node.func, ast.Attribute):
            self._method(node.func, call=True)
        elif isinstance(node.func, ast.Name):
            self._name(node.func.id, call=True)
        else:
            self._body.trusts |= not isinstance(node.func, ast.Lambda)
            self.visit(node.func)
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._name(node.id, call=False)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._method(node, call=False)

    def visit_match_case(self, node: ast.match_case) -> None:
        for part in (*([node.guard] if node.guard else []), *node.body):
            self.visit(part)

    def _under(self, caught: set[str], part: ast.AST) -> None:
        before, self._masks = self._masks, self._masks | caught
        self.visit(part)
        self._masks = before

    def _name(self, name: str, *, call: bool) -> None:
        found = self._package.named(self._module, name)
        if found is not None and name not in self._given:
            if self._package.is_fault(name):
                self._body.raised.add(name)
            self._body.called.append((found, self._masks))
        elif call and (name in self._given or name in self._own):
            self._body.trusts = True

    def _method(self, node: ast.Attribute, *, call: bool) -> None:
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls") and self._kind is not None:
            found = self._package.methods_of(self._kind, node.attr)
            self._body.called += [(one, self._masks) for one in found]
            self._body.trusts |= call and not found
            return
        if isinstance(owner, ast.Name) and owner.id not in self._given:
            target = self._package.imported[self._module].get(owner.id, "")
            if target in self._package.tops:
                found_there = self._package.named(target, node.attr)
                if found_there is not None:
                    if self._package.is_fault(node.attr):
                        self._body.raised.add(node.attr)
                    self._body.called.append((found_there, self._masks))
                return
            if target and not target.startswith(PACKAGE):
                return
        self._body.asked.append((node.attr, self._masks))
        self.visit(owner)


def _statements(nodes: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under conditions, too."""
    for node in nodes:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _said(node: ast.ClassDef | Function) -> list[str]:
    text = (ast.get_docstring(node) or "").partition("Raises:")[2].partition("\n\n")[0]
    return NAMED.findall(text)


def _is_blank(node: Function) -> bool:
    """Whether a function only says what others of its name do."""
    return all(isinstance(part, ast.Pass) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)) for part in node.body)


def _caught(handler: ast.ExceptHandler) -> list[str]:
    if handler.type is None:
        return ["BaseException"]
    return [_last(one) for one in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])]


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether what it catches may go on: it is raised again, kept or handed on."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise) and (node.exc is None or _last(node.exc) == handler.name):
            return True
        kept = [node.value] if isinstance(node, ast.Assign | ast.Return) else node.args if isinstance(node, ast.Call) else []
        if handler.name and any(part is not None and _last(part) == handler.name for part in kept):
            return not (isinstance(node, ast.Call) and _last(node.func) in ("str", "repr", "type", "one_line"))
    return False


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
