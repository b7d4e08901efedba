"""Finishing the lane tree: the sums of all workers' subtrees become one, in the canonical order.

Apart because every transport uses it. The additions are element by element, so the bits
depend neither on who finishes which range, nor on how the range is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from everstep.base.errors import check
from everstep.base.ports import Node, OnFinal, Reduced
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, add_rounded
from everstep.placement.tree import cover, fold_order

CHUNK_ELEMENTS = 32_768
"""Elements that are folded at a time, so that partial sums stay in the processor's cache."""


class NodePart(NamedTuple):
    """One subtree's sum, or a piece of it.

    tensor: flat float32; its element 0 is element `offset` of the layout, so a whole flat vector has offset 0.
    presence: one byte per layout entry, 1 where at least one lane of the node had it; absent entries are never read.
    """

    node: Node
    tensor: Tensor
    presence: bytes
    offset: int = 0


class _Add(NamedTuple):
    """out = left + right. Operands: k >= 0 is source k, k < 0 is register -1 - k; register 0 is the result."""

    out: int
    left: int
    right: int


def finish(layout: GradientLayout, n_lanes: int, parts: Sequence[NodePart], start: int, stop: int, out: Tensor) -> None:
    """Fold the parts, whose nodes together cover all lanes, for the elements [start, stop) of the layout.

    out: flat float32 with stop - start elements; element 0 is element `start` of the layout. It may not overlap any
    part. Entries that are absent in all parts become zeros.

    Raises: InvariantViolation if nodes overlap or leave lanes out, or sizes do not match.
    """
    check(0 <= start <= stop <= layout.numel, f"range {start}..{stop} is not inside 0..{layout.numel}")
    check(out.numel() == stop - start, f"out has {out.numel()} elements, the range {stop - start}")
    for part in parts:
        check(len(part.presence) == len(layout.entries), f"presence of {part.node} has {len(part.presence)} bytes")
    nodes = tuple(part.node for part in parts)
    with torch.no_grad():
        scratch: list[Tensor] = []
        runs = _runs(layout, parts, start, stop)
        alike = ((*cut, present) for lo, hi, present in runs for cut in layout.alike(lo, hi))
        for begin, end, rounds, present in alike:
            target = out[begin - start : end - start]
            program, used, registers = _program(n_lanes, nodes, present)
            if not used:
                target.zero_()
                continue
            sources = [parts[k].tensor[begin - parts[k].offset : end - parts[k].offset] for k in used]
            check(all(s.numel() == end - begin for s in sources), f"a part does not reach over {begin}..{end}")
            while len(scratch) < registers - 1:
                scratch.append(torch.empty(CHUNK_ELEMENTS, dtype=out.dtype, device=out.device))
            _execute(program, sources, target, scratch, rounds)


def presence(parts: Iterable[NodePart]) -> bytes:
    """One byte per layout entry: 1 where at least one part has it."""
    return merge_presence(part.presence for part in parts)


def merge_presence(rows: Iterable[bytes]) -> bytes:
    """The element-wise maximum of presence bytes; empty if there are none."""
    merged: bytes | None = None
    for row in rows:
        if merged is None or merged == row:
            merged = row
        else:
            merged = np.maximum(np.frombuffer(merged, np.uint8), np.frombuffer(row, np.uint8)).tobytes()
    return merged or b""


