"""GPipe: all forward passes, then all backward passes. Pure.

Every micro-batch is in flight at once. Source: arXiv:1811.06965, figure 2; its backward passes go through the
micro-batches in reverse, here they go in lane order as in arXiv:2104.04473, figure 3.
"""

from __future__ import annotations

from everstep.base.pipeline.kind import ScheduleKind

KIND = ScheduleKind(
    "gpipe", "all forward passes, then all backward passes", ahead=lambda shape: shape.micro_batches * shape.chunks
)
