"""Weights on disk, read without torch: where a run keeps them, and the bytes of each tensor."""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everstep.base.errors import ConfigError

_LENGTH = struct.Struct("<Q")
_NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.uint8,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: dtype in safetensors' words, shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def same(self, other: StoredTensor) -> bool:
        """Equal in dtype, shape and every byte."""
        return self.dtype == other.dtype and self.shape == other.shape and self.data == other.data

    def floats(self) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """The values as float64, None for a dtype that numpy does not know."""
        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).astype(np.float64)
        kind = _NUMPY.get(self.dtype)
        return None if kind is None else np.frombuffer(self.data, kind).astype(np.float64)


def find_weights(path: Path) -> Path:
    """The safetensors file of a run directory (final/), of a checkpoint, or the file itself.

    Raises: ConfigError if there is none.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}")
    if path.is_file():
        return path
    for candidate in (path / "final" / "model.safetensors", path / "model.safetensors"):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"{path} has no final/model.safetensors: has the job finished?")


def read_weights(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises: ConfigError if it cannot be read or is not one.
    """
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
        body = data[_LENGTH.size + length :]
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                if not 0 <= start <= stop <= len(body):
                    raise ValueError(f"{name} lies outside of the file")
                tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), body[start:stop])
        return tensors
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"cannot read {path}: not a whole safetensors file ({error})") from None
