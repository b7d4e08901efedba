"""How often to take checkpoints: Young's and Daly's interval, and the one that jobs use. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_INTERVAL_S = 10.0
MOST_INTERVAL_S = 3600.0
MOST_COST = 0.02
"""At most this share of the time goes into checkpoints, by the automatic interval."""
_DEFAULT_MTBF_S = 4 * 3600.0
_FIRST_S = 30.0


@dataclass(frozen=True)
class SaveInterval:
    """Seconds between checkpoints, and how that came about."""

    seconds: float
    reason: str


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that take cost_s each: sqrt(2 x cost x time between failures).

    Source: Young, A first order approximation to the optimum checkpoint interval, 1974.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints, with the terms of higher order.

    Source: Daly, A higher order estimate of the optimum checkpoint interval, 2006, equation 37.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


def expected_mtbf_s(failures: int, elapsed_s: float) -> float:
    """Seconds between failures, by those seen in elapsed_s; one in four hours is assumed beforehand."""
    return (elapsed_s + _DEFAULT_MTBF_S) / (failures + 1)


def automatic_interval(cost_s: float | None, failures: int, elapsed_s: float, mtbf_s: float | None) -> SaveInterval:
    """The interval at which the time lost to checkpoints and to work done again is least: sqrt(2 x cost x time between
    failures), clamped.

    cost_s: training time that one checkpoint takes, None before the first. failures: seen in elapsed_s. mtbf_s: the
    configured time between failures, None to go by those seen (one in four hours is assumed beforehand).

    Source: Young 1974; Daly, A higher order estimate of the optimum checkpoint interval, 2006, section 3.
    """
    if cost_s is None:
        return SaveInterval(_FIRST_S, f"{_FIRST_S:g} s until the cost of the first one is known")
    if mtbf_s is not None:
        between, whence = mtbf_s, "as configured"
    else:
        between = expected_mtbf_s(failures, elapsed_s)
        whence = f"{failures} seen in {elapsed_s / 60:.0f} min"
    cost = max(cost_s, 1e-3)
    ideal = young_s(cost, between) - cost if cost < between / 2 else between
    least = max(LEAST_INTERVAL_S, cost / MOST_COST)
    seconds = min(max(ideal, least), max(MOST_INTERVAL_S, least))
    clamped = "" if seconds == ideal else f", kept within {least:.0f} and {max(MOST_INTERVAL_S, least):.0f} s"
    return SaveInterval(
        seconds,
        f"every {seconds:.0f} s: one costs {cost_s * 1e3:.0f} ms of training, a failure comes every {between / 60:.0f} "
        f"min ({whence}){clamped}",
    )
