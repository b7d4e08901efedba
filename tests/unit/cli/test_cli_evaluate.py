"""`everstep eval` computes with the virtual shards of the job that the weights come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from everstep.base.config import load_config, to_dict
from everstep.base.errors import ConfigError
from everstep.cli.evaluate import WeightsGiven, evaluate_task
from everstep.exact.shard_sums import ShardMesh
from everstep.runtime.link.address import JOB_FILE

TASKS = Path(__file__).parents[2] / "job_tasks.py"


def _metrics(folder: Path, name: str, shards: int) -> dict[str, float]:
    from job_tasks import Sharded, Text

    config = load_config([("test", {"cell.shards": shards})])
    (folder / JOB_FILE).write_text(json.dumps({"task": f"{TASKS}:{name}", "argv": [], "config": to_dict(config)}))
    torch.manual_seed(3)
    weights = {"Sharded": Sharded, "Text": Text}[name]().build_model().state_dict()
    return evaluate_task(f"{TASKS}:{name}", folder, WeightsGiven(lambda model: model.load_state_dict(weights)))[0]


def test_the_shards_of_the_job_are_those_of_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    gather = ShardMesh.gather

    def seen(mesh: ShardMesh, mine: Any) -> Any:
        gathered.append(mesh.shards)
        return gather(mesh, mine)

    monkeypatch.setattr(ShardMesh, "gather", seen)
    whole = _metrics(tmp_path, "Sharded", 1)
    assert not gathered
    cut = _metrics(tmp_path, "Sharded", 4)
    assert set(gathered) == {4} and cut == pytest.approx(whole, rel=1e-5)
    with pytest.raises(ConfigError, match="Text has no plan of what is cut"):
        _metrics(tmp_path, "Text", 2)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_made_by_module_is_read_unit_by_unit_from_its_file(tmp_path: Path, shards: int) -> None:
    """Its parameters are the file's pages outside the passes of their units, and the metrics are the same."""
    from job_tasks import Sharded

    config = load_config([("test", {"cell.shards": shards, "meta_init": True})])
    task, file = f"{TASKS}:Sharded", tmp_path / "model.safetensors"
    (tmp_path / JOB_FILE).write_text(json.dumps({"task": task, "argv": [], "config": to_dict(config)}))
    torch.manual_seed(3)
    weights = {name: t.clone() for name, t in Sharded().build_model().state_dict().items()}  # tied ones, too
    save_file(weights, file)
    whole = evaluate_task(task, tmp_path, WeightsGiven(lambda model: model.load_state_dict(weights)))
    assert evaluate_task(task, tmp_path, WeightsGiven(pytest.fail, file)) == whole
    save_file({**weights, "more": torch.ones(1)}, file)
    with pytest.raises(ConfigError, match=r"do not fit the task's model: .*more"):
        evaluate_task(task, tmp_path, WeightsGiven(pytest.fail, file))
