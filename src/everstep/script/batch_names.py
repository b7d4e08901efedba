"""Names that only the loop over a step's batches sets, and that the code behind it needs: a worker that is resumed or
healed may come to that code without a batch. In doubt nothing is said.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Collection, Iterable, Iterator, Sequence

from everstep.script.flow_sources import SyntaxTrees, inside_of, named_by

_OWN_NAMES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OWN_CODE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_CATCH = {"NameError", "UnboundLocalError", "Exception", "BaseException"}
_ASK_NAMES = {"locals", "globals", "vars"}
Need = tuple[str, int]


def unset_behind(frame: types.FrameType) -> Need | None:
    """The first such name in the loop over steps that this frame is about to enter, and its line; None if there is
    none. What the frame knows already has a value."""
    trees, code = SyntaxTrees(), frame.f_code
    loop, module = trees.loop(frame), code.co_name == "<module>"
    if not isinstance(loop, ast.For):
        return None
    steps = set(_stored([loop.target]))
    batches = [n for n in inside_of(loop) if isinstance(n, ast.For) and _goes_over(n.iter, steps)]
    own = None if module else {*code.co_varnames, *code.co_cellvars}
    given = {
        name for name in _stored([part for n in batches for part in (n.target, *n.body)]) if own is None or name in own
    }
    return next(_Round(batches, given - steps - set(frame.f_locals)).needs(loop.body), None)


class _Round:
    """A round of the loop over steps, without batches. unset: names that have no value there so far."""

    def __init__(self, batches: Collection[ast.For], unset: set[str]) -> None:
        self._batches = batches
        self._changed = set(_stored([part for n in batches for part in n.body]))
        self._unset = unset

    def needs(self, nodes: Iterable[ast.AST]) -> Iterator[Need]:
        """Needs of names that are unset, in the order in which code runs. What is set in one branch counts as set."""
        for node in nodes:
            if isinstance(node, ast.Name):
                if node.id in self._unset and not isinstance(node.ctx, ast.Store):
                    yield node.id, node.lineno
                self._unset.discard(node.id)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                if node.target.id in self._unset:
                    yield node.target.id, node.lineno
                yield from self.needs([node.value])
            elif isinstance(node, ast.If) and self._is_guard(node.test):
                yield from self.needs([node.test, *node.orelse])
            elif isinstance(node, ast.Try) and any(_catches(handler) for handler in node.handlers):
                yield from self.needs([*node.handlers, *node.orelse, *node.finalbody])
            elif isinstance(node, _OWN_NAMES):
                hidden = set(_stored(one.target for one in node.generators)) & self._unset
                self._unset -= hidden
                yield from self.needs(ast.iter_child_nodes(node))
                self._unset |= hidden
            else:
                self._unset -= named_by(node)
                yield from self.needs(self._in_order(node))

    def _in_order(self, node: ast.AST) -> Sequence[ast.AST]:
        """Parts of a node that run, in their order."""
        match node:
            case ast.For() if node in self._batches:
                return [node.iter, *node.orelse]
            case ast.For():
                return [node.iter, node.target, *node.body, *node.orelse]
            case ast.Assign():
                return [node.value, *node.targets]
            case ast.AnnAssign() | ast.NamedExpr():
                return [*([node.value] if node.value is not None else []), node.target]
        return [] if isinstance(node, _OWN_CODE) else list(ast.iter_child_nodes(node))

    def _is_guard(self, test: ast.expr) -> bool:
        """Whether a condition may ask if there was a batch: by a name that batches change, or by all names."""
        names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
        return bool(names & (self._changed - self._unset)) or bool(names & _ASK_NAMES)


def _goes_over(iterated: ast.expr, steps: set[str]) -> bool:
    """Whether a step itself is gone through here, and not one of its attributes, or a range up to its number."""
    match iterated:
        case ast.Name(id=name):
            return name in steps
        case ast.NamedExpr(value=value):
            return _goes_over(value, steps)
        case ast.Call(func=ast.Name(id="range")):
            return False
        case ast.Call(args=args):
            return any(_goes_over(one, steps) for one in args)
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or bool(_CATCH & {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)})


def _stored(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, (*_OWN_NAMES, *_OWN_CODE)):
            yield from _stored(ast.iter_child_nodes(node))
