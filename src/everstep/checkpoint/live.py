"""The live state, block by block: what a writer copies while the next step computes its gradients.

Apart from `exact.image` because nothing is gathered beforehand: one block is copied at a time, from wherever the
tensors are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.base.errors import check
from everstep.exact.digest import bytes_of
from everstep.exact.image import BLOCK_BYTES, FOREIGN, Outline, StateEntry
from everstep.exact.layout import round_up
from everstep.exact.state import ModelState


class LiveState:
    """Entries, values and blocks of a stage's state at a step boundary.

    Buffers and values are taken when it is made; parameters and optimizer state must not change while blocks of them
    are copied. For one thread at a time, which may change.
    """

    def __init__(
        self,
        entries: Sequence[StateEntry],
        tensors: Sequence[Tensor],
        values: Mapping[str, Any],
        outline: Outline,
        now: Sequence[int],
    ) -> None:
        """now: indices of the tensors that may change before the next update."""
        self.entries, self.values, self.outline = entries, values, outline
        self._tensors: list[Tensor] = list(tensors)
        with torch.no_grad():
            for k in now:
                self._tensors[k] = tensors[k].detach().clone()
        self._offsets = [e.offset for e in self.entries]
        end = max((e.offset + e.nbytes for e in self.entries), default=0)
        self.n_blocks = round_up(end, BLOCK_BYTES) // BLOCK_BYTES
        self._at = -1
        self._bytes: Any = None
        self._cuda = next((t.device for t in self._tensors if t.is_cuda), None)
        self._stream: Any = None
        if self._cuda is not None:
            self._stream = torch.cuda.Stream(self._cuda)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self._cuda))

    @staticmethod
    def of(state: ModelState) -> LiveState:
        """Of a stage, now: at a step boundary."""
        entries, tensors, values, now = state.live_tensors()
        return LiveState(entries, tensors, values, state.outline, now)

    @property
    def n_own(self) -> int:
        """How many blocks are this stage's; those after them are copies of what another stage has."""
        entries = iter(self.entries)
        for label, count in self.outline.groups:
            group = [next(entries) for _ in range(count)]
            if label == FOREIGN and group:
                return group[0].offset // BLOCK_BYTES
        return self.n_blocks

    def pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """(number of the entry, from, to) of what a block holds; the last two are bytes in the block."""
        start, stop = index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES
        for k in range(max(bisect_right(self._offsets, start) - 1, 0), len(self.entries)):
            entry = self.entries[k]
            if entry.offset >= stop:
                return
            lo, hi = max(entry.offset, start), min(entry.offset + entry.nbytes, stop)
            if lo < hi:
                yield k, lo - start, hi - start

    def buffer(self) -> Tensor:
        """Memory for one block."""
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._cuda is not None)

    def copy_block(self, index: int, out: Tensor) -> None:
        """Copies a block to host memory of `BLOCK_BYTES`; large pieces without the interpreter lock."""
        check(0 <= index < self.n_blocks, f"there is no block {index} of {self.n_blocks}")
        target = out.numpy()
        at = 0
        for k, lo, hi in self.pieces(index):
            target[at:lo] = 0
            skipped = index * BLOCK_BYTES - self.entries[k].offset
            self._copy(k, lo + skipped, hi + skipped, out[lo:hi])
            at = hi
        target[at:] = 0

    def release(self) -> None:
        """Lets go of the tensors."""
        self._tensors, self._bytes, self._at = [], None, -1

    def _copy(self, k: int, lo: int, hi: int, out: Tensor) -> None:
        if self._at != k:  # blocks are read in order: the piece of memory in use is the last one's, nearly always
            tensor = self._tensors[k]
            on_device = tensor.is_cuda and tensor.is_contiguous() and not tensor.is_complex()
            self._at = k
            self._bytes = tensor.detach().reshape(-1).view(torch.uint8) if on_device else _array(tensor)
        if isinstance(self._bytes, Tensor):
            with torch.no_grad(), torch.cuda.stream(self._stream):
                out.copy_(self._bytes[lo:hi], non_blocking=True)
            self._stream.synchronize()
        else:
            np.copyto(out.numpy(), self._bytes[lo:hi])


def _array(tensor: Tensor) -> Any:
    return np.frombuffer(bytes_of(tensor), dtype=np.uint8)
