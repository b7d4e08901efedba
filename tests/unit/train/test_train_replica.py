"""A worker's lanes within one step, when plans give lanes and take them away."""

from __future__ import annotations

import torch
from torch import nn

from everstep.base.config import load_config
from everstep.base.ports import Node
from everstep.train.parts import Parts
from everstep.train.replica import Replica, make_replica

DATA = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))


class Memory:
    """One flat tensor per node, as a transport would give."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.sums: dict[Node, torch.Tensor] = {}

    def __call__(self, node: Node) -> torch.Tensor:
        return self.sums.setdefault(node, torch.zeros(self.numel))


def replica() -> Replica:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = load_config([("test", {"lanes": 8, "micro_batch": 4, "steps": 3})])
    return make_replica(Parts(model, optimizer, None, [model]), config, torch.device("cpu"))


def compute(worker: Replica, lanes: tuple[int, ...]) -> None:
    for lane in lanes:
        worker.enter_lane(1, lane)
        worker.backward(worker.parts.model(DATA[lane]).square().mean(), None, 1.0)
        worker.leave_lane(lane, 4, 0)


def test_what_is_held_is_not_asked_for_again() -> None:
    worker = replica()
    memory = Memory(worker.layout.numel)
    worker.begin(1, (0, 1), memory)
    compute(worker, worker.lacking((0, 1)))
    worker.begin(1, (0, 1, 2, 3), memory)
    assert worker.lacking((0, 1, 2, 3)) == (2, 3)
    compute(worker, (2, 3))
    assert sorted(worker.presence(1, (0, 1, 2, 3))) == [Node(0, 2), Node(2, 4)]


def test_a_sum_with_lanes_that_went_to_another_worker_is_made_anew_with_the_same_bits() -> None:
    fresh, worker = replica(), replica()
    expected, memory = Memory(fresh.layout.numel), Memory(worker.layout.numel)
    fresh.begin(1, (0, 1), expected)
    compute(fresh, (0, 1))
    worker.begin(1, (0, 1, 2, 3), memory)
    compute(worker, (0, 1, 2, 3))
    assert list(worker.presence(1, (0, 1, 2, 3))) == [Node(0, 4)]
    worker.begin(1, (0, 1), memory)
    assert worker.lacking((0, 1)) == (0, 1)
    compute(worker, (0, 1))
    assert list(worker.presence(1, (0, 1))) == [Node(0, 2)]
    assert torch.equal(memory.sums[Node(0, 2)], expected.sums[Node(0, 2)])


def test_a_lane_on_trial_leaves_nothing_behind() -> None:
    fresh, worker = replica(), replica()
    expected, memory = Memory(fresh.layout.numel), Memory(worker.layout.numel)
    fresh.begin(1, (0, 1), expected)
    compute(fresh, (0, 1))
    worker.begin(1, (0, 1), memory)
    worker.enter_lane(1, 0)
    worker.backward(worker.parts.model(DATA[0]).square().mean(), None, 1.0)
    worker.lane_digest()
    worker.abandon_lane()
    compute(worker, (0, 1))
    assert torch.equal(expected.sums[Node(0, 2)], memory.sums[Node(0, 2)])
