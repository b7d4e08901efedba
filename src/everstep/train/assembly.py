"""Put a job's parts together: from a `Task`, or from what a user's own script hands to `join`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.exact.seeding import build_seed, seed_all
from everstep.order.cursor import SampleOrder
from everstep.train.calling import calling
from everstep.train.elastic_order import ElasticOrder
from everstep.train.link import Link
from everstep.train.parts import Parts
from everstep.train.precision import resolve_device
from everstep.train.replica import make_replica
from everstep.train.run import Run
from everstep.train.session import Session
from everstep.train.task import Task
from everstep.train.trainer import EarlyStop, make_early_stop


def prepare_torch(config: Config) -> torch.device:
    """Threads and determinism of this process; returns the device."""
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return resolve_device(config.device)


def sample_order(config: Config, dataset: Any) -> SampleOrder | ElasticOrder:
    """Which samples make up a lane, as the config's `batch` says.

    Raises: ConfigError if the dataset has no length, or is smaller than a global batch."""
    try:
        size = len(dataset)
    except TypeError:
        kind = type(dataset).__name__
        raise ConfigError(f"the dataset must be map-style, with __len__ and __getitem__; got {kind}") from None
    order = SampleOrder(config.seed, size, config.lanes, config.micro_batch, config.steps, config.epochs)
    if config.batch == "per_worker":
        if config.loader.workers:
            raise ConfigError(
                f"batch: per_worker changes what a lane holds as it goes, so it needs loader.workers=0, "
                f"got {config.loader.workers}"
            )
        return ElasticOrder(
            config.seed, size, config.lanes, config.micro_batch, config.workers, config.steps, config.epochs
        )
    return order


def assemble(link: Link, parts: Parts, dataset: Any, collate: Callable[[list[Any]], Any], device: torch.device) -> Run:
    """A run over these parts."""
    order = sample_order(link.config, dataset)
    if isinstance(order, ElasticOrder):
        parts.extras = {**parts.extras, "everstep.order": order}
    replica = make_replica(parts, link.config, device)
    return Run(Session(link, replica, dataset, collate, order), parts.model)


def assemble_task(link: Link, task: Task) -> tuple[Run, EarlyStop]:
    """Build everything a task describes, in a fixed order from fixed seeds.

    Raises: TaskError naming the method that raised; ConfigError for what cannot work.
    """
    config = link.config
    device = prepare_torch(config)
    seed_all(build_seed(config.seed))
    task.config = config
    model = calling(task, "build_model").to(device)
    units = calling(task, "units", model)
    dataset = calling(task, "build_dataset", "train")
    optimizer = calling(task, "build_optimizer", list(model.parameters()))
    scheduler = calling(task, "build_scheduler", optimizer)
    early_stop = make_early_stop(config)
    parts = Parts(model, optimizer, scheduler, units, {"everstep.early_stop": early_stop})
    return assemble(link, parts, dataset, task.collate, device), early_stop
