"""Buffers that a forward pass changes: every lane starts from the step's, and all lanes must agree on the outcome.

Apart from the gradient because these values are not summed. If all lanes end with the same bytes, these are the next
step's. Running statistics of BatchNorm-like modules take their mean instead (`GradientHandOver.commit_statistics`). Any
other buffer has no rule and is refused by name. The extra state of modules follows the same rule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import torch
from torch import Tensor, nn

from everstep.base.errors import BuffersDiffer, ConfigError, check
from everstep.exact.digest import bytes_of, tensor_digest
from everstep.exact.extra_state import SUFFIX, give, has_extra_state, packed
from everstep.exact.layout import running_statistics

SMALL_BYTES = 64 << 10
"""Buffers up to this size are compared byte by byte after each lane."""
SENT_BYTES = 1 << 20
"""Values up to this size travel in reports, for workers that compute no lane of the step."""
_WATCHED_STEPS = 2
_NO_STEP = -1


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A buffer that the lanes changed. index: among the model's guarded buffers; value: its bytes, if small."""

    index: int
    digest: str
    value: bytes | None


class BufferReport(msgspec.Struct, frozen=True, array_like=True):
    """Changes that this worker's lanes of a step made to guarded buffers. lanes: number of lanes with samples."""

    lanes: int
    changes: tuple[Change, ...]

    def encode(self) -> bytes:
        """Bytes for the agree record: a few per changed buffer, and its value."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> BufferReport:
        """Inverse of `encode`. Raises: msgspec.DecodeError if it is no report."""
        return _report.decode(data)


_report = msgspec.msgpack.Decoder(BufferReport)


class _Guarded:
    """One buffer, known by its place: the module may put another tensor there. `statistic`: another rule commits it."""

    def __init__(self, name: str, module: nn.Module, attribute: str, statistic: bool) -> None:
        self.name, self.module, self.attribute, self.statistic = name, module, attribute, statistic
        self.tensor: Tensor | None = None
        self.saved: Tensor | None = None
        self.flat: Tensor | None = None  # a view of `saved`, if there can be one: it is hashed in every step
        self.start = b""
        self.version = 0
        self.small = False

    def __str__(self) -> str:
        return f"buffer {self.name}"

    def current(self) -> Tensor | None:
        return self.module._buffers.get(self.attribute)

    def put(self, value: Tensor | None) -> None:
        self.module._buffers[self.attribute] = value

    def take_over(self, left: Tensor | None) -> None:
        """Take the value that a lane has left."""
        if left is not None and self.tensor is not None and _alike(left, self.tensor):
            self.tensor.copy_(left)
        else:
            self.put(left)

    def sendable(self, value: Tensor) -> bool:
        """Whether a lane's value can be sent to others as bytes alone."""
        return self.saved is not None and _alike(value, self.saved) and _size(value) <= SENT_BYTES

    def remember(self) -> tuple[Tensor, Tensor] | None:
        """Take the present value as the step's; returns (copy, value) if the copy must still be filled."""
        value = self.tensor = self.current()
        if value is None:
            self.saved = self.flat = None
            return None
        self.version = _version(value)
        self.small = _size(value) <= SMALL_BYTES
        if self.small and not self.statistic:
            self.start = _raw(value)
        if self.saved is not None and _alike(self.saved, value):
            return self.saved, value
        self.saved = value.detach().clone()
        self.flat = self.saved.view(-1) if self.saved.is_contiguous() else None
        return None

    def changed(self, thorough: bool) -> bool:
        """Whether the value is not the step's. thorough: also compare large buffers that seem untouched."""
        value = self.current()
        if value is self.tensor and value is not None and not self.small and not thorough:
            return _version(value) != self.version and not self._same(value)
        return not self._same(value)

    @property
    def moved(self) -> bool:
        """Whether another tensor than the step's is in place."""
        return self.current() is not self.tensor

    def renew(self) -> tuple[Tensor, Tensor] | None:
        """Put a new tensor in place; returns (tensor, copy) if the step's value must still be filled in."""
        if self.tensor is None or self.saved is None:
            self.put(self.tensor)
            return None
        fresh = torch.empty_strided(
            self.saved.shape, self.saved.stride(), dtype=self.saved.dtype, device=self.saved.device
        )
        self.put(fresh)
        return fresh, self.saved

    def restore(self) -> tuple[Tensor, Tensor] | None:
        """Put the step's tensor back; returns (tensor, copy) if the step's value must still be filled in."""
        self.put(self.tensor)
        if self.tensor is None or self.saved is None:
            return None
        if not _alike(self.tensor, self.saved):
            self.tensor.data = self.saved.clone()
            return None
        return self.tensor, self.saved

    def set(self, value: bytes) -> None:
        """Take bytes that another worker's lanes left. Only for an unchanged dtype and shape."""
        check(self.tensor is not None, f"{self} does not exist here")
        tensor: Tensor = self.tensor  # type: ignore[assignment]
        check(len(value) == tensor.numel() * tensor.element_size(), f"{self} has another size elsewhere")
        tensor.copy_(torch.frombuffer(bytearray(value), dtype=tensor.dtype).reshape(tensor.shape))

    def _same(self, value: Tensor | None) -> bool:
        if value is None or self.saved is None:
            return value is None and self.saved is None
        if not _alike(value, self.saved):
            return False
        if self.small:
            return _raw(value) == self.start
        mine, other = value.detach().contiguous(), self.saved.contiguous()
        return torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


