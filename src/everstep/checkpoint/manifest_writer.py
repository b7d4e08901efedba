"""The job's leader: it waits for the parts of a checkpoint, writes the manifest, moves the pointers, tidies up.

One thread does the work; threads that bring reports do not wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import xxhash

from everstep.base.cause import UNSAID, Cause, Why
from everstep.base.config_keys import TierConfig
from everstep.base.errors import (
    BlobExists,
    BlobMissing,
    CheckpointCorrupt,
    ConfigError,
    EverstepError,
    StoreError,
    cause_of,
)
from everstep.checkpoint.hosts_store import HostsStore
from everstep.checkpoint.manifest import JobIdentity, Manifest
from everstep.checkpoint.manifest_assembly import Assembly, assemble, unknown_entries
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.part import Base, LiveState, PartJob, PartReport, PartWriter
from everstep.checkpoint.pointers import MOST_BYTES, read_sealed
from everstep.checkpoint.reader import Checkpoint, open_checkpoint, read_manifest, set_aside, verify_blocks
from everstep.checkpoint.retention import Shelf
from everstep.checkpoint.signing import Signer
from everstep.checkpoint.store import DirectoryStore
from everstep.exact.image import BLOCK_BYTES, sealed
from everstep.exact.state import ModelState
from everstep.exact.topology import same_state
from everstep.protocol.driver.policy import Due

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriteOutcome:
    """How a checkpoint ended. failed: why there is none; None if there is. stall_s: the longest that a worker stood
    still. cost_s: the same, and the processor time of its writer. why: it was taken. differs: workers hold different
    states of the step."""

    step: int
    failed: Why | None = None
    manifest: Manifest | None = None
    duration_s: float = 0.0
    stall_s: float = 0.0
    cost_s: float = 0.0
    why: Why = UNSAID
    differs: bool = False


@dataclass(frozen=True)
class Extent:
    """The checkpoint to be saved, as all workers know it from the records, and the additions of the job's leader.

    due: the tiers that take it, and why. records: of the step's decision. application: further opaque parts by name;
    late: parts that exist only once the state is written, requested in the thread that writes the manifest.
    """

    step: int
    due: Due
    records: bytes = b""
    application: Mapping[str, bytes] = field(default_factory=dict)
    metrics: Mapping[str, float] | None = None
    late: Callable[[], Mapping[str, bytes]] = dict

    @property
    def why(self) -> Why:
        return Why(self.due.cause, self.due.reason)


class _Expected(NamedTuple):
    """A checkpoint that began."""

    extent: Extent
    assembly: Assembly
    began: float
    discards: int
    """How often states had been discarded before."""


class ManifestWriter:
    """Collects reports of the step that was `expect`ed last and completes it. Thread-safe."""

    def __init__(
        self,
        store: DirectoryStore,
        identity: JobIdentity,
        rule: TierConfig,
        done: Callable[[WriteOutcome], None],
        best_metric: str | None = None,
        best_mode: str = "max",
        held: Callable[[], Collection[int]] = tuple,
        proven: Callable[[int], int] = lambda step: 0,
        collected: Callable[[int], None] = lambda step: None,
        signer: Signer | None = None,
        copies: int = 1,
    ) -> None:
        """done: called from the thread for every step that was expected, once. held: steps that must stay for now.
        proven: after so many steps, the newest one whose state is known to be right. collected: called before that, by
        the thread that brings the last report or gives the step up. signer: signs the manifests. copies: hosts that
        keep each part, where they see different directories."""
        self._proven = proven
        self._store, self._identity, self._rule, self._done = store, identity, rule, done
        self._metric, self._mode, self._held = best_metric, best_mode, held
        self._collected, self._signer, self._copies = collected, signer, copies
        self._lock = threading.Condition()
        self._current: _Expected | None = None
        self._early: list[PartReport] = []
        self._work: queue.SimpleQueue[tuple[_Expected, Why | None] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._sweeping = False
        self._shelf: Shelf | None = None
        self._discarded: list[int] = []  # the last sound step, each time
        self._thread = threading.Thread(target=self._run, name="everstep-manifest", daemon=True)
        self._thread.start()

    def expect(
        self, extent: Extent, generation: int, stages: int = 1, writers: Collection[tuple[int, int]] = ()
    ) -> None:
        """A checkpoint begins. One that is still incomplete is given up. stages: how many there are. writers: as for
        `Assembly`."""
        self.abandon(Why(Cause.BUSY, "the next checkpoint began"))
        with self._lock:
            assembly = Assembly(extent.step, generation, stages, writers)
            self._current = _Expected(extent, assembly, time.monotonic(), len(self._discarded))
            self._unfinished += 1
            early, self._early = self._early, []
        for report in early:
            self.add(report)

    def add(self, report: PartReport) -> None:
        """A part is there, or will never be. Of another step or generation: of no effect."""
        with self._lock:
            assembly = self._current.assembly if self._current is not None else None
            if assembly is None or (report.step, report.generation) > (assembly.step, assembly.generation):
                self._early = [*self._early[-63:], report]  # its worker began before the job's leader did
            elif assembly.add(report) and (assembly.failed is not None or not assembly.missing()):
                self._hand_over(assembly.failed)

    def abandon(self, why: Why) -> None:
        """Give up incomplete checkpoints: a part will not come."""
        with self._lock:
            if self._current is not None:
                missing = self._current.assembly.missing()
                self._hand_over(Why(why.cause, f"{why.reason} before it was whole (missing: {missing})"))

    def drain(self, timeout_s: float) -> bool:
        """Until every checkpoint that began is durable or has failed; whether that came in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._unfinished == 0, timeout_s)

    def forget(self, sound: int, timeout_s: float) -> None:
        """Checkpoints of later steps are about to be discarded: wait this long for a sweep to end. Those that began
        before are not completed, however late they would be."""
        with self._lock:
            self._discarded.append(sound)
            self._lock.wait_for(lambda: not self._sweeping, timeout_s)
        self._shelf = None

    def close(self) -> None:
        """End the thread after its queued work."""
        self.abandon(Why(Cause.REGROUPED, "the worker that writes its manifest ends"))
        self._work.put(None)
        self._thread.join(timeout=10.0)

    def _hand_over(self, failed: Why | None) -> None:
        current, self._current = self._current, None
        if current is not None:
            self._work.put((current, failed))
            self._collected(current.extent.step)

    # ---- the thread

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            expected, failed = item
            extent, assembly = expected.extent, expected.assembly
            reports = assembly.reports.values()
            stall_s = max((r.stall_s for r in reports), default=0.0)
            cost_s = max((r.stall_s + r.cpu_s for r in reports), default=0.0)
            manifest, differs, tried = None, "", False
            try:
                differs = assembly.differing() if failed is None else ""
                failed = Why(Cause.CORRUPT, differs) if differs else failed
                if failed is None:
                    tried = True
                    manifest = self._complete(expected)
            except Exception as fault:  # whatever it is: training goes on without this checkpoint
                failed = Why(cause_of(fault), str(fault) or type(fault).__name__)
            if manifest is None:
                _attempt(self._withdraw, assembly, tried)
            else:
                _attempt(self._point, manifest)
            took = time.monotonic() - expected.began
            why, differing = extent.why, bool(differs)
            _attempt(self._done, WriteOutcome(extent.step, failed, manifest, took, stall_s, cost_s, why, differing))
            with self._lock:
                self._unfinished -= 1
                self._sweeping = manifest is not None
                self._lock.notify_all()
            if manifest is not None:
                _attempt(self._sweep, manifest)
                with self._lock:
                    self._sweeping = False
                    self._lock.notify_all()

    def _complete(self, expected: _Expected) -> Manifest:
        assembly, extent = expected.assembly, expected.extent
        manifest = assemble(assembly, self._older, _facts(self._identity, extent))
        if isinstance(self._store, HostsStore):
            manifest = replace(manifest, hosts=self._store.spread(manifest.files, self._copies))
        self._check_files(manifest)
        manifest = self._with_digests(manifest)
        data = manifest.encode()
        if self._signer is not None:
            data = self._signer.sign(manifest, data, assembly.sums())
        if len(data) > MOST_BYTES:
            raise StoreError(f"its manifest has {len(data)} bytes: at most {MOST_BYTES} can be read again")
        try:
            self._publish(manifest, data, expected)
        except BlobExists:
            return self._existing(manifest, data, expected)
        return manifest

    def _publish(self, manifest: Manifest, data: bytes, expected: _Expected) -> None:
        """Write the manifest. Raises: BlobExists. CheckpointCorrupt if its state was discarded since the checkpoint
        began, or is while this writes: then `discard_after` may have looked too early to see it."""

        def is_wrong() -> bool:
            return any(sound < manifest.step for sound in self._discarded[expected.discards :])

        if not is_wrong():
            self._store.write(manifest_name(manifest.step), [data], len(data), if_absent=True)
            if not is_wrong():
                return
            with suppress(BlobMissing, CheckpointCorrupt):  # there may be another leader's by now
                if read_sealed(self._store, manifest_name(manifest.step)) == data:
                    self._set_aside(manifest.step)
        raise CheckpointCorrupt(f"the state of step {manifest.step} was discarded")

    def _with_digests(self, manifest: Manifest) -> Manifest:
        """The manifest with the digests of entries of which no writer held all: they are read from the parts."""
        lacking = unknown_entries(manifest)
        if not lacking:
            return manifest
        checkpoint, digests = Checkpoint(self._store, manifest), list(manifest.state["digests"])
        for k in lacking:
            entry, made = manifest.entries[k], xxhash.xxh3_128()
            for index, block in zip(entry.blocks, checkpoint.read_blocks(entry.blocks), strict=True):
                at = index * BLOCK_BYTES
                made.update(block[max(entry.offset - at, 0) : min(entry.stop - at, BLOCK_BYTES)])
            digests[k] = made.hexdigest()
        body = {key: value for key, value in manifest.state.items() if key != "digest"}
        return replace(manifest, state=sealed({**body, "digests": digests}))

    def _existing(self, manifest: Manifest, data: bytes, expected: _Expected) -> Manifest:
        """The step was saved before: an equal checkpoint stays, and a damaged one is set aside."""
        try:
            found = open_checkpoint(self._store, manifest.step)
            found.check_files()
            same = same_state(found.manifest.state, manifest.state)
            if same and expected.assembly.files():  # they were written again: a worker may have been unable to read it
                verify_blocks(found)
        except CheckpointCorrupt:
            self._set_aside(manifest.step)
        except StoreError:  # that may pass: the new one has to be better
            verify_blocks(Checkpoint(self._store, manifest))
            self._set_aside(manifest.step)
        else:
            if not same:
                raise StoreError(f"there is another checkpoint of step {manifest.step}, with other contents")
            _attempt(self._withdraw, expected.assembly, True)
            return open_checkpoint(self._store, manifest.step).manifest  # unless it was set aside meanwhile
        verify_blocks(Checkpoint(self._store, manifest))  # it may refer to the same blocks
        self._publish(manifest, data, expected)
        return manifest

    def _set_aside(self, step: int) -> None:
        set_aside(self._store, step)
        self._shelf = None

    def _check_files(self, manifest: Manifest) -> None:
        """Raises: StoreError if a part that was reported is not here."""
        for file in manifest.files:
            try:
                size = self._store.size(file.name)
            except BlobMissing:
                raise StoreError(
                    f"{file.name} is not in {self._store.url}, nor on another host that has joined: set "
                    "checkpoint.shared=no if hosts do not share that directory"
                ) from None
            if size != file.size:
                raise StoreError(f"{file.name} has {size} bytes, expected {file.size}")

    def _older(self, step: int | None) -> Manifest | None:
        with suppress(EverstepError):
            shelf = self._the_shelf()
            if step is None and shelf.steps:
                step = shelf.steps[-1]
            if step is not None:
                manifest, text = read_manifest(self._store, step)
                return manifest if self._signer is None or self._signer.knows(manifest, text) else None
        return None

    def _withdraw(self, assembly: Assembly, tried: bool) -> None:
        """Delete the parts of a checkpoint that will never be. tried: to write its manifest."""
        if tried:
            self._shelf = None  # what is there is not known
        _delete_parts(self._store, assembly, tried)

    def _the_shelf(self) -> Shelf:
        if self._shelf is None or self._shelf.broken:
            self._shelf = Shelf.read(self._store, self._metric)
        return self._shelf

    def _point(self, manifest: Manifest) -> None:
        shelf = self._the_shelf()
        shelf.add(manifest)
        shelf.point(self._mode)

    def _sweep(self, manifest: Manifest) -> None:
        """Delete files that need not be kept; no thread waits for that."""
        shelf = self._the_shelf()
        if not shelf.steps:
            return  # set aside meanwhile
        sound = self._proven(shelf.steps[-1])
        shelf.retire(shelf.unkept(self._rule, self._mode, held=self._held(), proven=sound))
        with self._lock:
            busy = {self._current.extent.step} if self._current is not None else set()
        shelf.sweep(busy | {manifest.step}, self._identity.job)


