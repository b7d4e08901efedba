"""What an event log says has been told: which steps, and up to which of them all have."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.observe.told import Telling


def telling(*events: dict[str, Any] | int) -> Telling:
    """A number: the event of that step."""
    found = Telling()
    for event in events:
        found.take({"kind": "step_committed", "step": event} if isinstance(event, int) else event)
    return found


def started(step: int) -> dict[str, Any]:
    return {"kind": "job_started", "step": step}


def fallback(step: int, source: str) -> dict[str, Any]:
    return {"kind": "fallback", "step": step, "source": source}


@pytest.mark.parametrize(
    ("events", "through"),
    [
        ([], 0),
        ([1, 2, 3], 3),
        ([2, 3], 0),
        ([1, 3], 1),
        ([1, 3, 2], 3),
        ([1, 2, 3, started(0)], 0),
        ([1, 2, 3, started(0), 1], 1),
        ([1, 2, started(5)], 4),
        ([1, 2, started(5), 6, 7], 7),
        ([1, 2, started(5), 5, 6], 6),
        ([1, 2, started(5), 7], 4),
        ([1, 2, 4, 5, fallback(4, "checkpoint"), 6], 6),
        ([1, 2, 4, 5, fallback(4, "copy"), 6], 2),
    ],
)
def test_up_to_which_step_all_have_been_told(events: list[Any], through: int) -> None:
    """Those before the step that a job goes on from, with nothing but a checkpoint, nobody knows any more."""
    assert telling(*events).through == through


def test_what_is_taken_as_told_is_not_new() -> None:
    found = telling(7, 8)
    found.assume(5)
    assert [n for n in range(1, 10) if found.is_new({"kind": "step_committed", "step": n})] == [6, 9]
    assert found.through == 5


def test_losses_of_steps_that_were_told_and_are_void_are_forgotten() -> None:
    def losses(*events: dict[str, Any]) -> dict[int, float]:
        telling = Telling()
        for k in (1, 2, 3):
            telling.take({"kind": "step_committed", "step": k, "loss": k / 2})
        telling.take({"kind": "step_committed", "step": 4, "loss": None})
        for event in events:
            telling.take(event)
        return dict(telling.losses)

    assert losses() == {1: 0.5, 2: 1.0, 3: 1.5}
    assert losses({"kind": "fallback", "step": 2, "cause": "killed", "source": "checkpoint"}) == losses()
    assert losses({"kind": "fallback", "step": 2, "cause": "corrupt", "source": "copy"}) == {1: 0.5, 2: 1.0}
    assert losses({"kind": "fallback", "step": None, "cause": "nondeterministic"}) == {}
    assert losses({"kind": "job_started", "step": 2}) == losses()
    assert losses({"kind": "job_started", "step": 0}) == {}
