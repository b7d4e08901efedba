"""The user's lines as they are executed, with a digest of each value that they read and made: two such records of the
same work show the first line at which it became different, and the name that did.

Apart from `reachable`, which looks at a moment, because this follows the execution. It runs none of the user's code:
attributes are looked up without properties.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everstep.exact.digest import digest_bytes, tensor_digest
from everstep.script.flow_sources import SyntaxTrees
from everstep.script.flow_words import CHANGING
from everstep.script.reachable import GENERATORS, generator_state, of_user, users_class

_MOST_ROWS = 150_000
_MOST_BYTES = 1 << 24
_MOST_TEXT, _DEEPEST, _WIDEST = 100, 4, 700
_MISSING = object()
_OPAQUE = (nn.Module, ModuleType, type, FunctionType, MethodType)


@dataclass(frozen=True)
class LineRow:
    """One line before it is executed. made: names and digests of what the line before it in this frame has bound, with
    that line's number; read: of what this line reads. versions: of the watched tensors, in total."""

    file: str
    line: int
    frame: int
    after: int
    made: tuple[tuple[str, str], ...]
    read: tuple[tuple[str, str], ...]
    versions: int = 0


@dataclass(frozen=True)
class Divergence:
    """The first difference. object: a name in the code, or a called function; made: the line gives it another value
    from equal ones."""

    object: str
    file: str
    line: int
    made: bool


@dataclass
class LineTrace:
    """The record of this thread, from `start` on. parts: rows by the name that `mark` gave."""

    only_lines: bool = False
    """Keep no more than the numbers of the lines, in `lines`, by file."""
    parts: dict[str, list[LineRow]] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    watched: Sequence[Tensor] = ()
    _part: str = ""
    _rows: list[LineRow] = field(default_factory=list)
    _count: int = 0
    _frames: int = 0
    _words: _Words = field(default_factory=lambda: _Words())

    def start(self) -> None:
        sys.settrace(self._call)

    def stop(self) -> None:
        sys.settrace(None)

    def mark(self, part: str) -> None:
        """Count what follows to this part; "": keep nothing."""
        self._part = part
        self._rows = self.parts.setdefault(part, [])

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Note the number of writes to these tensors with each line."""
        self.watched = tensors

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if not _users(frame.f_code):
            return None
        if self.only_lines:
            return self._covered
        self._frames += 1
        return _FrameTrace(self, self._frames).line

    def _covered(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        self.lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return self._covered

    def row(self, frame: FrameType, number: int, after: int) -> None:
        """Note the line that a frame is about to execute."""
        if not self._part or self._count > _MOST_ROWS:
            return
        self._count += 1
        file, line = frame.f_code.co_filename, frame.f_lineno
        names = frame.f_locals
        made = tuple(_seen(n, names, frame.f_globals) for n in self._words.made(file, after))
        read = tuple(_seen(n, names, frame.f_globals) for n in self._words.read(file, line))
        versions = sum(t._version for t in self.watched)
        self._rows.append(LineRow(file, line, number, after, made, read, versions))


class _FrameTrace:
    """One frame's lines."""

    def __init__(self, trace: LineTrace, number: int) -> None:
        self._trace, self._number, self._after = trace, number, 0

    def line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event in ("line", "return"):
            self._trace.row(frame, self._number, self._after)
            self._after = frame.f_lineno
        return self.line


@cache
def _users(code: CodeType) -> bool:
    return of_user(code.co_filename)


def first_divergence(one: Sequence[LineRow], other: Sequence[LineRow]) -> Divergence | None:
    """The first line at which two records differ; None if they do not, as far as both go."""
    words = _Words()
    before: LineRow | None = None
    for mine, theirs in zip(one, other, strict=False):
        if (mine.file, mine.line) != (theirs.file, theirs.line):
            row = before or mine
            return Divergence(words.called(row.file, row.line) or "the condition", row.file, row.line, True)
        for (name, mark), (_, others) in zip(mine.made, theirs.made, strict=False):
            if mark != others:
                return Divergence(name, mine.file, mine.after, True)
        for (name, mark), (_, others) in zip(mine.read, theirs.read, strict=False):
            if mark != others:
                return Divergence(name, mine.file, mine.line, False)
        before = mine
    return None


