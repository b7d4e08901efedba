from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.base.plan import Seat
from everstep.base.pool_wish import PoolWish, make_wish
from everstep.placement.cuts import balance
from everstep.placement.lanes import place
from sampling import examples


def stages_of(seats: tuple[Seat, ...]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for seat in seats:
        found.setdefault(seat.worker_id, set()).add(seat.stage)
    return found


def assert_sound(seats: tuple[Seat, ...], ids, lanes: int, stages: int) -> None:
    """Everybody sits somewhere, and every lane is taken exactly once in every stage."""
    assert set(stages_of(seats)) == set(ids)
    assert len({(s.worker_id, s.stage) for s in seats}) == len(seats)
    for stage in range(stages):
        pool = [s for s in seats if s.stage == stage]
        assert sorted(lane for s in pool for lane in s.lanes) == list(range(lanes))
        assert all((s.role == "standby") == (not s.lanes) for s in pool)


@st.composite
def jobs(draw):
    """(lanes, stages, workers, wish)."""
    stages = draw(st.integers(1, 5))
    redundancy = draw(st.none() | st.integers(0, 2))
    workers = stages * (redundancy + 1) if redundancy is not None else draw(st.integers(1, 9))
    return draw(st.integers(9, 12)), stages, workers, make_wish(workers, stages, redundancy)


@given(jobs(), st.data())
@settings(max_examples=examples(300))
def test_repairs_cover_every_stage_and_move_only_who_has_to(job, data):
    lanes, stages, workers, wish = job
    seats = place(range(workers), lanes, stages=stages, wish=wish)
    assert_sound(seats, range(workers), lanes, stages)
    live = set(range(workers))
    for _ in range(data.draw(st.integers(1, 4))):
        live = set(data.draw(st.sets(st.sampled_from(sorted(live)), min_size=1)))
        live |= data.draw(st.sets(st.integers(0, 12), max_size=max(0, 9 - len(live))))
        before, was = seats, stages_of(seats)
        seats = place(live, lanes, stages=stages, wish=wish, previous=before)
        assert_sound(seats, live, lanes, stages)
        assert seats == place(sorted(live), lanes, stages=stages, wish=wish, previous=tuple(reversed(before)))
        now, survivors = stages_of(seats), live & set(was)
        if not survivors:
            continue
        lost = [k for k in range(stages) if not any(k in was[i] for i in survivors)]
        moved = [i for i in survivors if not was[i] <= now[i]]
        assert len(moved) <= len(lost)
        assert all(now[i] <= set(lost) for i in moved)
        if len(live - survivors) >= len(lost):
            assert not moved, "newcomers come first"
        for seat in before:
            stays = seat.worker_id in survivors and seat.stage in now[seat.worker_id]
            if stays and wish.active == ():
                kept = next(s for s in seats if (s.worker_id, s.stage) == (seat.worker_id, seat.stage))
                assert set(seat.lanes) <= set(kept.lanes)
        if len(live) >= stages and not lost:
            extras = [i for i in survivors if now[i] - was[i]]
            assert not extras, "nobody takes on a stage that is held"


@given(jobs(), st.data())
def test_when_all_are_back_everybody_is_where_he_was(job, data):
    lanes, stages, workers, wish = job
    start = place(range(workers), lanes, stages=stages, wish=wish)
    dead = data.draw(st.sets(st.integers(0, workers - 1), max_size=1))
    if workers <= stages or len(dead) == workers:
        return
    repaired = place(set(range(workers)) - dead, lanes, stages=stages, wish=wish, previous=start)
    survivors_moved = {i for i, k in stages_of(repaired).items() if k != stages_of(start)[i]}
    if survivors_moved:
        return
    assert place(range(workers), lanes, stages=stages, wish=wish, previous=repaired, anew=True) == start


@given(st.integers(2, 6), st.integers(1, 5), st.data())
def test_extras_are_given_up_as_workers_come(stages, first, data):
    """From any few workers on, one comes at a time: in the end each stage has a worker of its own."""
    workers = min(first, stages)
    wish = make_wish(stages, stages)
    seats = place(range(workers), 8, stages=stages, wish=wish)
    for newcomer in range(workers, stages):
        held = place(range(newcomer + 1), 8, stages=stages, wish=wish, previous=seats)
        assert len(stages_of(held)[newcomer]) >= 1
        seats = place(range(newcomer + 1), 8, stages=stages, wish=wish, previous=held, anew=True)
        assert_sound(seats, range(newcomer + 1), 8, stages)
        assert sum(map(len, stages_of(seats).values())) == stages
    assert [s.role for s in seats] == ["active"] * stages


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_redundancy_promotes_one_standby_at_a_time(stages, redundancy, data):
    workers = stages * (redundancy + 1)
    wish = make_wish(workers, stages, redundancy)
    seats = place(range(workers), 8, stages=stages, wish=wish)
    live = list(range(workers))
    while len(live) > stages:
        for stage in range(stages):
            pool = [s for s in seats if s.stage == stage]
            assert [s.role for s in pool].count("active") == 1
        size = redundancy + 1
        victim = data.draw(st.sampled_from([i for i in live if sum(i // size == j // size for j in live) > 1]))
        live.remove(victim)
        active = {s.stage: s.worker_id for s in seats if s.lanes}
        seats = place(live, 8, stages=stages, wish=wish, previous=seats)
        for stage, worker_id in active.items():
            if worker_id != victim:
                assert next(s for s in seats if s.stage == stage and s.lanes).worker_id == worker_id


def test_a_map_says_who_is_active():
    wish = PoolWish(homes=((0, 1, 2), (3,)), active=(2, 1), standby=(1,), leaders=(2, None))
    seats = place(range(4), 8, stages=2, wish=wish)
    assert [(s.worker_id, s.role) for s in seats] == [(0, "active"), (1, "standby"), (2, "active"), (3, "active")]
    repaired = place([0, 1, 3], 8, stages=2, wish=wish, previous=seats)
    assert {s.worker_id: s.lanes for s in repaired if s.stage == 0} == {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 5))
def test_balanced_cuts_reach_the_best_dearest_part(costs, parts):
    if parts > len(costs):
        return
    cut = balance(costs, parts)
    assert [u for first, last in cut for u in range(first, last)] == list(range(len(costs)))
    assert all(first < last for first, last in cut)
    every = [[0, *inner, len(costs)] for inner in itertools.combinations(range(1, len(costs)), parts - 1)]
    dearest = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(ends)) for ends in every)
    assert max(sum(costs[first:last]) for first, last in cut) == dearest
