"""One checkpoint from a store to another: only the files that the other lacks, each checked on the way, manifest last.

`transfer` is what `everstep checkpoints copy` does; `Uploader` decides when and how often, from the disk tier to an
object store.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig, TierConfig
from everstep.base.errors import (
    BlobExists,
    BlobMissing,
    CheckpointCorrupt,
    ConfigError,
    EverstepError,
    StoreError,
    cause_of,
)
from everstep.checkpoint.manifest import Manifest, PartFile, decode
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.object_store import ObjectOptions, ObjectStore, StoreRefused
from everstep.checkpoint.pointers import read_sealed
from everstep.checkpoint.reader import checked_bytes, open_checkpoint, read_manifest, steps_in
from everstep.checkpoint.retention import Shelf, discard_after
from everstep.checkpoint.store import BlobStore, BytesLike
from everstep.checkpoint.stores.store_table import open_store
from everstep.exact.image import BLOCK_BYTES
from everstep.exact.topology import same_state

_READ_BYTES = 16 * BLOCK_BYTES
_READ_BYTES_REMOTE = 128 * BLOCK_BYTES
"""Large enough for several ranges at once."""

OnCopied = Callable[[int, int], None]
"""Told how many bytes of how many are there by now, those that were there before included."""


@dataclass(frozen=True)
class Transferred:
    """Account of a transfer. bytes, files: written; skipped_bytes: already there."""

    manifest: Manifest
    bytes: int
    files: int
    skipped_bytes: int


class TransferStopped(EverstepError):
    """The transfer was asked to stop; files written so far count when it starts again."""


def transfer(
    source: BlobStore,
    target: BlobStore,
    step: int,
    *,
    progress: OnCopied = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Transferred:
    """Brings a complete checkpoint, with the older files that it refers to, into another store.

    It exists there once its manifest does, which is written last and by exactly one writer. Begun again after an
    interruption, it goes on with the first file that is not there yet. Bytes are compared with their hashes on the way.

    Raises: BlobMissing if the source has no such checkpoint (any more); CheckpointCorrupt if it is damaged there;
    StoreError, also if the target has another checkpoint under this step; TransferStopped.
    """
    name = manifest_name(step)
    manifest, text = read_manifest(source, step)
    there = _is_there(target, manifest, text)
    needed = (there or manifest).files
    total = sum(part.size for part in needed)
    folders = {part.name.rpartition("/")[0] for part in needed}
    present = frozenset(n for folder in folders for n in target.list(f"{folder}/"))
    done = wrote = files = 0
    for part in needed:
        if part.name not in present or not _holds(target, part):
            if part not in manifest.files:
                where = f"{target.url}/{part.name}"
                raise StoreError(
                    f"{where} is missing or damaged, and {source.url} has no such file: choose another place"
                )
            _send(source, target, part, partial(lambda before, count: progress(before + count, total), done), stopped)
            wrote, files = wrote + part.size, files + 1
        done += part.size
        progress(done, total)
    if there is not None:
        return Transferred(there, wrote, files, total - wrote)
    if stopped():
        raise TransferStopped(f"the transfer of step {step} was stopped before its manifest")
    try:
        target.write(name, [text], len(text), if_absent=True)
    except BlobExists:
        manifest = _is_there(target, manifest, text) or manifest  # refuses another one; an equal one counts as written
    return Transferred(manifest, wrote + len(text), files, total - wrote)


def _is_there(target: BlobStore, manifest: Manifest, text: bytes) -> Manifest | None:
    """The manifest of this checkpoint in the target; None if it has none.

    Raises: StoreError if it has another one under the same step.
    """
    name = manifest_name(manifest.step)
    try:
        theirs = read_sealed(target, name)
    except BlobMissing:
        return None
    if theirs == text:
        return manifest
    try:
        other = decode(theirs, f"{target.url}/{name}")
    except CheckpointCorrupt as error:
        raise StoreError(f"{error}; set it aside or choose another place") from None
    if same_state(other.state, manifest.state):
        return other  # the same step done again, to the same bits, cut into other files
    raise StoreError(
        f"{target.url} already holds step {manifest.step} of another run (task {other.identity.get('task')}): choose "
        "another URL or directory"
    )


def _holds(target: BlobStore, part: PartFile) -> bool:
    """Whether the target's file of that name has the right size and hash."""
    try:
        if isinstance(target, ObjectStore):
            return target.fingerprint(part.name) == (part.size, part.mark)
        if target.size(part.name) != part.size:
            return False
        for _ in checked_bytes(target, part, _at_once(target)):
            pass
        return True
    except (BlobMissing, CheckpointCorrupt):
        return False


