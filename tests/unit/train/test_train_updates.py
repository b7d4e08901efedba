"""What comes before a change of the state, and what a change of members does to a checkpoint in progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.config_keys import CheckpointConfig
from everstep.base.plan import Member, Plan, Seat
from everstep.train.saving import Saver
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
    parts: list[Any] = [Recorder(calls, name) for name in ("transport", "donor", "keeper", "saver")]
    Updates(view, *parts).before(4, {}, {})
    assert calls == ["donor.feed", "donor.busy_snapshot", "keeper.stand_still", "saver.before_update"]


def plan(generation: int, *members: Member, leader: int | None = None) -> Plan:
    seats = tuple(Seat(m.worker_id, 0, "standby", ()) for m in members)
    return Plan(generation, "because", members, seats, 2, leaders=(leader,))


FIRST = plan(1, Member(0, 0, "h"), Member(1, 0, "h"))


@pytest.mark.parametrize(
    ("later", "ended"),
    [
        (plan(2, Member(0, 0, "h"), Member(1, 0, "h"), Member(2, 0, "h")), []),
        (plan(2, Member(0, 0, "h")), ["failure_seen", "before_update", "regroup"]),
        (plan(2, Member(0, 0, "h"), Member(1, 1, "h")), ["failure_seen", "before_update", "regroup"]),
        (plan(2, Member(0, 0, "h"), Member(1, 0, "h"), leader=1), ["before_update", "regroup"]),
    ],
)
def test_a_checkpoint_goes_on_only_if_its_writers_and_its_main_are_all_there(later: Plan, ended: list[str]) -> None:
    calls: list[str] = []
    link = SimpleNamespace(run_dir=None, task="")
    view: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=CheckpointConfig()), link=link)
    saver = Saver(view, None, None, "")  # type: ignore[arg-type]
    saver._checkpointer, saver._plan = Recorder(calls, "it"), FIRST  # type: ignore[assignment]
    saver.regroup(later)
    assert calls == [f"it.{name}" for name in ended]
    saver.regroup(plan(3))
    assert calls == [f"it.{name}" for name in ended] or not ended, "it ends once"
