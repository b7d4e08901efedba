"""Streams by number: every reader gives the same samples, from wherever it begins; what does not is refused by name."""

from __future__ import annotations

import itertools
import os
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from everstep.base.errors import ConfigError, TaskError
from everstep.data.reading import by_index, first_samples, reading_of
from everstep.data.sample_content import sample_digest
from everstep.data.stream import (
    MOST_STATE_BYTES,
    NO_MORE,
    Front,
    Stream,
    StreamMark,
    StreamReader,
    check_starts_over,
    count,
)

N = 37


class Plain(IterableDataset[Any]):
    def __init__(self, n: int = N) -> None:
        self.n = n
        self.begun = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        yield from ((100 * self.epoch + i, torch.rand(2), self.begun, random.random()) for i in range(self.n))


class Sized(Plain):
    def __len__(self) -> int:
        return N


class Placed(Plain):
    """read: samples that all copies have read."""

    read: ClassVar[list[int]] = []
    at = 0
    resumed = False
    tell = True

    def __iter__(self) -> Iterator[Any]:
        self.at = self.at if self.resumed else 0
        self.resumed = False
        while self.at < self.n:
            i, self.at = self.at, self.at + 1
            Placed.read.append(i)
            yield 100 * self.epoch + i, torch.rand(2)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at if self.tell else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.resumed = state["at"], True


class Iterated:
    """An iterator with a place of its own."""

    def __init__(self, n: int = N) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> Iterated:
        return self

    def __next__(self) -> int:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def reader(data: Any, size: int | None = N, kept: int = 2) -> StreamReader:
    return StreamReader(Stream.of(data, size, 5), 8, kept)


def told(sample: Any) -> str:
    return repr(sample)


def samples(data: Any, epochs: int = 2, size: int | None = N) -> dict[tuple[int, int], str]:
    one = reader(data, size)
    return {(e, i): told(one.read(e, i)) for e in range(epochs) for i in range(N)}


@pytest.mark.parametrize("kind", [Plain, Sized, Placed, Iterated])
def test_any_reader_gives_the_same_samples_in_any_order(kind: type) -> None:
    every = samples(kind())
    assert len(set(every.values())) == (len(every) if kind is not Iterated else N)
    some = reader(kind())
    for place in [(0, 3), (0, 20), (0, 13), (0, 2), (1, 0), (0, 36), (1, 36), (1, 1)]:
        assert told(some.read(*place)) == every[place]


@pytest.mark.parametrize("kind", [Plain, Placed, Iterated])
def test_a_mark_goes_on_where_it_was_made(kind: type) -> None:
    every = samples(kind())
    first = reader(kind())
    first.read(1, 20)
    mark = first.mark(1, 19)
    assert mark is not None and (mark.epoch, mark.index) == (1, 11)  # row 48 of passes of 37
    later = reader(kind())
    Placed.read.clear()
    later.add(mark)
    assert {i: told(later.read(1, i)) for i in range(11, 30)} == {i: every[1, i] for i in range(11, 30)}
    assert kind is not Placed or min(Placed.read) == 11
    again = reader(kind())
    again.add(later.mark(1, 28))  # type: ignore[arg-type]  # and a second time
    assert told(again.read(1, 30)) == every[1, 30]


def test_an_iterator_that_shares_another_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n2\n")
    with (tmp_path / "lines").open() as lines:
        for given in (map(int, lines), itertools.cycle(n for n in range(3)), zip(lines, lines, strict=True)):
            with pytest.raises(ConfigError, match=f"a {type(given).__name__}, which can be read only once"):
                Stream.of(given, None, 5)
    assert told(reader(map(int, ["7", "8"]), None).read(0, 1)) == "8"


class Copied:
    """times: how often one of its kind was copied."""

    times: ClassVar[int] = 0

    def __deepcopy__(self, memo: Any) -> Copied:
        Copied.times += 1
        return self


@pytest.mark.parametrize("given", [list, tuple, lambda items: dict(enumerate(items)).values()])
def test_an_iterator_of_a_container_is_not_copied_to_see_whether_it_can_be(given: Any) -> None:
    Copied.times, items = 0, iter(given([Copied() for _ in range(9)]))
    next(items)
    stream = Stream.of(items, None, 5)
    assert Copied.times == 1
    for _ in range(2):
        assert len(list(iter(stream.open(0).next, NO_MORE))) == 8
    with pytest.raises(ConfigError, match="which can be read only once"):
        Stream.of(iter(given([(n for n in range(3)) for _ in range(2)])), None, 5)


def test_a_place_that_is_not_told_rightly_costs_a_pass_and_no_bit(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Placed):
        tell = False

    every = samples(Wrong())
    first = reader(Wrong())
    first.read(0, 30)
    later = reader(Wrong())
    later.add(first.mark(0, 29))  # type: ignore[arg-type]
    assert told(later.read(0, 29)) == every[0, 29]
    assert "is not seen to go on where its state_dict says" in caplog.text


def test_other_samples_than_before_are_refused() -> None:
    first = reader(Plain())
    first.read(0, 30)
    mark = first.mark(0, 29)
    assert isinstance(mark, StreamMark)
    later = reader(Sized())
    later.add(StreamMark(mark.epoch, mark.index, mark.state, mark.count, "0" * 32))
    with pytest.raises(ConfigError, match="Sized gives other samples than before from number 16 of pass 1"):
        later.read(0, 29)


