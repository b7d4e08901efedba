"""1F1B: one forward pass ahead for each stage behind. Pure.

At most K - stage micro-batches are in flight. Source: arXiv:2104.04473, section 2.2 and figure 4.
"""

from __future__ import annotations

from everstep.base.pipeline.kind import ScheduleKind

KIND = ScheduleKind(
    "1f1b", "forward and backward passes in turn: few activations held", ahead=lambda shape: shape.behind
)
