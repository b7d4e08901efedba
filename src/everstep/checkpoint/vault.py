"""The memory tier: snapshots of stages, own and for other pools, by (stage, step).

Kept are those that are complete in all stages, as the caller says, as far as the tier's rule keeps them, and whatever
is newer. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from everstep.base.config_keys import MemoryTierConfig
from everstep.base.errors import CheckpointCorrupt
from everstep.base.extents import WHOLE, Extents
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES, entries_of, sizes_of
from everstep.protocol.driver.policy import kept


class Kept(Protocol):
    """A snapshot, as `everstep.exact.snapshot.Snapshot` is one."""

    @property
    def n_blocks(self) -> int: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is whole by then."""

    def manifest(self) -> dict[str, Any]: ...

    def read_block(self, index: int) -> memoryview: ...

    def release(self) -> None:
        """Its memory is given back; it is not read any more."""


class MemoryCopy:
    """A snapshot that came from a peer: its manifest and its blocks, all verified. there: those that match it."""

    def __init__(self, manifest: Mapping[str, Any], blocks: Iterable[bytes | bytearray | memoryview]) -> None:
        """Raises: CheckpointCorrupt if the manifest does not match its digest, or no block does."""
        entries_of(manifest)
        self._manifest = dict(manifest)
        self._blocks = [memoryview(block).cast("B") for block in blocks]
        expected: Sequence[str] = manifest["blocks"]
        pairs = zip(self._blocks, expected, strict=False)
        right = [n for n, (b, digest) in enumerate(pairs) if len(b) == BLOCK_BYTES and digest_bytes(b) == digest]
        self.there = WHOLE if len(right) == len(expected) else Extents.numbered(sizes_of(manifest), right)
        if not self.there:
            raise CheckpointCorrupt(f"none of the {len(expected)} blocks of the snapshot matches its digest")

    @property
    def n_blocks(self) -> int:
        return len(self._manifest["blocks"])

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def manifest(self) -> dict[str, Any]:
        return self._manifest

    def read_block(self, index: int) -> memoryview:
        return self._blocks[index]

    def release(self) -> None:
        self._blocks = []


class Vault:
    """Holds snapshots up to the rule's limit."""

    def __init__(self, rule: MemoryTierConfig) -> None:
        self.limit_bytes = rule.limit_mb << 20
        self._rule = rule
        self._held: dict[tuple[int, int], Kept] = {}
        self._parts: dict[tuple[int, int], Extents] = {}  # what is there of those that are not whole
        self._complete: set[int] = set()
        self._lock = threading.Lock()

    def make_room(self, stage: int, n_blocks: int) -> bool:
        """Whether a snapshot of so many blocks fits, with what it would displace gone. If it does not, all complete
        ones but the newest are dropped first."""
        with self._lock:
            if self._fits(stage, n_blocks):
                return True
            gone = self._reduce({max(self._complete)} if self._complete else set())
            fits = self._fits(stage, n_blocks)
        for old in gone:
            old.release()
        return fits

    def put(self, stage: int, step: int, snapshot: Kept, there: Extents = WHOLE) -> bool:
        """Keeps a snapshot; of its stage, it displaces all but the complete ones and the newest before it (which may be
        complete in all stages before that is known here). Whether it fits: if not, it is released and nothing changes.

        there: the blocks of it that are.
        """
        with self._lock:
            fits = self._fits(stage, snapshot.n_blocks)
            gone = [snapshot]
            if fits:
                displaced = self._displaced(stage)
                gone = [self._held.pop(key) for key in list(self._held) if key in displaced or key == (stage, step)]
                self._held[stage, step] = snapshot
                self._parts.pop((stage, step), None)
                self._parts = {key: part for key, part in self._parts.items() if key in self._held}
                if not there.whole:
                    self._parts[stage, step] = there
        for old in gone:
            old.release()
        return fits

    def get(self, stage: int, step: int) -> Kept | None:
        """A snapshot that is whole, None if there is none."""
        with self._lock:
            found = self._held.get((stage, step)) if (stage, step) not in self._parts else None
        return found if found is not None and _whole(found) else None

    def part(self, stage: int, step: int) -> tuple[Kept, Extents] | None:
        """A snapshot that is not whole, and what is there of it; None if there is none."""
        with self._lock:
            found, there = self._held.get((stage, step)), self._parts.get((stage, step))
        return (found, there) if found is not None and there else None

    def parts(self) -> dict[tuple[int, int], Extents]:
        """Of every snapshot that is not whole, by (stage, step), what is there."""
        with self._lock:
            return {key: there for key, there in sorted(self._parts.items()) if there and key in self._held}

    def lose(self, stage: int, step: int, lost: Extents) -> None:
        """Blocks of a snapshot are not what they were."""
        with self._lock:
            self._parts[stage, step] = self._parts.get((stage, step), WHOLE) - lost

    def kept(self) -> tuple[tuple[int, int], ...]:
        """(stage, step) of every snapshot that is whole, ascending."""
        with self._lock:
            held = {key: snapshot for key, snapshot in self._held.items() if key not in self._parts}
        return tuple(sorted(key for key, snapshot in held.items() if _whole(snapshot)))

    def retire(self, complete_step: int, proven: int = 0) -> None:
        """All stages have a snapshot of this step: of older ones stays what the rule keeps, and the newest complete one
        up to the step `proven`."""
        with self._lock:
            gone = self._reduce(set(kept({*self._complete, complete_step}, self._rule, proven=proven)))
        for old in gone:
            old.release()

    def _reduce(self, complete: set[int]) -> list[Kept]:
        """Only these are complete; gives out what is older than the newest of them and none of them."""
        self._complete, newest = complete, max(complete, default=-1)
        return [self._held.pop(key) for key in list(self._held) if key[1] < newest and key[1] not in complete]

    def forget(self, after_step: int) -> None:
        """The job went back to this step: newer snapshots are dropped, since their steps are done again."""
        with self._lock:
            self._complete = {step for step in self._complete if step <= after_step}
            gone = [self._held.pop(key) for key in list(self._held) if key[1] > after_step]
        for old in gone:
            old.release()

    def clear(self) -> None:
        """Drops everything."""
        self.forget(-1)

    def _displaced(self, stage: int) -> set[tuple[int, int]]:
        """What goes when the stage gets a further snapshot."""
        newest = max((step for k, step in self._held if k == stage), default=-1)
        return {key for key in self._held if key[0] == stage and key[1] not in {newest, *self._complete}}

    def _fits(self, stage: int, n_blocks: int) -> bool:
        displaced = self._displaced(stage)
        staying = sum(s.n_blocks for key, s in self._held.items() if key not in displaced)
        return (staying + n_blocks) * BLOCK_BYTES <= self.limit_bytes


def _whole(snapshot: Kept) -> bool:
    try:
        return snapshot.wait(0.0)
    except Exception:  # its thread failed: it is no snapshot
        return False
