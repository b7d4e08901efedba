"""Deleting what need not be kept, and nothing that a kept checkpoint refers to.

A checkpoint goes by its manifest, first of all; its files follow once no manifest refers to them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from everstep.base.config_keys import TierConfig
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError
from everstep.checkpoint.manifest import Manifest, decode
from everstep.checkpoint.names import is_damaged, is_part, manifest_name, step_name, step_of
from everstep.checkpoint.pointers import read_pins
from everstep.checkpoint.reader import open_checkpoint, steps_in
from everstep.checkpoint.store import BlobStore, DirectoryStore
from everstep.protocol.driver.policy import kept


@dataclass
class Shelf:
    """What one store holds, as far as files and scores go: read once, then kept up to date by its only writer."""

    store: BlobStore
    metric: str | None = None
    files: dict[int, frozenset[str]] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    aside: frozenset[str] = frozenset()

    @staticmethod
    def read(store: BlobStore, metric: str | None = None) -> Shelf:
        """From all manifests. Raises: StoreError."""
        shelf = Shelf(store, metric)
        for step in steps_in(store):
            try:
                shelf.add(open_checkpoint(store, step).manifest)
            except (CheckpointCorrupt, ConfigError) as error:
                shelf.broken[step] = str(error)
            except BlobMissing:
                continue
        for name in store.list("step-"):
            if is_damaged(name):
                with suppress(CheckpointCorrupt, ConfigError, BlobMissing):
                    shelf.aside |= {f.name for f in decode(store.read(name), name).files}
        return shelf

    def add(self, manifest: Manifest) -> None:
        """A checkpoint was completed."""
        self.files[manifest.step] = frozenset(f.name for f in manifest.files)
        if self.metric is not None and self.metric in manifest.metrics:
            self.scores[manifest.step] = manifest.metrics[self.metric]

    @property
    def steps(self) -> list[int]:
        return sorted(self.files)

    def retire(self, steps: Collection[int]) -> None:
        """These are no checkpoints any more; their files stay until `sweep`. Raises: StoreError."""
        for step in sorted(steps):
            self.store.delete(manifest_name(step))
            self.files.pop(step, None)
            self.scores.pop(step, None)

    def sweep(self, busy: Collection[int] = (), doomed: Callable[[str], None] = lambda name: None) -> list[str]:
        """Deletes parts that no checkpoint refers to; returns their names.

        busy: steps that are being written. Newer ones than the newest checkpoint, and folders with something that was
        set aside, are left alone; so is everything while there is a manifest that cannot be read: it may refer to
        anything.

        Raises: StoreError.
        """
        if self.broken or not self.files:
            return []
        names = self.store.list("step-")
        needed = self.aside.union(*self.files.values())
        aside = {step_of(name) for name in names if is_damaged(name)}
        newest = max(self.files)
        gone = []
        for name in names:
            step = step_of(name)
            left_alone = step is None or step > newest or step in busy or step in aside
            if left_alone or name in needed or not is_part(name):
                continue
            doomed(name)
            self.store.delete(name)
            gone.append(name)
        if isinstance(self.store, DirectoryStore):
            for step in {step_of(path.name) for path in self.store.path.glob("step-*")}:
                if step is not None and step < newest and step not in busy:
                    self.store.drop_temporaries(step_name(step))
        return gone


def would_go(store: BlobStore, rule: TierConfig, metric: str | None = None, mode: str = "max") -> list[int]:
    """The steps that the rule does not keep. Raises: StoreError. CheckpointCorrupt if the pins cannot be read."""
    return _unkept(Shelf.read(store, metric), rule, mode)


def apply(store: BlobStore, rule: TierConfig, metric: str | None = None, mode: str = "max") -> list[int]:
    """Retires what the rule does not keep, and deletes what nobody needs then; returns the steps retired.

    Raises: StoreError. CheckpointCorrupt if the pins cannot be read: nothing is deleted then.
    """
    shelf = Shelf.read(store, metric)
    retired = _unkept(shelf, rule, mode)
    shelf.retire(retired)
    shelf.sweep()
    return retired


def _unkept(shelf: Shelf, rule: TierConfig, mode: str) -> list[int]:
    pins = set(read_pins(shelf.store).values())
    stay = kept(shelf.steps, rule, pins=pins, scores=shelf.scores, best_mode=mode)
    return [step for step in shelf.steps if step not in stay]
