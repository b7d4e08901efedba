"""Split models between real processes: members that die, hang, come back and change their stage in the middle."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parallel_members import LANES, Crew
from parallel_stages import stage_reference

from everstep.base.errors import CollectiveAborted
from everstep.base.plan import Plan, Seat
from everstep.base.ports import Tag

BLOCKS = 2
SETTLE = Tag("settle", 0, 0)
Pools = dict[int, list[int]]


class StagedCrew(Crew):
    """Pools of workers instead of workers."""

    def staged_plan(self, generation: int, pools: Pools) -> Plan:
        ids = sorted({i for pool in pools.values() for i in pool})
        seats = []
        for stage, pool in sorted(pools.items()):
            for k, i in enumerate(pool):
                lanes = tuple(range(k * LANES // len(pool), (k + 1) * LANES // len(pool)))
                seats.append(Seat(i, stage, "active", lanes))
        members = tuple(self.members[i] for i in ids)
        return Plan(generation, "a test", members, tuple(seats), LANES, stages=len(pools))

    def regroup(self, generation: int, pools: Pools) -> Plan:
        plan = self.staged_plan(generation, pools)
        took = self.all(list(plan.worker_ids), "open", plan)
        assert all(isinstance(t, float) for t in took), took
        return plan

    def abort(self, generation: int, *ids: int) -> None:
        for i in ids:
            self.tell(i, "abort", generation)

    def check_reduced(self, plan: Plan, step: int) -> None:
        for i, found in zip(plan.worker_ids, self.all(list(plan.worker_ids), "reduce", step), strict=True):
            expected = {s.stage: stage_reference(BLOCKS, s.stage, step) for s in plan.seats if s.worker_id == i}
            assert found == expected

    def check_piped(self, plan: Plan, first: int, last: int, n: int = 300) -> None:
        done = self.all(list(plan.worker_ids), "pipe", first, last, n)
        assert done == [last - 1] * len(done), done


@pytest.fixture(params=[pytest.param("shm", marks=pytest.mark.longer), "sockets"])
def crew(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StagedCrew]:
    found = StagedCrew("staged-" + request.param, BLOCKS, tmp_path)
    yield found
    found.close()


def leave(crew: StagedCrew, generation: int, ids: list[int]) -> list[Any]:
    """All are told to leave; what each of them says."""
    begin = time.monotonic()
    crew.abort(generation, *ids)
    left = [crew.result(i) for i in ids]
    assert time.monotonic() - begin < 2.0
    assert all(isinstance(fault, CollectiveAborted) for fault in left), left
    return left


def test_lanes_flow_through_pools_that_change(crew: StagedCrew) -> None:
    """Three stages on one to four workers, one after the other."""
    crew.hire(0, 1, 2, 3)
    turns: list[Pools] = [
        {0: [0, 1], 1: [2], 2: [3]},
        {0: [0], 1: [0, 1], 2: [1]},
        {0: [2], 1: [2], 2: [2]},
        {0: [3], 1: [1, 2], 2: [0]},
    ]
    for generation, pools in enumerate(turns, 1):
        plan = crew.regroup(generation, pools)
        crew.check_piped(plan, 10 * generation, 10 * generation + 3)
        crew.check_reduced(plan, 10 * generation + 3)


def test_a_sender_killed_in_the_middle_is_accused_by_its_receiver(crew: StagedCrew) -> None:
    crew.hire(0, 1, 2)
    crew.regroup(1, {0: [0], 1: [1], 2: [2]})
    crew.all([0], "flood", 1, 1, 2, 50_000)
    assert crew.all([1], "receive", 0, 1, 1) == [1.0]
    crew.tell(1, "receive", 0, 1, 7)  # it never sends so many
    crew.until_waiting(1)
    crew.signal(0, signal.SIGKILL)
    fault = crew.result(1)
    assert isinstance(fault, CollectiveAborted) and fault.accused == (0,)
    plan = crew.regroup(2, {0: [1], 1: [1], 2: [2]})
    crew.check_piped(plan, 1, 3)


def test_a_member_killed_while_all_are_busy(crew: StagedCrew) -> None:
    """Those who wait for others than the dead one are freed by the plan; the step is done again without it."""
    crew.hire(0, 1, 2, 3)
    plan = crew.regroup(1, {0: [0], 1: [1], 2: [2, 3]})
    for i in plan.worker_ids:
        crew.tell(i, "pipe", 1, 1_000_000, 2_000)
    crew.until_waiting(0, 20)
    crew.signal(1, signal.SIGKILL)
    leave(crew, 1, [0, 2, 3])
    plan = crew.regroup(2, {0: [0], 1: [3], 2: [2]})
    assert crew.all([0, 2, 3], "exchange", SETTLE, b"") == [{0: b"", 2: b"", 3: b""}] * 3
    crew.check_piped(plan, 900_000, 900_003)


@pytest.mark.longer
def test_a_stopped_member_is_left_behind_and_comes_back_to_nothing(crew: StagedCrew) -> None:
    """Stopped in the middle, evicted, woken while the others use the same memory for the next generation."""
    crew.hire(0, 1, 2)
    plan = crew.regroup(1, {0: [0], 1: [1], 2: [2]})
    for i in plan.worker_ids:
        crew.tell(i, "pipe", 1, 1_000_000, 2_000)
    crew.until_waiting(1, 20)
    crew.signal(1, signal.SIGSTOP)
    leave(crew, 1, [0, 2])
    crew.regroup(2, {0: [0], 1: [2], 2: [2]})
    for i in (0, 2):
        crew.tell(i, "pipe", 1, 30, 2_000)  # the same steps as before
    crew.signal(1, signal.SIGCONT)
    assert [crew.result(i) for i in (0, 2)] == [29] * 2
    crew.abort(1, 1)
    fault = crew.result(1)
    assert isinstance(fault, CollectiveAborted), fault
    plan = crew.regroup(3, {0: [1], 1: [0], 2: [2]})
    crew.check_piped(plan, 40, 43)


def test_a_message_under_way_does_not_outlive_its_generation(crew: StagedCrew) -> None:
    """Megabytes for a stopped receiver: the sender does not wait, and leaves with the plan at once."""
    crew.hire(0, 1, 2)
    crew.regroup(1, {0: [0], 1: [1, 2]})
    crew.signal(1, signal.SIGSTOP)
    begin = time.monotonic()
    assert crew.all([0], "flood", 1, 1, 4, 2_000_000) == [4]
    assert time.monotonic() - begin < 30.0
    crew.tell(0, "receive", 1, 1, 0)
    crew.until_waiting(0)
    leave(crew, 1, [0])
    crew.tell(2, "abort", 1)
    plan = crew.regroup(2, {0: [0], 1: [2]})
    crew.check_piped(plan, 1, 3)


def test_open_is_freed_when_a_member_never_comes(crew: StagedCrew) -> None:
    crew.hire(0, 1)
    plan = crew.staged_plan(1, {0: [0], 1: [1]})
    crew.signal(1, signal.SIGSTOP)
    crew.tell(0, "open", plan)
    crew.until_waiting(0)
    leave(crew, 1, [0])


GENERATIONS = 200
WARM = 20
TURNS: list[Pools] = [
    {0: [0], 1: [1], 2: [2]},
    {0: [0, 1], 1: [1, 2], 2: [0, 2]},
    {0: [0], 1: [0, 1]},
    {0: [2], 1: [0, 1], 2: [1]},
]


def one_generation(crew: StagedCrew, generation: int) -> None:
    """Stages and members come and go; every third generation ends with a step cut in the middle."""
    plan = crew.regroup(generation, TURNS[generation % len(TURNS)])
    ids = list(plan.worker_ids)
    crew.check_piped(plan, 10 * generation, 10 * generation + 1, 50)
    if generation % 3 == 0:
        for i in ids[1:]:
            crew.tell(i, "pipe", 10 * generation + 5, 10 * generation + 6, 50)
        crew.until_waiting(ids[1], 1)
        crew.abort(generation, *ids)
        assert all(isinstance(crew.result(i), CollectiveAborted) for i in ids[1:])


@pytest.mark.longer
def test_two_hundred_generations_leak_nothing(crew: StagedCrew) -> None:
    crew.hire(0, 1, 2)
    for generation in range(1, WARM + 1):
        one_generation(crew, generation)
    before = crew.all([0, 1, 2], "resources")
    for generation in range(WARM + 1, GENERATIONS + WARM + 1):
        one_generation(crew, generation)
    after = crew.all([0, 1, 2], "resources")
    for old, new in zip(before, after, strict=True):
        assert new["descriptors"] <= old["descriptors"] + 60, (old, new)  # groups that are being taken down
        assert new["threads"] <= old["threads"] + 15, (old, new)
        assert new["segments"] <= old["segments"] + 6, (old, new)
        assert new["maps"] <= old["maps"] + 80, (old, new)
        assert new["resident_kib"] <= old["resident_kib"] + 24_000, (old, new)
        assert new["shared_kib"] <= old["shared_kib"] + 16_000, (old, new)
