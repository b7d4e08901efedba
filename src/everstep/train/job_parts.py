"""Puts a job's parts together: from a `Task`, or from the arguments of `join`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.data.batch import to_device
from everstep.data.given_loader import AsRead
from everstep.data.loader import Recipe, fetch
from everstep.data.reading import reading_of
from everstep.exact.digest import named_digest
from everstep.exact.seeding import build_seed, seed_all
from everstep.exact.shard_sums import ShardMesh
from everstep.order.cursor import SampleOrder
from everstep.order.permutation import MAX_SIZE
from everstep.placement.cuts import units_of
from everstep.script.carried_names import Trained, read_task
from everstep.script.reachable import users_class
from everstep.script.restarts import of_task
from everstep.script.unsupported import refuse_group, refuse_short_schedule, refuse_unsupported
from everstep.train.blank_model import Skeleton, are_blank, blank_parameters
from everstep.train.cell_head import CellHead
from everstep.train.cell_passes import CellStages
from everstep.train.composition import check_units
from everstep.train.elastic import AnyOrder, ElasticOrder, sample_order
from everstep.train.job_data import JobData, job_data
from everstep.train.loop_survey import watching
from everstep.train.precision import prepare_torch
from everstep.train.replica import StageReplica
from everstep.train.run import Run
from everstep.train.saving import Whole
from everstep.train.session import Session
from everstep.train.stage import Parts, There, build_model, chosen_cut, cut_into_shards, cut_out
from everstep.train.task import Task, calling
from everstep.train.trainer import EarlyStop
from everstep.train.view import Stages
from everstep.train.worker_link import WorkerLink

log = logging.getLogger(__name__)


def assemble(
    link: WorkerLink,
    parts: Parts,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    device: torch.device,
    rewindable: bool = False,
    ignored: tuple[Any, ...] | None = None,
    given: AsRead | None = None,
) -> Run:
    """A run over these parts, of a model that is not split. rewindable: as for `Session`. ignored: names that the
    loop may change without notice; None if the loop is not watched. given: what the dataset was read from.

    Raises: ConfigError if the job has several stages, or a script's worker is to have several processes.
    """
    key, ranks = link.config.cell.key, link.config.cell.ranks
    if ranks > 1 and link.cell_head is None:
        raise ConfigError(
            f"{key}: expected workers that everstep run has started with as many processes, got {ranks} processes for "
            f"one that has one: start it with everstep run, or set {key}=1"
        )
    if ranks > 1 and not rewindable:
        raise ConfigError(
            f"{key}: a script that calls everstep.join runs its model's forward pass itself, so no other process can "
            f"take part in it, got {ranks}: write an everstep.Task, or set {key}=1"
        )
    if link.config.cell.shards > 1 and parts.mesh is None:
        raise ConfigError(
            "cell.shards: a script that calls everstep.join makes its model itself, so it cannot be cut into "
            f"{link.config.cell.shards} shards: write an everstep.Task, or set cell.shards=1"
        )
    if link.config.stages > 1:
        raise ConfigError(
            "stages: a script that calls everstep.join runs its model's forward pass itself, so it cannot be split "
            f"into {link.config.stages} stages: write an everstep.Task, or set stages=1"
        )
    data = job_data(link, dataset)
    _check_schedule(parts, data)
    if isinstance(data.order, ElasticOrder):
        parts = replace(parts, extras={**parts.extras, "everstep.order": data.order})
    replica = StageReplica(parts, link.config, device)
    cell = None if link.cell_head is None else CellHead(link.cell_head, replica, link.config, link.row.tick)
    whole = Whole.of(parts.model)
    session = Session(link, Stages.unsplit(replica), device, data, collate, whole, rewindable, cell)
    if ignored is None or not session.saver.on:
        return Run(session, parts.model, given=given)
    survey = watching(session.view, dataset, collate, ignored)
    session.saver.watch(survey)
    return Run(session, parts.model, survey, given)


def assemble_task(link: WorkerLink, task: Task) -> tuple[Run, EarlyStop]:
    """Build everything a task, with its config set, describes; in a fixed order from fixed seeds.

    Raises: TaskError naming the method that raised; ConfigError for what cannot work.
    """
    config = link.config
    built = BuiltTask(task, config, link.me.worker_id)
    device, early_stop = built.device, built.early_stop
    parts = built.make(() if config.meta_init and config.stages > 1 else None)
    if config.rehearse and not (link.me.worker_id or link.me.incarnation) and users_class(type(task)):
        _refuse_what_is_lost(task, parts, built.dataset, begun=bool(link.job.get("resumes_at")))
    if config.cell.ranks > 1:
        built.order()  # which not all datasets have
    if config.stages == 1:
        return assemble(link, parts, built.dataset, task.collate, device, rewindable=True), early_stop
    data = job_data(link, built.dataset)
    _check_schedule(parts, data)
    whole = Whole.of(parts.model)
    cell = None if link.cell_head is None else CellStages(link.cell_head, config, link.row.tick)
    checked = bool(link.job.get("split_checked"))
    stages = built.stages(parts, data, checked=checked, made=None if cell is None else cell.attach)
    session = Session(link, stages, device, data, task.collate, whole, rewindable=True, cell=cell)
    return Run(session, parts.model), early_stop


def _refuse_what_is_lost(task: Task, parts: Parts, dataset: Any, *, begun: bool) -> None:
    """Raises: ConfigError for what the user's task changes for each batch, if training needs it and has not begun."""
    trained = Trained(parts.model, parts.optimizer, parts.scheduler, (), dataset, task.collate, lambda thing: False)
    try:
        lost = of_task(read_task(task, trained).carried)
    except Exception as error:  # the user's objects may raise at any look
        log.debug("the task's code was not read: %s", error)
        return
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        if not begun:
            raise ConfigError(f"{lost[0]}{more}; rehearse=false skips this check")
        log.warning("%s%s", lost[0], more)


