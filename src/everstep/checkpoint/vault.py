"""The memory tier: snapshots of stages, own and for other pools, by (stage, step).

What stays is decided by `protocol.moving.memory_retention`; here are the blocks. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from everstep.base.config_keys import MemoryTierConfig
from everstep.base.errors import CheckpointCorrupt, check
from everstep.base.extents import WHOLE, Extents
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES, Scatter, spread
from everstep.exact.state import ModelState
from everstep.exact.state_memory import HeldBlock
from everstep.protocol.moving.memory_retention import Retention, SnapshotKey


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


@dataclass(frozen=True)
class StageState:
    """A stage's state in this worker's memory, by block; None for those that are not held here.

    A block that came from others was checked then. Who reads one checks it again, since it may lie with another host
    of this worker, as a block of an own snapshot may.
    """

    made_of: dict[str, Any]
    blocks: list[HeldBlock | None]

    @property
    def n_blocks(self) -> int:
        return len(self.made_of["blocks"])

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def manifest(self) -> dict[str, Any]:
        return self.made_of

    def read_block(self, index: int) -> memoryview:
        block = self.blocks[index]
        check(block is not None, f"block {index} is not held here")
        return block() if callable(block) else block  # type: ignore[return-value]

    def release(self) -> None:
        self.blocks.clear()

    def load_into(self, state: ModelState) -> None:
        """Each block is let go once it is in its place, so that the state is not in this process twice. Raises:
        CheckpointCorrupt if it does not fit, or is not what it was."""
        state.load_with(self.made_of, self._fill)

    def _fill(self, scatter: Scatter) -> None:
        for index, block in enumerate(self.blocks):
            if block is not None:
                data = self.read_block(index)
                if callable(block) and digest_bytes(data) != self.made_of["blocks"][index]:
                    raise CheckpointCorrupt(f"block {index} is not what it was")
                spread(data, scatter.views(index))
                scatter.written(index)
                self.blocks[index] = None


class Vault:
    """Holds the snapshots that `Retention` keeps. times_forgotten: how often it was told to `forget`."""

    def __init__(self, rule: MemoryTierConfig, most_blocks: int | None = None) -> None:
        """most_blocks: in place of the rule's limit."""
        limit = (rule.limit_mb << 20) // BLOCK_BYTES if most_blocks is None else most_blocks
        self._retention = Retention(rule, limit)
        self._held: dict[SnapshotKey, Kept] = {}
        self._lock = threading.Lock()
        self.times_forgotten = 0

    def make_room(self, stage: int, n_blocks: int) -> bool:
        """As `Retention.make_room`: whether it fits."""
        with self._lock:
            fits, gone = self._retention.make_room(stage, n_blocks)
            released = self._taken(gone)
        return fits and _release(released)

    def put(self, stage: int, step: int, snapshot: Kept, there: Extents = WHOLE, forgotten: int | None = None) -> bool:
        """As `Retention.put`: whether it fits. If not, it is released and nothing changes.

        forgotten: `times_forgotten` when it began to come from others. If that has grown since, the snapshot may be of
        a step that is done again, and does not fit.
        """
        with self._lock:
            current = forgotten in (None, self.times_forgotten)
            fits, gone = self._retention.put(stage, step, snapshot.n_blocks, there) if current else (False, [])
            released = self._taken(gone)
            if fits:
                self._held[stage, step] = snapshot
        return _release(released if fits else [snapshot]) and fits

    def there(self) -> dict[SnapshotKey, Extents]:
        """Blocks that are held of each copied snapshot, by (stage, step), ascending."""
        return {key: there for key, (_, there) in self._found().items()}

    def held(self, step: int) -> dict[int, tuple[Kept, Extents]]:
        """Snapshots of a step by stage, each with the blocks that are held of it."""
        return {stage: found for (stage, at), found in self._found().items() if at == step}

    def _found(self) -> dict[SnapshotKey, tuple[Kept, Extents]]:
        with self._lock:
            found = {key: (self._held[key], there) for key, there in self._retention.there.items()}
        return {key: one for key, one in found.items() if _copied(one[0])}

    def lose(self, stage: int, step: int, lost: Extents) -> None:
        """Blocks of a snapshot have changed, and no longer count."""
        with self._lock:
            self._retention.lose(stage, step, lost)

    def retire(self, complete_step: int, proven: int = 0) -> None:
        with self._lock:
            released = self._taken(self._retention.retire(complete_step, proven))
        _release(released)

    def forget(self, after_step: int) -> None:
        with self._lock:
            self.times_forgotten += 1
            released = self._taken(self._retention.forget(after_step))
        _release(released)

    def clear(self) -> None:
        self.forget(-1)

    def _taken(self, gone: Iterable[SnapshotKey]) -> list[Kept]:
        return [self._held.pop(key) for key in gone]


def _release(snapshots: Iterable[Kept]) -> bool:
    """Outside the lock, since a snapshot may still be copied."""
    for snapshot in snapshots:
        snapshot.release()
    return True


def _copied(snapshot: Kept) -> bool:
    try:
        return snapshot.wait(0.0)
    except Exception:  # its thread failed: it is no snapshot
        return False
