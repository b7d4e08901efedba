"""Streams: data that can only be read from the front, brought into the order that a job needs.

The samples of a pass are numbered as they come, and lanes take them by number, so each reader of a stream skips the
samples of other workers. A stream is started over and read up to a number; one with `state_dict` and `load_state_dict`
goes on from a `StreamMark`. A mark has the digest of the samples that followed it: where other samples come later, the
stream is read from its front, and refused if they come there, too.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from everstep.base.errors import ConfigError, InvariantViolation, TaskError
from everstep.data.sample_content import alike, in_part, joint, sample_digest
from everstep.exact.seeding import preserve_rng, sample_seed, seed_all

log = logging.getLogger(__name__)

PROVEN = 16
"""Samples after a mark whose digest is part of it."""
MOST_STATE_BYTES = 1 << 20
_MARKS = 4
NO_MORE = object()
"""The value after the last sample of a pass."""
_ELSEWHERE = "is not seen to go on where its state_dict says"
_UNSEEN = "has samples with parts that cannot be compared, so nothing shows whether its state_dict says all"
_ONLY_READER = {"RANK": "0", "WORLD_SIZE": "1"}
_OF_CONTAINERS: tuple[type[Iterator[Any]], ...] = (
    type(iter([])),
    type(iter(())),
    type(iter({}.values())),
    type(iter({}.items())),
)


class StreamMark(msgspec.Struct, frozen=True):
    """A place in a stream. epoch, index: of the next sample. state: of the stream there, as JSON; "" if it has none.
    count, digest: of the samples that followed."""

    epoch: int
    index: int
    state: str
    count: int
    digest: str


@dataclass(frozen=True)
class Stream:
    """A stream and how its samples are told apart. size: samples of a pass, None if nobody knows; then there is but one
    pass. seed: the job's, by which each sample is drawn. front: state of an iterator before its first sample."""

    given: Any
    size: int | None
    seed: int
    front: str = ""

    @staticmethod
    def of(given: Any, size: int | None, seed: int) -> Stream:
        """The stream, of which nothing has been read. Raises: ConfigError for one that can be read only once."""
        if not hasattr(given, "__next__"):
            return Stream(given, size, seed)
        if has_position(given):
            return Stream(given, size, seed, _encoded(given.state_dict(), type(given).__name__))
        shares = type(given).__module__ in ("builtins", "itertools")  # a shallow copy goes on in the same iterator
        try:
            if isinstance(given, _OF_CONTAINERS):  # its shallow copy does not; copying all that it holds takes long
                copy.deepcopy(next(copy.copy(given), None))
            else:
                copy.deepcopy(given) if shares else copy.copy(given)
        except Exception:
            raise ConfigError(_not_twice(given)) from None
        return Stream(given, size, seed)

    @property
    def name(self) -> str:
        return type(self.given).__name__

    def open(self, epoch: int, state: str = "") -> StreamPass:
        """Begin a pass, at its front or at a state. Raises: ConfigError if that cannot be done."""
        try:
            with _only_reader():
                return self._open(epoch, state or self.front)
        except ConfigError:
            raise
        except Exception as error:
            how = "go on from its state_dict" if state else "be started over"
            raise ConfigError(
                f"the stream {self.name} cannot {how} ({type(error).__name__}: {error}): mend it, or use a map-style "
                "dataset"
            ) from error

    def _open(self, epoch: int, state: str) -> StreamPass:
        source = self.given if self.front else _own(self.given)
        if callable(begin := getattr(source, "set_epoch", None)):
            begin(epoch)
        if state and has_position(source):
            source.load_state_dict(json.loads(state))
        iterator = iter(source)
        holder = next((each for each in (source, iterator) if has_position(each)), None)
        if state and holder is not source:
            iterator.load_state_dict(json.loads(state))
        return StreamPass(iterator, holder, self.name)


@dataclass
class StreamPass:
    """A pass that is being read. holder: has its position, None if nobody has."""

    iterator: Iterator[Any]
    holder: Any
    name: str

    def next(self) -> Any:
        """The next sample; `NO_MORE` at the end. Raises: what the stream raises."""
        with _only_reader():
            return next(self.iterator, NO_MORE)

    def state(self) -> str:
        """The position as JSON; "" if there is none. Raises: ConfigError if it is no plain data, or too large."""
        return "" if self.holder is None else _encoded(self.holder.state_dict(), self.name)


def _encoded(state: Any, name: str) -> str:
    remedy = "let state_dict give numbers, text, lists and dicts of them: names and offsets of files, not their samples"
    try:
        text = json.dumps(state)
        same = json.loads(text) == state
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the position of the stream {name} is not plain data ({error}): {remedy}") from None
    if not same:
        raise ConfigError(f"the position of the stream {name} is not the same after a way through JSON: {remedy}")
    if len(text) > MOST_STATE_BYTES:
        raise ConfigError(
            f"the position of the stream {name} has {len(text)} bytes, expected at most {MOST_STATE_BYTES}: {remedy}"
        )
    return text