def _attempt(work: Callable[..., None], *given: Any) -> None:
    """What fails, fails: the next checkpoint is made all the same."""
    try:
        work(*given)
    except EverstepError:
        pass  # the next one tries again
    except Exception:
        log.exception("after a checkpoint")


def _delete_parts(store: DirectoryStore, assembly: Assembly, tried: bool = True) -> None:
    """Delete the parts of a checkpoint that will never be. tried: its manifest may be on some host in spite of all:
    what the manifest of that step names stays."""
    names = set(assembly.files())
    if tried:
        with suppress(BlobMissing):
            names -= {file.name for file in read_manifest(store, assembly.step)[0].files}
    for name in names:
        with suppress(EverstepError):
            store.delete(name)


def _facts(identity: JobIdentity, extent: Extent) -> dict[str, Any]:
    """Facts in a manifest that no part knows."""
    return {
        "identity": identity.to_dict(),
        "created_unix_ns": time.time_ns(),
        "reason": extent.due.reason,
        "records": extent.records,
        "application": {**extent.application, **extent.late()},
        "metrics": extent.metrics or {},
        "numerics": identity.kernels,
    }


# ---- of a state that one process holds, while nobody trains


def write_whole(
    store: DirectoryStore,
    state: ModelState,
    identity: JobIdentity,
    *,
    step: int = 0,
    reason: str = "",
    application: Mapping[str, bytes] | None = None,
    signer: Signer | None = None,
) -> Manifest:
    """Writes the state as the checkpoint of a step; durable when it returns. signer: as for `ManifestWriter`.

    Raises: ConfigError if the store has that step already. StoreError.
    """
    live = LiveState(state)
    reports: list[PartReport] = []
    job = PartJob(
        PartReport(step, 0, 0, 0, ((0, live.n_blocks),)),
        True,
        0,
        metadata={"job": identity.job},
        signed=signer is not None,
    )
    writer = PartWriter(store, job, live, Base, reports.append)
    writer.run()
    assembly = Assembly(step, 0, 1)
    for report in reports:
        assembly.add(report)
    failed = assembly.failed
    if failed is not None or not reports:
        raise StoreError(f"cannot write {store.url}: {failed.reason if failed else 'nothing was written'}")
    extent = Extent(step, Due(reason=reason), application=application or {})
    manifest = assemble(assembly, lambda _: None, _facts(identity, extent))
    text = manifest.encode()
    if signer is not None:
        text = signer.sign(manifest, text, assembly.sums())
    try:
        store.write(manifest_name(step), [text], len(text), if_absent=True)
    except BlobExists:
        _delete_parts(store, assembly)
        raise ConfigError(f"{store.url} has a checkpoint of step {step} already: choose another directory") from None
    return manifest
