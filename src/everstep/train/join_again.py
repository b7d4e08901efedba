"""Whether a script comes to `join` a second time: read from its code at the first call, before anything is trained.

Only what certainly follows counts: later statements of the same blocks, and of those around them, without conditions,
and loops that nothing leaves or skips. What this does not see is refused when it is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

from everstep.train.flow_sources import SyntaxTrees

_MOST_DEPTH = 8
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
        found = _Reader(trees, at.f_globals, joins, home).after(scope.body, at.f_lineno)
        if found > 0:
            return found
        if found == _UNKNOWN:
            return 0
        at = at.f_back
    return 0


class _Reader:
    """Reads one file. names: its globals, by which calls are known."""

    def __init__(self, trees: SyntaxTrees, names: Mapping[str, Any], joins: Any, home: str) -> None:
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
            if isinstance(statement, ast.Raise | ast.Break | ast.Continue) or _exits(statement):
                return _UNKNOWN
        return 0

    def _is_join(self, func: ast.expr, depth: int) -> bool:
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            module = self._names.get(func.value.id)
            return isinstance(module, ModuleType) and getattr(module, func.attr, None) is self._joins
        called = self._names.get(func.id) if isinstance(func, ast.Name) else None
        if called is self._joins:
            return True
        if not isinstance(called, FunctionType) or called.__code__.co_filename != self._home or depth > _MOST_DEPTH:
            return False
        node = self._trees.function(called.__code__)
        body = node.body if isinstance(node, ast.FunctionDef) else []
        return any(self._is_join(call.func, depth + 1) for statement in body for call in _certain(statement))


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
