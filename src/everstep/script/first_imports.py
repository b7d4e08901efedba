"""The imports of large packages with which a script or task begins: a fork server does them once for all workers.

Only of packages whose import was looked at: it takes seconds, and does the same in whichever process and environment,
without threads, open files or random numbers. Only those before any statement, which might decide what they do (an
environment variable, say), and not beside files of the user's that would hide installed packages.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from everstep.base.given import read_given

SHARED_PACKAGES = ("transformers", "peft", "accelerate")
COMPILER = "torch._dynamo:config"
"""Which compiles, and which checkpoints of `torch.utils` ask for their settings. No life needs it otherwise."""
_MAY_COMPILE = re.compile(rb"(?<!\bre)\.compile\b|utils\.checkpoint")
_HARMLESS = {"__future__", "everstep", "numpy", "torch"}
_INSTALLED = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}


def first_imports(path: Path) -> tuple[str, ...]:
    """ "module:" or "module:name" for each, in order; () for a file that cannot be read, which fails when it is run."""
    try:
        text = read_given(path, links=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = tuple(dict.fromkeys(_of(tree)))
    own = (COMPILER,) if _MAY_COMPILE.search(text) else ()
    return (*own, *found) if found and not _hides(path.resolve().parent) else own


def _of(tree: ast.Module) -> Iterator[str]:
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
            shared = top in SHARED_PACKAGES
            if not (_is_installed(top) if shared else top in _HARMLESS or top in sys.stdlib_module_names):
                return
            if shared:
                yield f"{module}:{name}"


def _is_installed(top: str) -> bool:
    spec = PathFinder.find_spec(top)
    return spec is not None and os.path.dirname(os.path.dirname(spec.origin or "")) in _INSTALLED


def _hides(folder: Path) -> bool:
    """Whether a module or package of this folder, where the script's process looks first, bears the name of another."""
    others = [place for place in sys.path if os.path.realpath(place) != str(folder)]
    with suppress(OSError):
        for entry in os.scandir(folder):
            stem = entry.name.removesuffix(".py")
            is_package = entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))
            other = PathFinder.find_spec(stem, others) if stem != entry.name or is_package else None
            if other is not None and other.origin:
                return True
    return False
