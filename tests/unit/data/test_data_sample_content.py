"""What samples hold: objects of every kind are told apart by it, and by nothing else."""

from __future__ import annotations

import decimal
import enum
import functools
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from everstep.base.errors import ConfigError
from everstep.data.sample_content import in_part, joint, sample_digest
from everstep.data.stream import Stream, StreamReader, check_starts_over


class Sample:
    def __init__(self, x: Any) -> None:
        self.x, self.made = x, len

    def read(self) -> Any:
        return self.x


class Slotted:
    __slots__ = ("missing", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Both(Slotted):
    def __init__(self, x: Any) -> None:
        super().__init__(x)
        self.more = 1


class Told:
    """Says itself what it holds."""

    def __init__(self, x: Any) -> None:
        self.x, self.drawn = x, object()

    def __getstate__(self) -> Any:
        return {"x": self.x}


@dataclass
class Row:
    x: Any
    drawn: Any = field(default_factory=object, compare=False)


class Colour(enum.Enum):
    RED, BLUE = 1, 2


def among(sample: Sample) -> Sample:
    sample.made = {sample}  # type: ignore[assignment]
    return sample


def local() -> Any:
    class Local(Sample):
        pass

    return Local


def nodes(x: Any, size: int = 12) -> Any:
    """A graph in which every node knows all others."""
    found = [Sample(None) for _ in range(size)]
    for node in found:
        node.x = found
    return [*found, x]


KINDS: dict[str, Callable[[int], Any]] = {
    "object": Sample,
    "inner object": lambda n: Sample({"a": [Sample(torch.tensor([n]))]}),
    "slots": Slotted,
    "both": Both,
    "told": Told,
    "path": lambda n: Path("a") / str(n),
    "time": lambda n: datetime(2020, 1, 1, tzinfo=UTC) + timedelta(n),
    "zone": lambda n: datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=n))),
    "decimal": lambda n: decimal.Decimal(n),
    "numbers": lambda n: array("d", [float(n)]),
    "deque": lambda n: deque([Sample(n)]),
    "call": lambda n: functools.partial(Path, str(n)),
    "member": lambda n: list(Colour)[n - 1],
    "class": lambda n: [int, str][n - 1],
    "graph": nodes,
    "generator": lambda n: torch.Generator().manual_seed(n),
    "set": lambda n: Sample({"a", "b", "c", str(n)}),
    "set that lies in its member": lambda n: among(Sample(n)),
    "row": lambda n: Sample([Row(n)]),
    "local": lambda n: local()(n),
    "picture": lambda n: Sample(Image.new("L", (2, 2), n)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_told_apart_by_what_they_hold(kind: str) -> None:
    one, again, other = sample_digest(KINDS[kind](1)), sample_digest(KINDS[kind](1)), sample_digest(KINDS[kind](2))
    assert one == again != other and len(one) == len(other) == 32


def test_it_does_not_count_whether_equal_parts_are_one() -> None:
    text, raw, number = "a long text", b"bytes", 10.0**9
    one = Sample([text, text, raw, raw, number, number, {text, "b"}])
    other = Sample([text, "".join(list(text)), raw, bytes(bytearray(raw)), number, float("1e9"), {"b", text}])
    assert sample_digest(one) == sample_digest(other)


@pytest.mark.parametrize(
    "held",
    [
        lambda: (n for n in range(3)),
        lambda: (lambda x: lambda: x)(object()),
        lambda: Sample(lambda: 1),
        lambda: torch.ones(2, device="meta"),
        lambda: Sample(torch.eye(2).to_sparse()),
    ],
)
def test_what_cannot_be_compared_is_marked(held: Callable[[], Any]) -> None:
    one, again = sample_digest([held(), 1]), sample_digest([held(), 1])
    assert one == again != sample_digest([held(), 2]) and in_part(one)
    assert in_part(joint(["a", one])) and joint([one]) == joint([again]) and not in_part(joint(["a"]))


class Shuffled(IterableDataset[Any]):
    """Its state_dict is told to lack what follows it, or not. at: of the next sample."""

    def __init__(self, wrapped: Callable[[int], Any], skips: int = 0) -> None:
        self.wrapped, self.skips, self.at, self.resumed = wrapped, skips, 0, False

    def __iter__(self) -> Iterator[Any]:
        self.at = self.at + self.skips if self.resumed else 0
        self.resumed = False
        while self.at < 40:
            i, self.at = self.at, self.at + 1
            yield self.wrapped(i)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"], True


def number(sample: Any) -> Any:
    return sample.x if isinstance(sample, Sample | Slotted) else int(sample[0].to_dense())


@pytest.mark.parametrize("wrapped", [Sample, Slotted, lambda i: [torch.tensor([i]).to_sparse()]])
def test_a_state_that_leads_elsewhere_is_not_followed(
    wrapped: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def reader() -> StreamReader:
        return StreamReader(Stream.of(Shuffled(wrapped, skips=1), 40, 5), 8, 2)

    first = reader()
    first.read(0, 30)
    mark = first.mark(0, 29)
    assert mark is not None and mark.state
    later = reader()
    later.add(mark)
    assert number(later.read(0, 29)) == 29
    assert ("parts that cannot be compared" in caplog.text) == in_part(mark.digest)
    assert f"it is started over, and {mark.index} samples are skipped" in caplog.text


def test_a_stream_of_objects_that_is_not_the_same_twice_is_refused() -> None:
    count = iter(range(1000))
    with pytest.raises(ConfigError, match="Shuffled gives other samples when it is started over, from number 0 on"):
        check_starts_over(Stream.of(Shuffled(lambda i: Sample(next(count))), None, 0))
    assert check_starts_over(Stream.of(Shuffled(lambda i: [torch.eye(2).to_sparse(), i]), None, 0)).digest