def _send(
    source: BlobStore, target: BlobStore, part: PartFile, progress: Callable[[int], None], stopped: Callable[[], bool]
) -> None:
    _refuse_in_use(target, part)

    def chunks() -> Iterator[BytesLike]:
        sent = 0
        for chunk in checked_bytes(source, part, _at_once(source)):
            if stopped():
                raise TransferStopped(f"the transfer of {part.name} was stopped")
            yield chunk
            sent += len(chunk)
            progress(sent)

    if isinstance(target, ObjectStore):
        target.write(part.name, chunks(), part.size, digest=part.mark)
    else:
        target.write(part.name, chunks(), part.size)


def _at_once(store: BlobStore) -> int:
    return _READ_BYTES_REMOTE if isinstance(store, ObjectStore) else _READ_BYTES


def _refuse_in_use(target: BlobStore, part: PartFile) -> None:
    """A file that an accepted checkpoint refers to is never written over, unless with the same bytes.

    Raises: StoreError.
    """
    try:
        target.size(part.name)
    except BlobMissing:
        return
    for step in steps_in(target):
        try:
            files = open_checkpoint(target, step).manifest.files
        except (BlobMissing, CheckpointCorrupt, ConfigError):
            continue
        if any(f.name == part.name and f.mark != part.mark for f in files):
            raise StoreError(
                f"{target.url} already holds another {part.name}, which step {step} refers to: choose another URL or "
                "directory"
            )


# ---- in the background
#
# A thread of its own does all of it: training hands over a step number and goes on. The newest checkpoint comes before
# older ones that wait. Trouble is told once per change of state, and never stops anything.


OnUpload = Callable[[str, dict[str, Any]], None]
"""Told (kind, fields) of an event; from the uploader's thread."""
Prune = Callable[[BlobStore, Manifest], None]
"""Applies the tier's retention to a store that has just got this checkpoint."""

_STOP_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Backoff:
    """Before attempt n a random time between 0 and min(max_s, initial_s * 2**n) passes; after `attempts` it is given
    up, until the next checkpoint."""

    initial_s: float = 0.5
    max_s: float = 60.0
    attempts: int = 10

    def delay_s(self, failures: int, uniform: Callable[[float, float], float]) -> float:
        """How long to wait after so many failures in a row (1 or more)."""
        return uniform(0.0, min(self.max_s, self.initial_s * 2.0 ** min(failures, 30)))


def retention(
    rule: TierConfig,
    best_metric: str | None = None,
    best_mode: str = "max",
    proven: Callable[[int], int] = lambda step: 0,
) -> Prune:
    """Rule of an object tier: it keeps the newest, every k-th, the best and the pinned checkpoints.

    `latest` and `best` point at them. The result remembers what it has read of a store: it is for one store, whose only
    writer it is with. proven: as for the manifest writer.
    """
    shelf: Shelf | None = None

    def prune(store: BlobStore, newest: Manifest) -> None:
        nonlocal shelf
        if shelf is None or shelf.broken or newest.step <= max(shelf.steps, default=-1):  # the job went back
            shelf = Shelf.read(store, best_metric)
        shelf.add(newest)
        shelf.point(best_mode)
        shelf.retire(shelf.unkept(rule, best_mode, proven=proven(shelf.steps[-1])))
        shelf.sweep({newest.step}, newest.identity["job"])

    return prune


@dataclass(frozen=True)
class _Trouble:
    """A problem; `kind` is the same when the same befalls another file."""

    why: Why
    kind: tuple[str, str]

    @staticmethod
    def of(error: Exception, text: str = "") -> _Trouble:
        """The problem behind an error. text: its words, if it does not say it all."""
        kind = type(error).__name__, error.trouble if isinstance(error, StoreError) else ""
        return _Trouble(Why(cause_of(error), text or str(error)), kind)


