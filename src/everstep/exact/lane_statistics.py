"""A lane's running statistics, as a part of its gradient's flat vector: what it changed, and that it did.

Apart from the accumulator because all code that adds up lanes uses it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from everstep.base.errors import check
from everstep.exact.layout import ALIGN_ELEMENTS, GradientLayout, round_up


class StatisticsRegion(NamedTuple):
    """The running statistics of one unit: a contiguous part of the flat vector."""

    entries: list[int]
    start: int
    stop: int


class LaneStatistics:
    """Takes a lane's running statistics, by region, each followed by 1.0 if the lane changed it.

    Statistics that a lane left bitwise unchanged count as 0.0 with a count of 0, so that a layer in evaluation mode
    keeps its statistics for any number of lanes.
    """

    def __init__(self, layout: GradientLayout, model: nn.Module, units: range) -> None:
        by_name = dict(model.named_buffers(remove_duplicate=False))
        grouped: dict[int, list[int]] = {}
        for i in layout.buffers:
            if layout.entries[i].unit in units:
                grouped.setdefault(layout.entries[i].unit, []).append(i)
        self.regions = [
            StatisticsRegion(mine, layout.entries[mine[0]].offset, layout.entries[mine[-1]].stop)
            for mine in grouped.values()
        ]
        self._where: list[tuple[nn.Module, str]] = []
        self._tails: list[Tensor] = []
        self._sizes = [r.stop - r.start for r in self.regions]
        self._start: Tensor | None = None
        segments: list[Tensor] = []
        for region in self.regions:
            for i in region.entries:
                entry = layout.entries[i]
                owner, _, attribute = entry.name.rpartition(".")
                self._where.append((model.get_submodule(owner), attribute))
                end = entry.stop if entry.stop == region.stop else round_up(entry.stop, ALIGN_ELEMENTS)
                size = end - entry.offset
                device = by_name[entry.name].device
                tail = torch.zeros(size - entry.numel, dtype=torch.float32, device=device)
                tail[0] = 1.0
                self._tails.append(tail)
                segments.append(torch.full((size,), len(segments), dtype=torch.int64, device=device))
        self._segment = torch.cat(segments) if segments else torch.empty(0, dtype=torch.int64)

    def begin_step(self) -> None:
        """The present ones are those that the step starts from."""
        if self.regions:
            self._start = self._read_all()

    def take(self) -> list[Tensor]:
        """The lane's, by region: each as its part of the flat vector, float32."""
        if not self.regions:
            return []
        value = self._read_all()
        check(self._start is not None, "begin() comes before add()")
        differs = value.view(torch.int32) != self._start.view(torch.int32)  # type: ignore[union-attr]
        changed = torch.zeros(len(self._where), dtype=torch.float32, device=value.device)
        changed.index_add_(0, self._segment, differs.float())
        value = torch.where((changed > 0)[self._segment], value, 0.0)
        return list(torch.split_with_sizes(value, self._sizes))

    def _read_all(self) -> Tensor:
        pieces: list[Tensor] = []
        for (module, attribute), tail in zip(self._where, self._tails, strict=True):
            pieces += (getattr(module, attribute).detach().flatten(), tail)
        return torch.cat(pieces)
