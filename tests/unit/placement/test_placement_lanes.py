from __future__ import annotations

import pytest

from everstep.base.errors import ConfigError, InvariantViolation
from everstep.base.plan import Seat
from everstep.base.pool_wish import PoolWish
from everstep.placement.lanes import place


def lanes_of(seats):
    return {s.worker_id: s.lanes for s in seats}


def sizes(seats):
    return [len(s.lanes) for s in seats]


def test_even_runs_for_eight_lanes():
    assert [sizes(place(range(n), 8)) for n in range(1, 9)] == [
        [8],
        [4, 4],
        [3, 3, 2],
        [2, 2, 2, 2],
        [2, 2, 2, 1, 1],
        [2, 2, 1, 1, 1, 1],
        [2, 1, 1, 1, 1, 1, 1],
        [1] * 8,
    ]
    assert lanes_of(place([4, 2], 8)) == {2: (0, 1, 2, 3), 4: (4, 5, 6, 7)}


def test_who_has_lanes_keeps_them_though_another_could_be_active():
    seats = place([0, 1], 8, previous=[Seat(1, 0, "active", tuple(range(8)))], wish=PoolWish(active=(1,)))
    assert lanes_of(seats) == {0: (), 1: tuple(range(8))}


def test_larger_runs_go_where_they_are_aligned():
    # Seven lanes split as ((0 1)(2 3))((4 5)6): run 4..6 is one node, so the last worker has the three.
    assert sizes(place(range(3), 7)) == [2, 2, 3]


def test_speeds_minimise_the_time_of_the_slowest():
    seats = place([0, 1, 2], 8, speeds={0: 1.0, 1: 2.0, 2: 5.0})
    assert sizes(seats) == [1, 2, 5]
    assert lanes_of(seats) == {0: (0,), 1: (1, 2), 2: (3, 4, 5, 6, 7)}


def test_everybody_active_has_a_lane_however_slow():
    assert sizes(place([0, 1, 2], 8, speeds={0: 1e-9, 1: 1.0, 2: 1e9})) == [1, 1, 6]


@pytest.mark.parametrize("unknown", [{}, {1: 0.0}, {1: float("nan")}, {1: float("inf")}, {1: -2.0}])
def test_unknown_speeds_count_as_the_mean_of_the_others(unknown):
    assert sizes(place([0, 1, 2], 8, speeds={0: 1.0, 2: 3.0, **unknown})) == sizes(
        place([0, 1, 2], 8, speeds={0: 1.0, 1: 2.0, 2: 3.0})
    )


def test_equal_speeds_are_no_speeds():
    assert place(range(3), 8, speeds=dict.fromkeys(range(3), 7.5)) == place(range(3), 8)


def test_repair_moves_only_lost_lanes_to_neighbours():
    before = place(range(4), 8)
    after = place([0, 1, 3], 8, previous=before)
    assert lanes_of(after) == {0: (0, 1), 1: (2, 3, 4), 3: (5, 6, 7)}


def test_repair_balances_before_it_looks_at_neighbours():
    before = place(range(4), 16)
    after = place([0, 1, 2], 16, previous=before)
    # Only worker 2 is beside the four lost lanes, but alone it would end at eight. Aligned pairs, as nobody ends later.
    assert lanes_of(after) == {0: (0, 1, 2, 3, 14, 15), 1: (4, 5, 6, 7), 2: (8, 9, 10, 11, 12, 13)}


def test_repair_by_speed():
    before = place(range(3), 12)
    after = lanes_of(place([0, 2], 12, previous=before, speeds={0: 1.0, 2: 3.0}))
    assert after == {0: (0, 1, 2, 3), 2: (4, 5, 6, 7, 8, 9, 10, 11)}


def test_a_newcomer_takes_over_the_lost_run():
    before = place(range(4), 8)
    after = place([0, 1, 3, 9], 8, previous=before)
    assert lanes_of(after) == {0: (0, 1), 1: (2, 3), 3: (6, 7), 9: (4, 5)}


def test_newcomers_without_lost_lanes_become_standby():
    before = place(range(2), 4)
    after = place([0, 1, 2], 4, previous=before)
    assert after[:2] == before
    assert after[2] == Seat(2, 0, "standby", ())