def has_position(thing: Any) -> bool:
    """Whether its position can be asked for, and set."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _not_twice(source: Any) -> str:
    return (
        f"the dataset is a {type(source).__name__}, which can be read only once, so no worker could be resumed or "
        "healed: give an object whose __iter__ begins again (torch.utils.data.IterableDataset), add state_dict and "
        "load_state_dict, or use a map-style dataset"
    )


@contextlib.contextmanager
def _only_reader() -> Iterator[None]:
    """While inside, a stream that deals itself out by rank gives all of its samples: lanes are dealt out instead."""
    there = {name: os.environ[name] for name in _ONLY_READER if name in os.environ}
    os.environ.update({name: _ONLY_READER[name] for name in there})
    try:
        yield
    finally:
        os.environ.update(there)


def _own(source: Any) -> Any:
    """A copy of the stream as it was given: what reading changes in it must not show in the next pass."""
    for copied in (copy.deepcopy, copy.copy):
        with contextlib.suppress(Exception):  # it holds a file, a lock or the like
            return copied(source)
    return source


# ---- reading by number


@dataclass
class _Proof:
    """A mark in the making: the samples that follow it are still to come."""

    epoch: int
    index: int
    state: str
    wanted: int
    digests: list[str] = field(default_factory=list)

    def mark(self) -> StreamMark:
        return StreamMark(self.epoch, self.index, self.state, len(self.digests), joint(self.digests))


class StreamReader:
    """Samples of a stream by (epoch, index). Fast where requests ascend; the last ones are kept.

    group: samples of a global batch; a mark is made at the beginning of each. groups_kept: global batches whose samples
    can be asked for again without reading the stream again.
    """

    def __init__(self, stream: Stream, group: int, groups_kept: int) -> None:
        self.stream = stream
        self._group = group
        self._kept: deque[tuple[int, Any]] = deque(maxlen=group * groups_kept)
        self._marks: deque[StreamMark] = deque(maxlen=groups_kept + _MARKS)
        self._proof: _Proof | None = None
        self._opened: StreamPass | None = None
        self._inherited: StreamPass | None = None
        self._owner = os.getpid()
        self._epoch = self._next = 0

    def __getstate__(self) -> None:
        raise TypeError("a reader of a stream stays in its process")

    def add(self, mark: StreamMark) -> None:
        """Know of a place that another reader has been at."""
        if mark not in self._marks:
            self._marks.append(mark)

    def read(self, epoch: int, index: int) -> Any:
        """One sample. Generators are seeded for each sample that is read.

        Raises: ConfigError if the stream ends early or late, or gives other samples than before. TaskError if it
        raises.
        """
        if self._owner != os.getpid():  # a process that was forked leaves its parent's pass alone, and unclosed
            self._owner, self._inherited, self._opened = os.getpid(), self._opened, None
        at = self._row(epoch, index)
        if at < self._row(self._epoch, self._next) and not self._has(at):
            self._opened = None
        if self._opened is None or epoch > self._epoch + 1:
            self._enter(epoch, index)
        while self._epoch < epoch:
            self._turn()
        while not self._has(at):
            self._pull()
        return self._kept[at - self._kept[0][0]][1]

    def _has(self, at: int) -> bool:
        return bool(self._kept) and self._kept[0][0] <= at <= self._kept[-1][0]

    def mark(self, epoch: int, index: int) -> StreamMark | None:
        """The newest known place not beyond this one."""
        at = self._row(epoch, index)
        found = [mark for mark in self._marks if self._row(mark.epoch, mark.index) <= at]
        return max(found, key=lambda mark: self._row(mark.epoch, mark.index), default=None)

    def _row(self, epoch: int, index: int) -> int:
        return epoch * (self.stream.size or 0) + index

    def _enter(self, epoch: int, index: int) -> None:
        """Stand somewhere before this sample, in its pass, as near as a mark allows."""
        mark = self.mark(epoch, index)
        if mark is not None and mark.epoch == epoch:
            unseen = in_part(mark.digest)
            if mark.state and not unseen and self._agrees(mark, mark.state):
                return
            if mark.state:
                log.warning(
                    "the stream %s %s: it is started over, and %d samples are skipped",
                    *(self.stream.name, _UNSEEN if unseen else _ELSEWHERE, mark.index),
                )
            if not self._agrees(mark, ""):
                raise ConfigError(
                    f"the stream {self.stream.name} gives other samples than before from number {mark.index} of pass "
                    f"{mark.epoch + 1} on: let its order depend on a fixed seed (and on set_epoch), and do not change "
                    "its data during a job"
                )
            return
        self._begin(epoch, 0, "")

    def _begin(self, epoch: int, index: int, state: str) -> None:
        self._kept.clear()
        self._proof = None
        self._opened, self._epoch, self._next = self.stream.open(epoch, state), epoch, index

    def _agrees(self, mark: StreamMark, state: str) -> bool:
        """Go to the mark, by its state or by count, and see whether the samples that follow are those of before."""
        self._begin(mark.epoch, mark.index if state else 0, state)
        try:
            while self._next < mark.index:
                self._pull()
            found = joint([sample_digest(self._pull()) for _ in range(mark.count)])
            return found == mark.digest if state else alike(mark.digest, found)
        except _Ended:
            return False

    def _turn(self) -> None:
        """From the end of a pass to the front of the next; the pass has to end where it should."""
        size = self.stream.size
        while size is not None and self._next < size:
            self._pull()
        self._end()
        kept = self._kept.copy()
        self._begin(self._epoch + 1, 0, "")
        self._kept = kept

    def _end(self) -> None:
        """Raises: ConfigError if the pass goes on beyond its size."""
        if self._opened is None:
            return
        if self._opened.next() is not NO_MORE:
            raise ConfigError(
                f"the stream {self.stream.name} goes on after {self._next} samples, which is its length: correct "
                "its __len__, or remove it"
            )

    def _pull(self) -> Any:
        """The next sample of the pass."""
        opened, at = self._opened, self._row(self._epoch, self._next)
        if opened is None:
            raise InvariantViolation("a pass is read before it was begun")
        if at % self._group == 0:
            self._proof = _Proof(
                self._epoch, self._next, opened.state() if self._next else "", min(PROVEN, self._group)
            )
        seed_all(sample_seed(self.stream.seed, self._epoch, self._next))
        try:
            sample = opened.next()
        except Exception as error:
            raise _failed(self, error) from error
        if sample is NO_MORE:
            raise _Ended(self._early())
        self._next += 1
        self._kept.append((at, sample))
        if self._proof is not None:
            self._proof.digests.append(sample_digest(sample))
            if len(self._proof.digests) >= self._proof.wanted:
                self._marks.append(self._proof.mark())
                self._proof = None
        return sample

    def _early(self) -> str:
        name, size, n = self.stream.name, self.stream.size, self._next
        if size is None:
            return (
                f"the stream {name} ended after {n} samples, and more steps were to come: give it a __len__, or say "
                "epochs=..., and the next pass begins there; or set fewer steps"
            )
        return (
            f"the stream {name} ended after {n} of its {size} samples in pass {self._epoch + 1}: correct its __len__, "
            "or let each pass give the same samples"
        )

    def where(self) -> str:
        """The next sample, in words."""
        return f"sample {self._next} of pass {self._epoch + 1}"


class _Ended(ConfigError):
    """The pass has no more samples."""


def _failed(reader: StreamReader, error: Exception) -> TaskError:
    said = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
    return TaskError(f"{reader.where()} of the stream {reader.stream.name} cannot be read: {said}")


# ---- before the first step


@dataclass(frozen=True)
class Front:
    """What was found at a stream's front. digest: of the first samples. resumes: the stream has a position."""

    digest: str
    resumes: bool


