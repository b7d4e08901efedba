"""When checkpoints are due, which are kept, and how the automatic interval comes about."""

from __future__ import annotations

import math
from itertools import product

import pytest

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig, DiskTierConfig, MemoryTierConfig, ObjectTierConfig, TierConfig
from everstep.cost.save_interval import MOST_COST, automatic_interval
from everstep.protocol.driver.policy import TIERS, Due, SaveSchedule, best_of, kept


def due_steps(schedule: SaveSchedule, step_s: float, steps: int) -> dict[int, Due]:
    found = {step: schedule.due(step, step * step_s) for step in range(1, steps + 1)}
    return {step: due for step, due in found.items() if due}


def test_every_so_many_steps_per_tier() -> None:
    config = CheckpointConfig(
        memory=MemoryTierConfig(every_steps=2),
        disk=DiskTierConfig(every_steps=6),
        object=ObjectTierConfig(every_steps=12, url="s3://bucket/x"),
    )
    found = due_steps(SaveSchedule(config), 1.0, 12)
    assert {step: due.tiers for step, due in found.items()} == {
        2: ("memory",),
        4: ("memory",),
        6: ("memory", "disk"),
        8: ("memory",),
        10: ("memory",),
        12: ("memory", "disk", "object"),
    }
    assert found[6].reason == "every 2 steps (memory); every 6 steps (disk)"


def test_an_object_store_takes_its_checkpoints_from_the_disk() -> None:
    config = CheckpointConfig(
        disk=DiskTierConfig(every_steps=100), object=ObjectTierConfig(every_steps=5, url="s3://bucket/x")
    )
    assert due_steps(SaveSchedule(config), 1.0, 9)[5] == Due(("disk", "object"), "every 5 steps")
    alike = CheckpointConfig(disk=DiskTierConfig(every_steps=3), object=ObjectTierConfig(url="s3://bucket/x"))
    assert due_steps(SaveSchedule(alike), 1.0, 4) == {3: Due(("disk", "object"), "every 3 steps")}
    without = CheckpointConfig(disk=DiskTierConfig(every_steps=100), object=ObjectTierConfig(every_steps=5))
    assert due_steps(SaveSchedule(without), 1.0, 9) == {}


def test_every_so_many_minutes_and_the_interval() -> None:
    minutes = CheckpointConfig(disk=DiskTierConfig(every_minutes=0.5))
    assert list(due_steps(SaveSchedule(minutes), 7.0, 12)) == [6, 11]  # 35 s after the first and after the last one
    assert list(due_steps(SaveSchedule(CheckpointConfig(interval=100.0)), 30.0, 10)) == [5, 9]
    both = due_steps(SaveSchedule(CheckpointConfig(interval=100.0), memory_every=5), 30.0, 5)
    assert both[5].tiers == ("memory", "disk")
    timed = CheckpointConfig(memory=MemoryTierConfig(every_minutes=0.5), disk=DiskTierConfig(every_steps=100))
    assert {n: due.tiers for n, due in due_steps(SaveSchedule(timed, memory_every=5), 7.0, 7).items()} == {
        6: ("memory",)
    }


RULES: dict[str, dict[str, float]] = {
    "none": {},
    "steps": {"every_steps": 3},
    "minutes": {"every_minutes": 0.5},
    "epochs": {"every_epochs": 2},
}


@pytest.mark.parametrize("rules", list(product(RULES, repeat=3)), ids="-".join)
def test_each_tier_is_due_by_its_own_rule_alone(rules: tuple[str, str, str]) -> None:
    """Without one, memory by its steps, the disk by the interval, and the object store with the disk."""
    memory, disk, remote = (RULES[name] for name in rules)
    schedule = SaveSchedule(
        CheckpointConfig(
            memory=MemoryTierConfig(**memory),  # type: ignore[arg-type]
            disk=DiskTierConfig(**disk),  # type: ignore[arg-type]
            object=ObjectTierConfig(url="s3://bucket/x", **remote),  # type: ignore[arg-type]
            interval=70.0,
        ),
        memory_every=4,
    )
    last = dict.fromkeys(TIERS, 10.0)
    for step in range(1, 31):
        now_s, epochs, affordable = 10.0 * step, step // 5 if step % 5 == 0 else 0, step % 15 == 0
        waited = {tier: now_s - last[tier] for tier in TIERS}
        without = {"memory": step % 4 == 0, "disk": waited["disk"] >= 70, "object": False}
        due = set()
        for tier, rule in zip(TIERS, rules, strict=True):
            ends = affordable and tier != "memory" and rule != "epochs"
            ruled = {"steps": step % 3 == 0, "minutes": waited[tier] >= 30, "epochs": epochs > 0 and epochs % 2 == 0}
            if ends or ruled.get(rule, without[tier]):
                due.add(tier)
        if "object" in due or ("disk" in due and rules[2] == "none"):
            due |= {"disk", "object"}
        assert set(schedule.due(step, now_s, epoch_end=affordable, epochs=epochs).tiers) == due, step
        last |= dict.fromkeys(due, now_s)


