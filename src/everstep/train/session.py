"""The session: one worker's part in one job, put together. Who does what the driver asks for is the table below.

What happens when is the driver's; what the user's loop sees is `run`'s.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from everstep.base.cause import Cause, Why
from everstep.base.errors import DeterminismError
from everstep.base.plan import Member
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver, DriverConfig
from everstep.protocol.driver.records import gathered
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Discard, Release
from everstep.runtime.address import JOB_FILE
from everstep.runtime.peer import PeerConnection
from everstep.train.cutter import Cutter
from everstep.train.elastic_order import ElasticOrder, Order
from everstep.train.executor import Executor
from everstep.train.final import Finisher
from everstep.train.heal import Donor
from everstep.train.keeping import Keeper
from everstep.train.lanes import Lanes
from everstep.train.link import Link
from everstep.train.profiling import Profiling
from everstep.train.published import Publisher
from everstep.train.rendezvous import Rendezvous
from everstep.train.saving import LoopState, Saver, Whole
from everstep.train.stages import Stages
from everstep.train.transfers import Transfers
from everstep.train.transports import open_transport
from everstep.train.updates import Updates
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)

_LATE = 4
_NOT_EXACT = (
    "batch is per_worker: the global batch follows the number of workers, so the result depends on who came and went "
    "when, and is not bitwise that of an undisturbed run; use batch: constant for exactness"
)


class Session:
    """Everything between the user's loop and the rest of the job."""

    def __init__(
        self,
        link: Link,
        stages: Stages,
        device: torch.device,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        order: Order,
        whole: Whole | None = None,
        rewindable: bool = False,
    ) -> None:
        """stages: what is trained here. order: which samples make up a lane; dataset, collate: how to get them.
        rewindable: the loop can go on from an earlier step; else this worker starts anew then."""
        job = _job_facts(link)
        begins_after = int(job.get("begins_after", 0))
        driver_config = DriverConfig(link.config.lanes, rewindable, link.config.verify_every, begins_after)
        driver = Driver(link.me, driver_config, StepMachine(link.me))
        rendezvous = Rendezvous(link.tell)
        transport = open_transport(link, stages, rendezvous, device)
        self.view = WorkerView(
            link,
            stages,
            order,
            driver,
            Cutter(transport.abort),
            Publisher(link.run_dir, link.me, link.config.log_every),
        )
        self.executor = Executor(driver, self.view.cutter, self.view.tick)
        self.loop = LoopState(stages)
        name = f"{int(job['created_unix_ns']):x}" if "created_unix_ns" in job else ""
        self.saver = Saver(self.view, whole, self.loop, name)
        self.keeper = Keeper(self.view, self.executor.note)
        self.finisher = Finisher(self.view)
        others = {"keep": self.keeper.take, "final": self.finisher.serve, "part": self.saver.take_report}
        self.donor = Donor(lambda: self.executor.note(do.FollowerAsked()), others)
        self.updates = Updates(self.view, transport, self.donor, self.keeper, self.saver)
        self.transfers = Transfers(self.view, self.updates, self.donor, self.keeper, self.saver, self.loop)
        self.lanes = Lanes(self.view, transport, self.saver, dataset, collate, device, self.executor.lane_done)
        self.profiling = Profiling(link, device, self._tell_late)
        self.transport = transport
        self.rendezvous = rendezvous
        self._member = Member(link.me.worker_id, link.me.incarnation, link.host)
        self._late: tuple[wire.AnyMessage, ...] = ()
        self.executor.install(self._handlers())

    def _handlers(self) -> dict[type, Callable[[Any], Any]]:
        updates, transfers, view = self.updates, self.transfers, self.view
        found: dict[type, Callable[[Any], Any]] = {
            do.Open: self.lanes.open,
            do.Exchange: self._exchange,
            do.Reduce: updates.reduce,
            do.Update: updates.update,
            do.Fetch: transfers.fetch,
            do.Restore: transfers.restore,
            do.OpenFeeds: transfers.open_feeds,
            do.Watch: lambda operation: transfers.watch(self.executor.news),
            do.Adopt: transfers.adopt,
            do.Replay: transfers.replay,
            do.SaveLast: self.saver.last,
            do.Linger: self.saver.linger,
            do.Finish: self._finish,
            do.Cut: lambda effect: view.cutter.cut(effect.generation),
            do.Tell: lambda effect: view.link.tell(effect.message),
            do.Decided: updates.decided,
            Release: updates.release,
            Discard: updates.discard,
            do.Shelve: transfers.shelve,
            do.Unshelve: transfers.unshelve,
            do.OfferFeeds: transfers.offer_feeds,
            do.CutFeeds: transfers.cut_feeds,
            do.CloseFeeds: transfers.close_feeds,
            do.EnteredPlan: self._entered,
            do.RememberLoop: self.loop.remember,
            do.Condemn: self.saver.condemn,
            do.Keep: self.keeper.keep,
            do.RetireKept: self.keeper.retire,
            do.ForgetKept: self.keeper.forget,
            do.Skipped: self.saver.not_kept,
            do.DropLanes: self._drop_lanes,
        }
        return found | ({do.Compute: self.lanes.compute} if view.stages.split else {})

    # ---- joining and leaving

    def open(self) -> None:
        """Say hello and become a settled member: from the start, or healed while the others train."""
        link, me = self.view.link, self.view.link.me
        address = link.serve_peers(self._serve_peer)
        link.on_flip(lambda: self.view.stages.any.flip_bit())
        self._member = Member(me.worker_id, me.incarnation, link.host, os.getpid(), address, self.transport.segment)
        link.row.set(phase="idle")
        link.connect(self._hello, self._deliver, self._reconnected)
        self.executor.ask(do.JoinAsked())
        if isinstance(self.view.order, ElasticOrder) and self.view.is_main and not self.view.step:
            self.view.publisher.emit("warning", step=0, cause=Cause.CONFIG, reason=_NOT_EXACT)

    def close(self) -> None:
        """Give back processes and memory. The link is its owner's: last words may have to be said."""
        self.view.publisher.close()
        self.transfers.close_feeds()
        self.lanes.close()
        self.profiling.close()
        self.saver.close()
        self.keeper.close()
        self.transport.close()

    def _serve_peer(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """In a thread of its own."""
        try:
            self.donor.handle(connection, request)
        finally:
            self.view.link.row.sent("heal", connection.sent_bytes)

    def _hello(self) -> wire.AnyMessage:
        standing = self.view.driver.standing
        expected = self.view.stages.expected_bytes
        return wire.WorkerHello(member=self._member, step=standing.step, plan=standing.plan, state_bytes=expected)

    def _reconnected(self) -> None:
        """What was handed to a connection that then broke may be lost: say it again."""
        self.rendezvous.repeat()
        for message in (*self.view.driver.standing.messages, *self._late):
            self.view.link.tell(message)

    def _tell_late(self, message: wire.AnyMessage) -> None:
        """Something that is no part of the driver's conversation; it is repeated likewise."""
        self._late = (*self._late[1 - _LATE :], message)
        self.view.link.tell(message)

    def _deliver(self, message: wire.AnyMessage) -> None:
        """In the control thread."""
        link = self.view.link
        if isinstance(message, wire.SaveNow):
            self.saver.request(Why(message.cause, message.reason))
        elif isinstance(message, wire.InjectFault):
            pulse = link.row.read()
            plan = self.view.driver.standing.plan
            link.fault_now(message.fault, message.number, pulse.step + 1, pulse.phase, plan)
        elif isinstance(message, wire.ProfileNow):
            self.profiling.ask(message)
        self.rendezvous.observe(message)
        self.executor.deliver(message)

    # ---- what the user's loop asks

    def begin_step(self) -> int:
        """The loop goes on to the next step; returns its number."""
        number = self.view.step + 1
        if self.profiling.wanted is not None:
            self.profiling.begin_step(number)
        self.updates.begin_step()
        return number

    def gather(self, data: bytes) -> Mapping[int, bytes]:
        """All members' data, the same at every member. Once the job has ended everybody is alone."""
        alone = {self.view.me: data}
        if self.view.ended:
            return alone
        answer = self.executor.ask(do.GatherAsked(data))
        records = answer.records if isinstance(answer, do.GatherDone) else {}
        return gathered(records) if records else alone

    def members(self) -> tuple[int, tuple[int, ...]]:
        """Own worker id, and everybody's as of now."""
        plan = self.view.plan
        return self.view.me, plan.worker_ids if plan is not None and not self.view.ended else (self.view.me,)

    def end(self) -> None:
        """After the last step; returns when the job has ended. Raises: WentBack, and what ends a worker otherwise."""
        self.profiling.end()
        self.view.link.row.set(step=self.view.step, phase="finish")
        self.executor.ask(do.EndAsked())

    def hold(self, words: wire.WorkerFailed) -> None:
        """The loop has raised, but the state is whole: say so, and stay a member, who computes nothing, until the
        coordinator lets this worker go; others may need the state, or a checkpoint be wanted of it first.

        Raises: what ends a member, such as Evicted.
        """
        if self.saver.on:
            until_ns = time.monotonic_ns() + int(self.view.config.checkpoint.grace_s * 1e9)
            self.executor.ask(do.HoldAsked(words, until_ns))

    # ---- what the driver asks

    def _exchange(self, operation: do.Exchange) -> Mapping[int, bytes]:
        tag, plan = operation.tag, self.view.plan
        if tag.kind == "settle":
            self.view.phase("settle", self.view.step, plan)
        elif tag.seq == 0:
            self.view.phase("agree", tag.step, plan)
        return self.transport.exchange(tag, operation.payload)

    def _finish(self, operation: do.Finish) -> bool:
        """Nobody leaves before all have committed the last step and the leader has written final/."""
        self.saver.at_end(operation.generation)
        self.view.phase("finish", operation.step, operation.plan)
        self.updates.release(operation)  # proven by the gather
        run_dir = self.view.link.run_dir
        wanted = self.view.is_main and run_dir is not None
        return wanted and self.finisher.write(run_dir, operation.plan, operation.step)  # type: ignore[arg-type]

    def _entered(self, effect: do.EnteredPlan) -> None:
        """All have settled. Raises: DeterminismError if the job would begin with something else than it was to."""
        plan, number, me = effect.plan, effect.step, self.view.me
        stages, role = plan.stages_of(me), plan.role_of(me)
        self.view.link.row.set(generation=plan.generation, step=number)
        self.view.link.row.seat(stages[0] if stages else None, role)
        self.updates.entered(plan.generation)
        self.view.link.log.entered(plan.generation, number, stages[0] if stages else None, role)
        begins_after = self.view.driver.config.begins_after
        if number < begins_after:
            raise DeterminismError(
                f"nothing is left of the checkpoint of step {begins_after} that this job began with, or of "
                "later ones: start it anew with --resume-from, in another directory"
            )

    def _drop_lanes(self, effect: do.DropLanes) -> None:
        self.saver.before_update()
        for replica in self.view.stages.values():
            replica.drop_lanes()
            replica.settle_buffers()


def _job_facts(link: Link) -> dict[str, Any]:
    """What job.json says; nothing where there is none."""
    path = None if link.run_dir is None else link.run_dir / JOB_FILE
    if path is None or not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        log.warning("%s cannot be read: checkpoints do not say which job they are of", JOB_FILE)
        return {}
