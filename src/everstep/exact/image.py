"""A state as bytes: a manifest, and blocks of 256 KiB that can be hashed, sent, stored and checked one by one. No torch
model here: an image is made of named tensors and JSON, live or copied.

Each entry lies in one plane per kind of state, all of which are on the grid of the gradient; the space between entries
is zero bytes. A plane holds the parameters (`model`) or the optimizer's state under one key (`optimizer/exp_avg`), of
one type; types other than float32 have their own planes (`model:bfloat16`). Element e of the flat gradient (`layout`)
is element e of each of these planes, so the owner of a range of the gradient can hash, send or store the same range of
the optimizer's state alone. Everything else is in the plane `rest`, by unit.

Planes follow each other in the order of their names, each beginning at a block. A block holds the elements of one unit
only, and empty blocks do not exist.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import xxhash
from torch import Tensor

from everstep.base.errors import CheckpointCorrupt, check
from everstep.base.extents import Sizes, with_ends
from everstep.exact.digest import bytes_of, digest_bytes
from everstep.exact.jsonable import canonical
from everstep.exact.layout import ALIGN_BYTES, BLOCK_ELEMENTS, round_up
from everstep.exact.state_memory import IN_MEMORY, CopiesThere, StateMemory

BLOCK_BYTES = BLOCK_ELEMENTS * 4
_BLOCKS_AT_ONCE = 64
_OFFSET = attrgetter("offset")
BESIDE = "everstep.beside"  # an extra whose value no digest counts
STRIDES = "strides"  # of what an optimizer keeps for a parameter, by name, where they are not as usual
FORMAT = 2
FORMATS = (1, FORMAT)
"""Formats that can be read. The first one had no planes: all of it is by unit, and in a unit by parameter."""
OUTSIDE, VALUES, FOREIGN = -1, -2, -3
"""Groups of no unit: entries outside all units, tensors in `values`, and (in a stage's manifest alone) tied parameters
whose first place of use is in another stage."""


class StateEntry(NamedTuple):
    """One tensor of the state. dtype as in torch, without the prefix; offset and nbytes in the concatenated blocks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        """The byte after its last one."""
        return self.offset + self.nbytes

    @property
    def blocks(self) -> range:
        """Blocks that hold a part of it."""
        return range(self.offset // BLOCK_BYTES, -(-self.stop // BLOCK_BYTES) if self.nbytes else 0)


def block_count(entries: Sequence[StateEntry]) -> int:
    """Number of blocks that the entries of a state take up."""
    return round_up(max((e.stop for e in entries), default=0), BLOCK_BYTES) // BLOCK_BYTES


def pieces_of(entries: Sequence[StateEntry], index: int) -> Iterator[tuple[int, int, int]]:
    """Content of a block: (number of an entry, from, to), the last two in bytes of the whole state."""
    start, stop = index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES
    for k in range(max(bisect_right(entries, start, key=_OFFSET) - 1, 0), len(entries)):
        entry = entries[k]
        if entry.offset >= stop:
            return
        lo, hi = max(entry.offset, start), min(entry.stop, stop)
        if lo < hi:
            yield k, lo, hi


MODEL, OPTIMIZER, REST = "model", "optimizer", "rest"
ITEM_SIZES = (1, 2, 4)
"""Sizes of elements that planes hold; tensors of larger elements are in `rest`."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")

PlaneRun = tuple[int, int, int]
"""(element block, first block, count): `count` blocks of the state, from the first one on, hold the elements of the
grid from `BLOCK_ELEMENTS` times the element block on."""


class Plane(NamedTuple):
    """Consecutive blocks of a state with one kind of content. itemsize: bytes of an element. runs: ascend, in both
    numbers.

    The elements of `rest` are bytes, and lie on no grid.
    """

    name: str
    itemsize: int
    runs: tuple[PlaneRun, ...]

    @property
    def start(self) -> int:
        """Its first block."""
        return self.runs[0][1]

    @property
    def stop(self) -> int:
        """The block after its last one."""
        return self.runs[-1][1] + self.runs[-1][2]

    @property
    def span(self) -> int:
        """Number of element blocks that fit in a block."""
        return span_of(self.itemsize)

    def grid(self) -> dict[int, int]:
        """First element block of each of its blocks."""
        return {first + k: at + k * self.span for at, first, count in self.runs for k in range(count)}


class Outline(NamedTuple):
    """Contents of a manifest beyond entries and values.

    groups: (unit's number, or one of `OUTSIDE`, `VALUES`, `FOREIGN`; number of entries) of each run of entries in
    blocks of their own, which lie in one plane. transient: entries of the model that its `state_dict` leaves out.
    stage: in a stage's manifest, see `topology`. settings: of the model, see `exact.settings`; in no digest of the
    state. ends: where segments of the optimizer's state end, if parameters stay whole (`placement.shards.ends_of`); not
    in checkpoints.
    """

    groups: tuple[tuple[int, int], ...] = ()
    planes: tuple[Plane, ...] = ()
    transient: tuple[str, ...] = ()
    stage: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = {}
    ends: tuple[int, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """Sizes of the planes in blocks, in the order of the blocks' numbers, for sets of blocks (`base.extents`)."""
        return _sizes(self.planes, self.ends)


class Image:
    """Entries with their bytes, and the JSON part (`values`) of the state. Reads memory, changes nothing."""

    def __init__(
        self,
        entries: Sequence[StateEntry],
        data: Sequence[memoryview],
        values: Mapping[str, Any],
        outline: Outline,
        memory: StateMemory = IN_MEMORY,
        copied: CopiesThere | None = None,
    ) -> None:
        """data: the bytes of each entry, in order. They must not change while the image is read. memory: where they
        lie; copied: if that is a copy of which some is elsewhere."""
        self.entries = tuple(entries)
        self.values = values
        self.outline = outline
        self._data = list(data)
        self._there, self._let_go = memory.there if copied is None else copied.there, memory.let_go
        self._look: Callable[[], None] = lambda: None
        self.n_blocks = block_count(self.entries)

    @staticmethod
    def of_tensors(
        entries: Sequence[StateEntry],
        tensors: Sequence[Tensor],
        values: Mapping[str, Any],
        outline: Outline,
        memory: StateMemory = IN_MEMORY,
    ) -> Image:
        """Image over the tensors' own memory if they are contiguous and in host memory, else over copies made now."""
        data = [bytes_of(t if t.is_contiguous() else memory.whole(t)) for t in tensors]
        return Image(entries, data, values, outline, memory)

    def look_at(self, look: Callable[[], None]) -> None:
        """Call this now and then while blocks are hashed; what it raises ends that."""
        self._look = look

    def read_block(self, index: int) -> memoryview:
        """The bytes of one block, `BLOCK_BYTES` long; without a copy if it lies inside one entry."""
        check(0 <= index < self.n_blocks, f"there is no block {index} of {self.n_blocks}")
        start = index * BLOCK_BYTES
        pieces = [(lo, self._bytes(k, lo, hi)) for k, lo, hi in pieces_of(self.entries, index)]
        if len(pieces) == 1 and len(pieces[0][1]) == BLOCK_BYTES:
            return pieces[0][1]
        block = memoryview(bytearray(BLOCK_BYTES))
        for lo, data in pieces:
            block[lo - start : lo - start + len(data)] = data
        return block

    def _bytes(self, k: int, lo: int, hi: int) -> memoryview:
        offset = self.entries[k].offset
        return self._there(self._data[k][lo - offset : hi - offset])

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """JSON: format, block_bytes, entries, digests (of each entry), groups, planes, transient, values, stage (only
        of a stage's), settings (if some have changed), blocks (the digest of each), and the digest of all the rest."""
        blocks, digests = self._hashes()
        return manifest_of(self.entries, self.values, self.outline, blocks, digests)

    def _hashes(self) -> tuple[list[str], list[str]]:
        """(digest of each block, digest of each entry), in one pass, so that memory is read once."""
        hashes = [xxhash.xxh3_128() for _ in self.entries]
        blocks = []
        for index in range(self.n_blocks):
            data, start = self.read_block(index), index * BLOCK_BYTES
            blocks.append(digest_bytes(data))
            for k, lo, hi in pieces_of(self.entries, index):
                hashes[k].update(data[lo - start : hi - start])
            if index % _BLOCKS_AT_ONCE == 0:
                self._look()
                self._let_go()
        return blocks, [h.hexdigest() for h in hashes]

    def digest(self, *prefix: int) -> str:
        """Digest of everything but padding and places; equal exactly when names, types and bits are. prefix: such as
        the step."""
        return rows_digest(self.rows(), self.values, *prefix)

    def part_digests(self, *prefix: int, planes: frozenset[str] | None = None) -> tuple[str, dict[str, str]]:
        """`digest`, and the digests of each entry and of each value (of each group of the optimizer), by name. planes:
        those that count; None: all."""
        rows = self.rows(planes)
        found = {name: digest for name, _, _, digest in rows} | value_digests(self.values)
        return rows_digest(rows, self.values, *prefix), found

    def rows(self, planes: frozenset[str] | None = None) -> list[tuple[str, str, tuple[int, ...], str]]:
        """(name, dtype, shape, digest) of every entry, by name. planes: of which; None: of all."""
        found = []
        for entry, data in zip(self.entries, self._data, strict=True):
            plane = plane_at(self.outline.planes, entry.offset // BLOCK_BYTES) if planes is not None else None
            if planes is not None and plane is not None and plane.name not in planes:
                continue
            found.append((entry.name, entry.dtype, entry.shape, digest_bytes(self._there(data))))
            self._let_go()
        return sorted(found)


def manifest_of(
    entries: Sequence[StateEntry],
    values: Mapping[str, Any],
    outline: Outline,
    blocks: Sequence[str],
    digests: Sequence[str],
) -> dict[str, Any]:
    """Manifest of a state whose blocks and entries have these digests."""
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
    if outline.settings:
        body["settings"] = dict(outline.settings)
    if outline.ends:
        body["ends"] = list(outline.ends)
    return sealed(body)


def entries_of(manifest: Mapping[str, Any]) -> tuple[StateEntry, ...]:
    """Entries of a manifest that came from elsewhere.

    Raises: CheckpointCorrupt if it does not match its digest or is of another format.
    """
    body = {key: value for key, value in manifest.items() if key != "digest"}
    if manifest.get("format") not in FORMATS or manifest.get("block_bytes") != BLOCK_BYTES:
        raise CheckpointCorrupt(f"the manifest has format {manifest.get('format')}; this version reads 1 to {FORMAT}")
    if manifest.get("digest") != _manifest_digest(body):
        raise CheckpointCorrupt("the manifest does not match its digest")
    return tuple(StateEntry(name, dtype, tuple(shape), at, size) for name, dtype, shape, at, size in body["entries"])


class Scatter:
    """Targets of the bytes of blocks: the memory of the entries; bytes between entries are discarded. `views`, then
    `written` once they are right. Thread-safe."""

    def __init__(
        self, entries: Sequence[StateEntry], targets: Sequence[memoryview], memory: StateMemory = IN_MEMORY
    ) -> None:
        """targets: a byte view per entry; those of empty entries are not used. memory: that they lie in."""
        self._entries, self._targets, self._memory = entries, targets, memory
        self._sends: dict[int, list[Callable[[], None]]] = {}

    def views(self, index: int) -> list[memoryview]:
        """Writable views that cover block `index` from its first byte to its last, in order."""
        at, found, sends = index * BLOCK_BYTES, list[memoryview](), list[Callable[[], None]]()
        for k, lo, hi in pieces_of(self._entries, index):
            offset = self._entries[k].offset
            found.append(memoryview(bytearray(lo - at)))
            for view, send in self._memory.destinations(self._targets[k][lo - offset : hi - offset]):
                found.append(view)
                sends.append(send)
            at = hi
        self._sends[index] = sends
        return [view for view in (*found, memoryview(bytearray((index + 1) * BLOCK_BYTES - at))) if view]

    def written(self, index: int) -> None:
        for send in self._sends.pop(index):
            send()

    def end(self) -> None:
        """Raises: InvariantViolation if a block that was asked for was not written."""
        check(not self._sends, f"{len(self._sends)} blocks were not written")


def write_blocks(manifest: Mapping[str, Any], scatter: Scatter, blocks: BlockSource) -> None:
    """Fetch block after block, check it, and write its parts to the entries' memory.

    Raises: CheckpointCorrupt naming the first block that does not match its digest; earlier blocks are written.
    """
    for index, expected in enumerate(manifest["blocks"]):
        data = memoryview(blocks(index)).cast("B")
        if len(data) != BLOCK_BYTES or digest_bytes(data) != expected:
            raise CheckpointCorrupt(f"block {index} does not match its digest ({len(data)} bytes)")
        spread(data, scatter.views(index))
        scatter.written(index)


def spread(data: memoryview, views: Iterable[memoryview]) -> int:
    """Copy bytes into one view after the other, as far as they reach; returns their number."""
    at = 0
    for view in views:
        here = data[at : at + len(view)]
        view[: len(here)] = here
        at += len(here)
    return at


BlockSource = Callable[[int], Any]
"""Gives the bytes of a block by its number."""


def rows_digest(rows: Sequence[tuple[str, str, tuple[int, ...], str]], values: Mapping[str, Any], *prefix: int) -> str:
    """32 hex digits over the rows (name, dtype, shape, digest), which ascend by name, the values and the prefix."""
    plain = {key: canonical(value) for key, value in digested(values).items()}
    return digest_bytes(json.dumps([*prefix, rows, plain], sort_keys=True).encode())


def value_digests(values: Mapping[str, Any]) -> dict[str, str]:
    """Digest of each value, and of each group of the optimizer, by name."""
    found: dict[str, str] = {}
    for key, value in sorted(digested(values).items()):
        each = {f"{key}/{k}": one for k, one in enumerate(value)} if isinstance(value, list) else {key: value}
        found |= {name: digest_bytes(json.dumps(canonical(one), sort_keys=True).encode()) for name, one in each.items()}
    return found


def digested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that must be alike where states are."""
    return {key: value for key, value in values.items() if key not in (f"extras/{BESIDE}", STRIDES)}


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own digest."""
    return {**body, "digest": _manifest_digest(body)}


def _manifest_digest(body: Mapping[str, Any]) -> str:
    return digest_bytes(json.dumps(body, sort_keys=True).encode())


# ---- planes


def span_of(itemsize: int) -> int:
    """Number of element blocks that fit in a block of elements of this size."""
    return 4 // itemsize


def runs_of(places: Iterable[tuple[int, int]], itemsize: int) -> tuple[PlaneRun, ...]:
    """Runs of a plane with these (element block, block) pairs, which ascend."""
    runs: list[PlaneRun] = []
    for at, block in places:
        extend(runs, at, block, 1, span_of(itemsize))
    return tuple(runs)


def extend(runs: list[PlaneRun], at: int, first: int, count: int, span: int) -> None:
    """Add blocks to a plane: to its last run if they follow it in both numbers, else as a new run."""
    if runs:
        last_at, last_first, last_count = runs[-1]
        if (last_at + last_count * span, last_first + last_count) == (at, first):
            runs[-1] = (last_at, last_first, last_count + count)
            return
    runs.append((at, first, count))


def is_kind(kind: str) -> bool:
    """Whether there are planes of this kind: `model`, or `optimizer/` and a plain key."""
    top, slash, key = kind.partition("/")
    return kind == MODEL or (top == OPTIMIZER and bool(slash) and _KEY.fullmatch(key) is not None)


# ---- as JSON


def rows_of(planes: Sequence[Plane]) -> list[list[object]]:
    """Planes in the form of a manifest: name, itemsize, runs."""
    return [[p.name, p.itemsize, [list(run) for run in p.runs]] for p in planes]


def planes_of(manifest: Mapping[str, object]) -> tuple[Plane, ...]:
    """Planes of a manifest; a manifest without planes (format 1) has only `rest`."""
    rows = manifest.get("planes")
    if rows is None:
        n_blocks = len(manifest["blocks"])  # type: ignore[arg-type]
        return (Plane(REST, 1, ((0, 0, n_blocks),)),) if n_blocks else ()
    return tuple(Plane(name, size, tuple((a, b, n) for a, b, n in runs)) for name, size, runs in rows)  # type: ignore[attr-defined]


def sizes_of(manifest: Mapping[str, Any]) -> Sizes:
    """`Outline.sizes` of a manifest's state."""
    return _sizes(planes_of(manifest), manifest.get("ends", ()))


def _sizes(planes: Sequence[Plane], ends: Sequence[int]) -> Sizes:
    return with_ends(((plane.name, plane.stop - plane.start) for plane in planes), ends)


def plane_at(planes: Sequence[Plane], block: int) -> Plane | None:
    """Plane that has this block; None if there is none."""
    k = bisect_right([p.start for p in planes], block) - 1
    return planes[k] if k >= 0 and block < planes[k].stop else None


# ---- giving tensors their places


@dataclass(frozen=True)
class Spot:
    """A parameter's place on the grid, in elements. unit: number in the whole model; start: the unit's begin."""

    unit: int
    start: int
    offset: int
    shape: tuple[int, ...]


@dataclass
class Arrangement:
    """Takes tensors one by one, and gives each its place at the end. labels: of the groups in `rest`, in order."""

    labels: Sequence[int]
    _planes: dict[str, list[tuple[Spot, str, Tensor]]] = field(default_factory=dict)
    _rest: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, label: int, kind: str = "", spot: Spot | None = None) -> None:
        """Add a tensor. kind: of its plane, if it is shaped like the parameter at `spot`. label: of its group
        otherwise."""
        plane = plane_name(kind, tensor)
        if spot is None or spot.shape != tuple(tensor.shape) or not tensor.numel() or not plane:
            self._rest.setdefault(label, []).append((name, tensor))
        else:
            self._planes.setdefault(plane, []).append((spot, name, tensor))

    def done(self) -> tuple[tuple[StateEntry, ...], list[Tensor], tuple[tuple[int, int], ...], tuple[Plane, ...]]:
        """Entries and their tensors, groups and planes in the form of an `Outline`."""
        entries: list[StateEntry] = []
        tensors: list[Tensor] = []
        groups: list[tuple[int, int]] = []
        planes: list[Plane] = []
        n_blocks = 0
        for name in sorted(self._planes):
            items = sorted(self._planes[name], key=lambda item: item[0].offset)
            itemsize = items[0][2].element_size()
            runs: list[PlaneRun] = []
            for unit, members in groupby(items, key=lambda item: item[0].unit):
                placed = list(members)
                found, n_blocks = _place_unit(placed, itemsize, runs, n_blocks)
                entries += found
                tensors += [tensor for _, _, tensor in placed]
                groups.append((unit, len(placed)))
            planes.append(Plane(name, itemsize, tuple(runs)))
        first = n_blocks
        for label in self.labels:
            rest = self._rest.get(label, [])
            if rest:
                found = _place_densely(rest, n_blocks * BLOCK_BYTES)
                n_blocks = block_count(found)
                entries += found
                tensors += [tensor for _, tensor in rest]
                groups.append((label, len(rest)))
        if n_blocks > first:
            planes.append(Plane(REST, 1, ((0, first, n_blocks - first),)))
        return tuple(entries), tensors, tuple(groups), tuple(planes)


def plane_name(kind: str, tensor: Tensor) -> str:
    """Plane that a tensor of a kind belongs to; "" if there is none."""
    if not is_kind(kind) or tensor.element_size() not in ITEM_SIZES:
        return ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return kind if dtype == "float32" else f"{kind}:{dtype}"


def _place_unit(
    items: Sequence[tuple[Spot, str, Tensor]], itemsize: int, runs: list[PlaneRun], n_blocks: int
) -> tuple[list[StateEntry], int]:
    """Entries of one unit in one plane, whose runs are extended; and the number of blocks after that."""
    entries = []
    last, shift = -1, 0  # in blocks from the unit's beginning; from there to the numbers of the state
    for spot, name, tensor in items:
        begin = (spot.offset - spot.start) * itemsize
        nbytes = tensor.numel() * itemsize
        first, end = begin // BLOCK_BYTES, (begin + nbytes - 1) // BLOCK_BYTES
        new = max(first, last + 1)
        if new > last + 1 or last < 0:
            shift = n_blocks - new
        if end >= new:
            span = span_of(itemsize)
            extend(runs, spot.start // BLOCK_ELEMENTS + new * span, n_blocks, end - new + 1, span)
            n_blocks += end - new + 1
            last = end
        entries.append(_entry(name, tensor, shift * BLOCK_BYTES + begin))
    return entries, n_blocks


def _place_densely(items: Sequence[tuple[str, Tensor]], offset: int) -> list[StateEntry]:
    entries = []
    for name, tensor in items:
        entries.append(_entry(name, tensor, offset))
        offset = round_up(offset + entries[-1].nbytes, ALIGN_BYTES)
    return entries


def _entry(name: str, tensor: Tensor, offset: int) -> StateEntry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StateEntry(name, dtype, tuple(tensor.shape), offset, tensor.numel() * tensor.element_size())