class Uploader:
    """Brings complete checkpoints of `source` (the disk tier) to `target`, one after the other, newest first.

    Events: `checkpoint_completed` (tier "object", duration_s, bytes, skipped) for each; `checkpoint_failed` when
    things begin to go wrong or go wrong for another reason: a dead store, a slow one (checkpoints are skipped).
    """

    def __init__(
        self,
        source: BlobStore,
        target: BlobStore,
        report: OnUpload,
        prune: Prune = lambda store, newest: None,
        backoff: Backoff | None = None,
        seed: int | None = None,
    ) -> None:
        """prune: called after each upload; what it raises is told as trouble of the store."""
        self._source, self._target, self._report, self._prune = source, target, report, prune
        self._backoff = backoff or Backoff()
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._invalidated: int | None = None
        self._busy: int | None = None
        self._closing = False
        self._stop = False
        self._trouble: _Trouble | None = None
        self._last = -1
        self._skipped: list[int] = []
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
        self._thread.start()

    # ---- for the training side; none of these waits

    def offer(self, step: int) -> None:
        """A checkpoint is complete on disk. It is uploaded unless a newer one comes before its turn."""
        with self._changed:
            if self._closing:
                return
            if self._waiting is not None and self._waiting != step:
                self._skipped.append(min(self._waiting, step))
                self._slow_now(min(self._waiting, step))
                step = max(self._waiting, step)
            self._waiting = step
            self._changed.notify_all()

    def invalidate(self, sound: int) -> None:
        """Checkpoints of later steps that are in the store, or on their way there, are to be set aside there."""
        with self._changed:
            self._invalidated = sound if self._invalidated is None else min(sound, self._invalidated)
            if self._waiting is not None and self._waiting > sound:
                self._waiting = None
            self._changed.notify_all()

    @property
    def holds(self) -> frozenset[int]:
        """Steps that must stay on disk for now: the one being uploaded and the one that waits."""
        with self._changed:
            return frozenset(step for step in (self._busy, self._waiting) if step is not None)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being uploaded."""
        with self._changed:
            return self._idle()

    def _idle(self) -> bool:
        return self._busy is None and self._waiting is None and self._invalidated is None

    def finish(self, grace_s: float) -> bool:
        """Upload what still waits, for at most so long; then stop. True if everything is there. Waits."""
        deadline = time.monotonic() + grace_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(self._idle, grace_s)
            clean = self._idle()
            for step in (self._busy, self._waiting):
                if step is not None:
                    self._skipped.append(step)
            self._waiting, self._stop = None, True
            self._changed.notify_all()
        self._thread.join(max(_STOP_PATIENCE_S, deadline - time.monotonic()) if clean else _STOP_PATIENCE_S)
        with self._changed:
            return clean and max(self._skipped, default=-1) <= self._last

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._idle() or self._stop or self._closing)
                if self._stop or self._idle():
                    return
                invalidated = self._invalidated
                step, self._busy = self._waiting, self._waiting
                if invalidated is None:
                    self._waiting = None
            try:
                if invalidated is not None:
                    self._set_aside(invalidated)
                elif step is not None:
                    self._bring(step)
            finally:
                with self._changed:
                    self._busy = None
                    self._changed.notify_all()

    def _set_aside(self, sound: int) -> None:
        try:
            discard_after(self._target, sound)
        except EverstepError as error:
            text = f"checkpoints after step {sound} are discarded, but could not be deleted: {error}"
            self._troubled(sound, _Trouble.of(error, text))
            with self._changed:
                self._changed.wait_for(lambda: self._stop, self._backoff.delay_s(4, self._random.uniform))
            return
        with self._changed:
            if self._invalidated == sound:
                self._invalidated = None

    def _bring(self, step: int) -> None:
        """Attempt after attempt, until it is there, given up, or overtaken."""
        began = time.monotonic()
        failures = 0
        while True:
            try:
                done = transfer(self._source, self._target, step, stopped=lambda: self._unwanted(step))
                self._completed(step, done, time.monotonic() - began)
                return
            except TransferStopped:
                return
            except Exception as error:
                failures += 1
                known = isinstance(error, EverstepError)  # else it is a bug, which must not end the thread unseen
                trouble = _Trouble.of(error, "" if known else f"{type(error).__name__}: {error}")
                if not known or isinstance(error, BlobMissing | CheckpointCorrupt | StoreRefused):
                    self._give_up(step, trouble)  # the source's fault, or the store's: trying again is no help
                    return
            if failures >= self._backoff.attempts:
                text = f"{trouble.why.reason} (tried {failures} times)"
                self._give_up(step, _Trouble(Why(trouble.why.cause, text), trouble.kind))
                return
            self._troubled(step, trouble)
            if not self._pause(step, failures):
                return

    def _unwanted(self, step: int) -> bool:
        return self._stop or (self._invalidated is not None and step > self._invalidated)

    def _pause(self, step: int, failures: int) -> bool:
        """Waits before the next attempt; False if there is to be none: stopped, or a newer checkpoint waits."""
        delay_s = self._backoff.delay_s(failures, self._random.uniform)
        with self._changed:
            self._changed.wait_for(lambda: self._unwanted(step) or self._waiting is not None, delay_s)
            if self._waiting is not None and not self._stop:
                self._skipped.append(step)  # overtaken; that does not mean that the store is back: the pace stays
                self._changed.wait_for(lambda: self._stop, delay_s)
                return False
            return not self._unwanted(step)

    def _completed(self, step: int, done: Transferred, duration_s: float) -> None:
        with self._changed:
            recovered, self._trouble = self._trouble, None
            self._last = max(step, self._last)
            skipped = len(self._skipped)
        fields: dict[str, Any] = {"step": step, "tier": "object", "duration_s": duration_s, "bytes": done.bytes}
        fields |= {"url": self._target.url, "skipped": skipped}
        if recovered is not None:
            fields |= {"cause": recovered.why.cause, "reason": f"works again after: {recovered.why.reason}"}
        self._report("checkpoint_completed", fields)
        try:
            self._prune(self._target, done.manifest)
        except EverstepError as error:
            self._troubled(step, _Trouble.of(error, f"old checkpoints could not be removed: {error}"))

    def _give_up(self, step: int, trouble: _Trouble) -> None:
        with self._changed:
            self._skipped.append(step)
        self._troubled(step, trouble)

    def _slow_now(self, step: int) -> None:
        """With the lock held."""
        if not self._trouble:
            why = Why(Cause.SLOW, "the object store takes longer than the time between checkpoints")
            self._report("checkpoint_skipped", self._fields(step, why))

    def _troubled(self, step: int, trouble: _Trouble) -> None:
        """Tells trouble, if it is new."""
        with self._changed:
            known, self._trouble = self._trouble, trouble
            fields = self._fields(step, trouble.why)
        if known is None or known.kind != trouble.kind:
            self._report("checkpoint_failed", fields)

    def _fields(self, step: int, why: Why) -> dict[str, Any]:
        return {
            "step": step,
            "tier": "object",
            "cause": why.cause,
            "reason": why.reason,
            "url": self._target.url,
            "skipped": len(self._skipped),
        }


def open_object_tier(config: CheckpointConfig) -> BlobStore | None:
    """Where `checkpoint.object.*` puts checkpoints; None if it is off. Asks the store nothing yet.

    Raises: ConfigError if the client is not installed.
    """
    rule = config.object
    if rule.url is None:
        return None
    return open_store(rule.url, ObjectOptions(rule.endpoint, rule.region))


def open_uploader(
    config: CheckpointConfig, source: BlobStore, report: OnUpload, proven: Callable[[int], int] = lambda step: 0
) -> Uploader:
    """The uploader that `checkpoint.object.*` asks for, running. proven: as for `retention`.

    Raises: ConfigError if that is off, or the client is not installed.
    """
    target = open_object_tier(config)
    if target is None:
        raise ConfigError("checkpoint.object.url: expected a URL for checkpoints, got none")
    prune = retention(config.object, config.best_metric, config.best_mode, proven)
    return Uploader(source, target, report, prune)
