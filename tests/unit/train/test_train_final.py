"""What a finished job leaves is whole or not there."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from everstep.base.errors import CollectiveAborted
from everstep.checkpoint.tensor_file import Aside
from everstep.train import final
from everstep.train.executor import Unusable
from everstep.train.final import Finisher, Lying, _aside, model_tensors, write_final

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


def test_a_full_disk_does_not_lose_the_result_if_it_is_freed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = final.Room(tmp_path)
    monkeypatch.setattr(final, "_RETRY_S", 0.0)
    assert final.when_there_is_room(full_for(3), room, lambda: True)
    monkeypatch.setattr(final, "_RETRY_S", 60.0)
    assert not final.when_there_is_room(full_for(1), room, lambda: False), "the plan has changed"
    with pytest.raises(OSError, match="No space"):
        final.when_there_is_room(full_for(1), room, lambda: True, wait_s=0.0)
    with pytest.raises(OSError, match="Input/output"):
        final.when_there_is_room(full_for(1, errno.EIO), room, lambda: True)


def test_what_would_not_fit_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, free, looks, tries = os.statvfs(tmp_path), [0], [0], list[int]()
    room = final.Room(tmp_path)
    room.need(10 << 20)

    def statvfs(path: Path) -> os.statvfs_result:
        looks[0] += 1
        free[0] = 10 << 20 if looks[0] < 3 else 12 << 20
        return os.statvfs_result((*found[:4], free[0] // found.f_frsize, *found[5:]))

    def write() -> None:
        tries.append(looks[0])
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(final, "_RETRY_S", 0.0)
    assert final.when_there_is_room(write, room, lambda: True)
    assert tries == [0, 3]


def test_a_stage_that_has_changed_is_its_givers_fault() -> None:
    """But for one of which the worker has a part itself, as where members divide the state."""
    operation: Any = SimpleNamespace(digests={0: "a" * 64, 1: "b" * 64}, sources={0: (4,), 1: (5, 6)})
    view = SimpleNamespace(driver=SimpleNamespace(machine=SimpleNamespace(held={0: None})))
    finisher = Finisher(cast(Any, view), cast(Any, None))
    finisher._refuse_other({0: "a" * 64, 1: "b" * 64}, operation)
    for digests, torn, odd in (({0: "c" * 64}, True, ()), ({0: "a" * 64, 1: "c" * 64}, False, (5,))):
        with pytest.raises(Unusable, match="has changed since all had agreed on it") as raised:
            finisher._refuse_other(digests, operation)
        assert (raised.value.torn, raised.value.odd) == (torn, odd)


@pytest.mark.parametrize(
    ("names", "raises"), [("", False), ("a", False), ("a-", False), ("ab", False), ("a-a", False), ("aa", True)]
)
def test_a_result_that_cannot_come_to_the_jobs_directory_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, names: str, raises: bool
) -> None:
    """Unless that is for want of room, or not for long: a directory of another host may not answer for a moment."""
    clock, said = itertools.count(0.0, 61.0), iter(names)
    monkeypatch.setattr(final, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None))
    link = SimpleNamespace(has_arrived=lambda name: False, row=SimpleNamespace(end_asked=False))
    link.refused = lambda folder: (f"{folder}{name}", "Not a directory") if (name := next(said, "-")) != "-" else None
    over = iter([False, False, False, True])
    view = SimpleNamespace(link=link, cutter=SimpleNamespace(over=lambda generation: next(over)), tick=lambda: None)
    finisher, plan = Finisher(cast(Any, view), cast(Any, None)), cast(Any, SimpleNamespace(generation=1))
    if not raises:
        assert not finisher._arrived(plan), "the plan has changed"
    else:
        with pytest.raises(OSError, match=r"Not a directory, in the job's directory: 'final/a'"):
            finisher._arrived(plan)


class FullAside(Finisher):
    """Of a job of stages, on a disk that is full when the first try puts other stages aside."""

    def __init__(self, run_dir: Path, *, end_asked: bool = False) -> None:
        link = SimpleNamespace(run_dir=run_dir, row=SimpleNamespace(end_asked=end_asked))
        view = SimpleNamespace(link=link, order=SimpleNamespace(total_steps=3), is_main=True)
        view.stages, view.cutter = SimpleNamespace(split=True), SimpleNamespace(over=lambda generation: False)
        view.driver = SimpleNamespace(machine=SimpleNamespace(stages=()))
        view.phase = view.tick = lambda *_: None
        super().__init__(cast(Any, view), cast(Any, None))
        self.asides = list[Aside]()

    def _collect(self, operation: Any, aside: Aside) -> Any:
        self.asides.append(aside)
        if len(self.asides) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise CollectiveAborted("it passes by again")


def test_what_is_put_aside_waits_for_room_too_and_is_freed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation: Any = SimpleNamespace(plan=SimpleNamespace(generation=1), step=3)
    monkeypatch.setattr(final, "_RETRY_S", 0.0)
    finisher = FullAside(tmp_path)
    with pytest.raises(CollectiveAborted, match="passes by again"):
        finisher.write(operation)
    first, second = finisher.asides
    assert first is not second
    with pytest.raises(ValueError, match="closed"):
        first.read(0, 1)
    monkeypatch.setattr(final, "_RETRY_S", 60.0)
    assert not FullAside(tmp_path, end_asked=True).write(operation), "its host ends the job"
