"""State from and to others: healing, settling, going back; and the snapshots in memory that make that possible.

Apart from the session because nothing here is needed in an undisturbed step but two calls around its update.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everstep.base.errors import CollectiveAborted, EverstepError, Evicted, JobFailed, check
from everstep.base.plan import Plan
from everstep.checkpoint.checkpointer import Restored
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver.records import Outcome, conclude, stages_in
from everstep.protocol.step_types import Key, Record
from everstep.runtime.peer import PeerConnection
from everstep.train import heal
from everstep.train.heal import Gradient, Offer, Received, StageState
from everstep.train.keeping import Keeper
from everstep.train.replica import StageReplica
from everstep.train.saving import LOOP, PAST

if TYPE_CHECKING:
    from everstep.train.session import Session

log = logging.getLogger(__name__)


class Transfers:
    """One worker's part in moving state."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.keeper = Keeper(session)
        self.donor = heal.Donor(
            {"keep": self.keeper.take, "final": self._serve_final, "part": session.saver.take_report}
        )
        self._initial = b""
        self._after_update = (-1, b"")

    def begin(self) -> None:
        """Before the first plan."""
        if not self._session.stages.split:
            self._initial = heal.pack_state(self._session.stages.only.application)

    def close(self) -> None:
        """The worker ends."""
        self.keeper.close()

    # ---- around an update

    def before_update(self, number: int, records: Mapping[int, Record], gradients: Mapping[int, Gradient]) -> None:
        """A step is decided and about to be applied: pass it on, and let snapshots be finished."""
        stages = self._session.stages
        numel = {k: replica.layout.numel for k, replica in stages.items()}
        held = {k: gradients[k] for k in stages}
        self.donor.feed(number, records, held, numel, self._application)
        self.donor.busy_snapshot()
        self.keeper.before_update()

    def after_update(self, outcome: Outcome, records: Mapping[int, Record]) -> None:
        """The state is that of this step, and the user's loop has not gone on yet."""
        if "memory" in outcome.save[0]:
            self.keeper.take_own(outcome.step, records)

    def before_gather(self) -> None:
        """The user's loop is about to learn something: whoever goes back to this step must not know it yet."""
        at = self._session.engine.position.step
        if self._after_update[0] != at:
            self._after_update = (at, self._application())

    def after_update_state(self, number: int) -> bytes:
        """The packed state of the user's loop right after this step's update, if it may have gone on; else empty."""
        return self._after_update[1] if self._after_update[0] == number else b""

    def released(self, number: int) -> None:
        """All members have gone beyond this step."""
        self.keeper.released(number)

    def _application(self) -> bytes:
        return heal.pack_state(self._session.stages.any.application)

    # ---- giving

    def offer(self) -> Offer:
        """Of the state as it is."""
        session = self._session
        snapshots: dict[int, heal.Readable] = {}
        for stage in session.engine.machine.stages:
            replica = session.stages[stage]
            replica.settle_buffers()
            snapshot = replica.state.clone_snapshot()
            snapshot.start()
            snapshots[stage] = snapshot
        engine = session.engine
        return Offer(engine.position, engine.machine.records, dict(engine.gathered), snapshots)

    def serve(self, plan: Plan, position: Key) -> None:
        """Members of this generation may have what is held at this position, live or kept."""
        engine = self._session.engine
        if position.step == engine.position.step:
            offer = self.offer()
            if position.seq == 0 and engine.position.seq and self._after_update[0] == position.step:
                offer.position, offer.application = position, self._after_update[1]
        else:
            offer = Offer(position, {}, {}, {})
        kept = self.keeper.at(position.step)
        if kept is not None:
            offer.snapshots = {**kept.snapshots, **offer.snapshots}
            offer.records = offer.records or kept.records
        self.donor.offer_settled(plan.generation, offer)

    def _serve_final(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        self._session.finisher.serve(connection, request)

    # ---- taking

    def fetch(self, plan: Plan, position: Key, donors: Mapping[int, tuple[int, ...]]) -> Mapping[int, Record]:
        """Raises: CollectiveAborted if a newer plan comes first, or no donor gives the state."""
        begin = time.monotonic_ns()
        session = self._session
        received = self._copy(plan, donors)
        check(all(r.position == position for r in received), f"the donors are not at {position}")
        session.saver.before_update()
        if position != session.engine.position:
            session.forget_gradients()
            self.donor.cut()
        for offer in received:
            self._load(offer)
        if received and position != session.engine.position:
            self._arrive(received[0])
        session.engine.note_phase("heal", begin)
        return received[0].records if received else session.engine.machine.records

    def _copy(self, plan: Plan, donors: Mapping[int, tuple[int, ...]]) -> list[Received]:
        """All that is wanted, in memory: nothing is changed before all of it is there."""
        received = []
        for ids, stages in heal.by_donors(donors).items():
            request = {"kind": "settle", "generation": plan.generation, "stages": stages}
            try:
                connection = heal.connect_first([plan.member(d) for d in ids], self._session.link.token, request)
                try:
                    while not heal.readable(connection, 0.005):
                        self._unless_superseded(plan)
                    received.append(heal.receive_offer(connection, stages, self._session.tick))
                finally:
                    connection.close()
            except CollectiveAborted:
                raise
            except (EverstepError, OSError) as error:
                raise heal.unreachable(error, ids) from error
        return received

    def _unless_superseded(self, plan: Plan) -> None:
        engine = self._session.engine
        self._session.tick()
        engine.news()
        if engine.machine.generation != plan.generation:
            raise CollectiveAborted("a newer plan has come")

    def _load(self, offer: Received) -> None:
        for stage, state in offer.states.items():
            self._load_stage(self._session.stages[stage], state)
        if offer.application:
            heal.unpack_state(self._session.stages.any.application, offer.application)

    @staticmethod
    def _load_stage(replica: StageReplica, state: StageState) -> None:
        replica.abandon()
        state.load_into(replica.state)
        replica.update_proven = True

    def _arrive(self, offer: Received) -> None:
        session = self._session
        outcome: Outcome | None = None
        agreed = offer.gathers.get(Key(offer.position.step, 0)) or (offer.records if not offer.position.seq else None)
        if agreed:
            outcome = self._conclude(offer.position.step, agreed)
            if outcome.step > session.released:
                session.publisher.hold(outcome, session.engine.machine.generation, {})  # who gave it may be gone then
        session.arrive(outcome, {}, offer.position.step)
        session.engine.gathered = dict(offer.gathers)

    def _conclude(self, number: int, records: Mapping[int, Record]) -> Outcome:
        return conclude(number, self._session.config.lanes, records, stages_in(records))

    # ---- going back

    def go_back(self, plan: Plan, number: int, sources: Mapping[int, tuple[int, ...]]) -> Mapping[int, Record]:
        """Take on the state of a step for all own stages, from memory (own or others'), or from nothing at step 0.

        Raises: CollectiveAborted if a newer plan comes first, or somebody does not give what it stated. Evicted if
        this worker has to start anew for that.
        """
        begin = time.monotonic_ns()
        session, me = self._session, self._session.link.me.worker_id
        before = session.engine.position
        if before.step and not (session.goes_back and (number or session.stages.split)):
            raise Evicted(f"the job goes back to step {number}, from where this worker starts anew")
        stands = before.step == number
        elsewhere = {k: ids for k, ids in sources.items() if ids and ids[0] != me}
        received = self._copy(plan, elsewhere)
        own = self.keeper.at(number)
        records = next((r.records for r in received if r.records), own.records if own is not None else {})
        if stands and not before.seq:
            records = session.engine.machine.records
        elif stands and session.engine.gathered.get(Key(number, 0)):
            records = session.engine.gathered[Key(number, 0)]
        session.saver.before_update()
        restored = None
        if number and not all(sources.values()):
            restored = session.saver.restore(plan, number, [k for k, ids in sources.items() if not ids])
            records = records or session.saver.records_of(restored)
        session.past = 0
        self.donor.cut()
        session.forget_gradients()
        for stage, ids in sources.items():
            if not ids:
                if not number:
                    session.stages.rebuild(stage)
            elif ids[0] == me and not (stands and stage in session.engine.machine.stages):
                check(own is not None and stage in own.snapshots, f"stage {stage} of step {number} was stated as kept")
                self._load_stage(session.stages[stage], _in_memory(own.snapshots[stage]))  # type: ignore[union-attr]
            else:
                session.stages[stage].abandon()
        for offer in received:
            self._load(offer)
        if number == 0:
            if self._initial:
                heal.unpack_state(session.stages.any.application, self._initial)
        elif stands and before.seq and self._after_update[0] == number:
            heal.unpack_state(session.stages.any.application, self._after_update[1])
        self._after_update = (-1, b"")
        self.keeper.went_back(number)
        outcome = self._conclude(number, records) if records else None
        if restored is not None:
            self._take_loop(restored)
            if outcome is not None and number > session.released:  # they may have died before they could tell of it
                session.publisher.hold(outcome, plan.generation, {})
        session.arrive(outcome, records, number)
        session.engine.note_phase("heal", begin)
        return records

    def _take_loop(self, restored: Restored) -> None:
        """Where the user's loop goes on: right after the update, or beyond what follows it."""
        session = self._session
        if restored.application.get(LOOP):
            heal.unpack_state(session.stages.any.application, restored.application[LOOP])
        if PAST in restored.application and not session.engine.in_memory(restored.step):  # all do the same
            session.past = restored.step

    # ---- following

    def follow(self, ticket: wire.Heal) -> None:
        """Copy a snapshot and apply what follows, until the switch to a plan with this worker."""
        session, me = self._session, self._session.link.me
        session.phase("heal", session.engine.position.step, ticket.plan)
        session.standing = {}
        try:
            self._follow(ticket)
        except (EverstepError, OSError) as error:
            if isinstance(error, JobFailed | Evicted):
                raise
            if session.engine.ended is not None:
                return
            reason = f"healing stopped: {error}"
            session.tell(
                wire.HealFailed(worker_id=me.worker_id, incarnation=me.incarnation, ticket=ticket.ticket, reason=reason)
            )

    def _follow(self, ticket: wire.Heal) -> None:
        session = self._session
        stages = tuple(sorted(ticket.stages))
        session.stages.want(stages)
        session.stages.keep(stages)
        feeds: list[_Followed] = []
        try:
            for ids, wanted in heal.by_donors(_sources(ticket)).items():
                donors = {m.worker_id: m for m in ticket.donors}
                request = {"kind": "heal", "worker": str(session.link.me), "stages": wanted}
                connection = heal.connect_first([donors[i] for i in ids], session.link.token, request)
                feeds.append(_Followed(connection, tuple(wanted)))
            for feed in feeds:
                if not self._await(feed):
                    return
                feed.take(heal.receive_offer(feed.connection, feed.stages, session.tick))
            self._align(feeds, ticket)
            if self._healing():
                self._follow_feeds(feeds, ticket)
        finally:
            for feed in feeds:
                feed.connection.close()

    def _align(self, feeds: list[_Followed], ticket: wire.Heal) -> None:
        """Load what came; whoever gave an older state than the others feeds it up to theirs."""
        session = self._session
        newest = max(feeds, key=lambda f: f.offer.position)
        for feed in sorted(feeds, key=lambda f: f.offer.position):
            self._load(feed.offer)
        self._arrive(newest.offer)
        for feed in feeds:
            while feed.offer.position.step + len(feed.passed) < newest.offer.position.step:
                if not self._await(feed):
                    return
                item = heal.next_item(feed.connection, self._numel(feed.stages))
                if isinstance(item, heal.FollowedStep):
                    self._apply_apart(feed, item)
                    feed.passed.append(item.step)
        records = newest.offer.records
        session.engine.handle(step.Followed(newest.offer.position, records, tuple(sorted(ticket.stages))))

    def _apply_apart(self, feed: _Followed, item: heal.FollowedStep) -> None:
        session = self._session
        outcome = self._conclude(item.step, item.records)
        for stage in feed.stages:
            found = item.gradients[stage]
            session.stages[stage].apply(outcome, found.reduced, 0, found.received)

    def _follow_feeds(self, feeds: list[_Followed], ticket: wire.Heal) -> None:
        session = self._session
        said = False
        while self._healing():
            for feed in feeds:
                if feed.item is None and heal.readable(feed.connection, 0.005 / len(feeds)):
                    item = heal.next_item(feed.connection, self._numel(feed.stages))
                    feed.caught_up = not isinstance(item, heal.FollowedStep)
                    feed.item = item if isinstance(item, heal.FollowedStep) else None
            items = [feed.item for feed in feeds if feed.item is not None]
            if len(items) == len(feeds):
                self._apply_followed(items, ticket)
                for feed in feeds:
                    feed.item = None
            elif not said and all(feed.caught_up for feed in feeds):
                said = True
                me = session.link.me
                session.tell(
                    wire.WorkerHealed(
                        worker_id=me.worker_id,
                        incarnation=me.incarnation,
                        ticket=ticket.ticket,
                        step=session.engine.position.step,
                    )
                )

    def _apply_followed(self, items: list[heal.FollowedStep], ticket: wire.Heal) -> None:
        session, first = self._session, items[0]
        check(all(i.step == first.step for i in items), f"feeds are apart: {[i.step for i in items]}")
        session.phase("heal", first.step, ticket.plan)
        heal.unpack_state(session.stages.any.application, first.application)
        gradients = {k: g for item in items for k, g in item.gradients.items()}
        session.apply(first.step, first.records, gradients, ticket.plan.generation)
        session.engine.handle(step.Followed(Key(first.step, 0), first.records, tuple(sorted(ticket.stages))))

    def _numel(self, stages: tuple[int, ...]) -> dict[int, int]:
        return {k: self._session.stages[k].layout.numel for k in stages}

    def _healing(self) -> bool:
        """Take in news; whether to go on healing: no plan with this worker, and no other ticket, has come."""
        engine = self._session.engine
        self._session.tick()
        engine.news()
        while engine.plan is None and engine.busy:
            engine.turn()
        return engine.plan is None and engine.heal is None and engine.ended is None

    def _await(self, feed: _Followed) -> bool:
        """Wait until something can be read; False if something else has come instead."""
        while self._healing():
            if heal.readable(feed.connection, 0.005):
                return True
        return False


class _Followed:
    """One donor that is followed, for some stages."""

    def __init__(self, connection: PeerConnection, stages: tuple[int, ...]) -> None:
        self.connection = connection
        self.stages = stages
        self.offer: Received
        self.item: heal.FollowedStep | None = None
        self.caught_up = False
        self.passed: list[int] = []

    def take(self, offer: Received) -> None:
        """What it gave first."""
        self.offer = offer


def _sources(ticket: wire.Heal) -> dict[int, tuple[int, ...]]:
    """By stage: whom to ask for it, in order of preference."""
    everybody = [m.worker_id for m in ticket.donors]
    holders = ticket.holders or [everybody] * len(ticket.stages)
    return {stage: tuple(i for i in ids if i in everybody) for stage, ids in zip(ticket.stages, holders, strict=True)}


def _in_memory(snapshot: heal.Readable) -> StageState:
    return StageState(snapshot.manifest(), [snapshot.read_block(i) for i in range(snapshot.n_blocks)])
