"""Which values of a parametrised test run in `make test`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_longer(values: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """For `parametrize`: those that are kept as they are, the others only for `make extended`. A tuple: several values
    of one case."""
    return [value if kept(value) else _longer(value) for value in values]


def _longer(value: Any) -> Any:
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.longer)
