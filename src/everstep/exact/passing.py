"""A state that passes by in blocks, and is nowhere as a whole: the digests of its entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from everstep.base.errors import check
from everstep.exact.image import BlockSource, StateEntry, block_count, pieces_of

PassedEntry = tuple[str, str, tuple[int, ...], str]
"""Name, dtype, shape and digest of an entry, as `Image.rows` gives them."""


class PassingState:
    """Takes the blocks of a state once each, in ascending order."""

    def __init__(
        self,
        entries: Sequence[StateEntry],
        own: BlockSource | None = None,
        told: Callable[[str, int, memoryview], None] = lambda name, at, data: None,
    ) -> None:
        """own: gives the blocks that do not pass. told: is given the bytes of each entry, by its name, as they pass: so
        many bytes after its begin."""
        self.entries = tuple(entries)
        self._own, self._next, self._told = own, 0, told
        self._hashes = [xxhash.xxh3_128() for _ in entries]

    def take(self, blocks: Sequence[memoryview | None]) -> None:
        """Blocks by their numbers; None for those that do not pass now."""
        for number, block in enumerate(blocks):
            if block is not None:
                self._fill_up_to(number)
                self._look(number, block)

    def digests(self) -> list[str]:
        """The digest of each entry, once all blocks have passed that are not this worker's own."""
        self._fill_up_to(block_count(self.entries))
        return [one.hexdigest() for one in self._hashes]

    def rows(self) -> list[PassedEntry]:
        """As `Image.rows`, of all planes."""
        return sorted((e.name, e.dtype, e.shape, told) for e, told in zip(self.entries, self.digests(), strict=True))

    def _fill_up_to(self, number: int) -> None:
        check(self._next <= number, f"block {number} passed twice or too late")
        while self._next < number:
            check(self._own is not None, f"block {self._next} has not passed")
            self._look(self._next, memoryview(self._own(self._next)))  # type: ignore[misc]

    def _look(self, number: int, block: memoryview) -> None:
        self._next, at = number + 1, number * len(block)
        for k, lo, hi in pieces_of(self.entries, number):
            entry, piece = self.entries[k], block[lo - at : hi - at]
            self._hashes[k].update(piece)
            self._told(entry.name, lo - entry.offset, piece)
