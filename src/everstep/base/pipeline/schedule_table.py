"""The pipeline schedules, and the numbers that each refuses. Pure."""

from __future__ import annotations

from everstep.base.errors import ConfigError
from everstep.base.pipeline import gpipe, interleaved, looped_bfs, one_f_one_b
from everstep.base.pipeline.kind import ScheduleKind

KINDS: dict[str, ScheduleKind] = {room.KIND.name: room.KIND for room in (gpipe, one_f_one_b, interleaved, looped_bfs)}


def check_possible(name: str, stages: int, micro_batches: int, chunks: int, *, called: str = "lanes") -> None:
    """Check that the schedule takes these numbers. Raises: ConfigError, one line. called: the micro-batches, in
    words."""
    kind = KINDS[name]
    if kind.unlooped is None:
        if chunks > 1:
            looped = " or ".join(other.name for other in KINDS.values() if other.unlooped)
            raise ConfigError(f"chunks: expected 1 with schedule {name}, got {chunks}: set schedule={looped}")
        return
    if chunks < 2:
        raise ConfigError(
            f"chunks: expected at least 2 with schedule {name}, got {chunks}: set chunks=2, or schedule={kind.unlooped}"
        )
    misfit = kind.fits(stages, micro_batches)
    if misfit is not None:
        near = " or ".join(map(str, misfit.nearest))
        raise ConfigError(
            f"{called}: expected {misfit.wanted} with schedule {name}, got {micro_batches}: use {near}, or "
            f"schedule={kind.unlooped}"
        )
