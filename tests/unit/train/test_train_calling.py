"""What the user's code raises becomes one line; early stop says what it needs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from everstep.base.config_keys import EarlyStopConfig
from everstep.base.errors import ConfigError, JobFailed, TaskError
from everstep.train.task import Task, calling, samples_evaluated_at_once, where
from everstep.train.trainer import EarlyStop


class Broken(Task):
    def loss(self, model: Any, batch: Any) -> Any:
        return torch.zeros(2) @ torch.zeros(3)

    def metrics(self, model: Any, batch: Any) -> Any:
        raise JobFailed("over")


def test_the_users_line_is_named_not_the_librarys() -> None:
    with pytest.raises(TaskError, match=rf"Broken.loss raised RuntimeError: .* \({os.path.basename(__file__)}:\d+\)"):
        calling(Broken(), "loss", None, None)


def test_operating_faults_pass() -> None:
    with pytest.raises(JobFailed, match="over"):
        calling(Broken(), "metrics", None, None)


@pytest.mark.parametrize("size", [0, 8.0, None])
def test_a_batch_of_an_evaluation_that_cannot_be(size: Any) -> None:
    task = Broken()
    task.evaluation_batch = lambda: size  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=rf"Broken\.evaluation_batch: expected .* at least 1, got {size}"):
        samples_evaluated_at_once(task)


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    assert where(ValueError("x")) == ""


def test_early_stop_stops_at_the_target_or_for_lack_of_progress() -> None:
    stop = EarlyStop(EarlyStopConfig("loss", "min", patience=2, min_delta=0.1, target=0.5))
    assert stop.observe({"loss": 2.0}) is None
    assert stop.observe({"loss": 1.95}) is None, "not better by min_delta"
    again = EarlyStop(EarlyStopConfig("loss", "min", patience=2, min_delta=0.1, target=0.5))
    again.load_state_dict(stop.state_dict())
    assert "has not improved for 2 evaluations; best 2.0000" in str(again.observe({"loss": 1.99}))
    assert "has reached the target 0.5" in str(stop.observe({"loss": 0.5}))


def test_early_stop_wants_its_metric() -> None:
    with pytest.raises(ConfigError, match=r"accuracy, loss.*'acc'"):
        EarlyStop(EarlyStopConfig("acc", "max", 3, 0.0, None)).observe({"accuracy": 1.0, "loss": 1.0})
