"""A checkpoint as other tools see it: the model's tensors under its own names, and the optimizer's by parameter.

Apart from the file formats (`interchange_formats`), because it needs a checkpoint alone, not the model's class. What a
state does not say by itself (further names of tied parameters, buffers that `state_dict` leaves out) is written into
each checkpoint as `application[NAMES]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from everstep.base.errors import CheckpointCorrupt
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.reader import Checkpoint
from everstep.exact.image import BLOCK_BYTES, StateEntry
from everstep.exact.jsonable import decode

NAMES = "names"
"""The part of `Manifest.application` that `names_record` makes."""
_MODEL = "model/"

OnProgress = Callable[[int, int], None]
"""Told how many bytes of how many were read."""


class _Record(msgspec.Struct):
    names: dict[str, str]


@dataclass
class Weights:
    """What the formats hold. model: as `state_dict` has it. optimizer: as
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` has it, by parameter name; None if absent.
    """

    model: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None

    @property
    def size_bytes(self) -> int:
        """Of the model's tensors, ties counted each time."""
        return sum(t.numel() * t.element_size() for t in self.model.values())


def names_record(model: nn.Module) -> bytes:
    """What `export` needs beyond the state: of the whole model, in any topology the same.

    JSON: `names`, what `state_dict` calls each tensor -> the name that the state has it under (the first of a tie).
    """
    firsts: dict[tuple[Any, ...], str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        firsts.setdefault(memory_of(name, tensor), name)
    kept = model.state_dict(keep_vars=True)
    names = {name: firsts[key] for name, t in kept.items() if isinstance(t, Tensor) and (key := memory_of(name, t))}
    return json.dumps({"names": names}, separators=(",", ":")).encode()


def memory_of(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that are one: leaves of a tie share their storage."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return (name,)
    start = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()
    return (start, tensor.device, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def read_weights(
    checkpoint: Checkpoint,
    *,
    optimizer: bool = False,
    progress: OnProgress = lambda done, total: None,
) -> Weights:
    """The model, and if wanted the optimizer's state, of a checkpoint. Tied parameters stand under each of their names.

    Raises: CheckpointCorrupt if a byte of it was altered, or what it holds does not fit together. StoreError.
    """
    manifest = checkpoint.manifest
    wanted = [e for e in manifest.entries if e.name.startswith(_MODEL) or optimizer]
    tensors = _read(wanted, checkpoint, progress)
    stored = {name.removeprefix(_MODEL): t for name, t in tensors.items() if name.startswith(_MODEL)}
    names = _names(manifest, stored)
    weights = Weights({name: stored[first] for name, first in names.items()})
    if optimizer:
        weights.optimizer = _optimizer(manifest.state["values"], tensors)
    return weights


def _names(manifest: Manifest, stored: Iterable[str]) -> dict[str, str]:
    """The model's name of each tensor -> the state's."""
    known = set(stored)
    data = manifest.application.get(NAMES)
    if data is None:
        return {name: name for name in stored}
    try:
        names = msgspec.json.decode(data, type=_Record).names
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointCorrupt(f"the checkpoint's record of names is not as Everstep writes it: {error!r}") from error
    lost = [first for first in names.values() if first not in known]
    if lost:
        raise CheckpointCorrupt(f"the checkpoint names {lost[0]!r}, but its state does not hold it")
    return names


def _optimizer(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """state by parameter name, and the groups with names for `params`."""
    if "groups" not in values:
        return None
    try:
        loaded = [decode(group, tensors) for group in values["groups"]]
        groups = [{**group["values"], "params": list(group["params"])} for group in loaded]
        return {"state": dict(decode(values["state"], tensors)), "param_groups": groups}
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the optimizer's state is not as Everstep writes it: {error!r}") from error


def _read(entries: Iterable[StateEntry], checkpoint: Checkpoint, progress: OnProgress) -> dict[str, Tensor]:
    """The tensors of these entries, each in memory of its own; every block is read once."""
    ordered = sorted(entries, key=lambda e: e.offset)
    needed = sorted(
        {k for e in ordered for k in range(e.offset // BLOCK_BYTES, -(-(e.offset + e.nbytes) // BLOCK_BYTES))}
    )
    blocks = checkpoint.read_blocks(needed)
    memory = [bytearray(e.nbytes) for e in ordered]
    first = 0
    for count, (index, block) in enumerate(zip(needed, blocks, strict=True), 1):
        start, stop = index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES
        while first < len(ordered) and ordered[first].offset + ordered[first].nbytes <= start:
            first += 1
        for k in range(first, len(ordered)):
            entry = ordered[k]
            if entry.offset >= stop:
                break
            lo, hi = max(entry.offset, start), min(entry.offset + entry.nbytes, stop)
            if lo < hi:
                memory[k][lo - entry.offset : hi - entry.offset] = block[lo - start : hi - start]
        progress(count * BLOCK_BYTES, len(needed) * BLOCK_BYTES)
    return {e.name: _tensor(e, m) for e, m in zip(ordered, memory, strict=True)}


def _tensor(entry: StateEntry, memory: bytearray) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    if not memory:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).reshape(entry.shape)
