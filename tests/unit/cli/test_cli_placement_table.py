from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.cli.job import Request
from everstep.cli.placement_table import placement_rows, print_placement
from everstep.cli.probe import Probe, look_at_model
from everstep.train.stage import chosen_cut
from everstep.train.task import Task


class Four(Task):
    sizes: list[int] | None = None

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def cuts(self, model: nn.Module, parts: int) -> list[int] | None:
        return self.sizes


def config(**values: Any) -> Any:
    return load_config([("test", {"steps": 1, **values})])


def looked(task: Task) -> Probe:
    return look_at_model("t", task, Probe())


def test_a_row_per_stage_says_who_does_what() -> None:
    task = Four()
    task.config = config(stages=2, redundancy=1)
    rows = placement_rows(task.config, looked(task))
    assert [row["parts"] for row in rows] == [[[0, 2]], [[2, 4]]]
    assert [row["parameters"] for row in rows] == [8, 8]
    assert [(row["leader"], row["backups"]) for row in rows] == [(0, [1]), (2, [3])]
    assert rows[0]["roles"] == {"0": "active", "1": "standby"}
    assert rows[1]["lanes"] == {"2": list(range(8)), "3": []}


def test_processes_of_each_worker_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    task = Four()
    task.config = config(**{"workers": 2, "lanes": 6, "cell.fsdp": 2})
    (row,) = placement_rows(task.config, looked(task))
    assert row["cells"]["1"] == [
        {"rank": 0, "role": "head", "host": 0, "lanes": [3, 5], "shards": []},
        {"rank": 1, "role": "limb", "host": 0, "lanes": [4], "shards": []},
    ]
    print_placement(task.config, Probe(), as_json=False)
    said = capsys.readouterr().out
    assert "limb" in said and "lie once in each cell's shared memory" in said


def test_hosts_of_each_process_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    task = Four()
    task.config = config(**{"lanes": 4, "cell.fsdp": 4, "cell.hosts": 2})
    print_placement(task.config, looked(task), as_json=False)
    said = capsys.readouterr().out
    drawn = [line.split() for line in said.splitlines() if "limb" in line or "head" in line]
    assert [(*row[1:3], " ".join(row[3:6])) for row in drawn] == [
        ("0", "head", "1 of 2"),
        ("1", "limb", "1 of 2"),
        ("2", "limb", "2 of 2"),
        ("3", "limb", "2 of 2"),
    ]
    assert "once in each cell, divided among its 2 hosts" in said


def test_shards_of_each_process_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    task = Four()
    task.config = config(**{"lanes": 4, "cell.fsdp": 2, "cell.tp": 2, "cell.shards": 4})
    print_placement(task.config, looked(task), as_json=False)
    drawn = [line.split() for line in capsys.readouterr().out.splitlines() if "limb" in line or "head" in line]
    assert drawn == [
        ["0", "0", "head", "0,2", "0-1"],
        ["0", "1", "limb", "0,2", "2-3"],
        ["0", "2", "limb", "1,3", "0-1"],
        ["0", "3", "limb", "1,3", "2-3"],
    ]


def test_a_map_says_units_leader_and_roles(capsys: pytest.CaptureFixture[str]) -> None:
    task = Four()
    task.sizes = [2, 2]
    task.config = config(
        stages=2,
        map=[
            {"units": [0, 0], "leader": 2, "backups": [{"worker": 0, "role": "standby"}]},
            {"units": [1, 3], "leader": 1},
        ],
    )
    print_placement(task.config, looked(task), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["0", "0", "Linear", "4", "2", "0", "standby", "cpu", "0:-", "2:0-7"]
    assert lines[2].split()[:5] == ["1", "1-3", "3", "x", "Linear"]
    print_placement(task.config, looked(task), as_json=True)
    assert json.loads(capsys.readouterr().out)["stages"][0]["leader"] == 2


def test_measured_times_and_devices_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    task = Four()
    task.config = config(
        stages=2,
        cut="measured",
        device="cuda",
        map=[{"workers": [0, 1], "devices": ["cuda:0", "cuda:1"]}, {"workers": [2]}],
    )
    probe = look_at_model("t", task, Probe(unit_ms=[6.0, 1.0, 1.0, 2.25]))
    print_placement(task.config, probe, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ms per lane") and lines[1].endswith("6.0") and lines[2].endswith("4.2")
    assert "0:cuda:0 1:cuda:1" in lines[1]
    assert [row["ms_per_lane"] for row in placement_rows(task.config, probe)] == [6.0, 4.25]


def test_the_task_prefers_its_own_cut() -> None:
    task = Four()
    task.config, task.sizes = config(stages=2), [3, 1]
    assert chosen_cut(task.config, task, task.build_model()) == ((0, 3), (3, 4))


def test_a_model_that_cannot_be_built_is_one_clear_line() -> None:
    class Broken(Four):
        def build_model(self) -> nn.Module:
            raise RuntimeError("no such\nfile")

    task = Broken()
    task.config = config()
    with pytest.raises(ConfigError, match=r"^task 't': its model cannot be built: RuntimeError: no such file$"):
        looked(task)
    few = Four()
    few.config = config(stages=5)
    with pytest.raises(ConfigError, match="stages: the model has 4 units, fewer than the 5 parts"):
        looked(few)


def test_a_model_that_needs_real_memory_is_really_built() -> None:
    class Counting(Four):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.get_parameter("0.weight").sum().item()  # impossible on the meta device
            return model

    task = Counting()
    task.config = config()
    assert looked(task).units == ["Linear"] * 4


def test_resnets_are_cut_into_the_classic_stages() -> None:
    from everstep.zoo.resnet import ResNet

    model = ResNet(50, 10, channels=1, small_input=True)
    assert model.cuts(5) == [1, 3, 4, 6, 4]
    assert model.cuts(3) == [6, 6, 6] and model.cuts(19) is None


def test_a_script_is_not_split() -> None:
    from everstep.base.errors import ConfigError
    from everstep.cli.job import effective_config

    with pytest.raises(ConfigError, match=r"expected 1 for a script that calls .*, got 2"):
        effective_config({}, Request((("options", {"stages": 2}),)), script=True)
