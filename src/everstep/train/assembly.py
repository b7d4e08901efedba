"""Put a job's parts together: from a `Task`, or from what a user's own script hands to `join`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from everstep.base.config import Config, device_of
from everstep.base.errors import ConfigError
from everstep.data.batch import to_device
from everstep.data.fetch import Recipe, fetch
from everstep.exact.seeding import build_seed, seed_all
from everstep.order.cursor import SampleOrder
from everstep.placement.cuts import units_of
from everstep.train.calling import calling
from everstep.train.cut import chosen_cut
from everstep.train.elastic import ElasticOrder
from everstep.train.link import WorkerLink
from everstep.train.parts import Parts
from everstep.train.precision import resolve_device
from everstep.train.replica import StageReplica, make_replica
from everstep.train.run import Run
from everstep.train.saving import Whole
from everstep.train.session import Session
from everstep.train.stage import build_model, build_stages
from everstep.train.task import Task
from everstep.train.trainer import EarlyStop, make_early_stop
from everstep.train.unsupported import refuse_unsupported
from everstep.train.view import Stages


def prepare_torch(config: Config, worker_id: int = 0, cell_rank: int = 0) -> torch.device:
    """Threads and determinism of this process; returns the device of this rank of a worker.

    Raises: ConfigError if it is not there.
    """
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = resolve_device(device_of(config, worker_id, cell_rank))
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


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


def assemble(
    link: WorkerLink,
    parts: Parts,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    device: torch.device,
    rewindable: bool = False,
) -> Run:
    """A run over these parts, of a model that is not split. rewindable: as for `Session`.

    Raises: ConfigError if the job is to have stages.
    """
    if link.config.stages > 1:
        raise ConfigError(
            "stages: a script that calls everstep.join runs its model's forward pass itself, so it cannot be split "
            f"into {link.config.stages} stages: write an everstep.Task, or set stages=1"
        )
    order = sample_order(link.config, dataset)
    if isinstance(order, ElasticOrder):
        parts = replace(parts, extras={**parts.extras, "everstep.order": order})
    replica = make_replica(parts, link.config, device)
    whole = Whole.of(parts.model)
    return Run(Session(link, Stages.unsplit(replica), device, dataset, collate, order, whole, rewindable), parts.model)


def assemble_task(link: WorkerLink, task: Task) -> tuple[Run, EarlyStop]:
    """Build everything a task, with its config set, describes; in a fixed order from fixed seeds.

    Raises: TaskError naming the method that raised; ConfigError for what cannot work.
    """
    config = link.config
    device = prepare_torch(config, link.me.worker_id)
    early_stop = make_early_stop(config)
    built = _Built(task, config, device, {"everstep.early_stop": early_stop})
    parts = built.make(() if config.meta_init and config.stages > 1 else None)
    if config.stages == 1:
        return assemble(link, parts, built.dataset, task.collate, device, rewindable=True), early_stop
    order = sample_order(config, built.dataset)
    whole = Whole.of(parts.model)
    stages = _stages(built, parts, order, task, config, device, checked=bool(link.job.get("split_checked")))
    session = Session(link, stages, device, built.dataset, task.collate, order, whole, rewindable=True)
    return Run(session, parts.model), early_stop


class _Built:
    """Builds what a task trains, the same each time; the dataset once."""

    def __init__(self, task: Task, config: Config, device: torch.device, extras: dict[str, Any]) -> None:
        self._task = task
        self._config = config
        self._device = device
        self._extras = extras
        self.dataset: Any = None

    def make(self, wanted: Iterable[int] | None = None) -> Parts:
        """All parts of the whole model, in their initial state. wanted: units to make, if made module by module."""
        task = self._task
        seed_all(build_seed(self._config.seed))
        model, units = build_model(task, self._config, self._device, wanted)
        if self.dataset is None:
            self.dataset = calling(task, "build_dataset", "train")
        optimizer = calling(task, "build_optimizer", list(model.parameters()))
        scheduler = calling(task, "build_scheduler", optimizer)
        refuse_unsupported(model, optimizer, scheduler)
        return Parts(model, optimizer, scheduler, units, dict(self._extras))


def _stages(
    built: _Built,
    first: Parts,
    order: SampleOrder | ElasticOrder,
    task: Task,
    config: Config,
    device: torch.device,
    *,
    checked: bool,
) -> Stages:
    """The stages of a split job.

    first: the whole, built already; the first stage that is wanted is cut out of it, after a look at whether the units
    make it up (checked: there was one before the start). Made module by module there is no whole, and each stage makes
    what it needs.
    """
    cut = chosen_cut(config, task, first.model)
    whole = [] if config.meta_init else [first]

    def loss(model: Any, batch: Any) -> Any:
        return calling(task, "loss", model, batch)

    def build(stage: int) -> StageReplica:
        def make() -> Parts:
            return whole.pop() if whole else built.make(units_of(cut, stage, config.stages))

        batch = None
        if whole and not checked:
            recipe = Recipe(built.dataset, order, task.collate, config.seed)
            batch = to_device(fetch(recipe, 1, 0)[0], device)
        common: dict[str, Any] = {"config": config, "device": device, "loss": loss, "batch": batch}
        return build_stages(make, cut, config.stages, [stage], **common)[stage]

    parameters = sum(p.numel() * p.element_size() for p in first.model.parameters())
    return Stages(config.stages, build, 3 * parameters // config.stages)
