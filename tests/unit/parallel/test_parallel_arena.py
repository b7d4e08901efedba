"""Runs of a sender's memory: never two at one place, the same places again, and idle ones given back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.errors import InvariantViolation
from everstep.parallel.channel import Arena

ROOM = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=120))
def test_no_two_runs_overlap(orders: list[tuple[int, int]]) -> None:
    """Steps go on by one; each order takes a run for a step near the newest, or forgets all but the newest steps."""
    arena, taken, newest = Arena(ROOM), [], 10
    for back, units in orders:
        if units == 0:
            arena.forget(newest - back)
            taken = [t for t in taken if t[0] > newest - back]
            newest += 1
        else:
            start = arena.take(newest + back, 64 * units)
            taken.append((newest + back, start, start + 64 * units))
        spans = sorted((start, stop) for _, start, stop in taken)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert len(arena) == len(taken) and all(start % 64 == 0 for start, _ in spans)


def test_the_same_steps_get_the_same_places() -> None:
    arena = Arena(ROOM)
    first = [arena.take(1, 640), arena.take(1, 64)]
    arena.forget(1)
    assert [arena.take(2, 640), arena.take(2, 64)] == first


def test_a_step_begun_before_the_last_is_forgotten_does_not_let_it_grow() -> None:
    arena = Arena(ROOM)
    highest = 0
    arena.take(1, 6400)
    for step in range(2, 200):
        highest = max(highest, arena.take(step, 6400))
        arena.forget(step - 1)
    assert highest <= 3 * 6400


def test_what_has_not_been_used_for_long_is_given_back_once() -> None:
    arena = Arena(1 << 30)
    arena.take(1, 512 << 20)
    arena.forget(1)
    given_back = []
    for step in range(2, 30):
        arena.take(step, 64)
        given_back.append(arena.forget(step))
    ranges = [r for r in given_back if r[0] < r[1]]
    assert ranges == [(64 + (16 << 20), 512 << 20)]


def test_too_much_in_flight_says_so() -> None:
    arena = Arena(ROOM)
    with pytest.raises(InvariantViolation, match="in flight"):
        arena.take(1, ROOM + 64)
