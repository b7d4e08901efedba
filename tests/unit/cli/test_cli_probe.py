"""What is found out about a task before its job starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.base.errors import ConfigError
from everstep.cli.job import Request
from everstep.cli.probe import look, probe_task

TASK = """
import os, torch, everstep

class Small(everstep.Task):
    defaults = {"steps": 2, "lanes": 2, "micro_batch": 2, "eval_every": 1}
    def build_model(self): return torch.nn.Linear(2, 1)
    def build_dataset(self, split): return torch.utils.data.TensorDataset(torch.ones(9, 2), torch.ones(9, 1))
    def build_optimizer(self, params): return torch.optim.SGD(params, lr=0.1)
    def loss(self, model, batch): return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

class Exits(Small):
    def build_dataset(self, split): os._exit(9)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "probed_tasks.py"
    path.write_text(TASK)
    return str(path)


def asked(**layer: object) -> Request:
    return Request((("options", dict(layer)),))


def test_size_of_the_data_and_units(file: str) -> None:
    probe = look(f"{file}:Small", asked(), units=True)
    assert (probe.error, probe.dataset_size) == ("", 9)
    assert [(u.name, u.parameters) for u in probe.units] == [("Linear", 3)]


def test_a_metric_that_the_task_does_not_have(file: str) -> None:
    assert look(f"{file}:Small", asked(early_stop={"metric": "loss"}), units=False).error == ""
    error = look(f"{file}:Small", asked(early_stop={"metric": "acuracy"}), units=False).error
    assert error == "early_stop.metric: expected one of the task's metrics (loss), got 'acuracy'"


def test_a_task_that_ends_its_process(file: str) -> None:
    with pytest.raises(ConfigError, match="exit code 9"):
        probe_task(f"{file}:Exits", asked())
