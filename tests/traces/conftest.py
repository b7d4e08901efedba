"""Golden conversations: `pytest tests/traces --rewrite` writes what the machines say now into the files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "protocol"))


@pytest.fixture
def golden(rewrite: bool) -> Callable[[Path, str], None]:
    """Compares a file with the text that it should have; with `--rewrite`, makes it so."""

    def compare(path: Path, now: str) -> None:
        if rewrite:
            path.write_text(now)
        assert path.read_text() == now, f"{path.name} says something else; if that is right: --rewrite, read the diff"

    return compare
