"""The training data of a job in one worker: how they are read, in which order, and what a checkpoint says of them.

A checkpoint's part of it is beside the state, for it changes no bit: it saves reading a stream from its front, and
tells data that are not those of before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from everstep.base.below import write_atomically
from everstep.base.config import Config
from everstep.base.errors import ConfigError, TaskError
from everstep.base.given import read_json
from everstep.data.first_samples import FirstSamples
from everstep.data.loader_process import LoaderDied
from everstep.data.reading import reading_of
from everstep.data.sample_content import alike, in_part
from everstep.data.stream import Front, Stream, StreamMark, StreamReader, check_starts_over, count
from everstep.runtime.link.address import DATASET_FILE
from everstep.train.elastic import AnyOrder, sample_order
from everstep.train.worker_link import WorkerLink

log = logging.getLogger(__name__)

POSITION = "data"
"""The part of a checkpoint that `DataPosition.encoded` makes."""
_MOST_FILES = 1 << 16
_UNREAD = "some of them differ when they are read again, or could not be read within 10 s in a forked process"
_WRAPPED = 8
"""Datasets within each other that are asked for their files."""


class _Stated(msgspec.Struct):
    """What a checkpoint says. files: a digest of each file's name and size, in order. front: of the stream's first
    samples, "" if it is none. mark: a place in the stream at or before the checkpoint's step. samples: digest of some
    samples of a map-style dataset, "" if they could not be read. size: of such a dataset, 0 if it was not noted."""

    files: list[str]
    front: str
    mark: StreamMark | None
    samples: str = ""
    size: int = 0


_stated = msgspec.json.Decoder(_Stated)


@dataclass
class DataPosition:
    """Where a job is in its data, besides its step, and which data they are.

    files: names and sizes of the dataset's files, as it tells them. front: None of a map-style dataset. first: reads
    some samples of one, until `settle`; None if nothing is to be compared. seen: their digests, for other workers.
    """

    order: AnyOrder
    files: Sequence[tuple[str, int]] = ()
    front: Front | None = None
    reader: StreamReader | None = None
    first: FirstSamples | None = None
    seen: Mapping[int, str] = field(default_factory=dict)
    _samples: str = ""
    _unsteady: str = ""
    _size: int = 0
    _digests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.files) > _MOST_FILES:
            raise ConfigError(f"expected at most {_MOST_FILES} files of a dataset, got {len(self.files)}: join some")
        self._digests = [blake2b(f"{n}\0{size}".encode(), digest_size=4).hexdigest() for n, size in self.files]

    def encoded(self, step: int) -> bytes:
        """For the checkpoint of a step; empty if there is nothing to say."""
        self.settle()
        if not self.files and self.front is None and not self._size:
            return b""
        mark = self.reader.mark(*self._next(step)) if self.reader is not None else None
        front = self.front.digest if self.front else ""
        return msgspec.json.encode(_Stated(self._digests, front, mark, self._samples, self._size))

    def settle(self) -> str:
        """Wait for the samples that are compared. Call it before the first sample is read. Returns a line about one
        that is another when it is read again, "" if there is none."""
        if self.first is not None:
            first, self.first, self._size = self.first, None, self.order.dataset_size
            self._samples, self._unsteady, self.seen = first.close()
        return self._unsteady

    def accept(self, data: bytes, step: int) -> str:
        """Take in what a checkpoint of an earlier life says. Returns a line about samples that were others, "" if they
        were not. Raises: ConfigError if the files or the stream were others."""
        try:
            stated = _stated.decode(data)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the checkpoint of step {step} says of its data what cannot be read: {error}") from None
        undo = "put it back, or start over with --fresh"
        if stated.files and stated.files != self._digests:
            number = next(i for i, (a, b) in enumerate(zip_longest(stated.files, self._digests)) if a != b)
            here = "{} ({} bytes)".format(*self.files[number]) if number < len(self.files) else "not there"
            raise ConfigError(
                f"the files of the dataset are not those that the checkpoint of step {step} was trained on: number "
                f"{number} of {len(stated.files)} is {here} now, of {len(self.files)}: {undo}"
            )
        if stated.size and self._size and stated.size != self._size:
            return f"the dataset has {self._size} samples, and had {stated.size} before the checkpoint of step {step}"
        if self._size and not (stated.samples and self._samples):
            log.warning(
                "whether the samples are those of before the checkpoint of step %d is not known: %s", step, _UNREAD
            )
            self._samples = self._samples or stated.samples  # a later life may read them
        if stated.samples and self._samples and not alike(stated.samples, self._samples):
            return f"the dataset holds other samples than before the checkpoint of step {step}"
        if self.front is None or self.reader is None:
            return ""
        if stated.front and not alike(stated.front, self.front.digest):
            raise ConfigError(
                f"the stream {self.reader.stream.name} begins with other samples than before the checkpoint of step "
                f"{step} (__getstate__ may leave out of an object what differs in each life): {undo}"
            )
        if stated.mark is not None:
            self.reader.add(stated.mark)
        return ""

    def cost(self, step: int) -> str:
        """What it costs to go on after this step, in words; "" if next to nothing."""
        if self.reader is None or self.front is None or not step:
            return ""
        epoch, index = self._next(step)
        mark, name = self.reader.mark(epoch, index), self.reader.stream.name
        there = mark is not None and mark.epoch == epoch and not in_part(mark.digest)
        first = mark.index if there and mark is not None and self.front.resumes else 0
        if index - first <= 2 * self.order.global_batch:  # a mark is up to two steps old
            return ""
        remedy = "" if self.front.resumes else ": with state_dict and load_state_dict it would be resumed instead"
        what = f"{index - first} samples of the stream {name} are read again, and skipped"
        return f"{what}, to go on at step {step}{remedy}"

    def _next(self, step: int) -> tuple[int, int]:
        """Epoch and index of the first sample after a step."""
        row = step * self.order.global_batch
        return divmod(row, self.order.dataset_size)


@dataclass(frozen=True)
class JobData:
    """dataset: map-style, or the reader of a stream."""

    dataset: Any
    order: AnyOrder
    position: DataPosition


def job_data(link: WorkerLink, dataset: Any) -> JobData:
    """The data that a job is trained on. Of a stream, the first samples are read twice.

    Raises: ConfigError if they cannot be read as a job needs it.
    """
    config, reading = link.config, reading_of(dataset)
    files = dataset_files(dataset)
    if not reading.streamed:
        order = sample_order(config, dataset)
        saves = link.regular_saves and link.run_dir is not None
        first = None
        if saves:
            with contextlib.suppress(TaskError, LoaderDied):
                first = FirstSamples(dataset, order.dataset_size, config.seed)
        noted = order.dataset_size if saves else 0
        return JobData(dataset, order, DataPosition(order, files, first=first, _size=noted))
    stream = Stream.of(dataset, reading.size, config.seed)
    front = check_starts_over(stream)
    size = reading.size
    with alone_in(link.run_dir if link.regular_saves else None) as folder:
        if size is None and config.epochs is not None and link.regular_saves:
            size = _known_size(folder, config) or count(stream, link.row.tick)
        reader = reader_for(config, Stream(dataset, size, config.seed, stream.front))
        order = sample_order(config, reader)
        if folder is not None:
            _tell(folder, config, order.dataset_size)
    return JobData(reader, order, DataPosition(order, files, front, reader))


def reader_for(config: Config, stream: Stream) -> StreamReader:
    """A reader of this stream that keeps as many samples as loader processes are ahead of the step under way."""
    ahead = config.loader.prefetch if config.loader.workers else 0
    return StreamReader(stream, config.lanes * config.micro_batch, ahead + 2)


def read_by_order(config: Config, dataset: Any) -> tuple[Any, AnyOrder]:
    """Dataset and order to look at a job's first batches with, without a job. Raises: ConfigError."""
    reading = reading_of(dataset)
    data = reader_for(config, Stream.of(dataset, reading.size, config.seed)) if reading.streamed else dataset
    return data, sample_order(config, data)


