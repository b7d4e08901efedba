"""Which tests run: values of a parametrised test in `make test`, and tests of packages that may be absent."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_ALL = "EVERSTEP_TEST_ALL_SEEDS" in os.environ


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
    return range(first, first + (count if _ALL else count // 2))


def thinned(cases: Iterable[Any], n: int) -> list[Any]:
    """All cases in `make extended`, each n-th of them in `make test`. Take an n that has no factor in common with the
    number of values of the innermost parameter of a product: then each value of each parameter is met."""
    return list(cases)[:: 1 if _ALL else n]


def examples(count: int = 100) -> int:
    """Examples of a property, which are others each time: half as many in `make test` as in `make extended`."""
    return count if _ALL else count // 2
