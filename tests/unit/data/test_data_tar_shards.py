"""Tar shards: samples by index, in any process; links, pickles and damage are refused by name."""

from __future__ import annotations

import io
import pickle
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from everstep.base.errors import ConfigError, TaskError
from everstep.data import tar_shards
from everstep.data.tar_shards import TarShards, places


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "everstep"


def shard(path: Path, files: Sequence[tuple[str, bytes]], mode: str = "w") -> str:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def array(value: float) -> bytes:
    file = io.BytesIO()
    np.save(file, np.full(3, value, dtype=np.float32))
    return file.getvalue()


def two(folder: Path) -> str:
    for s, n in ((0, 3), (1, 2)):
        files = [(f"d/{s}{i}.{e}", d) for i in range(n) for e, d in (("npy", array(i)), ("cls", str(i).encode()))]
        shard(folder / f"t-{s}.tar", [("README", b"note"), *files])
    return str(folder / "t-*.tar")


def test_samples_by_index(tmp_path: Path, cache: Path) -> None:
    data = TarShards(two(tmp_path))
    assert len(data) == 5
    assert [(s["__key__"], s["cls"], s["npy"].tolist()[0]) for s in (data[i] for i in (4, 0, 2))] == [
        ("d/11", 1, 1.0),
        ("d/00", 0, 0.0),
        ("d/02", 2, 2.0),
    ]
    assert TarShards(str(tmp_path / "t-0.tar"), decode=False)[1]["cls"] == b"1"
    assert TarShards([str(tmp_path / "t-1.tar")], transform=lambda s: s["cls"])[1] == 1
    assert pickle.loads(pickle.dumps(data))[4]["cls"] == 1
    with pytest.raises(IndexError):
        data[5]
    assert [name for name, _ in data.files_read()] == ["t-0.tar", "t-1.tar"]


def test_places_are_found_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = two(tmp_path)
    TarShards(pattern)
    stored = next(cache.glob("shards-*"))
    scanned: list[str] = []
    monkeypatch.setattr(tar_shards, "scan", lambda path: scanned.append(path) or [0, 512])
    assert len(TarShards(pattern)) == 5 and not scanned
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    TarShards(pattern)
    assert len(scanned) == 2  # a damaged note counts for nothing


def test_a_terabyte_is_entered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand shards of 10,000 samples, of which only the notes are there."""
    paths = [str(tmp_path / f"shard-{i:05d}.tar") for i in range(1000)]
    for path in paths:
        Path(path).touch()
    stats = [tar_shards._stat(path) for path in paths]
    starts = [*range(0, 10_001 * 100_352, 100_352)]
    monkeypatch.setattr(tar_shards, "scan", lambda path: starts)
    places(paths, stats)
    began = time.process_time()
    data = TarShards(paths)
    assert len(data) == 10_000_000
    assert time.process_time() - began < 2


def test_pictures_text_and_bytes(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (1, 2, 3)).save(file, "PNG")
    rest = [("a.txt", "ä".encode()), ("a.json", b'{"k": 1}'), ("a.bin", b"\0")]
    sample = TarShards(shard(tmp_path / "x.tar", [("a.png", file.getvalue()), *rest]))[0]
    assert sample["png"].shape == (3, 3, 4) and sample["png"][:, 0, 0].tolist() == [1, 2, 3]
    assert (sample["txt"], sample["json"], sample["bin"]) == ("ä", {"k": 1}, b"\0")


def test_nothing_is_unpickled_or_followed(tmp_path: Path) -> None:
    data = TarShards(shard(tmp_path / "x.tar", [("a.pyd", pickle.dumps(1)), ("b.npy", b"no")]))
    with pytest.raises(TaskError, match=r"x\.tar: a\.pyd cannot be decoded: it is pickled, and nothing is unpickled"):
        data[0]
    with pytest.raises(TaskError, match=r"b\.npy cannot be decoded"):
        data[1]
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
        with tarfile.open(tmp_path / "link.tar", "w") as tar:
            info = tarfile.TarInfo("a.txt")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        with pytest.raises(ConfigError, match=r"link\.tar: a\.txt is a link or the like"):
            TarShards(str(tmp_path / "link.tar"))


def test_what_is_no_shard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected tar files, got none"):
        TarShards(str(tmp_path / "*.tar"))
    with pytest.raises(ConfigError, match="cannot read the shard"):
        TarShards([str(tmp_path / "no.tar")])
    with pytest.raises(ConfigError, match="no regular file"):
        TarShards([str(tmp_path)])
    path = shard(tmp_path / "a.tar", [("a.txt", b"1")])
    with pytest.raises(ConfigError, match="given twice"):
        TarShards([path, path])
    with pytest.raises(ConfigError, match="no tar file that can be read by place"):
        TarShards([shard(tmp_path / "b.tar", [("a.txt", b"1")], "w:gz")])
    with pytest.raises(ConfigError, match="do not lie together"):
        TarShards([shard(tmp_path / "c.tar", [("a.txt", b"1"), ("b.txt", b"1"), ("a.cls", b"1")])])
    with pytest.raises(ConfigError, match=r"two files \.txt"):
        TarShards([shard(tmp_path / "d.tar", [("a.txt", b"1"), ("a.TXT", b"1")])])
    with pytest.raises(ConfigError, match="expected samples"):
        TarShards([shard(tmp_path / "e.tar", [("README", b"1")])])


def test_a_shard_that_changes_is_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("a.txt", b"1" * 5000)])
    data = TarShards([path])
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:2048])
    with pytest.raises(TaskError, match=r"a\.tar was changed while the job ran"):
        data[0]
    with pytest.raises(ConfigError, match=r"a\.tar is cut off within a\.txt"):
        TarShards([path])
