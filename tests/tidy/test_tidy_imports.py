"""What nothing else imports, benchmarks and examples, asks the package for names that it has."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("bench/*.py"), *ROOT.glob("examples/*.py")])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_names_from_the_package_exist(path: Path) -> None:
    asked = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "everstep" and node.module
        for alias in node.names
    ]
    missing = []
    for module, name in asked:
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            missing.append(f"{module}.{name}: {error}")
    assert not missing


def names_of(path: Path) -> set[str]:
    """What a module defines, imports or assigns at its own level, also inside `if` and `try`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_names_from_other_benchmarks_exist() -> None:
    benches = {path.stem: names_of(path) for path in ROOT.glob("bench/*.py")}
    missing = [
        f"{path.name}: {node.module}.{alias.name}"
        for path in ROOT.glob("bench/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in benches
        for alias in node.names
        if alias.name not in benches[node.module]
    ]
    assert not missing
