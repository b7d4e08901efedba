"""The manifest of a checkpoint: what it is of, and where each block of the state lies. A checkpoint exists when its
manifest does.

The text is sealed JSON: any changed byte shows.
"""

from __future__ import annotations

import base64
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from everstep.base.config import Config, numerics
from everstep.base.errors import CheckpointCorrupt, ConfigError, check
from everstep.checkpoint.manifest_form import Form, check_form
from everstep.checkpoint.sealed import seal, unseal_one_of
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES, FORMATS, StateEntry, entries_of

KIND = "checkpoint"
_MODEL = "model/"
_NAMED = 5

TensorRow = tuple[str, str, tuple[int, ...]]
"""Name, dtype (as torch says it, without the prefix) and shape of one parameter or buffer."""


@dataclass(frozen=True)
class JobIdentity:
    """Which job a checkpoint is of.

    numerics: the config values that the bits depend on (`everstep.base.config.numerics`), lanes and seed among them.
    tensors: the whole model's parameters and buffers. job: names this job and no other one of the same kind.
    """

    task: str
    numerics: Mapping[str, Any]
    tensors: tuple[TensorRow, ...] = ()
    job: str = ""

    @property
    def model(self) -> str:
        """32 hex digits: equal for models with the same names, types and shapes."""
        return digest_bytes(repr(sorted(self.tensors)).encode())

    def to_dict(self) -> dict[str, Any]:
        """As the manifest says it."""
        return {"task": self.task, "numerics": dict(self.numerics), "model": self.model, "job": self.job}


@dataclass(frozen=True)
class PartFile:
    """One file with blocks. `head`: digest of its first `data_at` bytes, a safetensors header; `tree`: digest of the
    digests of its blocks, in order; sizes in bytes."""

    name: str
    size: int
    data_at: int
    head: str
    tree: str

    @property
    def n_blocks(self) -> int:
        return (self.size - self.data_at) // BLOCK_BYTES


@dataclass(frozen=True)
class StoredRun:
    """`count` consecutive blocks of the state from `first` on, one after the other in file number `file`, from byte
    `offset` on."""

    first: int
    count: int
    file: int
    offset: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    state: the whole manifest of `everstep.exact.image`. base: the step of the checkpoint that this one continues, with
    `depth` such steps back to a full one. records: of the step's decision. application: further opaque parts by name.
    identity: as `JobIdentity.to_dict`. written_bytes: what was new in it.
    """

    step: int
    generation: int
    identity: Mapping[str, Any]
    state: Mapping[str, Any]
    files: tuple[PartFile, ...]
    runs: tuple[StoredRun, ...]
    base: int | None = None
    depth: int = 0
    written_bytes: int = 0
    created_unix_ns: int = 0
    reason: str = ""
    records: bytes = b""
    application: Mapping[str, bytes] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def n_blocks(self) -> int:
        return len(self.state["blocks"])

    @property
    def size_bytes(self) -> int:
        """Of the state, whatever was written anew."""
        return self.n_blocks * BLOCK_BYTES

    @cached_property
    def entries(self) -> tuple[StateEntry, ...]:
        return entries_of(self.state)

    @cached_property
    def tensors(self) -> tuple[TensorRow, ...]:
        """Parameters and buffers."""
        found = (e for e in self.entries if e.name.startswith(_MODEL))
        return tuple((e.name.removeprefix(_MODEL), e.dtype, e.shape) for e in found)

    @cached_property
    def _firsts(self) -> list[int]:
        return [run.first for run in self.runs]

    def place(self, index: int) -> tuple[PartFile, int]:
        """The file and the byte in it where a block begins."""
        check(0 <= index < self.n_blocks, f"there is no block {index} of {self.n_blocks}")
        run = self.runs[bisect_right(self._firsts, index) - 1]
        return self.files[run.file], run.offset + (index - run.first) * BLOCK_BYTES

    def encode(self) -> bytes:
        """The text of manifest.json."""
        body = {
            "step": self.step,
            "generation": self.generation,
            "identity": dict(self.identity),
            "base": self.base,
            "depth": self.depth,
            "written_bytes": self.written_bytes,
            "created_unix_ns": self.created_unix_ns,
            "reason": self.reason,
            "metrics": {name: float(value).hex() for name, value in self.metrics.items()},
            "files": [[f.name, f.size, f.data_at, f.head, f.tree] for f in self.files],
            "runs": [[r.first, r.count, r.file, r.offset] for r in self.runs],
            "records": _text(self.records),
            "application": {name: _text(data) for name, data in self.application.items()},
            "state": dict(self.state),
        }
        return seal(KIND, body, self.state["format"])


def decode(data: bytes | bytearray | memoryview, name: str) -> Manifest:
    """The manifest that a text is. name: of the file, for messages.

    Raises: CheckpointCorrupt if a byte differs, or it says what Everstep never writes. ConfigError if it is whole, but
    of a format that this version does not read.
    """
    version, body = unseal_one_of(KIND, data, name, FORMATS)
    try:
        return _build(check_form(body, version), body)
    except (ValueError, OverflowError, RecursionError) as error:
        raise CheckpointCorrupt(f"{name} is not as Everstep writes it: {error}") from None


def _build(form: Form, body: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=form.step,
        generation=form.generation,
        identity=body["identity"],
        state=body["state"],
        files=tuple(PartFile(*row) for row in form.files),
        runs=tuple(StoredRun(*row) for row in form.runs),
        base=form.base,
        depth=form.depth,
        written_bytes=form.written_bytes,
        created_unix_ns=form.created_unix_ns,
        reason=form.reason,
        records=_bytes(form.records),
        application={name: _bytes(text) for name, text in form.application.items()},
        metrics={name: _float(text) for name, text in form.metrics.items()},
    )


def differences(manifest: Manifest, identity: JobIdentity) -> tuple[list[str], list[str]]:
    """What a checkpoint has otherwise than a job: what cannot be loaded, and what costs exactness. Both are text."""
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
        raise ConfigError(f"{where} is of {'; '.join(fatal)}: choose another directory, or --fresh to start anew")
    if loose and not allow_mismatch:
        raise ConfigError(
            f"{where} is of another job: {'; '.join(loose)}; use its settings, or --set checkpoint.allow_mismatch=true "
            "to go on from it inexactly"
        )


def compact(places: Sequence[tuple[int, int]]) -> tuple[StoredRun, ...]:
    """Runs for the (file number, byte) of every block, in order."""
    runs: list[StoredRun] = []
    for index, (file, offset) in enumerate(places):
        last = runs[-1] if runs else None
        if last is not None and last.file == file and last.offset + last.count * BLOCK_BYTES == offset:
            runs[-1] = StoredRun(last.first, last.count + 1, file, last.offset)
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
