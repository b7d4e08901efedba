"""Where the model of a task is cut: by hand, where the task prefers, or balanced by counted or measured cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.base.pool_wish import parse_cut
from everstep.base.stage_map import parse_map
from everstep.placement.cuts import ModelCut, choose, of_sizes

if TYPE_CHECKING:
    from everstep.train.task import Task


def chosen_cut(config: Config, task: Task, model: nn.Module, unit_ms: Sequence[float] = ()) -> ModelCut:
    """The cut that this job trains with, the same at every worker: a function of these alone.

    model: whole; on the meta device will do, as only the numbers of its parameters are looked at. unit_ms: measured
    once, before the job starts; its workers find in `cut` what came of it.

    Raises: ConfigError if there are more parts than units, or the config or the task names an impossible cut.
    """
    units = task.units(model)
    parts = config.stages * config.chunks
    if parts == 1:
        return ((0, len(units)),)
    rule = parse_cut(config.cut, parts)
    if isinstance(rule, tuple):
        return of_sizes(rule, len(units), "cut")
    if rule == "measured" and len(unit_ms) != len(units):
        raise ConfigError("cut: the time that the units take could not be measured: use cut=counted, or give the sizes")
    preferred = task.cuts(model, parts) if rule == "auto" else None
    if preferred is not None and not all(isinstance(size, int) for size in preferred):
        raise ConfigError(
            f"{type(task).__name__}.cuts: expected the number of units of each part, got {preferred!r:.80}"
        )
    costs = [float(n) for n in parameter_counts(units)] if rule != "measured" else list(unit_ms)
    stage_maps = parse_map(config.map, config.stages)
    return choose(costs, config.stages, config.chunks, stage_maps=stage_maps, preferred=preferred)


def parameter_counts(units: Sequence[nn.Module]) -> list[int]:
    """Parameter elements of each unit; one that several share counts at each, for each works with it."""
    return [sum(p.numel() for p in unit.parameters()) for unit in units]
