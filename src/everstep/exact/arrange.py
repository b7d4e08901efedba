"""Gives each tensor of a state its place, by `planes`.

Apart from what planes are, because those who read a state need not know how one is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from everstep.exact.image import BLOCK_BYTES, StateEntry
from everstep.exact.layout import ALIGN_BYTES, BLOCK_ELEMENTS, round_up
from everstep.exact.planes import ITEM_SIZES, REST, Plane, PlaneRun, extend, is_kind, span_of


@dataclass(frozen=True)
class Spot:
    """A parameter's place on the grid, in elements. unit: its number in the whole model, `start`: where that begins."""

    unit: int
    start: int
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Arranged:
    """Tensors with their places. groups: (label, how many entries) of each run of entries in blocks of their own."""

    entries: tuple[StateEntry, ...]
    tensors: list[Tensor]
    groups: tuple[tuple[int, int], ...]
    planes: tuple[Plane, ...]


@dataclass
class Arrangement:
    """Takes tensors one by one, and gives each its place in the end. labels: of the groups in `rest`, in order."""

    labels: Sequence[int]
    _planes: dict[str, list[tuple[Spot, str, Tensor]]] = field(default_factory=dict)
    _rest: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, label: int, kind: str = "", spot: Spot | None = None) -> None:
        """kind: of the plane that it belongs to if it has the shape of the parameter at `spot`. label: of its group if
        it does not."""
        plane = plane_name(kind, tensor)
        if spot is None or spot.shape != tuple(tensor.shape) or not tensor.numel() or not plane:
            self._rest.setdefault(label, []).append((name, tensor))
        else:
            self._planes.setdefault(plane, []).append((spot, name, tensor))

    def done(self) -> Arranged:
        """Everything in its place."""
        entries: list[StateEntry] = []
        tensors: list[Tensor] = []
        groups: list[tuple[int, int]] = []
        planes: list[Plane] = []
        n_blocks = 0
        for name in sorted(self._planes):
            items = sorted(self._planes[name], key=lambda item: item[0].offset)
            itemsize = items[0][2].element_size()
            runs: list[PlaneRun] = []
            for unit, members in groupby(items, key=lambda item: item[0].unit):
                placed = list(members)
                found, n_blocks = _place_unit(placed, itemsize, runs, n_blocks)
                entries += found
                tensors += [tensor for _, _, tensor in placed]
                groups.append((unit, len(placed)))
            planes.append(Plane(name, itemsize, tuple(runs)))
        first = n_blocks
        for label in self.labels:
            rest = self._rest.get(label, [])
            if rest:
                found = _place_densely(rest, n_blocks * BLOCK_BYTES)
                n_blocks = round_up(found[-1].offset + found[-1].nbytes, BLOCK_BYTES) // BLOCK_BYTES
                entries += found
                tensors += [tensor for _, tensor in rest]
                groups.append((label, len(rest)))
        if n_blocks > first:
            planes.append(Plane(REST, 1, ((0, first, n_blocks - first),)))
        return Arranged(tuple(entries), tensors, tuple(groups), tuple(planes))


def plane_name(kind: str, tensor: Tensor) -> str:
    """The plane that a tensor of a kind belongs to; empty if there is none for it."""
    if not is_kind(kind) or tensor.element_size() not in ITEM_SIZES:
        return ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return kind if dtype == "float32" else f"{kind}:{dtype}"


def _place_unit(
    items: Sequence[tuple[Spot, str, Tensor]], itemsize: int, runs: list[PlaneRun], n_blocks: int
) -> tuple[list[StateEntry], int]:
    """The entries of one unit in one plane, whose runs are added to; and the number of blocks after that."""
    entries = []
    last, shift = -1, 0  # in blocks from the unit's beginning; from there to the numbers of the state
    for spot, name, tensor in items:
        begin = (spot.offset - spot.start) * itemsize
        nbytes = tensor.numel() * itemsize
        first, end = begin // BLOCK_BYTES, (begin + nbytes - 1) // BLOCK_BYTES
        new = max(first, last + 1)
        if new > last + 1 or last < 0:
            shift = n_blocks - new
        if end >= new:
            span = span_of(itemsize)
            extend(runs, spot.start // BLOCK_ELEMENTS + new * span, n_blocks, end - new + 1, span)
            n_blocks += end - new + 1
            last = end
        entries.append(_entry(name, tensor, shift * BLOCK_BYTES + begin))
    return entries, n_blocks


def _place_densely(items: Sequence[tuple[str, Tensor]], offset: int) -> list[StateEntry]:
    entries = []
    for name, tensor in items:
        entries.append(_entry(name, tensor, offset))
        offset = round_up(offset + entries[-1].nbytes, ALIGN_BYTES)
    return entries


def _entry(name: str, tensor: Tensor, offset: int) -> StateEntry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StateEntry(name, dtype, tuple(tensor.shape), offset, tensor.numel() * tensor.element_size())
