"""All times and sizes that have a name, outside of protocol/, in one table: one that changes by accident shows, also
where each test takes it from the code. `pytest tests/unit/base --rewrite` writes the table anew; read the difference.

Those of protocol/ have a table of their own (`test_protocol_times`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import everstep

SOURCE = Path(everstep.__file__).parent
TABLE = Path(__file__).with_name("times_and_sizes.txt")
UNITS = ("_S", "_MS", "_NS", "_BYTES", "_MB")


def named(path: Path) -> Iterator[str]:
    """Each such number of a module, as it is written there."""
    for node in ast.parse(path.read_text()).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and target.id.endswith(UNITS):
                yield f"{path.relative_to(SOURCE)} {target.id} = {ast.unparse(node.value)}"  # type: ignore[union-attr]


def test_each_time_and_each_size_is_what_the_table_says(rewrite: bool) -> None:
    files = (p for p in sorted(SOURCE.rglob("*.py")) if p.relative_to(SOURCE).parts[0] != "protocol")
    now = "".join(f"{line}\n" for path in files for line in named(path))
    if rewrite:
        TABLE.write_text(now)
    assert TABLE.read_text() == now, f"{TABLE.name} says something else; if that is right: --rewrite, read the diff"
