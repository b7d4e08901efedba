from __future__ import annotations

import pytest

from everstep.base.errors import ConfigError
from everstep.base.stage_map import StageMap
from everstep.placement.cuts import balance, choose, of_map, of_sizes, units_of


def test_equal_units_are_cut_evenly():
    assert balance([1] * 6, 3) == ((0, 2), (2, 4), (4, 6))
    assert balance([0, 0, 0], 2) in (((0, 1), (1, 3)), ((0, 2), (2, 3)))


def test_under_the_dearest_part_the_others_are_even():
    assert balance([9, 1, 1, 1, 1], 3) == ((0, 1), (1, 3), (3, 5))


def test_a_hundred_units_are_cut_at_once():
    cut = balance([float(i % 7 + 1) for i in range(200)], 32)
    assert len(cut) == 32 and cut[-1][1] == 200


def test_by_hand_before_the_task_before_the_balance():
    costs = [1.0, 1.0, 1.0, 5.0]
    by_hand = (StageMap(((0, 0),)), StageMap(((1, 3),)))
    assert choose(costs, 2, stage_maps=by_hand, preferred=[2, 2]) == ((0, 1), (1, 4))
    assert choose(costs, 2, stage_maps=(StageMap(), StageMap()), preferred=[2, 2]) == ((0, 2), (2, 4))
    assert choose(costs, 2) == ((0, 3), (3, 4))


def test_chunks_go_round_the_stages():
    stage_maps = (StageMap(((0, 0), (3, 4))), StageMap(((1, 2), (5, 5))))
    cut = of_map(stage_maps, 6, 2)
    assert cut == ((0, 1), (1, 3), (3, 5), (5, 6))
    assert units_of(cut, 0, 2) == (0, 3, 4) and units_of(cut, 1, 2) == (1, 2, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: balance([1, 1], 3), "stages: the model has 2 units, fewer than the 3 parts to cut it into"),
        (lambda: of_sizes([1, 0], 1, "Task.cuts"), "Task.cuts: expected at least 1 unit per part, got [1, 0]"),
        (lambda: of_sizes([1, 1], 3, "Task.cuts"), "Task.cuts: expected 3 units in all, got 2"),
        (lambda: choose([1, 1, 1], 2, preferred=[3]), "Task.cuts: expected 2 sizes, one per part, got 1"),
        (lambda: of_map((StageMap(((0, 1),)), StageMap(((3, 4),))), 5), "map: stage 1 has the units 3 to 4"),
        (lambda: of_map((StageMap(((0, 5),)),), 5), "map: stage 0 has the units 0 to 5"),
        (lambda: of_map((StageMap(((0, 3),)),), 5), "map: the last part ends with unit 3, the model's last is 4"),
        (lambda: of_map((StageMap(((0, 3),)),), 4, 2), "map: stage 0 has 1 runs of units, expected one per chunk: 2"),
    ],
)
def test_impossible_cuts(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)
