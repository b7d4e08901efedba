"""What is found out about a task before its job starts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from everstep.base.errors import ConfigError
from everstep.cli.job import Request
from everstep.cli.probe import look, probe_task
from everstep.runtime.host.fork_server_client import EarlyForkServer

TASK = """
import os, torch, everstep

class Small(everstep.Task):
    defaults = {"steps": 2, "lanes": 2, "micro_batch": 2, "eval_every": 1}
    def build_model(self): return torch.nn.Linear(2, 1)
    def build_dataset(self, split): return torch.utils.data.TensorDataset(torch.ones(9, 2), torch.ones(9, 1))
    def build_optimizer(self, params): return torch.optim.SGD(params, lr=0.1)
    def loss(self, model, batch): return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

class Large(Small):
    def build_model(self):
        if torch.get_default_device().type != "meta": raise everstep.base.errors.ConfigError("made whole")
        return super().build_model()

class Named(Large):
    def metrics(self, model, batch): return {"error": torch.ones(2)}

class Exits(Small):
    def build_dataset(self, split): os._exit(9)

class Layers(Small):
    how = ""
    def build_model(self):
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)), torch.nn.Linear(2, 1))
        if self.how == "tie": model[2].weight = torch.nn.Parameter(model[0].weight.detach())
        if self.how == "shape": model[2] = torch.nn.Linear(3, 2)
        if self.how == "object": model[1].register_forward_hook(lambda *_: {"x": object()})
        return model
    def units(self, model): return list(model)[1:] if self.how == "units" else list(model)
    def loss(self, model, batch):
        if self.how == "twice": return (model(batch[0]) + model(batch[0])).sum()
        if self.how == "own": raise RuntimeError("mine")
        return super().loss(model, batch)

class Tie(Layers): how = "tie"
class Shape(Layers): how = "shape"
class Object(Layers): how = "object"
class Units(Layers): how = "units"
class Twice(Layers): how = "twice"
class Own(Layers): how = "own"

class Slow(Layers):
    def build_model(self):
        import time
        model = super().build_model()
        model[0].register_forward_hook(lambda *_: time.sleep(0.02))
        return model
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "probed_tasks.py"
    path.write_text(TASK)
    return str(path)


def asked(**layer: object) -> Request:
    return Request((("options", dict(layer)),))


def refusal(task: str, units: bool = False, **layer: object) -> str:
    with pytest.raises(ConfigError) as caught:
        look(task, asked(**layer), units)
    return str(caught.value)


def test_size_of_the_data_and_units(file: str) -> None:
    probe = look(f"{file}:Small", asked(), units=True)
    assert (probe.dataset_size, probe.units, probe.stage_parameters) == (9, ["Linear"], [3])


def test_a_metric_that_the_task_does_not_have(file: str) -> None:
    assert look(f"{file}:Small", asked(early_stop={"metric": "loss"}), units=False).dataset_size == 9
    error = refusal(f"{file}:Small", early_stop={"metric": "acuracy"})
    assert error == "early_stop.metric: expected one of the task's metrics (loss), got 'acuracy'"


def test_a_model_made_by_module_is_not_made_in_one_process_for_its_metric(file: str) -> None:
    look(f"{file}:Large", asked(early_stop={"metric": "loss"}, meta_init=True), units=False)
    error = refusal(f"{file}:Large", early_stop={"metric": "los"}, meta_init=True)
    assert error == "early_stop.metric: expected one of the task's metrics (loss), got 'los'"
    look(f"{file}:Named", asked(early_stop={"metric": "error"}, meta_init=True), units=False)
    with pytest.raises(ConfigError, match="made whole"):
        look(f"{file}:Large", asked(early_stop={"metric": "loss"}), units=False)


def test_a_task_that_ends_its_process(file: str) -> None:
    with contextlib.closing(EarlyForkServer(1, ("torch",))) as server, pytest.raises(ConfigError, match="exit code 9"):
        probe_task(f"{file}:Exits", asked(), server)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("Small", "the model has 1 unit, fewer than the 2 parts to cut it into: use at most 1"),
        ("Tie", "0.weight (unit 0, stage 0) and 2.weight (unit 2, stage 1) share memory"),
        ("Shape", "unit 2 (Linear) of stage 1 cannot work on what unit 1 (Linear) of stage 0 returns (float32 [2, 2])"),
        ("Object", "the output of unit 1 (Linear) of stage 0 has a object"),
        ("Units", "the model's whole forward pass to the bit, but output differs"),
        ("Twice", "called the model twice; with stages it must call it exactly once"),
    ],
)
def test_what_cannot_be_split_is_one_line_before_the_start(file: str, task: str, words: str) -> None:
    error = refusal(f"{file}:{task}", stages=2, cut="counted")
    assert words in error and "\n" not in error


def test_what_the_task_itself_raises_is_left_to_its_workers(file: str) -> None:
    probe = look(f"{file}:Own", asked(stages=2), units=False)
    assert not probe.split_checked


def test_a_cut_by_measured_times(file: str) -> None:
    counted = look(f"{file}:Slow", asked(stages=2), units=True)
    assert counted.cut == [[0, 2], [2, 4]] and counted.split_checked and not counted.unit_ms
    probe = look(f"{file}:Slow", asked(stages=2, cut="measured"), units=True)
    assert probe.cut == [[0, 1], [1, 4]] and probe.unit_ms[0] > 15.0
    assert look(f"{file}:Slow", asked(stages=2, cut=[1, 3]), units=True).cut == probe.cut
    assert "expected 4 units in all, got 5" in refusal(f"{file}:Slow", stages=2, cut=[1, 4])


def test_a_device_that_is_not_there(file: str) -> None:
    assert "'cuda:99' was asked for" in refusal(f"{file}:Small", device="cuda:99")