class _GuardedExtra(_Guarded):
    """A module's extra state, in its carried form as bytes; encoded again at each look."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module, SUFFIX, statistic=False)

    def __str__(self) -> str:
        return f"the extra state {self.name}"

    def current(self) -> Tensor | None:
        return packed(self.name, self.module)

    def put(self, value: Tensor | None) -> None:
        give(self.module, value)  # type: ignore[arg-type]  # there always is one

    def take_over(self, left: Tensor | None) -> None:
        self.put(left)

    def sendable(self, value: Tensor) -> bool:
        return _size(value) <= SENT_BYTES

    def remember(self) -> None:
        self.tensor = self.saved = value = packed(self.name, self.module)
        self.small = value.numel() <= SMALL_BYTES
        self.start = _raw(value) if self.small else b""

    def changed(self, thorough: bool) -> bool:
        return not self._same(self.current())

    @property
    def moved(self) -> bool:
        return False

    def renew(self) -> None:
        self.put(self.saved)

    def restore(self) -> None:
        self.put(self.saved)

    def set(self, value: bytes) -> None:
        self.put(torch.frombuffer(bytearray(value), dtype=torch.uint8))


class BufferGuard:
    """Isolates lanes from each other's buffer updates and commits what they agree on. One thread.

    begin_step, then for each lane begin_lane, forward and backward, the accumulator's add, end_lane; after the agree
    `commit` with all workers' reports, then the running statistics. If the content of a buffer above 64 KiB changes
    behind the version counter (through `.data`), this is noticed in the first two steps only.
    """

    def __init__(self, model: nn.Module, modules: Container[int] | None = None, *, shared: bool = False) -> None:
        """modules: ids of the modules whose buffers are guarded here; by default all. shared: other workers may have to
        take over the values that lanes leave here, because they compute no lane of the step (standbys and healing
        workers)."""
        self._shared = shared
        statistics = {name for name, _ in running_statistics(model, model)}
        self._all: list[_Guarded] = []
        for prefix, module in model.named_modules():
            if modules is not None and id(module) not in modules:
                continue
            for attribute in module._buffers:
                name = f"{prefix}.{attribute}" if prefix else attribute
                self._all.append(_Guarded(name, module, attribute, name in statistics))
            if has_extra_state(module):
                self._all.append(_GuardedExtra(f"{prefix}.{SUFFIX}" if prefix else SUFFIX, module))
        self._others = [g for g in self._all if not g.statistic]
        self._statistics = [g for g in self._all if g.statistic]
        self._step: int | None = None
        self._steps_seen = 0
        self._lanes = 0
        self._dirty: set[int] = set()
        self._outcome: dict[int, str] = {}
        self._values: dict[int, bytes | None] = {}
        self._left: dict[int, Tensor | None] = {}
        self._volatile: set[int] = set()
        self._in_flight: dict[int, list[tuple[_Guarded, Tensor | None]]] = {}
        self._elsewhere: dict[int, BufferReport] = {}

    def begin_step(self, step: int) -> None:
        """Remember the present buffers as the step's; does nothing if this step has begun already."""
        if step == self._step:
            return
        if self._step == _NO_STEP:
            self.settle()
        self._step = step
        self._steps_seen += step != _NO_STEP
        self.forget_lanes()
        self._dirty, self._in_flight, self._elsewhere = set(), {}, {}
        with torch.no_grad():
            _copy([guarded.remember() for guarded in self._all])

    def begin_lane(self) -> None:
        """Put the step's buffers back after a lane, finished or interrupted."""
        if self._all:
            with torch.no_grad():
                self._restore()

    def settle(self) -> None:
        """Between lanes: restore the buffers of the state. Once the step is committed they are in place."""
        if self._step is not None:
            self.begin_lane()

    def begin_lane_apart(self) -> None:
        """`begin_lane` for a lane that stays in flight while others begin. Buffers that lanes change become tensors of
        this lane's own, so that neither values nor version counters in its graph change under it."""
        with torch.no_grad():
            for index, guarded in enumerate(self._others):
                if index not in self._volatile and (index in self._dirty or guarded.changed(self._thorough)):
                    self._volatile.add(index)
            _copy([guarded.renew() for guarded in self._own()])
            self._dirty.clear()

    def leave_lane(self, lane: int) -> None:
        """Remember the lane's own buffers, for its backward pass."""
        self._in_flight[lane] = [(guarded, guarded.current()) for guarded in self._own()]

    def drop_lane(self, lane: int) -> None:
        """Forget a lane that is left, or will be computed again."""
        self._in_flight.pop(lane, None)

    def forget_lanes(self) -> None:
        """Forget all values that lanes of this step have left (a lane was computed on trial)."""
        self._lanes, self._outcome, self._values, self._left = 0, {}, {}, {}

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Ignore the values that lanes leave inside; values left before still count."""
        kept = self._lanes, self._outcome, self._values, self._left
        self.forget_lanes()
        try:
            yield
        finally:
            self._lanes, self._outcome, self._values, self._left = kept

    @property
    def untouched(self) -> bool:
        """Whether no lane of this step has left a value yet."""
        return not self._lanes

    def resume_lane(self, lane: int) -> None:
        """Put the lane's own buffers in place again: its backward pass comes next."""
        for guarded, tensor in self._in_flight.pop(lane):
            guarded.put(tensor)

    def end_lane(self) -> dict[str, str]:
        """Find the lane's changes: name -> digest (running statistics are left out).

        Raises: ConfigError naming a buffer that lanes leave different, or one that is too large to send to others.
        """
        outcome: dict[int, str] = {}
        with torch.no_grad():
            for index, guarded in enumerate(self._others):
                if guarded.changed(self._thorough):
                    self._take(index, guarded, outcome)
        self._dirty |= set(outcome)
        self._volatile |= set(outcome)
        if self._lanes and outcome != self._outcome:
            self._refuse(set(outcome.items()) ^ set(self._outcome.items()))
        self._lanes += 1
        self._outcome = outcome
        return {self._others[index].name: digest for index, digest in outcome.items()}

    def extras(self) -> list[tuple[str, Tensor]]:
        """Present extra state of modules, by name."""
        return [(g.name, packed(g.name, g.module)) for g in self._others if isinstance(g, _GuardedExtra)]

    def start(self) -> Iterator[Tensor]:
        """Running statistics that the step starts from. They must be compared now: after the step all members hold the
        mean over the lanes, and a member that had started from other values looks like the rest."""
        for guarded in self._statistics:
            value = guarded.current() if self._step is None else guarded.saved
            if value is not None:
                flat = guarded.flat if value is guarded.saved else None
                yield value.detach().reshape(-1) if flat is None else flat

    def note_elsewhere(self, rank: int, report: BufferReport) -> None:
        """Note what the step's lanes at another process of this worker have done, in the place of what was noted."""
        self._elsewhere[rank] = report

    def report(self) -> BufferReport:
        """Report for the agree record, for all processes of this worker.

        Raises: ConfigError naming a buffer that their lanes leave different.
        """
        changes = tuple(Change(i, digest, self._values[i]) for i, digest in sorted(self._outcome.items()))
        worked = [r for r in (*self._elsewhere.values(), BufferReport(self._lanes, changes)) if r.lanes]
        self._refuse_unlike(worked)
        return BufferReport(sum(r.lanes for r in worked), worked[-1].changes if worked else ())

    def commit(self, reports: Iterable[BufferReport]) -> None:
        """Set all buffers to the step's outcome; running statistics to the values that the step started from.

        reports: of all workers, this one's included.

        Raises: ConfigError naming a buffer that lanes of different workers leave different, or that is too large for
        reports and was changed while this worker had no lane.
        """
        if self._step is None:
            self.begin_step(_NO_STEP)
        reports = [r for r in reports if r.lanes > 0]
        outcome = {change.index: change for change in reports[-1].changes} if reports else {}
        self._refuse_unlike(reports)
        with torch.no_grad():
            self._restore()
            for index, change in outcome.items():
                self._apply(self._others[index], index, change)
        self._end()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Undo all changes of buffers and extra state that are made inside (in an evaluation, which workers share)."""
        if self._step is None:
            self.begin_step(_NO_STEP)
        self.settle()
        try:
            yield
        finally:
            self.settle()  # the next step may have begun meanwhile, or the state been replaced
            if self._step == _NO_STEP:
                self._step = None

    def abandon(self) -> None:
        """Put the step's buffers back and forget the step (for example before its state is replaced)."""
        if self._step is not None:
            with torch.no_grad():
                self._restore()
            self._end()

    def _end(self) -> None:
        """The step is over: a worker without lanes, which begins none, must not report those of its last one."""
        self._step, self._elsewhere = None, {}
        self.forget_lanes()

    def _take(self, index: int, guarded: _Guarded, outcome: dict[int, str]) -> None:
        value = guarded.current()
        if value is None:
            outcome[index], self._values[index], self._left[index] = "none", None, None
            return
        data = _raw(value) if guarded.sendable(value) else None
        if self._shared and data is None and guarded.saved is not None and _alike(value, guarded.saved):
            raise _too_large(guarded, value)
        if data is not None and self._values.get(index) == data:
            outcome[index] = self._outcome[index]
            return
        outcome[index] = tensor_digest(value)
        if self._outcome.get(index) != outcome[index]:
            self._values[index] = data
            self._left[index] = value.detach().clone()

    def _apply(self, guarded: _Guarded, index: int, change: Change) -> None:
        if self._outcome.get(index) == change.digest:
            guarded.take_over(self._left[index])
        elif change.value is not None:
            guarded.set(change.value)
        elif guarded.tensor is not None and _size(guarded.tensor) > SENT_BYTES:
            raise _too_large(guarded, guarded.tensor)
        else:
            raise ConfigError(
                f"{guarded} got another dtype, shape or size in every micro-batch of a step, and this worker computed "
                "none of them: create it before the first step"
            )

    @property
    def _thorough(self) -> bool:
        return self._steps_seen <= _WATCHED_STEPS

    def _own(self) -> list[_Guarded]:
        return [*self._statistics, *(self._others[i] for i in sorted(self._volatile))]

    def _restore(self) -> None:
        stale = [g for i, g in enumerate(self._others) if i in self._dirty or g.moved or g.changed(self._thorough)]
        _copy([guarded.restore() for guarded in (*self._statistics, *stale)])
        for guarded in stale:
            if guarded.tensor is not None:
                guarded.version = _version(guarded.tensor)
        self._dirty.clear()

    def _refuse_unlike(self, reports: Sequence[BufferReport]) -> None:
        digests = [{(change.index, change.digest) for change in r.changes} for r in reports]
        for one, other in pairwise(digests):
            if one != other:
                self._refuse(one ^ other)

    def _refuse(self, differing: Iterable[tuple[int, str]]) -> None:
        first = min((self._others[index] for index, _ in differing), key=lambda guarded: guarded.name)
        raise BuffersDiffer(
            f"{first} ends differently in different micro-batches, and there is no rule for it; keep it constant "
            "during a step, let it depend only on values that all have alike (such as a count), or make it a running "
            "statistic of a BatchNorm-like module",
            first.name,
        )


def _too_large(guarded: _Guarded, value: Tensor) -> ConfigError:
    return ConfigError(
        f"{guarded} changes in every micro-batch and has {_size(value)} bytes, but at most {SENT_BYTES} can be sent to "
        f"workers that compute none (a standby, one that heals): make it smaller, keep it out of the forward pass, or "
        "train with one worker"
    )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _raw(tensor: Tensor) -> bytes:
    """Bytes of a small tensor, fast in the ordinary case."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return bytes(bytes_of(tensor))


def _copy(pairs: Iterable[tuple[Tensor, Tensor] | None]) -> None:
    """Copy the second of each pair into the first."""
    wanted = [pair for pair in pairs if pair is not None]
    if wanted:
        torch._foreach_copy_([to for to, _ in wanted], [source for _, source in wanted])
