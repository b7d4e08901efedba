"""Which snapshots of stages stay in a worker's memory, own and for other pools. Pure.

Complete ones (in all stages, as the caller says) stay as far as the tier's rule keeps them, and newer ones stay, up
to a limit. The caller has the blocks themselves, and drops those that it is told to.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.config_keys import TierConfig
from everstep.base.extents import WHOLE, Extents
from everstep.protocol.driver.policy import kept

SnapshotKey = tuple[int, int]
"""(stage, step)."""


@dataclass(frozen=True)
class _Held:
    n_blocks: int
    there: Extents


class Retention:
    """One worker's snapshots, by stage and step, and what is there of each."""

    def __init__(self, rule: TierConfig, most_blocks: int) -> None:
        """most_blocks: in all snapshots together."""
        self._rule = rule
        self._most_blocks = most_blocks
        self._held: dict[SnapshotKey, _Held] = {}
        self._complete: set[int] = set()

    @property
    def there(self) -> dict[SnapshotKey, Extents]:
        """Blocks of each snapshot, ascending; snapshots without blocks are left out."""
        return {key: held.there for key, held in sorted(self._held.items()) if held.there}

    def make_room(self, stage: int, n_blocks: int) -> tuple[bool, list[SnapshotKey]]:
        """Whether a snapshot of so many blocks fits after dropping those that it displaces; and these. If it does
        not fit, all complete ones but the newest go first."""
        gone = [] if self._fits(stage, n_blocks) else self._reduce({max(self._complete)} if self._complete else set())
        return self._fits(stage, n_blocks), gone

    def put(self, stage: int, step: int, n_blocks: int, there: Extents = WHOLE) -> tuple[bool, list[SnapshotKey]]:
        """Whether a snapshot fits, and which ones to drop. It displaces those of its stage except the complete ones
        and the newest before it (which may be complete in all stages before that is known here). there: its blocks."""
        if not self._fits(stage, n_blocks):
            return False, []
        displaced = self._displaced(stage)
        gone = [key for key in self._held if key in displaced or key == (stage, step)]
        self._drop(gone)
        self._held[stage, step] = _Held(n_blocks, there)
        return True, gone

    def lose(self, stage: int, step: int, lost: Extents) -> None:
        held = self._held.get((stage, step))
        if held is not None:
            self._held[stage, step] = _Held(held.n_blocks, held.there - lost)

    def retire(self, complete_step: int, proven: int = 0) -> list[SnapshotKey]:
        """All stages have a snapshot of this step: older ones stay as far as the rule keeps them, and so does the
        newest complete one up to the step `proven`. Returns those to drop."""
        return self._reduce(set(kept({*self._complete, complete_step}, self._rule, proven=proven)))

    def forget(self, after_step: int) -> list[SnapshotKey]:
        """The job went back to this step: drop newer snapshots, since their steps are repeated."""
        self._complete = {step for step in self._complete if step <= after_step}
        return self._drop([key for key in self._held if key[1] > after_step])

    def _reduce(self, complete: set[int]) -> list[SnapshotKey]:
        """Only these are complete: drop others that are older than the newest of them."""
        self._complete, newest = complete, max(complete, default=-1)
        return self._drop([key for key in self._held if key[1] < newest and key[1] not in complete])

    def _drop(self, gone: list[SnapshotKey]) -> list[SnapshotKey]:
        for key in gone:
            del self._held[key]
        return gone

    def _displaced(self, stage: int) -> set[SnapshotKey]:
        """Snapshots to drop when the stage gets a further one."""
        newest = max((step for k, step in self._held if k == stage), default=-1)
        return {key for key in self._held if key[0] == stage and key[1] not in {newest, *self._complete}}

    def _fits(self, stage: int, n_blocks: int) -> bool:
        displaced = self._displaced(stage)
        return (
            n_blocks + sum(held.n_blocks for key, held in self._held.items() if key not in displaced)
            <= self._most_blocks
        )
