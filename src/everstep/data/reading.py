"""How a dataset is read: by index, or from the front. The one place that decides it, for all kinds of datasets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from everstep.base.errors import ConfigError
from everstep.data.stream import NO_MORE, Stream, StreamReader, count
from everstep.exact.seeding import preserve_rng


@dataclass(frozen=True)
class Reading:
    """How a dataset is read. streamed: from its front, in its own order; otherwise by index, in the job's order. size:
    number of samples, None of a stream that does not say it."""

    dataset: Any
    streamed: bool
    size: int | None


def reading_of(dataset: Any) -> Reading:
    """How this dataset is read; nothing of it is read for that.

    Raises: ConfigError if it can be read in neither way.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"the dataset is a {kind}, whose batches are not samples: give its dataset")
    size = _length(dataset)
    by_index = callable(getattr(dataset, "__getitem__", None)) and not isinstance(dataset, IterableDataset)
    if by_index and size is not None:
        return Reading(dataset, False, size)
    if not isinstance(dataset, type) and callable(getattr(dataset, "__iter__", None)):
        Stream.of(dataset, size, 0)
        return Reading(dataset, True, size)
    raise ConfigError(
        f"the dataset is a {kind}: expected a map-style one, with __len__ and __getitem__, or a stream, with __iter__"
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # it has none, or says by this that it does not know
        return None


class ByIndex:
    """A stream as if it were map-style, for a caller that reads it in order: samples of its first pass by number."""

    def __init__(self, reading: Reading, seed: int, batch: int) -> None:
        """batch: samples that are asked for at once."""
        stream = Stream.of(reading.dataset, reading.size, seed)
        self._size = count(stream) if reading.size is None else reading.size
        self._reader = StreamReader(Stream.of(reading.dataset, self._size, seed), batch, 1)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        with preserve_rng():
            return self._reader.read(0, index)


def by_index(dataset: Any, batch: int, seed: int = 0) -> Any:
    """The dataset if it is map-style, otherwise a view of its stream. A stream without a length is counted, by reading
    it once. Raises: ConfigError, as `reading_of`."""
    reading = reading_of(dataset)
    return ByIndex(reading, seed, batch) if reading.streamed else dataset


def first_samples(dataset: Any, most: int) -> list[Any]:
    """Samples 0, 1, ... of a dataset of either kind."""
    reading = reading_of(dataset)
    if reading.size is not None and not reading.streamed:
        return [dataset[index] for index in range(min(most, reading.size))]
    return list(islice(iter(Stream.of(dataset, reading.size, 0).open(0).next, NO_MORE), most))
