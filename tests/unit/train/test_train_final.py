"""What a finished job leaves is whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from everstep.train import final
from everstep.train.final import write_final

TENSORS = {"weight": torch.ones(3)}


def test_weights_that_did_not_fit_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, *_: Any) -> None:
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space"):
        disk.setattr(final, "save_file", full)
        write_final(tmp_path, TENSORS, "m", "s", 7)
    assert list((tmp_path / "final").iterdir()) == []
    write_final(tmp_path, TENSORS, "m", "s", 7)
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == ["digest.json", "model.safetensors"]
    assert torch.equal(load_file(tmp_path / "final" / "model.safetensors")["weight"], TENSORS["weight"])
