"""Bugs that nobody wrote: one-line mistakes of the usual kinds, generated from a file's syntax tree.

Texts for people (log lines, reasons, error messages, docstrings) and annotations are left as they are.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise

_EXCHANGED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_TURNED = {ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
_OPPOSITE = {"max": "min", "min": "max", "any": "all", "all": "any"}
_ANY_ORDER = ("isinstance", "getattr", "range", "max", "min")
"""Calls whose arguments are not exchanged: the greatest of two values is the same in any order."""
_SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*"}
_TOLD = {
    "log",
    "logger",
    "Why",
    "report",
    "warn",
    "warning",
    "info",
    "debug",
    "error",
    "print",
    "check",
    "secho",
    "echo",
}
"""Calls whose arguments are told to people, and the check of what must be true anyhow."""
_UNITS = ("_S", "_MS", "_NS", "_BYTES", "_MB")


@dataclass(frozen=True, order=True)
class Generated:
    """A mistake at one place: the source between two offsets is replaced. file: below src/everstep."""

    file: str
    line: int
    begin: int
    end: int
    new: str
    kind: str
    where: str

    @property
    def id(self) -> str:
        """Name that is the same in each run on the same source."""
        return f"{self.file}:{self.line}:{self.kind}:{self.begin}"

    def planted(self, source: str) -> str:
        """The source with the mistake."""
        return source[: self.begin] + self.new + source[self.end :]


class _Finder(ast.NodeVisitor):
    """All mistakes that one file could have."""

    def __init__(self, file: str, source: str) -> None:
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines()
        self._names: list[str] = []
        self.found: list[Generated] = []

    # ---- places

    def _at(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column]
        return self._starts[line - 1] + len(before.decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno or 0, node.end_col_offset or 0)

    def _text(self, node: ast.expr) -> str:
        begin, end = self._span(node)
        return self._source[begin:end]

    def _note(self, node: ast.expr | ast.stmt, new: str, kind: str) -> None:
        begin, end = self._span(node)
        self.found.append(Generated(self._file, node.lineno, begin, end, new, kind, ".".join(self._names)))

    # ---- where nothing is changed

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Annotations mean nothing when the code runs."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """What an error says is for people."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text."""

    def _scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self._names.append(node.name)
        for part in node.body:
            self.visit(part)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
                self.visit(default)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scope

    # ---- mistakes

    def visit_If(self, node: ast.If) -> None:
        if not _typing_alone(node.test):
            self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if not isinstance(node.body, ast.Constant | ast.JoinedStr) or not _text_for_people(node.body):
            self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._note(test, "True", "filter left out")
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _TURNED:
            return  # turned round below
        if not (isinstance(test, ast.Constant) or (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))):
            self._note(test, f"(not ({self._text(test)}))", "condition negated")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._note(node, f"bool({self._text(node.operand)})", "not left out")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        texts = [f"({self._text(value)})" for value in node.values]
        for k in range(len(texts)):
            self._note(node, f"({word.join(texts[:k] + texts[k + 1 :])})", "operand dropped")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right, kind = self._text(node.left), self._text(node.comparators[0]), type(node.ops[0])
            word = _EXCHANGED.get(kind) or _TURNED.get(kind)
            if word is not None:
                self._note(node, f"({left} {word} {right})", "comparison changed")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sign = _SIGNS.get(type(node.op))
        if sign is not None and not any(
            isinstance(n, ast.Constant | ast.JoinedStr) and _text_for_people(n) for n in ast.walk(node)
        ):
            self._note(node, f"({self._text(node.left)} {sign} {self._text(node.right)})", "sign changed")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._note(node, str(node.value + 1), "one more")

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in _TOLD:
            return
        if isinstance(node.func, ast.Name) and name in _OPPOSITE:
            self._note(node.func, _OPPOSITE[name], "opposite function")
        plain = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
        if name not in _ANY_ORDER and len(plain) == len(node.args):
            for one, other in pairwise(plain):
                if self._text(one) != self._text(other) and not _text_for_people(one) and not _text_for_people(other):
                    begin, end = self._span(one)[0], self._span(other)[1]
                    between = self._source[self._span(one)[1] : self._span(other)[0]]
                    new = f"{self._text(other)}{between}{self._text(one)}"
                    where = ".".join(self._names)
                    self.found.append(Generated(self._file, one.lineno, begin, end, new, "arguments exchanged", where))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call) and _name(node.value.func) not in _TOLD and self._names:
            self._note(node, "pass", "statement left out")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._names and all(isinstance(to, ast.Attribute | ast.Subscript) for to in node.targets):
            if self._names[-1] != "__init__":
                self._note(node, "pass", "statement left out")
        elif not self._names and isinstance(node.targets[0], ast.Name) and node.targets[0].id.endswith(_UNITS):
            self._note(node.value, f"(10 * ({self._text(node.value)}))", "ten times")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._note(node, "pass", "statement left out")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._note(node, "pass", "statement left out")


def _name(func: ast.expr) -> str:
    """The last part of the name of what is called; log.info is told to people, whatever it is called."""
    if isinstance(func, ast.Attribute):
        return "log" if isinstance(func.value, ast.Name) and func.value.id == "log" else func.attr
    return func.id if isinstance(func, ast.Name) else ""


def _text_for_people(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    )


def _typing_alone(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def mistakes(file: str, source: str) -> list[Generated]:
    """All mistakes that this file could have, in order; some `change` nothing, or leave it no Python.

    file: path below src/everstep.
    """
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found))


def changes(one: Generated, source: str) -> bool:
    """Whether the mistake leaves the source Python, and another program."""
    try:
        return ast.dump(ast.parse(one.planted(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False
