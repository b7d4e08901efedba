"""A reduction on one host that begins before its gradients are whole, so that nobody has to keep all of one.

A member tells which blocks of its nodes are final while it computes others. Who finishes a block adds it up as soon as
all nodes of it are final, and says so; from then on no member needs it in its nodes, and each gives that memory back.
All this is done between the passes of autograd, and while a member waits: there is no thread.

A node of which blocks were given back cannot be offered in another generation: its lanes are computed again.

Why no result is overwritten too early: nobody adds up a block before all members have said that they have begun the
step, and with that no longer use the result of the step before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch

from everstep.base.errors import CollectiveAborted
from everstep.base.extents import Runs, common
from everstep.base.ports import Node
from everstep.exact.last_lane import runs_of
from everstep.exact.reduce import NodePart
from everstep.parallel.mapping import OwnSegment, PeerSegment
from everstep.parallel.reduction import BlockFinisher
from everstep.parallel.streaming import StepBlocks
from everstep.placement.shards import Division

_MOST_TOLD, _TIMES_TOLD = 16, 16
"""At most so many blocks (4 MiB) are told together, at least in so many parts if there are blocks for it; what is left
is told when the reduction begins."""


class NearMemory(Protocol):
    """The members' memory on one host."""

    finisher: BlockFinisher

    @property
    def generation(self) -> int:
        """The generation that was opened last."""

    def segment_of(self, worker_id: int) -> OwnSegment | PeerSegment:
        """The memory of a member."""

    def say_final(self, generation: int, step: int, node: Node | None, runs: Sequence[tuple[int, int]]) -> None:
        """Let all know that these blocks of an own node are final, or that the step has begun."""

    def final_blocks(self, worker_id: int) -> tuple[int, list[tuple[Node, int, bytes]]] | None:
        """Blocks that a member has reported so."""

    def tell_done(self, step: int, flags: bytes) -> None:
        """Tell all that these blocks are finished: a byte for each, 1 if it is."""

    def done_blocks(self, worker_id: int, step: int) -> bytes | None:
        """What a member has told so."""

    def held(self, worker_id: int, slot: int) -> torch.Tensor:
        """Node in that slot of a member."""

    def result_for(self, step: int, blocks: Runs) -> torch.Tensor:
        """Memory for this member's part of the step's result: these blocks."""

    def give_back(self, step: int, first: int, last: int) -> None:
        """Give the memory of these blocks of all own nodes back."""


class EarlyReduction:
    """One step's, in one generation, at one member. step, generation: which. is_over: all has been done. One thread."""

    def __init__(
        self,
        near: NearMemory,
        me: int,
        ids: Sequence[int],
        n_lanes: int,
        entries: int,
        n_blocks: int,
        division: Division,
        step: int,
    ) -> None:
        """ids: of all members. entries: of the layout."""
        self.step, self.generation = step, near.generation
        self.is_over = False
        self._near, self._me, self._ids = near, me, list(ids)
        self._division = division
        self._most = max(1, min(_MOST_TOLD, n_blocks // _TIMES_TOLD))
        self._everything = b"\x01" * entries
        self._blocks = StepBlocks(division.finishes[me], n_blocks, n_lanes, self._result)
        self._begun: set[int] = set()
        self._ready: list[int] = []
        self._bells: dict[int, int] = {}
        self._waiting: dict[Node, list[tuple[int, int]]] = {}
        self._finished, self._given = bytearray(n_blocks), bytearray(n_blocks)
        self._tell(None, [])

    def _result(self) -> torch.Tensor:
        return self._near.result_for(self.step, self._division.finishes[self._me])

    def take(self, node: Node, first: int, last: int) -> None:
        """Receiver of final blocks, an `OnFinal`."""
        runs = self._waiting.setdefault(node, [])
        runs.append((first, last))
        if sum(stop - start for start, stop in runs) >= self._most:
            self._tell(node, runs)
            runs.clear()
        with contextlib.suppress(CollectiveAborted):  # the generation has ended; who waits for it finds out
            self.look()

    def tell_rest(self) -> None:
        """Tell what has not been told yet."""
        for node, runs in self._waiting.items():
            if runs:
                self._tell(node, runs)
                runs.clear()

    def end(self) -> None:
        """The reduction is over at all members: give back what is left."""
        self.is_over = True
        self._give_back(0, len(self._given))

    def look(self) -> None:
        """Add up what can be, and give back what is not needed any more. Raises: CollectiveAborted."""
        near = self._near
        if self.is_over or near.generation != self.generation:
            return
        for w in self._ids:
            bell = near.segment_of(w).bell
            if self._bells.get(w) != bell:
                self._bells[w] = bell
                self._hear(w)
        if self._ready and len(self._begun) == len(self._ids):
            self._finish()

    def _tell(self, node: Node | None, runs: Sequence[tuple[int, int]]) -> None:
        self._near.say_final(self.generation, self.step, node, runs)

    def _hear(self, w: int) -> None:
        """What a member has told: its final blocks, and those that it has finished."""
        found, blocks = self._near.final_blocks(w), self._blocks
        if found is not None and found[0] == self.step:
            self._begun.add(w)
            for node, slot, flags in found[1]:
                if node not in blocks.parts:
                    blocks.add(w, node, self._near.held(w, slot), 0)
                for run in (run for first, last in runs_in(flags) for run in blocks.leave(node, first, last)):
                    self._ready += blocks.come(node, *run, True)
        done = self._near.done_blocks(w, self.step)
        for run in common(tuple(runs_in(done or b"")), self._division.finishes[w]):
            self._give_back(*run)

    def _give_back(self, first: int, last: int) -> None:
        given = self._given
        while (first := given.find(0, first, last)) >= 0:
            stop = given.find(1, first, last)
            stop = last if stop < 0 else stop
            given[first:stop] = b"\x01" * (stop - first)
            self._near.give_back(self.step, first, stop)

    def _finish(self) -> None:
        blocks, self._ready = sorted(self._ready), []
        near = self._near
        near.finisher.begin(self.step)
        parts = [
            NodePart(node, tensor, self._everything, start)
            for node, (_, tensor, start) in sorted(self._blocks.parts.items())
        ]
        for first, last in runs_of(blocks):
            near.finisher.finish(self.step, (first, last), parts, self._blocks.out)
            self._finished[first:last] = b"\x01" * (last - first)
        near.tell_done(self.step, bytes(self._finished))
        for run in runs_of(blocks):
            self._give_back(*run)


def runs_in(flags: bytes) -> Runs:
    """Runs [first, last) of the bytes that are 1."""
    found, first = [], flags.find(1)
    while first >= 0:
        last = flags.find(0, first)
        last = len(flags) if last < 0 else last
        found.append((first, last))
        first = flags.find(1, last)
    return tuple(found)
