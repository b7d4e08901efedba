"""Repairs a damaged block of a checkpoint with an equal block from elsewhere, so that no worker has to go back.

Apart from the reader, which finds the damage. A block is known by its digest, so any copy will do, and a wrong one
does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from everstep.base.errors import EverstepError
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.store import BlobStore, BytesLike, DirectoryStore
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES

_MOST_TOLD = 16


@dataclass(frozen=True)
class Lost:
    """A block that does not match its digest. step, index: of which checkpoint, and its number in the whole state.
    stage: whose state is being read; None if it is read for no stage. file, at: where it was to be, and from which
    byte on."""

    step: int
    index: int
    digest: str
    stage: int | None
    file: str
    at: int


@dataclass(frozen=True)
class Copy:
    """The bytes of a block from elsewhere, which are still to be verified. where: they come from, in words."""

    data: BytesLike
    where: str


Source = Callable[[Lost], Copy | None]
"""Looks for a block; called from any thread. What it raises (EverstepError, OSError) ends its use."""


class Repairer:
    """Asks one source after the other, and puts the file right where it is in a directory. Thread-safe."""

    def __init__(self, sources: Sequence[Source], told: Callable[[int, str], None]) -> None:
        """told: is told the step of a checkpoint, and which block of which file came from where; from any thread."""
        self._sources, self._told = list(sources), told
        self._lock = threading.Lock()
        self._count = 0

    def block(self, store: BlobStore, lost: Lost, words: str) -> memoryview | None:
        """The block, verified; None if there is no copy. words: what was wrong with it."""
        with self._lock:  # many threads read, and all that they find wrong may be in one place
            found = self._find(lost)
            if found is None:
                return None
            data, where = found
            kept = _put_back(store, lost, data)
            self._count += 1
            count = self._count
        if count <= _MOST_TOLD:
            more = "; further repairs are not reported" if count == _MOST_TOLD else ""
            self._told(lost.step, f"{words}: repaired from {where}{kept}{more}")
        return data

    def _find(self, lost: Lost) -> tuple[memoryview, str] | None:
        for source in list(self._sources):
            try:
                copy = source(lost)
            except (EverstepError, OSError):
                self._sources.remove(source)
                continue
            if copy is not None:
                data = memoryview(copy.data).cast("B")
                if len(data) == BLOCK_BYTES and digest_bytes(data) == lost.digest:
                    return data, copy.where
        return None


class Elsewhere:
    """The blocks of a store's checkpoints by digest. Manifests are read as far as needed, each once."""

    def __init__(
        self, store: Callable[[], BlobStore | None], manifests: Callable[[BlobStore], Iterator[Manifest]]
    ) -> None:
        """store: is asked for once there is something to look for; None for none. manifests: of its checkpoints."""
        self._open, self._manifests = store, manifests
        self._store: BlobStore | None = None
        self._left: Iterator[Manifest] | None = None
        self._places: dict[str, list[tuple[str, int]]] = {}

    def __call__(self, lost: Lost) -> Copy | None:
        if self._left is None:
            self._store = self._open()
            self._left = self._manifests(self._store) if self._store is not None else iter(())
        store = self._store
        if store is None:
            return None
        tried = 0
        while True:
            known = self._places.get(lost.digest, [])
            for file, at in known[tried:]:
                with suppress(EverstepError):
                    data = memoryview(store.read(file, at, BLOCK_BYTES)).cast("B")
                    if len(data) == BLOCK_BYTES and digest_bytes(data) == lost.digest:
                        return Copy(data, f"byte {at} of {store.url}/{file}")
            tried = len(known)
            manifest = next(self._left, None)
            if manifest is None:
                return None
            for index, digest in enumerate(manifest.state["blocks"]):
                part, at = manifest.place(index)
                places = self._places.setdefault(digest, [])
                if (part.name, at) not in places:
                    places.append((part.name, at))


def _put_back(store: BlobStore, lost: Lost, data: memoryview) -> str:
    """Write the block to its place. Returns the note for people."""
    if not isinstance(store, DirectoryStore):
        return ""
    try:
        store.mend(lost.file, lost.at, data)
    except EverstepError as error:
        return f"; the file stays as it is: {error}"
    return ""
