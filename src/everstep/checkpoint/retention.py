"""Deleting what need not be kept, and nothing that a kept checkpoint refers to.

A checkpoint goes by its manifest, first of all; its files follow once no manifest refers to them any more.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from everstep.base.config_keys import TierConfig
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, PartsAway, StoreError
from everstep.checkpoint.manifest import Manifest, decode
from everstep.checkpoint.names import BEST, LATEST, is_damaged, is_part, manifest_name, step_name, step_of
from everstep.checkpoint.pointers import read_pins, read_pointer, read_sealed, write_pointer
from everstep.checkpoint.reader import is_of, names_there, open_checkpoint, read_manifest, set_aside, steps_in
from everstep.checkpoint.store import BlobStore, DirectoryStore
from everstep.protocol.driver.policy import best_of, kept


@dataclass
class Shelf:
    """Files and scores in one store: read once, then kept up to date by its only writer."""

    store: BlobStore
    metric: str | None = None
    files: dict[int, frozenset[str]] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    aside: frozenset[str] = frozenset()
    strange: frozenset[int] = frozenset()
    """Steps whose state is not finite."""
    named: frozenset[str] = frozenset()
    """Parts that a manifest has named, whatever became of it, as long as they are there."""

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
                    shelf.aside |= {f.name for f in decode(read_sealed(store, name), name).files}
        return shelf

    def add(self, manifest: Manifest) -> None:
        """A checkpoint was completed."""
        self.files[manifest.step] = frozenset(f.name for f in manifest.files)
        self.named |= self.files[manifest.step]
        self.strange = self.strange - {manifest.step} if manifest.finite else self.strange | {manifest.step}
        if self.metric is not None and self.metric in manifest.metrics:
            self.scores[manifest.step] = manifest.metrics[self.metric]

    @property
    def steps(self) -> list[int]:
        return sorted(self.files)

    @property
    def needed(self) -> frozenset[str]:
        """Parts that manifests name, those that were set aside among them."""
        return self.aside.union(*self.files.values())

    def point(self, mode: str) -> None:
        """Point `latest` and `best` at the right checkpoints. Raises: StoreError."""
        write_pointer(self.store, LATEST, self.steps[-1])
        best = best_of(self.steps, self.scores, mode)
        if best:
            write_pointer(self.store, BEST, best[0], metric=self.metric, value=float(self.scores[best[0]]).hex())

    def unkept(self, rule: TierConfig, mode: str, *, held: Collection[int] = (), proven: int = 0) -> list[int]:
        """The steps that the rule does not keep, nor a pin. held: that must stay for now. proven: as for `kept`.

        Raises: StoreError. CheckpointCorrupt if the pins cannot be read.
        """
        pins = {*read_pins(self.store).values(), *held}
        stay = kept(
            self.steps, rule, pins=pins, scores=self.scores, best_mode=mode, proven=proven, strange=self.strange
        )
        return [step for step in self.steps if step not in stay]

    def retire(self, steps: Collection[int]) -> None:
        """These are no checkpoints any more; their files stay until `sweep`. Raises: StoreError."""
        for step in sorted(steps):
            self.store.delete(manifest_name(step))
            self.files.pop(step, None)
            self.scores.pop(step, None)

    def sweep(self, busy: Collection[int] = (), job: str | None = None) -> None:
        """Deletes parts that no checkpoint refers to.

        busy: steps that are being written. job: of the parts that no manifest has named, only those of this job go,
        since another one may be about to name its own; None: those of all jobs. Newer ones than the newest checkpoint,
        and folders with something that was set aside, are left alone; so is everything while there is a manifest that
        cannot be read: it may refer to anything.

        Raises: StoreError.
        """
        if self.broken or not self.files:
            return
        names, needed = self.store.list("step-"), self.needed
        for step in {step for name in names if (step := step_of(name)) is not None and name == manifest_name(step)}:
            if step not in self.files:  # another process wrote it
                try:
                    needed |= {file.name for file in read_manifest(self.store, step)[0].files}
                except BlobMissing:
                    continue
                except (CheckpointCorrupt, ConfigError) as error:
                    self.broken[step] = str(error)
                    return
        self.named = self.named.intersection(names)
        aside = {step_of(name) for name in names if is_damaged(name)}
        newest = max(self.files)
        for name in names:
            step = step_of(name)
            left_alone = step is None or step > newest or step in busy or step in aside
            if left_alone or name in needed or not is_part(name):
                continue
            if job is None or name in self.named or is_of(self.store, name, job):
                self.store.delete(name)
        if isinstance(self.store, DirectoryStore):
            # Only the process that completes checkpoints writes these.
            self.store.drop_temporaries("", (f"{LATEST}-", f"{BEST}-"))
            for step in {step_of(path.name) for path in self.store.path.glob("step-*")}:
                if step is not None and step < newest and step not in busy:
                    self.store.drop_temporaries(step_name(step))


def discard_after(store: BlobStore, sound: int) -> None:
    """The states of steps after `sound` were wrong: their checkpoints are set aside, and no pointer names one of them
    any more. Several workers may do so at once.

    Parts of theirs that no manifest names are deleted: a worker that was frozen before it wrote the manifest may wake
    later and write it, and that checkpoint must not look whole then. They stay while there is a manifest that cannot be
    read, since it may name them.

    Raises: StoreError, when all that could be set aside is.
    """
    trouble: StoreError | None = None
    try:
        shelf = Shelf.read(store)
    except PartsAway as away:
        hosts = " and ".join(away.hosts)
        shelf, trouble = Shelf(store), PartsAway(f"what {hosts} has is set aside once {hosts} answers", away.hosts)
    except StoreError as error:
        shelf, trouble = Shelf(store), error
    # Another worker may have been at it the first time.
    trouble = (_set_aside_after(store, sound) and _set_aside_after(store, sound)) or trouble
    for name in (LATEST, BEST):
        with suppress(BlobMissing, CheckpointCorrupt, PartsAway):
            if (read_pointer(store, name) or 0) > sound:
                store.delete(name)
    if trouble is not None:
        raise trouble
    needed = shelf.needed
    for name in store.list("step-") if not shelf.broken else ():
        if (step_of(name) or 0) > sound and name not in needed and is_part(name):
            store.delete(name)


def _set_aside_after(store: BlobStore, sound: int) -> StoreError | None:
    """Sets aside what it can. Returns what went wrong with another one."""
    trouble: StoreError | None = None
    for step in steps_in(store, names_there(store, "step-")):
        try:
            if step > sound:
                set_aside(store, step)
        except BlobMissing:
            continue
        except StoreError as error:
            trouble = error
    return trouble


def would_go(store: BlobStore, rule: TierConfig, metric: str | None = None, mode: str = "max") -> list[int]:
    """The steps that the rule does not keep. Raises: StoreError. CheckpointCorrupt if the pins cannot be read."""
    return Shelf.read(store, metric).unkept(rule, mode)


def apply(store: BlobStore, rule: TierConfig, metric: str | None = None, mode: str = "max") -> list[int]:
    """Retire checkpoints that the rule does not keep, and delete files that no checkpoint needs then; returns the
    steps retired.

    Raises: StoreError. CheckpointCorrupt if the pins cannot be read: nothing is deleted then.
    """
    shelf = Shelf.read(store, metric)
    retired = shelf.unkept(rule, mode)
    shelf.retire(retired)
    shelf.sweep()
    return retired
