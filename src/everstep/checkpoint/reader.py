"""Reads checkpoints: every used byte is verified, damage is named, and the next older checkpoint is found.

A reader does not know the topology that wrote a checkpoint, and may have another.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from everstep.base.cause import Why
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, EverstepError, PartsAway, StoreError
from everstep.checkpoint.hosts_store import HostsStore
from everstep.checkpoint.manifest import MAX_HEAD_BYTES, Manifest, PartFile, decode
from everstep.checkpoint.names import BEST, DAMAGED, LATEST, MANIFEST, is_damaged, manifest_name, step_name, step_of
from everstep.checkpoint.part import tree_digest
from everstep.checkpoint.pointers import MOST_BYTES, detach, read_pins, read_pointer, read_sealed
from everstep.checkpoint.repair import Lost, Repairer
from everstep.checkpoint.store import BlobStore, DirectoryStore
from everstep.exact.digest import digest_bytes, digest_views
from everstep.exact.image import BLOCK_BYTES, Scatter, pieces_of, spread
from everstep.exact.state import ModelState
from everstep.exact.topology import select

log = logging.getLogger(__name__)

PIECE_BLOCKS = 16
"""At most so many blocks are read at once: 4 MiB."""
THREADS = min(4, os.cpu_count() or 1)
_AHEAD = 2
_T = TypeVar("_T")

Told = Callable[[int, Why], None]
"""Is told the step of a checkpoint that cannot be used, and why."""


class Checkpoint:
    """One checkpoint of a store, whose manifest is whole. Thread-safe."""

    def __init__(
        self, store: BlobStore, manifest: Manifest, repair: Repairer | None = None, signed_by: str | None = None
    ) -> None:
        """repair: of blocks that do not match their digest; without it they are damage at once. signed_by: the
        public key that the checkpoint names, which is not verified yet."""
        self.store, self.manifest, self.signed_by = store, manifest, signed_by
        self._repair = repair

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def name(self) -> str:
        """Its place, for messages."""
        return f"{self.store.url}/{step_name(self.step)}"

    def check_file(self, file: PartFile) -> None:
        """Raises: CheckpointCorrupt if a file is missing, of another size, or begins otherwise than it was written: on
        each host that has it, if there are several."""
        try:
            self.check_copy(file)
        except CheckpointCorrupt:
            if not isinstance(self.store, HostsStore) or not self.store.distrust(file):
                raise
            self.check_copy(file)

    def check_copy(self, file: PartFile) -> None:
        """As `check_file`, of the copy that is read first."""
        where = f"{self.store.url}/{file.name}"
        try:
            size = self.store.size(file.name)
            head = self.store.read(file.name, 0, min(size, file.data_at))
        except BlobMissing:
            raise self._missing(file) from None
        if digest_bytes(head) != file.head:
            foreign = _foreign(head, file.name, self.manifest)
            raise CheckpointCorrupt(f"{where} {foreign or 'does not begin as it was written: altered or truncated'}")
        if size != file.size:
            what = "truncated" if size < file.size else "too long"
            raise CheckpointCorrupt(f"{where} is {what}: it has {size} bytes, expected {file.size}")

    def check_files(self) -> None:
        """Check every file that the checkpoint needs with `check_file`; no block is read. Raises: CheckpointCorrupt."""
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self.check_file, self.manifest.files))

    def read_blocks(self, indices: Sequence[int], stage: int | None = None) -> Iterator[memoryview]:
        """The bytes of blocks, in this order, verified, read ahead by several threads. stage: that needs them.

        Raises: CheckpointCorrupt naming file and block.
        """
        for blocks in self._in_order(indices, lambda _, piece: self._read_piece(piece, stage)):
            yield from blocks

    def load_into(self, states: Mapping[int, ModelState], tick: Callable[[], None] = lambda: None) -> None:
        """Give each stage's state its blocks of the checkpoint. If this raises, load again before using the states.
        tick: called after every few blocks.

        Raises: CheckpointCorrupt if something does not match its hash. ConfigError if it is of another model.
        """
        for stage, state in states.items():
            manifest, blocks = self._selected(state)
            state.load_with(manifest, partial(self._fill, blocks=blocks, stage=stage, tick=tick))

    def verify_for(self, states: Mapping[int, ModelState], tick: Callable[[], None] = lambda: None) -> None:
        """Reads what `load_into` would read, and changes nothing. tick, raises: as `load_into`."""
        for stage, state in states.items():
            _, blocks = self._selected(state)
            for _ in self.read_blocks(blocks, stage):
                tick()

    def _selected(self, state: ModelState) -> tuple[dict[str, Any], tuple[int, ...]]:
        """The part of a checkpoint that a stage needs: manifest and blocks."""
        try:
            return select(self.manifest.state, state.names)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"{self.name} is not as Everstep writes it: {type(error).__name__}") from error

    def _fill(self, scatter: Scatter, blocks: Sequence[int], stage: int, tick: Callable[[], None]) -> None:
        """Reads blocks straight to where they go, and verifies them there."""

        def fill(begin: int, piece: Sequence[int]) -> None:
            numbers = range(begin, begin + len(piece))
            self._read_into(piece, [scatter.views(number) for number in numbers], stage)
            for number in numbers:
                scatter.written(number)

        for _ in self._in_order(blocks, fill):
            tick()

    def _in_order(self, indices: Sequence[int], read: Callable[[int, Sequence[int]], _T]) -> Iterator[_T]:
        """Results of `read` for each piece of these blocks, in order, by several threads that are a little ahead. It is
        given the number of blocks before, and the piece."""
        with ThreadPoolExecutor(THREADS) as pool:
            waiting: deque[Future[_T]] = deque()
            begin = 0
            try:
                for piece in self._pieces(indices):
                    waiting.append(pool.submit(read, begin, piece))
                    begin += len(piece)
                    if len(waiting) > THREADS + _AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _pieces(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Runs of blocks that lie one after the other in one file."""
        piece: list[int] = []
        expected: Any = None
        for index in indices:
            file, at = self.manifest.place(index)
            if piece and ((file, at) != expected or len(piece) == PIECE_BLOCKS):
                yield piece
                piece = []
            piece.append(index)
            expected = (file, at + BLOCK_BYTES)
        if piece:
            yield piece

    def _read_piece(self, piece: Sequence[int], stage: int | None) -> list[memoryview]:
        memory = memoryview(bytearray(len(piece) * BLOCK_BYTES))
        blocks = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
        self._read_into(piece, [[block] for block in blocks], stage)
        return blocks

    def _read_into(self, piece: Sequence[int], parts: Sequence[Sequence[memoryview]], stage: int | None) -> None:
        """Reads blocks that lie one after the other in one file, each into its views."""
        file, at = self.manifest.place(piece[0])
        trouble: StoreError | None = None
        try:
            got = self.store.read_into(file.name, at, [view for part in parts for view in part])
        except BlobMissing:
            raise self._missing(file) from None
        except StoreError as error:
            if isinstance(error, PartsAway) or not isinstance(self.store, DirectoryStore):
                raise  # the host, or the bucket, may answer later
            if len(piece) > 1:  # few of its blocks may be bad
                for index, part in zip(piece, parts, strict=True):
                    self._read_into([index], [part], stage)
                return
            got, trouble = 0, error
        for k, (index, part) in enumerate(zip(piece, parts, strict=True)):
            there = min(BLOCK_BYTES, max(0, got - k * BLOCK_BYTES))
            if there < BLOCK_BYTES or digest_views(part) != self.manifest.state["blocks"][index]:
                spread(self._repaired(index, there, stage, trouble), part)

    def _repaired(self, index: int, n_bytes: int, stage: int | None, trouble: StoreError | None) -> memoryview:
        """A block from elsewhere, of which so many bytes were read here. Raises: CheckpointCorrupt if there is none, or
        the trouble that there was with reading it."""
        file, at = self.manifest.place(index)
        error = trouble or CheckpointCorrupt(
            f"{self.store.url}/{file.name}: block {index} ({', '.join(self.inside(index))}) does not match its digest "
            f"({n_bytes} bytes)"
        )
        lost = Lost(self.step, index, self.manifest.state["blocks"][index], stage, file.name, at)
        found = self._repair.block(self.store, lost, str(error)) if self._repair is not None else None
        if found is None:
            raise error
        return found

    def _missing(self, file: PartFile) -> CheckpointCorrupt | PartsAway:
        """A file that is nowhere: a host that had it may come back."""
        holders = self.manifest.hosts.get(file.name, ())
        away = self.store.away(holders) if isinstance(self.store, HostsStore) else sorted(holders)
        if away:
            return PartsAway(f"{file.name}, which step {self.step} needs, is on {' and '.join(away)}", away)
        return CheckpointCorrupt(f"{self.store.url}/{file.name} is missing, which step {self.step} needs")

    def inside(self, index: int, most: int = 3) -> list[str]:
        """The names of the first tensors that a block holds a part of."""
        found = [self.manifest.entries[k].name for k, _, _ in pieces_of(self.manifest.entries, index)]
        return [*found[:most], f"{len(found) - most} more"] if len(found) > most else found


