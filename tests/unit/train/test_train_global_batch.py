"""Lanes and micro-batch: from what a script says, a DataLoader, and what the user has set."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.base.config import Config, load_config, to_dict
from everstep.base.errors import ConfigError
from everstep.cli.job import Request, effective_config
from everstep.train.global_batch import sized

CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[int, int]]] = [
    ({"lanes": 4, "micro_batch": 3}, {}, {}, (4, 3)),
    ({"lanes": 4}, {}, {"loaded": 32}, (4, 8)),
    ({"lanes": 4, "micro_batch": 8}, {}, {"loaded": 32}, (4, 8)),
    ({"lanes": 4, "accumulate": 3}, {}, {"loaded": 32}, (12, 8)),
    ({"lanes": 4, "accumulate": 3}, {"lanes": 8}, {"loaded": 32}, (24, 4)),
    ({"lanes": 4, "accumulate": 3}, {"accumulate": 2}, {"loaded": 32}, (8, 8)),
    ({"lanes": 4, "accumulate": 3}, {"lanes": 16, "accumulate": 2}, {"loaded": 32}, (16, 4)),
    ({"lanes": 4}, {"micro_batch": 5}, {"loaded": 32}, (4, 5)),
    ({"lanes": 4, "accumulate": 2}, {}, {"loaded": 32, "asked": 64}, (8, 8)),
]


@pytest.mark.parametrize(("own", "user", "batch", "expected"), CASES)
def test_lanes_and_micro_batch(
    own: dict[str, Any], user: dict[str, Any], batch: dict[str, Any], expected: tuple[int, int]
) -> None:
    job = to_dict(load_config([("user", user)]))
    config = load_config([("job.json", job), ("join", sized(own, job, tuple(user), **batch))])
    assert (config.lanes, config.micro_batch) == expected


def test_a_batch_that_lanes_do_not_divide_is_refused_with_those_that_would() -> None:
    with pytest.raises(ConfigError) as refused:
        sized({"lanes": 8}, to_dict(Config()), loaded=30)
    assert str(refused.value) == (
        "batch_size: expected a multiple of the 8 lanes, which share the DataLoader's batch, got 30: "
        "use batch_size=24 or 32, or lanes=6 or 10"
    )
    with pytest.raises(ConfigError, match=r"got 3: use batch_size=8, or lanes=3$"):
        sized({"lanes": 8}, to_dict(Config()), loaded=3)
    with pytest.raises(ConfigError, match=r"micro_batch: expected 4 .*got 5: leave it out"):
        sized({"lanes": 8, "micro_batch": 5}, to_dict(Config()), loaded=32)


def test_a_task_accumulates_by_its_config() -> None:
    request = Request((("--set", {"accumulate": 3, "steps": 1}),))
    assert effective_config({"lanes": 4, "micro_batch": 2}, request).lanes == 12
    sized_by_user = Request((("--set", {"accumulate": 3, "steps": 1}),), batch_size=24)
    assert effective_config({"lanes": 4}, sized_by_user).micro_batch == 2


def test_a_length_that_the_user_gives_replaces_the_tasks_own() -> None:
    own = {"steps": 20, "lanes": 4}
    for asked, ends in (
        ({}, (20, None)),
        ({"epochs": 60}, (None, 60)),
        ({"steps": 30}, (30, None)),
        ({"steps": 30, "epochs": 60}, (30, 60)),
        ({"epochs": None}, (20, None)),
    ):
        config = effective_config(own, Request((("--set", asked),)))
        assert (config.steps, config.epochs, config.lanes) == (*ends, 4), asked


def test_a_length_that_the_user_gives_replaces_the_scripts_own() -> None:
    job = to_dict(Config())
    assert sized({"steps": 20}, {**job, "epochs": 60}, ["epochs"]) == {}
    assert sized({"epochs": 3}, {**job, "steps": 500}, ["steps"]) == {}
    assert sized({"steps": 20}, {**job, "lanes": 4}, ["lanes", "epochs"]) == {"steps": 20}, "it has set none"
