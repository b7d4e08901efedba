"""What a checkpoint says of the data, and what a job that goes on from it makes of that."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, random_split

from everstep.base.config import Config
from everstep.base.errors import ConfigError, TaskError
from everstep.base.readable import readable
from everstep.data.first_samples import FirstSamples
from everstep.data.loader_process import LoaderProcess
from everstep.data.sample_content import joint, sample_digest, types_alone
from everstep.data.stream import Front, Stream, StreamReader
from everstep.order.cursor import SampleOrder
from everstep.train import job_data
from everstep.train.elastic import sample_order
from everstep.train.job_data import DataPosition, dataset_files, read_by_order

UNKNOWN = "whether the samples are those of before the checkpoint of"
UNREAD = "some of them differ when they are read again, or could not be read within 10 s in a forked process"
FILES = [(f"shard-{i:05d}.tar", 1 << 30) for i in range(1000)]
ORDER = SampleOrder(0, 100, 4, 2, epochs=2, shuffle=False)


def position(reader: StreamReader | None = None, front: str = "f", resumes: bool = True) -> DataPosition:
    return DataPosition(ORDER, (), Front(front, resumes), reader or StreamReader(Stream([], 100, 0), 8, 2))


def test_the_place_in_a_terabyte_of_shards_is_small_and_names_a_change() -> None:
    data = DataPosition(ORDER, FILES).encoded(5)
    assert len(data) < 1 << 20
    DataPosition(ORDER, FILES).accept(data, 5)
    other = [*FILES[:7], ("shard-x.tar", 5), *FILES[8:]]
    with pytest.raises(ConfigError, match=r"step 5 was trained on: number 7 of 1000 is shard-x.tar \(5 bytes\) now"):
        DataPosition(ORDER, other).accept(data, 5)
    with pytest.raises(ConfigError, match="number 999 of 1000 is not there now, of 999"):
        DataPosition(ORDER, FILES[:-1]).accept(data, 5)
    assert DataPosition(ORDER).encoded(5) == b""
    with pytest.raises(ConfigError, match="cannot be read"):
        DataPosition(ORDER).accept(b"{", 5)


class Shards(list[Any]):
    def files_read(self) -> list[tuple[str, int]]:
        return FILES[: len(self)]


class Wrapped:
    def __init__(self, inner: Any) -> None:
        self._dataset = inner


def test_files_are_known_behind_whatever_wraps_a_dataset() -> None:
    one, two = Shards([0]), Shards([0, 1])
    train, _ = random_split(two, [1, 1])
    assert dataset_files(one) == FILES[:1] and dataset_files([one]) == dataset_files(Wrapped(None)) == []
    for wrapped in (train, Subset(Wrapped(two), [0]), Wrapped(Wrapped(Subset(two, [1])))):
        assert dataset_files(wrapped) == FILES[:2]
    assert dataset_files(ConcatDataset([two, Subset(one, [0]), [5]])) == [*FILES[:2], *FILES[:1]]
    assert dataset_files(StackDataset(image=two, text=two)) == FILES[:2] * 2
    many = Wrapped([one])
    many._dataset = many
    assert dataset_files(many) == []
    views = [Wrapped(one) for _ in range(60)]
    for view in views:
        view.datasets = views
    assert set(dataset_files(views[0])) == set(FILES[:1])


def test_a_stream_that_begins_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins with other samples than before the checkpoint of step 3"):
        position(front="g").accept(position().encoded(3), 3)


class Rows:
    """A dataset that counts its reads, of which one may fail or end its process."""

    def __init__(self, last: int = 0, breaks: bool = False, ends: bool = False) -> None:
        self.last, self.breaks, self.ends, self.reads = last, breaks, ends, 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        self.reads += 1
        if self.ends:
            os._exit(1)
        if self.breaks:
            raise ValueError("broken")
        return torch.rand(2) + (self.last if index == 99 else 0), str(index)


def looked_at(rows: Rows) -> DataPosition:
    return DataPosition(ORDER, first=FirstSamples(rows, len(rows), 0))


def test_other_samples_than_before_are_told() -> None:
    rows = Rows()
    said = looked_at(rows).encoded(5)
    assert rows.reads == 0, "they are read elsewhere"
    for one, told in ((Rows(), False), (Rows(last=1), True), (Rows(breaks=True), False), (Rows(ends=True), False)):
        position = looked_at(one)
        position.settle()
        text = position.accept(said, 5)
        assert text == ("the dataset holds other samples than before the checkpoint of step 5" if told else "")


def test_samples_are_seen_alike_in_each_worker_unless_they_differ_when_they_are_read_again() -> None:
    found = [looked_at(rows) for rows in (Rows(), Rows(), Rows(last=1), Rows(breaks=True))]
    for position in found:
        position.settle()
    ours, same, other, broken = (position.seen for position in found)
    assert ours == same and [*ours] == [0, 33, 66, 99] and not broken
    assert [name for name in ours if ours[name] != other[name]] == [99]


def test_a_dataset_of_another_length_is_told_though_no_sample_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    said = looked_at(Rows(breaks=True)).encoded(5)
    other = DataPosition(SampleOrder(0, 99, 4, 2, epochs=2), first=FirstSamples(Rows(), 99, 0))
    for position, text in ((looked_at(Rows()), ""), (other, "has 99 samples, and had 100 before the checkpoint of")):
        position.settle()
        assert text in (found := position.accept(said, 5)) and bool(found) == bool(text)
    assert [record.message for record in caplog.records] == [f"{UNKNOWN} step 5 is not known: {UNREAD}"]
    unread = looked_at(Rows(breaks=True))
    unread.settle()
    unread.accept(looked_at(Rows(last=1)).encoded(5), 5)
    position = looked_at(Rows())
    position.settle()
    assert "other samples than before" in position.accept(unread.encoded(6), 6), "a life that reads none passes it on"
    before = msgspec.json.encode({"files": [], "front": "", "mark": None, "samples": "other"})
    assert "other samples than before" in position.accept(before, 5), "what a release before this one has written"


def test_lengths_are_compared_though_no_process_can_be_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*given: Any) -> None:
        raise TaskError("no process")

    monkeypatch.setattr(job_data, "FirstSamples", refused)
    config = Config(lanes=4, micro_batch=2, epochs=1)
    link: Any = SimpleNamespace(config=config, regular_saves=True, run_dir=tmp_path)
    said = job_data.job_data(link, list(range(100))).position.encoded(5)
    for size, told in ((100, ""), (99, "the dataset has 99 samples, and had 100 before the checkpoint of step 5")):
        position = job_data.job_data(link, list(range(size))).position
        assert position.settle() == "" and position.accept(said, 5) == told


class Named(Rows):
    """Samples that are objects with a name of their own, which differs whenever they are read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        return super().__getitem__(index), SimpleNamespace(name=uuid4() if self.drawn else index)  # type: ignore[return-value]

    drawn = True


