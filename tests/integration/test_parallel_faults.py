"""Both transports between real processes: the same bits, and members that die, hang and come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from parallel_members import Crew, reference

from everstep.base.errors import CollectiveAborted
from everstep.base.ports import Tag

BLOCKS = 9
SETTLE = Tag("settle", 0, 0)


@pytest.fixture(params=["shm", pytest.param("sockets", marks=pytest.mark.longer)])
def crew(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Crew]:
    found = Crew(request.param, BLOCKS, tmp_path)
    yield found
    found.close()


def test_bits_for_one_to_five_processes(crew: Crew) -> None:
    crew.hire(0, 1, 2, 3, 4)
    for n in range(1, 6):
        ids = list(range(5 - n, 5))
        crew.open(n, ids)
        expected = reference(BLOCKS, n)
        assert all(result == expected for result in crew.all(ids, "reduce", n))


@pytest.mark.parametrize("operation", ["reduce", "exchange"])
def test_sigkill_of_a_member_frees_the_others_by_abort(crew: Crew, operation: str) -> None:
    crew.hire(0, 1, 2)
    crew.open(1, [0, 1, 2])
    arguments = (1,) if operation == "reduce" else (Tag("decide", 1, 0), b"x")
    for i in (0, 1):
        crew.tell(i, operation, *arguments)
        crew.until_waiting(i)
    crew.signal(2, signal.SIGKILL)
    begin = time.monotonic()
    for i in (0, 1):
        crew.tell(i, "abort", 1)
    for i in (0, 1):
        assert isinstance(crew.result(i), CollectiveAborted)
    assert time.monotonic() - begin < 1.0
    crew.open(2, [0, 1])
    assert crew.all([0, 1], "exchange", SETTLE, b"") == [{0: b"", 1: b""}] * 2
    assert crew.all([0, 1], "reduce", 1) == [reference(BLOCKS, 1)] * 2


def test_a_dead_member_is_accused_without_any_word_from_outside(crew: Crew) -> None:
    crew.hire(0, 1)
    crew.open(1, [0, 1])
    crew.tell(0, "exchange", Tag("decide", 1, 0), b"x")
    crew.until_waiting(0)
    crew.signal(1, signal.SIGKILL)
    fault = crew.result(0)
    assert isinstance(fault, CollectiveAborted) and fault.accused == (1,)


def test_a_zombie_cannot_disturb_the_next_generation(crew: Crew) -> None:
    """Stopped in the middle of its work, evicted, and woken while the others go on without it."""
    crew.hire(0, 1, 2)
    crew.open(1, [0, 1, 2])
    for i in (0, 1, 2):
        crew.tell(i, "reduce_often", 1, 1_000_000)
    crew.until_waiting(2, 20)
    crew.signal(2, signal.SIGSTOP)
    for i in (0, 1):
        crew.tell(i, "abort", 1)
    left = [crew.result(i) for i in (0, 1)]
    assert all(isinstance(fault, CollectiveAborted) for fault in left), left
    crew.open(2, [0, 1])
    assert crew.all([0, 1], "exchange", SETTLE, b"") == [{0: b"", 1: b""}] * 2
    for i in (0, 1):
        crew.tell(i, "reduce_often", 2_000_000, 2_000_020)
    crew.signal(2, signal.SIGCONT)
    assert [crew.result(i) for i in (0, 1)] == [2_000_019] * 2
    crew.tell(2, "abort", 1)
    assert isinstance(crew.result(2), CollectiveAborted)
    crew.open(3, [0, 1, 2])  # even the zombie may come back
    expected = reference(BLOCKS, 3_000_000)
    assert crew.all([0, 1, 2], "reduce", 3_000_000) == [expected] * 3


def test_results_outlive_the_process_that_owns_them(crew: Crew) -> None:
    crew.hire(0, 1)
    crew.open(1, [0, 1])
    crew.all([0, 1], "keep", 4)
    crew.signal(1, signal.SIGKILL)
    crew.tell(0, "abort", 1)
    crew.open(2, [0])
    assert crew.all([0], "reduce", 5) == [reference(BLOCKS, 5)]
    assert crew.all([0], "kept") == [reference(BLOCKS, 4)]


def test_open_is_freed_when_a_member_never_comes(crew: Crew) -> None:
    crew.hire(0, 1)
    plan = crew.plan(1, [0, 1])
    crew.signal(1, signal.SIGSTOP)
    crew.tell(0, "open", plan)
    if crew.kind == "shm":  # nothing to wait for until the first transfer
        assert isinstance(crew.result(0), float)
        crew.tell(0, "exchange", SETTLE, b"")
    crew.until_waiting(0)
    begin = time.monotonic()
    crew.tell(0, "abort", 1)
    assert isinstance(crew.result(0), CollectiveAborted)
    assert time.monotonic() - begin < 1.0
