"""A state as bytes: a manifest, and blocks of 256 KiB that can be hashed, sent, stored and checked one by one. No torch
model here: an image is made of named tensors and JSON, live or copied.

Where entries lie is said by `planes` and made by `arrange`; what lies between them is zero bytes.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash
from torch import Tensor

from everstep.base.errors import CheckpointCorrupt, check
from everstep.exact.digest import bytes_of, digest_bytes
from everstep.exact.jsonable import canonical
from everstep.exact.layout import BLOCK_ELEMENTS, round_up
from everstep.exact.planes import Plane, rows_of

BLOCK_BYTES = BLOCK_ELEMENTS * 4
FORMAT = 2
FORMATS = (1, FORMAT)
"""Those that are read. The first one knew no planes: all of it is by unit, and in a unit by parameter."""
OUTSIDE, VALUES, FOREIGN = -1, -2, -3
"""Groups that are no unit's: what lies outside all units, the tensors in `values`, and (in a stage's manifest alone)
tied parameters whose first place of use is in another stage."""


@dataclass(frozen=True)
class StateEntry:
    """One tensor of the state. dtype as in torch, without the prefix; offset and nbytes in the concatenated blocks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Outline:
    """What a manifest tells beyond entries and values.

    groups: (unit's number, or one of `OUTSIDE`, `VALUES`, `FOREIGN`; how many entries) of each run of entries in blocks
    of their own, which lie in one plane. transient: entries of the model that its `state_dict` leaves out. stage: of a
    stage's manifest, see `topology`.
    """

    groups: tuple[tuple[int, int], ...] = ()
    planes: tuple[Plane, ...] = ()
    transient: tuple[str, ...] = ()
    stage: Mapping[str, Any] | None = None


class Image:
    """Entries with their bytes, and the JSON part (`values`) of the state. Reads memory, changes nothing."""

    def __init__(
        self, entries: Sequence[StateEntry], data: Sequence[memoryview], values: Mapping[str, Any], outline: Outline
    ) -> None:
        """data: the bytes of each entry, in order. They must not change while the image is read."""
        self.entries = tuple(entries)
        self.values = values
        self.outline = outline
        self._data = list(data)
        self._offsets = [e.offset for e in self.entries]
        end = max((e.offset + e.nbytes for e in self.entries), default=0)
        self.n_blocks = round_up(end, BLOCK_BYTES) // BLOCK_BYTES
        self._digests: dict[int, str] = {}

    @staticmethod
    def of_tensors(
        entries: Sequence[StateEntry], tensors: Sequence[Tensor], values: Mapping[str, Any], outline: Outline
    ) -> Image:
        """Over the tensors' own memory where they are contiguous and in host memory, else over copies made now."""
        return Image(entries, [bytes_of(t) for t in tensors], values, outline)

    def read_block(self, index: int) -> memoryview:
        """The bytes of one block, `BLOCK_BYTES` long; without a copy if it lies inside one entry."""
        check(0 <= index < self.n_blocks, f"there is no block {index} of {self.n_blocks}")
        start = index * BLOCK_BYTES
        stop = start + BLOCK_BYTES
        first = max(bisect_right(self._offsets, start) - 1, 0)
        entry = self.entries[first]
        if entry.offset <= start and entry.offset + entry.nbytes >= stop:
            return self._data[first][start - entry.offset : stop - entry.offset]
        block = memoryview(bytearray(BLOCK_BYTES))
        for k in range(first, len(self.entries)):
            entry = self.entries[k]
            if entry.offset >= stop:
                break
            lo, hi = max(entry.offset, start), min(entry.offset + entry.nbytes, stop)
            if lo < hi:
                block[lo - start : hi - start] = self._data[k][lo - entry.offset : hi - entry.offset]
        return block

    def blocks_of(self, plane: str, start: int, stop: int) -> list[int]:
        """The blocks of a plane with something of the element blocks `start` to `stop` - 1; none if there is no such
        plane. So the owner of a range of the gradient finds its share of the optimizer's state."""
        found = [p for p in self.outline.planes if p.name == plane]
        return found[0].blocks(start, stop) if found else []

    def block_digest(self, index: int) -> str:
        """Of one block; only this one is read, and only the first time."""
        if index not in self._digests:
            self._digests[index] = digest_bytes(self.read_block(index))
        return self._digests[index]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """JSON: format, block_bytes, entries, digests (of each entry), groups, planes, transient, values, stage (of a
        stage's alone), blocks (the digest of each), and the digest of all the rest."""
        blocks, digests = self._hashes()
        return manifest_of(self.entries, self.values, self.outline, blocks, digests)

    def _hashes(self) -> tuple[list[str], list[str]]:
        """(digest of each block, digest of each entry), in one pass, so that memory is read once."""
        hashes = [xxhash.xxh3_128() for _ in self.entries]
        blocks = []
        first = 0
        for index in range(self.n_blocks):
            blocks.append(self.block_digest(index))
            start, stop = index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES
            while first < len(self.entries) and self.entries[first].offset + self.entries[first].nbytes <= start:
                first += 1
            for k in range(first, len(self.entries)):
                entry = self.entries[k]
                if entry.offset >= stop:
                    break
                lo, hi = max(entry.offset, start), min(entry.offset + entry.nbytes, stop)
                if lo < hi:
                    hashes[k].update(self._data[k][lo - entry.offset : hi - entry.offset])
        return blocks, [h.hexdigest() for h in hashes]

    def digest(self, *prefix: int) -> str:
        """Of everything but padding and places; equal exactly when names, types and bits are. prefix: the step, say."""
        return rows_digest(self.rows(), self.values, *prefix)

    def rows(self) -> list[tuple[str, str, tuple[int, ...], str]]:
        """(name, dtype, shape, digest) of every entry, by name."""
        pairs = zip(self.entries, self._data, strict=True)
        return sorted((e.name, e.dtype, e.shape, digest_bytes(data)) for e, data in pairs)