def moving_by_itself(dataset: Any) -> tuple[Any, ...]:
    """The dataset if it is an iterator, which moves on when it is read: its place is carried."""
    return (dataset,) if hasattr(dataset, "__next__") else ()


def dataset_files(dataset: Any) -> Sequence[tuple[str, int]]:
    """What the dataset tells of its files; or what those tell that it keeps, as a Subset does."""
    told: Callable[[], Sequence[tuple[str, int]]] | None = getattr(dataset, "files_read", None)
    return told() if callable(told) else _files_within(dataset, _WRAPPED, {})[:_MOST_FILES]


def _files_within(dataset: Any, deep: int, known: dict[int, list[tuple[str, int]]]) -> list[tuple[str, int]]:
    """Files of what this dataset keeps. known: by id, of those that were looked at; they may lie in each other."""
    if id(dataset) in known or not deep:
        return known.get(id(dataset), [])
    found: list[tuple[str, int]] = []
    known[id(dataset)] = []
    for name in ("dataset", "_dataset", "datasets"):
        inner: Any = getattr(dataset, "__dict__", {}).get(name)
        for each in inner.values() if type(inner) is dict else inner if type(inner) in (list, tuple) else [inner]:
            if len(found) < _MOST_FILES:
                tells = callable(getattr(type(each), "files_read", None))
                found += each.files_read() if tells else _files_within(each, deep - 1, known)
    known[id(dataset)] = found
    return found


@contextlib.contextmanager
def alone_in(run_dir: Path | None) -> Iterator[Path | None]:
    """While inside, no other worker of this directory is: one counts a stream or downloads files, and the others find
    them."""
    if run_dir is None:
        yield None
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield run_dir
    finally:
        os.close(folder)


def _known_size(run_dir: Path | None, config: Config) -> int | None:
    """Samples in a pass as a worker of this job has counted them."""
    if run_dir is None:
        return None
    try:
        facts = read_json(run_dir / DATASET_FILE)
        size, usable = facts["size"], facts["streamed"] is True and facts["seed"] == config.seed
        return size if usable and type(size) is int and 0 < size < 1 << 61 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tell(run_dir: Path, config: Config, size: int) -> None:
    """Write down what the ledger is checked by."""
    said = {key: getattr(config, key) for key in ("lanes", "micro_batch", "steps", "epochs", "seed")}
    with contextlib.suppress(OSError):  # a full disk does not stop training; `everstep ledger` will say what it lacks
        write_atomically(run_dir / DATASET_FILE, json.dumps({**said, "size": size, "streamed": True}) + "\n")
