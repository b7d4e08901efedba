from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everstep.order.cursor import SampleOrder
from everstep.order.ledger import LaneUse, LedgerRow, audit, decode_rows, encode_row, use_digest
from everstep.order.permutation import MAX_SIZE, Permutation, index_at


@st.composite
def orders(draw):
    lanes = draw(st.integers(1, 9))
    micro_batch = draw(st.integers(1, 5))
    size = draw(st.integers(lanes * micro_batch, lanes * micro_batch + 60))
    epochs = draw(st.integers(1, 4))
    return SampleOrder(draw(st.integers(0, 2**63 - 1)), size, lanes, micro_batch, epochs=epochs), epochs


def row_of(order: SampleOrder, step: int) -> LedgerRow:
    lanes = [order.samples(step, lane) for lane in range(order.lanes)]
    return LedgerRow(step, 1, tuple(LaneUse(i, 0, len(s), use_digest(s)) for i, s in enumerate(lanes)))


@given(st.integers(1, 2000), st.integers(0, 2**64), st.integers(0, 10**6))
def test_permutations_are_bijections(n, seed, epoch):
    assert sorted(Permutation(seed, epoch, n).run(0, n)) == list(range(n))


@given(st.integers(1, MAX_SIZE), st.data())
def test_distinct_positions_have_distinct_samples(n, data):
    positions = data.draw(st.sets(st.integers(0, n - 1), max_size=50))
    found = [index_at(9, 2, n, p) for p in positions]
    assert len(set(found)) == len(positions) and all(0 <= index < n for index in found)


@given(orders())
def test_each_sample_of_each_epoch_is_used_once(case):
    order, epochs = case
    used = Counter(
        sample
        for step in range(1, order.total_steps + 1)
        for lane in range(order.lanes)
        for sample in order.samples(step, lane)
    )
    assert used == Counter((epoch, index) for epoch in range(epochs) for index in range(order.dataset_size))


@given(orders())
def test_only_the_last_step_is_short(case):
    order, _ = case
    for step in range(1, order.total_steps):
        assert all(len(order.samples(step, lane)) == order.micro_batch for lane in range(order.lanes))
    last = [len(order.samples(order.total_steps, lane)) for lane in range(order.lanes)]
    assert sum(last) > 0 and last == sorted(last, reverse=True)


@given(orders(), st.data())
def test_the_row_of_samples_does_not_depend_on_how_it_is_cut(case, data):
    """The naive oracle: one flat list of all samples, cut into steps and lanes."""
    order, epochs = case
    flat = [
        (e, i) for e in range(epochs) for i in Permutation(order.seed, e, order.dataset_size).run(0, order.dataset_size)
    ]
    step = data.draw(st.integers(1, order.total_steps))
    lane = data.draw(st.integers(0, order.lanes - 1))
    first = (step - 1) * order.global_batch + lane * order.micro_batch
    assert list(order.samples(step, lane)) == flat[first : first + order.micro_batch]
    by_steps = SampleOrder(order.seed, order.dataset_size, order.lanes, order.micro_batch, steps=order.total_steps)
    assert list(by_steps.samples(step, lane))[: len(order.samples(step, lane))] == list(order.samples(step, lane))


@given(orders(), st.data())
def test_a_good_ledger_is_clean_in_any_order_and_a_damaged_one_is_not(case, data):
    order, epochs = case
    rows = [row_of(order, step) for step in range(1, order.total_steps + 1)]
    shuffled = data.draw(st.permutations(rows + data.draw(st.lists(st.sampled_from(rows), max_size=3))))
    report = audit(decode_rows(b"".join(map(encode_row, shuffled))), order, order.total_steps)
    assert report.clean and report.steps == len(rows)
    assert [(e.samples, e.counted, e.missing, e.duplicated) for e in report.epochs] == [
        (order.dataset_size, order.dataset_size, 0, 0)
    ] * epochs

    at = data.draw(st.integers(0, len(rows) - 1))
    use = rows[at].lanes[0]  # lane 0 is never empty
    damaged = data.draw(
        st.sampled_from(
            [
                [],
                [dataclasses.replace(rows[at], lanes=rows[at].lanes[1:])],
                [dataclasses.replace(rows[at], lanes=(*rows[at].lanes, use))],
                [
                    dataclasses.replace(
                        rows[at], lanes=(dataclasses.replace(use, count=use.count + 1), *rows[at].lanes[1:])
                    )
                ],
                [
                    dataclasses.replace(
                        rows[at], lanes=(dataclasses.replace(use, digest=use.digest ^ 4), *rows[at].lanes[1:])
                    )
                ],
                [rows[at], dataclasses.replace(rows[at], step=order.total_steps + 1)],
                [rows[at], dataclasses.replace(rows[at], lanes=rows[at].lanes[1:])],
            ]
        )
    )
    assert not audit(rows[:at] + damaged + rows[at + 1 :], order, order.total_steps).clean