def check_starts_over(stream: Stream) -> Front:
    """Read the first samples twice.

    Raises: ConfigError if the stream is empty, cannot be started over, or gives other samples then.
    """
    with preserve_rng():
        first, again = _first(stream), _first(stream)
    if not first:
        raise ConfigError(f"the stream {stream.name} gives no samples: expected at least one global batch")
    if first == again:
        return Front(joint(first), stream.open(0).holder is not None)
    if hasattr(stream.given, "__next__"):
        raise ConfigError(_not_twice(stream.given))
    number = next((i for i, pair in enumerate(zip(first, again, strict=False)) if pair[0] != pair[1]), len(again))
    raise ConfigError(
        f"the stream {stream.name} gives other samples when it is started over, from number {number} on, so a worker "
        "that is resumed or healed would train on others: seed what it draws in __iter__, open there what it reads, "
        "and leave out what may differ: by __getstate__, in a dataclass by field(compare=False)"
    )


def _first(stream: Stream) -> list[str]:
    reader, found = StreamReader(stream, 1, 1), list[str]()
    try:
        while len(found) < PROVEN:
            found.append(sample_digest(reader.read(0, len(found))))
    except _Ended:
        pass
    return found


def count(stream: Stream, tick: Callable[[], None] = lambda: None) -> int:
    """Number of samples of the first pass, by reading it."""
    opened, n = stream.open(0), 0
    with preserve_rng():
        while True:
            seed_all(sample_seed(stream.seed, 0, n))
            if opened.next() is NO_MORE:
                return n
            n += 1
            tick()
