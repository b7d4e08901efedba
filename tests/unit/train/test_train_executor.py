"""Between the application's asks, other threads' news and the driver's answers."""

from __future__ import annotations

from typing import Any, cast

from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.operations import SaveEnded
from everstep.protocol.step_types import LaneDone
from everstep.train.executor import Cutter, Executor

SAVED = wire.Saved(worker_id=0, incarnation=0, step=6, ok=True, where="there", reason="")


class Telling:
    """A driver that tells of a checkpoint as soon as it hears of its end."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def handle(self, now_ns: int, event: object) -> list[do.Effect]:
        self.heard.append(event)
        return [do.Tell(SAVED)] if isinstance(event, SaveEnded) else []


def test_what_is_to_be_told_does_not_wait_for_the_end_of_a_computation() -> None:
    driver, told = Telling(), list[Any]()
    executor = Executor(cast(Driver, driver), Cutter(lambda generation: None), lambda: None)
    executor.install({do.Tell: lambda effect: told.append(effect.message)})
    ended, lane = SaveEnded(step=6, ok=True, reason="", where="there"), LaneDone(7, 0, 1)
    executor.note(ended)
    executor.lane_done(lane.step, lane.stage, lane.lane)
    assert driver.heard == [ended, lane] and told == [SAVED]
