"""`everstep eval` computes with the virtual shards of the job that the weights come from."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import default_collate

from everstep.base.config import load_config, to_dict
from everstep.base.errors import ConfigError
from everstep.checkpoint.interchange import PassingWeights
from everstep.cli import evaluate
from everstep.cli.evaluate import WeightsGiven, evaluate_task
from everstep.data import batch
from everstep.exact.shard_sums import ShardMesh
from everstep.runtime.link.address import JOB_FILE
from everstep.train.task import Task
from exchange_cases import checkpoint_of

TASKS = Path(__file__).parents[2] / "job_tasks.py"


def _metrics(folder: Path, name: str, shards: int) -> dict[str, float]:
    from job_tasks import Sharded, Text

    config = load_config([("test", {"cell.shards": shards})])
    (folder / JOB_FILE).write_text(json.dumps({"task": f"{TASKS}:{name}", "argv": [], "config": to_dict(config)}))
    torch.manual_seed(3)
    weights = {"Sharded": Sharded, "Text": Text}[name]().build_model().state_dict()
    given = WeightsGiven(lambda model: model.load_state_dict(weights), pytest.fail)
    return evaluate_task(f"{TASKS}:{name}", folder, given)[0]


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


def test_batches_lie_as_those_of_the_training_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    monkeypatch.setattr(Task, "collate", lambda task, samples: default_collate([samples[0], *samples])[1:, 0:])
    monkeypatch.setattr(batch, "to_device", lambda tree, device: places.append(tree.data_ptr() % 64) or tree)
    _metrics(tmp_path, "Sharded", 1)
    assert set(places) == {0}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_made_by_module_is_read_unit_by_unit_from_a_disk(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters are a file's pages outside the passes of their units, those of a checkpoint in a file without a
    name; and the metrics are the same."""
    from job_tasks import Sharded

    torch.manual_seed(3)
    model = Sharded().build_model()
    weights, file = {name: t.clone() for name, t in model.state_dict().items()}, tmp_path / "final/model.safetensors"
    file.parent.mkdir()
    save_file(weights, file)  # tied ones, too
    checkpoint_of(model, None, tmp_path / "checkpoints")
    settings = {"cell.shards": shards, "meta_init": True}
    places = (".", "checkpoints/step-0000000005")
    whole = [_told(tmp_path, {**settings, "meta_init": False}, place) for place in places]
    monkeypatch.setattr(PassingWeights, "fill", pytest.fail)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(
        evaluate, "_by_unit", lambda task, read, by_unit=evaluate._by_unit: assert_lies_on_disk(by_unit(task, read))
    )
    assert [_told(tmp_path, settings, place) for place in places] == whole and whole[0] == whole[1]
    assert not list(scratch.iterdir())
    save_file({**weights, "more": torch.ones(1)}, file)
    with pytest.raises(ConfigError, match=r"do not fit the task's model: .*more"):
        _told(tmp_path, settings, ".")


def _told(folder: Path, settings: dict[str, Any], place: str) -> dict[str, float]:
    """What the command says of the weights there, which the job with these settings has made."""
    task = f"{TASKS}:Sharded"
    job = {"task": task, "argv": [], "config": to_dict(load_config([("test", settings)]))}
    (folder / JOB_FILE).write_text(json.dumps(job))
    done = CliRunner().invoke(evaluate.command, [task, "--from", str(folder / place), "--json"], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return dict(json.loads(done.stdout)["metrics"])


def assert_lies_on_disk(model: nn.Module) -> nn.Module:
    """All parameters lie in memory that maps a file."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        low, high = (int(at, 16) for at in span.split("-"))
        if inode != "0":
            spans.append((low, high))
    for name, parameter in model.named_parameters():
        assert any(low <= parameter.data_ptr() < high for low, high in spans), name
    return model