class Steady(Named):
    drawn = False


def test_objects_that_differ_whenever_they_are_read_are_not_compared() -> None:
    def told(rows: Rows, said: bytes) -> bool:
        position = looked_at(rows)
        position.settle()
        return bool(position.accept(said, 5))

    drawn, steady = looked_at(Named()).encoded(5), looked_at(Steady()).encoded(5)
    assert not told(Named(), drawn) and not told(Steady(), steady)
    assert told(Named(last=1), drawn) and told(Steady(last=1), steady)


class Normalised(Rows):
    """A transform that changes in place what is stored; the last sample is drawn by a generator of its own."""

    def __init__(self, inplace: bool = False, seed: int | None = None) -> None:
        super().__init__()
        self.stored, self.inplace = torch.arange(200.0).view(100, 2), inplace
        self.own = torch.Generator().manual_seed(seed) if seed is not None else None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        row = self.stored[index].sub_(0.5) if self.inplace else self.stored[index] - 0.5
        drawn = torch.rand(1, generator=self.own) if index == 99 else 0
        return (row.flip(0) if torch.rand(()) < 0.5 else row) + drawn, str(index)


def test_samples_that_differ_when_they_are_read_again_are_told() -> None:
    told = [looked_at(Normalised(*given)).settle() for given in ((), (True,), (False, 3))]
    said = "the dataset gives another sample {} when it is read again"
    assert told == ["", said.format(0), said.format(99)]


