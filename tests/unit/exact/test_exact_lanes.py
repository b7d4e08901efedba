"""Eight lanes on one worker against the same lanes on two to five: the reduced gradient is the same, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everstep.base.errors import ConfigError, InvariantViolation
from everstep.base.ports import Node, Piece, Reduced
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.buffers import BufferGuard, BufferReport
from everstep.exact.digest import bytes_of
from everstep.exact.gradient import GradientHandOver
from everstep.exact.layout import GradientLayout, align_parameters, untie
from everstep.exact.reduce import NodePart, finish, presence
from everstep.exact.seeding import UnitSeeder, derive
from everstep.placement.tree import cover

LANES = 8


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.drop(self.norm(self.conv(x))))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU())
        self.blocks = nn.Sequential(Residual(10), Residual(10))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 7))
        self.unused = nn.Linear(3, 3)  # never has a gradient
        self.sometimes = nn.Parameter(torch.ones(7))  # has one in some lanes

    def units(self) -> list[nn.Module]:
        return [self.stem, *self.blocks, self.head, self.unused]

    def forward(self, x: Tensor, lane: int) -> Tensor:
        y = self.head(self.blocks(self.stem(x)))
        return y * self.sometimes if lane % 3 == 1 else y


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 40, dropout=0.2, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embed.weight

    def units(self) -> list[nn.Module]:
        return [self.embed, *self.body.layers, self.head]

    def forward(self, x: Tensor, lane: int) -> Tensor:
        return self.head(self.body(self.embed(x))).transpose(1, 2)


def batch(kind: str, step: int, lane: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(derive(9, step, lane))
    if kind == "resnet":
        return torch.randn(4, 1, 8, 8, generator=generator), torch.randint(0, 7, (4,), generator=generator)
    tokens = torch.randint(0, 33, (3, 11), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Worker:
    """One worker's view of a step, without transport."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, edit: Callable[[nn.Module], None] | None = None):
        torch.manual_seed(3)
        self.kind = kind
        self.model: SmallResNet | TiedTransformer = SmallResNet() if kind == "resnet" else TiedTransformer()
        self.model.to(dtype)
        self.dtype = dtype
        if edit:
            edit(self.model)
        align_parameters(self.model)
        units = self.model.units()
        self.whole = kind == "resnet"
        untie(self.model, [self.model] if self.whole else units)
        self.layout = GradientLayout.build(self.model, [self.model] if self.whole else units)
        self.accumulator = LaneAccumulator(self.layout, self.model)
        self.guard = BufferGuard(self.model)
        self.seeder = UnitSeeder(units, 5)
        self.hand_over = GradientHandOver(self.layout, self.model)
        self.memory: dict[Node, Tensor] = {}

    def buffer(self, node: Node) -> Tensor:
        return self.memory.setdefault(node, torch.full((self.layout.numel,), float("nan")))

    def lane(self, step: int, lane: int) -> None:
        self.guard.begin_lane()
        self.seeder.begin_lane(step, lane)
        x, y = batch(self.kind, step, lane)
        x = x.to(self.dtype) if x.is_floating_point() else x
        F.cross_entropy(self.model(x, lane).float(), y).backward()
        self.seeder.end_lane()
        self.accumulator.add(lane)
        self.guard.end_lane()

    def compute(self, step: int, lanes: list[int], empty: tuple[int, ...] = ()) -> list[NodePart]:
        self.guard.begin_step(step)
        self.memory = {}
        self.accumulator.begin(step, cover(lanes, LANES), self.buffer)
        for lane in lanes:
            if lane in empty:
                self.accumulator.add_empty(lane)
            else:
                self.lane(step, lane)
        return self.parts()

    def parts(self) -> list[NodePart]:
        return [NodePart(node, self.memory[node], row) for node, row in self.accumulator.presence.items()]


