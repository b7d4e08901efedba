from __future__ import annotations

import pytest

from everstep.base.errors import ConfigError, InvariantViolation
from everstep.order.cursor import SampleOrder
from everstep.order.permutation import index_at


def test_an_epochs_tail_is_filled_with_the_head_of_the_next():
    order = SampleOrder(4, 20, 4, 3, steps=10)
    assert (order.global_batch, order.total_steps) == (12, 10)
    expected = [(0, index_at(4, 0, 20, 18)), (0, index_at(4, 0, 20, 19)), (1, index_at(4, 1, 20, 0))]
    assert order.samples(2, 2) == tuple(expected) and len(expected) == 3


def test_the_last_epoch_ends_with_fewer_samples():
    order = SampleOrder(0, 20, 4, 3, epochs=2)
    assert order.total_steps == 4
    assert [len(order.samples(4, lane)) for lane in range(4)] == [3, 1, 0, 0]
    assert order.samples_before(4) == 36 and order.samples_before(5) == 40


def test_the_earlier_of_steps_and_epochs_ends_the_job():
    assert SampleOrder(0, 20, 4, 3, steps=3, epochs=2).total_steps == 3
    assert SampleOrder(0, 20, 4, 3, steps=9, epochs=2).total_steps == 4
    full = SampleOrder(0, 20, 4, 3, steps=4)
    assert sum(len(full.samples(4, lane)) for lane in range(4)) == 12


def test_a_step_may_not_cover_an_epoch_twice():
    assert SampleOrder(0, 12, 4, 3, epochs=1).total_steps == 1
    with pytest.raises(ConfigError, match=r"12 samples \(4 lanes x 3\), got 11 samples: lower --batch-size"):
        SampleOrder(0, 11, 4, 3, epochs=1)


def test_an_end_must_be_given():
    with pytest.raises(ConfigError, match="'steps' or 'epochs'"):
        SampleOrder(0, 20, 4, 3)


@pytest.mark.parametrize("wrong", [{"lanes": 0}, {"micro_batch": 0}, {"steps": 0}, {"epochs": -1}])
def test_counts_are_positive(wrong):
    values = {"lanes": 4, "micro_batch": 3, "steps": 5} | wrong
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected at least 1"):
        SampleOrder(0, 20, **values)


@pytest.mark.parametrize(("step", "lane"), [(0, 0), (11, 0), (1, -1), (1, 4)])
def test_outside_is_a_bug(step, lane):
    with pytest.raises(InvariantViolation):
        SampleOrder(0, 20, 4, 3, steps=10).samples(step, lane)


def test_epoch_of():
    order = SampleOrder(0, 20, 4, 3, epochs=2)
    assert [order.epoch_of(step) for step in range(1, 6)] == [0, 0, 1, 1, 2]


def test_epochs_are_over_in_their_last_step_also_in_that_of_the_job():
    order = SampleOrder(0, 20, 4, 3, epochs=2)
    assert [order.epochs_over(step) for step in range(1, 5)] == [0, 1, 0, 2]
    assert [SampleOrder(0, 20, 4, 3, steps=3).epochs_over(step) for step in range(1, 4)] == [0, 1, 0]
