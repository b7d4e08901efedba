"""Looking at a task that is to be split, before its job starts: can it be split like this, and what do its units cost?

Apart from the workers, which find the same when they cut the model: a job that cannot work never starts, and the time
of each unit is measured in one place only, for no two measurements are alike and all workers must cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from everstep.base.config import Config
from everstep.base.errors import ConfigError, EverstepError
from everstep.data.batch import to_device
from everstep.data.fetch import Recipe, fetch
from everstep.exact.seeding import build_seed, seed_all
from everstep.placement.cuts import ModelCut
from everstep.train.assembly import prepare_torch, sample_order
from everstep.train.composition import check_units, measure_costs
from everstep.train.cut import chosen_cut
from everstep.train.model_call import ModelCall
from everstep.train.parts import Parts
from everstep.train.precision import autocast
from everstep.train.stage import refuse_hidden_ties
from everstep.train.task import Task


@dataclass(frozen=True)
class SplitFacts:
    """cut: of the units, one run per part. unit_ms: of one lane, forward and backward; empty if not asked for."""

    cut: ModelCut
    unit_ms: tuple[float, ...] = ()


def look_at_split(task: Task) -> SplitFacts | None:
    """See that the task can be split as its config wants; with `cut: measured`, how long its units take.

    Runs one lane of the first step, forward, in this process. None if the task's own code raises: its workers meet
    that too, and say where.

    Raises: ConfigError, one line, if it cannot be split.
    """
    config: Config = task.config
    device = prepare_torch(config)
    try:
        seed_all(build_seed(config.seed))
        model = task.build_model().to(device)
        units = task.units(model)
        dataset = task.build_dataset("train")
        recipe = Recipe(dataset, sample_order(config, dataset), task.collate, config.seed)
        batch = to_device(fetch(recipe, 1, 0)[0], device)
    except Exception:
        return None
    whole = Parts(model, None, None, units)  # type: ignore[arg-type]  # nothing is trained here
    try:
        return _look(whole, task, batch, config, device)
    except ConfigError:
        raise
    except EverstepError as error:  # what a task may do only in one piece
        raise ConfigError(f"{error}; or use stages: 1") from None
    except Exception:
        return None


def _look(whole: Parts, task: Task, batch: Any, config: Config, device: torch.device) -> SplitFacts:
    if config.cut != "measured":
        cut = chosen_cut(config, task, whole.model)
        _check(whole, task, batch, config, device, cut)
        return SplitFacts(cut)
    check_units(whole, task.loss, batch, config, device)  # a model that does not work cannot be measured
    unit_ms = tuple(1e3 * s for s in measure_costs(whole, task.loss, batch, config, device))
    cut = chosen_cut(config, task, whole.model, unit_ms)
    _check(whole, task, batch, config, device, cut)
    return SplitFacts(cut, unit_ms)


def _check(whole: Parts, task: Task, batch: Any, config: Config, device: torch.device, cut: ModelCut) -> None:
    refuse_hidden_ties(whole, cut, config.stages)
    output = check_units(whole, task.loss, batch, config, device, cut)
    _check_loss(whole.model, task, batch, output, config, device)


def _check_loss(model: nn.Module, task: Task, batch: Any, output: Any, config: Config, device: torch.device) -> None:
    """The loss as the last stage runs it, upon what the units gave."""
    call = ModelCall(model)
    try:
        with autocast(config.precision, device):
            call.result(task.loss, batch, lambda: output)
    finally:
        call.release()
