"""What a limb's lanes read beside tensors is what the head's read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.train.cell_beside import beside_lanes, groups_of, take_beside, take_groups
from everstep.train.replica import StageReplica
from everstep.train.stage import Parts


def replica(schedule: Callable[[int], Any] = lambda step: 1 / (1 + step)) -> StageReplica:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    config = load_config([("test", {"lanes": 8, "micro_batch": 4, "steps": 3})])
    found = StageReplica(Parts(model, optimizer, scheduler, [model]), config, torch.device("cpu"))
    found.state.settings.begin()
    return found


def test_hyperparameters_the_scheduler_and_settings_follow_from_step_to_step() -> None:
    head, limb = replica(), replica()
    for step in range(3):
        head.state.settings.before_lanes()
        take_beside(limb, json.loads(json.dumps(beside_lanes(head))))
        assert limb.parts.scheduler.last_epoch == head.parts.scheduler.last_epoch == step
        assert groups_of(limb.parts.optimizer) == groups_of(head.parts.optimizer)
        assert limb.parts.model[1].p == head.parts.model[1].p
        head.parts.optimizer.step()
        head.parts.scheduler.step()
        head.state.settings.after_update()
        head.parts.model[1].p = 0.5 / (2 + step)


def test_values_of_groups_keep_their_types() -> None:
    head, limb = replica(lambda step: np.cos(np.float64(step))), replica()
    take_groups(limb.parts.optimizer, json.loads(json.dumps(groups_of(head.parts.optimizer))))
    mine, theirs = limb.parts.optimizer.param_groups[0], head.parts.optimizer.param_groups[0]
    assert {k: (type(v), v) for k, v in mine.items() if k != "params"} == {
        k: (type(v), v) for k, v in theirs.items() if k != "params"
    }


def test_a_tensor_in_a_group_is_refused() -> None:
    head = replica()
    head.parts.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(ConfigError, match="expected plain values in groups and scheduler, got a tensor in group 0/lr"):
        beside_lanes(head)
