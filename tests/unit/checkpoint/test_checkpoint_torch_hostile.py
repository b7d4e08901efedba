"""Files of torch.save that others prepared: each is refused in one line, within a bound of memory and time."""

from __future__ import annotations

import resource
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.base.errors import ConfigError
from everstep.base.given import bounded_memory
from everstep.checkpoint import interchange
from everstep.checkpoint.interchange_formats import load_weights

W = torch.arange(8.0)
SIZE_IN_DIRECTORY = 24
CLAIMED = 0xF0000000


def refused(path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        load_weights(path)
    assert "\n" not in str(told.value) and len(str(told.value)) < 600
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


def named_often(times: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


def with_optimizer(state: Any = None, **group: Any) -> dict[str, Any]:
    groups = [{"params": ["w"], **group}]
    return {"model": {"w": W.clone()}, "optimizer": {"state": {"w": state or {}}, "param_groups": groups}}


@pytest.mark.parametrize("name", ["data/0", "data.pkl", "version", "byteorder"])
def test_an_entry_that_unpacks_to_gigabytes(tmp_path: Path, name: str) -> None:
    torch.save({"w": W}, tmp_path / "w.pt")
    path = tmp_path / "packed.pt"
    with zipfile.ZipFile(tmp_path / "w.pt") as stored, zipfile.ZipFile(path, "w") as packed:
        for entry in stored.namelist():
            kind = zipfile.ZIP_DEFLATED if entry == f"w/{name}" else zipfile.ZIP_STORED
            packed.writestr(entry, stored.read(entry), compress_type=kind)
    assert torch.equal(load_weights(path).model["w"], W)  # an entry may be packed
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(f"w/{name}".encode())) + SIZE_IN_DIRECTORY
    data[at : at + 4] = struct.pack("<I", CLAIMED)
    path.write_bytes(data)
    refused(path, "takes more than [0-9]+ of memory: expected tensors that are not packed")


def test_a_file_of_the_older_format_that_claims_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"w": W}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(load_weights(path).model["w"], W)
    data = path.read_bytes()
    count, size = b"K\x08N", b"K\x08\x85"
    assert data.count(count) == data.count(size) == 1
    for old in (count, size):
        path.write_bytes(data.replace(old, b"\x8a\x05" + (3 << 29).to_bytes(5, "little") + old[2:]))
        refused(path, "takes more than [0-9]+ of memory")


CONTENTS: dict[str, Any] = {
    "extra state": {"w": W, "_extra_state": named_often(30)},
    "optimizer": with_optimizer(lr=named_often(60)),
    "expanded": {"w": W[:1].expand(1 << 40)},
    "state expanded": with_optimizer({"m": W[:1].expand(1 << 40)}),
    "texts": with_optimizer(lr=["x" * (1 << 20)] * 2000),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_small_file_that_stands_for_much(tmp_path: Path, name: str) -> None:
    torch.save(CONTENTS[name], tmp_path / "w.pt")
    refused(
        tmp_path / "w.pt", "has [0-9]+ bytes and stands for [0-9]+ values and [0-9]+ bytes of tensors and texts: exp"
    )


def test_what_is_not_taken_may_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interchange, "_MOST_VALUES", 100)
    others = {"sampler": list(range(200))}
    for content in ({"model": {"w": W}, "graph": W.to_sparse(), **others}, {"w": W, **others}):
        torch.save(content, tmp_path / "w.pt")
        assert torch.equal(load_weights(tmp_path / "w.pt").model["w"], W)


def test_tensors_that_are_no_numbers_in_a_row(tmp_path: Path) -> None:
    for tensor in (W.to_sparse(), torch.empty(8, device="meta")):
        torch.save({"w": tensor}, tmp_path / "w.pt")
        refused(tmp_path / "w.pt", "sparse, quantised or empty tensor: expected dense numbers")


def test_values_that_contain_themselves_or_are_deep(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    torch.save({"w": W, "_extra_state": endless}, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", "nested more than 64 deep")
    deep = b"\x80\x02}X\x0c\x00\x00\x00_extra_state" + b"]" * 100_000 + b"a" * 99_999 + b"s."
    torch.save({"w": W}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "old.pt").read_bytes()
    head = data[: data.index(b"\x80\x02}q\x00X\x01")]
    (tmp_path / "w.pt").write_bytes(head + deep + b"\x80\x02].")
    refused(tmp_path / "w.pt", "nested too deeply")


def test_shared_and_expanded_tensors_of_a_usual_size_are_read(tmp_path: Path) -> None:
    tied = {f"{k}.w": W for k in range(12)} | {"mask": torch.zeros(1).expand(4096)}
    torch.save(with_optimizer({"m": W}, betas=(0.9, 0.99)) | {"model": tied}, tmp_path / "w.pt")
    loaded = load_weights(tmp_path / "w.pt")
    assert torch.equal(loaded.model["11.w"], W) and loaded.model["mask"].shape == (4096,)


def test_memory_is_bounded_and_then_free_again() -> None:
    with bounded_memory(1 << 20) as limit, pytest.raises(MemoryError):
        bytearray(2 * limit)
    assert limit < 8 << 30
    del limit
    bytearray(2 << 30)
