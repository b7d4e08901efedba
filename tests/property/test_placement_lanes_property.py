from __future__ import annotations

import itertools
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from everstep.base.plan import Seat
from everstep.base.pool_wish import PoolWish
from everstep.placement.lanes import place
from everstep.placement.tree import cover

speeds_of_workers = st.floats(0.01, 100.0)


@st.composite
def memberships(draw, most_lanes=17):
    """(lanes, worker ids)."""
    lanes = draw(st.integers(1, most_lanes))
    ids = draw(st.lists(st.integers(0, 30), min_size=1, max_size=lanes, unique=True))
    return lanes, ids


@st.composite
def repairs(draw):
    """(lanes, seats before, worker ids after, speeds or None): some survive, some are new."""
    lanes, before = draw(memberships())
    speeds = draw(st.none() | st.fixed_dictionaries(dict.fromkeys(before, speeds_of_workers)))
    seats = place(before, lanes, speeds=speeds)
    survivors = draw(st.lists(st.sampled_from(before), min_size=1, unique=True))
    room = lanes - len(survivors)
    new = draw(st.lists(st.integers(31, 60), max_size=room, unique=True))
    after = survivors + new
    later = draw(st.none() | st.fixed_dictionaries(dict.fromkeys(after, speeds_of_workers)))
    return lanes, seats, draw(st.permutations(after)), later


def taken(seats) -> dict[int, tuple[int, ...]]:
    return {s.worker_id: s.lanes for s in seats}


def assert_every_lane_once(seats, lanes):
    assert sorted(lane for s in seats for lane in s.lanes) == list(range(lanes))
    assert all(list(s.lanes) == sorted(s.lanes) for s in seats)


def best_makespan(start: list[int], speeds: list[float], more: int) -> float:
    """The naive oracle: every way to hand out `more` lanes, over those who may take any."""
    best = float("inf")
    for cut in itertools.combinations_with_replacement(range(len(start)), more):
        shares = [share + cut.count(i) for i, share in enumerate(start)]
        best = min(best, max(share / speed for share, speed in zip(shares, speeds, strict=True)))
    return best


@given(memberships(), st.data())
def test_fresh_placement_is_complete_contiguous_and_deterministic(case, data):
    lanes, ids = case
    speeds = data.draw(st.none() | st.fixed_dictionaries(dict.fromkeys(ids, speeds_of_workers)))
    seats = place(ids, lanes, speeds=speeds)
    assert_every_lane_once(seats, lanes)
    assert [s.worker_id for s in seats] == sorted(ids)
    assert all(s.role == "active" and s.lanes[-1] - s.lanes[0] == len(s.lanes) - 1 for s in seats)
    shuffled = list(ids)
    random.Random(1).shuffle(shuffled)
    again = None if speeds is None else {i: speeds[i] for i in shuffled}
    assert place(iter(shuffled), lanes, speeds=again) == seats


@given(memberships(most_lanes=12))
def test_even_runs_have_the_fewest_nodes_and_the_lowest_ids_more(case):
    lanes, ids = case
    sizes = [len(s.lanes) for s in place(ids, lanes)]
    small, larger = divmod(lanes, len(ids))

    def nodes(runs):
        ends = list(itertools.accumulate(runs))
        return sum(len(cover(range(end - run, end), lanes)) for run, end in zip(runs, ends, strict=True))

    every = [
        [small + (i in chosen) for i in range(len(ids))] for chosen in itertools.combinations(range(len(ids)), larger)
    ]
    fewest = min(map(nodes, every))
    assert sizes == max(runs for runs in every if nodes(runs) == fewest)


@given(memberships(most_lanes=9), st.data())
def test_speeds_reach_the_best_makespan(case, data):
    lanes, ids = case
    speeds = data.draw(st.fixed_dictionaries(dict.fromkeys(ids, st.integers(1, 20).map(float))))
    seats = place(ids, lanes, speeds=speeds)
    reached = max(len(s.lanes) / speeds[s.worker_id] for s in seats)
    assert reached == best_makespan([1] * len(ids), [speeds[i] for i in sorted(ids)], lanes - len(ids))


@given(repairs())
def test_repair_keeps_survivors_lanes_and_moves_only_lost_ones(case):
    lanes, before, ids, speeds = case
    after = place(ids, lanes, previous=before, speeds=speeds)
    assert_every_lane_once(after, lanes)
    was, now = taken(before), taken(after)
    for worker_id in set(was) & set(ids):
        assert set(was[worker_id]) <= set(now[worker_id])
    lost = {lane for worker_id, own in was.items() if worker_id not in ids for lane in own}
    newcomers = [i for i in ids if i not in was]
    assert all(set(now[i]) <= lost for i in newcomers)
    with_lanes = [i for i in newcomers if now[i]]
    assert len(with_lanes) == min(len(newcomers), len(lost))
    assert all((s.role == "standby") == (not s.lanes) for s in after)


@given(repairs())
def test_repair_depends_on_no_order(case):
    lanes, before, ids, speeds = case
    again = None if speeds is None else dict(reversed(speeds.items()))
    assert place(ids, lanes, previous=before, speeds=speeds) == place(
        sorted(ids), lanes, previous=tuple(reversed(before)), speeds=again
    )


@given(memberships(most_lanes=9), st.data())
def test_repair_reaches_the_best_makespan_of_those_who_take_lanes(case, data):
    lanes, ids = case
    before = place(ids, lanes)
    survivors = sorted(data.draw(st.sets(st.sampled_from(ids), min_size=1)))
    speeds = data.draw(st.fixed_dictionaries(dict.fromkeys(survivors, st.integers(1, 20).map(float))))
    after = taken(place(survivors, lanes, previous=before, speeds=speeds))
    start = [len(taken(before)[i]) for i in survivors]
    reached = max(len(after[i]) / speeds[i] for i in survivors)
    assert reached == best_makespan(start, [speeds[i] for i in survivors], lanes - sum(start))


@given(memberships(), st.data())
def test_balance_survives_a_sequence_of_deaths(case, data):
    lanes, ids = case
    seats: tuple[Seat, ...] = place(ids, lanes)
    left = list(ids)
    for dead in data.draw(st.permutations(ids))[:-1]:
        left.remove(dead)
        held = max(len(s.lanes) for s in seats if s.worker_id in left)
        seats = place(left, lanes, previous=seats)
        assert_every_lane_once(seats, lanes)
        assert max(len(s.lanes) for s in seats) <= max(held, -(-lanes // len(left)))


@given(memberships(), st.integers(1, 3), st.data())
def test_every_stage_takes_every_lane_once(case, stages, data):
    lanes, ids = case
    if len(ids) < stages:
        return
    standby = data.draw(st.sets(st.sampled_from(ids)))
    size, larger = divmod(len(ids), stages)  # of the first pools
    ends = [k * size + min(k, larger) for k in range(stages + 1)]
    pools = [sorted(ids)[first:last] for first, last in pairwise(ends)]
    if any(set(pool) <= standby for pool in pools):
        return
    wish = PoolWish(active=tuple(len(set(pool) - standby) for pool in pools), standby=tuple(standby))
    seats = place(ids, lanes, stages=stages, wish=wish)
    assert sorted(s.worker_id for s in seats) == sorted(ids)
    for stage in range(stages):
        assert_every_lane_once([s for s in seats if s.stage == stage], lanes)
    assert {s.worker_id for s in seats if not s.lanes} == standby
    assert place(ids, lanes, stages=stages, wish=wish, previous=seats) == seats
