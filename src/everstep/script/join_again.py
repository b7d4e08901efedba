"""Whether a script comes to `join` a second time: read from its code at the first call, before anything is trained.

Only what certainly follows counts: later statements of the same blocks, and of those around them, without conditions
or under conditions of plain values that are known by now, and loops that nothing leaves or skips. What this does not
see is refused when it is called.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import everstep
from everstep.script.flow_items import MISSING
from everstep.script.flow_sources import SyntaxTrees

_MOST_DEPTH = 8
_PLAIN = (bool, int, float, str, type(None))
_RETURNS, _UNKNOWN = -1, -2
"""In place of a line: the function returns; nothing is known of what follows."""


def second_call(frame: FrameType, joins: Any) -> int:
    """The line at which this frame's script calls `joins`, which it calls now, again; 0 if nothing is known of that."""
    trees, home = SyntaxTrees(), frame.f_code.co_filename
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename == home:
        scope: Any = trees.tree(home) if at.f_code.co_name == "<module>" else trees.function(at.f_code)
        if scope is None or isinstance(scope, ast.Lambda):
            return 0
        plain = _plain({**at.f_globals, **at.f_locals}, scope, at.f_lineno)
        found = _Reader(trees, at.f_globals, joins, home, plain).after(scope.body, at.f_lineno)
        if found > 0:
            return found
        if found == _UNKNOWN:
            return 0
        at = at.f_back
    return 0


class _Reader:
    """Reads one file. names: its globals, by which calls are known; plain: values by which conditions are known."""

    def __init__(
        self, trees: SyntaxTrees, names: Mapping[str, Any], joins: Any, home: str, plain: Mapping[str, Any]
    ) -> None:
        self._plain = plain
        self._trees = trees
        self._names = names
        self._joins = joins
        self._home = home

    def after(self, body: Sequence[ast.stmt], line: int) -> int:
        """The line of a call that follows the one in this line; 0: there is none in this block."""
        for index, statement in enumerate(body):
            if not _spans(statement, line):
                continue
            for block in _blocks(statement):
                if not any(_spans(one, line) for one in block):
                    continue
                if found := self.after(block, line):
                    return found
                if isinstance(statement, ast.For | ast.While):
                    again = isinstance(statement, ast.For) and not _left(block) and _always(block, line)
                    return statement.lineno if again else _UNKNOWN
            return self._first(body[index + 1 :])
        return 0

    def _first(self, statements: Sequence[ast.stmt]) -> int:
        for statement in statements:
            for call in _certain(statement):
                if self._is_join(call.func, 0):
                    return call.lineno
            if isinstance(statement, ast.Return):
                return _RETURNS
            if isinstance(statement, ast.If):
                met = _decided(statement.test, self._plain)
                if met is None and _left([statement]):
                    return _UNKNOWN
                if met is not None and (found := self._first(statement.body if met else statement.orelse)):
                    return found
            if isinstance(statement, ast.Raise | ast.Break | ast.Continue) or _exits(statement):
                return _UNKNOWN
        return 0

    def _is_join(self, func: ast.expr, depth: int) -> bool:
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            module = self._names.get(func.value.id)
            if not isinstance(module, ModuleType):
                return False
            name = func.attr
            return (getattr(module, name, None) if module is everstep else vars(module).get(name)) is self._joins
        called = self._names.get(func.id) if isinstance(func, ast.Name) else None
        if called is self._joins:
            return True
        if not isinstance(called, FunctionType) or called.__code__.co_filename != self._home or depth > _MOST_DEPTH:
            return False
        node = self._trees.function(called.__code__)
        body = node.body if isinstance(node, ast.FunctionDef) else []
        return any(self._is_join(call.func, depth + 1) for statement in body for call in _certain(statement))


def _plain(names: Mapping[str, Any], scope: ast.AST, line: int) -> dict[str, Any]:
    """Names of numbers, texts and parsed arguments, with the values that they have behind this line, where that is
    known: nothing sets them there, or one statement, to a constant."""
    kinds = (*_PLAIN, argparse.Namespace, SimpleNamespace)
    found = {name: value for name, value in names.items() if type(value) in kinds}
    for node in ast.walk(scope):
        if not isinstance(node, ast.Name | ast.Attribute) or isinstance(node.ctx, ast.Load) or node.lineno <= line:
            continue
        inner = node.value if isinstance(node, ast.Attribute) else node
        if isinstance(inner, ast.Name):
            found.pop(inner.id, None)
    for statement in getattr(scope, "body", []):
        if isinstance(statement, ast.Assign) and statement.lineno > line and isinstance(statement.value, ast.Constant):
            own = [t.id for t in statement.targets if isinstance(t, ast.Name)]
            stored = [n.id for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            found |= {name: statement.value.value for name in own if stored.count(name) == 1}
    return found


def _decided(test: ast.expr, plain: Mapping[str, Any]) -> bool | None:
    """Whether a condition of plain values is met; None if that is not known."""
    known = (ast.Constant, ast.Name, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Attribute, ast.List, ast.Tuple, ast.Set)
    for node in ast.walk(test):
        if isinstance(node, ast.Name) and node.id not in plain:
            return None
        if isinstance(node, ast.Attribute):
            held = plain.get(getattr(node.value, "id", ""))
            if type(getattr(held, "__dict__", {}).get(node.attr, MISSING)) not in _PLAIN:
                return None
        if isinstance(node, ast.expr) and not isinstance(node, known):
            return None
    try:
        return bool(eval(compile(ast.Expression(test), "<condition>", "eval"), {"__builtins__": {}}, dict(plain)))
    except TypeError:  # 1 < "a"
        return None


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _always(block: Sequence[ast.stmt], line: int) -> bool:
    """Whether a round of this block comes to this line without a condition."""
    at = next(one for one in block if _spans(one, line))
    inner = next((body for body in _blocks(at) if any(_spans(one, line) for one in body)), None)
    return inner is None or (isinstance(at, ast.With | ast.Try | ast.For) and _always(inner, line))


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of a statement, but for those of inner scopes."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    found = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    inner = [part.body for name in ("handlers", "cases") for part in getattr(statement, name, [])]
    return [*found, *inner]


def _certain(statement: ast.stmt) -> Iterator[ast.Call]:
    """Calls that are made whenever this statement is come to."""
    if isinstance(statement, ast.Try | ast.With):
        for one in statement.body:
            yield from _certain(one)
            if isinstance(one, ast.Return):
                return
    if isinstance(statement, ast.For):
        yield from _calls(statement.iter)
    elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return) and statement.value is not None:
        yield from _calls(statement.value)


def _calls(expression: ast.expr) -> Iterator[ast.Call]:
    """The call that an expression is, and those in its arguments."""
    if isinstance(expression, ast.Call):
        yield expression
        for argument in (*expression.args, *(word.value for word in expression.keywords)):
            yield from _calls(argument)


def _left(block: Sequence[ast.stmt]) -> bool:
    """Whether a loop with this body may be left, or a round of it skipped."""
    kinds = (ast.Return, ast.Raise, ast.Break, ast.Continue)
    return any(isinstance(node, kinds) or _exits(node) for one in block for node in ast.walk(one))


def _exits(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
    return name in ("exit", "_exit", "quit")
