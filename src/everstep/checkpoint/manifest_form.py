"""What the text of a manifest may say: types and bounds of everything in it, and that it all fits together.

Apart from the manifest because it trusts nothing: whoever can write a manifest can write its digest too, and what it
says leads to files, memory and tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Annotated, Any

import msgspec
import torch
from msgspec import UNSET, Meta, UnsetType

from everstep.checkpoint.names import MAX_STEP, PART_EXAMPLE, is_part
from everstep.exact.image import BLOCK_BYTES, FOREIGN
from everstep.exact.planes import ITEM_SIZES, MODEL, REST, is_kind, span_of

MAX_HEAD_BYTES = 1 << 30
_SHOWN = 100

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
StepNumber = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
FileRow = tuple[str, Count, Count, Digest, Digest]
RunRow = tuple[Count, Count, Count, Count]
EntryRow = tuple[str, str, list[Count], Count, Count]
ElementBlock = Annotated[int, Meta(ge=0, le=1 << 47)]
PlaneRow = tuple[str, Count, list[tuple[ElementBlock, Count, Count]]]
Label = Annotated[int, Meta(ge=FOREIGN, le=(1 << 63) - 1)]


class _Identity(msgspec.Struct, forbid_unknown_fields=True):
    task: str
    numerics: dict[str, Any]
    model: Digest
    job: str


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The manifest of a state, as JSON has it."""

    format: int
    block_bytes: int
    entries: list[EntryRow]
    digests: list[Digest]
    groups: list[tuple[Label, Count]]
    transient: list[str]
    values: dict[str, Any]
    blocks: list[Digest]
    digest: Digest
    planes: list[PlaneRow] | UnsetType = UNSET
    stage: dict[str, Any] | UnsetType = UNSET


