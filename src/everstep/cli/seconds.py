"""Option types for seconds."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import click

_MOST_S = 1e6


class Seconds(click.FloatRange):
    """A number of seconds from a range that a clock can measure. above: the least value itself is refused. NaN, which
    would pass any range check, is refused."""

    def __init__(self, least_s: float = 0.0, most_s: float = _MOST_S, *, above: bool = False) -> None:
        super().__init__(least_s, most_s, min_open=above)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if isnan(found):
            self.fail(f"expected a number of seconds, got {value}", param, ctx)
        return found


def timeout(meaning: str) -> Callable[[Any], Any]:
    """The option `--timeout` of a command that waits for a job's action."""
    return click.option(
        "--timeout", "timeout_s", type=Seconds(above=True), default=600.0, show_default=True, help=meaning
    )
