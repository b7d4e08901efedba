"""What a finished job leaves is whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from everstep.train.final import Lying, model_tensors, write_final

MODEL = nn.Linear(3, 2)


def test_weights_that_did_not_fit_leave_nothing(tmp_path: Path) -> None:
    def full() -> Tensor:
        raise OSError(errno.ENOSPC, "No space left on device")

    tensors = model_tensors(MODEL)
    with pytest.raises(OSError, match="No space"):
        write_final(tmp_path, {**tensors, "weight": Lying(tensors["weight"].form, full)}, "m", "s", 7)
    assert list((tmp_path / "final").iterdir()) == []
    write_final(tmp_path, tensors, "m", "s", 7)
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == ["digest.json", "model.safetensors"]
    assert torch.equal(load_file(tmp_path / "final" / "model.safetensors")["weight"], MODEL.weight)
