from __future__ import annotations

import dataclasses

import pytest

from everstep.order.cursor import SampleOrder
from everstep.order.ledger import EpochReport, LaneUse, LedgerRow, audit, decode_rows, encode_row, steps_of, use_digest

ORDER = SampleOrder(3, 20, 4, 3, epochs=2)  # 4 steps; the last has 3, 1, 0, 0 samples


def good_row(step, generation=1, order=ORDER):
    uses = []
    for lane in range(order.lanes):
        samples = order.samples(step, lane)
        uses.append(LaneUse(lane, lane % 2, len(samples), use_digest(samples)))
    return LedgerRow(step, generation, tuple(uses))


def good_rows(order=ORDER):
    return [good_row(step, order=order) for step in range(1, order.total_steps + 1)]


def with_lane(row, lane, **changes):
    uses = tuple(dataclasses.replace(use, **changes) if use.lane == lane else use for use in row.lanes)
    return dataclasses.replace(row, lanes=uses)


def test_a_clean_ledger():
    report = audit(good_rows(), ORDER, 4)
    assert report.clean and report.complete and report.problems == () and report.steps == 4
    assert report.epochs == (EpochReport(0, 20, 20, 0, 0), EpochReport(1, 20, 20, 0, 0))


def test_a_part_of_the_steps():
    report = audit(good_rows()[:2], ORDER, 2)
    assert report.clean
    assert report.epochs == (EpochReport(0, 20, 20, 0, 0), EpochReport(1, 4, 4, 0, 0))
    assert audit([], ORDER, 0) == audit([], ORDER, 0, ended=False)
    assert audit([], ORDER, 0).clean


def test_repeated_rows_count_once_whoever_wrote_them():
    redone = dataclasses.replace(good_row(2, generation=7), lanes=tuple(reversed(good_row(2).lanes)))
    redone = with_lane(redone, 1, worker_id=9)
    report = audit([*good_rows(), redone, *good_rows()], ORDER, 4)
    assert report.clean and report.steps == 4


def test_a_missing_step():
    rows = good_rows()
    report = audit([rows[0], rows[3]], ORDER, 4)
    assert not report.clean and not report.complete and report.steps == 2
    assert "steps 2..3 have no row" in report.problems
    assert report.epochs == (EpochReport(0, 20, 12, 8, 0), EpochReport(1, 20, 4, 16, 0))
    assert "step 4 has no row" in audit(rows[:3], ORDER, 4).problems


def test_a_wrong_digest():
    rows = good_rows()
    rows[1] = with_lane(rows[1], 2, digest=rows[1].lanes[2].digest ^ 1)
    report = audit(rows, ORDER, 4)
    assert report.problems[0] == "step 2, lane 2 (worker 0): used other samples than its 3"
    assert report.epochs == (EpochReport(0, 20, 18, 2, 0), EpochReport(1, 20, 19, 1, 0))


def test_a_wrong_count():
    rows = good_rows()
    rows[3] = with_lane(rows[3], 1, count=3)
    assert "step 4, lane 1 (worker 1): expected 1 samples, got 3" in audit(rows, ORDER, 4).problems


def test_a_lane_counted_twice():
    rows = good_rows()
    rows[0] = dataclasses.replace(rows[0], lanes=(*rows[0].lanes, rows[0].lanes[1]))
    report = audit(rows, ORDER, 4)
    assert not report.clean and "step 1, lane 1 (worker 1): counted twice" in report.problems
    assert report.epochs[0] == EpochReport(0, 20, 20, 0, 3)


def test_a_lane_left_out():
    rows = good_rows()
    rows[0] = dataclasses.replace(rows[0], lanes=rows[0].lanes[:3])
    report = audit(rows, ORDER, 4)
    assert not report.clean and "step 1, lane 3: not in the row" in report.problems
    empty_left_out = [*good_rows()[:3], dataclasses.replace(good_row(4), lanes=good_row(4).lanes[:2])]
    assert audit(empty_left_out, ORDER, 4).clean