def block_norms(layout: GradientLayout, data: Tensor, start: int) -> npt.NDArray[np.float64]:
    """Sums of squares of the unnormalised gradient, one float64 per block; parameters only, no running statistics.

    data: flat float32, whole blocks, beginning at element `start` of the layout, which is the beginning of a block.
    Each block's value depends on the block's bits alone, so any worker may compute it.
    """
    check(start % BLOCK_ELEMENTS == 0, f"element {start} is not the beginning of a block")
    check(data.numel() % BLOCK_ELEMENTS == 0, f"{data.numel()} elements are not whole blocks")
    first = start // BLOCK_ELEMENTS
    count = data.numel() // BLOCK_ELEMENTS
    norms = torch.zeros(count, dtype=torch.float64, device=data.device)
    wide = torch.empty(BLOCK_ELEMENTS, dtype=torch.float64, device=data.device)
    with torch.no_grad():
        for k in range(count):
            size = layout.block_params_stop[first + k] - (first + k) * BLOCK_ELEMENTS
            if size:
                block = wide[:size].copy_(data[k * BLOCK_ELEMENTS : k * BLOCK_ELEMENTS + size])
                torch.dot(block, block, out=norms[k])
    result: npt.NDArray[np.float64] = norms.cpu().numpy()
    return result


def tied_terms(layout: GradientLayout, reduced: Reduced, apart: frozenset[int] = frozenset()) -> list[float]:
    """Terms that turn the squared block norms into the squared norm of the gradient with places of use added up:
    float64, without those of the layout entries `apart`.

    |a + b|^2 = |a|^2 + |b|^2 + 2 ab for a parameter with two places; empty without ties. Every worker of an unsplit
    model gets the same numbers; only one may contribute them.
    """
    terms: list[float] = []
    for places in _places(layout).values():
        if not apart.intersection(places):
            entries = [layout.entries[i] for i in places if reduced.presence[i]]
            terms += cross_terms([elements_of(reduced, e.offset, e.stop) for e in entries])
    return terms


def cross_terms(gradients: Sequence[Tensor]) -> list[float]:
    """2 ab for each pair of one parameter's gradients (flat, in unit order), float64."""
    terms: list[float] = []
    with torch.no_grad():
        wide = [gradient.double() for gradient in gradients]
        for k, right in enumerate(wide):
            terms.extend(2.0 * float(torch.dot(left, right)) for left in wide[:k])
    return terms