def reduce(layout: GradientLayout, parts: list[NodePart], step: int = 1) -> Reduced:
    """By two owners with an odd border."""
    border = layout.numel // 2 + 37
    pieces = []
    for start, stop in ((0, border), (border, layout.numel)):
        out = torch.empty(stop - start)
        finish(layout, LANES, parts, start, stop, out)
        pieces.append(Piece(start, stop, out))
    return Reduced(step, tuple(pieces), presence(parts), ((0, layout.n_blocks),))


def bits(reduced: Reduced) -> bytes:
    return b"".join(bytes(bytes_of(p.data)) for p in reduced.pieces) + reduced.presence


PLACEMENTS = [
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[7, 6, 5, 4, 3, 2, 1, 0]],
    [[0, 1, 2], [3, 4, 5], [6, 7]],
    [[0, 2, 4, 6], [1, 3, 5], [7]],
    [[0, 1], [2, 3], [4, 5], [6, 7]],
    [[5, 0], [1], [2, 3, 4], [7], [6]],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["resnet", "transformer"])
def test_placement_does_not_change_bits(kind: str, dtype: torch.dtype) -> None:
    one = Worker(kind, dtype)
    expected = reduce(one.layout, one.compute(1, list(range(LANES)), empty=(6,)))
    numbers = torch.cat([p.data for p in expected.pieces])
    assert torch.isfinite(numbers).all() and numbers.abs().sum() > 0
    if kind == "resnet":
        absent = [one.layout.entries[i].name for i, there in enumerate(expected.presence) if not there]
        assert absent == ["unused.weight", "unused.bias"]
    one.guard.commit([one.guard.report()])
    one.hand_over.commit_statistics(expected)
    for placement in PLACEMENTS:
        workers = [Worker(kind, dtype) for _ in placement]
        parts: list[NodePart] = []
        for worker, lanes in zip(workers, placement, strict=True):
            parts += worker.compute(1, lanes, empty=(6,))
        got = reduce(one.layout, parts)
        assert bits(got) == bits(expected), placement
        reports = [BufferReport.decode(w.guard.report().encode()) for w in workers]
        for worker in (*workers, Worker(kind, dtype)):  # the last one had no lane
            worker.guard.commit(reports)
            worker.hand_over.commit_statistics(got)
            for (name, mine), (_, other) in zip(one.model.named_buffers(), worker.model.named_buffers(), strict=True):
                assert bytes_of(mine) == bytes_of(other), name


def test_a_lane_that_leaves_running_statistics_alone_has_no_part_in_them() -> None:
    def uncounted(model: nn.Module) -> None:
        model.blocks[0].norm.num_batches_tracked = None  # or lanes would leave that different

    one, others = Worker("resnet", edit=uncounted), Worker("resnet", edit=uncounted)
    others.model.blocks[0].norm.eval()  # type: ignore[union-attr]
    parts = one.compute(1, [0]) + others.compute(1, list(range(1, LANES)))
    left = one.model.blocks[0].norm.running_mean.clone()  # type: ignore[union-attr]
    one.hand_over.commit_statistics(reduce(one.layout, parts))
    assert bytes_of(one.model.blocks[0].norm.running_mean) == bytes_of(left)  # type: ignore[union-attr]


def test_statistics_are_those_that_were_captured_after_the_forward_pass() -> None:
    """Lanes of a split model interleave: before a lane's backward pass others have gone forward."""
    found = []
    for others in (False, True):
        worker = Worker("resnet")
        worker.guard.begin_step(1)
        worker.accumulator.begin(1, [Node(0, 1)], worker.buffer)
        worker.guard.begin_lane()
        loss = worker.model(batch("resnet", 1, 0)[0], 0).sum()
        worker.accumulator.capture(0)
        loss.backward()
        if others:
            worker.model.blocks[0].norm.running_mean.add_(1.0)  # type: ignore[union-attr]
        worker.accumulator.add(0)
        found.append(bytes_of(worker.parts()[0].tensor))
    assert found[0] == found[1]


