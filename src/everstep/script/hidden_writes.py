"""Whether code may write tensors behind their version counter, by `.data`, as far as its syntax tree tells.

Code that evaluates often reads there: `outputs.data.max(1)`, `total += loss.data`. A `.data` is only read if what is
done with it is known to write nothing, and to keep nothing that shares its memory. All else may be a write.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.script.flow_sources import attributes_in, root_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEW = _words(
    "abs all allclose amax amin any argmax argmin argsort binary_cross_entropy bincount cat ceil clamp clone "
    "cosine_similarity count_nonzero cross_entropy cumsum diff dim dist div dot eq equal exp floor ge gt index_select "
    "isclose isfinite isinf isnan item l1_loss le log log10 log2 log_softmax logsumexp lt masked_select matmul max "
    "mean median min mm mse_loss mul ne neg nelement new_zeros nll_loss nonzero norm numel one_hot outer pow prod "
    "quantile repeat round save sigmoid sign sin size softmax sqrt square stack std sub sum tanh tolist topk "
    "trace unique var where"
)
"""Methods, and functions of torch, numpy and math, that only read, and whose result has memory of its own."""
_SHARING = _words(
    "astype bfloat16 bool contiguous cpu cuda detach double expand expand_as flatten float half int long narrow numpy "
    "permute ravel reshape select squeeze t to transpose type type_as unsqueeze view view_as"
)
"""Methods that only read, and whose result may share their object's memory."""
_SAME = _words("H T data imag mH mT real")
"""Attributes that share a tensor's memory."""
_FACTS = _words("device dtype is_cuda ndim requires_grad shape")
"""Attributes that do not."""
_READERS = _words("abs bool float format int isinstance len print repr round str sum type")
"""Builtin functions that only read, and whose result is new."""
_ONE_OF = frozenset(("max", "min"))
"""Builtin functions that only read, and give one of what they are given."""
_TAKING = _words(
    "add_ add_histogram add_scalar addcdiv_ addcmul_ allclose copy_ debug div_ eq equal expand_as format ge gt info le "
    "lerp_ lt mul_ ne sub_ type_as view_as"
)
"""Methods that only read their arguments."""
_SEVERAL = ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp


def may_hide_writes(files: Iterable[str]) -> bool:
    """Whether one of these files may write tensors by `.data`."""
    for tree, found in attributes_in(files, "data"):
        code = _Code.of(tree)
        if not all(isinstance(node.ctx, ast.Load) and code.only_reads(node) for node in found):
            return True
    return False


@dataclass(frozen=True)
class _Code:
    """Code of a file. outer: by node, the one that it is a part of. imported: by name, what it stands for."""

    outer: Mapping[ast.AST, ast.AST]
    imported: Mapping[str, str]

    @classmethod
    def of(cls, tree: ast.AST) -> _Code:
        imported = dict[str, str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {a.asname or a.name.partition(".")[0]: a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                place = "own" if node.level else node.module
                imported |= {a.asname or a.name: f"{place}.{a.name}" for a in node.names}
        return cls({inner: node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)}, imported)

    def only_reads(self, node: ast.AST) -> bool:
        """Whether the code only reads what this expression gives."""
        outer = self.outer.get(node)
        match outer:
            case ast.Attribute(ctx=ast.Load(), attr=name):
                call = self.outer.get(outer)
                if isinstance(call, ast.Call) and call.func is outer:
                    return name in _NEW or (name in _SHARING and self.only_reads(call))
                return name in _FACTS or (name in _SAME and self.only_reads(outer))
            case ast.Subscript(value=within, ctx=ctx):
                return within is not node or (isinstance(ctx, ast.Load) and self.only_reads(outer))
            case ast.BinOp(op=op) | ast.AugAssign(op=op):
                return not isinstance(node, _SEVERAL) or isinstance(op, ast.Mod)
            case ast.UnaryOp(op=op):
                return not isinstance(op, ast.UAdd)
            case ast.List() | ast.Tuple() | ast.ListComp() | ast.GeneratorExp():
                return self.only_reads(outer)
            case ast.keyword(arg=name):
                return name != "out" and self._only_taken(node, self.outer[outer])
            case ast.Call():
                return self._only_taken(node, outer)
        return isinstance(outer, ast.Compare | ast.FormattedValue | ast.Expr)

    def _only_taken(self, node: ast.AST, call: ast.AST) -> bool:
        """Whether this argument of a call is only read."""
        if not isinstance(call, ast.Call):
            return False
        func = call.func
        package = self.imported.get(root_of(func), "").partition(".")[0]
        name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
        if package:  # of numpy's arguments a later one may be `out`
            counts = package in ("torch", "math") or (package == "numpy" and node in call.args[:1])
            return counts and name in _NEW
        if isinstance(func, ast.Name):
            return name in _READERS or (name in _ONE_OF and self.only_reads(call))
        return name in _TAKING