def steps_in(store: BlobStore, names: Iterable[str] | None = None) -> list[int]:
    """The steps of which there is a manifest, ascending; names: among these. Raises: StoreError."""
    found = ((step_of(name), name) for name in (store.list("step-") if names is None else names))
    return sorted(step for step, name in found if step is not None and name == manifest_name(step))


def names_there(store: BlobStore, prefix: str) -> list[str]:
    """The names that begin with the prefix, without those on hosts that do not answer. Raises: StoreError."""
    if isinstance(store, HostsStore):
        return sorted(set().union(*store.listed(prefix, there=True).values()))
    return store.list(prefix)


def open_checkpoint(store: BlobStore, step: int, repair: Repairer | None = None) -> Checkpoint:
    """The checkpoint of a step, after a check of its manifest alone. repair: as for `Checkpoint`.

    Raises: as `read_manifest`.
    """
    manifest, text = read_manifest(store, step)
    return Checkpoint(store, manifest, repair, (detach(text)[1] or {}).get("key"))


def manifests_of(store: BlobStore, first: int | None = None) -> Iterator[Manifest]:
    """Manifests of a store's whole checkpoints: that of step `first`, then the newest one and so on."""
    for step in sorted(steps_in(store), key=lambda step: (step == first, step), reverse=True):
        with suppress(BlobMissing, CheckpointCorrupt, ConfigError):
            yield read_manifest(store, step)[0]