def test_the_tree_is_the_plain_one_for_two_lanes() -> None:
    """What the fold gives for a node is what autograd gives for its lanes, added."""
    worker = Worker("transformer")
    worker.guard.begin_step(1)
    grads = []
    for lane in (4, 5):
        worker.seeder.begin_lane(1, lane)
        x, y = batch("transformer", 1, lane)
        F.cross_entropy(worker.model(x, lane), y).backward()
        worker.seeder.end_lane()
        grads.append([p.grad for p in worker.model.parameters()])
        for p in worker.model.parameters():
            p.grad = None
    parts = worker.compute(1, [4, 5])
    assert [p.node for p in parts] == [Node(4, 6)]
    names = {id(p): n for n, p in worker.model.named_parameters()}
    by_name = {e.name: e for e in worker.layout.entries}
    for parameter, a, b in zip(worker.model.parameters(), *grads, strict=True):
        assert a is not None and b is not None
        assert torch.equal(by_name[names[id(parameter)]].view(parts[0].tensor), a + b)


def test_lanes_taken_over_in_the_same_step() -> None:
    one = Worker("resnet")
    expected = reduce(one.layout, one.compute(1, list(range(LANES))))
    a, b = Worker("resnet"), Worker("resnet")
    parts_a = a.compute(1, [0, 1, 2])
    b.compute(1, [3, 4])
    assert sorted(b.accumulator.presence) == [Node(3, 4), Node(4, 5)]
    b.accumulator.begin(1, cover([5, 6, 7], LANES), b.buffer)
    assert b.accumulator.missing == (5, 6, 7)
    for lane in (7, 5, 6):
        b.lane(1, lane)
    assert b.accumulator.missing == ()
    assert bits(reduce(one.layout, parts_a + b.parts())) == bits(expected)


def test_an_unfinished_node_gives_way_to_one_that_overlaps_it() -> None:
    one = Worker("resnet")
    expected = reduce(one.layout, one.compute(1, list(range(LANES))))
    a, b = Worker("resnet"), Worker("resnet")
    a.guard.begin_step(1)
    a.accumulator.begin(1, [Node(0, 4)], a.buffer)
    for lane in (0, 1, 2):
        a.lane(1, lane)
    assert a.accumulator.presence == {}
    a.accumulator.begin(1, [Node(0, 2), Node(3, 4)], a.buffer)  # lane 2 goes elsewhere, 0 and 1 are there already
    assert list(a.accumulator.presence) == [Node(0, 2)]
    a.lane(1, 3)
    parts = a.parts() + b.compute(1, [2, 4, 5, 6, 7])
    assert bits(reduce(one.layout, parts)) == bits(expected)
    a.accumulator.begin(2, [Node(0, 8)], a.buffer)
    assert a.accumulator.presence == {} and len(a.accumulator.missing) == 8


def test_refuses_lanes_twice_or_of_nobody() -> None:
    worker = Worker("resnet")
    worker.compute(1, [0])
    with pytest.raises(InvariantViolation, match="lane 0"):
        worker.lane(1, 0)
    with pytest.raises(InvariantViolation, match="lane 5"):
        worker.lane(1, 5)
    with pytest.raises(InvariantViolation, match="overlaps"):
        worker.accumulator.begin(1, [Node(0, 2)], worker.buffer)


def test_refuses_sparse_gradients_and_thawed_parameters_by_name() -> None:
    def model_of(module: nn.Module) -> tuple[nn.Module, LaneAccumulator]:
        layout = GradientLayout.build(module, [module])
        return module, LaneAccumulator(layout, module)

    embed, accumulator = model_of(nn.Sequential(nn.Embedding(5, 3, sparse=True)))
    accumulator.begin(1, [Node(0, 1)], lambda _: torch.zeros(accumulator.layout.numel))
    embed(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"0\.weight"):
        accumulator.add(0)
    linear = nn.Linear(2, 2)
    linear.bias.requires_grad_(False)
    _, accumulator = model_of(linear)
    linear.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match="bias"):
        accumulator.begin(1, [], lambda _: torch.zeros(1))


