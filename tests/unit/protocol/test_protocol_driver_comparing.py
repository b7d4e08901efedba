"""What members' statements of their states show: who differs, in what, since when, and whether going back helps."""

from __future__ import annotations

from collections.abc import Collection

from driver_harness import plan, section

from everstep.base.plan import Plan
from everstep.protocol.driver.comparing import PART, WHOLE, Comparing, Disagreement, Statements, named
from everstep.protocol.step_types import Holding, Key

PLAN = plan(1, (0, 1, 2))
Digests = dict[int, str]


def before(
    step: int, digests: dict[int, Digests], ties: dict[str, dict[tuple[int, int], str]] | None = None
) -> Statements:
    return Statements(step - 1, f"before step {step}", digests, ties or {})


def entered(fresh: Collection[int] = (), copy: Collection[int] = (), **config: object) -> Comparing:
    """In a generation in which these were healed before, or copy now."""
    comparing = Comparing(0, 0, **config)  # type: ignore[arg-type]
    settle(comparing, 4, fresh, copy)
    return comparing


def settle(
    comparing: Comparing, at: int, fresh: Collection[int] = (), copy: Collection[int] = (), *, back: bool = False
) -> None:
    """A generation in which these were healed before, or copy now, goes on from a step."""
    holdings = {i: Holding(Key(at, 0), {}, 0, fresh=i in fresh) for i in range(4)}
    comparing.entered(holdings, copy, at, back=back)


def were_alike(comparing: Comparing, said: Statements) -> None:
    assert comparing.judge(said) is None
    comparing.alike(said)


def judged(digests: Digests, *fresh: int, stage: int = 0) -> Disagreement:
    found = entered(fresh).judge(before(40, {stage: digests}))
    assert found is not None
    return found


def test_nothing_differs() -> None:
    said = before(40, {0: {0: "a", 1: "a"}, 1: {2: "b"}}, {"w": {(0, 0): "c", (1, 2): "c"}})
    assert entered([1]).judge(said) is None
    assert entered().judge(before(40, {})) is None


def test_a_minority_is_outvoted_and_named() -> None:
    found = judged({0: "aaaa", 1: "bbbb", 2: "aaaa"})
    assert found.outvoted == {1} and not found.drift
    assert "before step 40 (aaaa at worker 0 and 2, bbbb at worker 1): worker 1 deviates" in found.reason


