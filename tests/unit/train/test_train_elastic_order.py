"""Sample order when the batch follows the number of workers."""

from __future__ import annotations

from everstep.train.elastic import ElasticOrder


def run(order: ElasticOrder, workers: list[int]) -> list[list[tuple[int, int]]]:
    """One list of (epoch, index) per step."""
    steps = []
    for number, count in enumerate(workers, start=1):
        used = [s for lane in range(order.lanes) for s in order.samples(number, lane)]
        order.advance(number, len(used), count)
        steps.append(used)
    return steps


def test_batch_follows_the_workers_of_the_step_before() -> None:
    order = ElasticOrder(0, 1000, lanes=8, base_micro_batch=4, base_workers=4, steps=10, epochs=None)
    sizes = [len(s) for s in run(order, [4, 4, 3, 3, 6, 6])]
    assert sizes == [32, 32, 32, 24, 24, 48]


def test_every_sample_of_every_epoch_exactly_once() -> None:
    order = ElasticOrder(3, 97, lanes=4, base_micro_batch=4, base_workers=4, steps=None, epochs=2)
    used: list[tuple[int, int]] = []
    pattern = [4, 3, 3, 6, 6, 2, 1, 1, 1, 5]
    number = 0
    while number < order.total_steps:
        number += 1
        step = [s for lane in range(order.lanes) for s in order.samples(number, lane)]
        order.advance(number, len(step), pattern[number % len(pattern)])
        used += step
    assert sorted(used) == [(epoch, i) for epoch in range(2) for i in range(97)]


def test_state_goes_over() -> None:
    one = ElasticOrder(0, 500, lanes=4, base_micro_batch=4, base_workers=4, steps=10, epochs=None)
    run(one, [4, 3, 2])
    other = ElasticOrder(0, 500, lanes=4, base_micro_batch=4, base_workers=4, steps=10, epochs=None)
    other.load_state_dict(one.state_dict())
    assert one.samples(4, 1) == other.samples(4, 1)
