"""Predictions from what a job measured: lanes, stages, the exchange, intervals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.base.pipeline.schedule_table import KINDS
from everstep.cost import online
from everstep.cost.online import Calibrated, JobShape, Processors, WorkerTimes, calibrated
from everstep.placement.schedules import schedule, timeline

BUSY = WorkerTimes(40, {"forward": 1.0, "backward": 2.0, "load": 1.0, "reduce": 0.5, "agree": 0.1, "update": 0.2})
WAITS = WorkerTimes(40, {"forward": 1.0, "backward": 2.0, "load": 1.0, "reduce": 3.0, "agree": 0.1, "update": 0.3})


def test_a_step_is_the_lanes_of_the_fullest_worker_and_the_rest() -> None:
    found = calibrated(JobShape(8, 4), 2, [BUSY, WAITS])
    assert found is not None and found.lane_s == pytest.approx(0.1)
    assert found.exchange_s == pytest.approx(0.06) and found.alone_s == pytest.approx(0.02)  # those who wait, wait
    assert found.parts(2).step_s == pytest.approx(0.4 + 0.06 + 0.02)
    assert found.parts(3).compute_s == pytest.approx(0.3)
    assert found.parts(3).exchange_s == pytest.approx(0.06 * (2 / 3) / (1 / 2))
    assert found.parts(1).compute_s == pytest.approx(0.8) and found.parts(1).exchange_s == 0
    assert found.parts(8).compute_s == found.parts(9).compute_s == pytest.approx(0.1)


def test_the_bubble_is_no_exchange() -> None:
    waits = WorkerTimes(80, {"forward": 4.0, "backward": 8.0, "transfer": 1.7, "update": 0.2})  # ten steps of 8 lanes
    found = calibrated(JobShape(8, 4, stages=2), 2, [waits, waits])
    assert found is not None and found.lane_s == pytest.approx(0.15)
    assert found.exchange_s == pytest.approx(0.17 - 0.15) and found.parts(2).bubble_s == pytest.approx(0.15)
    assert found.parts(2).step_s == pytest.approx(1.2 + 0.17 + 0.02)


def test_of_one_worker_the_exchange_is_not_known() -> None:
    assert Calibrated(JobShape(8, 4), 1, 0.1, 0.01, 0.0).parts(4).exchange_s == 0.01


def test_without_lanes_nothing_is_known() -> None:
    assert calibrated(JobShape(8, 4), 2, [WorkerTimes(0, {"other": 3.0})]) is None
    assert calibrated(JobShape(8, 4), 2, []) is None


def test_a_lane_may_be_known_in_another_way() -> None:
    found = calibrated(JobShape(8, 4), 2, [BUSY], 0.03)
    assert found is not None and found.parts(2).compute_s == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("step_s", "lane_s", "exchange_s", "alone_s"),
    [(1.0, 0.1, 0.06, 0.02), (0.47, 0.1, 0.06, 0.01), (0.23, 0.05, 0.03, 0.0)],
)
def test_the_start_is_no_part_of_a_step(step_s: float, lane_s: float, exchange_s: float, alone_s: float) -> None:
    found = calibrated(JobShape(8, 4), 2, [BUSY, WAITS], step_s=step_s)
    assert found is not None
    assert (found.lane_s, found.exchange_s, found.alone_s) == pytest.approx((lane_s, exchange_s, alone_s))
    assert found.parts(2).step_s == pytest.approx(min(step_s, 0.48))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_stages_take_as_long_as_the_schedule_that_is_played_through(stages: int, kind: str) -> None:
    assert kind in KINDS
    parts = Calibrated(JobShape(8, 1, stages), stages, 3.0, 0.0, 0.0).parts(stages)
    assert parts.step_s == pytest.approx(timeline(schedule(kind, stages, 8), 1, 2).length)


def test_another_number_of_stages_divides_lanes_among_fewer_and_shorter_pools() -> None:
    parts = Calibrated(JobShape(8, 1), 4, 0.1, 0.0, 0.02).parts(4, stages=2)
    assert parts.compute_s == pytest.approx(4 * 0.05) and parts.bubble_s == pytest.approx(0.05)
    assert parts.alone_s == pytest.approx(0.01)


def test_the_best_interval_is_youngs() -> None:
    cost, between = 1.0, 7200.0
    best = min(range(10, 3000), key=lambda every: online.interval_loss(every, cost, between))
    assert best == pytest.approx((2 * cost * between) ** 0.5, rel=0.02)
    assert online.interval_loss(1e9, cost, between) == 1.0


def test_what_is_looked_at() -> None:
    assert online.worth_trying(2, 8) == [1, 2, 3, 4, 8]
    assert online.worth_trying(1, 1) == [1]
    assert online.stages_to_try(6) == [1, 2, 3, 6]
    assert online.off(1.1, 1.0) == pytest.approx(0.1) and online.off(1.0, 0.0) is None


def test_ranks_of_a_cell_share_its_lanes() -> None:
    cell = JobShape(8, 4, ranks=2)
    assert (cell.most_lanes(1), cell.most_lanes(2), cell.most_lanes(3)) == (4, 2, 2)
    assert Calibrated(cell, 2, 0.1, 0.0, 0.0).parts(1).compute_s == pytest.approx(0.4)


def test_workers_share_the_processors_of_their_host() -> None:
    found = Calibrated(JobShape(32, 1), 2, 0.1, 0.02, 0.01, Processors(2))
    assert found.parts(2).step_s == pytest.approx(1.6 + 0.03), "each has one"
    busy = found.parts(8)
    assert busy.compute_s == pytest.approx(4 * 0.1 * 4) and busy.alone_s == pytest.approx(0.04)
    assert busy.exchange_s == pytest.approx(0.02 * (7 / 8) / (1 / 2) * 4)
    waits = replace(found, processors=Processors(2, lanes=False)).parts(32)
    assert waits.compute_s == pytest.approx(0.1) and waits.alone_s == pytest.approx(0.16), "waits share nothing"
    assert Processors(2, hosts=4).stretch(8) == 1 and Processors(2, hosts=2, used=2).stretch(8) == 4
    assert replace(found, workers=8).parts(4).compute_s == pytest.approx(0.1 * 8 / 2), "and fewer are not disturbed"


def test_a_worker_that_waits_in_the_bubble_leaves_its_processor_to_others() -> None:
    """Three stages on two processors: ten lanes one after another, but the work of 24."""
    found = Calibrated(JobShape(8, 1, stages=3), 3, 0.1, 0.0, 0.0, Processors(2))
    assert found.parts(3).step_s == pytest.approx(1.0), "as it was measured"
    alone = replace(found, processors=Processors(3)).parts(3).step_s
    assert alone == pytest.approx(1.0) and Processors(2).stretch(3, 0.2) == pytest.approx(1.2)
    more = found.parts(24)  # one lane for each of eight in a stage: as much work, so as long
    assert more.compute_s + more.bubble_s == pytest.approx(1.0)
