"""Snapshots in memory, for pools that die as a whole: members keep their stages, one hands them to another pool.

Taken right after an update, by all members alike, when the main's record of the step says so. A snapshot is stated as
kept only once its step has been released; the newest that is complete in all stages stays until a newer one is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import CheckpointCorrupt, EverstepError
from everstep.base.plan import Member, Plan
from everstep.checkpoint.vault import Copy, Kept, Vault
from everstep.exact.snapshot import Snapshot
from everstep.protocol.driver.records import decode_records, encode_records
from everstep.protocol.step_types import Record, SnapshotsKept
from everstep.runtime.peer import PeerConnection, peer_connect
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptStep:
    """What is in memory of one step: snapshots by stage, and the records of its decision."""

    snapshots: Mapping[int, Kept]
    records: Mapping[int, Record]


class Keeper:
    """One worker's snapshots."""

    def __init__(
        self, view: WorkerView, skipped: Callable[[int, Why, bool], None], state: Callable[[SnapshotsKept], None]
    ) -> None:
        """skipped: told the step that was not kept, why, and whether that is new. state: told what is kept of steps
        that all have gone beyond."""
        self._view = view
        self._told_skipped = skipped
        self._state = state
        self._released = 0
        self._vault = Vault(view.config.checkpoint.memory)
        self._skipping = False
        self._records: dict[int, bytes] = {}
        self._copying: list[Snapshot] = []
        self._begun = 0
        self._sending: threading.Thread | None = None
        self._sent = 0
        self._stated: tuple[tuple[int, int], ...] = ()

    # ---- training thread

    def before_update(self) -> None:
        """What is being copied is copied before it changes."""
        for snapshot in self._copying:
            snapshot.wait()
        self._copying = []

    def take_own(self, number: int, records: Mapping[int, Record]) -> None:
        """Of the state as it is, that of this step."""
        plan = self._view.plan
        if plan is None:
            return
        if self._busy():
            self._skip(number, Why(Cause.BUSY, f"that of step {self._begun} is still on its way to another worker"))
            return
        snapshots: dict[int, Snapshot] = {}
        for stage, replica in self._view.stages.items():
            snapshot = replica.state.clone_snapshot()
            if not self._vault.make_room(stage, snapshot.n_blocks):
                limit_mb = self._view.config.checkpoint.memory.limit_mb
                text = f"it does not fit checkpoint.memory.limit_mb, which is {limit_mb}"
                self._skip(number, Why(Cause.CONFIG, text))
                snapshot.release()
                return
            snapshot.start()
            self._copying.append(snapshot)
            if not self._vault.put(stage, number, snapshot):
                return  # what a peer has handed over meanwhile has taken the room
            snapshots[stage] = snapshot
        self._begun, self._skipping = number, False
        self._records[number] = encode_records(records)
        self._send(plan, number, snapshots)

    def _skip(self, number: int, why: Why) -> None:
        self._told_skipped(number, why, not self._skipping)
        self._skipping = True

    def _busy(self) -> bool:
        return self._sending is not None and self._sending.is_alive()

    @property
    def complete(self) -> int:
        """The newest step of which all that this worker is to do has been done."""
        return self._begun if self._sent == self._begun and not self._busy() else 0

    def agreed(self, step: int) -> None:
        """All members have done all for this step: what is older may go."""
        if step:
            self._vault.retire(step, self._view.driver.proven(step))
            there = {n for _, n in self._vault.kept()}
            self._records = {n: r for n, r in self._records.items() if n >= step or n in there}

    def released(self, number: int) -> None:
        """State what is kept of steps that all have gone beyond."""
        self._released = max(self._released, number)
        if not self._records and not self._stated:
            return
        stated = tuple(key for key in self._vault.kept() if key[1] <= number and key[1] in self._records)
        if stated != self._stated:
            self._stated = stated
            self._state(SnapshotsKept(snapshots=stated))

    def went_back(self, number: int) -> None:
        """Steps after this one are done again."""
        self._vault.forget(number)
        self._records = {n: r for n, r in self._records.items() if n <= number}
        self._begun = self._sent = min(self._begun, number)
        self.released(self._released)

    def at(self, step: int) -> KeptStep | None:
        """All that is kept here of a step."""
        found = {k: self._vault.get(k, s) for k, s in self._vault.kept() if s == step}
        snapshots = {k: snapshot for k, snapshot in found.items() if snapshot is not None}
        if not snapshots or step not in self._records:
            return None
        return KeptStep(snapshots, decode_records(self._records[step]))

    def close(self) -> None:
        """Give the memory back."""
        self.before_update()
        self._vault.clear()

    # ---- to and from other pools

    def _send(self, plan: Plan, number: int, snapshots: Mapping[int, Snapshot]) -> None:
        """In the background: hand over the stages that this worker leads."""
        me = self._view.me
        mine = [(k, s, target(plan, k)) for k, s in snapshots.items() if plan.pool(k)[0].worker_id == me]
        wanted = [(k, snapshot, to) for k, snapshot, to in mine if to is not None]
        records = self._records[number]
        if not wanted:
            self._sent = number
            return

        def send() -> None:
            try:
                for stage, snapshot, to in wanted:
                    self._hand_over(to, stage, number, snapshot, records)
                self._sent = number
            except (EverstepError, OSError) as error:  # it died, or this worker ends: the next one may succeed
                log.info("the snapshot of step %d was not handed over: %s", number, error)

        self._sending = threading.Thread(target=send, name="everstep-keep", daemon=True)
        self._sending.start()

    def _hand_over(self, to: Member, stage: int, number: int, snapshot: Snapshot, records: bytes) -> None:
        manifest = snapshot.manifest()
        request = {"kind": "keep", "stage": stage, "step": number, "records": records.hex()}
        connection = peer_connect(to.address, self._view.link.token, request)
        try:
            connection.send_json(manifest)
            for index in range(snapshot.n_blocks):
                connection.send_bytes([snapshot.read_block(index)])
            connection.recv_json()
        finally:
            connection.close()

    def take(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """In a handler thread: keep another pool's stage."""
        stage, number = int(request["stage"]), int(request["step"])
        manifest = connection.recv_json()
        blocks = []
        for _ in manifest["blocks"]:
            block = memoryview(bytearray(int(manifest["block_bytes"])))
            connection.recv_into(block)
            blocks.append(block)
        try:
            copy = Copy(manifest, blocks)
        except CheckpointCorrupt as error:
            log.warning("a snapshot for keeping came damaged: %s", error)
            return
        if self._vault.get(stage, number) is None and self._vault.put(stage, number, copy):
            self._records.setdefault(number, bytes.fromhex(request["records"]))
        connection.send_json({"kind": "kept"})


def target(plan: Plan, stage: int) -> Member | None:
    """Who keeps a stage for its pool: the first member of the pools that follow who is on another host than all of the
    pool, else the first outside it; None if nobody is outside."""
    inside = {seat.worker_id for seat in plan.pool(stage)}
    hosts = {plan.member(worker_id).host for worker_id in inside}
    following = [seat.worker_id for k in range(1, plan.stages) for seat in plan.pool((stage + k) % plan.stages)]
    outside = [plan.member(worker_id) for worker_id in following if worker_id not in inside]
    return next((member for member in outside if member.host not in hosts), outside[0] if outside else None)
