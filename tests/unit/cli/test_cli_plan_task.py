"""`everstep plan time TASK` and `plan recommend TASK`: counted on the meta device, against counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.base.config import load_config
from everstep.cli.config_file import read_config_file
from everstep.cli.main import run_command
from everstep.cost.catalogue import CATALOGUE
from everstep.cost.step_time import STACKS

TASK = """
import torch
from torch import nn
import everstep

class Wide(everstep.Task):
    defaults = {"lanes": 8, "micro_batch": 4, "steps": 1}
    def build_model(self):
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    def units(self, model):
        return list(model)
    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.zeros(64, 512))
    def build_optimizer(self, params):
        return torch.optim.Adam(params)
    def loss(self, model, batch):
        return model(batch[0]).sum()
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "wide.py"
    path.write_text(TASK)
    return f"{path}:Wide"


def answered(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert run_command(["plan", *options, "--json"]) == code
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run_command(["plan", *options]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize("stages", ["1", "2"])
def test_memory_on_a_device_is_the_same_by_both_commands(
    task: str, stages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    time = answered(capsys, "time", task, "--gpus", "4", "--gpu", "v100-16", "--per-node", "4", "--pp", stages)
    memory = answered(capsys, "memory", task, "--workers", "4", "--gpu", "v100-16", "--pp", stages)
    assert memory["total_bytes"] == time["total_bytes"] and memory["fits"] is time["fits"] is True


def test_operations_of_a_lane_are_those_of_its_matrices(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "time", task, "--gpus", "2", "--samples", "1M")
    assert said["forward_flops_per_lane"] == 4 * 2 * 4 * 512 * 512 and said["parameters"] == 4 * 512 * 512
    stack, device = STACKS["megatron-2021"], CATALOGUE["a100-80"]
    lane_s = 3 * said["forward_flops_per_lane"] / device.peak["fp32"] / stack.matmul
    assert said["compute_s"] == pytest.approx(4 * lane_s, rel=0.05)  # four lanes each; activations are small
    assert said["step_s"] == pytest.approx(sum(said[f"{part}_s"] for part in ("compute", "exchange", "alone")))
    assert said["days"] == pytest.approx(1e6 / said["samples_per_s"] / 86400) and said["fits"] is True
    assert said["source"] and said["sources"]["memory"] and said["batch"] == 32


def test_stages_have_their_bubble_and_hold_less(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = answered(capsys, "time", task, "--gpus", "1")
    cut = answered(capsys, "time", task, "--gpus", "4", "--pp", "4")
    assert cut["compute_s"] == pytest.approx(whole["compute_s"] / 4)
    assert cut["bubble_s"] / (cut["bubble_s"] + cut["compute_s"]) == pytest.approx(3 / 11)
    assert cut["per_device_bytes"]["parameters"] == whole["per_device_bytes"]["parameters"] // 4
    slow = answered(capsys, "time", task, "--gpus", "1", "--slowest", "0.5")
    assert slow["compute_s"] == pytest.approx(2 * whole["compute_s"])


def test_recommended_splits_run(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "best.yaml"
    said = answered(capsys, "recommend", task, "--gpus", "4", "--write", str(path))
    best = said["best"]
    assert [one["step_s"] for one in best] == sorted(one["step_s"] for one in best) and all(o["why"] for o in best[:-1])
    assert {(one["split"]["pool"], one["split"]["stages"]) for one in best} == {(4, 1), (2, 2), (1, 4)}
    config = load_config([(str(path), read_config_file(path) | {"device": "cuda"})])
    assert (config.workers, config.stages) == (4, best[0]["split"]["stages"])
    assert run_command(["plan", "recommend", task, "--gpus", "4"]) == 0
    assert "before the next, because" in capsys.readouterr().out
    assert "exists" in refused(capsys, "recommend", task, "--gpus", "4", "--write", str(path))


def test_what_does_not_fit_is_an_answer(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small.yaml"
    figures = "peak_tflops: {fp32: 10}, memory: 64MB, bandwidth_gb_s: 100, link_gb_s: 10, network: 10Gb, price: 1"
    small.write_text(f"tiny: {{{figures}, mtbf: 30000h, source: here}}\n")
    options = ("--gpus", "2", "--gpu", "tiny", "--catalogue", str(small))
    assert answered(capsys, "recommend", task, *options, code=1)["fits"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "16"), "expected at most one device of each stage per lane (8), got 16"),
        (("--gpus", "8", "--pp", "8"), "expected at most one part for each of the 4 units"),
        (("--gpus", "3", "--pp", "2"), "expected a multiple of --pp (2) devices, got 3"),
        (("--gpus", "2", "--tp", "2"), "--tp: a task is planned data parallel and in stages"),
        (("--gpus", "2", "--params", "1B"), "expected a TASK, or a model by --params, got both"),
        (("--gpus", "2", "--tokens", "1B"), "--tokens: a TASK has samples: give --samples"),
        (("--gpus", "2", "--experts-per-token", "2"), "or a model by --experts-per-token, got both"),
        (("--gpus", "2", "--batch", "6"), "expected a multiple of the micro-batch 4"),
        (("--gpus", "2", "--dtype", "fp8"), "--dtype: expected one of"),
        (("--gpus", "2", "--slowest", "1.5"), "--slowest: expected a share"),
        (("--gpus", "2", "--samples", "many"), "--samples: expected a number"),
    ],
)
def test_refusals(options: tuple[str, ...], said: str, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "time", task, *options)


def test_a_script_and_failures_are_refused(tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.py").write_text("pass\n")
    assert "is a script" in refused(capsys, "time", str(tmp_path / "s.py"), "--gpus", "2")
    assert "everstep plan failures" in refused(capsys, "recommend", task, "--gpus", "2", "--mtbf", "10h")


def test_a_written_config_has_the_products_that_were_planned(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("recommend", task, "--gpus", "2", "--gpu", "h100-80", "--write")
    plain = answered(capsys, *options, str(tmp_path / "a.yaml"))
    narrow = answered(capsys, *options, str(tmp_path / "b.yaml"), "--dtype", "bf16")
    assert "precision" not in plain["written"]["config"] and narrow["written"]["config"]["precision"] == "bf16"
    none = answered(capsys, *options, str(tmp_path / "c.yaml"), "--dtype", "fp8", code=1)
    assert none["written"] is None and not none["best"][0]["runs"] and not (tmp_path / "c.yaml").exists()
