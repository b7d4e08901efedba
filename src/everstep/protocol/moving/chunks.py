"""Who gives which blocks next: the work queue of one that copies state from several donors at once. Pure.

Blocks are asked for in chunks, each of whoever is free and has them. What a donor does not give any more, since it is
gone, and what came damaged, is asked of another one that has it.
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
        """What may be asked of it."""
        return self.stages.get(stage, NONE) - self.damaged.get(stage, NONE)


class Chunks(Generic[BlockDonor]):
    """What is to be copied, and who is asked for what. most: blocks in a chunk."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stages: dict[int, _Stage] = {}
        self._donors: dict[BlockDonor, _Gives] = {}

    def want(self, stage: int, missing: Extents, of: Sizes) -> None:
        """These blocks of a stage that has so many."""
        self._stages[stage] = _Stage(of, missing if sum(n for _, n in of) else NONE)

    def join(self, donor: BlockDonor, stages: Mapping[int, Extents]) -> None:
        """One more donor, and what it has."""
        self._donors[donor] = _Gives(stages)

    def next(self, donor: BlockDonor) -> Chunk | None:
        """What to ask a donor for now; None if there is nothing that it has, for now at least."""
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
        """A chunk has come, but for what came damaged or not at all: that is not asked of this donor again."""
        gives = self._donors.get(donor)
        if gives is None or chunk not in gives.asked:
            return
        gives.asked.remove(chunk)
        if damaged:
            gives.damaged[chunk.stage] = gives.damaged.get(chunk.stage, NONE) | damaged
            self._stages[chunk.stage].left |= damaged

    def lost(self, donor: BlockDonor) -> None:
        """A donor gives nothing any more: what was asked of it is asked of others."""
        gives = self._donors.pop(donor, None)
        for chunk in gives.asked if gives is not None else ():
            self._stages[chunk.stage].left |= chunk.extents

    @property
    def finished(self) -> bool:
        """Whether all has come."""
        return not any(stage.left for stage in self._stages.values()) and not any(
            gives.asked for gives in self._donors.values()
        )

    @property
    def out_of_reach(self) -> dict[int, Extents]:
        """What none of the donors has that are there, by stage."""
        can = {k: union(gives.can(k) for gives in self._donors.values()) for k in self._stages}
        return {k: left for k, stage in self._stages.items() if (left := stage.left - can[k])}


def share(size_bytes: int, donors: int, *, most: int, least_bytes: int) -> int:
    """How many of the donors are worth asking at once: each is to give so much at the least."""
    return max(1, min(donors, most, size_bytes // max(1, least_bytes)))
