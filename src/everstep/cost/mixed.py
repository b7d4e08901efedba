"""Devices of different speed in one job: lanes by speed, and what that gives. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def lanes_by_speed(speeds: Sequence[float], lanes: int) -> list[int]:
    """Lanes of each device, such that the last one is done as early as possible. speeds: lanes per second."""
    shared = [0] * len(speeds)
    ends = [(1 / speed, device) for device, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(lanes):
        end_s, device = ends[0]
        shared[device] += 1
        heapq.heapreplace(ends, (end_s + 1 / speeds[device], device))
    return shared


def mixed_speed(speeds: Sequence[float], shared: Sequence[int]) -> float:
    """Lanes per second with these lanes for each device."""
    return sum(shared) / max(count / speed for count, speed in zip(shared, speeds, strict=True))


def equal_speed(speeds: Sequence[float], lanes: int) -> float:
    """Lanes per second with equal shares: the slowest device decides."""
    return lanes / (-(-lanes // len(speeds)) / min(speeds))
