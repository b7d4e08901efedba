"""Indexes of torch.distributed.checkpoint that others prepared: nothing runs, and each is refused in one line."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from everstep.base.errors import ConfigError
from everstep.checkpoint.interchange_formats import load_weights

Change = Callable[[metadata.Metadata], Any]
PROTO = b"\x80\x04"


class Command:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def every(index: metadata.Metadata, kind: type, name: str, value: Any) -> metadata.Metadata:
    for row in [*index.state_dict_metadata.values(), *index.storage_data.values()]:
        if isinstance(row, kind):
            object.__setattr__(row, name, value)
    return index


def sized(index: metadata.Metadata, *size: int) -> metadata.Metadata:
    return every(index, metadata.TensorStorageMetadata, "size", torch.Size(size))


def stored(index: metadata.Metadata, name: str, value: Any) -> metadata.Metadata:
    for row in index.storage_data.values():
        object.__setattr__(row, name, value)
    return index


def planned(index: metadata.Metadata, path: tuple[Any, ...]) -> metadata.Metadata:
    index.planner_data = dict.fromkeys(index.planner_data, path)
    return index


def parted(index: metadata.Metadata, *parts: tuple[int, int]) -> metadata.Metadata:
    """parts: (offset, size) of the parts of `w`, all with the same bytes behind them."""
    size = torch.Size
    index.state_dict_metadata["model.w"].chunks = [
        metadata.ChunkStorageMetadata(size([o]), size([s])) for o, s in parts
    ]
    place = index.storage_data.pop(metadata.MetadataIndex("model.w", size([0]), 0))
    parts_there = {metadata.MetadataIndex("model.w", size([o]), k): (o, k) for k, (o, _) in enumerate(parts)}
    index.storage_data |= {
        at: replace(place, offset=k * (place.length // 2), length=place.length // 2)
        for at, (_, k) in parts_there.items()
    }
    return index


def repeated(index: metadata.Metadata, count: int) -> metadata.Metadata:
    """So many values, all with the same bytes behind them."""
    place = index.storage_data[metadata.MetadataIndex("model.n")]
    for name in map(str, range(count)):
        index.state_dict_metadata[name] = metadata.BytesStorageMetadata()
        index.storage_data[metadata.MetadataIndex(name)] = place
        index.planner_data[name] = (name,)
    return index


def cancelling(index: metadata.Metadata) -> metadata.Metadata:
    """Sizes of two tensors whose sum is small."""
    whole = index.state_dict_metadata["model.w"]
    for name, size in (("a", 1 << 40), ("b", -(1 << 40))):
        index.state_dict_metadata[name] = replace(whole, size=torch.Size([size]))
    return index


CHANGES: dict[str, Change] = {
    "lacking": lambda index: parted(index, (0, 2)),
    "overlapping": lambda index: parted(index, (0, 2), (1, 2)),
    "outside": lambda index: parted(index, (1, 3)),
    "below": lambda index: parted(index, (-1, 3)),
    "negative part": lambda index: parted(index, (0, -3)),
    "cancelling": cancelling,
    "repeated": lambda index: repeated(index, 3),
    "command": lambda index: Command(),
    "large": lambda index: sized(index, 1 << 36),
    "overflowing": lambda index: sized(index, 1 << 62, 1 << 62),
    "longer": lambda index: stored(index, "length", 1 << 50),
    "before": lambda index: stored(index, "offset", -5),
    "parent": lambda index: stored(index, "relative_path", "../secret"),
    "absolute": lambda index: stored(index, "relative_path", "/etc/passwd"),
    "link": lambda index: stored(index, "relative_path", "link.distcp"),
    "no path": lambda index: stored(index, "relative_path", None),
    "packed": lambda index: stored(index, "transform_descriptors", ["zstd"]),
    "deep": lambda index: planned(index, ("a",) * 50_000),
    "other": lambda index: {"a": index},
    "types": lambda index: metadata.Metadata({3: 5}, None, [1]),  # type: ignore[arg-type]
}
TEXTS = {
    "marks": PROTO + b"(" * 1_000_000 + b".",
    "held memo": PROTO + b"Nr\xff\xff\xff\x7f.",
    "memo": PROTO + b"r\xff\xff\xff\xff.",
    "endless": PROTO + b"\x8e" + (1 << 62).to_bytes(8, "little") + b"x.",
    "doubled": PROTO + b")q\x00" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(60)) + b"h\x3c.",
    "dotted": PROTO + b"\x8c\x05torch\x8c\x11_C._jit_set_emit_\x93.",
    "called": PROTO + b"\x8c\x05torch\x8c\x04Size\x93\x8c\x03abc\x85R.",
    "empty": b"",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    dcp.save({"model": {"w": torch.ones(3), "n": 5}}, checkpoint_id=str(path), no_dist=True)
    secret = tmp_path / "secret"
    secret.write_bytes((path / "__0_0.distcp").read_bytes())
    (path / "link.distcp").symlink_to(secret)
    return path


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ConfigError) as caught:
        load_weights(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not (folder.parent / "executed").exists()


def test_what_torch_wrote_is_read(folder: Path) -> None:
    assert torch.equal(load_weights(folder).model["w"], torch.ones(3))


@pytest.mark.parametrize("name", CHANGES)
def test_an_index_that_says_something_else(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = folder / ".metadata"
    with open(index, "rb") as file:
        found = CHANGES[name](pickle.load(file))
    index.write_bytes(pickle.dumps(found))
    refused(folder, monkeypatch)


@pytest.mark.parametrize("name", TEXTS)
def test_an_index_that_is_none(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".metadata").write_bytes(TEXTS[name])
    refused(folder, monkeypatch)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, monkeypatch)


def test_what_is_wrong_with_the_parts_of_a_tensor_is_said(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    for name, said in (
        ("lacking", "a part of 'model.w' is lacking"),
        ("overlapping", "overlap or lie outside"),
        ("outside", "overlap or lie outside"),
        ("below", "overlap or lie outside"),
        ("cancelling", "no whole number from 0"),
        ("repeated", "more bytes than its files have"),
        ("longer", "more bytes than its files have"),
    ):
        (folder / ".metadata").write_bytes(pickle.dumps(CHANGES[name](pickle.loads(whole))))
        with pytest.raises(ConfigError, match=said):
            load_weights(folder)


def test_parts_of_a_tensor_are_put_together(tmp_path: Path) -> None:
    """Two rows each, of which the index says where they are."""
    path, rows = tmp_path / "saved", torch.arange(12.0).reshape(4, 3)
    dcp.save({"model": {"w": rows[:2]}}, checkpoint_id=str(path), no_dist=True)
    dcp.save({"model": {"w": rows[2:]}}, checkpoint_id=str(tmp_path / "other"), no_dist=True)
    (tmp_path / "other" / "__0_0.distcp").rename(path / "__1_0.distcp")
    index = pickle.loads((path / ".metadata").read_bytes())
    found, size = index.state_dict_metadata["model.w"], torch.Size
    found.size = size([4, 3])
    found.chunks = [metadata.ChunkStorageMetadata(size([row, 0]), size([2, 3])) for row in (0, 2)]
    place = index.storage_data[metadata.MetadataIndex("model.w", size([0, 0]), 0)]
    index.storage_data[metadata.MetadataIndex("model.w", size([2, 0]), 1)] = replace(
        place, relative_path="__1_0.distcp"
    )
    (path / ".metadata").write_bytes(pickle.dumps(index))
    assert torch.equal(load_weights(path).model["w"], rows)


def test_a_value_that_is_named_many_times_is_not_copied(folder: Path) -> None:
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    stored, index = folder / "__0_0.distcp", pickle.loads((folder / ".metadata").read_bytes())
    before = stored.stat().st_size
    with open(stored, "ab") as file:
        torch.save(value, file)
    number = metadata.MetadataIndex("model.n")
    length = stored.stat().st_size - before
    index.storage_data[number] = replace(index.storage_data[number], offset=before, length=length)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert "n" not in load_weights(folder).model


def test_a_pipe_in_the_place_of_a_shard_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    os.mkfifo(folder / "model.safetensors")
    refused(folder, monkeypatch)
