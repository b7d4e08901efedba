"""One checkpoint from a store to another: only the files that the other lacks, each checked on the way, manifest last.

Apart from `upload`, which decides when and how often: this is also what `everstep checkpoints copy` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from everstep.base.errors import BlobExists, BlobMissing, CheckpointCorrupt, ConfigError, EverstepError, StoreError
from everstep.checkpoint.manifest import Manifest, PartFile, decode
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.object_store import ObjectStore
from everstep.checkpoint.part import tree_digest
from everstep.checkpoint.reader import open_checkpoint, read_manifest, steps_in
from everstep.checkpoint.store import BlobStore, BytesLike
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES
from everstep.exact.topology import same_state

_READ_BYTES = 16 * BLOCK_BYTES
_READ_BYTES_REMOTE = 128 * BLOCK_BYTES
"""Large enough for several ranges at once."""

OnCopied = Callable[[int, int], None]
"""Told how many bytes of how many are there by now, those that were there before included."""


@dataclass(frozen=True)
class Transferred:
    """What a transfer did. bytes, files: written; skipped_bytes: already there."""

    manifest: Manifest
    bytes: int
    files: int
    skipped_bytes: int


class TransferStopped(EverstepError):
    """The transfer was asked to stop; what is written so far counts when it is begun again."""


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
    total = sum(part.size for part in manifest.files)
    if _is_there(target, manifest, text):
        progress(total, total)
        return Transferred(manifest, 0, 0, total)
    folders = {part.name.rpartition("/")[0] for part in manifest.files}
    present = frozenset(n for folder in folders for n in target.list(f"{folder}/"))
    done = wrote = files = 0
    for part in manifest.files:
        if part.name not in present or not _holds(target, part):
            _send(source, target, part, partial(lambda before, count: progress(before + count, total), done), stopped)
            wrote, files = wrote + part.size, files + 1
        done += part.size
        progress(done, total)
    if stopped():
        raise TransferStopped(f"the transfer of step {step} was stopped before its manifest")
    try:
        target.write(name, [text], len(text), if_absent=True)
    except BlobExists:
        _is_there(target, manifest, text)  # refuses another one; the same is what was to be written
    return Transferred(manifest, wrote + len(text), files, total - wrote)


def _is_there(target: BlobStore, manifest: Manifest, text: bytes) -> bool:
    """Whether the target has this checkpoint already, complete.

    Raises: StoreError if it has another one under the same step.
    """
    name = manifest_name(manifest.step)
    try:
        theirs = bytes(target.read(name))
    except BlobMissing:
        return False
    if theirs == text:
        return True
    try:
        other = decode(theirs, f"{target.url}/{name}")
    except CheckpointCorrupt as error:
        raise StoreError(f"{error}; set it aside or choose another place") from None
    if same_state(other.state, manifest.state):
        return True  # the same step done again, to the same bits, cut into other files
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
        for _ in _checked(target, part):
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
        for chunk in _checked(source, part):
            if stopped():
                raise TransferStopped(f"the transfer of {part.name} was stopped")
            yield chunk
            sent += len(chunk)
            progress(sent)

    if isinstance(target, ObjectStore):
        target.write(part.name, chunks(), part.size, digest=part.mark)
    else:
        target.write(part.name, chunks(), part.size)


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


def _checked(store: BlobStore, part: PartFile) -> Iterator[memoryview]:
    """The bytes of a part, a few blocks at a time; the last one is followed by the comparison with its hashes.

    Raises: CheckpointCorrupt.
    """
    head = memoryview(store.read(part.name, 0, part.data_at)).cast("B")
    if len(head) != part.data_at or digest_bytes(head) != part.head:
        raise CheckpointCorrupt(f"{store.url}/{part.name}: its first {part.data_at} bytes do not match their hash")
    yield head
    digests: list[str] = []
    step = _READ_BYTES_REMOTE if isinstance(store, ObjectStore) else _READ_BYTES
    for at in range(part.data_at, part.size, step):
        wanted = min(step, part.size - at)
        data = memoryview(store.read(part.name, at, wanted)).cast("B")
        if len(data) != wanted:
            raise CheckpointCorrupt(f"{store.url}/{part.name} ends at byte {at + len(data)} of {part.size}")
        digests += [digest_bytes(data[k : k + BLOCK_BYTES]) for k in range(0, wanted, BLOCK_BYTES)]
        yield data
    if tree_digest(digests) != part.tree:
        raise CheckpointCorrupt(f"{store.url}/{part.name} does not match its hash: it was altered")
