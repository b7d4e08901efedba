"""A safetensors file that is written tensor by tensor is the one that the package itself writes."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from everstep.base.errors import ConfigError, InvariantViolation
from everstep.checkpoint.tensor_file import _KINDS, Aside, TensorFile, form_of

PAIRS = "float4_e2m1fn_x2"


@pytest.fixture(params=[1 << 30, 3])
def _at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many bytes the system takes, or gives, at a time: no more than 2 GiB, or than a full disk has room for."""
    write, read, most = os.pwrite, os.preadv, request.param
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:most], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][: most - 1]], at))


@pytest.mark.usefixtures("_at_once")
def test_its_bytes_are_those_of_the_package(tmp_path: Path) -> None:
    tensors = {f"of {kind}": torch.arange(6).reshape(2, 3).to(getattr(torch, kind)) for kind in _KINDS if kind != PAIRS}
    tensors |= {"pairs": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(getattr(torch, PAIRS))}
    tensors |= {"é\"'\\": torch.tensor(-0.0), "none": torch.empty(0, 4), "turned": torch.arange(6.0).view(2, 3).t()}
    with TensorFile(tmp_path / "mine", {name: form_of(t) for name, t in tensors.items()}) as file:
        for name, tensor in tensors.items():
            file.put(name, tensor)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert load_file(tmp_path / "mine").keys() == tensors.keys()


def test_all_of_it_has_to_be_there(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "file", {"a": ("float32", (2,)), "b": ("float32", (1,))})
    with pytest.raises(InvariantViolation, match="a has 8 bytes, not 4"), file:
        file.put("a", torch.zeros(1))
    file = TensorFile(tmp_path / "file", {"a": ("float32", (2,)), "b": ("float32", (1,))})
    with pytest.raises(InvariantViolation, match="b was not written"), file:
        file.put("a", torch.zeros(2))
    with pytest.raises(ConfigError, match=r"c has dtype complex128, .* cannot hold: store it as two float64 tensors"):
        TensorFile(tmp_path / "file", {"c": ("complex128", (2,))})


@pytest.mark.usefixtures("_at_once")
def test_what_is_put_aside_comes_back(tmp_path: Path) -> None:
    with closing(Aside(tmp_path)) as aside:
        first, second = aside.room(3), aside.room(2)
        aside.write(second, memoryview(b"de"))
        aside.write(first, memoryview(b"abc"))
        assert bytes(aside.read(first, 3)) == b"abc" and bytes(aside.read(second, 2)) == b"de"
        assert not list(tmp_path.iterdir())
        with pytest.raises(InvariantViolation, match="were not put aside"):
            aside.read(second, 3)


def test_it_is_open_only_while_it_is_written(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = TensorFile(tmp_path / "file", {"a": ("float32", (2,))})
    with file:
        assert len(os.listdir("/proc/self/fd")) == before
        file.put("a", torch.zeros(2))
    assert len(os.listdir("/proc/self/fd")) == before