def read_manifest(store: BlobStore, step: int) -> tuple[Manifest, bytes]:
    """The manifest of a step, and its text.

    Raises: BlobMissing if there is none. CheckpointCorrupt if the manifest was altered or is of another step: on each
    host, if there are several. ConfigError if it is of a newer format. PartsAway.
    """
    name = manifest_name(step)
    try:
        text = read_sealed(store, name)
        return _manifest_in(text, store, step), text
    except CheckpointCorrupt as error:
        for data in store.read_each(name, MOST_BYTES) if isinstance(store, HostsStore) else ():
            with suppress(CheckpointCorrupt):
                text = bytes(data)
                manifest = _manifest_in(text, store, step)
                log.warning("%s: another host's copy is read", error)
                return manifest, text
        raise


def _manifest_in(text: bytes, store: BlobStore, step: int) -> Manifest:
    name = manifest_name(step)
    manifest = decode(text, f"{store.url}/{name}")
    if manifest.step != step:
        raise CheckpointCorrupt(f"{store.url}/{name} is the manifest of step {manifest.step}: it belongs elsewhere")
    try:
        _ = manifest.entries
    except (CheckpointCorrupt, RecursionError) as error:
        raise CheckpointCorrupt(f"{store.url}/{name} is not as Everstep writes it: {error}") from None
    return manifest


def checked_bytes(store: BlobStore, part: PartFile, at_once: int = PIECE_BLOCKS * BLOCK_BYTES) -> Iterator[memoryview]:
    """The bytes of a part, a few blocks at a time; the last one is followed by the comparison with its hashes. at_once:
    bytes that are read at once, whole blocks.

    Raises: CheckpointCorrupt.
    """
    head = memoryview(store.read(part.name, 0, part.data_at)).cast("B")
    if len(head) != part.data_at or digest_bytes(head) != part.head:
        raise CheckpointCorrupt(f"{store.url}/{part.name}: its first {part.data_at} bytes do not match their hash")
    yield head
    digests: list[str] = []
    for at in range(part.data_at, part.size, at_once):
        wanted = min(at_once, part.size - at)
        data = memoryview(store.read(part.name, at, wanted)).cast("B")
        if len(data) != wanted:
            raise CheckpointCorrupt(f"{store.url}/{part.name} ends at byte {at + len(data)} of {part.size}")
        digests += [digest_bytes(data[k : k + BLOCK_BYTES]) for k in range(0, wanted, BLOCK_BYTES)]
        yield data
    if tree_digest(digests) != part.tree:
        raise CheckpointCorrupt(f"{store.url}/{part.name} does not match its hash: it was altered")


def verify_blocks(checkpoint: Checkpoint) -> None:
    """Reads all that the checkpoint needs.

    Raises: CheckpointCorrupt for the first thing that is wrong. StoreError.
    """
    checkpoint.check_files()
    order = sorted(range(checkpoint.manifest.n_blocks), key=checkpoint.manifest.place)
    for _ in checkpoint.read_blocks(order):
        pass


