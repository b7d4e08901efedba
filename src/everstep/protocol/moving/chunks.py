"""Which blocks each donor is asked for next: the work queue of a copy from several donors at once. Pure.

Blocks are requested in chunks, each from a donor that is free and has them. Blocks of a lost donor, and damaged
ones, are requested from another donor that has them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from everstep.base.extents import NONE, Extents, Sizes, union

BlockDonor = TypeVar("BlockDonor", bound=Hashable)


@dataclass(frozen=True)
class Chunk:
    """Blocks of one stage, as they are asked for at once."""

    stage: int
    extents: Extents


@dataclass
class _Stage:
    of: Sizes
    left: Extents  # that nobody has been asked for, or in vain


@dataclass
class _Gives:
    stages: Mapping[int, Extents]
    asked: list[Chunk] = field(default_factory=list)
    damaged: dict[int, Extents] = field(default_factory=dict)

    def can(self, stage: int) -> Extents:
        """Blocks that the donor may be asked for."""
        return self.stages.get(stage, NONE) - self.damaged.get(stage, NONE)


class Chunks(Generic[BlockDonor]):
    """The blocks to copy, and the donors asked for them. most: blocks in a chunk."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stages: dict[int, _Stage] = {}
        self._donors: dict[BlockDonor, _Gives] = {}

    def want(self, stage: int, missing: Extents, of: Sizes) -> None:
        self._stages[stage] = _Stage(of, missing if sum(n for _, n in of) else NONE)

    def join(self, donor: BlockDonor, stages: Mapping[int, Extents]) -> None:
        self._donors[donor] = _Gives(stages)

    def next(self, donor: BlockDonor) -> Chunk | None:
        """The next blocks to request from a donor; None if it has nothing that is still needed."""
        gives = self._donors.get(donor)
        for number, stage in sorted(self._stages.items()) if gives is not None else ():
            found = (stage.left & gives.can(number)).first(self._most, stage.of)  # type: ignore[union-attr]
            if found:
                stage.left -= found
                chunk = Chunk(number, found)
                gives.asked.append(chunk)  # type: ignore[union-attr]
                return chunk
        return None

    def done(self, donor: BlockDonor, chunk: Chunk, damaged: Extents = NONE) -> None:
        """A chunk has come. Blocks of it that are damaged or missing are not requested from this donor again."""
        gives = self._donors.get(donor)
        if gives is None or chunk not in gives.asked:
            return
        gives.asked.remove(chunk)
        if damaged:
            gives.damaged[chunk.stage] = gives.damaged.get(chunk.stage, NONE) | damaged
            self._stages[chunk.stage].left |= damaged

    def lost(self, donor: BlockDonor) -> None:
        """A donor is lost: other donors are asked for its blocks."""
        gives = self._donors.pop(donor, None)
        for chunk in gives.asked if gives is not None else ():
            self._stages[chunk.stage].left |= chunk.extents

    @property
    def finished(self) -> bool:
        return not any(stage.left for stage in self._stages.values()) and not any(
            gives.asked for gives in self._donors.values()
        )

    @property
    def out_of_reach(self) -> dict[int, Extents]:
        """Blocks that none of the remaining donors has, by stage."""
        can = {k: union(gives.can(k) for gives in self._donors.values()) for k in self._stages}
        return {k: left for k, stage in self._stages.items() if (left := stage.left - can[k])}


def share(size_bytes: int, donors: int, *, most: int, least_bytes: int) -> int:
    """Number of donors worth asking at once, so that each gives enough."""
    return max(1, min(donors, most, size_bytes // max(1, least_bytes)))