def test_a_stream_that_splits_itself_by_rank_gives_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dealt(Plain):
        def __iter__(self) -> Iterator[Any]:
            yield from list(range(self.n))[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert [reader(Dealt()).read(0, i) for i in range(N)] == list(range(N))
    assert os.environ["RANK"] == "2"


def test_a_pass_ends_where_it_should() -> None:
    with pytest.raises(ConfigError, match="ended after 30 of its 37 samples in pass 1"):
        samples(Plain(30))
    with pytest.raises(ConfigError, match="goes on after 37 samples, which is its length"):
        samples(Plain(38))
    with pytest.raises(ConfigError, match="ended after 37 samples, and more steps were to come"):
        reader(Plain(), None).read(0, N)


def test_what_a_stream_raises_is_told_with_its_place() -> None:
    class Broken(Plain):
        def __iter__(self) -> Iterator[Any]:
            yield 1
            raise OSError("gone")

    with pytest.raises(TaskError, match="sample 1 of pass 1 of the stream Broken cannot be read: OSError: gone"):
        reader(Broken()).read(0, 1)


@pytest.mark.parametrize(
    "state, words",
    [({"x": torch.ones(1)}, "not plain data"), ({1: 2}, "not the same"), ("x" * MOST_STATE_BYTES, "has")],
)
def test_a_place_is_small_plain_data(state: Any, words: str) -> None:
    class Large(Placed):
        def state_dict(self) -> Any:
            return state

    with pytest.raises(ConfigError, match=f"position of the stream Large.*{words}"):
        reader(Large()).read(0, 9)


def test_a_stream_is_started_over_before_the_first_step() -> None:
    assert check_starts_over(Stream.of(Plain(), None, 0)) == Front(
        check_starts_over(Stream.of(Plain(), None, 0)).digest, False
    )
    assert check_starts_over(Stream.of(Placed(), None, 0)).resumes
    assert check_starts_over(Stream.of(Plain(3), None, 0)).digest
    with pytest.raises(ConfigError, match="gives no samples"):
        check_starts_over(Stream.of(Plain(0), None, 0))
    drawn = random.Random()

    class Drawn(Plain):
        def __iter__(self) -> Iterator[Any]:
            yield 1
            yield drawn.random()

    with pytest.raises(ConfigError, match="Drawn gives other samples when it is started over, from number 1 on"):
        check_starts_over(Stream.of(Drawn(), None, 0))


@dataclass
class Pair:
    x: torch.Tensor
    drawn_at: float = field(default=0.0, compare=False)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda x: UserDict(x=x),  # as a tokenizer's answer is
        lambda x: Pair(x, random.SystemRandom().random()),
        lambda x: np.array([None, x.tolist()], dtype=object),
        lambda x: frozenset(x.tolist()),
    ],
)
def test_samples_of_any_container_are_told_apart(wrapped: Callable[[torch.Tensor], Any]) -> None:
    drawn = random.Random()

    class Steady(Plain):
        def __iter__(self) -> Iterator[Any]:
            yield from (wrapped(torch.tensor([float(i), -1.0])) for i in range(3))

    class Drawn(Plain):
        def __iter__(self) -> Iterator[Any]:
            yield from (wrapped(torch.tensor([drawn.random(), -1.0])) for _ in range(3))

    assert check_starts_over(Stream.of(Steady(), None, 0)).digest
    with pytest.raises(ConfigError, match="Drawn gives other samples when it is started over, from number 0 on"):
        check_starts_over(Stream.of(Drawn(), None, 0))


@dataclass
class Node:
    x: int
    next: Any = None


def test_a_sample_may_refer_to_itself() -> None:
    first, last = Node(1), Node(2)
    first.next, last.next = last, first
    again = Node(1)
    again.next = Node(2, again)
    assert sample_digest(first) == sample_digest(again) != sample_digest(last)


def test_what_can_be_read_only_once_is_refused(tmp_path: Any) -> None:
    (tmp_path / "x").write_text("a\nb\n")
    with open(tmp_path / "x") as file:
        for once in ((i for i in range(3)), file):
            with pytest.raises(ConfigError, match=f"the dataset is a {type(once).__name__}, which can be read only on"):
                reading_of(once)
    inner = iter([1, 2, 3, 4])
    shared = Stream.of(map(str, inner), None, 0) if not hasattr(inner, "send") else None
    if shared is not None:
        assert check_starts_over(Stream.of(iter([1, 2]), None, 0)).digest


def test_how_a_dataset_is_read() -> None:
    assert not reading_of([1, 2]).streamed and reading_of([1, 2]).size == 2
    assert reading_of(Plain()).streamed and reading_of(Plain()).size is None
    assert reading_of(Sized()).streamed and reading_of(Sized()).size == N
    assert reading_of(Iterated()).streamed
    for neither in (3, None, object()):
        with pytest.raises(ConfigError, match="expected a map-style one"):
            reading_of(neither)
    with pytest.raises(ConfigError, match="give its dataset"):
        reading_of(DataLoader([1, 2]))  # type: ignore[arg-type]


def test_a_stream_by_index_and_its_length() -> None:
    assert count(Stream.of(Plain(), None, 0)) == N
    view = by_index(Plain(), 8)
    assert len(view) == N and [view[i][0] for i in range(N)] == list(range(N)) and view[3][0] == 3
    assert by_index([1], 8) == [1]
    assert [s[0] for s in first_samples(Plain(), 2)] == [0, 1] and first_samples([5, 6, 7], 2) == [5, 6]
