"""`checkpoints export | import | copy`, as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file, save_file

from everstep.base.errors import CheckpointCorrupt, ConfigError, EverstepError
from everstep.checkpoint.pointers import write_pins, write_pointer
from everstep.checkpoint.reader import newest_complete, open_checkpoint, steps_in, verify_blocks
from everstep.checkpoint.store import DirectoryStore
from everstep.cli.checkpoint_import import initial_replica
from everstep.cli.checkpoints_exchange import COMMANDS
from everstep.cli.job import Request, effective_config
from everstep.cli.task_loading import make_task, parse_task
from exchange_cases import same_bits, trained, write_step, write_unchanged

TASK = "mlp-digits"


def call(*words: Any) -> int:
    """`everstep checkpoints WORDS...`; errors are raised."""
    command = COMMANDS[str(words[0])]
    result = command.main([str(word) for word in words[1:]], standalone_mode=False)
    return int(result or 0)


def fails(error: type[Exception], text: str, *words: Any) -> None:
    with pytest.raises(error, match=text) as told:
        call(*words)
    assert "\n" not in str(told.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory with three checkpoints; 2 is the best one, and pinned as `good`."""
    store = DirectoryStore(tmp_path / "run" / "checkpoints")
    first = write_step(store, 1)
    write_unchanged(store, first, 2)
    write_step(store, 3, seed=3)
    write_pointer(store, "best.json", 2)
    write_pins(store, {"good": 2})
    return tmp_path / "run"


def test_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    wanted = {1: trained(1)[0].state_dict(), 2: trained(1)[0].state_dict(), 3: trained(3)[0].state_dict()}
    places = {
        "a": (3, [folder]),
        "b": (3, [folder / "checkpoints"]),
        "c": (1, [folder / "checkpoints" / "step-0000000001"]),
        "d": (1, [f"file://{folder}/checkpoints", "--step", "1"]),
        "e": (2, [folder, "--step", "best"]),
        "f": (2, [folder, "--step", "good"]),
        "g": (3, [folder, "--step", "latest"]),
    }
    for name, (step, words) in places.items():
        assert call("export", *words, "--to", out / f"{name}.safetensors", "--format", "safetensors") == 0
        found = load_file(out / f"{name}.safetensors")
        assert found.keys() == wanted[step].keys() and all(same_bits(found[n], t) for n, t in wanted[step].items())
    assert f"{out}/a.safetensors: 14 tensors of step 3" in capsys.readouterr().out
    assert call("export", folder, "--to", out / "m.pt", "--format", "torch", "--optimizer", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 3 and told["optimizer"] and told["files"] == [str(out / "m.pt")]
    assert "optimizer" in torch.load(out / "m.pt", weights_only=True)
    (tmp_path / "config.json").write_text("{}")
    words = ("--format", "hf", "--hf-config", tmp_path / "config.json", "--shard-size", "0.3kB")
    assert call("export", folder, "--to", out / "hf", *words) == 0
    assert (out / "hf" / "config.json").exists() and (out / "hf" / "model.safetensors.index.json").exists()


def test_export_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    to = ("--to", tmp_path / "x", "--format", "safetensors")
    fails(ConfigError, "there is no checkpoint in", "export", tmp_path / "none", *to)
    fails(ConfigError, r"no checkpoint of step 9; it has 1, 2, 3", "export", folder, "--step", "9", *to)
    fails(ConfigError, r"no checkpoint called 'bad': .*good", "export", folder, "--step", "bad", *to)
    fails(ConfigError, "exists already", "export", folder, "--to", tmp_path, "--format", "dcp")
    fails(ConfigError, "belong to --format hf", "export", folder, *to, "--hf-config", tmp_path)
    fails(ConfigError, "expected a size", "export", folder, *to[:3], "hf", "--shard-size", "many")
    fails(ConfigError, "holds no optimizer state", "export", folder, *to, "--optimizer")
    fails(ConfigError, "expected a directory or a URL", "export", "ftp://bucket", *to)
    fails(click.ClickException, "is not one of", "export", folder, "--to", tmp_path / "x", "--format", "onnx")
    manifest = folder / "checkpoints" / "step-0000000003" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":3', b'"step":4'))
    fails(CheckpointCorrupt, "altered; the next older one is step 2", "export", folder, *to)
    assert not (tmp_path / "x").exists()


def test_copy(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = DirectoryStore(tmp_path / "copy")
    assert call("copy", folder, tmp_path / "copy", "--step", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == [2] and told["files"] == 1 and told["bytes"] > 1000
    assert call("copy", folder, tmp_path / "copy", "--all") == 0
    assert "were there already" in capsys.readouterr().out
    assert steps_in(target) == [1, 2, 3]
    for step in (1, 2, 3):
        verify_blocks(open_checkpoint(target, step))
    fails(ConfigError, "contradict", "copy", folder, tmp_path / "copy", "--all", "--step", "1")
    fails(ConfigError, "to itself", "copy", folder, folder / "checkpoints")
    fails(ConfigError, "names one checkpoint", "copy", folder, tmp_path / "copy" / "step-0000000001")
    fails(ConfigError, "there is no checkpoint in", "copy", tmp_path / "none", tmp_path / "copy", "--all")
    (part,) = (folder / "checkpoints" / "step-0000000003").glob("part*")
    part.unlink()
    fails(CheckpointCorrupt, "is not whole", "copy", folder, tmp_path / "other")
    assert newest_complete(DirectoryStore(tmp_path / "other")) is None


def fresh() -> Any:
    task = make_task(parse_task(TASK))
    return initial_replica(task, effective_config(task.defaults, Request(()), script=True))


def test_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = fresh().parts.model
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter))
    weights = {name: t.clone().contiguous() for name, t in theirs.state_dict().items()}
    save_file(weights, tmp_path / "m.safetensors")
    path = tmp_path / "m.safetensors"
    assert call("import", path, "--task", TASK, "--to", tmp_path / "start", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 0 and told["task"] == TASK and "optimizer state fresh" in told["taken"]

    replica = fresh()
    found = newest_complete(DirectoryStore(tmp_path / "start"))
    assert found is not None and found.step == 0
    found.load_into({0: replica.state})
    assert all(same_bits(t, weights[name]) for name, t in replica.parts.model.state_dict().items())

    fails(ConfigError, "has checkpoints already", "import", path, "--task", TASK, "--to", tmp_path / "start")
    fails(ConfigError, "there is no", "import", tmp_path / "x", "--task", TASK, "--to", tmp_path / "new")
    fails(EverstepError, "no ready task", "import", path, "--task", "mlp", "--to", tmp_path / "new")
    name = next(iter(weights))
    save_file({**weights, "odd": torch.zeros(2), name: torch.zeros(3)}, path)
    fails(ConfigError, f"unexpected: odd; of another type or shape: {name}", *imported(path, tmp_path))
    save_file({n: t for n, t in weights.items() if n != name}, path)
    fails(ConfigError, f"missing: {name}", *imported(path, tmp_path))
    assert not (tmp_path / "new").exists()


def imported(path: Path, tmp_path: Path) -> tuple[Any, ...]:
    return ("import", path, "--task", TASK, "--to", tmp_path / "new")
