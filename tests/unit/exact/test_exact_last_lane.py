"""What autograd has finished leaves during the last backward pass of a node: the same bits, each of them final."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everstep.base.errors import TaskError
from everstep.base.ports import Node
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, align_parameters, untie
from everstep.exact.reduce import StageSums
from everstep.placement.tree import cover
from sampling import mostly_longer

LANES = 8
BF16 = torch.bfloat16
KINDS = [(dtype, lets_go) for dtype in (torch.float32, BF16) for lets_go in (False, True)]
Loss = Callable[["Model", Tensor, int], Tensor]


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x.to(self.linear.weight.dtype)).float().tanh())
        return y


class Model(nn.Module):
    """Four units, each with a block of its own; the third is absent in some lanes, the fourth is tied to the first."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second, self.sometimes, self.last = Block(), Block(dtype), Block(), Block()
        self.last.linear.weight = self.first.linear.weight

    def units(self) -> list[nn.Module]:
        return [self.first, self.second, self.sometimes, self.last]


def plain(model: Model, x: Tensor, lane: int) -> Tensor:
    y = model.second(model.first(x))
    y = model.sometimes(y) if lane % 3 == 1 else y
    return (model.last(model.second(y)) ** 2).mean()


def always(model: Model, x: Tensor, lane: int) -> Tensor:
    return (model.last(model.sometimes(model.second(model.first(x)))) ** 2).mean()


def reentrant(model: Model, x: Tensor, lane: int) -> Tensor:
    """`first` is used inside and outside of a segment whose backward pass is one of its own."""
    y = checkpoint(model.first, x.requires_grad_(), use_reentrant=True)
    return (model.last(model.second(model.first(y))) ** 2).mean()


class Worker:
    """One worker's lanes; `offered`: blocks of nodes, with what they held at that moment."""

    def __init__(
        self, lanes: Sequence[int], early: bool, dtype: torch.dtype = torch.float32, lets_go: bool = False
    ) -> None:
        torch.manual_seed(5)
        self.model = Model(dtype)
        align_parameters(self.model)
        untie(self.model, self.model.units())
        self.layout = GradientLayout.build(self.model, self.model.units())
        self.accumulator = LaneAccumulator(self.layout, self.model, lets_go=lets_go)
        self.sums = StageSums([self.accumulator], LANES)
        self.lanes = lanes
        self.early = early
        self.flats: dict[Node, Tensor] = {}
        self.offered: dict[tuple[Node, int], Tensor] = {}
        self.order: list[tuple[Node, int, bool]] = []
        self._statistics = {name: value.clone() for name, value in self.model.named_buffers()}
        self._adding = False

    def offer(self, node: Node, first: int, last: int) -> None:
        for block in range(first, last):
            assert (node, block) not in self.offered
            self.offered[node, block] = self.block(node, block).clone()
            self.order.append((node, block, self._adding))

    def block(self, node: Node, block: int) -> Tensor:
        return self.flats[node][block * BLOCK_ELEMENTS : (block + 1) * BLOCK_ELEMENTS]

    def begin(self, step: int) -> None:
        self.flats, self.offered, self.order = {}, {}, []
        self.sums.forget()
        self.resume(step)

    def resume(self, step: int) -> None:
        self.sums.begin(step, self.lanes, self.buffer, self.offer if self.early else None)

    def buffer(self, node: Node) -> Tensor:
        return self.flats.setdefault(node, torch.full((self.layout.numel,), float("nan")))

    def lane(self, step: int, lane: int, loss: Loss, *, empty: bool = False, add: bool = True) -> None:
        if empty:
            self.accumulator.add_empty(lane)
            return
        with torch.no_grad():
            for name, value in self.model.named_buffers():
                value.copy_(self._statistics[name])
        self.accumulator.enter(lane)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step * 100 + lane))
        value = loss(self.model, x, lane)
        self.accumulator.capture(lane)
        value.backward()  # type: ignore[no-untyped-call]
        if add:
            self._adding = True
            self.accumulator.add(lane)
            self._adding = False

    def sums_of(self) -> dict[Node, tuple[bytes, bytes]]:
        """Presence, and what is present."""
        found = {}
        for node, row in self.accumulator.presence.items():
            there = [e.view(self.flats[node]).flatten() for e, has in zip(self.layout.entries, row, strict=True) if has]
            found[node] = row, torch.cat(there).numpy().tobytes() if there else b""
        return found


