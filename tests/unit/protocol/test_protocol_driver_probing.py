"""What follows from lanes that several members have computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from everstep.base.plan import Plan
from everstep.placement.probes import ProbeRule
from everstep.protocol.driver.probing import Probing
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.step_types import Holding, Key

NEW = Holding(Key(0, 0), {}, 0)
OLD = replace(NEW, proven=True)


def outcome(step: int, said: dict[int, dict[int, str]], workers: tuple[int, ...] = (0, 1, 2)) -> StepOutcome:
    computed = dict(enumerate(workers))
    return StepOutcome(step, (), computed, 0.0, 1.0, 0.0, {}, {}, probes=said)


def probing(*holdings: Holding, **more: Any) -> Probing:
    found = Probing(ProbeRule(every=10, joins=True), **more)
    found.entered(dict(enumerate(holdings)))
    return found


def test_a_new_member_that_differs_is_the_odd_one_whatever_the_others_are() -> None:
    found = probing(OLD, NEW).judge(outcome(7, {3: {0: "s a", 1: "s b"}}), 0)
    assert found is not None and (found.odd, found.lane, found.workers) == ({1}, 3, (0, 1))
    assert "worker 1 computes another gradient from the same samples in lane 3 of step 7" in found.reason
    assert "worker 0: a; worker 1: b" in found.reason


def test_other_samples_are_called_that() -> None:
    found = probing(OLD, NEW).judge(outcome(7, {3: {0: "s a", 1: "t b"}}), 0)
    assert found is not None and "worker 1 gets other samples" in found.reason and "worker 1: t" in found.reason


def test_where_all_are_new_most_are_right_and_one_against_one_is_nobody() -> None:
    found = probing(NEW, NEW, NEW).judge(outcome(1, {0: {0: "s b", 1: "s a", 2: "s a"}}), 0)
    assert found is not None and found.odd == {0}
    kept, odd = probing(NEW, NEW), outcome(1, {0: {0: "s b", 1: "s a"}})
    found, again = kept.judge(odd, 0), kept.judge(odd, 0)
    assert found is not None and (found.odd, found.ends) == (frozenset(), False) and "once more" in found.reason
    assert again is not None and again.ends and "nobody knows which" in again.reason


@pytest.mark.parametrize(
    ("second", "odd", "ends"),
    [
        ({0: "s b", 1: "s a", 2: "s a"}, {0}, False),
        ({0: "s b", 1: "s c"}, {1}, False),
        ({0: "s c", 1: "s d"}, set(), True),
        ({0: "s b", 1: "s a"}, set(), True),
        ({0: "s a", 1: "s a"}, None, False),
    ],
)
def test_the_second_look_knows_more(second: dict[int, str], odd: set[int] | None, ends: bool) -> None:
    kept, step = probing(OLD, OLD, OLD), Plan(1, "", (), (), 3)
    assert kept.judge(outcome(10, {2: {0: "s b", 1: "s a"}}), 0) is not None
    assert kept.owed(10, step, 2) == (2,) and kept.owed(11, step, 2) == ()
    found = kept.judge(outcome(10, {2: second}), 0)
    assert (found is None) == (odd is None)
    assert found is None or (found.odd, found.ends) == (odd, ends)
    assert kept.owed(10, step, 2) == ()


def test_one_against_one_of_those_that_were_alike_goes_back_behind_the_last_probe() -> None:
    kept = probing(OLD, OLD, begins_after=5)
    assert kept.judge(outcome(10, {0: {0: "s a", 1: "s a"}}), 0) is None
    assert kept.judge(outcome(14, {}), 0) is None
    found = kept.judge(outcome(20, {1: {0: "s c", 1: "s d"}}), 0)
    assert found is not None and (found.odd, found.sound) == (frozenset(), 10)
    assert kept.judge(outcome(20, {1: {0: "s c", 1: "s d"}}), 0) == replace(found, ends=True, reason=ANY)


def test_who_was_seen_to_be_alike_is_new_no_more() -> None:
    kept = probing(OLD, NEW, NEW)
    assert kept.judge(outcome(7, {3: {0: "s a", 1: "s a"}}), 1) is None and kept.proven
    found = kept.judge(outcome(8, {3: {0: "s a", 1: "s b"}}), 1)
    assert found is not None and not found.odd


def test_a_member_alone_is_what_others_are_compared_with() -> None:
    kept = probing(NEW)
    assert not kept.proven
    assert kept.judge(outcome(3, {}, (0, 0, 0)), 0) is None and kept.proven
