"""Shared by the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_cli import TASK_FILE


@pytest.fixture(scope="session")
def small_task(tmp_path_factory: pytest.TempPathFactory) -> str:
    """TASK of a small task in a file of its own."""
    path = tmp_path_factory.mktemp("task") / "small_task.py"
    path.write_text(TASK_FILE)
    return f"{path}:Small"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory that does not exist yet."""
    return tmp_path / "run"
