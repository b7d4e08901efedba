"""The checkpoints of a job, as one worker sees them: every worker writes its parts, the job's leader completes them.

The only object of this package that a session needs. No tier ever stops training: a slow, dead or full one is
reported as an event, and the snapshot is skipped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig
from everstep.base.errors import CheckpointCorrupt, ConfigError, EverstepError, PartsAway, StoreError, cause_of
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Plan
from everstep.checkpoint.hosts_store import HostsStore
from everstep.checkpoint.keys import read_public_key
from everstep.checkpoint.manifest import JobIdentity, Manifest, decode, refuse_foreign, refuse_kernels
from everstep.checkpoint.manifest_writer import Extent, ManifestWriter, WriteOutcome
from everstep.checkpoint.names import DAMAGED, manifest_name, step_name
from everstep.checkpoint.part import (
    LONG_PATIENCE_S,
    Base,
    LiveState,
    PartJob,
    PartReport,
    PartWriter,
    Runner,
    decode_report,
    encode_report,
)
from everstep.checkpoint.pointers import read_sealed
from everstep.checkpoint.reader import (
    Checkpoint,
    manifests_of,
    names_there,
    newest_complete,
    open_checkpoint,
    set_aside_and_say,
    steps_in,
)
from everstep.checkpoint.repair import Copy, Elsewhere, Lost, Repairer, Source
from everstep.checkpoint.retention import discard_after
from everstep.checkpoint.signing import Signer, sums_signed
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.transfer import Uploader, open_object_tier, open_uploader
from everstep.exact.image import BLOCK_BYTES
from everstep.exact.state import ModelState
from everstep.placement.shards import share, writers
from everstep.protocol.settling import less

log = logging.getLogger(__name__)

OnEvent = Callable[[str, dict[str, Any]], None]
"""Is told the kind (`checkpoint_completed`, `fallback`, `warning`, ...) and the fields of an event."""

_DRAIN_S = 10.0
_MB = 1 << 20


class Checkpointer:
    """One worker's checkpoints. The training thread calls `start`, `before_update` and `finish`; any thread may call
    the rest.

    The job's leader is that of stage 0.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        identity: JobIdentity,
        worker_id: int,
        *,
        send: Callable[[bytes], None],
        events: OnEvent = lambda kind, fields: None,
        collected: Callable[[int], None] = lambda step: None,
        ended: Callable[[WriteOutcome], None] = lambda outcome: None,
        proven: Callable[[int], int] = lambda step: 0,
        sources: Sequence[Source] = (),
        opened: Callable[[Path], DirectoryStore] = DirectoryStore,
        inexact: bool = False,
    ) -> None:
        """directory: `DIR/checkpoints`, unless the config names another. opened: makes the store of it. send: a report
        to the job's leader, where this worker is not the job's leader; called from a thread, may raise. collected: at
        the job's leader, told of a step that no part is waited for any more; ended: what became of it; both from any
        thread. proven: after so many steps, the newest one whose state is known to be right; the newest checkpoint up
        to that is always kept. sources: of damaged blocks, before other checkpoints on disk and in the object store are
        looked through. inexact: what other kernels have computed is read, too."""
        self.store = opened(Path(config.disk.path or directory))
        self.identity, self.worker_id = identity, worker_id
        self._config, self._send, self._events, self._proven = config, send, events, proven
        self._collected, self._over = collected, ended
        self._sources, self._inexact = tuple(sources), inexact
        self._is_main = False
        self._parts: list[PartWriter] = []
        self._runner = Runner()
        self._lock = threading.Lock()
        self._manifests: ManifestWriter | None = None
        self._uploader: Uploader | None = None
        self._to_upload: set[int] = set()
        self._base = Base()
        self._sound: set[int] = set()
        self._passed: set[tuple[int, str]] = set()  # steps that cannot be used, and why, as they were told
        self._refused: dict[tuple[int, int], tuple[bool, str]] = {}  # whether damaged, why; by step, time of writing
        self.unreadable: str | None = None
        """Why the last look for checkpoints found none, though some may be there; None if it could read all."""
        self.skipped: dict[str, int] = {"memory": 0, "disk": 0, "object": 0}

    # ---- every worker: saving

    def start(
        self, extent: Extent, states: Mapping[int, ModelState], plan: Plan, held: Mapping[int, Extents] = {}
    ) -> float:
        """At the boundary after a step: begins to save this worker's share of the state; the caller goes on at once.

        states: those that this worker holds, by stage. held: which blocks of them, where not all: a part of less than
        its share fails. Every seated worker calls it with the same step and tiers. Returns the seconds that this took.
        """
        began = time.monotonic()
        self._is_main = plan.leader(0) == self.worker_id
        if "disk" in extent.due.tiers:
            if self._is_main:
                self._expect(extent, plan)
            for stage, state in states.items():
                self._start_part(extent, stage, state, plan, held.get(stage, WHOLE), began)
        return time.monotonic() - began

    def before_update(self, tick: Callable[[], None] | None = None) -> float:
        """Before the state changes: copy blocks that are not written yet, or give the part up. Returns the seconds.
        tick: called while this waits; with it, right after an update, a part that memory has no room for has time to
        be written."""
        if not self._parts:
            return 0.0
        began = time.monotonic()
        for part in self._parts:
            part.before_update(*(() if tick is None else (LONG_PATIENCE_S, tick)))
        self._parts = [part for part in self._parts if not part.ended]
        return time.monotonic() - began

    def _start_part(
        self, extent: Extent, stage: int, state: ModelState, plan: Plan, held: Extents, began: float
    ) -> None:
        pool = [seat.worker_id for seat in plan.pool(stage)]
        report = PartReport(extent.step, plan.generation, stage, self.worker_id)
        self._parts = [part for part in self._parts if not part.ended]
        if any(part.step != extent.step for part in self._parts):
            text = "its part of an earlier checkpoint is still being written"
            self._report(report.failed(Why(Cause.BUSY, text)))
            return
        try:
            live = LiveState(state)
        except (EverstepError, MemoryError, RuntimeError) as error:
            self._report(report.failed(Why(cause_of(error), str(error))))
            return
        of = live.outline.sizes
        mine = share(plan.shard(self.worker_id, stage), of)
        if lacking := less(held, mine):
            self._report(report.failed(Why(Cause.REGROUPED, f"worker {self.worker_id} lacks a part of it ({lacking})")))
            return
        runs = writers(plan, stage, of)[self.worker_id]
        job = PartJob(
            replace(report, runs=runs, stall_s=time.monotonic() - began),
            self.worker_id == min(pool),
            None if self._config.staging_mb is None else self._config.staging_mb * _MB,
            0.5 / sum(member.host == plan.member(self.worker_id).host for member in plan.members),
            {"job": self.identity.job, "task": self.identity.task, "worker": str(self.worker_id)},
            0 if plan.member(self.worker_id).limbs else None,
            len(pool) > 1,
            self._config.sign_key is not None,
            mine,
        )
        part = PartWriter(self.store, job, live, self._find_base, self._report)
        self._parts.append(part)
        self._runner.run(part.run)

    def _find_base(self) -> Base:
        """The newest checkpoint, to write only what changed since; nothing if it is time for a full one, or that one
        could not be read, or this job signs, and its key has not signed it."""
        with suppress(EverstepError, IndexError):
            step = steps_in(self.store)[-1]
            if step != self._base.step:
                name = manifest_name(step)
                text, key = read_sealed(self.store, name), self._config.sign_key
                manifest = decode(text, name)
                known = key is None or sums_signed(read_public_key(key), manifest, text) is not None
                known = known and step not in {passed for passed, _ in tuple(self._passed)}
                self._base = Base(step, manifest.depth, frozenset(manifest.state["blocks"] if known else ()))
            return self._base if self._base.depth + 1 < self._config.disk.full_every else Base()
        return Base()

    def _report(self, report: PartReport) -> None:
        if self._is_main:
            self._writer().add(report)
            return
        try:
            self._send(encode_report(report))
        except (EverstepError, OSError) as error:
            log.warning("the report of a part of step %d did not reach the job's leader: %s", report.step, error)

    # ---- the job's leader: completing

    def report(self, data: bytes) -> None:
        """A report of another worker, as it was given to its `send`."""
        self._writer().add(decode_report(data))

    def abandon(self, why: Why, plan: Plan | None = None) -> None:
        """A checkpoint of which a part is missing will not be completed. plan: of the generation that has begun."""
        if plan is not None:
            self._is_main = plan.leader(0) == self.worker_id
        if self._manifests is not None:
            self._manifests.abandon(why)

    def invalidate(self, sound: int, *, with_objects: bool) -> None:
        """The states of steps after `sound` were wrong: their checkpoints are discarded, on disk and (with_objects, in
        the background) in the object store; none that is under way is completed."""
        if self._manifests is not None:
            self._manifests.abandon(Why(Cause.CORRUPT, "its state was discarded"))
            self._manifests.drain(_DRAIN_S)
            self._manifests.forget(sound, _DRAIN_S)
        self._sound = {step for step in self._sound if step <= sound}
        self._base = Base()
        try:
            discard_after(self.store, sound)
        except EverstepError as error:
            reason = f"checkpoints after step {sound} hold wrong states, and not all can be set aside: {error}"
            self._refuse_after(sound, reason)
            self._events("warning", {"step": sound, "cause": error.cause, "reason": reason})
        if with_objects and self._config.object.url is not None:
            with suppress(EverstepError):
                self._the_uploader().invalidate(sound)

    def _refuse_after(self, sound: int, reason: str) -> None:
        """Those of later steps that are there now count for nothing in this life."""
        with suppress(EverstepError):
            for step in (step for step in steps_in(self.store, names_there(self.store, "step-")) if step > sound):
                with suppress(EverstepError):
                    self._refused[step, open_checkpoint(self.store, step).manifest.created_unix_ns] = True, reason

    def _expect(self, extent: Extent, plan: Plan) -> None:
        if "object" in extent.due.tiers:
            self._to_upload.add(extent.step)
        writers = {(seat.stage, seat.worker_id) for seat in plan.seats}
        self._writer().expect(extent, plan.generation, plan.stages, writers)

    def _writer(self) -> ManifestWriter:
        with self._lock:
            if self._manifests is None:
                config = self._config
                self._manifests = ManifestWriter(
                    self.store,
                    self.identity,
                    config.disk,
                    self._ended,
                    config.best_metric,
                    config.best_mode,
                    lambda: self._uploader.holds if self._uploader is not None else (),
                    self._proven,
                    self._collected,
                    Signer(config.sign_key) if config.sign_key is not None else None,
                    config.copies,
                )
            return self._manifests

    def _ended(self, outcome: WriteOutcome) -> None:
        """In the manifest writer's thread."""
        if outcome.manifest is None:
            self.skip("disk", outcome.step, outcome.failed or Why(Cause.UNKNOWN, "it was not completed"))
            self._to_upload.discard(outcome.step)
            self._over(outcome)
            return
        fields = {
            "tier": "disk",
            "step": outcome.step,
            "duration_s": outcome.duration_s,
            "size_bytes": outcome.manifest.size_bytes,
            "written_bytes": outcome.manifest.written_bytes,
            "stall_s": outcome.stall_s,
            "cause": outcome.why.cause,
            "reason": outcome.why.reason,
            "skipped": self.skipped["disk"],
        }
        self._events("checkpoint_completed", fields)
        self._over(outcome)
        if outcome.step in self._to_upload:
            self._to_upload.discard(outcome.step)
            try:
                self._the_uploader().offer(outcome.step)
            except EverstepError as error:
                self.skip("object", outcome.step, Why(cause_of(error), str(error)))

    def _the_uploader(self) -> Uploader:
        with self._lock:
            if self._uploader is None:
                self._uploader = open_uploader(self._config, self.store, self._events, self._proven)
            return self._uploader

    def skip(self, tier: str, step: int, why: Why, tell: bool = True) -> None:
        """A tier did not take one: that is counted and, unless it is told already, told."""
        self.skipped[tier] += 1
        if tell:
            said = {"cause": why.cause, "reason": why.reason}
            kind = "checkpoint_skipped" if why.cause.skips_checkpoint else "checkpoint_failed"
            self._events(kind, {"tier": tier, "step": step, **said, "skipped": self.skipped[tier]})

    # ---- reading

    def restorable(
        self, *, verify: bool = True, most: int = 1, limit: int | None = None, expected: int = 0
    ) -> tuple[int, ...]:
        """The newest steps, up to the limit if there is one, with a whole checkpoint on disk, ascending. Damaged
        checkpoints are set aside and reported as `fallback` events; verified ones are not read again.

        expected: the step that the job goes on from, 0 for none.

        Raises: ConfigError for a checkpoint of another model, or (unless checkpoint.allow_mismatch) of other
        settings. PartsAway if it, or parts of it, are on hosts that are not there, and no newer one is found.
        """
        found: list[int] = []
        before: int | None = None if limit is None else limit + 1
        self.unreadable = None
        try:
            if isinstance(self.store, HostsStore):
                self.store.heed()
            listed = steps_in(self.store)
            while len(found) < most:
                step = max((s for s in listed if before is None or s < before), default=-1)
                if step not in self._sound:
                    checkpoint = newest_complete(
                        self.store,
                        verify=verify,
                        accept=self._accept,
                        told=self._fell_back,
                        before=before,
                        repair=self._repairer(),
                    )
                    if checkpoint is None:
                        break
                    step = checkpoint.step
                    self._sound.add(step)
                found.append(step)
                before = step
        except StoreError as error:
            if isinstance(error, PartsAway) and not found:
                raise
            self.unreadable = None if found else str(error)
        except ConfigError:
            if not found:  # else an older one is of no concern
                raise
        if expected and not found and (limit is None or expected <= limit):
            self._seek(expected)
        return tuple(sorted(found))

    def _seek(self, step: int) -> None:
        """Raises: PartsAway if a checkpoint that there was may be on a host that has not joined."""
        store = self.store
        if isinstance(store, HostsStore) and store.scattered and not store.list(f"{step_name(step)}/{DAMAGED}"):
            raise PartsAway(f"the checkpoint of step {step}, from which this job goes on, is on another host", [])

    def load(
        self,
        step: int,
        states: Mapping[int, ModelState],
        *,
        ready: Callable[[], None] = lambda: None,
        twice: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Gives the states, by stage, what they need of a checkpoint; returns what it holds besides. ready: called
        directly before the state is changed. twice: all is read and verified before that, and then read again; else a
        state is partly written if this raises. tick: called after every few blocks.

        Raises: CheckpointCorrupt if something does not match its hash: it is set aside. StoreError if it cannot be
        read. In both cases `restorable` names older ones from then on. ConfigError.
        """
        checkpoint: Checkpoint | None = None
        try:
            checkpoint = open_checkpoint(self.store, step, self._repairer(step))
            self._accept(checkpoint)
            checkpoint.check_files()
            if twice:
                checkpoint.verify_for(states, tick)
            ready()
            checkpoint.load_into(states, tick)
        except (CheckpointCorrupt, StoreError) as error:
            self._sound.discard(step)
            if checkpoint is not None and not isinstance(error, PartsAway):  # their hosts may come
                # Not the error: its traceback would keep the states alive.
                why = isinstance(error, CheckpointCorrupt), str(error)
                self._refused[step, checkpoint.manifest.created_unix_ns] = why
            note = set_aside_and_say(self.store, step) if isinstance(error, CheckpointCorrupt) else ""
            if note:
                self._fell_back(step, Why(error.cause, f"{error}{note}"))
            raise
        return checkpoint.manifest

    def _accept(self, checkpoint: Checkpoint) -> None:
        before = self._refused.get((checkpoint.step, checkpoint.manifest.created_unix_ns))
        if before is not None:
            damaged, reason = before
            raise CheckpointCorrupt(reason) if damaged else StoreError(reason)
        refuse_foreign(checkpoint.manifest, self.identity, allow_mismatch=self._config.allow_mismatch)
        if not self._inexact:
            refuse_kernels(checkpoint.manifest, self.identity.kernels)

    def _repairer(self, step: int | None = None) -> Repairer:
        """For one reading of the checkpoint of a step, if it is known which."""
        objects = Elsewhere(lambda: open_object_tier(self._config), lambda store: manifests_of(store, step))
        disk = Elsewhere(lambda: self.store, lambda store: manifests_of(store, step))
        return Repairer([*self._sources, self._of_other_hosts, disk, objects], self._mended)

    def _of_other_hosts(self, lost: Lost) -> Copy | None:
        """The same range of the same file, from another host."""
        if not isinstance(self.store, HostsStore) or not self.store.scattered:
            return None
        with suppress(StoreError):
            return Copy(self.store.read_elsewhere(lost.file, lost.at, BLOCK_BYTES), "another host")
        return None

    def _mended(self, step: int, reason: str) -> None:
        log.warning("%s", reason)
        self._events("warning", {"step": step, "cause": Cause.CORRUPT, "reason": reason, "what": "block"})

    def _fell_back(self, step: int, why: Why) -> None:
        """Once: each look for older checkpoints passes the newer ones again."""
        if (step, why.reason) in self._passed:
            return
        self._passed.add((step, why.reason))
        self._base = Base()
        self._events("fallback", {"step": step, "cause": why.cause, "reason": why.reason, "what": "checkpoint"})

    # ---- the end

    def drain(self, grace_s: float) -> bool:
        """Waits, for at most so long, until what began is on disk; whether it is. The state must not change meanwhile,
        or `before_update` have been called."""
        deadline = time.monotonic() + grace_s
        ended = [part.join(max(0.0, deadline - time.monotonic())) for part in self._parts]
        done = all(ended)
        if self._manifests is not None:
            done &= self._manifests.drain(max(0.0, deadline - time.monotonic()))
        return done

    @property
    def uploading(self) -> bool:
        """Whether something is on its way to the object store, or waits for it."""
        return self._uploader is not None and not self._uploader.idle

    def close(self) -> None:
        """Give up unfinished checkpoints. Parts that are being written end by themselves."""
        for part in self._parts:
            part.abandon(Why(Cause.INTERRUPTED, "the worker ends"))
        self._runner.close()
        if self._manifests is not None:
            self._manifests.close()
        if self._uploader is not None:
            self._uploader.finish(0.0)
