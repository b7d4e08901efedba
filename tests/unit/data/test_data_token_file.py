"""Token files: nanoGPT's and Megatron-LM's, window by window; damaged ones are refused by name."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.base.errors import ConfigError
from everstep.data.token_file import TokenFile


def tokens(n: int, kind: str = "uint16") -> np.ndarray:
    return (np.arange(n) * 7 % 251).astype(kind)


def megatron(folder: Path, lengths: list[int], kind: str = "int32", code: int = 4, cut: int = 0) -> Path:
    path = folder / "text_document.bin"
    data = tokens(sum(lengths), kind)
    data.tofile(path)
    starts = np.cumsum([0, *lengths[:-1]]) * data.itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(lengths) + 1)
    body = np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes()
    body += np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    whole = head + body
    path.with_suffix(".idx").write_bytes(whole[: len(whole) - cut])
    return path


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int64"])
def test_windows_of_plain_numbers(tmp_path: Path, kind: str) -> None:
    tokens(101, kind).tofile(tmp_path / "train.bin")
    data = TokenFile(tmp_path / "train.bin", 10, kind)
    assert len(data) == 10
    for i in range(10):
        assert data[i].dtype is torch.int64
        assert data[i].tolist() == tokens(101)[10 * i : 10 * i + 11].tolist()
    assert pickle.loads(pickle.dumps(data))[9].tolist() == data[9].tolist()
    with pytest.raises(IndexError):
        data[10]
    assert data.files_read() == [("train.bin", 101 * np.dtype(kind).itemsize)]


def test_windows_of_megatron(tmp_path: Path) -> None:
    data = TokenFile(megatron(tmp_path, [40, 1, 60]), 10)
    assert len(data) == 10 and data[4].tolist() == tokens(101)[40:51].tolist()
    assert [name for name, _ in data.files_read()] == ["text_document.bin", "text_document.idx"]


def test_what_is_no_token_file(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    with pytest.raises(ConfigError, match=r"cannot read .*t\.bin"):
        TokenFile(path, 4)
    with pytest.raises(ConfigError, match="no regular file"):
        TokenFile(tmp_path, 4)
    path.write_bytes(b"123")
    with pytest.raises(ConfigError, match="no whole number of uint16"):
        TokenFile(path, 4)
    with pytest.raises(ConfigError, match="at least 5 tokens for one window of 4, got 3"):
        TokenFile(path, 4, "uint8")
    with pytest.raises(ConfigError, match="kind: expected one of"):
        TokenFile(path, 4, "float32")
    with pytest.raises(ConfigError, match="length: expected"):
        TokenFile(path, 0)


def test_an_index_that_lies(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is damaged"):
        TokenFile(megatron(tmp_path, [40, 60], cut=3), 10)
    with pytest.raises(ConfigError, match="whole numbers, got version 1, kind 6"):
        TokenFile(megatron(tmp_path, [40, 60], code=6), 10)
    path = megatron(tmp_path, [40, 60])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="does not tell of the whole"):
        TokenFile(path, 10)
    path.with_suffix(".idx").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="no index of Megatron-LM"):
        TokenFile(path, 10)
