"""Snapshots in memory, for pools that die as a whole: members keep their stages, one hands them to another pool.

What is taken, stated and let go is the driver's to say; here is the memory, and the way to and from other pools.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import CheckpointCorrupt, EverstepError
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Member
from everstep.checkpoint.vault import MemoryCopy, Vault
from everstep.exact.digest import digest_bytes
from everstep.exact.image import sizes_of
from everstep.exact.snapshot import Snapshot
from everstep.protocol.driver.operations import ForgetKept, HandedOver, InMemory, Keep, NotKept, RetireKept
from everstep.protocol.driver.records import decode_records, encode
from everstep.protocol.step_types import Record
from everstep.runtime.link.peer import PeerConnection
from everstep.train.heal import Held, receive_blocks, send_blocks
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)


class SnapshotKeeper:
    """One worker's snapshots in memory, of own stages and for other pools."""

    def __init__(self, view: WorkerView, note: Callable[[object], None]) -> None:
        """note: has the driver know something; from any thread."""
        self._view = view
        self._note = note
        self._vault = Vault(view.config.checkpoint.memory)
        self._copying: list[Snapshot] = []
        self._told: InMemory = InMemory(())

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """What it does for the driver."""
        return {Keep: self.keep, RetireKept: self.retire, ForgetKept: self.forget}

    # ---- training thread

    def stand_still(self) -> None:
        """What is being copied is copied before it changes."""
        for snapshot in self._copying:
            snapshot.wait()
        self._copying = []

    def keep(self, effect: Keep) -> None:
        """Of the state as it is, that of this step."""
        snapshots: dict[int, Snapshot] = {}
        for stage, replica in self._view.stages.items():
            snapshot = replica.state.clone_snapshot()
            if not self._vault.make_room(stage, snapshot.n_blocks):
                limit_mb = self._view.config.checkpoint.memory.limit_mb
                text = f"it does not fit checkpoint.memory.limit_mb, which is {limit_mb}"
                self._note(NotKept(effect.step, Why(Cause.CONFIG, text)))
                snapshot.release()
                return
            snapshot.start()
            self._copying.append(snapshot)
            if not self._vault.put(stage, effect.step, snapshot):
                text = "what another pool has handed over meanwhile has taken the room"
                self._note(NotKept(effect.step, Why(Cause.CONFIG, text)))
                return
            snapshots[stage] = snapshot
        if effect.to:
            wanted = [(stage, snapshots[stage], to) for stage, to in effect.to.items() if stage in snapshots]
            records = encode(effect.records)
            threading.Thread(
                target=self._send, args=(effect.step, wanted, records), name="everstep-keep", daemon=True
            ).start()

    def state(self) -> None:
        """Have the driver know what is there and whole by now, if that is something new."""
        now = self._in_memory()
        if now != self._told:
            self._told = now
            self._note(now)

    def _in_memory(self, records: Mapping[int, Mapping[int, Record]] | None = None) -> InMemory:
        return InMemory(self._vault.kept(), records or {}, self._vault.parts())

    def retire(self, effect: RetireKept) -> None:
        """All stages have a snapshot of this step: what is older may go."""
        self._vault.retire(effect.step, effect.proven)

    def forget(self, effect: ForgetKept) -> None:
        """Steps after this one are done again."""
        self._vault.forget(effect.after)

    def held(self, step: int) -> dict[int, Held]:
        """All that is kept here of a step, by stage, and the blocks that are there."""
        parts = {k: self._vault.part(k, s) for k, s in self._vault.parts() if s == step}
        whole = {k: self._vault.get(k, s) for k, s in self._vault.kept() if s == step}
        found = {k: part for k, part in parts.items() if part is not None}
        return {**found, **{k: (snapshot, WHOLE) for k, snapshot in whole.items() if snapshot is not None}}

    def check(self, stage: int, step: int) -> None:
        """From any thread: let blocks of a snapshot that are not what they were count no more, and say so."""
        snapshot = self._vault.get(stage, step)
        if snapshot is None:
            return
        manifest = snapshot.manifest()
        pairs = enumerate(manifest["blocks"])
        rotten = [n for n, digest in pairs if digest_bytes(snapshot.read_block(n)) != digest]
        if rotten:
            log.warning("blocks %s of the snapshot of stage %d at step %d have changed", rotten, stage, step)
            self._vault.lose(stage, step, Extents.numbered(sizes_of(manifest), rotten))
            self._note(self._in_memory())

    def close(self) -> None:
        """Give the memory back."""
        self.stand_still()
        self._vault.clear()

    # ---- to and from other pools

    def _send(self, number: int, wanted: Sequence[tuple[int, Snapshot, Member]], records: bytes) -> None:
        """In a thread of its own: hand over the stages that this worker leads."""
        done = True
        try:
            for stage, snapshot, to in wanted:
                self._hand_over(to, stage, number, snapshot, records)
        except (EverstepError, OSError) as error:  # it died, or this worker ends: the next one may succeed
            done = False
            log.info("the snapshot of step %d was not handed over: %s", number, error)
        self._note(HandedOver(number, done))

    def _hand_over(self, to: Member, stage: int, number: int, snapshot: Snapshot, records: bytes) -> None:
        request = {"kind": "keep", "stage": stage, "step": number, "records": records.hex()}
        with closing(self._view.link.call_peer(to.address, request)) as connection:
            connection.send_json(snapshot.manifest())
            send_blocks(connection, snapshot)
            connection.recv_json()

    def take(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """In a handler thread: keep another pool's stage."""
        stage, number, forgotten = int(request["stage"]), int(request["step"]), self._vault.times_forgotten
        manifest = connection.recv_json()
        blocks = receive_blocks(connection, manifest, lambda: None)
        try:
            copy = MemoryCopy(manifest, blocks)
        except CheckpointCorrupt as error:
            log.warning("a snapshot for keeping came damaged: %s", error)
            return
        if not copy.there.whole:
            log.warning("of a snapshot for keeping only %s came undamaged", copy.there)
        if self._vault.get(stage, number) is None and self._vault.put(stage, number, copy, copy.there, forgotten):
            self._note(self._in_memory({number: decode_records(bytes.fromhex(request["records"]))}))
        connection.send_json({"kind": "kept"})
