"""The session: one worker's part in one job. It ties replica, engine, data, healing and publishing together.

Everything that has to happen in a certain order at a step's boundary is here, and nowhere else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from everstep.base.config import Config
from everstep.base.errors import CollectiveAborted, DeterminismError, Evicted, JobFailed, StateTainted
from everstep.base.plan import Member, Plan
from everstep.base.ports import Node
from everstep.data.loader import LaneLoader, to_device
from everstep.order.cursor import SampleOrder
from everstep.order.ledger import use_digest
from everstep.protocol import messages as wire
from everstep.protocol.driver.comparing import differing
from everstep.protocol.driver.records import (
    AgreePayload,
    GatherPayload,
    Outcome,
    committed_unix_ns,
    conclude,
    encode_payload,
    gathered,
)
from everstep.protocol.step_types import Key, Record
from everstep.runtime.peer import PeerConnection
from everstep.train.elastic_order import ElasticOrder
from everstep.train.engine import Engine, WentBack
from everstep.train.final import Finisher
from everstep.train.heal import Gradient
from everstep.train.link import Link
from everstep.train.pipeline import Pipeline
from everstep.train.profiling import Profiling
from everstep.train.published import Publisher
from everstep.train.rendezvous import Rendezvous
from everstep.train.replica import StageReplica
from everstep.train.saving import Saver, Whole
from everstep.train.stages import Stages
from everstep.train.ties import exchange_ties
from everstep.train.transfers import Transfers
from everstep.train.transports import open_staged, open_transport

_NOT_EXACT = (
    "batch is per_worker: the global batch follows the number of workers, so the result depends on who came and went "
    "when, and is not bitwise that of an undisturbed run; use batch: constant for exactness"
)


class Session:
    """Everything between the user's loop and the rest of the job.

    `stages` are what is trained here. `order` says which samples make up a lane; `dataset`, `collate` how to get them.
    """

    def __init__(
        self,
        link: Link,
        stages: Stages,
        device: torch.device,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        order: SampleOrder | ElasticOrder,
        whole: Whole | None = None,
        goes_back: bool = False,
    ) -> None:
        """goes_back: the loop can go on from an earlier step; else this worker starts anew then."""
        self.link = link
        self.goes_back = goes_back
        self.config: Config = link.config
        self.stages = stages
        self.device = device
        self.order = order
        self.loader = LaneLoader(
            dataset,
            order,
            seed=self.config.seed,
            collate=collate,
            workers=self.config.loader.workers,
            prefetch=self.config.loader.prefetch,
            pin_memory=self.config.loader.pin_memory,
            preserve_generators=False,  # entering a lane seeds them all
        )
        self.publisher = Publisher(link.run_dir, link.me, self.config.log_every)
        self.rendezvous = Rendezvous(link.tell)
        if stages.split:
            self.transport = open_staged(link, self.tick, self.rendezvous, device)
        else:
            self.transport = open_transport(link, stages.only.layout, self.tick, self.rendezvous, device)
        self.engine = Engine(link.me, self.transport, self, self.tell, self.tick)
        self.pipeline = Pipeline(link.me.worker_id, self.config, self, lambda: self.order.micro_batch)
        self.saver = Saver(self, whole)
        self.transfers = Transfers(self)
        self.donor = self.transfers.donor
        self.finisher = Finisher(self)
        self.profiling = Profiling(link, device, self.tell)
        self.outcome: Outcome | None = None
        self.learned: dict[str, Any] = {}
        self.standing: dict[type, wire.AnyMessage] = {}
        self.released = 0
        self.asked = 0
        self.past = 0
        self._gradients: dict[int, dict[int, Gradient]] = {}
        self._generations: dict[int, int] = {}
        self._committed_ns = 0
        self._samples = 0
        self._step_began_ns = 0
        self._progress_ns = 0
        self._entered_generation = 0
        self._told_entered = 0
        self._probed = False

    def _serve_peer(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """In a thread of its own."""
        try:
            self.donor.handle(connection, request)
        finally:
            self.sent("heal", connection.sent_bytes)

    # ---- joining and leaving

    def open(self) -> None:
        """Say hello and become a settled member: from the start, or healed while the others train."""
        address = self.link.serve_peers(self._serve_peer)
        self.link.flip = lambda: self.stages.any.flip_bit()
        self.transfers.begin()
        me = self.link.me
        self._member = Member(
            me.worker_id, me.incarnation, self.link.host, os.getpid(), address, self.transport.segment
        )
        self.link.row.set(phase="idle")
        self.link.connect(self._hello, self._deliver, self._reconnected)
        while not self.engine.settled:
            if self.engine.heal is not None:
                ticket, self.engine.heal = self.engine.heal, None
                self.transfers.follow(ticket)
            self.engine.turn()
            if self.engine.ended is not None and not self.engine.settled:
                raise Evicted("the job is over, and this worker was not needed", drained=True)
        if isinstance(self.order, ElasticOrder) and self.is_main and not self.engine.position.step:
            self.publisher.emit("warning", step=0, reason=_NOT_EXACT)

    def _hello(self) -> wire.AnyMessage:
        return wire.WorkerHello(
            member=self._member,
            step=self.engine.position.step,
            plan=self.engine.plan,
            state_bytes=self.stages.expected_bytes,
        )

    def tell(self, message: wire.AnyMessage) -> None:
        """Send, and remember what a coordinator that missed it would have to hear again."""
        if isinstance(message, wire.GenerationEntered):
            self.standing = {}
        self.standing[type(message)] = message
        self.link.tell(message)

    def _reconnected(self) -> None:
        """What was handed to a connection that then broke may be lost: say it again."""
        self.rendezvous.repeat()
        for message in list(self.standing.values()):
            self.link.tell(message)

    def _deliver(self, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.SaveNow):
            self.saver.request(message.reason)
        elif isinstance(message, wire.InjectFault):
            pulse = self.link.row.read()
            self.link.fault_now(message.fault, message.number, pulse.step + 1, pulse.phase, self.engine.plan)
        elif isinstance(message, wire.ProfileNow):
            self.profiling.ask(message)
        self.rendezvous.observe(message)
        self.engine.deliver(message)

    def finish(self) -> bool:
        """After the last step: nobody leaves before all have committed it and the leader has written final/.

        Returns whether the job has ended; False: the state went back, and there are steps to be done again.
        """
        self.profiling.end()
        try:
            self.link.row.set(step=self.engine.position.step, phase="finish")
            self.engine.gather(b"")  # proves that all have committed the last step, whatever generations follow
            self.asked = self.engine.position.step + 1
            while True:
                generation = self.engine.machine.generation
                self.saver.at_end()
                self.phase("finish", self.engine.position.step, self.engine.plan)
                self.release(self.engine.position.step)  # proven by the gather
                run_dir = self.link.run_dir
                self._done(generation, self.is_main and run_dir is not None and self.finisher.write(run_dir))
                if self.engine.wait_end(generation):
                    break
        except WentBack:
            return False
        ended = self.engine.ended
        if ended is not None and ended.state != "completed":
            raise JobFailed(ended.reason)
        return True

    def _done(self, generation: int, written: bool) -> None:
        me = self.link.me
        self.tell(
            wire.WorkerDone(
                worker_id=me.worker_id,
                incarnation=me.incarnation,
                generation=generation,
                step=self.engine.position.step,
                final_written=written,
            )
        )

    def close(self) -> None:
        """Give back processes and memory. The link is its owner's: last words may have to be said."""
        self.loader.close()
        self.profiling.close()
        self.saver.close()
        self.transfers.close()
        self.transport.close()

    @property
    def is_main(self) -> bool:
        plan = self.engine.plan
        return plan is not None and plan.leader(0) == self.link.me.worker_id

    @property
    def replica(self) -> StageReplica:
        """Of an unsplit job."""
        return self.stages.only

    # ---- a step, as the loop sees it

    def begin_step(self) -> int:
        """Ask for the next step; returns its number."""
        if self.donor.wanted():
            self.donor.offer(self.transfers.offer)
        self._step_began_ns = time.monotonic_ns()
        number = self.asked = self.engine.position.step + 1
        if self.profiling.wanted is not None:
            self.profiling.begin_step(number)
        self.engine.ask_step()
        return number

    def next_batch(self, number: int) -> tuple[int, Any, int, int] | None:
        """(lane, batch, number of samples, digest of their use), or None when the step has been applied."""
        while (lane := self.engine.next_lane(number)) is not None:
            self.phase("load", number, self.engine.plan)
            batch, samples = self.loader.batch(number, lane)
            if samples:
                self.phase("forward", number, self.engine.plan)
                self.replica.enter_lane(number, lane)
                return lane, to_device(batch, self.device), len(samples), use_digest(samples)
            self.replica.empty_lane(lane, use_digest(samples))
            self.engine.lane_done(number, lane)
        return None

    def backward(self, number: int, loss: torch.Tensor, weight: Any, count: int) -> None:
        self.phase("backward", number, self.engine.plan)
        self.replica.backward(loss, weight, count / self.order.micro_batch)

    def end_lane(self, number: int, lane: int, count: int, use: int) -> None:
        self.replica.leave_lane(lane, count, use)
        self._samples += count
        self.link.row.set(samples=self._samples)
        self.engine.lane_done(number, lane)

    def should_probe(self) -> bool:
        """Whether the lane about to be computed is to be computed twice, to see that it gives the same bits."""
        due, self._probed = not self._probed, True
        return due

    def probe_digest(self) -> str:
        """Of what the lane just computed would contribute; then forget the lane."""
        digest = self.replica.lane_digest()
        self.replica.abandon_lane()
        return digest

    @staticmethod
    def compare_probe(first: str, second: str, lane: int, number: int) -> None:
        """Raises: DeterminismError if they differ."""
        if first != second:
            raise DeterminismError(
                f"lane {lane} of step {number} was computed twice and gave different gradients: the model or the loss "
                "uses an operation or a random source that is not deterministic (one seeded by time or by os.urandom, "
                "say); use torch's, numpy's or random's global generators"
            )

    # ---- a step of a split model

    def run_lanes(self, number: int) -> bool:
        """Compute whatever passes through this worker until the step has been applied.

        Raises: WentBack if it is to be left for another one.
        """
        while (lanes := self.engine.next_lanes(number)) is not None:
            plan = self.engine.plan
            if plan is None:
                continue
            full = [lane for lane in lanes if not self._pass_empty(plan, number, lane)]
            try:
                self.pipeline.run(plan, number, full, self.stages, self.transport.channel)
            except CollectiveAborted as fault:
                self.engine.left(fault, plan.generation)
        return True

    def _pass_empty(self, plan: Plan, number: int, lane: int) -> bool:
        """Whether the lane has no samples; then it is through at once, at all stages."""
        samples = self.order.samples(number, lane).samples
        if samples:
            return False
        for stage in plan.stages_of(self.link.me.worker_id):
            if lane in plan.lanes_of(self.link.me.worker_id, stage):
                if lane in self.stages[stage].missing:
                    self.stages[stage].empty_lane(lane, use_digest(samples))
                self.engine.lane_done(number, lane, stage)
        return True

    def batch(self, number: int, lane: int) -> tuple[Any, Any]:
        """A lane's batch on the device, and its samples."""
        batch, samples = self.loader.batch(number, lane)
        return to_device(batch, self.device), samples

    def samples(self, number: int, lane: int) -> Any:
        """Which samples a lane has."""
        return self.order.samples(number, lane).samples

    def superseded(self) -> bool:
        """Whether a plan has come since the present one."""
        return self.engine.superseded(self.engine.machine.generation)

    def lane_done(self, number: int, stage: int, lane: int) -> None:
        """A stage is through with a lane."""
        if self.stages[stage].spec.is_last:
            self._samples += len(self.order.samples(number, lane).samples)
            self.link.row.set(samples=self._samples)
        self.engine.lane_done(number, lane, stage)

    # ---- gathers

    def gather(self, data: bytes) -> dict[int, bytes]:
        """All members' data, the same at every member. Once the job has ended everybody is alone."""
        if self.engine.ended is not None:
            return {self.link.me.worker_id: data}
        return gathered(self.engine.gather(data))

    def members(self) -> tuple[int, tuple[int, ...]]:
        plan, me = self.engine.plan, self.link.me.worker_id
        return me, plan.worker_ids if plan is not None and self.engine.ended is None else (me,)

    # ---- what the engine has done here (Hands)

    def tick(self) -> None:
        self.link.row.tick()

    def receiving(self) -> None:
        """Waits for what another part hands over."""
        self.link.row.set(phase="transfer")

    def sent(self, operation: str, n_bytes: int) -> None:
        """So many bytes were given to other workers."""
        self.link.row.sent(operation, n_bytes)

    def phase(self, name: str, number: int, plan: Plan | None) -> None:
        self.link.row.set(step=self.engine.position.step, phase=name)
        if plan is not None:
            self.link.faults(number, name, plan)

    def regroup(self, plan: Plan) -> None:
        """Have the stages of the plan's seats, and meet the members."""
        seats = plan.stages_of(self.link.me.worker_id)
        self.stages.want(seats)
        self.saver.regroup(plan)
        self.transport.open(plan, self.stages.layouts(seats))

    def lacking(self, number: int, plan: Plan) -> tuple[int, ...]:
        """Of the lanes of own seats; sums that the plan has torn apart are dropped."""
        found: set[int] = set()
        for stage in plan.stages_of(self.link.me.worker_id):
            held = stage in self.engine.machine.stages
            found.update(self._begin(number, plan, stage) if held else plan.lanes_of(self.link.me.worker_id, stage))
        return tuple(sorted(found))

    def _begin(self, number: int, plan: Plan, stage: int) -> tuple[int, ...]:
        """The plan's lanes of the step are wanted at this stage; returns those that are still to be computed."""
        replica, mine = self.stages[stage], plan.lanes_of(self.link.me.worker_id, stage)
        replica.begin(number, mine, lambda node: self._node(stage, number, node))
        lacking = replica.lacking(mine)
        if not lacking:
            return ()
        missing = replica.missing
        return tuple(lane for lane in lacking if lane in missing)

    def _node(self, stage: int, number: int, node: Node) -> torch.Tensor:
        return self.transport.node(stage, number, node)

    def prepare(self, number: int, plan: Plan) -> tuple[int, ...]:
        me = self.link.me.worker_id
        if not self.stages.split:
            lacking = self._begin(number, plan, 0)
            if lacking:
                self.loader.schedule(number, plan.lanes_of(me))
            return lacking
        wanted: set[int] = set()
        for stage in plan.stages_of(me):
            self._begin(number, plan, stage)
            if stage in (0, plan.stages - 1):
                wanted.update(plan.lanes_of(me, stage))
        if wanted:
            self.loader.schedule(number, sorted(wanted))
        return ()

    def reduce(self, number: int, plan: Plan) -> bytes:
        """Of all stages held here; what they say of it is the payload."""
        me = self.link.me.worker_id
        lanes = {stage: plan.lanes_of(me, stage) for stage in plan.stages_of(me)}
        offers = {k: self.stages[k].presence(number, lanes[k]) for k in lanes}
        if len(plan.members) > 1:
            self.sent("reduce", sum(4 * self.stages[k].layout.numel * len(offered) for k, offered in offers.items()))
        reduced = {k: self.transport.reduce(k, number, offered) for k, offered in offers.items()}
        received = exchange_ties(me, plan, number, self.stages, reduced, self.transport) if self.stages.split else {}
        found = {k: Gradient(reduced[k], received.get(k, {})) for k in lanes}
        self._gradients[number] = {**self._gradients.get(number, {}), **found}
        self._generations[number] = plan.generation
        every = self.config.verify_every
        due = bool(every and number % every == 0)
        sections = [
            self.stages[k].section(
                g.reduced, lanes[k], self.stages[k].digest(number - 1) if due else "", g.received, due
            )
            for k, g in found.items()
        ]
        kept, save = self.transfers.keeper.complete, self.saver.wanted(number)
        return encode_payload(AgreePayload(sections, self._committed_ns, kept, save))

    def decided(self, key: Key, records: Mapping[int, Record]) -> None:
        if self.stages.split and key.seq == 0:
            self.transport.channel.forget(key.step)
        if self._entered_generation == self.engine.machine.generation:
            self._entered_generation = 0
            if self.is_main:
                self._tell_progress(key.step, 0.0)  # now, for it ends a recovery

    def update(self, number: int, records: Mapping[int, Record]) -> None:
        committed = time.time_ns()
        self.decided(Key(number, 0), records)
        self.stages.keep(self.engine.machine.stages)
        self.apply(number, records, self._gradients[number], self._generations[number])
        self._committed_ns = committed

    def apply(
        self, number: int, records: Mapping[int, Record], gradients: Mapping[int, Gradient], generation: int
    ) -> None:
        """Take a decided step, with the reduced gradients of all stages that are held here."""
        outcome = conclude(number, self.config.lanes, records, self.stages.count)
        self._compare(outcome, generation)
        self.link.row.set(phase="stall")
        self.transfers.before_update(number, records, gradients)
        self.saver.before_update()
        self.link.row.set(phase="update")
        workers = self.order.workers if isinstance(self.order, ElasticOrder) else 0
        extra: dict[str, Any] = {}
        for stage, replica in self.stages.items():
            found = gradients[stage]
            extra = replica.apply(outcome, found.reduced, workers, found.received)
        if isinstance(self.order, ElasticOrder):
            self.order.advance(number, outcome.samples, len(set(outcome.workers.values())))
        self.arrive(outcome, records)
        self._gradients = {n: g for n, g in self._gradients.items() if n >= number}
        self._generations = {n: g for n, g in self._generations.items() if n > number}
        if number > self.released:
            self.publisher.hold(outcome, generation, extra)
        self.transfers.keeper.agreed(outcome.kept)
        self.transfers.after_update(outcome, records)
        self.saver.after_update(outcome, records)

    def arrive(self, outcome: Outcome | None, records: Mapping[int, Record], number: int = 0) -> None:
        """The state is that of the outcome's step (or, without one, of step `number`)."""
        number = outcome.step if outcome is not None else number
        self.outcome = outcome
        self.engine.gathered = {Key(number, 0): records} if records else {}
        self.link.log.step = number

    def forget_gradients(self) -> None:
        """The state has jumped: what was reduced for other steps is of no use."""
        self._gradients, self._generations = {}, {}

    def _compare(self, outcome: Outcome, generation: int) -> None:
        """Raises: StateTainted if the workers' states differ before this step; checkpoints of them count no more."""
        found = differing(outcome, self.stages.split)
        if found is None:
            return
        text, outvoted = found
        me, sound = self.link.me.worker_id, self.saver.proven(outcome.step - 1)
        everybody = {who for digests in outcome.digests.values() for who in digests}
        self.saver.condemn(sound, first=me == min(everybody - outvoted, default=me))
        text += f"; all steps after {sound} are tainted" if sound else "; all steps are tainted"
        raise StateTainted(text, outcome.step, generation, sound, me in outvoted)

    def gather_payload(self, data: bytes) -> bytes:
        self.transfers.before_gather()
        return encode_payload(GatherPayload(data, self._committed_ns))

    def release(self, number: int) -> None:
        leads = self.is_main and self.engine.machine.settled  # before that, the leader of before may still tell
        entered = self._told_entered == self.engine.machine.generation
        self.released = max(self.released, number)
        key, records = self.engine.position, self.engine.machine.records  # of the decision that proves it
        if records:
            self.publisher.committed(number, committed_unix_ns(records, key.seq == 0))
        self.publisher.release(number, leads)
        self.transfers.released(number)
        now = time.monotonic_ns()
        if leads and entered and now - self._progress_ns > 200_000_000:
            self._progress_ns = now
            self._tell_progress(number, (now - self._step_began_ns) / 1e6)

    def _tell_progress(self, number: int, step_ms: float, generation: int | None = None) -> None:
        me = self.link.me
        self.link.tell(
            wire.Progress(
                worker_id=me.worker_id,
                incarnation=me.incarnation,
                generation=self.engine.machine.generation if generation is None else generation,
                step=number,
                step_ms=step_ms,
            )
        )

    def discard(self, number: int) -> None:
        for replica in self.stages.values():
            replica.discard()

    def entered(self, plan: Plan, number: int, phases_ms: dict[str, float]) -> None:
        """All have settled. Raises: DeterminismError if the job would begin with something else than it was to."""
        me = self.link.me
        stages, role = plan.stages_of(me.worker_id), plan.role_of(me.worker_id)
        self.link.row.set(generation=plan.generation, step=number)
        self.link.row.seat(stages[0] if stages else None, role)
        log = self.link.log
        log.generation, log.step, log.stage, log.role = plan.generation, number, stages[0] if stages else None, role
        self._entered_generation = self._told_entered = plan.generation
        if self.engine.top_stated > number:  # so that it is known how many steps are done again
            self._tell_progress(self.engine.top_stated, 0.0, plan.generation - 1)
        self.tell(
            wire.GenerationEntered(
                worker_id=me.worker_id,
                incarnation=me.incarnation,
                generation=plan.generation,
                step=number + 1,
                phases_ms=phases_ms,
            )
        )
        if number < self.saver.begins_after:
            raise DeterminismError(
                f"nothing is left of the checkpoint of step {self.saver.begins_after} that this job began with, or of "
                "later ones: start it anew with --resume-from, in another directory"
            )
        if plan.save:
            self.saver.last(plan)

    def restorable(self, limit: int | None) -> tuple[int, ...]:
        return self.saver.restorable(limit)

    # ---- state from and to others

    def serve(self, plan: Plan, position: Key, to: tuple[int, ...]) -> None:
        self.transfers.serve(plan, position)

    def fetch(self, plan: Plan, position: Key, donors: Mapping[int, tuple[int, ...]]) -> Mapping[int, Record]:
        return self.transfers.fetch(plan, position, donors)

    def go_back(self, plan: Plan, number: int, sources: Mapping[int, tuple[int, ...]]) -> Mapping[int, Record]:
        return self.transfers.go_back(plan, number, sources)