def elements_of(reduced: Reduced, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the layout, flat; a view if they lie in one piece, else a copy. Raises:
    InvariantViolation if some of them are not here."""
    found = [part for _, part in parts_of(reduced, start, stop)]
    return found[0] if len(found) == 1 else torch.cat(found)


def parts_of(reduced: Reduced, start: int, stop: int) -> list[tuple[int, Tensor]]:
    """Views that make up the elements [start, stop) of the layout, each with its first element. Raises: as
    `elements_of`."""
    found = [
        (
            max(piece.start, start),
            piece.data[max(piece.start, start) - piece.start : min(piece.stop, stop) - piece.start],
        )
        for piece in reduced.pieces
        if piece.start < stop and start < piece.stop
    ]
    there = sum(part.numel() for _, part in found)
    check(there == stop - start, f"expected the elements {start} to {stop} of a gradient, {there} of them are here")
    return found


def _places(layout: GradientLayout) -> dict[int, list[int]]:
    """First place of use -> all places, for parameters that have several."""
    places: dict[int, list[int]] = {}
    for i, entry in enumerate(layout.entries):
        if entry.tied_to >= 0:
            places.setdefault(entry.tied_to, [entry.tied_to]).append(i)
    return places


def _runs(
    layout: GradientLayout, parts: Sequence[NodePart], start: int, stop: int
) -> Iterable[tuple[int, int, tuple[bool, ...]]]:
    """Cut the range where the set of parts that have the entry changes: (begin, end, whether each part has it)."""
    if start == stop:
        return
    rows = [part.presence for part in parts]
    if all(0 not in row for row in rows):
        yield start, stop, (True,) * len(parts)
        return
    ends = np.array(layout.boundaries)
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left"))
    table = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)[:, first : last + 1] != 0
    changes = np.flatnonzero((table[:, 1:] != table[:, :-1]).any(axis=0))
    begin = start
    for k in (*changes.tolist(), table.shape[1] - 1):
        end = min(int(ends[first + k]), stop)
        yield begin, end, tuple(table[:, k].tolist())
        begin = end


@lru_cache(maxsize=4096)
def _program(
    n_lanes: int, nodes: tuple[Node, ...], present: tuple[bool, ...]
) -> tuple[tuple[_Add, ...], tuple[int, ...], int]:
    """Compile the fold of the present nodes: (additions, part behind each source, registers needed)."""
    used = tuple(k for k in range(len(nodes)) if present[k])
    value: dict[Node, int] = {nodes[k]: source for source, k in enumerate(used)}
    additions: list[_Add] = []
    free: list[int] = []
    registers = 0
    for merge in fold_order(n_lanes, nodes):
        left, right = value.get(merge.left), value.get(merge.right)
        if left is None or right is None:
            if left is not None or right is not None:
                value[merge.into] = left if left is not None else right  # type: ignore[assignment]
            continue
        if left < 0:
            out = left
            if right < 0:
                free.append(right)
        elif right < 0:
            out = right
        elif free:
            out = free.pop()
        else:
            registers += 1
            out = -registers
        additions.append(_Add(out, left, right))
        value[merge.into] = out
    check(not additions or additions[-1].out == -1, "the fold must end in the result")
    return tuple(additions), used, registers


def _execute(
    program: Sequence[_Add], sources: Sequence[Tensor], out: Tensor, scratch: Sequence[Tensor], rounds: torch.dtype
) -> None:
    if not program:
        out.copy_(sources[0])
        return
    if len(program) == 1:
        add_rounded(sources[program[0].left], sources[program[0].right], out, rounds)
        return
    pieces = zip(out.unsafe_split(CHUNK_ELEMENTS), *(s.unsafe_split(CHUNK_ELEMENTS) for s in sources), strict=True)
    temporaries = list(scratch)
    for target, *chunk in pieces:
        if target.numel() != CHUNK_ELEMENTS:
            temporaries = [t[: target.numel()] for t in scratch]
        values = (*chunk, *reversed(temporaries), target)  # so that register -1 is the target, -2 the first scratch
        for add in program:
            add_rounded(values[add.left], values[add.right], values[add.out], rounds)


# ---- parameters that are used in several stages
#
# There is one gradient per place of use, reduced in the stage of that place. One message brings it from there to every
# other stage with a place; every stage makes the sum in unit order, from the same bits.


@dataclass(frozen=True, order=True)
class TiePlace:
    """One place of use. name: the parameter's first one. unit: its number in the whole model. stage: its stage. entry:
    index in this stage's layout, -1 for a place in another stage."""

    name: str
    unit: int
    stage: int
    entry: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class Tied:
    """A parameter with places in this stage and in others. places: in unit order. parameter: the optimizer's leaf."""

    name: str
    places: tuple[TiePlace, ...]
    parameter: nn.Parameter

    @cached_property
    def own(self) -> tuple[TiePlace, ...]:
        """Places in this stage."""
        return tuple(place for place in self.places if place.entry >= 0)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """All stages with a place, ascending."""
        return tuple(sorted({place.stage for place in self.places}))

    @property
    def counts_here(self) -> bool:
        """Whether this stage counts its terms of the norm: the one with the first place."""
        return self.places[0].entry >= 0


def tied_out(ties: Sequence[Tied], layout: GradientLayout, reduced: Reduced) -> dict[TiePlace, Tensor | None]:
    """Reduced gradients that this stage sends to the others (flat float32, not normalised), None where absent."""
    found: dict[TiePlace, Tensor | None] = {}
    for tied in ties:
        for place in tied.own:
            entry = layout.entries[place.entry]
            there = reduced.presence[place.entry]
            found[place] = elements_of(reduced, entry.offset, entry.stop) if there else None
    return found


def stage_terms(
    ties: Sequence[Tied], layout: GradientLayout, reduced: Reduced, received: Mapping[TiePlace, Tensor | None]
) -> list[float]:
    """This stage's summands of the sum of squares of the whole gradient, beside those of its blocks (see `tied_terms`).
    Over all stages they are the very summands of the unsplit model."""
    terms = tied_terms(layout, reduced, frozenset(p.entry for tied in ties for p in tied.own))
    for tied in ties:
        if tied.counts_here:
            own = tied_out([tied], layout, reduced)
            gradients = []
            for place in tied.places:
                check(place in own or place in received, f"the gradient of {tied.name} has not been received")
                gradient = own[place] if place in own else received[place]
                if gradient is not None:
                    gradients.append(gradient)
            terms += cross_terms(gradients)
    return terms


# ---- the sums of one stage
#
# There is one accumulator per part of the model; together they fill the same flat vectors. A lane's gradients of
# several parts come at different times (interleaved schedules), and a node of the lane tree is handed over when all
# parts have completed it.


class StageSums:
    """Sums of a step's lanes, over all parts of a stage."""

    def __init__(self, parts: Sequence[LaneAccumulator], n_lanes: int) -> None:
        """parts: in order, at least one; over the same layout, with disjoint units."""
        check(len(parts) > 0, "a stage has at least one part")
        self.parts = tuple(parts)
        self.n_lanes = n_lanes

    def begin(
        self, step: int, lanes: Sequence[int], buffer: Callable[[Node], Tensor], offer: OnFinal | None = None
    ) -> None:
        """Begin a step, or change its lanes here; sums of lanes that were computed already count. offer: receives
        blocks as they become final; blocks that are complete already are offered now."""
        mine = set(lanes)
        for part in self.parts:
            for node in [n for n in part.presence if 0 < len(mine.intersection(range(*n))) < n.hi - n.lo]:
                part.drop(node)  # its sum has lanes that are another worker's now
        if len(self.parts) == 1:
            kept: set[Node] = set()
            held = {lane for node in self.parts[0].presence for lane in range(*node)}
        else:  # all parts must have the same nodes, so those that some part has begun stay
            kept = {n for part in self.parts for n in part.nodes if mine.issuperset(range(*n))}
            held = {lane for node in kept for lane in range(*node)}
        nodes = (*sorted(kept), *cover([lane for lane in lanes if lane not in held], self.n_lanes))
        for part in self.parts:
            part.begin(step, nodes, buffer, offer)
            for node in part.presence:
                if offer is not None and mine.issuperset(range(*node)):
                    part.offer_again(node)

    def lacking(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Lanes that must be computed here before exactly these can be offered to the reduction."""
        mine = set(lanes)
        whole = {lane for node in self.presence if mine.issuperset(range(*node)) for lane in range(*node)}
        return tuple(sorted(mine - whole))

    @property
    def missing(self) -> tuple[int, ...]:
        """Lanes of the step's nodes that some part has not added yet, ascending."""
        return tuple(sorted({lane for part in self.parts for lane in part.missing}))

    @property
    def presence(self) -> dict[Node, bytes]:
        """Presence of each complete node: one byte per layout entry."""
        return {
            node: merge_presence(part.presence[node] for part in self.parts)
            for node in self.parts[0].presence
            if all(node in part.presence for part in self.parts)
        }

    def offered(self, lanes: Sequence[int]) -> dict[Node, bytes]:
        """Sums that cover exactly these lanes, with their presence."""
        mine = set(lanes)
        offered = {n: p for n, p in self.presence.items() if mine.issuperset(range(*n))}
        covered = sorted(lane for n in offered for lane in range(*n))
        check(covered == sorted(mine), f"sums of lanes {covered} are held, the plan gives {sorted(mine)}")
        return offered

    def add_empty(self, lane: int) -> None:
        """Add a lane without samples, which is the identity of the sum, in every part."""
        for part in self.parts:
            if part.is_missing(lane):
                part.add_empty(lane)

    def forget(self) -> None:
        """Forget the step and release all shared memory."""
        for part in self.parts:
            part.forget()