class Odd(nn.Module):
    """Gradients that share memory, are expanded, or transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 6))
        self.b = nn.Parameter(torch.randn(24))
        self.c = nn.Parameter(torch.randn(3, 5))
        self.d = nn.Parameter(torch.randn(7))
        self.e = nn.Parameter(torch.randn(2, 3, 3, 4).permute(0, 3, 1, 2))
        self.f = nn.Parameter(torch.randn(()))

    def forward(self, k: float) -> Tensor:
        weight = torch.arange(24.0) + k
        shared = ((self.a.view(-1) + self.b) * weight).sum()
        return shared + self.c.t().sum() * k + self.d.sum() + (self.e * self.f * k).sum()


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_odd_gradients(lanes: int) -> None:
    torch.manual_seed(0)
    model = Odd()
    layout = GradientLayout.build(model, [model])
    accumulator = LaneAccumulator(layout, model)
    flat = torch.full((layout.numel,), float("nan"))
    accumulator.begin(1, [Node(0, lanes)], lambda _: flat)
    expected: list[Tensor] = [torch.zeros(())] * len(layout.entries)
    for lane in range(lanes):
        copy = [p.detach().clone() for p in model.parameters()]
        loss = model(float(lane + 1))
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        expected = [e + g for e, g in zip(expected, grads, strict=True)]
        loss.backward()
        accumulator.add(lane)
        assert all(torch.equal(a, b) for a, b in zip(copy, model.parameters(), strict=True))
    for entry, value in zip(layout.entries, expected, strict=True):
        torch.testing.assert_close(entry.view(flat), value, msg=entry.name)
    for start, stop in layout.gaps:
        assert not flat[start:stop].any()


def test_gradients_that_share_memory_are_added_apart() -> None:
    model = nn.ParameterList([torch.zeros(24), torch.zeros(24)])
    layout = GradientLayout.build(model, [model])
    accumulator = LaneAccumulator(layout, model)
    flat = torch.zeros(layout.numel)
    accumulator.begin(1, [Node(0, 4)], lambda _: flat)
    for lane in range(4):
        shared = torch.arange(24.0) + lane
        for parameter in model:
            parameter.grad = shared
        accumulator.add(lane)
    for entry in layout.entries:
        assert torch.equal(entry.view(flat), 4 * torch.arange(24.0) + 6), entry.name


def test_minus_zero_survives() -> None:
    model = nn.Linear(1, 1, bias=False)
    layout = GradientLayout.build(model, [model])
    accumulator = LaneAccumulator(layout, model)
    flat = torch.zeros(layout.numel)
    accumulator.begin(1, [Node(0, 4)], lambda _: flat)
    for lane in range(4):
        if lane == 2:
            model.weight.grad = torch.tensor([[-0.0]])
            accumulator.add(lane)
        elif lane == 1:
            accumulator.add_empty(lane)
        else:
            accumulator.add(lane)
    assert torch.signbit(flat[0])
    assert accumulator.presence == {Node(0, 4): b"\1"}


def test_views_are_made_once_per_memory() -> None:
    worker = Worker("resnet")
    worker.compute(1, [0, 1])
    memory = dict(worker.memory)
    made = worker.accumulator._views_of(memory[Node(0, 2)])
    worker.accumulator.forget()  # the step is over
    worker.memory = memory
    worker.accumulator.begin(2, [Node(0, 2)], worker.buffer)
    worker.lane(1, 0)
    worker.lane(1, 1)
    assert worker.accumulator._views_of(memory[Node(0, 2)]) is made
    worker.accumulator.begin(12, [Node(0, 1)], worker.buffer)
    assert not worker.accumulator._views
