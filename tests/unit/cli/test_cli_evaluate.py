"""`everstep eval` computes with the virtual shards of the job that the weights come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.base.config import load_config, to_dict
from everstep.base.errors import ConfigError
from everstep.cli.evaluate import evaluate_task
from everstep.exact.shard_sums import ShardMesh
from everstep.runtime.link.address import JOB_FILE

TASKS = Path(__file__).parents[2] / "job_tasks.py"


def _metrics(folder: Path, name: str, shards: int) -> dict[str, float]:
    from job_tasks import Sharded, Text

    config = load_config([("test", {"cell.shards": shards})])
    (folder / JOB_FILE).write_text(json.dumps({"task": f"{TASKS}:{name}", "argv": [], "config": to_dict(config)}))
    torch.manual_seed(3)
    weights = {"Sharded": Sharded, "Text": Text}[name]().build_model().state_dict()
    return evaluate_task(f"{TASKS}:{name}", folder, lambda model: model.load_state_dict(weights))[0]


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
