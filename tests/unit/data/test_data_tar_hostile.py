"""Tar shards that others prepared: each is refused in one line, at once, and no sample is lost without a word."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from everstep.base.errors import ConfigError, TaskError
from everstep.data.tar_shards import TarShards

OCTAL, ENDING = b"%011o\0", bytes(1024)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def header(name: bytes, size: int, kind: bytes = b"0") -> bytes:
    """A header whose sum is right. size: any whole number."""
    large = (size % (1 << 96)).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")
    head = bytearray(512)
    head[: len(name)] = name
    head[124:136] = OCTAL % size if 0 <= size < 1 << 33 else large
    head[156:157], head[257:265] = kind, b"ustar\x0000"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def file(name: bytes, data: bytes = b"1") -> bytes:
    return header(name, len(data)) + data + bytes(-len(data) % 512)


def extended(record: bytes) -> bytes:
    return header(b"x", len(record), b"x") + record + bytes(-len(record) % 512) + file(b"b.txt")


DAMAGED = bytes(bytearray(file(b"b.txt")[:1]).replace(b"b", b"c")) + file(b"b.txt")[1:]
SHARDS = {
    "below 0": (file(b"a.txt") + header(b"b.txt", -1024), "a size below 0"),
    "note below 0": (file(b"a.txt") + header(b"README", -1024), "a size below 0"),
    "folder below 0": (file(b"a.txt") + header(b"f/", -1024, b"5"), "a size below 0"),
    "size by an extended header": (extended(b"14 size=-1024\n"), "a size below 0"),
    "huge": (header(b"a.txt", 1 << 80), "cut off within a.txt"),
    "huge name": (header(b"l", 1 << 62, b"L") + file(b"a.txt"), "a header of 4611686018427387904 bytes, expected at"),
    "huge extended header": (header(b"x", 1 << 62, b"x") + file(b"a.txt"), "a header of 4611686018427387904 bytes"),
    "larger than memory should hold": (header(b"x", 1 << 21, b"x") + bytes(1 << 21), "a header of 2097152 bytes"),
    "length of a record": (extended(b"9" * 30 + b" path=b\n"), "too large"),
    "endless headers": (header(b"x", 0, b"x") * 2000 + file(b"a.txt"), "recursion"),
    "NUL": (extended(b"15 path=a\0b.tx\n"), "a name with NUL"),
    "damaged in the middle": (file(b"a.txt") + DAMAGED + file(b"c.txt"), "the header at byte 1024 is damaged"),
    "zeros in the middle": (file(b"a.txt") + bytes(1024) + file(b"c.txt"), "the header at byte 1024 is damaged"),
    "two tars": (file(b"a.txt") + ENDING + file(b"c.txt"), "is damaged, or another tar follows"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_that_is_damaged_or_made_to_harm(tmp_path: Path, name: str) -> None:
    content, said = SHARDS[name]
    (tmp_path / "s.tar").write_bytes(content + ENDING)
    with pytest.raises(ConfigError, match=said) as told:
        TarShards([str(tmp_path / "s.tar")])
    assert "\n" not in str(told.value) and "s.tar" in str(told.value)


def test_a_header_that_is_cut_off_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(file(b"a.txt") + file(b"b.txt")[:300])
    with pytest.raises(ConfigError, match="the header at byte 1024 is damaged"):
        TarShards([str(tmp_path / "s.tar")])
    (tmp_path / "s.tar").write_bytes(file(b"a.txt") + file(b"b.txt"))
    assert len(TarShards([str(tmp_path / "s.tar")])) == 2  # some programs write no end


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "itself.tar").symlink_to("itself.tar")
    (tmp_path / "device.tar").symlink_to("/dev/zero")
    for name, said in (("fifo", "no regular file"), ("device", "no regular file"), ("itself", "cannot read the shard")):
        with pytest.raises(ConfigError, match=said):
            TarShards([str(tmp_path / f"{name}.tar")])
    shard = tmp_path / "s.tar"
    shard.write_bytes(file(b"a.txt") + ENDING)
    data = TarShards([str(shard)])
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(TaskError, match="was changed while the job ran"):
        data[0]


def test_a_name_is_only_a_key(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        info = tarfile.TarInfo("../../a.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"1"))
    before = sorted(tmp_path.rglob("*"))
    assert TarShards([str(tmp_path / "s.tar")], decode=False)[0] == {"__key__": "../../a", "txt": b"1"}
    assert sorted(p for p in tmp_path.rglob("*") if "cache" not in p.parts) == before


def test_an_archive_is_no_array(tmp_path: Path) -> None:
    packed = io.BytesIO()
    np.savez_compressed(packed, a=np.zeros(1 << 20))
    (tmp_path / "s.tar").write_bytes(file(b"a.npy", packed.getvalue()) + ENDING)
    with pytest.raises(TaskError, match=r"a\.npy cannot be decoded: ValueError: the magic string is not correct"):
        TarShards([str(tmp_path / "s.tar")])[0]
