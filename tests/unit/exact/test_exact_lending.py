"""Lending a sibling's sum to autograd changes no bit, and what would make it do so is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everstep.base.errors import TaskError
from everstep.base.ports import Node
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.layout import GradientLayout, align_parameters
from everstep.placement.tree import cover

LANES = 8
Loss = Callable[["Model", Tensor, int], Tensor]


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6, dtype=dtype)
        self.sometimes = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).tanh()).to(self.last.weight.dtype)).float()


def plain(model: Model, x: Tensor, lane: int) -> Tensor:
    y = model(x)
    return ((y * model.sometimes if lane % 3 == 1 else y) ** 2).mean()


def reentrant(model: Model, x: Tensor, lane: int) -> Tensor:
    """`first` is used inside and outside of a segment whose backward pass is one of its own."""
    y = checkpoint(model.first, x.requires_grad_(), use_reentrant=True)
    return (model.first(y) ** 2).mean()


def node_sums(lanes: range, loss: Loss, dtype: torch.dtype, enter: bool) -> dict[Node, tuple[bytes, bytes]]:
    torch.manual_seed(5)
    model = Model(dtype)
    align_parameters(model)
    layout = GradientLayout.build(model, [model])
    accumulator = LaneAccumulator(layout, model)
    sums = {node: torch.zeros(layout.numel) for node in cover(lanes, LANES)}
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    for step in (1, 2):
        accumulator.begin(step, list(sums), sums.__getitem__)
        for lane in lanes:
            for name, value in model.named_buffers():
                value.copy_(statistics[name])
            if enter:
                accumulator.enter(lane)
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step * 100 + lane))
            loss(model, x, lane).backward()
            accumulator.add(lane)
        assert accumulator.missing == ()
    return {node: (accumulator.presence[node], flat.numpy().tobytes()) for node, flat in sums.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [plain, reentrant])
@pytest.mark.parametrize("lanes", [range(8), range(2, 7), range(3, 5), range(4, 6)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_bit_changes(lanes: range, loss: Loss, dtype: torch.dtype) -> None:
    assert node_sums(lanes, loss, dtype, enter=True) == node_sums(lanes, loss, dtype, enter=False)


def started() -> tuple[Model, LaneAccumulator]:
    model = Model(torch.float32)
    accumulator = LaneAccumulator(layout := GradientLayout.build(model, [model]), model)
    accumulator.begin(1, [Node(0, 4)], lambda _: torch.zeros(layout.numel))
    for lane in (0, 1, 2):
        accumulator.enter(lane)
        plain(model, torch.ones(5, 6), lane).backward()
        accumulator.add(lane)
    accumulator.enter(3)
    return model, accumulator


def test_a_second_write_is_noticed_and_named() -> None:
    model, accumulator = started()
    for _ in range(2):
        plain(model, torch.ones(5, 6), 3).backward()
    with pytest.raises(TaskError, match=r"gradient of first\.weight was written more than once"):
        accumulator.add(3)


def test_a_replaced_gradient_is_noticed() -> None:
    model, accumulator = started()
    plain(model, torch.ones(5, 6), 3).backward()
    model.last.bias.grad = torch.zeros(6)
    with pytest.raises(TaskError, match=r"last\.bias"):
        accumulator.add(3)


def test_a_lane_left_in_the_middle_takes_its_sibling_along() -> None:
    model, accumulator = started()
    plain(model, torch.ones(5, 6), 3).backward()
    accumulator.begin(1, [Node(0, 4)], lambda _: torch.zeros(accumulator.layout.numel))
    assert accumulator.missing == (2, 3)
    assert all(p.grad is None for p in model.parameters())


def in_memory_of(flat: Tensor, tensor: Tensor) -> bool:
    return 0 <= tensor.data_ptr() - flat.data_ptr() < 4 * flat.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nodes_first_lane_and_its_sums_lie_in_the_nodes_memory(dtype: torch.dtype) -> None:
    """All but what is absent in it, and what is not float32."""
    model = Model(dtype)
    accumulator = LaneAccumulator(layout := GradientLayout.build(model, [model]), model)
    flat = torch.zeros(layout.numel)
    for step in (1, 2):  # in the first lane of all, it is found out what may be lent
        accumulator.begin(step, [Node(0, 4)], lambda _: flat)
        for lane in (0, 1):
            accumulator.enter(lane)
            plain(model, torch.randn(5, 6), lane).backward()
            there = {name: in_memory_of(flat, p.grad) for name, p in model.named_parameters() if p.grad is not None}
            if step == 2:
                elsewhere = {name for name, inside in there.items() if not inside}
                expected = {"sometimes"} if lane else set()
                assert elsewhere == (expected if dtype == torch.float32 else {*expected, "last.weight", "last.bias"})
            accumulator.add(lane)
            assert all(p.grad is None for p in model.parameters())


def test_a_first_lane_that_is_given_up_leaves_nothing_behind() -> None:
    model = Model(torch.float32)
    accumulator = LaneAccumulator(layout := GradientLayout.build(model, [model]), model)
    flats = {node: torch.zeros(layout.numel) for node in (Node(0, 1), Node(0, 2))}
    accumulator.begin(1, [Node(0, 1)], flats.__getitem__)
    accumulator.enter(0)
    plain(model, torch.randn(5, 6), 0).backward()
    accumulator.add(0)
    x = torch.randn(5, 6)
    accumulator.begin(2, [Node(0, 1)], flats.__getitem__)
    accumulator.enter(0)
    plain(model, x + 1, 0).backward()  # and its lane goes to another worker
    accumulator.begin(2, [Node(0, 2)], flats.__getitem__)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    for lane in (0, 1):
        accumulator.enter(lane)
        plain(model, x, 0).backward()
        accumulator.add(lane)
    plain(model, x, 0).backward()
    entry = next(e for e in layout.entries if e.name == "first.weight")
    assert torch.equal(entry.view(flats[Node(0, 2)]), model.first.weight.grad * 2)


@pytest.mark.parametrize("offered", [False, True])
def test_a_parameter_that_a_loop_freezes_later_has_no_gradient_from_then_on(offered: bool) -> None:
    model = Model(torch.float32)
    accumulator = LaneAccumulator(layout := GradientLayout.build(model, [model]), model)
    flat = torch.full((layout.numel,), float("nan"))
    names = [entry.name for entry in layout.entries]
    for step in (1, 2, 3):
        model.first.weight.requires_grad_(step < 2)
        accumulator.begin(step, [Node(0, 2)], lambda _: flat, (lambda *_: None) if offered else None)
        for lane in (0, 1):
            accumulator.enter(lane)
            plain(model, torch.randn(5, 6), lane).backward()
            accumulator.add(lane)
        (row,) = accumulator.presence.values()
        present = {name for name, there in zip(names, row, strict=True) if there}
        assert ("first.weight" in present) == (step < 2) and {"first.bias", "sometimes"} <= present
