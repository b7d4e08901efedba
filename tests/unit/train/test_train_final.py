"""What a finished job leaves is whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from everstep.train import final
from everstep.train.final import Lying, _aside, model_tensors, write_final

MODEL = nn.Linear(3, 2)


def test_weights_that_did_not_fit_leave_nothing(tmp_path: Path) -> None:
    def full() -> Tensor:
        raise OSError(errno.ENOSPC, "No space left on device")

    tensors = model_tensors(MODEL)
    with pytest.raises(OSError, match="No space"):
        write_final(tmp_path, {**tensors, "weight": Lying(tensors["weight"].form, full)}, "m", "s", 7)
    assert list((tmp_path / "final").iterdir()) == []
    ticks: list[int] = []
    write_final(tmp_path, tensors, "m", "s", 7, tick=lambda: ticks.append(1))
    assert len(ticks) == len(tensors) == 2
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == ["digest.json", "model.safetensors"]
    assert torch.equal(load_file(tmp_path / "final" / "model.safetensors")["weight"], MODEL.weight)


def test_what_is_put_aside_names_the_folder_that_is_full(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as told, _aside(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert told.value.filename == str(tmp_path / "final")
    with pytest.raises(OSError, match="No space") as told, _aside(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "elsewhere")
    assert told.value.filename == "elsewhere"


def full_for(times: int, code: int = errno.ENOSPC) -> Callable[[], None]:
    left = [times]

    def write() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(code, os.strerror(code))

    return write


def test_a_full_disk_does_not_lose_the_result_if_it_is_freed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final, "_RETRY_S", 0.0)
    assert final.when_there_is_room(full_for(3), lambda: True)
    monkeypatch.setattr(final, "_RETRY_S", 60.0)
    assert not final.when_there_is_room(full_for(1), lambda: False), "the plan has changed"
    with pytest.raises(OSError, match="No space"):
        final.when_there_is_room(full_for(1), lambda: True, wait_s=0.0)
    with pytest.raises(OSError, match="Input/output"):
        final.when_there_is_room(full_for(1, errno.EIO), lambda: True)
