"""Files of token numbers, as nanoGPT and Megatron-LM write them, read through the page cache: of any size, at once."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from everstep.base.errors import ConfigError

KINDS = ("uint8", "uint16", "uint32", "int32", "int64")
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_KINDS = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, kind of number, number of sequences, number of documents and one."""


class TokenFile(Dataset[torch.Tensor]):
    """Windows over the tokens of a file: item i is tokens[i * length : i * length + length + 1], (length + 1,) int64.

    The last token of one is the first of the next: as inputs [:-1] and targets [1:] they do not overlap. What is left
    at the end is not used. A window may begin in one document and end in the next.

    path: of a .bin file. With an .idx file of the same name beside it, it is Megatron-LM's; otherwise it is nanoGPT's,
    plain numbers of one kind. kind: of the numbers, where there is no .idx file.

    Raises: ConfigError for files that are not like this, or too short for one window.
    """

    def __init__(self, path: str | os.PathLike[str], length: int, kind: str = "uint16") -> None:
        if type(length) is not int or length < 1:
            raise ConfigError(f"length: expected the tokens of a window, at least 1, got {length!r}")
        if kind not in KINDS:
            raise ConfigError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        self.length = length
        self._path = Path(path)
        index = self._path.with_suffix(".idx")
        self._files = [(self._path.name, _size(self._path))]
        if self._path.suffix == ".bin" and index.exists():
            self._files.append((index.name, _size(index)))
            kind = _megatron_kind(index, self._files[0][1])
        each = np.dtype(kind).itemsize
        if self._files[0][1] % each:
            raise ConfigError(
                f"{path} has {self._files[0][1]} bytes, which is no whole number of {kind} tokens: name its kind"
            )
        self._kind = kind
        self.tokens = self._files[0][1] // each
        if self.tokens < length + 1:
            raise ConfigError(
                f"expected at least {length + 1} tokens for one window of {length}, got {self.tokens} in {path}: use "
                "more text or a shorter context"
            )
        self._memory = self._map()

    def _map(self) -> Any:
        with open(self._path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(memory, dtype=np.dtype(self._kind).newbyteorder("<"), count=self.tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._memory = self._map()

    def __len__(self) -> int:
        return (self.tokens - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is not in 0..{len(self) - 1}")
        start = index * self.length
        return torch.from_numpy(self._memory[start : start + self.length + 1].astype(np.int64))

    def files_read(self) -> list[tuple[str, int]]:
        """Names and sizes in bytes of the files, by which a job that goes on knows them again."""
        return list(self._files)


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"expected a file of tokens, got {path}, which is no regular file")
    return found.st_size


def _megatron_kind(index: Path, bin_bytes: int) -> str:
    """Kind of the tokens. Raises: ConfigError unless the index tells of this very file, from end to end."""
    with open(index, "rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MEGATRON):
            raise ConfigError(f"{index} is no index of Megatron-LM: move it away if the tokens are plain numbers")
        _, version, code, sequences, documents = _HEAD.unpack(head)
        kind = _MEGATRON_KINDS.get(code)
        if version != 1 or kind is None:
            raise ConfigError(f"{index}: expected version 1 and whole numbers, got version {version}, kind {code}")
        body = 12 * sequences + 8 * documents
        if sequences < 1 or index.stat().st_size not in (_HEAD.size + body, _HEAD.size + body + sequences):
            raise ConfigError(f"{index} is damaged: it tells of {sequences} sequences, and has another size")
        lengths = np.fromfile(file, "<i4", sequences).astype(np.int64)
        starts = np.fromfile(file, "<i8", sequences)
    ends = np.cumsum(lengths) * np.dtype(kind).itemsize
    if (lengths < 0).any() or starts[0] != 0 or (starts[1:] != ends[:-1]).any() or ends[-1] != bin_bytes:
        raise ConfigError(
            f"{index} does not tell of the whole of {index.with_suffix('.bin').name}, from end to end: expected "
            f"{int(ends[-1])} bytes of sequences one after the other, got {bin_bytes}"
        )
    return kind
