"""The last lane of a node while its backward pass runs: gradients are added up as soon as autograd has finished them,
and may leave.

Apart from the accumulator because only this listens to autograd. The additions are those that would follow the backward
pass, in the order of the tree; they only come earlier, block by block. When the lane is added, it is checked that each
gradient was final: it must be the same tensor, and nobody may have written to it since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from everstep.base.errors import TaskError
from everstep.base.ports import Node, OnFinal
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, add_rounded
from everstep.exact.lending import written_twice

Name = Callable[[int], str]


class BlockMap:
    """Blocks of each sum: those of the parameters, then those of the regions of running statistics."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        """spans: elements [start, stop) of the flat vector, one for each sum; their blocks hold nothing else."""
        self.of = [range(lo // BLOCK_ELEMENTS, -(-hi // BLOCK_ELEMENTS)) if lo < hi else range(0) for lo, hi in spans]
        self.count: dict[int, int] = {}
        for blocks in self.of:
            for block in blocks:
                self.count[block] = self.count.get(block, 0) + 1

    def whole(self, present: Sequence[bool]) -> list[int]:
        """Blocks in which no sum is absent, ascending."""
        absent = {block for blocks, there in zip(self.of, present, strict=True) if not there for block in blocks}
        return sorted(self.count.keys() - absent)


def block_map(layout: GradientLayout, params: Sequence[int], regions: Sequence[tuple[int, int]]) -> BlockMap:
    """Map of these entries, and these ranges of running statistics."""
    return BlockMap([*((layout.entries[i].offset, layout.entries[i].stop) for i in params), *regions])


def runs_of(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of ascending blocks."""
    first = 0
    for k in range(1, len(blocks) + 1):
        if k == len(blocks) or blocks[k] != blocks[k - 1] + 1:
            yield blocks[first], blocks[k - 1] + 1
            first = k


class _FinalGradient(NamedTuple):
    """A gradient as it was when its sum left; None if it was taken out of `.grad`."""

    gradient: Tensor | None
    version: int


class LastLane:
    """One node's last lane, from `enter` to `add`. `siblings`: nodes whose sums it uses up.

    Sums are numbered: parameters first, then regions of statistics.
    """

    def __init__(
        self,
        node: Node,
        siblings: dict[Node, list[Tensor | None]],
        lent: Sequence[Tensor | None],
        views: Sequence[Tensor],
        blocks: BlockMap,
        offer: OnFinal,
        lets_go: bool = False,
        rounds: torch.dtype = torch.float32,
    ) -> None:
        """siblings: the sums to the left of the lane, from the nearest one up to that of the node's left child. lent:
        tensors of the nearest sum that autograd itself adds to, by parameter. views: targets of the node's sums.
        lets_go: a gradient that has been put is taken out of `.grad`. rounds: as in `GradientLayout`."""
        self.node = node
        self.siblings = siblings
        self._lefts = list(siblings.values())
        self._lent = lent
        self._views = views
        self._blocks = blocks
        self._offer = offer
        self._lets_go, self._rounds = lets_go, rounds
        self._lacking = dict(blocks.count)
        self._present: list[bool | None] = [None] * len(views)
        self._seen: dict[int, _FinalGradient] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def listen(self, params: Sequence[nn.Parameter], late: set[int]) -> None:
        """Until `end`, add up gradients as autograd finishes them. late: parameters with several additions in a
        lane."""
        for i, parameter in enumerate(params):
            if i not in late and parameter.requires_grad:  # a loop may freeze parameters as it goes on
                hook = partial(self._finished, i, parameter.stride())
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _finished(self, i: int, stride: tuple[int, ...], parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or self._present[i] is not None:
            return
        lent = self._lent[i]
        usual = _is_usual(gradient, stride) if lent is None else gradient is lent
        if not usual:
            return  # `add` will make it dense, or report the error
        with torch.no_grad():
            self._seen[i] = _FinalGradient(None if self._lets_go else gradient, gradient._version)
            self.put(i, gradient.to(self._rounds).float())
            if self._lets_go:
                parameter.grad = None
            self.leave([i])

    def put(self, i: int, value: Tensor | None) -> None:
        """Put the lane's part of a sum: float32, dense, in memory that is only read. None: absent. If the sum was lent,
        the value is the sum of both."""
        nearest = 1 if i < len(self._lent) and self._lent[i] is not None else 0
        lefts = [left for leaf in self._lefts[nearest:] if (left := leaf[i]) is not None]
        if value is None and lefts:
            value = lefts.pop(0)
        self._present[i] = value is not None
        if value is None:
            return
        rounds = self._rounds if i < len(self._lent) else torch.float32
        for left in lefts[:-1]:
            add_rounded(left, value, left, rounds)
            value = left
        if lefts:
            add_rounded(lefts[-1], value, self._views[i], rounds)
        elif value is not self._views[i]:
            self._views[i].copy_(value)

    def leave(self, sums: Sequence[int]) -> None:
        """Offer the blocks that became whole when these sums were put."""
        whole = []
        for i in sums:
            if self._present[i]:
                for block in self._blocks.of[i]:
                    self._lacking[block] -= 1
                    if not self._lacking[block]:
                        whole.append(block)
        for run in runs_of(sorted(whole)):
            self._offer(self.node, *run)

    def lacks(self, i: int) -> bool:
        """Whether this sum has not been put yet."""
        return self._present[i] is None

    @property
    def open(self) -> list[int]:
        return list(filter(self.lacks, range(len(self._present))))

    @property
    def present(self) -> list[bool]:
        """Which sums are present, once all have been put."""
        return [bool(there) for there in self._present]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def check(self, gradients: Sequence[Tensor | None], name: Name) -> None:
        """Check that no gradient changed after it was added up. gradients: content of `.grad` after the lane. name:
        gives a parameter's name.

        Raises: TaskError naming a parameter whose gradient did.
        """
        for i, seen in self._seen.items():
            changed = seen.gradient is not None and seen.gradient._version != seen.version
            if gradients[i] is not seen.gradient or changed:
                raise TaskError(written_twice(name(i)))

    def returned(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Content of `.grad` after the lane, with what was taken out of it."""
        taken = {i for i, seen in self._seen.items() if seen.gradient is None}
        return [self._lent[i] if i in taken else gradient for i, gradient in enumerate(gradients)]


def _is_usual(gradient: Tensor, stride: tuple[int, ...]) -> bool:
    return gradient.layout is torch.strided and gradient.stride() == stride
