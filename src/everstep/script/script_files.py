"""Files that a script is made of: itself, and the modules of its own folder that it imports, directly or not.

Apart because nothing is imported or run here: the source tells. Modules that are named while the script runs
(`importlib`), and those of other folders, are not among them.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from everstep.base.given import read_given

MOST_FILES = 1000


def files_of(script: str) -> list[Path]:
    """The script first, then the others in order; at most `MOST_FILES`."""
    first = Path(script).resolve()
    folder, seen, left = first.parent, {first}, [first]
    while left and len(seen) < MOST_FILES:
        path = left.pop()
        for parts in _imports(path, folder):
            for found in _modules(folder, parts):
                if found not in seen:
                    seen.add(found)
                    left.append(found)
    return [first, *sorted(seen - {first})[: MOST_FILES - 1]]


def _imports(path: Path, folder: Path) -> Iterator[tuple[str, ...]]:
    """Dotted names of imports, relative to the folder; an unreadable file imports nothing, and fails when it is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(read_given(path, links=True))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = path.parent.relative_to(folder).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            named = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*named, alias.name) for alias in node.names)


def _modules(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """Files of a dotted name: of all packages on its way, and of the module at its end."""
    for n in range(1, len(parts) + 1):
        stem = folder.joinpath(*parts[:n])
        for candidate in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if candidate.is_file():
                yield candidate
