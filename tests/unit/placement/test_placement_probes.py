"""Which lanes are computed by a second member, and by whom."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from everstep.base.plan import Member, Plan, Seat
from everstep.placement.probes import ProbeRule, Trial, alone, once_more, owed, probes, with_trials


def plan(*pools: Sequence[Sequence[int]], hosts: str = "") -> Plan:
    """By stage and worker, its lanes; each stage has workers of its own. hosts: a letter for each worker."""
    seats, count = [], 0
    for stage, pool in enumerate(pools):
        for lanes in pool:
            seats.append(Seat(count, stage, "active" if lanes else "standby", tuple(lanes)))
            count += 1
    members = tuple(Member(i, 0, (hosts or "a" * count)[i]) for i in range(count))
    return Plan(1, "", members, tuple(seats), sum(map(len, pools[0])), len(pools))


EIGHT = [[0, 1, 2], [3, 4, 5], [6, 7]]
JOINS = ProbeRule(joins=True)


def who(of: Plan, found: Collection[Trial]) -> dict[int, tuple[int, ...]]:
    """By lane, who computes it in the first stage: its owner first."""
    lanes = sorted({trial.lane for trial in found})
    return {n: (of.holder(0, n), *sorted({t.holders[0] for t in found if t.lane == n})) for n in lanes}


def test_who_is_new_computes_a_lane_of_one_who_is_not_on_another_host_if_there_is_one() -> None:
    one, apart = plan(EIGHT), plan(EIGHT, hosts="aba")
    assert who(one, probes(one, 4, JOINS, {2})) == {1: (0, 2)}
    assert who(apart, probes(apart, 4, JOINS, {2})) == {4: (1, 2)}
    assert who(one, probes(one, 4, JOINS, {0, 2})) == {4: (1, 0, 2)}
    assert probes(one, 4, JOINS, set()) == probes(one, 4, ProbeRule(), {2}) == ()
    assert [owed(probes(one, 4, JOINS, {2}), one, i) for i in range(3)] == [(1,), (), (1,)]


def test_where_all_are_new_the_rest_computes_a_lane_of_the_first() -> None:
    one = plan(EIGHT)
    assert who(one, probes(one, 1, JOINS, {0, 1, 2})) == {1: (0, 1, 2)}


@pytest.mark.parametrize("odd", [plan([[0, 1], []]), plan([[0, 1]])], ids=["standby", "one"])
def test_where_nobody_else_could_there_is_none(odd: Plan) -> None:
    assert probes(odd, 100, ProbeRule(every=100, share=1.0, joins=True), {0, 1, 2}) == ()


def test_every_so_many_steps_one_lane_goes_round() -> None:
    one, rule = plan(EIGHT), ProbeRule(every=10)
    found = [who(one, probes(one, step, rule, set())) for step in range(10, 260, 10)]
    assert all(len(of) == 1 for of in found) and not probes(one, 11, rule, set())
    assert {lane for of in found for lane in of} == set(range(8))
    assert all(len(of) == 2 and lane in EIGHT[of[0]] for one in found for lane, of in one.items())
    assert {of[1] for one in found for of in one.values()} >= {2}, "the one with the fewest lanes"


def test_the_share_is_that_of_all_lanes_and_the_same_for_all() -> None:
    one, rule = plan(EIGHT), ProbeRule(seed=3, share=0.25)
    found = [probes(one, step, rule, set()) for step in range(1, 501)]
    assert 0.2 < sum(map(len, found)) / 4000 < 0.3
    assert found == [probes(one, step, rule, set()) for step in range(1, 501)]
    assert len(probes(one, 7, ProbeRule(share=1.0), set())) == 8


CUT = plan([[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 2], [1, 3]])
"""Workers 0 and 1, 2 alone, 3 and 4."""


def test_of_a_split_model_each_new_member_computes_a_lane_of_one_that_is_not_new() -> None:
    assert probes(CUT, 5, JOINS, {1}) == (Trial(1, (1, 2, 3)),)
    assert probes(CUT, 5, JOINS, {1, 4}) == (Trial(1, (1, 2, 3)), Trial(2, (0, 2, 4)))
    for unproven in ({0, 1, 2, 3, 4}, {0, 3}, {1, 3}, {2}):
        trials = probes(CUT, 5, JOINS, unproven)
        for stage, pool in enumerate(((0, 1), (3, 4))):
            at, new = 2 * stage, unproven.intersection(pool)
            right = set(pool) - new or {pool[0]}
            pairs = {(CUT.holder(at, t.lane), t.holders[at]) for t in trials}
            assert all(any((by, one) in pairs for by in right) for one in new - right), (unproven, trials)
        assert all(t.holders[1] == 2 for t in trials)


def test_of_a_split_model_a_lane_goes_through_others_where_there_are_any() -> None:
    for step in range(10, 90, 10):
        (trial,) = probes(CUT, step, ProbeRule(every=10), set())
        assert all((CUT.holder(stage, trial.lane) == trial.holders[stage]) == (stage == 1) for stage in range(3))
    assert alone(CUT) == {1: 2}
    assert probes(plan([[0, 1]], [[0, 1]]), 10, ProbeRule(every=10), set()) == (Trial(1, (0, 1)),), "twice by each"


def test_in_doubt_all_compute_the_lane() -> None:
    assert who(plan(EIGHT), once_more(plan(EIGHT), 4)) == {4: (1, 0, 2)}
    wide = plan([[0], [1], [2]], [[0, 1, 2]])
    assert once_more(wide, 1) == (Trial(1, (0, 3)), Trial(1, (2, 3)))
    assert once_more(plan([[0, 1]]), 1) == (Trial(1, (0,)),)


def test_trials_are_lanes_beyond_those_of_the_plan() -> None:
    there = with_trials(CUT, [Trial(1, (1, 2, 3)), Trial(2, (0, 2, 4))])
    assert [there.holder(stage, 4) for stage in range(3)] == [1, 2, 3]
    assert [there.holder(stage, 5) for stage in range(3)] == [0, 2, 4]
    assert there.lanes == CUT.lanes and there.lanes_of(2, 1) == (0, 1, 2, 3, 4, 5)
