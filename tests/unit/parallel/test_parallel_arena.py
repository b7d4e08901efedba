"""Runs of a sender's memory: never two at one place, the same places again, and idle ones given back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.base.errors import InvariantViolation
from everstep.parallel.channel import Arena

ROOM = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=120))
@example([(2, 1), (2, 1), (0, 1), (0, 0), (0, 1)])  # those that stay begin at the very first place
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


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=20, max_size=80))
def test_what_is_given_back_lies_above_all_that_is_or_was_in_use_lately(orders: list[tuple[int, int]]) -> None:
    """Each order takes some runs of 16 MiB, and forgets all but the newest steps."""
    arena, taken, lately, idle = Arena(1 << 40), list[tuple[int, int]](), list[int](), (0, 0)
    touched = 0
    for step, (back, runs) in enumerate(orders):
        for _ in range(runs):
            stop = arena.take(step, 16 << 20) + (16 << 20)
            taken.append((step, stop))
            touched = max(touched, stop)
        highest = max((stop for _, stop in taken), default=0)
        kept = [run for run in taken if run[0] > step - back]
        if len(kept) < len(taken):
            lately = [*lately, highest][-8:]
        taken = kept
        idle = arena.forget(step - back)
        if idle != (0, 0):
            assert idle == (max(lately) + (16 << 20), touched) and len(lately) == 8 and idle[0] < idle[1]
            touched = idle[0]
        assert all(stop <= touched for _, stop in taken)


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
