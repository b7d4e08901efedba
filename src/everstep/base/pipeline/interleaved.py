"""Interleaved 1F1B: each worker holds several chunks; chunk c of worker s is part c * K + s of the model. Pure.

The bubble shrinks by the number of chunks, for more activations held and more messages. Ahead are the first group's
passes through all chunks but the last, and two per stage behind, because there is enough to do while a gradient is on
its way back. Source: arXiv:2104.04473, section 2.2 and figure 4.
"""

from __future__ import annotations

from everstep.base.pipeline.kind import Fit, ScheduleKind, Shape


def _ahead(shape: Shape) -> int:
    return 2 * shape.behind + (shape.chunks - 1) * shape.stages


def _fits(stages: int, micro_batches: int) -> Fit | None:
    below = micro_batches - micro_batches % stages
    nearest = (below, below + stages) if below else (stages,)
    return None if micro_batches == below else Fit(f"a multiple of the {stages} stages", nearest)


KIND = ScheduleKind(
    "interleaved",
    "1f1b over several chunks per stage: a smaller bubble, more activations and messages",
    ahead=_ahead,
    group=lambda shape: shape.stages,
    unlooped="1f1b",
    fits=_fits,
)
