"""The source of functions and loops, as syntax trees: found by file and line, each file parsed once.

Apart from its readers, because only this touches files: `linecache`, which knows notebooks' cells, too.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_MOST_CHARACTERS = 2_000_000
_LOADS = ("torch.load", "load_file", "safetensors.torch.load_file")
"""Functions that read tensors from a file."""


@dataclass
class SyntaxTrees:
    """Syntax trees of the user's files."""

    _trees: dict[str, ast.Module | None] = field(default_factory=dict)
    _functions: dict[str, dict[tuple[str, int], Function]] = field(default_factory=dict)

    def tree(self, filename: str) -> ast.Module | None:
        """Tree of a file; None if there is no readable source."""
        if filename not in self._trees:
            text = "".join(linecache.getlines(filename))
            try:
                self._trees[filename] = ast.parse(text) if 0 < len(text) < _MOST_CHARACTERS else None
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._trees[filename] = None
        return self._trees[filename]

    def function(self, code: types.CodeType) -> Function | None:
        """Definition of a function, None if it is not found."""
        filename = code.co_filename
        if filename not in self._functions:
            tree = self.tree(filename)
            found: dict[tuple[str, int], Function] = {}
            for node in ast.walk(tree) if tree is not None else ():
                if isinstance(node, Function):
                    name = getattr(node, "name", "<lambda>")
                    decorators = getattr(node, "decorator_list", [])
                    for line in (node.lineno, *(d.lineno for d in decorators)):
                        found.setdefault((name, line), node)
            self._functions[filename] = found
        return self._functions[filename].get((code.co_name, code.co_firstlineno))

    def loop(self, frame: types.FrameType) -> ast.For | ast.While | None:
        """The innermost loop that this frame is in; None if there is none, or no source."""
        code = frame.f_code
        top: Any = self.tree(code.co_filename) if code.co_name == "<module>" else self.function(code)
        best: ast.For | ast.While | None = None
        for node in inside_of(top) if top is not None else ():
            if isinstance(node, ast.For | ast.While) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0):
                best = node if best is None or node.lineno >= best.lineno else best
        return best

    def loaded_before(self, frame: types.FrameType) -> Iterator[str]:
        """Paths, or the code that makes them, of tensors' files that this frame has read before its loop."""
        for node in self._before(frame):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _LOADS and node.args:
                yield ast.unparse(node.args[0])
                found = _value(node.args[0], frame)
                if isinstance(found, str | PurePath):
                    yield str(found)

    def set_before(self, frame: types.FrameType, attribute: str) -> Iterator[tuple[str, ast.Attribute]]:
        """Names that this frame sets before its loop, and not in it, by an expression with this attribute of something,
        or under such a condition; with that expression's attribute."""
        loop = self.loop(frame)
        again = _stored(loop) if loop is not None else set()
        for node in self._before(frame):
            match node:
                case ast.Assign(value=said) | ast.AnnAssign(value=said) | ast.NamedExpr(value=said):
                    names = _stored(node) - _stored(said)
                case ast.If(test=said):
                    names = _stored(node) - _stored(said)
                case _:
                    continue
            for inner in ast.walk(said) if said is not None else ():
                if isinstance(inner, ast.Attribute) and inner.attr == attribute:
                    yield from ((name, inner) for name in sorted(names - again))

    def _before(self, frame: types.FrameType) -> Iterator[Any]:
        """Nodes of this frame's code that end before its loop begins."""
        code, loop = frame.f_code, self.loop(frame)
        top: Any = self.tree(code.co_filename) if code.co_name == "<module>" else self.function(code)
        until = loop.lineno if loop is not None else frame.f_lineno
        yield from (n for n in inside_of(top) if getattr(n, "end_lineno", until) < until) if top is not None else ()


def _stored(top: ast.AST | None) -> set[str]:
    """Names that are set in this code."""
    nodes = ast.walk(top) if top is not None else ()
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr, None)
    return node.value if isinstance(node, ast.Constant) else None


def prepares(frame: types.FrameType) -> bool:
    """Whether the loop that this frame is in may do something in a round before it comes to the step's batches."""
    loop = SyntaxTrees().loop(frame)
    first = loop.body[0] if isinstance(loop, ast.For) else None
    over = first.iter if isinstance(first, ast.For) else None
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "enumerate":
        over = over.args[0] if len(over.args) == 1 else None
    targets = ast.walk(loop.target) if isinstance(loop, ast.For) else ()
    return not isinstance(over, ast.Name) or over.id not in [n.id for n in targets if isinstance(n, ast.Name)]


def calls_in_file(frame: types.FrameType, method: str) -> int:
    """Number of places in the file of this frame where a method of this name is called; 0 if there is no source."""
    tree = SyntaxTrees().tree(frame.f_code.co_filename)
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree is not None else ()
    return sum(isinstance(func, ast.Attribute) and func.attr == method for func in calls)


def names_attribute(files: Iterable[str], name: str) -> bool:
    """Whether one of these files has such an attribute as `attributes_in` finds."""
    return any(found for _, found in attributes_in(files, name))


def attributes_in(files: Iterable[str], name: str) -> Iterator[tuple[ast.AST, list[ast.Attribute]]]:
    """By file that has this word: its tree, and the attributes of this name that may be a tensor's: other than to call
    it, and of no module (as in `torch.utils.data`), nor of what is called self or args."""
    for file in sorted(files):
        tree = SyntaxTrees().tree(file) if any(f".{name}" in line for line in linecache.getlines(file)) else None
        if tree is not None:
            yield tree, _attributes(tree, name)


def _attributes(tree: ast.AST, name: str) -> list[ast.Attribute]:
    nodes = list(ast.walk(tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    imported = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or alias.name.partition(".")[0] for alias in imported}
    named = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == name and id(n) not in called]
    own = [n for n in named if isinstance(n.value, ast.Name) and n.value.id in ("self", "args")]
    return [n for n in named if root_of(n) not in modules and n not in own]


def root_of(node: ast.expr) -> str:
    """The first of names with dots between them; "" if this is something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def inside_of(top: ast.AST) -> list[ast.AST]:
    """All nodes of this scope, without those of inner scopes."""
    found, left = [], list(ast.iter_child_nodes(top))
    while left:
        node = left.pop()
        found.append(node)
        if not isinstance(node, _SCOPES):
            left += ast.iter_child_nodes(node)
    return found


def names_of(node: Function) -> frozenset[str]:
    """A function's own names: its parameters, and the names that it assigns to."""
    arguments = node.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    found = {a.arg for a in (*parameters, *(x for x in (arguments.vararg, arguments.kwarg) if x is not None))}
    others: set[str] = set()
    for inner in inside_of(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store | ast.Del):
            found.add(inner.id)
        elif isinstance(inner, ast.Global | ast.Nonlocal):
            others |= set(inner.names)
        found |= named_by(inner)
    return frozenset(found - others)


def gives(node: Function) -> bool:
    """Whether a function has another result than None."""
    given = [inner.value for inner in inside_of(node) if isinstance(inner, ast.Return | ast.Yield | ast.YieldFrom)]
    return any(value is not None and getattr(value, "value", value) is not None for value in given)


def named_by(node: ast.AST) -> set[str]:
    """Names that a node sets which are no names of their own kind in the tree."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return {name}
        case ast.MatchMapping(rest=str(name)):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).split(".")[0] for alias in names}
    return set()
