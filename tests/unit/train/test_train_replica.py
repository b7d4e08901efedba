"""A worker's lanes within one step, when plans give lanes and take them away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from everstep.base.config import load_config
from everstep.base.errors import InvariantViolation, TaskError
from everstep.base.ports import Node, Reduced
from everstep.protocol.driver.nonfinite import Nonfinite
from everstep.protocol.driver.records import SETTING_BYTES, SETTINGS, StepOutcome
from everstep.protocol.step_types import Discard
from everstep.train.replica import StageReplica, how_divided
from everstep.train.stage import Parts, StageSpec
from everstep.train.updates import Updates

DATA = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))


class Memory:
    """One flat tensor per node, as a transport would give."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.sums: dict[Node, torch.Tensor] = {}

    def __call__(self, node: Node) -> torch.Tensor:
        return self.sums.setdefault(node, torch.zeros(self.numel))


def replica() -> StageReplica:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = load_config([("test", {"lanes": 8, "micro_batch": 4, "steps": 3})])
    return StageReplica(Parts(model, optimizer, None, [model]), config, torch.device("cpu"))


def compute(worker: StageReplica, lanes: tuple[int, ...]) -> None:
    for lane in lanes:
        worker.loop.enter(1, lane)
        worker.loop.backward(worker.parts.model(DATA[lane]).square().mean(), None, 1.0)
        worker.loop.leave(lane, 4, 0)


def test_what_is_held_is_not_asked_for_again() -> None:
    worker = replica()
    memory = Memory(worker.layout.numel)
    worker.lanes.begin(1, (0, 1), memory)
    compute(worker, worker.lanes.lacking((0, 1)))
    worker.lanes.begin(1, (0, 1, 2, 3), memory)
    assert worker.lanes.lacking((0, 1, 2, 3)) == (2, 3)
    compute(worker, (2, 3))
    assert sorted(worker.lanes.presence(1, (0, 1, 2, 3))) == [Node(0, 2), Node(2, 4)]


def test_a_sum_with_lanes_that_went_to_another_worker_is_made_anew_with_the_same_bits() -> None:
    fresh, worker = replica(), replica()
    expected, memory = Memory(fresh.layout.numel), Memory(worker.layout.numel)
    fresh.lanes.begin(1, (0, 1), expected)
    compute(fresh, (0, 1))
    worker.lanes.begin(1, (0, 1, 2, 3), memory)
    compute(worker, (0, 1, 2, 3))
    assert list(worker.lanes.presence(1, (0, 1, 2, 3))) == [Node(0, 4)]
    worker.lanes.begin(1, (0, 1), memory)
    assert worker.lanes.lacking((0, 1)) == (0, 1)
    compute(worker, (0, 1))
    assert list(worker.lanes.presence(1, (0, 1))) == [Node(0, 2)]
    assert torch.equal(memory.sums[Node(0, 2)], expected.sums[Node(0, 2)])


def test_a_step_that_is_undone_begins_anew() -> None:
    """Its first lane may be computed twice again, as at a limb, which forgets all of it."""
    worker = replica()
    memory = Memory(worker.layout.numel)
    for _ in range(2):
        worker.lanes.begin(1, (0,), memory)
        assert worker.loop.probes(due=True)
        compute(worker, (0,))
        view: Any = SimpleNamespace(stages={0: worker})
        Updates(view, *[MagicMock() for _ in range(5)]).discard(Discard(1, undone=True))


def test_a_lane_on_trial_leaves_nothing_behind() -> None:
    fresh, worker = replica(), replica()
    expected, memory = Memory(fresh.layout.numel), Memory(worker.layout.numel)
    fresh.lanes.begin(1, (0, 1), expected)
    compute(fresh, (0, 1))
    worker.lanes.begin(1, (0, 1), memory)
    worker.loop.enter(1, 0)
    worker.loop.backward(worker.parts.model(DATA[0]).square().mean(), None, 1.0)
    worker.loop.again()
    compute(worker, (0, 1))
    assert torch.equal(expected.sums[Node(0, 2)], memory.sums[Node(0, 2)])


def test_the_loop_calls_backward_for_each_lane_and_as_often_as_in_the_first() -> None:
    worker = replica()
    worker.lanes.begin(1, (0, 1), Memory(worker.layout.numel))
    worker.loop.enter(1, 0)
    with pytest.raises(TaskError, match="taken without"):
        worker.loop.leave(0, 4, 0)
    worker.loop.enter(1, 0)
    worker.loop.backward(worker.parts.model(DATA[0]).square().mean(), None, 1.0)
    worker.loop.leave(0, 4, 0)
    worker.loop.enter(1, 1)
    worker.loop.backward(worker.parts.model(DATA[1]).square().mean(), None, 1.0)
    with pytest.raises(TaskError, match="called a second time for one batch in step 1, and never before"):
        worker.loop.backward(worker.parts.model(DATA[1]).square().mean(), None, 1.0)


def test_lanes_of_a_split_model_are_not_for_the_loop() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = load_config([("test", {"lanes": 8, "micro_batch": 4, "steps": 3, "stages": 2})])
    spec = StageSpec(0, 2, ((0, 1), (1, 2)))
    stage = StageReplica(Parts(model, optimizer, None, list(model)), config, torch.device("cpu"), spec)
    with pytest.raises(InvariantViolation, match="go through its parts"):
        _ = stage.loop


def test_a_stage_of_which_nothing_is_trained_says_nothing_of_how_its_optimizer_divides() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    for trained, said in ((True, "elements"), (False, None)):
        model.requires_grad_(trained)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = load_config([("test", {"lanes": 8, "micro_batch": 4, "steps": 3, "zero.stage": 1})])
        stage = StageReplica(Parts(model, optimizer, None, [model]), config, torch.device("cpu"))
        assert how_divided(stage) == said


def test_members_say_which_running_statistics_their_lanes_start_from() -> None:
    workers = [replica() for _ in range(3)]
    workers[2].parts.model[1].running_mean.data.add_(0.5)
    for worker in workers:
        assert worker.how_set() == b"", "the loop has not begun"
        worker.state.settings.begin()
        worker.lanes.begin(1, (0,), Memory(worker.layout.numel))
        compute(worker, (0,))
    said = [worker.how_set() for worker in workers]
    assert said[0] == said[1] and len(said[0]) == len(SETTINGS) * SETTING_BYTES
    assert said[0][:-SETTING_BYTES] == said[2][:-SETTING_BYTES] and said[0] != said[2]


def test_parts_of_an_update_before_say_nothing_of_a_step_without_one() -> None:
    """Whoever asks which parts were updated would hold the others for old."""
    worker, parts = replica(), SimpleNamespace()
    nonfinite = Nonfinite("the loss is nan", (1,), 1, left_out=True)
    outcome = StepOutcome(4, (), {}, 1.0, 1.0, 1.0, {}, {}, nonfinite=nonfinite)
    worker.update.dealt = parts  # type: ignore[assignment]
    assert worker.apply(outcome, Reduced(4, (), b"", ()), 1)["applied"] is False and worker.update.dealt is None
    worker.update.dealt = parts  # type: ignore[assignment]
    worker.abandon()
    assert worker.update.dealt is None
