"""Fewest spares, and backups of a pipeline's stages, with which a policy reaches a goodput. Pure.

All numbers are tried in the same simulation. A search with few runs finds where to look; all runs decide.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

FEW_RUNS, MOST_BACKUPS = 2, 3
"""Runs to look where it is. Backups of a stage beyond that are not tried."""


class WantedDevices(NamedTuple):
    """Devices beside those of the job: spares, and backups of each stage."""

    spares: int
    backups: int


Goodput = Callable[[WantedDevices, int], float]
"""Goodput with such devices in so many runs."""


def fewest_devices(goodput: Goodput, wanted: float, most: int, runs: int, stages: int) -> WantedDevices | None:
    """The fewest devices that are enough, spares and backups together; None if as many spares as `most` are not.

    stages: of the policy's pipeline; 0: it has none, so no backups.
    """
    best: WantedDevices | None = None
    for backups in range(1 + MOST_BACKUPS * (stages > 0)):
        limit = most if best is None else best.spares + stages * (best.backups - backups) - 1
        if limit < 0:
            break
        spares = _fewest_spares(goodput, wanted, limit, runs, backups)
        best = best if spares is None else WantedDevices(spares, backups)
    return best


def _fewest_spares(goodput: Goodput, wanted: float, most: int, runs: int, backups: int) -> int | None:
    """Fewest spares in 0..most that are enough in all runs, looked for in growing steps from what few runs say."""

    def enough(spares: int, runs: int = runs) -> bool:
        return goodput(WantedDevices(spares, backups), runs) >= wanted

    guess = bisect.bisect_left(range(most), True, key=lambda spares: enough(spares, min(FEW_RUNS, runs)))
    low, high, step = guess - 1, guess, 1
    if enough(guess):
        while low >= 0 and enough(low):
            high, step = low, 2 * step
            low = max(-1, low - step)
    else:
        while not enough(high := min(most, guess + step)):
            if high == most:
                return None
            step *= 2
        low = guess
    return low + 1 + bisect.bisect_left(range(low + 1, high), True, key=enough)
