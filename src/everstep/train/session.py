"""The session: one worker's part in one job, put together.

Who carries out what the driver asks for is said by each part's `handlers`; what happens when is the driver's, and what
the user's loop sees is `run`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from everstep.base.config import Config, inexact
from everstep.parallel.staged import StagedTransport
from everstep.parallel.transport_kinds import KINDS, ControlStore
from everstep.placement.probes import ProbeRule
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.driver_parts import DriverConfig
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.step_machine import StepMachine
from everstep.runtime.process import machine
from everstep.train.cell_head import CellHead
from everstep.train.cell_passes import CellPasses, CellStages
from everstep.train.dealing import Dealing
from everstep.train.executor import Cutter, Executor
from everstep.train.final import Finisher
from everstep.train.generation_ties import GenerationTies, Rendezvous
from everstep.train.heal import Donor
from everstep.train.job_data import JobData
from everstep.train.keeping import SnapshotKeeper
from everstep.train.kernels import kernels_of
from everstep.train.loop_state import LoopState
from everstep.train.offload_parameters import parameter_files
from everstep.train.profiling import WorkerProfiling
from everstep.train.published import Publisher
from everstep.train.saving import LastCheckpoint, PartSaver, Restorer, Whole, saving_of
from everstep.train.step_lanes import Lanes, Passes
from everstep.train.transfers import Transfers
from everstep.train.updates import Updates
from everstep.train.view import Stages, WorkerView
from everstep.train.worker_link import WorkerLink

NO_PROBES = ProbeRule()


class Session:
    """Everything between the user's loop and the rest of the job."""

    def __init__(
        self,
        link: WorkerLink,
        stages: Stages,
        device: torch.device,
        data: JobData,
        collate: Callable[[list[Any]], Any],
        whole: Whole,
        rewindable: bool = False,
        cell: CellHead | CellStages | None = None,
    ) -> None:
        """stages: those trained here. data, collate: the samples of each lane, and how to get them. rewindable: the
        loop can go on from an earlier step; else this worker restarts then. cell: of several processes."""
        config = link.config
        driver = Driver(_rules(link, stages, data, rewindable), StepMachine(link.me))
        rendezvous = Rendezvous(link.tell)
        transport = _transport(link, rendezvous, device)
        publisher = Publisher(link.run_dir, link.me)
        kernels = kernels_of(config.passes, device, config.threads)
        at_hand = link, stages, data.order, data.position, driver, Cutter(transport.abort)
        view = WorkerView(*at_hand, publisher, transport, kernels)
        executor = Executor(driver, view.cutter, view.tick, lambda: link.row.end_asked, link.waits)
        loop = LoopState(stages)
        saver = PartSaver(view, whole, loop, executor.note)
        restorer = Restorer(view, saver.checkpointer)
        last = LastCheckpoint(view, saver)
        others = {"part": saver.take_report}
        donor = Donor(lambda joint: executor.note(do.FollowerAsked(joint)), others, lambda *at: keeper.check(*at))
        keeper = SnapshotKeeper(view, donor, executor.note)
        dealing = Dealing(view, executor.said, loop.moves.updated)
        updates = Updates(view, donor, keeper, saver, loop, dealing)
        transfers = Transfers(view, updates, donor, keeper, restorer, loop)
        finisher = Finisher(view, transfers.copier)
        told = executor.lane_done, updates.given, dealing.divide
        lanes = Lanes(view, restorer, data.dataset, collate, device, *told, _passes(cell, config))
        membership = GenerationTies(view, executor, rendezvous, donor.handle, lambda wanted: profiling.ask(wanted))
        profiling = WorkerProfiling(link, device, membership.tell)

        def finish(operation: do.Finish) -> bool:
            """No worker leaves before all have committed the last step and the leader has written final/."""
            last.at_end(operation)
            updates.release(operation)  # proven by the gather
            return finisher.write(operation)

        executor.install({do.Finish: finish})
        for part in (membership, lanes, updates, transfers, saver, last, keeper):
            executor.install(part.handlers())
        executor.install({do.Reduce: membership.telling_news(updates.reduce)})
        self.view, self.executor, self.membership, self.profiling = view, executor, membership, profiling
        self.lanes, self.updates, self.transfers, self._cell = lanes, updates, transfers, cell
        self.saver, self.loop, self._keeper = saver, loop, keeper
        self.unasked: list[do.SaveAsked] = []

    def unjudged(self) -> list[do.SaveAsked]:
        """Take the questions, of this round's evaluations, that have not been asked."""
        asked, self.unasked = self.unasked, []
        return asked

    def judge(self, *, past: bool) -> None:
        """Ask whether checkpoints follow from this round's evaluations. past: the loop is done with the step. Raises:
        as `Executor.ask`."""
        for question in self.unjudged():
            with self.loop.paused():
                self.executor.ask(replace(question, past=past))

    def close(self) -> None:
        """Give back processes and memory. The link is its owner's: last words may have to be said."""
        cell = [] if self._cell is None else [self._cell]
        seeders = [replica.lanes.seeder for replica in self.view.stages.values()]
        parts = self.lanes, self.profiling, self.saver, self._keeper, self.view.transport, *seeders, *cell
        with ExitStack() as closing:  # each of them, whatever another one raises
            for part in reversed(parts):
                closing.callback(part.close)
            closing.callback(self.transfers.close_feeds)
            closing.callback(self.view.publisher.close)

    @property
    def cell(self) -> CellHead | None:
        """The processes of this worker, if they compute lanes of the user's loop."""
        return self._cell if isinstance(self._cell, CellHead) else None


def _rules(link: WorkerLink, stages: Stages, data: JobData, rewindable: bool) -> DriverConfig:
    """Settings of the worker's driver."""
    config = link.config
    probed = not inexact(config) and not config.emulate_compute_ms
    return DriverConfig(
        lanes=config.lanes,
        rewindable=rewindable,
        verify_every=config.verify_every,
        begins_after=int(link.job.get("begins_after", 0)),
        saving=saving_of(link, stages.split, data.order),
        repeats=config.batch != "per_worker",
        probes=ProbeRule(config.seed, config.verify_every, config.spot_check, joins=True) if probed else NO_PROBES,
        nonfinite=NonfiniteRule.of(config),
        votes=not config.zero.stage,
        names=lambda stage: stages[stage].state.part_names if stage in stages else (),
    )


def _transport(link: WorkerLink, rendezvous: Rendezvous, device: torch.device) -> StagedTransport:
    """The transport of gradients and lanes of a worker, whose members find each other by the rendezvous."""
    kind, files = link.config.transport, parameter_files(link.config)
    keys = rendezvous.set_key, rendezvous.get_keys, rendezvous.over
    return StagedTransport(
        link.me,
        link.config.lanes,
        lambda: link.row.tick(),
        kind=kind,
        store=ControlStore(*keys) if KINDS[kind].meets else None,
        key=link.token,
        tls=link.tls,
        machine=hashlib.sha256(machine().encode()).hexdigest()[:16],
        device=device,
        folder=None if files is None else files.folder,
    )


def _passes(cell: CellHead | CellStages | None, config: Config) -> Callable[..., Passes]:
    """The constructor of the passes of a split model's step."""
    if isinstance(cell, CellStages) and not config.emulate_compute_ms:
        return partial(CellPasses, cell=cell)
    return Passes
