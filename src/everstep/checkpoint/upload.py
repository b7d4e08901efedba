"""Uploads checkpoints from the disk tier to an object store, in the background.

A thread of its own does all of it: training hands over a step number and goes on. The newest checkpoint comes before
older ones that wait. Trouble is told once per change of state, and never stops anything.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig, TierConfig
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, EverstepError, StoreError, cause_of
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.object_store import ObjectOptions, StoreRefused
from everstep.checkpoint.reader import set_aside_after
from everstep.checkpoint.retention import Shelf
from everstep.checkpoint.store import BlobStore
from everstep.checkpoint.stores.table import open_store
from everstep.checkpoint.transfer import Transferred, TransferStopped, transfer

OnUpload = Callable[[str, dict[str, Any]], None]
"""Told (kind, fields) of an event; from the uploader's thread."""
Prune = Callable[[BlobStore, Manifest], list[int]]
"""Applies the tier's retention to a store that has just got this checkpoint; returns the steps that it deleted."""

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
    """What an object tier keeps: the newest, every k-th, the best, the pinned ones; `latest` and `best` point at them.

    The result remembers what it has read of a store: it is for one store, whose only writer it is with. proven: as for
    the manifest writer.
    """
    shelf: Shelf | None = None

    def prune(store: BlobStore, newest: Manifest) -> list[int]:
        nonlocal shelf
        if shelf is None or shelf.broken or newest.step <= max(shelf.steps, default=-1):  # the job went back
            shelf = Shelf.read(store, best_metric)
        shelf.add(newest)
        shelf.point(best_mode)
        gone = shelf.unkept(rule, best_mode, proven=proven(shelf.steps[-1]))
        shelf.retire(gone)
        shelf.sweep({newest.step})
        return gone

    return prune


def _keep_all(store: BlobStore, newest: Manifest) -> list[int]:
    return []


@dataclass(frozen=True)
class _Trouble:
    """What goes wrong; `kind` stays the same when the same befalls another file."""

    why: Why
    kind: tuple[str, str]

    @staticmethod
    def of(error: Exception, text: str = "") -> _Trouble:
        """What an error comes down to. text: its words, if it does not say it all."""
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
        prune: Prune = _keep_all,
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
        self._slow = False
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
            set_aside_after(self._target, sound)
        except EverstepError as error:
            text = f"checkpoints after step {sound} count for nothing, but are still there: {error}"
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
            except (BlobMissing, CheckpointCorrupt, StoreRefused) as error:
                self._give_up(step, _Trouble.of(error))  # the source's fault, or the store's: trying again is no help
                return
            except EverstepError as error:
                failures += 1
                trouble = _Trouble.of(error)
            except Exception as error:  # a bug must not end the thread unseen
                self._give_up(step, _Trouble.of(error, f"{type(error).__name__}: {error}"))
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
            if self._waiting is None:
                self._slow = False
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
        """With the lock held. Told once, until a checkpoint is uploaded before the next one comes."""
        if not self._slow and not self._trouble:
            why = Why(Cause.SLOW, "the object store is slower than checkpoints come")
            self._report("checkpoint_failed", self._fields(step, why))
        self._slow = True

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
        raise ConfigError("checkpoint.object.url: expected where to put checkpoints, got none")
    prune = retention(config.object, config.best_metric, config.best_mode, proven)
    return Uploader(source, target, report, prune)