def absent_blocks(worker: Worker, node: Node) -> set[int]:
    row = worker.accumulator.presence[node]
    return {e.offset // BLOCK_ELEMENTS for e, has in zip(worker.layout.entries, row, strict=True) if not has}


@pytest.mark.parametrize(("dtype", "lets_go"), mostly_longer(KINDS, lambda kind: kind[1] == (kind[0] is BF16)))
@pytest.mark.parametrize("loss", [plain, always, reentrant])
@pytest.mark.parametrize(
    ("lanes", "empty"),
    [(range(8), ()), (range(2, 7), ()), (range(3, 5), ()), ([5, 4], ()), (range(8), (6, 7)), (range(4, 8), (4, 6))],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_bit_changes_and_what_leaves_is_final(
    lanes: Sequence[int], empty: tuple[int, ...], loss: Loss, dtype: torch.dtype, lets_go: bool
) -> None:
    early, late = Worker(lanes, True, dtype, lets_go), Worker(lanes, False, dtype)
    for step in (1, 2, 3):
        for worker in (early, late):
            worker.begin(step)
            for lane in lanes:
                worker.lane(step, lane, loss, empty=lane in empty)
        assert early.sums_of() == late.sums_of()
        for (node, block), content in early.offered.items():
            assert torch.equal(content.view(torch.int32), early.block(node, block).view(torch.int32))
        expected = {(node, b) for node in cover(lanes, LANES) for b in set(range(4)) - absent_blocks(early, node)}
        assert set(early.offered) == expected
    assert not late.offered


def test_blocks_leave_in_the_order_in_which_autograd_finishes_them_before_the_lane_is_added() -> None:
    worker = Worker(range(4), True)
    worker.begin(1)
    for lane in range(3):
        worker.lane(1, lane, always)
        assert not worker.order
    worker.lane(1, 3, always)
    assert worker.order == [(Node(0, 4), block, False) for block in (3, 2, 1, 0)]


def test_complete_nodes_leave_while_others_are_computed() -> None:
    worker = Worker(range(3), True)
    worker.begin(1)
    for lane in range(3):
        worker.lane(1, lane, always)
        assert {node for node, _ in worker.offered} == ({Node(0, 2)} if lane else set()) | (
            {Node(2, 3)} if lane == 2 else set()
        )


@pytest.mark.parametrize("lanes", [range(4), range(1)])
@pytest.mark.parametrize("how", ["twice", "in place", "replaced"])
def test_a_gradient_that_changes_after_it_has_left_is_named(lanes: range, how: str) -> None:
    worker = Worker(lanes, True)
    for step in (1, 2):  # the very first lane is only watched
        worker.begin(step)
        for lane in lanes:
            worker.lane(step, lane, always, add=step == 1 or lane != lanes[-1])
    assert len(worker.offered) == 4
    gradient = worker.model.last.linear.bias.grad
    assert gradient is not None
    if how == "twice":
        (worker.model.last.linear.bias * 2.0).sum().backward()  # type: ignore[no-untyped-call]
    elif how == "in place":
        gradient.mul_(0.5)
    else:
        worker.model.last.linear.bias.grad = gradient.clone()
    with pytest.raises(TaskError, match=r"gradient of last\.linear\.bias was written more than once"):
        worker.accumulator.add(lanes[-1])


@pytest.mark.parametrize("lanes", [range(4), range(1)])
def test_a_gradient_that_has_left_can_be_let_go_and_is_named_if_it_comes_back(lanes: range) -> None:
    worker = Worker(lanes, True, lets_go=True)
    for step in (1, 2):  # the very first lane is only watched
        worker.begin(step)
        for lane in lanes:
            worker.lane(step, lane, always, add=step == 1 or lane != lanes[-1])
    assert len(worker.offered) == 4 and all(p.grad is None for p in worker.model.parameters())
    (worker.model.last.linear.bias * 2.0).sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(TaskError, match=r"gradient of last\.linear\.bias was written more than once"):
        worker.accumulator.add(lanes[-1])


def test_a_lane_left_in_the_middle_takes_what_it_may_have_changed_along() -> None:
    worker, undisturbed = Worker(range(8), True), Worker(range(8), False)
    worker.begin(1)
    undisturbed.begin(1)
    for lane in range(8):
        undisturbed.lane(1, lane, always)
        worker.lane(1, lane, always, add=lane != 7)
    worker.offered.clear()
    worker.resume(1)
    assert worker.accumulator.missing == tuple(range(8))
    for lane in range(8):
        worker.lane(1, lane, always)
    assert worker.sums_of() == undisturbed.sums_of() and len(worker.offered) == 4


def test_a_generation_later_complete_nodes_are_offered_to_the_others_again() -> None:
    worker = Worker(range(4), True)
    worker.begin(1)
    for lane in range(4):
        worker.lane(1, lane, always)
    worker.offered.clear()
    worker.lanes = range(6)
    worker.resume(1)
    assert set(worker.offered) == {(Node(0, 4), block) for block in range(4)}
    worker.offered.clear()
    worker.lanes = range(4, 6)  # the others have those
    worker.resume(1)
    assert not worker.offered
