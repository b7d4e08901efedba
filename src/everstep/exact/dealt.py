"""A state whose optimizer's part is dealt out: what each member of a pool updates, holds, and gives to the others.

The plan deals out segments (`placement.shards`); here they become ranges of parameters, or whole parameters. A *dealt*
parameter is one whose optimizer's state is divided (`exact.divisible`), or is about to be made. Its blocks on the
state's grid, and those of its optimizer's state, belong to the same segments. All members update all other parameters.
Who has a part of a dealt parameter takes the blocks of the reduced gradient in which that part lies; all take the
others, and blocks of which something else needs all of the gradient. The gradient's grid is another than that of a
state whose parameters stay whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor, nn

from everstep.base.extents import BlockRun, Extents, Runs
from everstep.base.plan import Plan
from everstep.base.ports import Portion
from everstep.exact.divisible import block_range, kept_like, tensor_bytes
from everstep.exact.image import MODEL, Outline
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.pieces import Ranges
from everstep.exact.state import ModelState
from everstep.placement.shards import SegmentBlocks, divided_planes, ends_of, gifts, runs_of_numbers


@dataclass(frozen=True)
class _Placed:
    """A dealt parameter. start: of its first element on the grid."""

    parameter: nn.Parameter
    start: int

    @property
    def blocks(self) -> range:
        """Element blocks that hold a part of it."""
        return block_range(self.parameter, self.start)

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
        self._placed = [_Placed(parameter, spot.offset) for parameter, spot in state.divided(gradients)]
        self._blocks = sorted({block for one in self._placed for block in one.blocks})
        ends = ends_of((one.blocks.start, one.blocks.stop) for one in self._placed) if state.divides_whole else ()
        self._numbers = SegmentBlocks(len(self._blocks), ends)

    def _held(self, worker_id: int) -> Runs:
        """Runs of element blocks of which a member has the optimizer's state."""
        segments = self._plan.shard(worker_id, self._stage).segments
        n = len(self._blocks)
        numbers = ((0, n),) if segments is None else self._numbers.blocks(segments)
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
        apart, placed = self._apart(layout, tied)
        found = {}
        for seat in self._plan.pool(self._stage):
            mine = _taken(placed, self._held(seat.worker_id))
            found[seat.worker_id] = runs_of_numbers(n for n in range(layout.n_blocks) if n not in apart or n in mine)
        return found

    def fed(self, layout: GradientLayout, tied: Collection[int], segments: Runs, rest: bool) -> Runs:
        """Blocks of a step's reduced gradient for these segments; rest: and those that all members take. layout, tied:
        as for `takers`."""
        apart, placed = self._apart(layout, tied)
        numbers = [self._blocks[k] for lo, hi in self._numbers.blocks(segments) for k in range(lo, hi)]
        mine = _taken(placed, runs_of_numbers(numbers)) & apart
        return runs_of_numbers(n for n in range(layout.n_blocks) if n in mine or (rest and n not in apart))

    def _apart(self, layout: GradientLayout, tied: Collection[int]) -> tuple[set[int], list[tuple[int, _Placed]]]:
        """Blocks of the gradient that not all members take, and the dealt parameters in them, with their places in the
        gradient."""
        leaves = dict(self._state.model.named_parameters(remove_duplicate=False))
        dealt, placed = {id(one.parameter): one for one in self._placed}, list[tuple[int, _Placed]]()
        apart, by_all = set[int](), set[int]()
        places = {n for i, entry in enumerate(layout.entries) if entry.tied_to >= 0 for n in (i, entry.tied_to)}
        for i, entry in enumerate(layout.entries):
            one, blocks = dealt.get(id(leaves.get(entry.name))), _blocks(entry.offset, entry.stop)
            if one is None or i in places or i in tied:  # all of it is needed, by all
                by_all.update(blocks)
            else:
                apart.update(blocks)
                placed.append((entry.offset, one))
        return apart - by_all, placed

    def strange(self) -> tuple[int, ...] | None:
        """Shape of a parameter that was updated here, at least in part, and whose state is another than that of others
        or cannot be divided; or of one whose state is not divided any more, as that of further parameters takes more
        memory. None if there is none. To be asked for after the update."""
        optimizer, mine = self._state.optimizer, self._held(self._me)
        if optimizer is None:
            return None
        now = {id(parameter) for parameter, _ in self._state.divided()}
        gone = [one.parameter for one in self._placed if now and id(one.parameter) not in now]
        undone = [p for p in gone if kept_like(optimizer, p) != frozenset()]
        updated = [one.parameter for one in self._placed if one.within(mine)]
        kept = [kept_like(optimizer, p) for p in updated]
        odd = (p for p, keys in zip(updated, kept, strict=True) if keys is None or keys != kept[0])
        return next((tuple(p.shape) for p in (*undone, *odd)), None)

    @property
    def moved(self) -> bool:
        """Whether the update has given further parameters a state that is divided, so that segments are elsewhere."""
        return [id(parameter) for parameter, _ in self._state.divided()] != [id(one.parameter) for one in self._placed]

    def sizes(self) -> tuple[int, int]:
        """Bytes of all of the optimizer's state: of what members divide, and of the rest."""
        divided, found = {one.parameter for one in self._placed}, [0, 0]
        optimizer = self._state.optimizer
        for parameter, kept in optimizer.state.items() if optimizer is not None else ():
            found[parameter not in divided] += tensor_bytes(kept)
        return found[0], found[1]

    def made(self) -> Extents:
        """Blocks of the state that this worker has once it has updated its part; of no state with other planes."""
        return self._extents(self._held(self._me), with_others=False)

    def _extents(self, mine: Runs, *, with_others: bool) -> Extents:
        shape = self._state.shape
        planes, of = shape.planes, shape.sizes
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
        apart = divided_planes(image.outline.sizes)
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
                    self._state.memory.release(value, one.within(mine))

    def spread(self) -> Extents:
        """Blocks that it has once the parameters that others have updated have come, too."""
        return self._extents(self._held(self._me), with_others=True)

    def portions(self) -> list[Portion]:
        """The parts of parameters that members give each other after an update, in the order of the grid."""
        found, stops = list[Portion](), [one.blocks.stop for one in self._placed]
        for gift in gifts(self._plan, self._stage, self._numbers):
            found += self._parts(gift.source, gift.takers, self._blocks[gift.first : gift.stop], stops)
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


def _taken(placed: Sequence[tuple[int, _Placed]], held: Runs) -> set[int]:
    """Blocks of the gradient in which elements of these element blocks lie. placed: parameters, and where they begin in
    the gradient."""
    found = set[int]()
    for offset, one in placed:
        for first, stop in one.within(held):
            found.update(_blocks(offset + first, offset + stop))
    return found


def _blocks(first: int, stop: int) -> range:
    """Blocks of the gradient in which these of its elements lie."""
    return range(first // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS))


def digested_planes(shape: Outline) -> frozenset[str]:
    """Names of the planes that all members have: of these they compare digests."""
    apart = divided_planes(shape.sizes)
    return frozenset(plane.name for plane in shape.planes if plane.name not in apart)