def test_a_lane_that_does_not_exist():
    rows = good_rows()
    rows[0] = dataclasses.replace(rows[0], lanes=(*rows[0].lanes, LaneUse(4, 0, 3, 0)))
    assert "step 1, lane 4 (worker 0): there are only lanes 0..3" in audit(rows, ORDER, 4).problems


def test_conflicting_rows():
    other = with_lane(good_row(3, generation=5), 0, digest=1)
    report = audit([*good_rows(), other], ORDER, 4)
    assert report.problems == ("step 3 has conflicting rows (generations 1 and 5)",) and not report.clean


def test_steps_beyond_the_end():
    beyond = dataclasses.replace(good_row(4), step=5)
    assert "step 5 has a row, but the steps are 1..4" in audit([*good_rows(), beyond], ORDER, 4).problems
    assert (
        "step 0 has a row, but the steps are 1..4"
        in audit([*good_rows(), dataclasses.replace(beyond, step=0)], ORDER, 4).problems
    )
    assert not audit(good_rows(), ORDER, 3).clean
    assert audit(good_rows(), ORDER, 3, ended=False).clean
    assert not audit([*good_rows(), beyond], ORDER, 3, ended=False).clean
    assert "step 5 was committed, but the job ends at step 4" in audit(good_rows(), ORDER, 5).problems


def test_problems_are_bounded():
    order = SampleOrder(0, 100, 10, 1, epochs=20)
    wrong = [
        dataclasses.replace(row, lanes=tuple(dataclasses.replace(use, digest=0) for use in row.lanes))
        for row in good_rows(order)
    ]
    report = audit(wrong, order, order.total_steps)
    assert len(report.problems) == 1000
    assert report.problems[-1] == f"and {200 * 10 + 20 - 999} more problems"


def test_digest_and_line_are_pinned():
    assert use_digest([]) == 0xB4B2797457A0A6E4
    assert use_digest(iter([(0, 1), (2, 2**40)])) == 0x3799E19F91F62C56
    assert use_digest([(2, 2**40), (0, 1)]) != 0x3799E19F91F62C56
    row = LedgerRow(3, 1, (LaneUse(0, 2, 8, 255), LaneUse(1, 0, 7, 2**64 - 1)))
    assert encode_row(row) == (
        b'{"step":3,"generation":1,"lanes":[[0,2,8,"00000000000000ff"],[1,0,7,"ffffffffffffffff"]]}\n'
    )


def test_lines_come_back():
    rows = good_rows()
    data = b"".join(map(encode_row, rows))
    assert decode_rows(data) == rows
    assert decode_rows(data[:-1]) == rows  # only the line feed is missing
    assert decode_rows(b"") == []


def test_torn_lines_are_no_rows():
    rows = good_rows()
    lines = [encode_row(row) for row in rows]
    for cut in range(len(lines[3]) - 1):
        torn = lines[3][:cut]
        assert decode_rows(b"".join(lines[:3]) + torn) == rows[:3]
        assert decode_rows(torn + b"".join(lines[:3])) == rows[:3]  # appended to by the next writer
        assert list(steps_of(torn + b"".join(lines[:3]) + torn)) == [1, 2, 3]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"null", b'{"step":1}', b'{"step":1,"generation":1,"lanes":[[1]]}', b'{"step":"x"}', b"[]"]
)
def test_garbage_is_no_row(line):
    data = line + b"\n" + encode_row(good_row(1))
    assert decode_rows(data) == [good_row(1)] and list(steps_of(data)) == [1]


def test_complete_is_about_rows_that_are_there():
    rows = good_rows()
    assert audit(rows[:3], ORDER, 3, ended=False).complete, "of a running job the rest is not due"
    assert not audit(rows[1:], ORDER, 4).complete
    assert audit(rows[1:], ORDER, 4, after=1).complete, "the rows before are in another job's ledger"
    wrong = audit([*rows[:3], with_lane(rows[3], 0, digest=5)], ORDER, 4)
    assert wrong.complete and not wrong.clean
    assert audit([], ORDER, 0).complete
