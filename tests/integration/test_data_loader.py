"""Batches have the same bits whoever loads them, and loader processes neither hang nor outlive their parent."""

from __future__ import annotations

import fcntl
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.base.config_keys import LoaderConfig
from everstep.base.errors import TaskError
from everstep.data.batch import aligned
from everstep.data.loader import LaneLoader, Recipe, fetch
from everstep.data.loader_process import LoaderProcess
from everstep.data.stream import Stream, StreamReader
from everstep.exact.seeding import sample_seed, seed_all
from everstep.order.cursor import SampleOrder

SIZE = 40


class Noisy:
    """Samples that draw from every generator; some can be made to fail or to kill."""

    def __init__(self, broken: int = -1, deadly: int = -1) -> None:
        self.broken = broken
        self.deadly = deadly

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise OSError("the disk says no")
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        drawn = torch.rand(5) + float(np.random.rand()) + random.random()
        return {"x": drawn.t(), "index": index, "name": f"sample {index}"}


class NoisyCollate:
    def __call__(self, samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "mask": torch.rand(len(samples)) < 0.5}


def order(**limits: int) -> SampleOrder:
    return SampleOrder(7, SIZE, lanes=4, micro_batch=3, **(limits or {"steps": 6}))


def loader(workers: int = 0, dataset: Any = None, **more: Any) -> LaneLoader:
    recipe = Recipe(dataset or Noisy(), more.pop("order", order()), NoisyCollate(), 3)
    return LaneLoader(recipe, LoaderConfig(workers, **more))


def everything(loads: LaneLoader, lanes: list[int], steps: int) -> dict[tuple[int, int], Any]:
    try:
        found = {}
        for step in range(1, steps + 1):
            loads.schedule(step, lanes)
            for lane in lanes:
                found[step, lane] = loads.batch(step, lane)
        return found
    finally:
        loads.close()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 0), (1, 2), (2, 1), (3, 5)])
def test_the_same_bits_with_any_number_of_processes(workers: int, prefetch: int) -> None:
    expected = everything(loader(), [0, 1, 2, 3], 6)
    got = everything(loader(workers, prefetch=prefetch), [0, 1, 2, 3], 6)
    assert len(expected) == 24
    assert same(got, expected)


SHIFT = 0.0


