"""The learning rate when the number of workers changes and the batch follows it."""

from __future__ import annotations

import math

import pytest

from everstep.train.elastic import LrPolicy


def factors(policy: LrPolicy, workers: int, steps: int) -> list[float]:
    return [policy.advance(workers) for _ in range(steps)]


def test_linear_rule_from_4_to_3_to_6_workers_with_warm_up() -> None:
    policy = LrPolicy("linear", base_workers=4, warmup_steps=5)
    assert factors(policy, 4, 3) == [1.0, 1.0, 1.0]
    down = factors(policy, 3, 7)
    assert down == pytest.approx([0.95, 0.90, 0.85, 0.80, 0.75, 0.75, 0.75])
    up = factors(policy, 6, 7)
    assert up == pytest.approx([0.9, 1.05, 1.2, 1.35, 1.5, 1.5, 1.5])


def test_a_change_in_the_middle_of_a_warm_up_goes_on_from_where_it_is() -> None:
    policy = LrPolicy("linear", base_workers=4, warmup_steps=4)
    assert factors(policy, 8, 2) == pytest.approx([1.25, 1.5])
    assert factors(policy, 4, 4) == pytest.approx([1.375, 1.25, 1.125, 1.0])


def test_square_root_and_none() -> None:
    root = LrPolicy("sqrt", base_workers=4, warmup_steps=0)
    assert root.advance(9) == pytest.approx(math.sqrt(9 / 4))
    none = LrPolicy("none", base_workers=4, warmup_steps=10)
    assert factors(none, 1, 3) == [1.0, 1.0, 1.0]


def test_state_goes_over_to_another_worker() -> None:
    one = LrPolicy("linear", base_workers=4, warmup_steps=6)
    factors(one, 2, 3)
    other = LrPolicy("linear", base_workers=4, warmup_steps=6)
    other.load_state_dict(one.state_dict())
    assert factors(one, 2, 5) == factors(other, 2, 5)
