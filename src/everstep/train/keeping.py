"""Snapshots in memory, for pools that die as a whole: members keep their stages, and one of another pool does, too.

What is taken, copied, stated and let go is the driver's to say; here is the memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import EverstepError
from everstep.base.extents import NONE, WHOLE, Extents
from everstep.checkpoint.vault import Vault
from everstep.exact.digest import digest_bytes
from everstep.exact.image import entries_of, sizes_of
from everstep.exact.snapshot import Snapshot
from everstep.protocol.driver.operations import ForgetKept, InMemory, Keep, NotKept, OthersKept, RetireKept
from everstep.protocol.step_types import Key
from everstep.train.heal import Donor, Held, Layers, Offer, ReceivedOffer
from everstep.train.taking import Copier
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)


class SnapshotKeeper:
    """One worker's snapshots in memory, of own stages and for other pools."""

    def __init__(self, view: WorkerView, donor: Donor, note: Callable[[object], None]) -> None:
        """donor: gives the newest ones away. note: has the driver know something; from any thread."""
        self._view = view
        self._donor = donor
        self._note = note
        self._copier = Copier(view, lambda stage, step: ())
        self._vault = Vault(view.config.checkpoint.memory)
        self._copying: list[Snapshot] = []
        self._told: InMemory = InMemory({})

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {Keep: self.keep, RetireKept: self.retire, ForgetKept: self.forget}

    # ---- training thread

    def stand_still(self) -> None:
        """Wait until running copies of the state are complete, before it changes. One that failed is none."""
        copying, self._copying = self._copying, []
        for snapshot in copying:
            try:
                snapshot.wait()
            except Exception as error:
                log.warning("a snapshot of the state failed: %s", error)

    def keep(self, effect: Keep) -> None:
        """Take a snapshot of the state as it is, which is that of this step."""
        held: dict[int, Layers] = {}
        for stage, replica in self._view.stages.items():
            there = self._view.driver.machine.held.get(stage, WHOLE)
            snapshot = replica.state.clone_snapshot(there)
            if not self._vault.make_room(stage, snapshot.n_blocks):
                self._no_room(effect.step)
                snapshot.release()
                return
            snapshot.start()
            self._copying.append(snapshot)
            if not self._vault.put(stage, effect.step, snapshot, there):
                self._no_room(effect.step)  # a copy of another pool's has taken it meanwhile
                return
            held[stage] = [(snapshot, there)]
        self._donor.shelve(("kept", effect.step), Offer(position=Key(effect.step, 0), held=held))
        if effect.sources:
            given = effect, self._vault.times_forgotten
            threading.Thread(target=self._copy, args=given, name="everstep-keep", daemon=True).start()

    def state(self) -> None:
        """Tell the driver which snapshots are here and whole, if that has changed."""
        now = self._in_memory()
        if now != self._told:
            self._told = now
            self._note(now)

    def _in_memory(self) -> InMemory:
        return InMemory(self._vault.there(), self._donor.busy)

    def retire(self, effect: RetireKept) -> None:
        """All stages have a snapshot of this step: drop older ones that no rule keeps."""
        self._vault.retire(effect.step, effect.proven)

    def forget(self, effect: ForgetKept) -> None:
        """Steps after this one are done again."""
        self._donor.unshelve("kept")
        self._vault.forget(effect.after)

    def held(self, step: int) -> dict[int, Held]:
        """Snapshots of a step in this worker's memory, by stage, with the blocks that are there."""
        return dict(self._vault.held(step))

    def check(self, stage: int, step: int) -> None:
        """From any thread: blocks of a snapshot that have changed no longer count; report it."""
        snapshot, there = self._vault.held(step).get(stage, (None, NONE))
        if snapshot is None or not there.whole:
            return
        manifest = snapshot.manifest()
        pairs = enumerate(manifest["blocks"])
        rotten = [n for n, digest in pairs if digest_bytes(snapshot.read_block(n)) != digest]
        if rotten:
            log.warning("blocks %s of the snapshot of stage %d at step %d have changed", rotten, stage, step)
            self._vault.lose(stage, step, Extents.numbered(sizes_of(manifest), rotten))
            self._note(self._in_memory())

    def close(self) -> None:
        self.stand_still()
        self._vault.clear()

    def _copy(self, effect: Keep, forgotten: int) -> None:
        """In a thread of its own: keep what other pools have of a step, unless that is done again meanwhile."""
        done = fits = True
        try:
            for offer in self._copier.kept(effect):
                fits &= self._take(effect.step, offer, forgotten)
        except (EverstepError, OSError) as error:  # they died, or this worker ends: the next one may succeed
            done = False
            log.info("snapshots of step %d were not copied: %s", effect.step, error)
        self._note(self._in_memory())
        if self._vault.times_forgotten != forgotten:  # it would be a word about the step that is done again
            return
        if fits:
            self._note(OthersKept(effect.step, done))
        else:
            self._no_room(effect.step)

    def _take(self, step: int, offer: ReceivedOffer, forgotten: int) -> bool:
        """Put the snapshots that came, unless they are there. Whether all fit."""
        there, fits = self._vault.there(), True
        for stage, state in offer.states.items():
            entries_of(state.manifest())
            if not there.get((stage, step), NONE).whole:
                fits &= self._vault.put(stage, step, state, forgotten=forgotten)
        return fits

    def _no_room(self, step: int) -> None:
        limit_mb = self._view.config.checkpoint.memory.limit_mb
        text = f"snapshots of this worker's stages and another pool's do not fit checkpoint.memory.limit_mb={limit_mb}"
        self._note(NotKept(step, Why(Cause.CONFIG, text)))
