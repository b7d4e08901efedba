"""The imports of installed packages with which a script or task begins: a fork server does them once for all workers.

Only those before any other statement, which might decide what they do (an environment variable, say), and only packages
that nothing beside the script hides.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from everstep.base.given import read_given

_INSTALLED = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
_PASSED_OVER = {"__future__", "everstep"}


def first_imports(path: Path) -> tuple[str, ...]:
    """ "module:" or "module:name" for each, in order; () for a file that cannot be read, which fails when it is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(read_given(path, links=True))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(dict.fromkeys(_of(tree, str(path.resolve().parent))))


def _of(tree: ast.Module, folder: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            named = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            named = [(node.module, "" if alias.name == "*" else alias.name) for alias in node.names]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        else:
            return
        for module, name in named:
            top = module.partition(".")[0]
            if top in _PASSED_OVER:
                continue
            where = _where(top, folder)
            if where is None:
                return
            if where in _INSTALLED:
                yield f"{module}:{name}"


def _where(top: str, folder: str) -> str | None:
    """The folder in which the script finds a package, "" for the standard library's; None if it is not known to be one
    of these."""
    spec = PathFinder.find_spec(top, [folder, *sys.path, os.getcwd()])
    if spec is None:
        return "" if top in sys.builtin_module_names else None
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    at = os.path.dirname(places[0])
    if at in _INSTALLED:
        return at if len(places) == 1 else None
    return "" if top in sys.stdlib_module_names and at.startswith(sysconfig.get_path("stdlib")) else None
