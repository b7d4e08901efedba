"""What comes before a change of the state, and what a change of members does to a checkpoint in progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from everstep.base.plan import Member, Plan, Seat
from everstep.protocol.driver import operations as do
from everstep.train.heal import StageGradient
from everstep.train.updates import Updates


class Recorder:
    """Remembers the names of what was called, in a list that several share."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: self._calls.append(f"{self._name}.{name}")


def test_a_step_is_passed_on_before_all_who_read_the_state_are_waited_for() -> None:
    calls: list[str] = []
    view: Any = SimpleNamespace(stages={}, me=0)
    parts: list[Any] = [Recorder(calls, name) for name in ("donor", "keeper", "saver", "loop", "dealing")]
    Updates(view, *parts).before(4, {}, {})
    assert calls == ["donor.feed", "donor.busy_snapshot", "keeper.stand_still", "saver.before_update"]


def test_gradients_of_stages_that_were_reduced_in_the_generation_before_are_kept() -> None:
    """A member that takes over a stage in between reduces that one alone."""
    reduced = StageGradient(MagicMock(), {})
    view: Any = MagicMock(me=0, stages={0: MagicMock(), 1: MagicMock()})
    updates = Updates(view, *[MagicMock() for _ in range(5)])
    updates._reduced[4] = 2, {0: reduced}
    members = (Member(0, 0, "here"),)
    seats = (Seat(0, 1, "active", (0,)),)
    plan = Plan(3, "because", members, seats, 1, stages=2)
    with patch("everstep.train.updates.exchange_ties", return_value={}), patch("everstep.train.updates.AgreePayload"):
        updates.reduce(do.Reduce(1, 3, plan, 4, False))
    generation, gradients = updates._reduced[4]
    assert generation == 3 and sorted(gradients) == [0, 1] and gradients[0] is reduced


@pytest.mark.parametrize(("me", "generation", "said"), [(0, 1, True), (1, 1, False), (0, 2, False)])
def test_what_is_not_divided_is_told_by_one_at_the_start(me: int, generation: int, said: bool) -> None:
    replica = MagicMock()
    replica.apply.return_value = {"slow_offload": "", "undivided": "little is divided"}
    plan = Plan(
        1, "", (Member(0, 0, "a"), Member(1, 0, "a")), (Seat(0, 0, "active", (0,)), Seat(1, 0, "active", ())), 1
    )
    view: Any = MagicMock(me=me, stages={0: replica}, plan=plan, is_main=False)
    outcome: Any = MagicMock(step=1, nonfinite=MagicMock(words=""))
    Updates(view, *[MagicMock() for _ in range(5)]).apply(outcome, {}, {0: MagicMock()}, generation)
    told = [call.kwargs["reason"] for call in view.publisher.emit.call_args_list]
    assert told == ["little is divided"] * said
