"""A script, and what it ends with on one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines_harness import reference, write_script


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that joins."""
    return write_script(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="session")
def alone(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its undisturbed run."""
    return reference(tmp_path_factory.mktemp("alone"), script)