def _check_schedule(parts: Parts, data: JobData) -> None:
    """Raises: ConfigError if it ends before the job; where the number of steps is not known, it will be seen."""
    if isinstance(data.order, SampleOrder) and data.order.total_steps < MAX_SIZE:
        refuse_short_schedule(parts.scheduler, data.order.total_steps)


class BuiltTask:
    """Builds the objects that a task trains, the same each time; the dataset once. device: of this process."""

    def __init__(self, task: Task, config: Config, worker_id: int, cell_rank: int = 0) -> None:
        """Sets torch up for this process."""
        self.device = prepare_torch(config, worker_id, cell_rank)
        self.early_stop = EarlyStop(config.early_stop)
        self.dataset: Any = None
        self._task, self._config = task, config
        self._leads_cell = config.cell.ranks > 1 and cell_rank == 0
        self._there: There | None = None
        self._skeleton: Skeleton | None = None

    def take(self, there: There) -> None:
        """Models that are made module by module have these parameters from now on, which another process has made, or
        all make together."""
        self._there = there
        self._skeleton = self._skeleton or self._bones()  # before the model, since a task may keep the last one

    def _bones(self) -> Skeleton:
        return Skeleton(partial(calling, self._task, "build_model"), partial(calling, self._task, "units"))

    def _look(self) -> None:
        """At the head of a cell, once: have parameters without values if making the other parts leaves them alone."""
        if self._leads_cell and self._config.meta_init and self._skeleton is None:
            seed_all(build_seed(self._config.seed))
            self._skeleton = self._bones()
            if self._skeleton.is_left_alone(self._beside):
                self._there = blank_parameters()

    def _beside(self, model: nn.Module) -> tuple[Any, Any, ShardMesh | None]:
        """Optimizer, scheduler and mesh for a model."""
        optimizer = calling(self._task, "build_optimizer", list(model.parameters()))
        scheduler = calling(self._task, "build_scheduler", optimizer)
        refuse_unsupported(model, optimizer, scheduler)
        refuse_group()
        return optimizer, scheduler, cut_into_shards(self._task, model, self._config)

    def order(self) -> AnyOrder:
        """The samples of each lane; call `make` before. Raises: ConfigError if they are read as a stream."""
        if reading_of(self.dataset).streamed:
            raise ConfigError(
                f"{self._config.cell.key}: expected 1 for a stream, whose length the processes of a worker would "
                "each have to find out: give the dataset __len__ and __getitem__"
            )
        return sample_order(self._config, self.dataset)

    def make(self, wanted: Iterable[int] | None = None) -> Parts:
        """All parts of the whole model, in their initial state. wanted: units to make, if made module by module."""
        task, config = self._task, self._config
        self._look()
        if self._leads_cell and self._there is not None:
            self._there = blank_parameters()  # in pages that no model before has touched
        seed_all(build_seed(config.seed))
        model, units = build_model(task, config, self.device, wanted, self._there)
        made = self._content(model)
        if not self._finds_data(model if self._leads_cell and self._there is not None else None):
            self._there = None
            return self.make(wanted)
        optimizer, scheduler, mesh = self._beside(model)
        as_made, fill = made is not None and made == self._content(model), None
        if self._there is not None and self._skeleton is not None:
            as_made, fill = True, partial(self._skeleton.fill, config.seed, self.device, wanted)
        extras = {"everstep.early_stop": self.early_stop}
        return Parts(model, optimizer, scheduler, units, extras, mesh, as_made, fill=fill)

    def _finds_data(self, blank: nn.Module | None) -> bool:
        """Build the dataset, once; False if that, or making the model, has taken values of parameters that have none
        yet."""
        found = self.dataset
        try:
            if found is None:
                found = calling(self._task, "build_dataset", "train")
        except Exception:
            if blank is None or are_blank(blank.parameters()):
                raise
        if blank is not None and not are_blank(blank.parameters()):
            return False
        self.dataset = found
        return True

    def _content(self, model: nn.Module) -> str | None:
        """Digest of the parameters that are made here, where the processes of a cell want to know."""
        if not (self._leads_cell and self._config.meta_init) or self._there is not None:
            return None
        return named_digest((name, p) for name, p in model.named_parameters() if not p.is_meta)

    def stages(
        self,
        first: Parts,
        data: JobData | None,
        *,
        checked: bool,
        made: Callable[[StageReplica], None] | None = None,
    ) -> Stages:
        """The stages of a split job. made: called with each of them. data: None if the units were checked.

        first: the whole model, already built; the first wanted stage is cut out of it, after a check that the units
        make it up (unless that was checked before the start). A model that is made module by module has no whole,
        and each stage makes its own modules.
        """
        task, config, device = self._task, self._config, self.device
        cut = chosen_cut(config, task, first.model)
        whole = [] if config.meta_init else [first]

        def loss(model: Any, batch: Any) -> Any:
            return calling(task, "loss", model, batch)

        def build(stage: int) -> StageReplica:
            if whole and not checked and data is not None:
                recipe = Recipe(data.dataset, data.order, task.collate, config.seed)
                check_units(whole[0], loss, to_device(fetch(recipe, 1, 0)[0], device), config, device, cut)
            parts = whole.pop() if whole else self.make(units_of(cut, stage, config.stages))
            own, spec = cut_out(parts, cut, config.stages, stage)
            replica = StageReplica(own, config, device, spec, loss)
            if made is not None:
                made(replica)
            return replica

        parameters = sum(p.nbytes for p in first.model.parameters())
        return Stages(config.stages, build, 3 * parameters // config.stages)
