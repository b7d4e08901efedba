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
from everstep.base.errors import CollectiveAborted, DeterminismError, EverstepError, Evicted, JobFailed
from everstep.base.plan import Member, Plan
from everstep.base.ports import Reduced
from everstep.data.loader import LaneLoader, to_device
from everstep.order.cursor import SampleOrder
from everstep.order.ledger import use_digest
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.step_types import Key, Record
from everstep.runtime.peer import PeerConnection
from everstep.train import heal
from everstep.train.elastic_order import ElasticOrder
from everstep.train.engine import Engine
from everstep.train.final import write_final
from everstep.train.link import Link
from everstep.train.published import Publisher
from everstep.train.record import (
    AgreePayload,
    GatherPayload,
    Outcome,
    committed_unix_ns,
    conclude,
    encode_payload,
    gathered,
)
from everstep.train.rendezvous import Rendezvous
from everstep.train.replica import Replica
from everstep.train.transports import open_transport

_NOT_EXACT = (
    "batch is per_worker: the global batch follows the number of workers, so the result depends on who came and went "
    "when, and is not bitwise that of an undisturbed run; use batch: constant for exactness"
)


class Session:
    """Everything between the user's loop and the rest of the job.

    `order` says which samples make up a lane; `dataset`, `collate` how to get them.
    """

    def __init__(
        self,
        link: Link,
        replica: Replica,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        order: SampleOrder | ElasticOrder,
    ) -> None:
        self.link = link
        self.config: Config = link.config
        self.replica = replica
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
        self.transport = open_transport(link, replica.layout, self.tick, self.rendezvous, replica.device)
        self.engine = Engine(link.me, self.transport, self, self._tell, self.tick)
        self.donor = heal.Donor()
        self.outcome: Outcome | None = None
        self.learned: dict[str, Any] = {}
        self._standing: dict[type, wire.AnyMessage] = {}
        self._reduced: dict[int, Reduced] = {}
        self._generations: dict[int, int] = {}
        self._committed_ns = 0
        self._samples = 0
        self._step_began_ns = 0
        self._progress_ns = 0
        self._entered_generation = 0
        self._probed = False

    # ---- joining and leaving

    def open(self) -> None:
        """Say hello and become a settled member: from the start, or healed while the others train."""
        address = self.link.serve_peers(self.donor.handle)
        me = self.link.me
        self._member = Member(
            me.worker_id, me.incarnation, self.link.host, os.getpid(), address, self.transport.segment
        )
        self._state_bytes = self.replica.expected_bytes()
        self.link.row.set(phase="idle")
        self.link.connect(self._hello, self._deliver, self._reconnected)
        while not self.engine.settled:
            if self.engine.heal is not None:
                ticket, self.engine.heal = self.engine.heal, None
                self._follow(ticket)
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
            state_bytes=self._state_bytes,
        )

    def _tell(self, message: wire.AnyMessage) -> None:
        """Send, and remember what a coordinator that missed it would have to hear again."""
        if isinstance(message, wire.GenerationEntered):
            self._standing = {}
        self._standing[type(message)] = message
        self.link.tell(message)

    def _reconnected(self) -> None:
        """What was handed to a connection that then broke may be lost: say it again."""
        self.rendezvous.repeat()
        for message in list(self._standing.values()):
            self.link.tell(message)

    def _deliver(self, message: wire.AnyMessage) -> None:
        self.rendezvous.observe(message)
        self.engine.deliver(message)

    def finish(self) -> None:
        """After the last step: nobody leaves before all have committed it and the leader has written final/."""
        self.phase("finish", self.engine.position.step, self.engine.plan)
        self.engine.gather(b"")  # proves that all have committed the last step, whatever generations follow
        while True:
            self.phase("finish", self.engine.position.step, self.engine.plan)
            self.release(self.engine.position.step)  # proven by the gather
            written = False
            if self.is_main and self.link.run_dir is not None:
                write_final(self.link.run_dir, self.replica.parts.model, self.replica.state, self.engine.position.step)
                written = True
            me = self.link.me
            self._tell(
                wire.WorkerDone(
                    worker_id=me.worker_id,
                    incarnation=me.incarnation,
                    generation=self.engine.machine.generation,
                    step=self.engine.position.step,
                    final_written=written,
                )
            )
            if self.engine.wait_end():
                break
        ended = self.engine.ended
        if ended is not None and ended.state != "completed":
            raise JobFailed(ended.reason)

    def close(self) -> None:
        """Give back processes and memory. The link is its owner's: last words may have to be said."""
        self.loader.close()
        self.transport.close()

    @property
    def is_main(self) -> bool:
        plan = self.engine.plan
        return plan is not None and plan.leader(0) == self.link.me.worker_id

    # ---- a step, as the loop sees it

    def begin_step(self) -> int:
        """Ask for the next step; returns its number."""
        if self.donor.wanted():
            self.donor.offer(self._offer)
        self._step_began_ns = time.monotonic_ns()
        number = self.engine.position.step + 1
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
                return lane, to_device(batch, self.replica.device), len(samples), use_digest(samples)
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

    def phase(self, name: str, number: int, plan: Plan | None) -> None:
        self.link.row.set(step=self.engine.position.step, phase=name)
        if plan is not None:
            self.link.faults(number, name, plan)

    def prepare(self, number: int, plan: Plan) -> tuple[int, ...]:
        mine = plan.lanes_of(self.link.me.worker_id)
        self.replica.begin(number, mine, lambda node: self.transport.node(number, node))
        lacking = self.replica.lacking(mine)
        if lacking:
            self.loader.schedule(number, mine)
        return tuple(lane for lane in lacking if lane in self.replica.missing)

    def reduce(self, number: int, plan: Plan) -> bytes:
        lanes = plan.lanes_of(self.link.me.worker_id)
        self._reduced[number] = self.transport.reduce(number, self.replica.presence(number, lanes))
        self._generations[number] = plan.generation
        every = self.config.verify_every
        digest = self.replica.digest(number - 1) if every and number % every == 0 else ""
        section = self.replica.section(self._reduced[number], lanes, digest)
        return encode_payload(AgreePayload([section], self._committed_ns))

    def decided(self, key: Key, records: Mapping[int, Record]) -> None:
        if key.seq == 1 or key.seq == 0:
            self.publisher.committed(key.step if key.seq else key.step - 1, committed_unix_ns(records, key.seq == 0))
        if self._entered_generation == self.engine.machine.generation:
            self._entered_generation = 0
            if self.is_main:
                self._tell_progress(key.step, 0.0)  # now, for it ends a recovery

    def update(self, number: int, records: Mapping[int, Record]) -> None:
        committed = time.time_ns()
        self.decided(Key(number, 0), records)
        self._apply(number, records, self._reduced[number], self._generations[number])
        self._committed_ns = committed

    def _apply(self, number: int, records: Mapping[int, Record], reduced: Reduced, generation: int) -> None:
        outcome = conclude(number, self.config.lanes, records)
        self._compare_digests(outcome)
        self.donor.feed(
            number, records, reduced, self.replica.layout.numel, lambda: heal.pack_state(self.replica.application)
        )
        self.donor.busy_snapshot()
        extra = self.replica.apply(outcome, reduced, self.order.workers if isinstance(self.order, ElasticOrder) else 0)
        if isinstance(self.order, ElasticOrder):
            self.order.advance(number, outcome.samples, len(set(outcome.workers.values())))
        self.outcome = outcome
        self.engine.gathered = {Key(number, 0): records}
        self.link.log.step = number
        self._reduced = {n: r for n, r in self._reduced.items() if n >= number}
        self._generations = {n: g for n, g in self._generations.items() if n > number}
        self.publisher.hold(outcome, generation, extra)

    def _compare_digests(self, outcome: Outcome) -> None:
        digests = outcome.digests[self.replica.spec.stage]
        found = sorted(set(digests.values()))
        if len(found) > 1:
            by = {d: [w for w, x in digests.items() if x == d] for d in found}
            raise DeterminismError(
                f"the workers' states differ before step {outcome.step}: "
                + ", ".join(f"workers {w} have {d[:12]}" for d, w in by.items())
                + "; one of them computes wrongly, and all steps since the last match are tainted"
            )

    def gather_payload(self, data: bytes) -> bytes:
        return encode_payload(GatherPayload(data, self._committed_ns))

    def release(self, number: int) -> None:
        leads = self.is_main and self.engine.machine.settled  # before that, the leader of before may still tell
        self.publisher.release(number, leads)
        now = time.monotonic_ns()
        if leads and now - self._progress_ns > 200_000_000:
            self._progress_ns = now
            self._tell_progress(number, (now - self._step_began_ns) / 1e6)

    def _tell_progress(self, number: int, step_ms: float) -> None:
        me = self.link.me
        self.link.tell(
            wire.Progress(
                worker_id=me.worker_id,
                incarnation=me.incarnation,
                generation=self.engine.machine.generation,
                step=number,
                step_ms=step_ms,
            )
        )

    def discard(self, number: int) -> None:
        self.replica.discard()

    def entered(self, plan: Plan, number: int, phases_ms: dict[str, float]) -> None:
        me = self.link.me
        self.link.row.set(generation=plan.generation, step=number)
        self.link.log.generation, self.link.log.step = plan.generation, number
        self._entered_generation = plan.generation
        self._tell(
            wire.GenerationEntered(
                worker_id=me.worker_id,
                incarnation=me.incarnation,
                generation=plan.generation,
                step=number,
                phases_ms=phases_ms,
            )
        )

    # ---- healing

    def _offer(self) -> heal.Offer:
        self.replica.settle_buffers()
        snapshot = self.replica.state.clone_snapshot()
        snapshot.start()
        return heal.Offer(self.engine.position, self.engine.machine.records, dict(self.engine.gathered), snapshot)

    def serve(self, plan: Plan, position: Key, to: tuple[int, ...]) -> None:
        self.donor.offer_settled(plan.generation, self._offer())

    def fetch(self, plan: Plan, position: Key, donors: tuple[int, ...]) -> Mapping[int, Record]:
        """Raises: CollectiveAborted if a newer plan comes first, or no donor gives the state."""
        begin = time.monotonic_ns()
        request = {"kind": "settle", "generation": plan.generation}
        try:
            connection = heal.connect_first([plan.member(d) for d in donors], self.link.token, request)
            try:
                while not heal.readable(connection, 0.005):
                    self.tick()
                    self.engine.news()
                    if self.engine.machine.generation != plan.generation:
                        raise CollectiveAborted("a newer plan has come")
                offer = heal.receive_offer(connection, self.tick)
            finally:
                connection.close()
        except CollectiveAborted:
            raise
        except (EverstepError, OSError) as error:
            raise CollectiveAborted(f"the state could not be copied: {error}", donors[:1]) from error
        self._load(offer)
        self.engine.note_phase("heal", begin)
        return offer.records

    def _load(self, offer: heal.Received) -> None:
        self.replica.discard()
        self.replica.state.load(offer.manifest, lambda i: offer.blocks[i])
        self.replica.update_proven = True
        self.engine.gathered = dict(offer.gathers)
        agreed = offer.gathers.get(Key(offer.position.step, 0))
        if agreed:
            self.outcome = conclude(offer.position.step, self.config.lanes, agreed)
            self.publisher.hold(self.outcome, self.engine.machine.generation, {})  # who gave it may be gone by then

    def _follow(self, ticket: wire.Heal) -> None:
        """Copy a snapshot and apply what follows, until the switch to a plan with this worker."""
        me = self.link.me
        self.phase("heal", self.engine.position.step, ticket.plan)
        self._standing = {}
        try:
            connection = heal.connect_first(ticket.donors, self.link.token, {"kind": "heal", "worker": str(me)})
            try:
                if not self._await_offer(connection):
                    return
                offer = heal.receive_offer(connection, self.tick)
                self._load(offer)
                self.engine.handle(step.Followed(offer.position, offer.records))
                self._follow_feed(connection, ticket)
            finally:
                connection.close()
        except (EverstepError, OSError) as error:
            if isinstance(error, JobFailed | Evicted):
                raise
            if self.engine.ended is not None:
                return
            reason = f"healing stopped: {error}"
            self._tell(
                wire.HealFailed(worker_id=me.worker_id, incarnation=me.incarnation, ticket=ticket.ticket, reason=reason)
            )

    def _healing(self) -> bool:
        """Take in news; whether to go on healing: no plan with this worker, and no other ticket, has come."""
        self.tick()
        self.engine.news()
        while self.engine.plan is None and self.engine.busy:
            self.engine.turn()
        return self.engine.plan is None and self.engine.heal is None and self.engine.ended is None

    def _await_offer(self, connection: PeerConnection) -> bool:
        """Wait for the donor's next step boundary; False if something else has come instead."""
        while self._healing():
            if heal.readable(connection, 0.005):
                return True
        return False

    def _follow_feed(self, connection: PeerConnection, ticket: wire.Heal) -> None:
        said = False
        while self._healing():
            if not heal.readable(connection, 0.005):
                continue
            item = heal.next_item(connection, self.replica.layout.numel)
            if isinstance(item, heal.FollowedStep):
                self.phase("heal", item.step, ticket.plan)
                heal.unpack_state(self.replica.application, item.application)
                self._apply(item.step, item.records, item.reduced, ticket.plan.generation)
                self.engine.handle(step.Followed(Key(item.step, 0), item.records))
            elif not said:
                said = True
                me = self.link.me
                self._tell(
                    wire.WorkerHealed(
                        worker_id=me.worker_id,
                        incarnation=me.incarnation,
                        ticket=ticket.ticket,
                        step=self.engine.position.step,
                    )
                )
