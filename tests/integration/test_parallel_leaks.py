"""Nothing leaks over many generations, also when transfers are cut in the middle and members come and go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from parallel_members import Crew

from everstep.base.errors import CollectiveAborted
from everstep.base.ports import Tag

GENERATIONS = 200
WARM = 20
LIMIT_S = 60.0
SETTLE = Tag("settle", 0, 0)


@pytest.fixture(params=[pytest.param("shm", marks=pytest.mark.longer), "sockets"])
def crew(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Crew]:
    found = Crew(request.param, 2, tmp_path)
    yield found
    found.close()


def regroup(crew: Crew, generation: int) -> None:
    """Every third generation ends with a transfer cut in the middle; every fifth lacks the last member."""
    ids = [0, 1] if generation % 5 == 0 else [0, 1, 2]
    crew.open(generation, ids)
    crew.all(ids, "exchange", SETTLE, b"here")
    done = crew.all(ids, "reduce_often", 10 * generation, 10 * generation + 2)
    assert done == [10 * generation + 1] * len(ids)
    if generation % 3 == 0:
        for i in ids[:-1]:
            crew.tell(i, "reduce_often", 10 * generation + 5, 10 * generation + 6)
        crew.until_waiting(ids[0], 1)
        for i in ids:
            crew.tell(i, "abort", generation)
        assert all(isinstance(crew.result(i), CollectiveAborted) for i in ids[:-1])


@pytest.mark.longer
def test_two_hundred_generations_leak_nothing(crew: Crew) -> None:
    crew.hire(0, 1, 2)
    for generation in range(1, WARM + 1):
        regroup(crew, generation)
    before = crew.all([0, 1, 2], "resources")
    for generation in range(WARM + 1, GENERATIONS + WARM + 1):
        regroup(crew, generation)
    end_s = time.monotonic() + LIMIT_S
    while grown := [now for now in zip(before, crew.all([0, 1, 2], "resources"), strict=True) if not within(*now)]:
        assert time.monotonic() < end_s, grown  # groups are taken down by a thread of their own
        time.sleep(0.2)


def within(old: Mapping[str, int], new: Mapping[str, int]) -> bool:
    """Whether there is no more than before, but for one group that is being taken down."""
    few = {"descriptors": 25, "threads": 6, "segments": 0, "maps": 40, "resident_kib": 16_000}
    return all(new[name] <= old[name] + more for name, more in few.items())


@pytest.mark.longer
def test_members_that_come_and_go_leave_no_mapping(tmp_path: Path) -> None:
    crew = Crew("shm", 2, tmp_path)
    try:
        crew.hire(0)
        crew.open(1, [0])
        before = crew.all([0], "resources")[0]
        for generation in range(2, 12):
            crew.hire(generation)
            crew.open(generation, [0, generation])
            crew.all([0, generation], "reduce_often", 10 * generation, 10 * generation + 3)
            crew.dismiss(generation)
        crew.open(12, [0])
        crew.all([0], "reduce_often", 200, 203)
        after = crew.all([0], "resources")[0]
        assert after["segments"] == before["segments"] and after["descriptors"] <= before["descriptors"], (
            before,
            after,
        )
    finally:
        crew.close()