def test_epoch_ends_and_requests() -> None:
    schedule = SaveSchedule(CheckpointConfig(disk=DiskTierConfig(every_steps=100, keep_best=1)))
    assert schedule.due(1, 0.0, epoch_end=True) == Due(("disk",), "the end of an epoch")
    assert not schedule.due(3, 0.0)
    schedule.request(Why(Cause.REQUESTED, "requested"))
    schedule.request(Why(Cause.INTERRUPTED, "SIGTERM"))
    schedule.request(Why(Cause.REQUESTED, "requested"))
    assert schedule.due(4, 0.0) == Due(("disk",), "requested, SIGTERM", Cause.REQUESTED)
    assert not schedule.due(5, 0.0)


def test_every_so_many_epochs_whatever_it_costs() -> None:
    rule = CheckpointConfig(disk=DiskTierConfig(every_epochs=2), memory=MemoryTierConfig(every_epochs=3))
    schedule = SaveSchedule(rule)
    schedule.cost(1e9)
    found = {n: schedule.due(n, 0.0, epoch_end=True, epochs=n // 5 * (n % 5 == 0)).tiers for n in range(1, 36)}
    assert {n: tiers for n, tiers in found.items() if tiers} == {
        10: ("disk",),
        15: ("memory",),
        20: ("disk",),
        30: ("memory", "disk"),
    }
    assert schedule.due(40, 0.0, epochs=8) == Due(("disk",), "every 2 epochs")
    both = SaveSchedule(CheckpointConfig(disk=DiskTierConfig(every_epochs=2, every_steps=3)))
    assert [n for n in range(1, 11) if both.due(n, 0.0, epochs=n // 5 * (n % 5 == 0))] == [3, 6, 9, 10]


def test_what_is_kept() -> None:
    rule = TierConfig(keep_last=2, keep_every=10, keep_best=1)
    scores = {3: 0.5, 5: math.nan, 12: 0.4}
    assert set(kept(range(1, 15), rule, pins={7}, scores=scores)) == {3, 7, 10, 13, 14}
    assert set(kept(range(1, 15), rule, pins={7}, scores=scores, best_mode="min")) == {7, 10, 12, 13, 14}
    assert set(kept([4], TierConfig())) == {4}
    assert set(kept([10, 20, 30], TierConfig(keep_last=1), proven=29)) == {20, 30}
    assert set(kept([10, 20, 30], TierConfig(keep_last=1), proven=0)) == {30}
    assert set(kept([10, 20, 30], TierConfig(keep_last=1), proven=30, strange={20, 30})) == {10, 30}
    assert set(kept([10, 20, 30], TierConfig(keep_last=1), strange={10, 20, 30})) == {30}
    assert kept([], TierConfig()) == {}
    assert best_of([1, 2, 3], {1: 0.5, 2: 0.5, 3: 0.1}, "max") == [1, 2, 3]


def test_the_interval_of_a_schedule() -> None:
    schedule = SaveSchedule(CheckpointConfig(mtbf_minutes=60.0))
    assert schedule.interval(5.0).seconds == 30.0
    schedule.cost_s = 0.5
    assert schedule.interval(5.0).seconds == pytest.approx(math.sqrt(2 * 0.5 * 3600) - 0.5)
    seen = SaveSchedule(CheckpointConfig(), cost_s=0.5, failures=2)
    assert not seen.due(1, 60.0) and "2 seen in 1 min" in seen.interval(120.0).reason


def test_what_another_checkpoint_would_cost() -> None:
    schedule = SaveSchedule(CheckpointConfig(disk=DiskTierConfig(every_steps=1)))
    assert schedule.affordable(0.0)
    schedule.cost_s = 1.0
    assert schedule.affordable(0.0)
    assert schedule.due(1, 100.0)
    assert not schedule.affordable(100.0 + 0.9 / MOST_COST) and schedule.affordable(100.0 + 1 / MOST_COST)


@pytest.mark.parametrize(("mtbf_s", "clamped"), [(3600.0, False), (1e9, True), (1.0, True)])
def test_an_interval_that_was_clamped_says_so(mtbf_s: float, clamped: bool) -> None:
    assert ("kept within" in automatic_interval(1.0, 0, 0.0, mtbf_s).reason) == clamped


def test_each_failure_counts_once() -> None:
    schedule = SaveSchedule(CheckpointConfig())
    for _ in range(3):
        schedule.failed()
    assert schedule.failures == 3
