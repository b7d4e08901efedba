"""The manifest of a checkpoint: its job, and the place of each block of the state. A checkpoint exists when its
manifest does.

The text is sealed JSON: any changed byte shows.
"""

from __future__ import annotations

import base64
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import UNSET, Meta, UnsetType

from everstep.base.config import Config, numerics
from everstep.base.errors import CheckpointCorrupt, ConfigError, check
from everstep.checkpoint.names import MAX_STEP, PART_EXAMPLE, is_part
from everstep.checkpoint.pointers import detach, seal, unseal_one_of
from everstep.exact.digest import digest_bytes
from everstep.exact.extra_state import is_extra
from everstep.exact.image import (
    BLOCK_BYTES,
    FOREIGN,
    FORMATS,
    ITEM_SIZES,
    MODEL,
    REST,
    StateEntry,
    entries_of,
    is_kind,
    span_of,
)
from everstep.protocol.converter import converter
from everstep.protocol.identity import Kernels, told

KIND = "checkpoint"
_MODEL = "model/"
_NAMED = 5

TensorRow = tuple[str, str, tuple[int, ...]]
"""Name, dtype (as torch says it, without the prefix) and shape of one parameter or buffer."""


@dataclass(frozen=True)
class JobIdentity:
    """The job of a checkpoint.

    numerics: the config values that the bits depend on (`everstep.base.config.numerics`), lanes and seed among them.
    tensors: the whole model's parameters and buffers. job: names this job, and no other one of the same kind.
    kernels: its numerics fingerprint, None if unknown.
    """

    task: str
    numerics: Mapping[str, Any]
    tensors: tuple[TensorRow, ...] = ()
    job: str = ""
    kernels: Kernels | None = None

    @property
    def model(self) -> str:
        """32 hex digits: equal for models with the same names, types and shapes."""
        return digest_bytes(repr(sorted(self.tensors)).encode())

    def to_dict(self) -> dict[str, Any]:
        return {"task": self.task, "numerics": dict(self.numerics), "model": self.model, "job": self.job}


Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
StepNumber = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class PartFile(NamedTuple):
    """One file with blocks. `head`: digest of its first `data_at` bytes, a safetensors header; `tree`: digest of the
    digests of its blocks, in order; sizes in bytes."""

    name: str
    size: Count
    data_at: Count
    head: Digest
    tree: Digest

    @property
    def n_blocks(self) -> int:
        return (self.size - self.data_at) // BLOCK_BYTES

    @property
    def mark(self) -> str:
        """Mark by which the file's content is known."""
        return f"{self.head}{self.tree}"


