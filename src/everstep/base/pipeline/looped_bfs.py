"""Looped breadth-first: all micro-batches go through one chunk before the next chunk has its turn. Pure.

The bubble is that of interleaved 1F1B with any number of micro-batches from the stages up, and each chunk's weights are
gone through once forward and once backward; in return every micro-batch is in flight in every chunk. Source: breadth-
first pipeline parallelism, arXiv:2211.05953, section 4; backward passes go in lane order here, as they do in GPipe.
"""

from __future__ import annotations

from everstep.base.pipeline.kind import Fit, ScheduleKind


def _fits(stages: int, micro_batches: int) -> Fit | None:
    return None if micro_batches >= stages else Fit(f"at least the {stages} stages", (stages,))


KIND = ScheduleKind(
    "looped_bfs",
    "gpipe over several chunks per stage: the bubble of interleaved, with any number of micro-batches",
    ahead=lambda shape: shape.micro_batches * shape.chunks,
    unlooped="gpipe",
    fits=_fits,
)
