"""Layout of a message of several tensors in one run of bytes: its description, then each tensor at a 64-byte boundary.

The description (dtypes, shapes, strides, and the sender's opaque words) is a few hundred bytes and nearly always the
same. So it travels with each message, and both sides remember the layout that follows from it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from everstep.base.errors import check
from everstep.exact.layout import ALIGN_BYTES, aligned_like, dense_stride, round_up
from everstep.parallel.reduction import new_flat

_LENGTHS = struct.Struct("<II")
_REMEMBERED = 512
KEPT_BYTES = 32 << 20
"""Up to this size freed memory stays with the process (`everstep.exact.accumulate`), and new tensors cost no page
faults."""

Spec = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""dtype, shape and (dense) strides of a tensor."""


def fresh_bytes(size: int) -> torch.Tensor:
    """uint8 [size] in host memory at a 64-byte boundary, in huge pages where they are cheaper."""
    if size <= KEPT_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    return new_flat(-(-size // 4), torch.device("cpu")).view(torch.uint8)[:size]


class FramePlace(NamedTuple):
    """Place of a tensor: [start, stop) in bytes from the beginning of the frame."""

    start: int
    stop: int
    spec: Spec

    def view(self, frame: torch.Tensor) -> torch.Tensor:
        """The tensor inside a frame (uint8, beginning at a 64-byte boundary of its storage)."""
        dtype, shape, stride = self.spec
        return frame[self.start : self.stop].view(dtype).as_strided(shape, stride)

    def adopt(self, frame: torch.Tensor) -> torch.Tensor:
        """`view`, but as an independent tensor: autograd counts its changes apart from the frame's."""
        dtype, shape, stride = self.spec
        start = frame.storage_offset() + self.start
        return torch.empty(0, dtype=dtype).set_(frame.untyped_storage(), start // dtype.itemsize, shape, stride)

    def fresh(self, device: torch.device) -> torch.Tensor:
        """Uninitialised tensor of this kind, at a 64-byte boundary."""
        dtype, shape, stride = self.spec
        if device.type == "cpu" and self.stop - self.start > KEPT_BYTES:
            return fresh_bytes(self.stop - self.start).view(dtype).as_strided(shape, stride)
        found = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return found if found.data_ptr() % ALIGN_BYTES == 0 else aligned_like(found)


class Frame(NamedTuple):
    """Layout of one message; `head` are its first bytes, `size` is a multiple of 64."""

    head: bytes
    meta: bytes
    places: tuple[FramePlace, ...]
    size: int

    def fill(self, frame: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Write head and tensors into uint8 [size]."""
        with torch.no_grad():
            frame[: len(self.head)].copy_(torch.frombuffer(bytearray(self.head), dtype=torch.uint8))
            for place, tensor in zip(self.places, tensors, strict=True):
                if tensor.numel():
                    place.view(frame).copy_(tensor)


def frame_of(tensors: Sequence[torch.Tensor], meta: bytes) -> Frame:
    """Frame for these tensors; dense tensors keep their strides, others get contiguous ones."""
    return _lay_out(tuple(_spec(tensor) for tensor in tensors), meta)


def head_size(lengths: bytes) -> int:
    """Size of the whole head in bytes, from its first 8 bytes."""
    specs, meta = _LENGTHS.unpack(lengths)
    return int(_LENGTHS.size + specs + meta)


HEAD_LENGTHS = _LENGTHS.size


@lru_cache(maxsize=_REMEMBERED)
def parse_head(head: bytes) -> Frame:
    """The frame that has this head."""
    n_specs, _ = _LENGTHS.unpack_from(head)
    rows = json.loads(head[HEAD_LENGTHS : HEAD_LENGTHS + n_specs])
    specs = tuple((getattr(torch, name), tuple(shape), tuple(stride)) for name, shape, stride in rows)
    return _lay_out(specs, head[HEAD_LENGTHS + n_specs :])


@lru_cache(maxsize=_REMEMBERED)
def _lay_out(specs: tuple[Spec, ...], meta: bytes) -> Frame:
    rows = [[str(dtype).removeprefix("torch."), shape, stride] for dtype, shape, stride in specs]
    words = json.dumps(rows, separators=(",", ":")).encode()
    head = _LENGTHS.pack(len(words), len(meta)) + words + meta
    at = round_up(len(head), ALIGN_BYTES)
    places = []
    for spec in specs:
        dtype, shape, _ = spec
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        places.append(FramePlace(at, at + size_bytes, spec))
        at = round_up(at + size_bytes, ALIGN_BYTES)
    return Frame(head, meta, tuple(places), at)


def _spec(tensor: torch.Tensor) -> Spec:
    check(
        tensor.layout == torch.strided and not tensor.is_quantized,
        f"only dense tensors can be sent, got {tensor.layout}",
    )
    return tensor.dtype, tuple(tensor.shape), dense_stride(tensor)