class Changing(Noisy):
    """Samples that follow values that a loop may change, in several places."""

    slope = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0
        self.table, self.weights = {"a": [0.0]}, np.zeros(3)
        self.transform = functools.partial(torch.add, other=0.0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        more = self.level + self.slope + self.table["a"][0] + float(self.weights[1]) + SHIFT
        return {**found, "x": self.transform(found["x"] + more)}

    def change(self, step: int) -> None:
        """As a loop does, before the batches of a step."""
        global SHIFT
        self.level = 1.0 * (step >= 2)
        self.table["a"][0] = 2.0 * (step >= 3)
        self.weights[1] = 3.0 * (step >= 4)
        SHIFT = 4.0 * (step >= 5)
        self.transform.keywords["other"] = 5.0 * (step >= 6)
        type(self).slope = 6.0 * (step >= 7)


@pytest.mark.parametrize("first", [1, 3])
def test_a_change_of_the_dataset_by_the_loop_reaches_its_processes(first: int) -> None:
    def through(workers: int, first: int) -> dict[tuple[int, int], Any]:
        data = Changing()
        loads = loader(workers, data, order=order(steps=8), **({"prefetch": 2} if workers else {}))
        found = {}
        try:
            for step in range(first, 9):
                data.change(step)
                loads.schedule(step, [0, 1])
                found |= {(step, lane): loads.batch(step, lane) for lane in (0, 1)}
            return found
        finally:
            loads.close()

    expected = {key: batch for key, batch in through(0, 1).items() if key[0] >= first}
    assert same(through(2, first), expected)


def test_processes_stay_while_nothing_changes() -> None:
    data = Changing()
    loads = loader(1, data)
    try:
        loads.schedule(1, [0])
        began = loads._slots[0].process.pid
        loads.schedule(2, [0])
        assert loads._slots[0].process.pid == began
        data.later = None
        loads.schedule(3, [0])
        assert loads._slots[0].process.pid != began
    finally:
        loads.close()


def test_a_lane_does_not_depend_on_those_before_it() -> None:
    expected = everything(loader(), [0, 1, 2, 3], 6)
    alone = loader()
    for key in reversed(list(expected)):
        assert same(alone.batch(*key), expected[key])


def test_samples_and_seeds_are_those_of_the_order() -> None:
    batch, samples = loader().batch(4, 2)
    assert samples == order().samples(4, 2)
    assert batch["index"].tolist() == [index for _, index in samples]
    epoch, index = samples[0]
    seed_all(sample_seed(3, epoch, index))
    assert torch.equal(batch["x"][0], Noisy()[index]["x"])


def test_the_same_sample_is_drawn_anew_in_each_epoch() -> None:
    loads = loader(order=order(epochs=2))
    seen: dict[int, list[torch.Tensor]] = {}
    for step in range(1, 8):
        for lane in range(4):
            batch, samples = loads.batch(step, lane)
            for row, (_, index) in enumerate(samples):
                seen.setdefault(index, []).append(batch["x"][row])
    assert {len(v) for v in seen.values()} == {2}
    assert not any(torch.equal(*pair) for pair in seen.values())


def test_the_callers_generators_stay_as_they_were() -> None:
    seed_all(11)
    expected = (torch.rand(3), np.random.rand(), random.random())
    seed_all(11)
    fetch(Recipe(Noisy(), order(), NoisyCollate(), 3), 1, 0)
    got = (torch.rand(3), np.random.rand(), random.random())
    assert torch.equal(got[0], expected[0])
    assert got[1:] == expected[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_lane_without_samples_is_empty(workers: int) -> None:
    ends = order(epochs=1)
    loads = loader(workers, order=ends)
    try:
        loads.schedule(4, range(4))
        assert [len(loads.batch(4, lane)[1]) for lane in range(4)] == [3, 1, 0, 0]
        assert loads.batch(4, 3) == (None, ())
    finally:
        loads.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_begin_at_64_bytes_and_keep_their_strides(workers: int) -> None:
    def collate(samples: list[Any]) -> Any:
        whole = torch.arange(200.0)
        return (whole[1:41].view(5, 8).t(), whole[3:103:2], whole[:1].expand(4), torch.zeros(0), [whole, whole])

    loads = LaneLoader(Recipe(Noisy(), order(), collate, 0), LoaderConfig(workers))
    try:
        loads.schedule(1, [0])
        turned, gaps, spread, empty, shared = loads.batch(1, 0)[0]
    finally:
        loads.close()
    assert [t.data_ptr() % 64 for t in (turned, gaps, spread)] == [0, 0, 0]
    assert turned.stride() == (1, 8)
    assert gaps.stride() == (1,)
    assert gaps.tolist() == list(range(3, 103, 2))
    assert spread.tolist() == [0.0] * 4
    assert empty.numel() == 0
    assert shared[0] is shared[1]
    turned.add_(1)


@dataclass(frozen=True)
class Batch:
    """A batch in an object of the user's."""

    rows: dict[str, torch.Tensor]
    whole: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SlottedBatch:
    """The same without a dictionary of its attributes."""

    rows: dict[str, torch.Tensor]
    whole: list[Any] = field(default_factory=list)


@dataclass
class Computed:
    """One of its fields is a property that is not to be asked for, as long as nothing is known of a batch."""

    x: torch.Tensor
    size: int = field(init=False)


Computed.size = property(lambda self: 1 // 0)  # type: ignore[assignment]


def test_properties_of_a_batch_are_not_called() -> None:
    assert aligned(Computed(torch.arange(9.0)[1:])).x.data_ptr() % 64 == 0


@dataclass(frozen=True)
class OwnSlots:
    """Its slots are its own, so that it cannot be copied."""

    __slots__ = ("x",)
    x: torch.Tensor


def test_what_cannot_be_copied_stays_as_collate_has_made_it() -> None:
    batch = OwnSlots(torch.arange(9.0)[1:])
    assert aligned(batch) is batch


@pytest.mark.parametrize("kind", [Batch, SlottedBatch])
@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_in_dataclasses_begin_at_64_bytes(workers: int, kind: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        batch = kind({"x": torch.arange(9.0)[1:]})
        batch.whole.append(batch)
        return batch

    loads = LaneLoader(Recipe(Noisy(), order(), collate, 0), LoaderConfig(workers))
    try:
        loads.schedule(1, [0])
        batch = loads.batch(1, 0)[0]
    finally:
        loads.close()
    assert batch.rows["x"].data_ptr() % 64 == 0 and batch.rows["x"].tolist() == list(range(1, 9))
    still = kind({"x": torch.zeros(8)})
    assert aligned(still) is still and aligned(kind) is kind


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    bad = order().samples(2, 1)[1][1]
    loads = loader(workers, Noisy(broken=bad))
    try:
        for lane in range(4):
            loads.schedule(1, range(4))
            if bad not in [index for _, index in order().samples(1, lane)]:
                loads.batch(1, lane)
        with pytest.raises(TaskError, match=rf"sample {bad} of the dataset .*OSError: the disk says no"):
            loads.schedule(2, range(4))
            loads.batch(2, 1)
    finally:
        loads.close()


def test_what_another_plan_wants_comes_and_the_rest_is_dropped() -> None:
    expected = everything(loader(), [0, 1, 2, 3], 6)
    loads = loader(2, prefetch=3)
    try:
        loads.schedule(1, [0, 1])
        assert same(loads.batch(1, 0), expected[1, 0])
        loads.schedule(1, [1, 2, 3])
        for lane in (3, 1, 2):
            assert same(loads.batch(1, lane), expected[1, lane])
        assert same(loads.batch(1, 0), expected[1, 0]), "asked for again, and loaded at once"
        loads.schedule(4, [3])
        assert all(key[0] >= 4 and key[1] == 3 for slot in loads._slots for key in slot.asked.values())
        for step in (4, 5, 6):
            loads.schedule(step, [3])
            assert same(loads.batch(step, 3), expected[step, 3])
        assert not loads._ready
    finally:
        loads.close()


def test_a_killed_loader_process_is_replaced() -> None:
    expected = everything(loader(), [0, 1], 6)
    loads = loader(1, prefetch=1)
    try:
        for step in range(1, 7):
            loads.schedule(step, [0, 1])
            if step == 3:
                os.kill(loads._slots[0].process.pid, signal.SIGKILL)
            for lane in (0, 1):
                assert same(loads.batch(step, lane), expected[step, lane])
    finally:
        loads.close()


class Filed(Noisy):
    """Samples of a file that is opened when the first one is read; `__iter__` opens one of its own, or an outside
    program's output."""

    def __init__(self, path: Path, piped: bool = False) -> None:
        super().__init__()
        self.path, self.piped, self.file = path, piped, None
        path.write_bytes(np.arange(SIZE).tobytes())

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        self.file.seek(8 * index)
        return {"index": int(np.frombuffer(self.file.read(8), np.int64)[0])}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        cat = subprocess.Popen(["cat", self.path], bufsize=0, stdout=subprocess.PIPE)
        with cat, self.path.open("rb", buffering=0) as file:
            for _ in range(SIZE):
                yield {"index": int(np.frombuffer((cat.stdout if self.piped else file).read(8), np.int64)[0])}


@pytest.mark.parametrize("piped", [False, True])
def test_a_stream_that_the_parent_has_read_goes_on_in_processes_that_are_replaced(tmp_path: Path, piped: bool) -> None:
    ordered = SampleOrder(7, SIZE, lanes=4, micro_batch=3, steps=3, shuffle=False)
    reader = StreamReader(Stream(Filed(tmp_path / "rows", piped), SIZE, 3), 12, 3)
    loads = loader(1, reader, order=ordered, prefetch=0)
    try:
        for step in (1, 2, 3):
            if step > 1:
                os.kill(loads._slots[0].process.pid, signal.SIGKILL)
            loads.schedule(step, [0, 1])
            for lane in (0, 1, 3)[: 3 if step == 1 else 2]:  # the last of them is not prepared
                batch, samples = loads.batch(step, lane)
                assert batch["index"].tolist() == [index for _, index in samples]
    finally:
        loads.close()


@pytest.mark.parametrize("temporary", [False, True])
def test_loader_processes_do_not_move_the_files_that_their_parent_has_open(tmp_path: Path, temporary: bool) -> None:
    data = Filed(tmp_path / "rows")
    if temporary:
        data.file = tempfile.TemporaryFile(buffering=0, dir=tmp_path)  # noqa: SIM115
        data.file.write(data.path.read_bytes())
    loads = loader(2, data)
    try:
        loads.batch(1, 3)
        at = data.file.tell()
        os.set_inheritable(data.file.fileno(), True)
        for step in (1, 2):
            loads.schedule(step, [0, 1])
            for lane in (0, 1):
                batch, samples = loads.batch(step, lane)
                assert batch["index"].tolist() == [index for _, index in samples]
        assert data.file.tell() == at
    finally:
        loads.close()


def opened_late(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], None], refused: tuple[int, ...] = ()) -> None:
    """Let a process wait before it opens a file that it has inherited, and fail for these ways to open it."""
    real, parent = os.open, os.getpid()

    def late(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if os.getpid() != parent and str(path).startswith("/proc/self/fd/"):
            wait()
            if flags & os.O_ACCMODE in refused:
                raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", late)


def test_a_process_is_up_before_it_has_opened_all_files_and_reads_where_its_parent_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").touch()

    def wait() -> None:
        with (tmp_path / "lock").open() as mine:
            fcntl.flock(mine, fcntl.LOCK_EX)

    opened_late(monkeypatch, wait)
    with (tmp_path / "lock").open() as held, tempfile.TemporaryFile(buffering=0, dir=tmp_path) as file:
        fcntl.flock(held, fcntl.LOCK_EX)
        file.write(b"abcdef")
        file.seek(2)
        process = LoaderProcess(lambda step, lane: file.read(2))
        file.seek(5)
        fcntl.flock(held, fcntl.LOCK_UN)
        process.ask(1, 0, 0)
        assert process.receive() == (1, b"cd") and file.tell() == 5
        process.close()


@pytest.mark.parametrize("refused", [(os.O_RDWR,), (os.O_RDWR, os.O_RDONLY)])
def test_a_file_that_may_not_be_opened_again_is_read_only_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], refused: tuple[int, ...]
) -> None:
    with (tmp_path / "rows").open("w+b", buffering=0) as file:
        file.write(b"abcdef")
        file.seek(2)
        opened_late(monkeypatch, lambda: None, refused)
        process = LoaderProcess(lambda step, lane: file.read(2))
        process.ask(1, 0, 0)
        assert process.receive() == (1, b"cd")
        process.close()
        shared = len(refused) == 2
        assert file.tell() == (4 if shared else 2)
        assert (f"shares its place in {tmp_path / 'rows'} with its parent" in capfd.readouterr().err) == shared


def test_a_sample_that_kills_its_reader_is_an_error_and_no_endless_loop() -> None:
    deadly = order().samples(1, 2)[0][1]
    loads = loader(1, Noisy(deadly=deadly), prefetch=0)
    try:
        with pytest.raises(TaskError, match=rf"ended by signal SIGKILL .*step 1, lane 2 .*{deadly}"):
            loads.schedule(1, [2])
            loads.batch(1, 2)
    finally:
        loads.close()


def test_loader_processes_come_up_beside_busy_threads() -> None:
    stop = threading.Event()

    def busy() -> None:
        generator = torch.Generator()
        while not stop.is_set():
            torch.rand(100)
            torch.rand(1000, generator=generator).sort()

    threads = [threading.Thread(target=busy) for _ in range(3)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s / 50)  # they take turns quickly, so that this thread is not kept waiting
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert len(everything(loader(2), [0, 1], 2)) == 4
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        for thread in threads:
            thread.join()


def test_closing_leaves_no_process_and_no_descriptor() -> None:
    everything(loader(2), [0, 1], 2)
    before = len(os.listdir("/proc/self/fd"))
    loads = loader(2)
    loads.schedule(1, [0, 1])
    loads.batch(1, 0)
    pids = [slot.process.pid for slot in loads._slots]
    loads.close()
    loads.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(os.listdir("/proc/self/fd")) == before


DIES = """
import os, signal, sys
sys.path.insert(0, {here!r})
from test_data_loader import Noisy, loader, order
class Stuck(Noisy):
    def __getitem__(self, index):
        if index in [i for _, i in order().samples(1, 1)]:
            signal.pause()
        return super().__getitem__(index)
loads = loader(2, Stuck())
loads.schedule(1, [0, 1])
loads.batch(1, 0)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_loader_processes_die_with_their_parent_whatever_they_do() -> None:
    script = DIES.format(here=os.path.dirname(__file__))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    output, _ = parent.communicate(timeout=120)  # ends when the last process that holds the pipe has gone
    assert output == "ready\n"
    assert parent.returncode == -signal.SIGKILL


def test_the_parents_sockets_are_not_kept_open() -> None:
    import socket

    ours, theirs = socket.socketpair()
    loads = loader(1)
    try:
        loads.schedule(1, [0])
        loads.batch(1, 0)
        theirs.close()
        ours.settimeout(60)
        assert ours.recv(1) == b""
    finally:
        loads.close()
        ours.close()


@pytest.mark.gpu
def test_pinned_batches() -> None:
    loads = loader(1, pin_memory=True)
    try:
        loads.schedule(1, [0])
        assert loads.batch(1, 0)[0]["x"].is_pinned()
    finally:
        loads.close()


def test_a_module_in_a_batch_passes_through() -> None:
    layer = nn.Linear(2, 2)
    loads = LaneLoader(Recipe(Noisy(), order(), lambda samples: (layer, len(samples)), 0), LoaderConfig(1))
    try:
        loads.schedule(1, [0])
        got, count = loads.batch(1, 0)[0]
    finally:
        loads.close()
    assert count == 3
    assert torch.equal(got.weight, layer.weight)


def test_a_batch_that_cannot_be_sent_says_what_to_do() -> None:
    loads = LaneLoader(Recipe(Noisy(), order(), lambda samples: lambda: samples, 0), LoaderConfig(1))
    try:
        loads.schedule(1, [0])
        with pytest.raises(TaskError, match=r"cannot be sent .*loader\.workers=0"):
            loads.batch(1, 0)
    finally:
        loads.close()
