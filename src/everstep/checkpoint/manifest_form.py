"""What the text of a manifest may say: types and bounds of everything in it, and that it all fits together.

Apart from the manifest because it trusts nothing: whoever can write a manifest can write its digest too, and what it
says leads to files, memory and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any

import msgspec
import torch
from msgspec import UNSET, Meta, UnsetType

from everstep.checkpoint.names import MAX_STEP, PART_EXAMPLE, is_part
from everstep.exact.image import BLOCK_BYTES

MAX_HEAD_BYTES = 1 << 30
_SHOWN = 100

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
FileRow = tuple[str, Count, Count, Digest, Digest]
RunRow = tuple[Count, Count, Count, Count]
EntryRow = tuple[str, str, list[Count], Count, Count]


class _Identity(msgspec.Struct, forbid_unknown_fields=True):
    task: str
    numerics: dict[str, Any]
    model: Digest
    job: str


class _State(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    block_bytes: int
    entries: list[EntryRow]
    digests: list[Digest]
    groups: list[tuple[int, Count]]
    transient: list[str]
    values: dict[str, Any]
    blocks: list[Digest]
    digest: Digest
    stage: dict[str, Any] | UnsetType = UNSET


class Form(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a manifest, as JSON has it."""

    step: Step
    generation: Count
    identity: _Identity
    base: Step | None
    depth: Count
    written_bytes: Count
    created_unix_ns: Count
    reason: str
    metrics: dict[str, str]
    files: list[FileRow]
    runs: list[RunRow]
    records: str
    application: dict[str, str]
    state: _State


def check_form(body: Mapping[str, Any]) -> Form:
    """The body of a manifest, whole and within bounds. Raises: ValueError in one line, saying what was expected."""
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


def _check_state(state: _State) -> None:
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