@dataclass
class Row:
    x: torch.Tensor
    name: Any


def in_a_row(x: torch.Tensor) -> Any:
    return Row(x, SimpleNamespace(name=uuid4()))


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": in_a_row,
    "mapping": lambda x: UserDict(x=x, row=in_a_row(x[:1])),
    "set": lambda x: {"a", "b", str(x.tolist()), Path("c")},
    "objects": lambda x: np.array([in_a_row(x), "a"], dtype=object),
}


class Contained(Rows):
    """Rows in a container that a release before did not look into; some are drawn by a generator of their own."""

    def __init__(self, kind: str, drawn: bool) -> None:
        super().__init__()
        self.kind, self.own = kind, torch.Generator().manual_seed(3) if drawn else None

    def __getitem__(self, index: int) -> Any:
        return [CONTAINERS[self.kind](torch.rand(2) if index < 99 else torch.rand(2, generator=self.own))]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_containers_hold_is_told_and_objects_that_differ_by_their_names_are_not(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert looked_at(Contained(kind, False)).settle() == ""
    unknown = ["sample 0 differs when it is read again; whether by content cannot be told"]
    assert [record.message for record in caplog.records] == (unknown if kind != "set" else [])
    assert looked_at(Contained(kind, True)).settle() == "the dataset gives another sample 99 when it is read again"


def test_samples_that_differ_within_a_life_are_not_compared_with_those_of_before() -> None:
    """Which of them this life read first says nothing of the dataset: a job that has trained is not to end by it."""
    said = looked_at(Normalised()).encoded(5)
    position = looked_at(Normalised(False, 3))
    assert position.settle() and position.accept(said, 5) == ""
    other = looked_at(Rows(last=1))
    other.settle()
    assert "other samples than before" in other.accept(position.encoded(6), 6), "it passes on what was known"


def test_a_stream_of_objects_of_release_0_1_0_goes_on() -> None:
    """It told objects by their types alone."""
    front = joint([sample_digest(SimpleNamespace(name=1))])
    position(front=front).accept(position(front=types_alone(front)).encoded(3), 3)
    with pytest.raises(ConfigError, match=r"begins with other samples .*__getstate__"):
        position(front=front).accept(position(front=joint([sample_digest(SimpleNamespace(name=2))])).encoded(3), 3)


def test_a_process_that_is_asked_for_the_last_time_ends_and_its_answer_stays() -> None:
    """A worker that reads no samples may never ask for the digest, and would keep a copy of its memory for ever."""
    process = LoaderProcess(lambda step, lane: [step, lane])
    process.ask(1, 7, 3)
    process.ask(2, 8, 3, last=True)
    ended = os.pidfd_open(process.pid)
    assert readable([ended], 60)
    os.close(ended)
    assert [process.receive() for _ in range(2)] == [(1, [7, 3]), (2, [8, 3])]
    process.close()


def test_the_cost_is_said() -> None:
    before = StreamReader(Stream(list(range(100)), 100, 0), 8, 2)
    before.read(0, 60)
    data = position(before).encoded(7)
    placed, counted = position(), position(resumes=False)
    for one in (placed, counted):
        one.accept(data, 7)
    assert placed.cost(7) == ""
    assert "56 samples of the stream list are read again, and skipped, to go on at step 7: with st" in counted.cost(7)
    assert position().cost(0) == ""


def test_a_stream_has_its_own_order() -> None:
    config = Config(lanes=4, micro_batch=2, epochs=1)
    data, order = read_by_order(config, iter(range(20)))
    assert isinstance(data, StreamReader) and order.samples(2, 1) == ((0, 10), (0, 11))
    assert read_by_order(config, list(range(20)))[0] == list(range(20))
    with pytest.raises(ConfigError, match="per_worker needs a map-style dataset"):
        sample_order(Config(batch="per_worker", epochs=1), data)