def test_newcomers_alone_get_a_fresh_placement():
    assert place([4, 5], 8, previous=place(range(3), 8)) == place([4, 5], 8)


def test_standby_workers_have_no_lanes_and_step_in():
    seats = place([0, 1, 2], 8, wish=PoolWish(active=(2,), standby=(1,)))
    assert [s.role for s in seats] == ["active", "standby", "active"]
    assert lanes_of(seats) == {0: (0, 1, 2, 3), 1: (), 2: (4, 5, 6, 7)}
    promoted = place([0, 1], 8, previous=seats)
    assert lanes_of(promoted) == {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    demoted = place([0, 1], 8, previous=promoted, wish=PoolWish(active=(1,), standby=(1,)))
    assert lanes_of(demoted) == {0: tuple(range(8)), 1: ()}


def test_stages_share_the_workers_evenly_and_stay_where_they_sat():
    seats = place(range(5), 8, stages=2)
    assert [(s.worker_id, s.stage) for s in seats] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)]
    after = place([0, 2, 3, 4, 8], 8, stages=2, previous=seats)
    assert [(s.worker_id, s.stage) for s in after] == [(0, 0), (2, 0), (8, 0), (3, 1), (4, 1)]
    assert lanes_of(after)[8] == lanes_of(seats)[1]
    assert [s for s in after if s.stage == 1] == [s for s in seats if s.stage == 1]


def test_too_many_workers():
    with pytest.raises(ConfigError, match="got 9 for 8 lanes: use fewer workers, raise 'lanes', or make 1 of them"):
        place(range(9), 8)
    assert len(place(range(9), 8, wish=PoolWish(active=(8,)))) == 9


def test_later_the_surplus_of_a_pool_stands_by():
    """A pool that grows beyond its lanes while others heal is no error of the user's."""
    before = place([0, 1, 2, 3], 3, stages=2)
    after = place(range(8), 3, stages=2, previous=[s for s in before if s.stage == 1])
    assert sum(s.role == "active" for s in after if s.stage == 1) <= 3
    with pytest.raises(ConfigError, match="in stage 0, got 4 for 3 lanes"):
        place(range(8), 3, stages=2)


def test_who_sits_in_several_stages_leaves_the_largest_pool():
    held = [Seat(6, 0, "active", (0, 1, 2)), Seat(6, 1, "active", (0, 1, 2))]
    on_the_way = [Seat(i, stage, "standby", ()) for i, stage in ((0, 0), (2, 1), (3, 1), (4, 0))]
    wish = PoolWish(homes=((0, 1, 2), (3, 4, 5)))
    seats = place([0, 2, 3, 4, 5, 6], 3, stages=2, previous=[*held, *on_the_way], wish=wish, anew=True)
    assert [[s.worker_id for s in seats if s.stage == k] for k in (0, 1)] == [[0, 4, 6], [2, 3, 5]]
    assert all(s.lanes for s in seats)


def test_too_few_workers():
    with pytest.raises(ConfigError, match="expected at least"):
        place([], 8)
    with pytest.raises(ConfigError, match="at least 1 lane"):
        place([0], 0)


def test_a_standby_that_is_the_only_one_left_gets_the_lanes():
    assert lanes_of(place([3], 8, wish=PoolWish(active=(1,), standby=(3,)))) == {3: tuple(range(8))}
    seats = place([0, 1], 8, stages=2, wish=PoolWish(active=(1, 1), standby=(1,)))
    assert [(s.worker_id, s.role) for s in seats] == [(0, "active"), (1, "active")]


def test_broken_input_is_a_bug():
    with pytest.raises(InvariantViolation, match="distinct"):
        place([1, 1], 8)
    with pytest.raises(InvariantViolation, match="does not fit"):
        place([0], 4, previous=place([0], 8))
    with pytest.raises(InvariantViolation, match="share lanes"):
        place([0], 4, previous=[Seat(0, 0, "active", (0, 1)), Seat(1, 0, "active", (1, 2, 3))])


def test_large_jobs_are_placed_quickly_enough_to_be_tested():
    seats = place(range(300), 512)
    assert sorted({len(s.lanes) for s in seats}) == [1, 2]
    repaired = place(range(0, 300, 2), 512, previous=seats)
    assert sum(sizes(repaired)) == 512 and max(sizes(repaired)) == 4
