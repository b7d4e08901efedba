"""Stretches of a job's steps that a check goes through beside the first ones, reached by setting the cursor: the end of
an epoch, the last step, and the steps at which a condition in the loop holds for the first time.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep.base.below import write_atomically
from everstep.checkpoint.names import manifest_name, step_name, step_of
from everstep.checkpoint.reader import read_manifest
from everstep.checkpoint.store import DirectoryStore
from everstep.script.flow_sources import SyntaxTrees

_MOST_TRIED = 100_000
_ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.Name, ast.Load),
    *(ast.And, ast.Or, ast.Not, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.FloorDiv, ast.Div),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Tuple, ast.List, ast.Set),
)
_NUMBER = "step_number"


@dataclass(frozen=True)
class Unrun:
    """Code that no step has come to. at: the first step that would, 0 if that is unknown."""

    file: str
    line: int
    text: str
    at: int


def set_cursor(origin: Path, target: Path, step: int) -> None:
    """Make a folder of checkpoints whose only one says that it is of this step. origin: a folder with one checkpoint.

    Raises: StoreError, CheckpointCorrupt.
    """
    store = DirectoryStore(origin)
    found = max(s for name in store.list("step-") if (s := step_of(name)) is not None)
    manifest = replace(read_manifest(store, found)[0], step=step)
    shutil.copytree(origin, target, copy_function=os.link, ignore=shutil.ignore_patterns("*.json"))
    (target / step_name(step)).mkdir(exist_ok=True)
    write_atomically(target / manifest_name(step), manifest.encode(), 1)


def unrun(lines: Mapping[str, Sequence[int]], numbers: Mapping[str, float], total: int) -> list[Unrun]:
    """Conditions in loops over a job's steps, of which one branch was not run though the condition was come to.

    lines: executed ones by file. numbers: values of names, with dots, in the loop. total: the last step.
    """
    found = []
    trees = SyntaxTrees()
    for file, those in lines.items():
        ran, tree = set(those), trees.tree(file)
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.If) or not ran & set(range(node.lineno, node.body[0].lineno)):
                continue
            for body, wanted in ((node.body, True), (node.orelse, False)):
                if body and not ran & set(_lines(body)):
                    at = _first(node.test, wanted, numbers, total)
                    found.append(Unrun(file, body[0].lineno, f"if {ast.unparse(node.test)}", at))
    return found


def _lines(body: Sequence[ast.stmt]) -> Iterator[int]:
    for statement in body:
        yield from range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


class _Numbered(ast.NodeTransformer):
    """Puts what is known in place of names, with dots or without."""

    def __init__(self, numbers: Mapping[str, float], total: int) -> None:
        self._known: dict[str, Any] = dict(numbers)
        self._fixed = {"total_steps": total, "is_main": True}

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute) and node.attr == "number":
            return ast.Name(_NUMBER, ast.Load())
        if isinstance(node, ast.Attribute) and node.attr in self._fixed:
            return ast.Constant(self._fixed[node.attr])
        if isinstance(node, ast.Attribute | ast.Name) and (value := self._known.get(ast.unparse(node))) is not None:
            return ast.Constant(value)
        return self.generic_visit(node)


def _first(test: ast.expr, wanted: bool, numbers: Mapping[str, float], total: int) -> int:
    """The first step at which a condition has this value; 0 if it cannot be told from the step's number alone."""
    given = ast.parse(ast.unparse(test), mode="eval")
    tree = ast.fix_missing_locations(_Numbered(numbers, total).visit(given))
    inner = list(ast.walk(tree))
    if not all(isinstance(node, _ALLOWED) for node in inner):
        return 0
    if {node.id for node in inner if isinstance(node, ast.Name)} != {_NUMBER}:
        return 0
    code = compile(tree, "<condition>", "eval")
    with suppress(Exception):  # a division by zero, a type that does not fit
        for number in range(1, min(total, _MOST_TRIED) + 1):
            if bool(eval(code, {"__builtins__": {}}, {_NUMBER: number})) is wanted:
                return number
    return 0
