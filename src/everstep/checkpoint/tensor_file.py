"""A safetensors file that is written tensor by tensor, so that no process has to have all of them; its bytes are those
of the package's own `save_file`. And a place for what does not fit in memory until then.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType

import torch
from torch import Tensor

from everstep.base.errors import ConfigError, check
from everstep.exact.digest import bytes_of

TensorForm = tuple[str, Sequence[int]]
"""dtype as torch calls it, and shape."""
_KINDS = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
}
"""Names of dtypes in the format, in the order of their tensors in a file."""


_IN_PAIRS = "float4_e2m1fn_x2"
"""Two numbers are one element for torch, and two for the format."""
_ALIGNED = 64
_HALVES = {"complex128": "float64", "complex32": "float16"}


def refuse_dtype(name: str, dtype: str) -> None:
    """dtype: as torch calls it. Raises: ConfigError if the format does not have it."""
    if dtype not in _KINDS:
        how = f"two {_HALVES[dtype]} tensors" if dtype in _HALVES else "a tensor of another dtype"
        raise ConfigError(f"{name} has dtype {dtype}, which safetensors files cannot hold: store it as {how}")


def form_of(tensor: Tensor) -> TensorForm:
    """What a tensor is like."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def bytes_in(form: TensorForm) -> int:
    """Bytes of a tensor like that."""
    return prod(form[1]) * getattr(torch, form[0]).itemsize  # type: ignore[no-any-return]


class TensorFile:
    """A file for all tensors of these forms. Entered, all of it has to be there at the end. It is open only while it is
    written, for there may be more of them than a process may have open."""

    def __init__(self, path: Path, forms: Mapping[str, TensorForm]) -> None:
        """path: is made if it is not there. Raises: ConfigError for a dtype that the format does not have; OSError."""
        order = list(_KINDS)
        for name, (dtype, _) in forms.items():
            refuse_dtype(name, dtype)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._missing: dict[str, tuple[int, int]] = {}
        at = 0
        for name in sorted(forms, key=lambda name: (order.index(forms[name][0]), name)):
            (dtype, shape), size = forms[name], bytes_in(forms[name])
            listed = [*shape[:-1], shape[-1] * 2] if dtype == _IN_PAIRS and shape else list(shape)
            header[name] = {"dtype": _KINDS[dtype], "shape": listed, "data_offsets": [at, at + size]}
            self._missing[name] = at, size
            at += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        head = struct.pack("<Q", len(text)) + text
        self._begin = len(head)
        self._path = path
        with self._open(os.O_CREAT) as fd:
            _write(fd, 0, memoryview(head))

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Raises: OSError."""
        data, (at, size) = bytes_of(tensor), self._missing.pop(name)
        check(len(data) == size, f"{name} has {size} bytes, not {len(data)}")
        with self._open() as fd:
            _write(fd, self._begin + at, data)

    def sync(self) -> None:
        """Wait until what was written is on the disk. Raises: OSError."""
        with self._open() as fd:
            os.fdatasync(fd)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        check(error is not None or not self._missing, f"{next(iter(self._missing), '')} was not written")

    @contextmanager
    def _open(self, flags: int = 0) -> Iterator[int]:
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
        try:
            yield fd
        finally:
            os.close(fd)


class Aside:
    """Bytes in a file without a name, which need no memory. size: of those that have a place."""

    def __init__(self, folder: Path) -> None:
        """folder: on the disk that they take. Raises: OSError."""
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115  (closed by `close`)
        self.size = 0

    def room(self, size: int) -> int:
        """Where so many bytes have a place of their own."""
        begin = self.size
        self.size += size + -size % _ALIGNED
        return begin

    def write(self, at: int, data: memoryview) -> None:
        """Put bytes there. Raises: OSError."""
        _write(self._file.fileno(), at, data)

    def read(self, at: int, size: int) -> bytearray:
        """What was put there. Raises: OSError."""
        data = bytearray(size)
        done = 0
        while done < size:
            count = os.preadv(self._file.fileno(), [memoryview(data)[done:]], at + done)
            check(count > 0, f"{size - done} bytes at {at + done} were not put aside")
            done += count
        return data

    def mapped(self) -> memoryview:
        """All that was put there; to change it changes no file. Raises: OSError."""
        if not self.size:
            return memoryview(b"")
        self._file.truncate(self.size)
        return memoryview(mmap(self._file.fileno(), self.size, access=ACCESS_COPY))

    def close(self) -> None:
        self._file.close()


def _write(fd: int, at: int, data: memoryview) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done