class StoredRun(NamedTuple):
    """`n_blocks` consecutive blocks of the state from `first` on, one after the other in file number `file`, from byte
    `offset` on."""

    first: Count
    n_blocks: Count
    file: Count
    offset: Count


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint.

    state: the whole manifest of `everstep.exact.image`. base: the step of the checkpoint that this one continues, with
    `depth` such steps back to a full one. records: of the step's decision. application: further opaque parts by name.
    identity: as `JobIdentity.to_dict`. written_bytes: what was new in it. hosts: by file, the hosts that had it then;
    empty where all see one directory. numerics: the kernels of the worker that wrote it, None where it does not say.
    finite: False if parameters or optimizer state are known not to be.
    """

    step: int
    generation: int
    identity: Mapping[str, Any]
    base: int | None = None
    depth: int = 0
    written_bytes: int = 0
    created_unix_ns: int = 0
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: tuple[PartFile, ...]
    runs: tuple[StoredRun, ...]
    records: bytes = b""
    application: Mapping[str, bytes] = field(default_factory=dict)
    state: Mapping[str, Any]
    hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numerics: Kernels | None = None
    finite: bool = True

    @property
    def n_blocks(self) -> int:
        return len(self.state["blocks"])

    @property
    def size_bytes(self) -> int:
        """Size of the state in bytes, even if only a part was written."""
        return self.n_blocks * BLOCK_BYTES

    @cached_property
    def entries(self) -> tuple[StateEntry, ...]:
        return entries_of(self.state)

    @cached_property
    def tensors(self) -> tuple[TensorRow, ...]:
        """Parameters and buffers; extra state of modules has no fixed size."""
        found = ((e.name.removeprefix(_MODEL), e) for e in self.entries if e.name.startswith(_MODEL))
        return tuple((name, e.dtype, e.shape) for name, e in found if not is_extra(name))

    @cached_property
    def _firsts(self) -> list[int]:
        return [run.first for run in self.runs]

    def place(self, index: int) -> tuple[PartFile, int]:
        """The file and the byte in it where a block begins."""
        check(0 <= index < self.n_blocks, f"there is no block {index} of {self.n_blocks}")
        run = self.runs[bisect_right(self._firsts, index) - 1]
        return self.files[run.file], run.offset + (index - run.first) * BLOCK_BYTES

    def encode(self) -> bytes:
        body = {item.name: getattr(self, item.name) for item in fields(self)} | {
            "metrics": {name: float(value).hex() for name, value in self.metrics.items()},
            "records": _text(self.records),
            "application": {name: _text(data) for name, data in self.application.items()},
        }
        body["numerics"] = told(self.numerics)
        for name in ("hosts", "numerics"):
            if not body[name]:
                del body[name]
        if self.finite:
            del body["finite"]
        return seal(KIND, body, self.state["format"])


def decode(data: bytes | bytearray | memoryview, name: str) -> Manifest:
    """The manifest that a text is. name: of the file, for messages.

    Raises: CheckpointCorrupt if a byte differs, or it says what Everstep never writes. ConfigError if it is whole, but
    of a format that this version does not read.
    """
    version, body = unseal_one_of(KIND, detach(bytes(data))[0], name, FORMATS)
    try:
        form = msgspec.structs.asdict(check_form(body, version))
        return Manifest(
            **{
                **form,
                "identity": body["identity"],
                "metrics": {name: _float(text) for name, text in form["metrics"].items()},
                "records": _bytes(form["records"]),
                "application": {name: _bytes(text) for name, text in form["application"].items()},
                "state": body["state"],
                "hosts": body.get("hosts", {}),
                "numerics": form["numerics"] or None,
                "finite": form["finite"],
            }
        )
    except (ValueError, OverflowError, RecursionError) as error:
        raise CheckpointCorrupt(f"{name} is not as Everstep writes it: {error}") from None


def differences(manifest: Manifest, identity: JobIdentity) -> tuple[list[str], list[str]]:
    """Differences of a checkpoint from a job, as text: those that cannot be loaded, and those that cost exactness."""
    fatal: list[str] = []
    theirs = {name: (dtype, shape) for name, dtype, shape in manifest.tensors}
    mine = {name: (dtype, shape) for name, dtype, shape in identity.tensors}
    apart = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)] if mine else []
    if apart:
        said = [f"{name} is {_shown(theirs.get(name))} there, {_shown(mine.get(name))} here" for name in apart[:_NAMED]]
        more = [f"and {len(apart) - _NAMED} more"] if len(apart) > _NAMED else []
        fatal.append(f"another model: {', '.join([*said, *more])}")
    loose: list[str] = []
    if manifest.identity["task"] != identity.task:
        loose.append(f"task is {manifest.identity['task']} there, {identity.task} here")
    here = json.loads(json.dumps(dict(identity.numerics)))
    later = {key: value for key, value in numerics(Config()).items() if key in here}  # keys that it may not know yet
    there = {**later, **manifest.identity["numerics"]}
    loose += [
        f"{key} is {there.get(key)} there, {here.get(key)} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    return fatal, loose


def refuse_foreign(manifest: Manifest, identity: JobIdentity, *, allow_mismatch: bool = False) -> None:
    """Raises: ConfigError if it is of another model, or (unless allowed) of another task, config or seed."""
    fatal, loose = differences(manifest, identity)
    where = f"the checkpoint of step {manifest.step}"
    if fatal:
        raise ConfigError(f"{where} is of {'; '.join(fatal)}: choose another directory, or --fresh to start over")
    if loose and not allow_mismatch:
        raise ConfigError(
            f"{where} is of another job: {'; '.join(loose)}; use its settings, or --set checkpoint.allow_mismatch=true "
            "to go on from it inexactly"
        )


def refuse_kernels(manifest: Manifest, kernels: Kernels | None) -> None:
    """Raises: ConfigError if it was computed with other kernels, as far as both are known."""
    words = kernels.unlike(manifest.numerics, "it") if kernels is not None and manifest.numerics is not None else ""
    if words:
        raise ConfigError(
            f"the checkpoint of step {manifest.step} was computed with kernels that give {words}; resume on such a "
            "host, or set numerics.changed=warn to go on inexactly"
        )


def compact(places: Sequence[tuple[int, int]]) -> tuple[StoredRun, ...]:
    """Runs for the (file number, byte) of every block, in order."""
    runs: list[StoredRun] = []
    for index, (file, offset) in enumerate(places):
        last = runs[-1] if runs else None
        if last is not None and last.file == file and last.offset + last.n_blocks * BLOCK_BYTES == offset:
            runs[-1] = last._replace(n_blocks=last.n_blocks + 1)
        else:
            runs.append(StoredRun(index, 1, file, offset))
    return tuple(runs)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    data = base64.b64decode(text, validate=True)
    if _text(data) != text:
        raise ValueError("expected base64 as it is written")
    return data


def _float(text: str) -> float:
    value = float.fromhex(text)
    if value.hex() != text:
        raise ValueError("expected a hexadecimal number as it is written")
    return value


def _shown(row: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{row[0]}{list(row[1])}" if row else "missing"


# ---- the form
#
# Types and bounds of everything in a manifest, and that it all fits together. Nothing is trusted: a
# writer of a manifest can write its digest too, and its values lead to files, memory and tensors.


MAX_HEAD_BYTES = 256 << 20
_SHOWN = 100

EntryRow = tuple[str, str, list[Count], Count, Count]
ElementBlock = Annotated[int, Meta(ge=0, le=1 << 47)]
PlaneRow = tuple[str, Count, list[tuple[ElementBlock, Count, Count]]]
Label = Annotated[int, Meta(ge=FOREIGN, le=(1 << 63) - 1)]


HostName = Annotated[str, Meta(min_length=1, max_length=100)]


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
    settings: dict[str, Any] | UnsetType = UNSET


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
    files: tuple[PartFile, ...]
    runs: tuple[StoredRun, ...]
    records: str
    application: dict[str, str]
    state: State
    hosts: dict[str, tuple[HostName, ...]] | UnsetType = UNSET
    numerics: Kernels | UnsetType = UNSET
    finite: bool = True


_form = converter(Form)


def check_form(body: Mapping[str, Any], version: int) -> Form:
    """The body of a manifest, whole and within bounds. version: of its file, which is the state's too.

    Raises: ValueError in one line, saying what was expected.
    """
    try:
        form = _form(body)
    except msgspec.ValidationError as error:
        raise ValueError(ascii(str(error))[1:-1]) from None
    seen: set[str] = set()
    for row in form.files:
        _check_file(row)
        if row.name in seen:
            raise ValueError(f"it lists {row.name} twice")
        seen.add(row.name)
    if not isinstance(form.hosts, UnsetType) and form.hosts.keys() != seen:
        raise ValueError("it says of other files which hosts have them: expected those that it lists")
    _check_runs(form.files, form.runs, len(form.state.blocks))
    _check_state(form.state)
    if form.state.format != version or isinstance(form.state.planes, UnsetType) != (version == 1):
        raise ValueError(f"the state is of format {form.state.format}: expected that of the file, {version}")
    if not isinstance(form.state.planes, UnsetType):
        _check_planes(form.state, form.state.planes)
    return form


def _check_file(row: PartFile) -> None:
    name, size, data_at, _, _ = row
    if not is_part(name):
        raise ValueError(f"it lists {name[:_SHOWN]!a}, which is no file of a checkpoint: expected {PART_EXAMPLE}")
    if not 8 <= data_at <= MAX_HEAD_BYTES or size <= data_at or (size - data_at) % BLOCK_BYTES:
        raise ValueError(f"{name} has {size} bytes from byte {data_at} on: expected one block or more")


def _check_runs(files: Sequence[PartFile], runs: Sequence[StoredRun], n_blocks: int) -> None:
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
        raise ValueError(f"{files[min(idle)].name} holds no block of it: expected only files that do")


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
    """Type of all tensors of a plane; empty for any."""
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
    name, dtype, _, offset, nbytes = entry
    kind = stretch.plane.partition(":")[0]
    top, _, key = kind.partition("/")
    belongs = name.startswith(f"{top}/") and (not key or name.endswith(f"/{key}")) and dtype == stretch.dtype
    inside = offset + nbytes <= stretch.stop * BLOCK_BYTES
    if not inside or (stretch.dtype and not belongs):
        raise ValueError(f"{name[:_SHOWN]!a} does not belong in plane {stretch.plane!a}, or is not all there")
    return stretch.plane