def test_of_two_copies_none_is_outvoted() -> None:
    for digests in ({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c"}, {0: "a", 1: "b", 2: "a", 3: "b"}):
        found = judged(digests, stage=1)
        assert (found.outvoted, found.drift) == (frozenset(), False)
        assert "stage 1" in found.reason and "no copy is outvoted" in found.reason


def test_copies_of_a_tied_parameter() -> None:
    ties = {"the tied parameter embedding.weight": {(0, 0): "a", (0, 1): "a", (1, 2): "b"}}
    found = entered().judge(before(40, {0: {0: "x", 1: "x"}}, ties))
    assert found is not None and found.outvoted == {2} and "tied parameter embedding.weight" in found.reason
    assert "2 (stage 1) deviates" in found.reason


def test_a_worker_that_was_healed_and_differs_shows_that_the_script_does_it() -> None:
    found = judged({0: "a", 1: "a", 2: "b"}, 2)
    assert found.drift and not found.outvoted
    assert "worker 2 was healed or resumed since all were alike" in found.reason and "run.is_main" in found.reason


def test_all_that_were_healed_and_differ_are_named() -> None:
    found = judged({0: "a", 1: "b", 2: "b"}, 1, 2)
    assert found.drift and "; workers 1 and 2 were healed or resumed since all were alike" in found.reason


def test_one_of_those_that_stayed_may_be_wrong_and_those_that_were_healed_from_it_with_it() -> None:
    found = judged({0: "a", 1: "a", 2: "b", 3: "b"}, 3)
    assert not found.drift and found.outvoted == {2, 3}, "more than half of those that stayed, not of all"
    alone = judged({0: "a", 1: "b", 2: "b"}, 2)
    assert not alone.drift and not alone.outvoted


def test_where_all_were_resumed_it_is_the_script() -> None:
    assert judged({0: "a", 1: "b"}, 0, 1).drift


def test_who_was_compared_is_as_good_as_one_that_stayed() -> None:
    comparing = entered(copy=[1])
    assert comparing.due(40, PLAN), "the first step of a worker that was healed"
    were_alike(comparing, before(40, {0: {0: "a", 1: "a", 2: "a"}}))
    assert not comparing.due(41, PLAN) and comparing.due(40, PLAN), "what is done again is compared again"
    found = comparing.judge(before(60, {0: {0: "a", 1: "b", 2: "a"}}))
    assert found is not None and not found.drift and found.outvoted == {1}


def test_a_worker_alone_compares_itself_with_what_was_before_only() -> None:
    comparing = entered([0])
    alone = Plan(1, "", PLAN.members[:1], (), 4)
    assert not comparing.due(40, alone)
    were_alike(comparing, before(40, {0: {0: "a"}}))
    assert comparing.due(40, alone)
    found = comparing.judge(before(40, {0: {0: "b"}}))
    assert found is not None and found.drift and "expected a" in found.reason


def test_what_was_agreed_tells_who_of_two_is_right() -> None:
    comparing = entered()
    were_alike(comparing, before(40, {0: {0: "a", 1: "a"}}))
    found = comparing.judge(before(40, {0: {0: "a", 1: "b"}}))
    assert found is not None and found.outvoted == {1} and not found.drift


def test_plans_tell_what_was_agreed_to_those_who_were_not_there() -> None:
    comparing = entered()
    comparing.learn(told((39, 0, "a"), (39, 1, "b")))
    settle(comparing, 40)
    assert comparing.proven(40) == 39 and comparing.proven(38) == 0
    found = comparing.judge(before(40, {0: {0: "a"}, 1: {1: "c", 2: "c"}}))
    assert found is not None and found.drift and "stage 1" in found.reason


def told(*alike: tuple[int, int, str]) -> Plan:
    return Plan(2, "", PLAN.members, (), 4, alike=alike)


def test_a_step_that_is_done_again_is_not_sound_before_it_has_come_to_the_same_again() -> None:
    """A whole pool was lost after it; then a bit flips, and the copies of what was done again are spoilt."""
    comparing = entered()
    for step in (2, 3, 5):
        were_alike(comparing, before(step + 1, {0: {0: "a", 1: "a"}}))
    settle(comparing, 2, copy=[0, 1], back=True)
    assert comparing.proven(5) == 2, "the state of step 2 is the one that was compared"
    comparing.learn(told((5, 0, "a")))
    settle(comparing, 5)
    assert comparing.proven(5) == 2, "a plan tells nothing new of it"
    found = comparing.judge(before(6, {0: {0: "b", 1: "c"}}))
    assert found is not None and not found.drift and comparing.proven(5) == 2
    settle(comparing, 2, back=True)
    were_alike(comparing, before(6, {0: {0: "a", 1: "a"}}))
    assert comparing.proven(5) == 5 and comparing.due(6, PLAN) and comparing.due(4, PLAN)


def test_what_a_plan_tells_of_later_steps_is_to_be_compared_and_proves_nothing() -> None:
    comparing = Comparing(0, 0)
    comparing.learn(told((1, 0, "a"), (3, 0, "b"), (5, 0, "c")))
    settle(comparing, 3)
    assert comparing.proven(9) == 1, "those who are at step 3 may have come back to it and not compared it yet"
    assert all(comparing.due(step + 1, PLAN) for step in (1, 3, 5))
    first = Comparing(0, 0)
    first.learn(told((1, 0, "a"), (3, 0, "b"), (5, 0, "c")))
    settle(first, 3, back=True)
    assert first.proven(9) == 3


def test_what_some_alone_compare_is_not_compared() -> None:
    """They know what the step has to come to; the only worker of a pool does not, and says nothing of its state."""
    for spoilt in ({0: {0: "a"}, 1: {}}, {0: {0: "a"}}):
        comparing = entered([1])
        said = Statements(3, "before step 4", spoilt, whole=False)
        were_alike(comparing, said)
        assert comparing.proven(3) == 0
        assert comparing.due(5, PLAN), "worker 1 was not compared since it was healed"
    comparing = entered()
    were_alike(comparing, before(4, {0: {0: "a"}, 1: {1: "b"}}))
    were_alike(comparing, Statements(3, "before step 4", {0: {0: "a"}, 1: {}}, whole=False))
    assert comparing.told(3) == {0: "a", 1: "b"}


def test_where_steps_do_not_repeat_nothing_is_compared_with_before() -> None:
    comparing = entered(repeats=False)
    were_alike(comparing, before(40, {0: {0: "a", 1: "a"}}))
    assert not comparing.due(40, PLAN) and comparing.told(39) == {}
    assert comparing.judge(before(40, {0: {0: "b", 1: "b"}})) is None


def test_a_checkpoint_that_counts_is_sound_and_the_end_is_compared() -> None:
    comparing = Comparing(10, 3)
    assert [comparing.proven(n) for n in (0, 9, 10, 25)] == [3, 3, 9, 19]
    comparing.saved(22)
    assert comparing.proven(25) == 22 and comparing.proven(21) == 19
    said = {w: [section(PLAN, w, 0, digest)] for w, digest in enumerate("aab")}
    found = comparing.judge(Statements.last(25, said))
    assert found is not None and found.outvoted == {2} and "after step 25, the last" in found.reason


def test_what_the_records_ask_for_is_done_once() -> None:
    comparing = entered()
    comparing.ask(41)
    assert comparing.due(41, PLAN) and not comparing.due(42, PLAN)


def digest(whole: str, *parts: str) -> str:
    return whole * WHOLE + "".join(part * PART for part in parts)


def test_the_parts_that_differ_are_named() -> None:
    names = ("weight", "bias", "groups/0")
    assert named([digest("a", "1", "2", "3"), digest("b", "1", "4", "3")], names) == ", in bias"
    assert named(["a", "b"], names) == "" and named([digest("a", "1")] * 2, names) == ""
    many = tuple("abcde")
    assert named([digest("a", *"11111"), digest("b", *"22222")], many) == ", in a, b, c and 2 more"
    comparing = entered(names=lambda stage: names)
    found = comparing.judge(before(5, {0: {0: digest("a", "1", "2", "3"), 1: digest("b", "1", "2", "4")}}))
    assert found is not None and "in groups/0: no copy" in found.reason


def test_parts_that_differ_without_the_whole_do_not_count() -> None:
    assert entered().judge(before(5, {0: {0: digest("a", "1"), 1: digest("a", "2")}})) is None


def test_where_nobody_is_outvoted_copies_are_compared_all_the_same() -> None:
    comparing = entered(votes=False)
    assert comparing.judge(before(5, {0: {0: "a", 1: "a", 2: "a"}})) is None
    found = comparing.judge(before(5, {0: {0: "a", 1: "a", 2: "b"}}))
    assert found is not None and not found.outvoted
