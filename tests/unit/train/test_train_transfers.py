"""What a worker still has after it has gone back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from everstep.base.extents import WHOLE
from everstep.base.plan import Member, Plan, Seat
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Key
from everstep.train.heal import ReceivedOffer
from everstep.train.transfers import Transfers
from everstep.train.view import Stages

PLAN = Plan(2, "because", (Member(0, 0, "host"),), (Seat(0, 1, "active", (0,)),), 1, stages=3)


class Built:
    """A stage as it was built."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.application: dict[str, Any] = {}

    def digest(self, number: int) -> str:
        return f"stage {self.stage}"

    def abandon(self) -> None:
        """Nothing of a step is under way."""


@pytest.mark.parametrize(("at", "left"), [(3, [1]), (0, [0, 1])])
def test_whoever_goes_back_to_another_step_keeps_no_stage_of_the_step_that_it_leaves(at: int, left: list[int]) -> None:
    """A plan that comes at step 0 takes a stage that is still there for an initial state."""
    stages: Any = Stages(3, Built)  # type: ignore[arg-type]
    stages.want((0, 1))
    before = stages[0]
    machine = SimpleNamespace(held={0: WHOLE}, position=Key(at, 0), step=at)
    view: Any = MagicMock(stages=stages, me=0)
    view.driver.machine, view.step = machine, at
    transfers = Transfers(view, MagicMock(), MagicMock(), MagicMock(), MagicMock(), MagicMock())
    assert transfers.restore(do.Restore(1, 2, PLAN, 0, {1: ()}, {}, (), {})).built == {1: "stage 1"}
    assert list(stages) == left
    stages.want((0,))
    assert (stages[0] is before) == (at == 0)


@pytest.mark.parametrize("first", [0, 1])
def test_of_offers_of_several_steps_the_loops_state_is_that_of_the_newest(first: int) -> None:
    older = ReceivedOffer(position=Key(4, 0), application=b"older", states={})
    newer = ReceivedOffer(position=Key(5, 0), application=b"newer", states={})
    loop, view = MagicMock(), MagicMock(stages={}, me=0)
    transfers = Transfers(view, MagicMock(), MagicMock(), MagicMock(), MagicMock(), loop)
    transfers._offers = [older, newer] if first == 0 else [newer, older]
    transfers.adopt(do.Adopt(1, 2, Key(5, 0), (0,), ()))
    assert [call.args for call in loop.take.call_args_list] == [(b"older", 4), (b"newer", 5)]
