"""For the coordinator, while a job runs: what a spare would give, how long a step of other pools would take. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.base.plan import Seat
from everstep.cost.goodput import available_devices

LEAST_SHARE = 0.01
"""A spare is advised from this share of the workers' time on."""


def spare_gain(between_s: float, away_s: float, workers: int) -> float:
    """Share of the workers' time, in 0..1, in which a place is empty: what a spare gives back at most.

    between_s: seconds between failures of the job. away_s: seconds for which a place is empty after one.
    """
    return 1 - available_devices(between_s * workers, away_s)


def spare_advice(between_s: float, away_s: float, workers: int) -> str | None:
    """Advice to use a spare, with its reason; None if it gives little."""
    gain = spare_gain(between_s, away_s, workers)
    if gain < LEAST_SHARE:
        return None
    return (
        f"a spare would give back up to {gain:.1%} of the workers' time, by the cost model: a failure every "
        f"{between_s:.0f} s, after which a place is empty for {away_s:.1f} s: use --spares 1"
    )


def step_ms(seats: Sequence[Seat], ms_per_lane: Mapping[int, float]) -> float:
    """Time that the busiest worker computes in a step, in ms, over all its stages; the others wait for it."""
    busy: dict[int, float] = {}
    for seat in seats:
        busy[seat.worker_id] = busy.get(seat.worker_id, 0.0) + len(seat.lanes) * ms_per_lane[seat.worker_id]
    return max(busy.values(), default=0.0)
