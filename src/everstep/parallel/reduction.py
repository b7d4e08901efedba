"""Common parts of the transports' reductions: offering nodes, and finishing blocks once."""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from everstep.base.errors import InvariantViolation, check
from everstep.base.ports import Node
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.reduce import NodePart, finish
from everstep.exact.state_memory import give_back

CHUNK_BLOCKS = 16
"""Blocks (4 MiB) that are finished between two looks at aborts and ticks: about 2 ms."""
_OFFER = struct.Struct("<qqq")


class BlockFinisher:
    """Finishes the tree in the blocks of two result areas (by parity of the step), each block once per step and
    generation. look: called between chunks of blocks."""

    def __init__(self, layout: GradientLayout, n_lanes: int, look: Callable[[], None]) -> None:
        self._layout = layout
        self._n_lanes = n_lanes
        self._look = look
        self._steps = [-1, -1]
        self._done = [bytearray(layout.n_blocks), bytearray(layout.n_blocks)]

    def enter(self) -> None:
        """A generation begins, and nothing is written any more for the one before. Blocks that were finished in it may
        contain lanes of a member that has been found to compute otherwise."""
        self._steps = [-1, -1]

    def begin(self, step: int) -> None:
        parity = step % 2
        if self._steps[parity] != step:
            self._steps[parity] = step
            self._done[parity] = bytearray(self._layout.n_blocks)

    def finish(self, step: int, run: tuple[int, int], parts: Sequence[NodePart], out: torch.Tensor) -> None:
        """Finish the blocks [first, last) of `out`, the flat result of the step, except those that are finished."""
        done, (lo, last) = self._done[step % 2], run
        while (lo := done.find(0, lo, last)) >= 0:
            most = min(lo + CHUNK_BLOCKS, last)
            hi = done.find(1, lo, most)
            hi = most if hi < 0 else hi
            self._look()
            start, stop = lo * BLOCK_ELEMENTS, hi * BLOCK_ELEMENTS
            finish(self._layout, self._n_lanes, parts, start, stop, out[start:stop])
            self._mark(step, lo, hi)
            lo = hi

    def received(self, step: int, run: tuple[int, int] | None = None) -> None:
        """Note that the blocks [first, last), None: all other ones, have come from their finishers."""
        self._mark(step, *(run or (0, self._layout.n_blocks)))

    def _mark(self, step: int, lo: int, hi: int) -> None:
        self._done[step % 2][lo:hi] = b"\x01" * (hi - lo)


def zero_absent(layout: GradientLayout, flat: torch.Tensor, present: bytes) -> None:
    """Make a node a result: entries that no lane had become zero, with the padding after them."""
    for entry, end, has in zip(layout.entries, layout.boundaries, present, strict=True):
        if not has:
            flat[entry.offset : end].zero_()


def encode_offers(slots: Mapping[Node, int], presence: Mapping[Node, bytes | bytearray]) -> bytes:
    """Record with which a worker offers its nodes: lanes, slot and presence bytes (or others of one length)."""
    return b"".join(_OFFER.pack(node.lo, node.hi, slots[node]) + presence[node] for node in presence)


def decode_offers(record: bytes, entries: int) -> list[tuple[Node, int, bytes]]:
    """(node, slot, presence bytes) of each node offered; `entries`: length of the presence bytes."""
    size = _OFFER.size + entries
    if len(record) % size:
        raise InvariantViolation(f"a record of nodes has a multiple of {size} bytes, got {len(record)}")
    offers = []
    for at in range(0, len(record), size):
        lo, hi, slot = _OFFER.unpack_from(record, at)
        offers.append((Node(lo, hi), slot, record[at + _OFFER.size : at + size]))
    return offers


# ---- private flat gradients of a transport that has no shared memory
_HUGE_BYTES = 8 << 20


def new_flat(numel: int, device: torch.device) -> torch.Tensor:
    """float32 [numel], at least 64-byte aligned; on the CPU in huge pages if the kernel gives them."""
    if device.type != "cpu" or numel * 4 < _HUGE_BYTES:
        return torch.empty(numel, dtype=torch.float32, device=device)
    memory = mmap.mmap(-1, numel * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


class Flats:
    """Memory of nodes by (step, node), of a step's result, and of what is received: float32 [numel] tensors.

    Nodes and results are free again when another step begins here.
    """

    _SPARES = 2

    def __init__(self, numel: int, device: torch.device) -> None:
        self._numel = numel
        self._device = device
        self._step = 0
        self._nodes: dict[Node, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._results: dict[int, torch.Tensor] = {}
        self._area = (0, 0)
        """The last step that had a result, and which of two areas."""
        self._scratch: dict[int, torch.Tensor] = {}
        self._given: set[Node] = set()
        self._lost: set[Node] = set()
        self._giving = threading.Lock()

    def begin(self, step: int) -> None:
        """This worker begins a step, or goes on with it."""
        if step != self._step:
            with self._giving:
                self._step = step
                self._spare = [*self._spare, *self._nodes.values()][: self._SPARES]
                self._nodes.clear()
                self._given, self._lost = set(), set()

    def begun(self, step: int) -> bool:
        """Whether this worker is known to have begun the step, and no other one since."""
        return step == self._step

    def tensor(self, step: int, node: Node) -> torch.Tensor:
        """Tensor of a node; the same (step, node) gives the same memory."""
        self.begin(step)
        if node not in self._nodes:
            self._nodes[node] = self._spare.pop() if self._spare else new_flat(self._numel, self._device)
        return self._nodes[node]

    def held(self, step: int, node: Node) -> torch.Tensor:
        """Tensor of a node that was filled before."""
        check(step == self._step and node in self._nodes, f"node {node} of step {step} was never asked for")
        return self._nodes[node]

    def give_back(self, step: int, node: Node, first: int, last: int) -> None:
        """Give back the memory of the blocks [first, last) of a node of the step. Any thread may call it; nothing
        happens once another step has begun."""
        with self._giving:
            if step == self._step and node in self._nodes:
                self._given.add(node)
                give_back(self._nodes[node][first * BLOCK_ELEMENTS : last * BLOCK_ELEMENTS], ())

    def lose(self) -> None:
        """A generation begins: nodes of which blocks were given back in older ones are of no use in it."""
        self._given, self._lost = set(), self._lost | self._given

    def lost(self, step: int) -> frozenset[Node]:
        """Those nodes of the step, once: the caller fills them again."""
        found, self._lost = self._lost, set()
        return frozenset(found if step == self._step else ())

    def result(self, step: int) -> torch.Tensor:
        """Memory for the result of a step. Blocks of it may come before the step begins here: they go into a second
        area, since the result of the step before may be in use."""
        last, area = self._area
        if step != last:
            self._area = step, area if self.begun(step) else 1 - area
        area = self._area[1]
        if area not in self._results:
            self._results[area] = new_flat(self._numel, self._device)
        return self._results[area]

    def scratch(self, number: int, numel: int) -> torch.Tensor:
        """Receive buffer `number`, free again after the reduction; float32 [numel]."""
        found = self._scratch.get(number)
        if found is None or found.numel() < numel:
            found = self._scratch[number] = new_flat(numel, self._device)
        return found[:numel]