def manifest_of(
    entries: Sequence[StateEntry],
    values: Mapping[str, Any],
    outline: Outline,
    blocks: Sequence[str],
    digests: Sequence[str],
) -> dict[str, Any]:
    """The manifest of a state whose blocks, and whose entries, have these digests."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "block_bytes": BLOCK_BYTES,
        "entries": [[e.name, e.dtype, list(e.shape), e.offset, e.nbytes] for e in entries],
        "digests": list(digests),
        "groups": [list(group) for group in outline.groups],
        "planes": rows_of(outline.planes),
        "transient": list(outline.transient),
        "values": dict(values),
        "blocks": list(blocks),
    }
    if outline.stage is not None:
        body["stage"] = dict(outline.stage)
    return sealed(body)


def entries_of(manifest: Mapping[str, Any]) -> tuple[StateEntry, ...]:
    """The entries of a manifest that came from elsewhere.

    Raises: CheckpointCorrupt if it does not match its digest or is of another format.
    """
    body = {key: value for key, value in manifest.items() if key != "digest"}
    if manifest.get("format") not in FORMATS or manifest.get("block_bytes") != BLOCK_BYTES:
        raise CheckpointCorrupt(f"the manifest has format {manifest.get('format')}; this version reads 1 to {FORMAT}")
    if manifest.get("digest") != _manifest_digest(body):
        raise CheckpointCorrupt("the manifest does not match its digest")
    return tuple(StateEntry(name, dtype, tuple(shape), at, size) for name, dtype, shape, at, size in body["entries"])


class Scatter:
    """Where the bytes of blocks go: the memory of the entries, and of no use what lies between. Thread-safe."""

    def __init__(self, entries: Sequence[StateEntry], targets: Sequence[memoryview]) -> None:
        """targets: a byte view per entry; empty entries are passed over."""
        held = [(e.offset, e.nbytes, target) for e, target in zip(entries, targets, strict=True) if e.nbytes]
        self._starts = [offset for offset, _, _ in held]
        self._held = held

    def views(self, index: int) -> list[memoryview]:
        """Writable views that cover block `index` from its first byte to its last, in order."""
        at, stop = index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES
        found: list[memoryview] = []
        k = max(0, bisect_right(self._starts, at) - 1)
        while at < stop:
            offset, nbytes, target = self._held[k] if k < len(self._held) else (stop, 0, memoryview(b""))
            if offset > at:
                gap = min(offset, stop) - at
                found.append(memoryview(bytearray(gap)))
                at += gap
            elif at < offset + nbytes:
                end = min(offset + nbytes, stop)
                found.append(target[at - offset : end - offset])
                at = end
            else:
                k += 1
        return found


def write_blocks(manifest: Mapping[str, Any], scatter: Scatter, blocks: BlockSource) -> None:
    """Fetches block after block, checks it, and writes its parts to the entries' memory.

    Raises: CheckpointCorrupt naming the first block that does not match its digest; what came before is written.
    """
    for index, expected in enumerate(manifest["blocks"]):
        data = memoryview(blocks(index)).cast("B")
        if len(data) != BLOCK_BYTES or digest_bytes(data) != expected:
            raise CheckpointCorrupt(f"block {index} does not match its digest ({len(data)} bytes)")
        at = 0
        for view in scatter.views(index):
            view[:] = data[at : at + len(view)]
            at += len(view)


BlockSource = Callable[[int], Any]
"""Gives the bytes of a block by its number."""


def rows_digest(rows: Sequence[tuple[str, str, tuple[int, ...], str]], values: Mapping[str, Any], *prefix: int) -> str:
    """32 hex digits over the rows (name, dtype, shape, digest), which ascend by name, the values and the prefix."""
    plain = {key: canonical(value) for key, value in values.items()}
    return digest_bytes(json.dumps([*prefix, rows, plain], sort_keys=True).encode())


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own digest."""
    return {**body, "digest": _manifest_digest(body)}


def _manifest_digest(body: Mapping[str, Any]) -> str:
    return digest_bytes(json.dumps(body, sort_keys=True).encode())
