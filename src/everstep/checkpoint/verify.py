"""Verifying all that a store holds: checkpoints, pointers, pins. Says everything that is wrong, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, StoreError
from everstep.checkpoint.manifest import Manifest, PartFile
from everstep.checkpoint.names import BEST, LATEST, is_damaged, manifest_name
from everstep.checkpoint.part import tree_digest
from everstep.checkpoint.pointers import read_pins, read_pointer
from everstep.checkpoint.reader import PIECE_BLOCKS, Checkpoint, open_checkpoint, steps_in
from everstep.checkpoint.store import BlobStore
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES

OnBlock = Callable[[int], None]
"""Is told how many bytes more were read."""


@dataclass(frozen=True)
class Problem:
    """Something wrong. step: of the checkpoint that it spoils, None if it spoils none. name: of the file."""

    step: int | None
    name: str
    what: str


def verify_store(
    store: BlobStore, steps: Collection[int] | None = None, progress: OnBlock = lambda n: None
) -> list[Problem]:
    """All problems of a store. steps: only of these checkpoints (and not of the pointers).

    Raises: StoreError if the store cannot be read. BlobMissing for a step that is not there.
    """
    found: list[Problem] = []
    checked: dict[PartFile, str] = {}
    for step in sorted(steps) if steps is not None else steps_in(store):
        found += verify_checkpoint(store, step, progress, checked)
    if steps is None:
        found += _verify_pointers(store)
        found += [
            Problem(None, name, "was found damaged before, and set aside")
            for name in store.list("step-")
            if is_damaged(name)
        ]
    return found


def verify_checkpoint(
    store: BlobStore, step: int, progress: OnBlock = lambda n: None, checked: dict[PartFile, str] | None = None
) -> list[Problem]:
    """All problems of one checkpoint. checked: what is known of files already; is added to."""
    known = {} if checked is None else checked
    try:
        checkpoint = open_checkpoint(store, step)
    except (CheckpointCorrupt, ConfigError) as error:
        return [Problem(step, manifest_name(step), str(error))]
    found = []
    for file in checkpoint.manifest.files:
        if file not in known:
            known[file] = _file_problem(checkpoint, file, progress)
        if known[file]:
            found.append(Problem(step, file.name, known[file]))
    return found


def bytes_of_files(store: BlobStore, steps: Collection[int]) -> int:
    """How much there is to read to verify these checkpoints."""
    sizes: dict[str, int] = {}
    for step in steps:
        with suppress(CheckpointCorrupt, ConfigError, BlobMissing):
            sizes |= {f.name: f.size - f.data_at for f in open_checkpoint(store, step).manifest.files}
    return sum(sizes.values())


def _file_problem(checkpoint: Checkpoint, file: PartFile, progress: OnBlock) -> str:
    """What is wrong with a file, every byte of it read; empty if nothing is."""
    manifest, store = checkpoint.manifest, checkpoint.store
    try:
        checkpoint.check_file(file)
        expected = _expected(manifest, file)
        digests: list[str] = []
        for first in range(0, file.n_blocks, PIECE_BLOCKS):
            count = min(PIECE_BLOCKS, file.n_blocks - first)
            data = memoryview(store.read(file.name, file.data_at + first * BLOCK_BYTES, count * BLOCK_BYTES)).cast("B")
            progress(len(data))
            for k in range(count):
                digests.append(digest_bytes(data[k * BLOCK_BYTES : (k + 1) * BLOCK_BYTES]))
                wanted, index = expected.get(first + k, (digests[-1], 0))
                if wanted != digests[-1]:
                    inside = ", ".join(checkpoint.inside(index))
                    return f"{store.url}/{file.name}: block {index} ({inside}) does not match its digest"
        if tree_digest(digests) != file.tree:
            return f"{store.url}/{file.name} does not match its hash, outside what step {checkpoint.step} needs of it"
    except (CheckpointCorrupt, BlobMissing) as error:
        return str(error)
    return ""


def _expected(manifest: Manifest, file: PartFile) -> dict[int, tuple[str, int]]:
    """By the number of the block in the file: its digest, and its number in the state."""
    found: dict[int, tuple[str, int]] = {}
    for run in manifest.runs:
        if manifest.files[run.file] == file:
            at = (run.offset - file.data_at) // BLOCK_BYTES
            found |= {at + k: (manifest.state["blocks"][run.first + k], run.first + k) for k in range(run.count)}
    return found


def _verify_pointers(store: BlobStore) -> list[Problem]:
    found = []
    steps = set(steps_in(store))
    for name in (LATEST, BEST):
        try:
            step = read_pointer(store, name)
            if step is not None and step not in steps:
                found.append(Problem(None, name, f"{name} points at step {step}, of which there is no checkpoint"))
        except (CheckpointCorrupt, ConfigError) as error:
            found.append(Problem(None, name, str(error)))
    try:
        for pin, step in read_pins(store).items():
            if step not in steps:
                found.append(
                    Problem(None, "pins.json", f"pin {pin} names step {step}, of which there is no checkpoint")
                )
    except (CheckpointCorrupt, ConfigError, StoreError) as error:
        found.append(Problem(None, "pins.json", str(error)))
    return found
