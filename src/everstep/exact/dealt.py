"""A state whose optimizer's part is dealt out: what each member of a pool updates, holds, and gives to the others.

The plan deals out segments (`placement.shards`); here they become ranges of parameters. A *dealt* parameter is
contiguous, float32 and longer than one element, and the optimizer keeps a tensor like it, or is about to make one. Its
blocks on the grid of the gradient, and those of its optimizer's state, belong to the same segments. All members update
all other parameters. Who holds a segment takes the reduced gradient of its blocks; all take the others, and blocks of
which something else needs all of the gradient.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from everstep.base.extents import BlockRun, Extents, Runs
from everstep.base.plan import Plan
from everstep.base.ports import Portion
from everstep.exact.image import MODEL, Plane, plane_sizes
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.pieces import Ranges
from everstep.exact.state import ModelState, divisible
from everstep.exact.state_memory import give_back
from everstep.placement.shards import SegmentBlocks, divided_planes, runs_of_numbers, segment_blocks, segment_holders


@dataclass(frozen=True)
class _Placed:
    """A dealt parameter. start: of its first element on the grid."""

    parameter: nn.Parameter
    start: int

    @property
    def blocks(self) -> range:
        """Element blocks that hold a part of it."""
        last = self.start + self.parameter.numel() - 1
        return range(self.start // BLOCK_ELEMENTS, last // BLOCK_ELEMENTS + 1)

    def within(self, runs: Runs) -> list[tuple[int, int]]:
        """Ranges of its elements in these runs of element blocks, which ascend."""
        found, size, blocks = [], self.parameter.numel(), self.blocks
        for at in range(max(bisect_right(runs, (blocks.start, 1 << 62)) - 1, 0), len(runs)):
            lo, hi = runs[at]
            if lo >= blocks.stop:
                break
            first = max(lo * BLOCK_ELEMENTS - self.start, 0)
            stop = min(hi * BLOCK_ELEMENTS - self.start, size)
            if first < stop:
                found.append((first, stop))
        return found


class Dealt:
    """One stage's state at the present step, dealt out by a plan."""

    def __init__(
        self, state: ModelState, plan: Plan, stage: int, me: int, gradients: Collection[Tensor] = frozenset()
    ) -> None:
        """gradients: parameters that the update gets gradients of; of the first one, for which nothing is kept yet."""
        self._state, self._plan, self._stage, self._me = state, plan, stage, me
        self._placed = sorted(_dealt(state, gradients), key=lambda one: one.start)
        self._blocks = sorted({block for one in self._placed for block in one.blocks})
        self._numbers = SegmentBlocks(len(self._blocks))

    def _held(self, worker_id: int) -> Runs:
        """Runs of element blocks of which a member has the optimizer's state."""
        segments = self._plan.shard(worker_id, self._stage).segments
        n = len(self._blocks)
        numbers = ((0, n),) if segments is None else segment_blocks(segments, n)
        return runs_of_numbers([self._blocks[k] for lo, hi in numbers for k in range(lo, hi)])

    def updates(self) -> Ranges:
        """What this worker updates: its pieces, and a witness of each parameter of which it has none."""
        optimizer, mine = self._state.optimizer, self._held(self._me)
        found: dict[Tensor, Sequence[tuple[int, int]]] = {}
        for group in optimizer.param_groups if optimizer is not None else ():
            found |= {parameter: [(0, parameter.numel())] for parameter in group["params"]}
        return found | {one.parameter: one.within(mine) for one in self._placed}

    def takers(self, layout: GradientLayout, tied: Collection[int] = ()) -> dict[int, Runs]:
        """Blocks of a step's reduced gradient that each member takes. layout: of the gradient; tied: numbers of its
        entries that are used in other stages, too."""
        dealt, apart = {one.start for one in self._placed}, set(self._blocks)
        places = {n for i, entry in enumerate(layout.entries) if entry.tied_to >= 0 for n in (i, entry.tied_to)}
        for i, entry in enumerate(layout.entries):
            if entry.offset not in dealt or i in places or i in tied:  # all of it is needed, by all
                apart.difference_update(range(entry.offset // BLOCK_ELEMENTS, -(-entry.stop // BLOCK_ELEMENTS)))
        found = {}
        for seat in self._plan.pool(self._stage):
            mine = {block for lo, hi in self._held(seat.worker_id) for block in range(lo, hi)}
            found[seat.worker_id] = runs_of_numbers(n for n in range(layout.n_blocks) if n not in apart or n in mine)
        return found

    def made(self) -> Extents:
        """Blocks of the state that this worker has once it has updated its part; of no state with other planes."""
        return self._extents(self._held(self._me), with_others=False)

    def _extents(self, mine: Runs, *, with_others: bool) -> Extents:
        planes = self._state.planes
        of = plane_sizes(planes)
        others = set(self._blocks) - {block for lo, hi in mine for block in range(lo, hi)}
        apart = {*divided_planes(of), *(() if with_others else (MODEL,))}
        runs = []
        for plane in planes:
            if plane.name in apart:
                gone = {number for number, block in plane.grid().items() if block in others}
                kept = [n - plane.start for n in range(plane.start, plane.stop) if n not in gone]
                runs += [BlockRun(plane.name, lo, hi) for lo, hi in runs_of_numbers(kept)]
            else:
                runs.append(BlockRun(plane.name, 0, plane.stop - plane.start))
        return Extents.part(of, runs)

    def digests(self) -> dict[int, str]:
        """Digests of the segments of the optimizer's state that this worker holds, by number."""
        mine = {block for lo, hi in self._held(self._me) for block in range(lo, hi)}
        segments = {block: self._numbers.segment(k) for k, block in enumerate(self._blocks)}
        made: dict[int, Any] = {}
        image = self._state.image()
        apart = divided_planes(plane_sizes(image.outline.planes))
        for plane in image.outline.planes:
            for number, block in plane.grid().items() if plane.name in apart else ():
                if block in mine:
                    made.setdefault(segments[block], xxhash.xxh3_64()).update(image.read_block(number))
        return {segment: one.hexdigest() for segment, one in sorted(made.items())}

    def release(self) -> None:
        """Give back the memory of the optimizer's state that others hold."""
        mine, optimizer = self._held(self._me), self._state.optimizer
        kept = optimizer.state if optimizer is not None else {}
        for one in self._placed:
            for value in kept.get(one.parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == one.parameter.shape and value.is_contiguous():
                    give_back(value, one.within(mine))

    def spread(self) -> Extents:
        """Blocks that it has once the parameters that others have updated have come, too."""
        return self._extents(self._held(self._me), with_others=True)

    def portions(self) -> list[Portion]:
        """The parts of parameters that members give each other after an update, in the order of the grid. Holders of a
        segment share the giving."""
        pool, found = {seat.worker_id for seat in self._plan.pool(self._stage)}, list[Portion]()
        stops, n = [one.blocks.stop for one in self._placed], len(self._blocks)
        for segment, holders in enumerate(segment_holders(self._plan, self._stage)):
            takers = tuple(sorted(pool - {*holders}))
            for lo, hi in segment_blocks(((segment, segment + 1),), n) if takers else ():
                edges = [lo + (hi - lo) * k // len(holders) for k in range(len(holders) + 1)]
                for source, first, stop in zip(holders, edges, edges[1:], strict=False):
                    found += self._parts(source, takers, self._blocks[first:stop], stops)
        return found

    def _parts(
        self, source: int, takers: tuple[int, ...], blocks: Sequence[int], stops: Sequence[int]
    ) -> Iterator[Portion]:
        """What lies in these blocks, which ascend. stops: block after the last one of each dealt parameter."""
        runs = runs_of_numbers(blocks)
        for at in range(bisect_right(stops, blocks[0]), len(stops)) if blocks else ():
            one = self._placed[at]
            if one.blocks.start > blocks[-1]:
                return
            for first, stop in one.within(runs):
                yield Portion(source, takers, one.parameter.detach().view(-1)[first:stop])


def _dealt(state: ModelState, gradients: Collection[Tensor]) -> Iterator[_Placed]:
    optimizer = state.optimizer
    if optimizer is None:
        return
    first = not optimizer.state
    for _, parameter, spot in state.placed():
        if divisible(parameter):
            kept = {} if first else optimizer.state.get(parameter, {})
            like = (v for v in kept.values() if isinstance(v, Tensor) and v.shape == parameter.shape)
            if any(v.dtype is torch.float32 for v in like) or (first and parameter in gradients):
                yield _Placed(parameter, spot.offset)


def digested_planes(planes: Sequence[Plane]) -> frozenset[str]:
    """Names of the planes that all members have: of these they compare digests."""
    apart = divided_planes(plane_sizes(planes))
    return frozenset(plane.name for plane in planes if plane.name not in apart)
