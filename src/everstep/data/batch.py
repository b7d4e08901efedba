"""Batches as trees of tensors: alignment, moving to a device, and the way through a file descriptor.

Apart because the training process and its loader processes have to treat a batch alike, to the bit.
"""

from __future__ import annotations

import copy
import io
import math
import mmap
import os
import pickle
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import MemberDescriptorType
from typing import Any, cast

import torch
from torch import Tensor

ALIGN_BYTES = 64
"""Tensors begin at multiples of this, because kernels' bits depend on it (measured: linear, dot, attention)."""


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, around: tuple[int, ...] | None = None) -> Any:
    """The tree with each tensor replaced by function(tensor), in tuples, named tuples, lists and mappings.

    Other objects are left as they are, and a container in which nothing changed stays the same object. around: ids of
    dataclasses that the tree lies in; where it is given, tensors in dataclasses are replaced, too.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        new = {key: map_tensors(function, value, around) for key, value in tree.items()}
        if all(new[key] is tree[key] for key in new):
            return tree
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return new
        changed = copy.copy(tree)
        changed.update(new)
        return changed
    if isinstance(tree, tuple | list):
        items = [map_tensors(function, value, around) for value in tree]
        if all(a is b for a, b in zip(items, tree, strict=True)):
            return tree
        kind = cast(Any, type(tree))
        return kind(*items) if hasattr(tree, "_fields") else kind(items)
    if around is not None and is_dataclass(tree) and not isinstance(tree, type) and id(tree) not in around:
        held = {each.name: _kept(tree, each.name) for each in fields(tree)}
        found = map_tensors(function, held, (*around, id(tree)))
        if found is not held:
            with suppress(AttributeError):  # it is frozen, with slots of its own, and cannot be copied
                tree = copy.copy(tree)
                for name in (name for name in held if found[name] is not held[name]):
                    object.__setattr__(tree, name, found[name])
    return tree


def _kept(tree: Any, name: str) -> Any:
    """What lies in an attribute of this name, or in a slot; None for what a property computes."""
    if isinstance(getattr(type(tree), name, None), MemberDescriptorType):
        return getattr(tree, name, None)
    return None if hasattr(getattr(type(tree), name, None), "__set__") else getattr(tree, "__dict__", {}).get(name)


def aligned(tree: Any) -> Any:
    """The tree with each dense CPU tensor beginning at a 64-byte boundary and without gaps or overlaps in memory.

    Strides are kept where the tensor has neither gaps nor overlaps; tensors that need nothing are not copied. Those in
    dataclasses are aligned, too; those in other objects of the user's lie where collate has put them.
    """
    return map_tensors(_aligned, tree, ())


def _aligned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0 or tensor.requires_grad:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.contiguous()
    if tensor.data_ptr() % ALIGN_BYTES == 0:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def to_device(tree: Any, device: torch.device | str) -> Any:
    """The tree with all tensors on the device; from pinned memory the copies do not block."""
    return map_tensors(lambda t: t.to(device, non_blocking=True), tree)


def pinned(tree: Any) -> Any:
    """The tree in pinned memory; unchanged where there is no CUDA."""
    if not torch.cuda.is_available():
        return tree
    return map_tensors(lambda t: t.pin_memory() if t.device.type == "cpu" else t, tree)


class _Packer(pickle.Pickler):
    """Pickles a tree without its tensors; each is replaced by its description and the offset that it gets."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size_bytes = 0
        self._offsets: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or _aligned(obj) is not obj or obj.numel() == 0 or obj.requires_grad:
            return None
        if obj.device.type != "cpu" or obj.layout != torch.strided:
            return None
        if id(obj) not in self._offsets:
            self._offsets[id(obj)] = self.size_bytes
            self.tensors.append((self.size_bytes, obj))
            used = obj.numel() * obj.element_size()
            self.size_bytes += -(-used // ALIGN_BYTES) * ALIGN_BYTES
        return self._offsets[id(obj)], obj.dtype, tuple(obj.shape), obj.stride()


class _Unpacker(pickle.Unpickler):
    """Unpickles a tree, with tensors that lie in `memory`."""

    def __init__(self, file: io.BytesIO, memory: mmap.mmap) -> None:
        super().__init__(file)
        self._memory = memory
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        offset, dtype, shape, stride = pid
        if offset not in self._tensors:
            self._tensors[offset] = _view(self._memory, offset, dtype, shape, stride)
        return self._tensors[offset]


def _view(
    memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).as_strided(shape, stride)


def pack(tree: Any) -> tuple[int, int, int]:
    """Write a tree (aligned by `aligned`) into memory of its own; returns (descriptor, size, offset of the pickle).

    The descriptor can be sent to another process, which calls `unpack`; sizes in bytes. Close it after sending.
    """
    body = io.BytesIO()
    packer = _Packer(body)
    packer.dump(tree)
    text = body.getbuffer()
    start = packer.size_bytes
    size = start + len(text)
    descriptor = os.memfd_create("everstep-batch")
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    for offset, tensor in packer.tensors:
        _view(memory, offset, tensor.dtype, tuple(tensor.shape), tensor.stride()).copy_(tensor)
    memory[start:size] = bytes(text)
    return descriptor, size, start


def unpack(descriptor: int, size: int, start: int) -> Any:
    """Read what `pack` wrote. The tensors use the same memory, without copying; closes the descriptor."""
    try:
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return _Unpacker(io.BytesIO(memory[start:size]), memory).load()
