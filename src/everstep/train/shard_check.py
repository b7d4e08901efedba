"""A check of a plan before the job starts: do the shards make up the model? A plan that does not fit a class's forward
pass would train another model without a word."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.data.batch import to_device
from everstep.data.loader import Recipe, fetch
from everstep.exact.seeding import build_seed, preserve_rng, seed_all
from everstep.train.job_data import read_by_order
from everstep.train.precision import prepare_torch
from everstep.train.stage import cut_into_shards
from everstep.train.task import Task

_CLOSE = 1e-3
"""Of the loss: rounding of other kernels stays far below."""


def look_at_shards(task: Task) -> None:
    """Compute the loss of one lane, without dropout, as a whole and by shards; and compare module by module.

    A model that is made module by module, or not in float32, is only cut; where the task's own code raises, its workers
    meet that error, too, and say where.

    Raises: ConfigError naming a module that cannot be cut, or that is another one by shards.
    """
    config: Config = task.config
    device = prepare_torch(config)
    seed_all(build_seed(config.seed))
    model = task.build_model().to(device)
    task.build_optimizer(list(model.parameters()))  # which may register hooks
    try:
        recipe = Recipe(*read_by_order(config, task.build_dataset("train")), task.collate, config.seed)
        batch = to_device(fetch(recipe, 1, 0)[0], device)
    except Exception:
        batch = None
    wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    before = [(module, dict(vars(module))) for module in model.eval().modules()]
    whole = _loss(task, model, batch) if batch is not None and wide else None
    for module, values in before:  # what the loss has set there would be in the shards' copies, as in no worker
        vars(module).clear()
        vars(module).update(values)
    mesh = cut_into_shards(task, model, config)
    if whole is None or mesh is None:
        return
    with mesh.comparing():
        found = _loss(task, model, batch)
    if found is not None and abs(found - whole) > _CLOSE * max(1.0, abs(whole)):
        raise ConfigError(
            f"cell.shards: the loss is another one by shards: expected about {whole:.6g}, got {found:.6g}: correct the "
            "plan, or set cell.tp=1 and cell.shards=1"
        )


def _loss(task: Task, model: Any, batch: Any) -> float | None:
    """Of one lane; None if there is none. A ConfigError of the task goes on."""
    try:
        with preserve_rng(), torch.no_grad():
            loss = task.loss(model, batch)
        value = loss[0] if isinstance(loss, tuple) else loss
        return float(value) if isinstance(value, Tensor) and bool(torch.isfinite(value)) else None
    except ConfigError:
        raise
    except Exception:
        return None
