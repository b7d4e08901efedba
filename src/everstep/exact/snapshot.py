"""A copy of the state in memory, made by a background thread while the next step computes its gradients.

Parameters and optimizer state do not change between two updates, so only the next update has to wait, and only until
the rest is copied. Copying and hashing large ranges happen without the interpreter lock.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everstep.base.errors import CheckpointCorrupt, check
from everstep.exact.digest import bytes_of
from everstep.exact.image import Image, Outline, StateEntry
from everstep.exact.state_memory import StateMemory

SnapshotMemory = Tensor
"""Flat uint8 host memory that the next snapshot uses again: touching fresh memory costs more than copying."""

_PIECE_BYTES = 4 << 20


class Snapshot:
    """An immutable copy: `start`, then `wait` before the state changes; it can be read until it is released."""

    def __init__(
        self,
        entries: Sequence[StateEntry],
        tensors: Sequence[Tensor],
        values: Mapping[str, Any],
        outline: Outline,
        now: Sequence[int],
        arena: SnapshotMemory | None,
        take_back: Callable[[SnapshotMemory], None],
        memory: StateMemory,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        """now: indices of the tensors that are copied at once, because they may change before `wait`. memory: where an
        arena is made if there is none, or one that is too small. spans: bytes that are copied, ascending; others read
        as anything, and take no memory."""
        size = max((e.stop for e in entries), default=0)
        fits = arena is not None and arena.numel() >= size
        self._arena: SnapshotMemory | None = arena if fits else memory.flat(size)
        self._memory, self._let_go, self._spans = memory, memory.let_go, tuple(spans)
        self._there = None if memory.others is None else memory.others.copies(self._arena)  # type: ignore[arg-type]
        self._entries, self._take_back = tuple(entries), take_back
        self._later = [(k, tensors[k]) for k in sorted(set(range(len(entries))) - set(now))]
        self._copied = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        with torch.no_grad():
            for k in now:
                self._copy(k, tensors[k])
        data = [bytes_of(self._place(e)) for e in self._entries]
        self._image = Image(self._entries, data, values, outline, memory, self._there)

    def start(self) -> None:
        check(self._thread is None, "a snapshot is started once")
        self._thread = threading.Thread(target=self._run, name="everstep-snapshot", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is copied and the state may change; returns whether that came within the limit.

        Raises: the error of the thread, if it had one.
        """
        check(self._thread is not None, "start() comes before wait()")
        copied = self._copied.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return copied

    @property
    def n_blocks(self) -> int:
        return self._image.n_blocks

    def manifest(self) -> dict[str, Any]:
        """The manifest, as `ModelState.manifest`; waits until copying and hashing have ended."""
        self.wait()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._image.manifest

    def read_block(self, index: int) -> memoryview:
        """The bytes of a block; waits until copying has ended. Raises: CheckpointCorrupt once it was released."""
        if self._arena is None:
            raise CheckpointCorrupt("the snapshot was released")
        self.wait()
        return self._image.read_block(index)

    def release(self) -> None:
        """Give the memory to the next snapshot; this one cannot be read any more."""
        if self._thread is not None:
            self._thread.join()
        arena, self._arena = self._arena, None
        if arena is not None:
            self._take_back(arena)
        if self._there is not None:
            self._there.drop()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                for k, tensor in self._later:
                    self._copy(k, tensor)
                    self._let_go()
            self._later = []
            self._copied.set()
            _ = self._image.manifest
        except BaseException as error:
            self._error = error
        finally:
            self._copied.set()
            self._done.set()

    def _copy(self, k: int, tensor: Tensor) -> None:
        entry = self._entries[k]
        target = self._place(entry).view(tensor.dtype)
        if self._there is not None and self._there.take(tensor, target):
            return
        tensor = self._memory.whole(tensor)
        if not tensor.is_contiguous():
            target.view(tensor.shape).copy_(tensor)
            return
        flat, step = tensor.reshape(-1), max(1, _PIECE_BYTES // tensor.element_size())
        for first, stop in self._wanted(entry, tensor.element_size()):
            pieces = target[first:stop].unsafe_split(step), flat[first:stop].unsafe_split(step)
            for to, source in zip(*pieces, strict=True):
                to.copy_(source)

    def _wanted(self, entry: StateEntry, itemsize: int) -> Iterator[tuple[int, int]]:
        """Elements of an entry that are copied."""
        for at in range(max(bisect_right(self._spans, (entry.offset, 1 << 62)) - 1, 0), len(self._spans)):
            lo, hi = self._spans[at]
            if lo >= entry.stop:
                return
            lo, hi = max(lo, entry.offset) - entry.offset, min(hi, entry.stop) - entry.offset
            if lo < hi:
                yield lo // itemsize, hi // itemsize

    def _place(self, entry: StateEntry) -> Tensor:
        arena: Tensor = self._arena  # type: ignore[assignment]
        return arena[entry.offset : entry.stop]


class StateInPlace:
    """The state itself, for others to read until it changes. Thread-safe: `wait` comes before that, and what is read
    afterwards is not there."""

    def __init__(self, image: Image, shared: bool = True) -> None:
        """shared: it is read in other threads than that which changes it, so each block is copied."""
        self._image: Image | None = image
        self._over = threading.Event()
        image.look_at(partial(_refuse_if, self._over))
        self._shared = shared
        self._lock = threading.Lock()
        self.n_blocks = image.n_blocks

    def wait(self, timeout_s: float | None = None) -> bool:
        """The state may change from now on. Waits for readers, each of which takes one block; hashing ends."""
        self._over.set()
        with self._lock:
            self._image = None
        return True

    def manifest(self) -> dict[str, Any]:
        """As of a snapshot. Raises: CheckpointCorrupt once the state may have changed."""
        with self._lock:
            return self._there().manifest

    def read_block(self, index: int) -> memoryview:
        """A block. Raises: CheckpointCorrupt once the state may have changed."""
        with self._lock:
            block = self._there().read_block(index)
            return memoryview(bytes(block)) if self._shared else block

    def release(self) -> None:
        self.wait()

    def _there(self) -> Image:
        _refuse_if(self._over)
        return self._image  # type: ignore[return-value]


def _refuse_if(changed: threading.Event) -> None:
    if changed.is_set():
        raise CheckpointCorrupt("the state has changed since it was offered")
