"""Names that only the loop over a step's batches sets, and that the code behind it reads: a worker that is resumed or
healed may come to that code without a batch.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Iterable, Iterator

from everstep.script.flow_sources import SyntaxTrees, inside_of

_OWN_NAMES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def unset_behind(frame: types.FrameType) -> tuple[str, int] | None:
    """The first such name in the loop over steps that this frame is in, and its line; None if there is none."""
    trees, code = SyntaxTrees(), frame.f_code
    loop, module = trees.loop(frame), code.co_name == "<module>"
    scope = trees.tree(code.co_filename) if module else trees.function(code)
    if not isinstance(loop, ast.For) or scope is None:
        return None
    steps = set(_stored([loop.target]))
    batches = [n for n in inside_of(loop) if isinstance(n, ast.For) and steps & set(_loaded(n.iter))]
    if not batches:
        return None
    begin, end = min(n.lineno for n in batches), max(n.end_lineno or n.lineno for n in batches)
    known = set(_stored(n for n in inside_of(scope) if isinstance(n, ast.Name) and n.lineno < begin))
    known |= _named_otherwise(scope) | set(dir(builtins) if module else ())
    tail = [n for n in loop.body if n.lineno > end] + [n for one in batches for n in one.orelse]
    return next(_reads_first(tail, set(_stored(batches)) - known), None)


def _named_otherwise(scope: ast.AST) -> set[str]:
    """Names that a scope has without an assignment: parameters, functions, classes, imports, and those of others."""
    nodes = [*inside_of(scope), *(ast.walk(scope.args) if isinstance(scope, ast.FunctionDef) else ())]
    found = {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found |= set(node.names)
    return found


def _reads_first(nodes: Iterable[ast.AST], given: set[str]) -> Iterator[tuple[str, int]]:
    """Reads of these names in the order in which code runs, but for those that it has set itself before."""
    for node in nodes:
        if isinstance(node, ast.Name):
            if node.id in given and not isinstance(node.ctx, ast.Store):
                yield node.id, node.lineno
            elif isinstance(node.ctx, ast.Store):
                given.discard(node.id)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name) and node.target.id in given:
                yield node.target.id, node.lineno
            yield from _reads_first([node.value, node.target], given)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from _reads_first([*([node.value] if node.value is not None else []), *targets], given)
        elif isinstance(node, ast.For):
            yield from _reads_first([node.iter, node.target, *node.body, *node.orelse], given)
        elif isinstance(node, _OWN_NAMES):
            hidden = set(_stored(one.target for one in node.generators))
            yield from _reads_first(ast.iter_child_nodes(node), given - hidden)
        elif isinstance(node, ast.If):
            yield from _reads_first([node.test], given)
            branches = set(given), set(given)
            for body, left in zip((node.body, node.orelse), branches, strict=True):
                yield from _reads_first(body, left)
            given &= branches[0] | branches[1]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _reads_first(ast.iter_child_nodes(node), given)


def _stored(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, _OWN_NAMES):
            yield from _stored(ast.iter_child_nodes(node))


def _loaded(node: ast.AST) -> Iterator[str]:
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
