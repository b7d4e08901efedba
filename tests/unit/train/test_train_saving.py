"""The checkpoint before the end, whose generation may be over before it is complete; checkpoints to go on from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.errors import CollectiveAborted, ConfigError, StoreError
from everstep.base.extents import WHOLE
from everstep.base.plan import Member, Plan, Seat
from everstep.protocol.driver import operations as do
from everstep.protocol.settling import settle
from everstep.protocol.step_types import Holding, Key
from everstep.train.executor import Unusable
from everstep.train.saving import LastCheckpoint, Restorer
from everstep.train.view import Stages

PLAN: Any = None


class There:
    """A saver that takes nothing. complete: whether the checkpoint is there."""

    checkpointer = None

    def __init__(self, complete: bool) -> None:
        self.complete = complete

    def has(self, number: int) -> bool:
        return self.complete

    def where(self, number: int) -> str:
        return f"step {number}"


def last(complete: bool, *, over: bool) -> LastCheckpoint:
    view: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(grace_s=0.0)),
        cutter=SimpleNamespace(over=lambda generation: over),
        link=SimpleNamespace(row=SimpleNamespace(end_asked=True)),
        is_main=False,
        tick=lambda: None,
    )
    saver: Any = There(complete)
    return LastCheckpoint(view, saver)


def test_one_that_is_cut_off_has_not_failed_but_is_taken_again() -> None:
    """Else the coordinator that is back hears that it could not be completed, and ends the job without it."""
    with pytest.raises(CollectiveAborted):
        last(False, over=True).save(do.SaveLast(op=1, generation=4, plan=PLAN, step=7, save=None))
    assert last(False, over=False).save(do.SaveLast(op=1, generation=4, plan=PLAN, step=7, save=None)) == ""
    assert last(True, over=True).save(do.SaveLast(op=1, generation=4, plan=PLAN, step=7, save=None)) == "step 7"


def test_who_lingers_follows_a_newer_plan() -> None:
    with pytest.raises(CollectiveAborted):
        last(True, over=True).linger(do.Linger(op=1, generation=4))
    last(True, over=False).linger(do.Linger(op=1, generation=4))


class Reader:
    """A worker, with the checkpoints that it can read; of some it finds out only when it reads the data."""

    def __init__(self, me: int, steps: range, bad: range = range(0), stages: int = 2) -> None:
        self.me, self.steps, self.bad, self.unreadable = me, steps, bad, None
        self.view: Any = SimpleNamespace(
            me=me,
            step=0,
            stages=Stages(stages, lambda stage: None),  # type: ignore[arg-type, return-value]
            config=SimpleNamespace(quorum_wait_s=0.0),
            link=SimpleNamespace(job={}),
            driver=SimpleNamespace(machine=SimpleNamespace(me=SimpleNamespace(incarnation=0))),
            tick=lambda: None,
            is_main=False,
        )
        self.life()

    def life(self) -> None:
        checkpointer: Any = self
        self.refused: set[int] = set()
        self.view.step = 0
        self.restorer = Restorer(self.view, checkpointer)

    def restorable(self, most: int, **more: Any) -> tuple[int, ...]:
        return tuple(step for step in self.steps if step not in self.refused)[-most:]

    def load(self, step: int, states: Any, **more: Any) -> Any:
        if step in self.bad:
            self.refused.add(step)
            raise StoreError(f"step {step}: Input/output error")

    def go(self, step: int) -> bool:
        """Take the state of a step; whether that could be done."""
        try:
            if step:
                self.restorer.restore(step, ())
                self.view.step = step
            else:
                self.restorer.refuse_to_start_over()
        except Unusable as error:
            assert not error.torn
            return False
        return True


PAIR = Plan(
    3, "", (Member(0, 0, "h"), Member(1, 0, "h")), (Seat(0, 0, "active", (0,)), Seat(1, 1, "active", (0,))), 1, stages=2
)


def target(*readers: Reader) -> int:
    disk = {one.me: one.restorer.restorable(None) for one in readers}
    return settle(PAIR, {i: Holding(Key(0, 0), {}, 0, "", {i: WHOLE}, disk=of) for i, of in disk.items()}).target.step


@pytest.mark.parametrize("lost", [0, 3])
def test_members_of_which_one_cannot_read_the_newest_agree_on_an_older_one(lost: int) -> None:
    """Also if the one that can read them begins another life meanwhile, which does not know what the others refused."""
    readers, tried = [Reader(0, range(2, 13), bad=range(7, 13)), Reader(1, range(2, 13))], []
    while True:
        if lost and len(tried) == lost:
            readers[1].life()
        tried.append(target(*readers))
        done = [one.go(tried[-1]) for one in readers]
        if all(done):
            break
    assert tried[-1] == 6 and (0 in tried) == bool(lost), tried


def test_the_job_does_not_start_over_where_a_member_can_read_a_checkpoint() -> None:
    readers = [Reader(0, range(0)), Reader(1, range(3, 5))]
    for _ in range(6):
        assert target(*readers) == 0 and readers[0].go(0) and not readers[1].go(0)
    assert target(*readers) == 0
    with pytest.raises(ConfigError, match=r"worker 1 can read the checkpoint of step 4.*start over with --fresh"):
        readers[1].go(0)
    unsplit = Reader(1, range(3, 5), stages=1)
    unsplit.restorer.restorable(None)
    with pytest.raises(ConfigError, match="--fresh"):
        unsplit.go(0)
    fresh = Reader(1, range(0))
    assert fresh.restorer.restorable(None) == () and fresh.go(0)


def test_few_are_stated_again_once_training_has_gone_on() -> None:
    reader = Reader(0, range(1, 99))
    assert [len(reader.restorer.restorable(None)) for _ in range(7)] == [2, 4, 8, 16, 32, 64, 64]
    assert reader.go(9) and len(reader.restorer.restorable(None)) == 64
    reader.view.step = 10
    assert [len(reader.restorer.restorable(None)) for _ in range(2)] == [2, 2]