class Form(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a manifest, as JSON has it."""

    step: StepNumber
    generation: Count
    identity: _Identity
    base: StepNumber | None
    depth: Count
    written_bytes: Count
    created_unix_ns: Count
    reason: str
    metrics: dict[str, str]
    files: list[FileRow]
    runs: list[RunRow]
    records: str
    application: dict[str, str]
    state: State


def check_form(body: Mapping[str, Any], version: int) -> Form:
    """The body of a manifest, whole and within bounds. version: of its file, which is the state's too.

    Raises: ValueError in one line, saying what was expected.
    """
    try:
        form = msgspec.convert(body, Form)
    except msgspec.ValidationError as error:
        raise ValueError(ascii(str(error))[1:-1]) from None
    seen: set[str] = set()
    for row in form.files:
        _check_file(row)
        if row[0] in seen:
            raise ValueError(f"it lists {row[0]} twice")
        seen.add(row[0])
    _check_runs(form.files, form.runs, len(form.state.blocks))
    _check_state(form.state)
    if form.state.format != version or isinstance(form.state.planes, UnsetType) != (version == 1):
        raise ValueError(f"the state is of format {form.state.format}: expected that of the file, {version}")
    if not isinstance(form.state.planes, UnsetType):
        _check_planes(form.state, form.state.planes)
    return form


def _check_file(row: FileRow) -> None:
    name, size, data_at, _, _ = row
    if not is_part(name):
        raise ValueError(f"it lists {name[:_SHOWN]!a}, which is no file of a checkpoint: expected {PART_EXAMPLE}")
    if not 8 <= data_at <= MAX_HEAD_BYTES or size <= data_at or (size - data_at) % BLOCK_BYTES:
        raise ValueError(f"{name} has {size} bytes from byte {data_at} on: expected one block or more")


def _check_runs(files: Sequence[FileRow], runs: Sequence[RunRow], n_blocks: int) -> None:
    """Every block has exactly one place, inside its file, and no file is without one."""
    at = 0
    for first, count, file, offset in runs:
        if file >= len(files):
            raise ValueError(f"blocks {first} to {first + count} lie in file {file} of {len(files)}")
        name, size, data_at, _, _ = files[file]
        fits = data_at <= offset and offset + count * BLOCK_BYTES <= size and (offset - data_at) % BLOCK_BYTES == 0
        if first != at or count < 1 or not fits:
            raise ValueError(f"blocks {first} to {first + count} have no place in {name}")
        at += count
    if at != n_blocks:
        raise ValueError(f"{at} of {n_blocks} blocks have a place")
    idle = {*range(len(files))} - {file for _, _, file, _ in runs}
    if idle:
        raise ValueError(f"{files[min(idle)][0]} holds no block of it: expected only files that do")


def _check_state(state: State) -> None:
    """Entries follow each other, within the blocks, and are as large as their shapes say."""
    if len(state.digests) != len(state.entries) or sum(count for _, count in state.groups) != len(state.entries):
        raise ValueError(f"{len(state.entries)} tensors, but other numbers of digests or in groups")
    at, end = 0, len(state.blocks) * BLOCK_BYTES
    for name, dtype, shape, offset, nbytes in state.entries:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or prod(shape) * kind.itemsize != nbytes:
            raise ValueError(f"{name[:_SHOWN]!a} has {nbytes} bytes, which is no {dtype[:_SHOWN]!a} of {shape[:8]}")
        if offset < at or offset + nbytes > end:
            raise ValueError(f"{name[:_SHOWN]!a} lies at bytes {offset} to {offset + nbytes}, outside of its place")
        at = offset + nbytes


@dataclass(frozen=True)
class _Stretch:
    """One run of a plane. dtype: of what lies in it, empty for any."""

    plane: str
    dtype: str
    start: int
    stop: int


def _check_planes(state: State, planes: Sequence[PlaneRow]) -> None:
    """Planes share the blocks among them, and what lies in one belongs there."""
    stretches: list[_Stretch] = []
    before = ""
    for name, itemsize, runs in planes:
        dtype = _type_of_plane(name, itemsize)
        if name <= before or not runs:
            raise ValueError(f"plane {name[:_SHOWN]!a} is empty, or not in the order of names")
        before, at = name, 0
        for element, first, count in runs:
            if count < 1 or element < at or first != (stretches[-1].stop if stretches else 0):
                raise ValueError(f"plane {name!a} has no blocks {first} to {first + count}: expected those that follow")
            stretches.append(_Stretch(name, dtype, first, first + count))
            at = element + (count - 1) * span_of(itemsize) + 1
    if (stretches[-1].stop if stretches else 0) != len(state.blocks):
        raise ValueError(f"expected {len(state.blocks)} blocks in planes")
    starts = [stretch.start for stretch in stretches]
    entries = iter(state.entries)
    for _, count in state.groups:
        group = [entry for entry in islice(entries, count) if entry[4]]
        found = [_place_in(entry, stretches[bisect_right(starts, entry[3] // BLOCK_BYTES) - 1]) for entry in group]
        if len(set(found)) > 1:
            raise ValueError(f"{group[0][0][:_SHOWN]!a} is in a group of several planes")


def _type_of_plane(name: str, itemsize: int) -> str:
    """What all tensors of a plane are; empty for any."""
    kind, colon, dtype = name.partition(":")
    if name == REST and itemsize == 1:
        return ""
    dtype = dtype if colon else "float32"
    found = getattr(torch, dtype, None)
    size = found.itemsize if isinstance(found, torch.dtype) else 0
    if not is_kind(kind) or name == f"{kind}:float32" or size not in ITEM_SIZES or size != itemsize:
        raise ValueError(f"{name[:_SHOWN]!a} of {itemsize} bytes per element is no plane: expected {MODEL} of 4, say")
    return dtype


def _place_in(entry: EntryRow, stretch: _Stretch) -> str:
    """The plane that an entry lies in."""
    name, dtype, _, offset, nbytes = entry
    kind = stretch.plane.partition(":")[0]
    top, _, key = kind.partition("/")
    belongs = name.startswith(f"{top}/") and (not key or name.endswith(f"/{key}")) and dtype == stretch.dtype
    inside = offset + nbytes <= stretch.stop * BLOCK_BYTES
    if not inside or (stretch.dtype and not belongs):
        raise ValueError(f"{name[:_SHOWN]!a} does not belong in plane {stretch.plane!a}, or is not all there")
    return stretch.plane
