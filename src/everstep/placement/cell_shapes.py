"""Shapes that a worker's cell may have: as the job says, and smaller ones for a cell that cannot be had. Pure.

No shape changes a bit: what is numerics is the number of lanes and that of the shards.
"""

from __future__ import annotations

from typing import NamedTuple


class CellShape(NamedTuple):
    """Processes of a worker: seats, of which each computes lanes of its own, times the ranks that compute a lane
    together. As config keys: cell.fsdp, cell.tp."""

    fsdp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp

    def __str__(self) -> str:
        said = [f"cell.{name}={size}" for name, size in self._asdict().items() if size > 1]
        return " and ".join(said) or "one process"


def smaller_shape(shape: CellShape, shards: int) -> CellShape | None:
    """The next smaller one; None below one process. The degree goes first, to the next divisor of the shards; then
    seats go one by one."""
    if shape.tp > 1:
        return CellShape(shape.fsdp, max(tp for tp in range(1, shape.tp) if shards % tp == 0))
    return CellShape(shape.fsdp - 1, 1) if shape.fsdp > 1 else None


def shapes_of(shape: CellShape, shards: int) -> tuple[CellShape, ...]:
    """This shape and all smaller ones; no two have the same number of processes."""
    found = [shape]
    while (smaller := smaller_shape(found[-1], shards)) is not None:
        found.append(smaller)
    return tuple(found)


def shapes_over(shape: CellShape, hosts: int) -> tuple[CellShape, ...]:
    """The shape of a worker over so many hosts, and those over fewer, down to one. Each host has as many processes."""
    return tuple(CellShape(shape.fsdp // hosts * count, shape.tp) for count in range(hosts, 0, -1))
