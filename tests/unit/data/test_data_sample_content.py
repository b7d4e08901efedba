"""What samples hold: objects of every kind are told apart by it, and by nothing else."""

from __future__ import annotations

import copy
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

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from everstep.base.errors import ConfigError
from everstep.data.sample_content import alike, in_part, joint, sample_digest, steady_digest, types_alone
from everstep.data.stream import Stream, StreamMark, StreamReader, check_starts_over
from everstep.exact.digest import digest_bytes


class Sample:
    def __init__(self, x: Any) -> None:
        self.x, self.made = x, len

    def read(self) -> Any:
        return self.x


@dataclass(eq=False)
class Name:
    """A key that is no text."""

    text: str


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


def jagged(n: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(n), torch.ones(2)], layout=torch.jagged)


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
    "pieces": lambda n: Sample(torch.nested.nested_tensor([torch.ones(n), torch.ones(2)])),
    "jagged pieces": lambda n: Sample(jagged(n)),
    "record": lambda n: np.array([(Row(n), 1)], dtype=[("a", "O"), ("b", "i4")]),
    "picture": lambda n: Sample(Image.new("L", (2, 2), n)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_told_apart_by_what_they_hold(kind: str) -> None:
    one, again, other = sample_digest(KINDS[kind](1)), sample_digest(KINDS[kind](1)), sample_digest(KINDS[kind](2))
    assert one == again != other and len(one) == len(other) == 64


def test_release_0_1_0_told_objects_by_their_types() -> None:
    def sample(n: int) -> Any:
        return [Sample(n), {"a": (Path(str(n)), {n})}, 1.5]

    before = digest_bytes(repr([("Sample", ""), [("'a'", [("PosixPath", ""), ("set", "")])], 1.5]).encode())
    now = sample_digest(sample(1))
    assert types_alone(now) == before == types_alone(sample_digest(sample(2)))
    assert sample_digest([1.5]) == digest_bytes(b"[1.5]")
    assert alike(before, now) and alike(joint([before]), joint([now])) and not alike(now, sample_digest(sample(2)))
    assert not alike(before, sample_digest([*sample(1), 2])) and not alike(before, sample_digest([1.5]))


def test_where_the_files_of_a_dataset_lie_makes_no_other_sample() -> None:
    def sample(folder: str, name: str) -> Any:
        path = f"{folder}/{name}"
        return {"path": path, "one of": [path], Name(path): 1}

    here = steady_digest(sample("/one", "a.jpg"))
    assert here == steady_digest(sample("/other/disk", "a.jpg")) != steady_digest(sample("/one", "b.jpg"))
    assert sample_digest(sample("/one", "a.jpg")) != sample_digest(sample("/other/disk", "a.jpg"))
    assert steady_digest(["one/a", "/"]) != steady_digest(["other/a", "/"])


def test_a_jagged_tensor_is_the_same_whenever_it_is_read() -> None:
    assert sample_digest(jagged(1)) == sample_digest(jagged(1)) != sample_digest(jagged(2))


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
        lambda: Sample([0.5] * (1 << 17)),
    ],
)
def test_what_cannot_be_compared_is_marked(held: Callable[[], Any]) -> None:
    one, again = sample_digest([held(), 1]), sample_digest([held(), 1])
    assert one == again != sample_digest([held(), 2]) and in_part(one)
    assert in_part(joint(["a", one])) and joint([one]) == joint([again]) and not in_part(joint(["a"]))


class Large:
    """What many samples refer to."""

    writes = 0

    def __getstate__(self) -> Any:
        Large.writes += 1
        return {"words": 5}


def test_an_object_is_written_once_a_look() -> None:
    large, writes = Large(), Large.writes
    sample_digest([Row([large]) for _ in range(9)])
    assert Large.writes == writes + 1


def test_how_an_object_is_told_does_not_depend_on_where_it_was_met_before() -> None:
    one, other = Sample(None), Sample(1)
    one.x, other.made = {other}, {one}  # type: ignore[assignment]
    assert sample_digest([one, other]) == sample_digest([one, copy.deepcopy(other)])


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


def shuffled(wrapped: Callable[[int], Any]) -> StreamReader:
    return StreamReader(Stream.of(Shuffled(wrapped, skips=1), 40, 5), 8, 2)


def marked(wrapped: Callable[[int], Any]) -> StreamMark:
    reader = shuffled(wrapped)
    reader.read(0, 30)
    mark = reader.mark(0, 29)
    assert mark is not None and mark.state
    return mark


def test_a_place_of_release_0_1_0_is_gone_to_by_count(caplog: pytest.LogCaptureFixture) -> None:
    """It told objects by their types, so nothing shows that the state leads there."""
    mark, later = marked(Sample), shuffled(Sample)
    later.add(msgspec.structs.replace(mark, digest=types_alone(mark.digest)))
    assert later.read(0, 29).x == 29
    assert f"it is started over, and {mark.index} samples are skipped" in caplog.text
    other = shuffled(Slotted)
    other.add(msgspec.structs.replace(mark, digest=types_alone(mark.digest)))
    with pytest.raises(ConfigError, match="gives other samples than before"):
        other.read(0, 29)


@pytest.mark.parametrize("wrapped", [Sample, Slotted, lambda i: [torch.tensor([i]).to_sparse()]])
def test_a_state_that_leads_elsewhere_is_not_followed(
    wrapped: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    mark, later = marked(wrapped), shuffled(wrapped)
    later.add(mark)
    assert number(later.read(0, 29)) == 29
    assert ("parts that cannot be compared" in caplog.text) == in_part(mark.digest)
    assert f"it is started over, and {mark.index} samples are skipped" in caplog.text


def test_a_stream_of_objects_that_is_not_the_same_twice_is_refused() -> None:
    count = iter(range(1000))
    with pytest.raises(
        ConfigError, match=r"Shuffled gives other samples when it is started over, from number 0 on.*__getstate__"
    ):
        check_starts_over(Stream.of(Shuffled(lambda i: Sample(next(count))), None, 0))
    assert check_starts_over(Stream.of(Shuffled(lambda i: [torch.eye(2).to_sparse(), i]), None, 0)).digest
