"""Indexes of torch.distributed.checkpoint that others prepared: nothing runs, and each is refused in one line."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
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


CHANGES: dict[str, Change] = {
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


def test_a_pipe_in_the_place_of_a_shard_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    os.mkfifo(folder / "model.safetensors")
    refused(folder, monkeypatch)
