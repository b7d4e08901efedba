"""Which tests run: values of a parametrised test in `make test`, and tests of packages that may be absent."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """For a file whose jobs import these packages: unlike `importorskip`, this process does not."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


def mostly_longer(values: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """For `parametrize`: those that are kept as they are, the others only for `make extended`. A tuple: several values
    of one case."""
    return [value if kept(value) else _longer(value) for value in values]


def _longer(value: Any) -> Any:
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.longer)


def seeds(count: int, first: int = 0) -> range:
    """Seeds of a scenario of the simulator: half as many in `make test` as in `make extended`."""
    whole = "EVERSTEP_TEST_ALL_SEEDS" in os.environ
    return range(first, first + (count if whole else count // 2))