def first_write(rows: Sequence[LineRow]) -> Divergence | None:
    """The first line that wrote to a watched tensor."""
    last: dict[int, LineRow] = {}
    for row in rows:
        before = last.get(row.frame)
        if before is not None and row.versions != before.versions and row.after == before.line:
            name = max((name for name, _ in before.read), key=len, default="the model")
            return Divergence(name, before.file, before.line, True)
        last[row.frame] = row
    return None


_OF_LISTS = ("append", "insert", "extend", "pop")
_TRAINED, _FIRST_GIVEN = ("model", "optimizer"), 2
_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_CHANGED = re.compile(r"module (.+?) \(|(.+?) of module (.+?) got |the optimizer's groups")
"""What a refusal (`exact.structure`) says of modules, parameters and groups; else it is of "a gradient hook", say."""


def where_written(name: str, file: str, line: int) -> int:
    """The line of a file that binds or changes what a name stands for, nearest to `line`; `line` if there is none."""
    lines = [k for k in _Words().writers(file, name) if k]
    return min(lines, key=lambda k: (abs(k - line), k)) if lines else line


def where_restructured(file: str, line: int, says: str) -> Divergence | None:
    """The first line in a loop around `line` that does what the refusal says: registers a hook, a module or a group, or
    sets or removes the part of the model or optimizer that it names; None if no line surely does. says: the refusal."""
    tree = SyntaxTrees().tree(file)
    if tree is None:
        return None
    told = _CHANGED.match(says)
    named = " ".join(filter(None, told.groups())) or "params param_groups" if told is not None else ""
    words, kind = set(re.findall(r"\w+", named)), " ".join(says.split()[:3]) if told is None else ""
    given = set(_given_names(tree))
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and n.lineno <= line <= (n.end_lineno or line)]
    ours, others, changed = dict[int, str](), dict[int, str](), dict[int, str]()
    for node in (node for loop in loops for node in ast.walk(loop)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method, thing = node.func.attr, node.func.value
            if _registers(method, words, kind):
                (ours if _is_part(thing, given) else others).setdefault(node.lineno, ast.unparse(thing))
            elif method in _OF_LISTS and _is_named(thing, given, words):
                changed.setdefault(node.lineno, ast.unparse(thing))
        elif isinstance(node, ast.expr) and _is_set(node) and _is_named(node, given, words):
            changed.setdefault(node.lineno, ast.unparse(node))
    found = ours or changed or others
    return Divergence(found[min(found)], file, min(found), True) if found else None


def _given_names(tree: ast.Module) -> Iterator[str]:
    """Names of models and optimizers that calls of `join` were given, dotted as they are there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] == "join":
            keywords = [k.value for k in node.keywords if k.arg in _TRAINED]
            for inner in (n for argument in [*node.args[:_FIRST_GIVEN], *keywords] for n in ast.walk(argument)):
                if isinstance(inner, ast.Name | ast.Attribute) and (name := _dotted(inner)) != "self":
                    yield name


def _registers(method: str, words: set[str], hook: str) -> bool:
    """Whether a method of this name does what the words tell of, to whatever module or parameter. hook: its kind."""
    if hook:
        tensors = method in _TENSOR_HOOKS
        return tensors if hook.startswith("a gradient") else "register_" in method and "hook" in method and not tensors
    if "param_groups" in words:
        return method == "add_param_group"
    others = method.startswith("register_") and "hook" not in method and method != "register_buffer"
    return others or method in ("add_module", "set_submodule")


def _is_set(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load)


def _is_named(node: Any, given: set[str], words: set[str]) -> bool:
    """Whether it is a given thing, or a part of one whose last name, or number, is among the words."""
    while isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        node = node.value  # which of them is not written there
    last = node.slice.value if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) else None
    last = node.attr if isinstance(node, ast.Attribute) else last
    return _dotted(node) in given or (str(last) in words and _is_part(node, given))


def _is_part(node: Any, given: set[str]) -> bool:
    while _dotted(node) not in given:
        if not isinstance(node, ast.Subscript | ast.Attribute):
            return False
        node = node.value
    return True


# ---- names on lines


@dataclass
class _Words:
    """Names that the lines of files read, bind and call."""

    _trees: SyntaxTrees = field(default_factory=SyntaxTrees)
    _read: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    _made: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    _called: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)

    def read(self, file: str, line: int) -> tuple[str, ...]:
        return self._of(file, self._read).get(line, ())

    def made(self, file: str, line: int) -> tuple[str, ...]:
        return self._of(file, self._made).get(line, ()) if line else ()

    def called(self, file: str, line: int) -> str:
        return next(iter(self._of(file, self._called).get(line, ())), "")

    def writers(self, file: str, name: str) -> Iterator[int]:
        """Lines that bind the name, an item of it, or call a method of it that changes it in place."""
        tree = self._trees.tree(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(ast.unparse(t).split("[")[0] == name for t in targets):
                    yield node.lineno
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _changes(node.func.attr):
                yield node.lineno if ast.unparse(node.func.value) == name else 0

    def _of(self, file: str, table: dict[str, dict[int, tuple[str, ...]]]) -> dict[int, tuple[str, ...]]:
        if file not in self._read:
            read: dict[int, dict[str, None]] = {}
            made: dict[int, dict[str, None]] = {}
            called: dict[int, dict[str, None]] = {}
            tree = self._trees.tree(file)
            for node in ast.walk(tree) if tree is not None else ():
                if isinstance(node, ast.Call):
                    called.setdefault(node.lineno, {}).setdefault(ast.unparse(node.func))
                if isinstance(node, ast.Name | ast.Attribute) and (name := _dotted(node)):
                    found = read if isinstance(node.ctx, ast.Load) else made
                    found.setdefault(node.lineno, {}).setdefault(name)
            for node in ast.walk(tree) if tree is not None else ():
                if isinstance(node, ast.AugAssign) and (name := _dotted(node.target)):
                    read.setdefault(node.lineno, {}).setdefault(name)
            for here, names in ((self._read, read), (self._made, made), (self._called, called)):
                here[file] = {line: tuple(reversed(list(those))) for line, those in names.items()}
        return table[file]


def _changes(method: str) -> bool:
    return method in CHANGING or (method.endswith("_") and not method.endswith("__"))


def _dotted(node: ast.AST) -> str:
    """A name with its attributes; "" if it is more than that."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _seen(name: str, names: Any, more: Any) -> tuple[str, str]:
    """The longest part of a dotted name that stands for a value, and that value's digest, "" if nothing is known."""
    first, *rest = name.split(".")
    value = names.get(first, more.get(first, _MISSING))
    if value is _MISSING:
        return first, ""
    for attribute in rest:
        inner = _attribute(value, attribute)
        if inner is _MISSING or isinstance(inner, FunctionType | MethodType):
            break
        value, first = inner, f"{first}.{attribute}"
    try:
        return first, "" if isinstance(value, _OPAQUE) else _mark(value, 0)
    except Exception:  # the user's objects may raise at any look
        return first, ""


def _mark(value: Any, depth: int) -> str:
    """Text that differs where values do, also in the order of sets and the state of generators; of what is large or
    not the user's, its type alone."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        small = value.layout is torch.strided and value.nbytes <= _MOST_BYTES
        return tensor_digest(value.detach()) if small else kind
    if isinstance(value, np.ndarray):
        return digest_bytes(np.ascontiguousarray(value).tobytes()) if value.nbytes <= _MOST_BYTES else kind
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic | None):
        text = repr(value)
        return text if len(text) < _MOST_TEXT else digest_bytes(text.encode())
    if isinstance(value, GENERATORS):
        return _mark(generator_state(value), 0)
    if depth >= _DEEPEST or isinstance(value, _OPAQUE):
        return kind
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = itertools.chain.from_iterable(value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = value
    elif users_class(type(value)):
        inner = itertools.chain.from_iterable(getattr(value, "__dict__", {}).items())
    return f"{kind}({', '.join(_mark(v, depth + 1) for v in itertools.islice(inner, _WIDEST))})"


def _attribute(value: Any, name: str) -> Any:
    own = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    if isinstance(value, nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            if name in own.get(table, {}):
                return own[table][name]
    for kind in type(value).__mro__ if not isinstance(value, ModuleType) else ():
        if name in vars(kind) and not hasattr(vars(kind)[name], "__get__"):
            return vars(kind)[name]
    return _MISSING
