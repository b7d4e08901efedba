"""Unknown keyword arguments of `join`, also where a launcher or `everstep run` has started the script."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.base.config import Config, load_config
from everstep.base.errors import ConfigError
from everstep.base.foreign import foreign_launcher
from everstep.cli.config_file import said_layers
from everstep.script.adopted import command_of
from everstep.train import join as join_module

GIVEN: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": 1.0}, "unknown key 'max_grad_norm' (from join): here it is clip_norm"),
    ({"max_grad_norm": None}, "unknown key 'max_grad_norm' (from join): here it is clip_norm"),
    ({"collate_fn": print}, "unknown key 'collate_fn' (from join): write Task.collate, or give join(collate=...)"),
    ({"lr": 0.1}, "unknown key 'lr' (from join): give it to your optimizer"),
    ({"epoch": 3}, "unknown key 'epoch' (from join): did you mean 'epochs'?"),
]


@pytest.mark.parametrize(("given", "said"), GIVEN)
def test_join_answers_with_the_right_name(given: dict[str, Any], said: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError) as refused:
        everstep.join(model, torch.optim.SGD(model.parameters(), lr=0.1), [0.0] * 64, **given)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("given", "said"), GIVEN)
def test_so_it_does_under_run_and_under_a_launcher(given: dict[str, Any], said: str) -> None:
    launched: Any = SimpleNamespace(config=Config(), job={})
    with pytest.raises(ConfigError) as refused:
        join_module._merge(launched, given)
    assert str(refused.value).startswith(said)
    foreign = foreign_launcher({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert foreign is not None
    with pytest.raises(ConfigError) as refused:
        command_of(foreign, __file__, [], given, None)
    assert str(refused.value).startswith(said)


def test_no_secret_of_a_script_is_in_the_command_that_it_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = foreign_launcher({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert foreign is not None
    given = {"env": {"KEY": "s3cret 😀"}, "notify.command": "tell --token s3cret", "lanes": 4}
    given["resume_from"] = "https://me:s3cret@host/runs"
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    command = command_of(foreign, str(script), [], given, None)
    assert "--set=lanes=4" in command and "s3cret" not in " ".join(command)
    config = load_config(said_layers(Path(command[command.index("--config") + 1]), []))
    assert config.env == {"KEY": "s3cret 😀"} and config.notify.command == "tell --token s3cret"
