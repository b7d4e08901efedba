"""The checkpoint before the end, whose generation may be over before it is complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.errors import CollectiveAborted
from everstep.protocol.driver import operations as do
from everstep.train.saving import LastCheckpoint

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