def newest_complete(
    store: BlobStore,
    *,
    verify: bool = True,
    accept: Callable[[Checkpoint], None] = lambda checkpoint: None,
    told: Told = lambda step, reason: None,
    before: int | None = None,
    repair: Repairer | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if there is none. What is damaged is set aside, and `told`.

    verify: read every byte (False: manifest, sizes and headers; blocks are verified when they are loaded). accept: is
    given each; what it raises ends the search. before: only older ones. repair:
    as for `Checkpoint`.

    Raises: StoreError if the store, or what there is, cannot be read. ConfigError for a checkpoint of a newer format.
    """
    unread: StoreError | None = None
    for step in reversed(steps_in(store)):
        if before is not None and step >= before:
            continue
        try:
            checkpoint = open_checkpoint(store, step, repair)
            accept(checkpoint)
            if verify:
                verify_blocks(checkpoint)
            else:
                checkpoint.check_files()
        except CheckpointCorrupt as error:
            note = set_aside_and_say(store, step)
            if note:  # else another worker has just done so, and said so
                told(step, Why(error.cause, f"{error}{note}"))
        except BlobMissing:
            continue  # retired while this one looked
        except PartsAway:
            raise
        except StoreError as error:
            told(step, Why(error.cause, str(error)))
            unread = unread or error
        else:
            return checkpoint
    if unread is not None:
        raise unread
    return None


def set_aside(store: BlobStore, step: int) -> str:
    """Gives a damaged checkpoint's manifest another name: it is no checkpoint any more, and nothing is lost. Its parts
    stay where they are, since others may need them. Returns the new name. Raises: StoreError."""
    taken = set(names_there(store, f"{step_name(step)}/{DAMAGED}"))
    number = 1
    while (name := f"{step_name(step)}/{DAMAGED}{number}-{MANIFEST}") in taken:
        number += 1
    store.move(manifest_name(step), name)
    return name


def set_aside_and_say(store: BlobStore, step: int) -> str:
    """Set a damaged checkpoint aside. Returns a clause about that; "" if another worker has done it."""
    try:
        return f"; set aside as {set_aside(store, step)}"
    except BlobMissing:
        return ""
    except EverstepError as error:
        return f"; it cannot be set aside: {error}"


def _foreign(head: bytes | bytearray | memoryview, name: str, manifest: Manifest) -> str:
    """Says so if these bytes begin a part of another job or step."""
    with suppress(ValueError, AttributeError):
        metadata = _metadata(head)
        job, step = metadata.get("job"), metadata.get("step")
        if job and job != manifest.identity["job"]:
            return f"is a part of another job ({job}, not {manifest.identity['job']})"
        if step and step != str(step_of(name)):
            return f"is a part of step {step}"
    return ""


def is_of(store: BlobStore, name: str, job: str) -> bool:
    """Whether a part says that it is of this job, or says nothing of a job. False if it cannot be read."""
    with suppress(EverstepError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        size = int.from_bytes(store.read(name, 0, 8), "little")
        return _metadata(store.read(name, 0, 8 + min(size, MAX_HEAD_BYTES))).get("job") in (None, "", job)
    return False


def _metadata(head: bytes | bytearray | memoryview) -> Any:
    text = bytes(head)
    return json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])["__metadata__"]


# ---- verifying all that a store holds; it changes nothing


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
        checkpoint = Checkpoint(store, _manifest_in(read_sealed(store, manifest_name(step)), store, step))
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
    """The fault of a file, all of whose bytes are read; empty if there is none."""
    manifest, store = checkpoint.manifest, checkpoint.store
    try:
        checkpoint.check_copy(file)
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
    except (CheckpointCorrupt, BlobMissing, PartsAway) as error:
        return str(error)
    return ""


def _expected(manifest: Manifest, file: PartFile) -> dict[int, tuple[str, int]]:
    """By the number of the block in the file: its digest, and its number in the state."""
    found: dict[int, tuple[str, int]] = {}
    for run in manifest.runs:
        if manifest.files[run.file] == file:
            at = (run.offset - file.data_at) // BLOCK_BYTES
            found |= {at + k: (manifest.state["blocks"][run.first + k], run.first + k) for k in range(run.n_blocks)}
    return found


def _verify_pointers(store: BlobStore) -> list[Problem]:
    found = []
    steps = set(steps_in(store))
    for name in (LATEST, BEST):
        try:
            step = read_pointer(store, name)
            if step is not None and step not in steps:
                found.append(Problem(None, name, f"{name} points at step {step}, which has no checkpoint"))
        except (CheckpointCorrupt, ConfigError) as error:
            found.append(Problem(None, name, str(error)))
    try:
        for pin, step in read_pins(store).items():
            if step not in steps:
                found.append(Problem(None, "pins.json", f"pin {pin} names step {step}, which has no checkpoint"))
    except (CheckpointCorrupt, ConfigError, StoreError) as error:
        found.append(Problem(None, "pins.json", str(error)))
    return found
