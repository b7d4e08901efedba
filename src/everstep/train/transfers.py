"""State from and to others: settling, going back, healing; what the driver's operations of that kind do with tensors.

Apart from updates because nothing here is needed in an undisturbed step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.errors import CheckpointCorrupt, CollectiveAborted, EverstepError, Evicted, check
from everstep.base.extents import WHOLE, Extents, Sizes, union
from everstep.base.plan import Plan
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.vault import StageState
from everstep.exact.image import sizes_of
from everstep.exact.snapshot import Snapshot, StateInPlace
from everstep.placement.shards import fed_blocks, share
from everstep.protocol.driver import operations as do
from everstep.protocol.moving.giver import AskerCame
from everstep.protocol.step_types import Key
from everstep.train import heal
from everstep.train.executor import Unusable
from everstep.train.final import names_of
from everstep.train.heal import Donor, Held, Offer, ReceivedOffer
from everstep.train.keeping import SnapshotKeeper
from everstep.train.loop_state import LoopState
from everstep.train.loop_survey import CHANGED, recorded
from everstep.train.replica import StageReplica
from everstep.train.saving import LOOP, PAST, Restorer
from everstep.train.taking import Copier, Taking, own_sources
from everstep.train.updates import Updates
from everstep.train.view import WorkerView

_SLICE_S = 0.005


@dataclass(frozen=True)
class FollowedDonor:
    """A donor that is followed in some stages, or several together. steps: those that have come and are not applied
    yet."""

    taking: Taking
    steps: list[heal.FollowedStep] = field(default_factory=list)
    _coming: dict[int, dict[int, heal.FollowedStep]] = field(default_factory=dict)  # by step and donor
    _idle: set[int] = field(default_factory=set)

    def look(self, numel: Mapping[int, int], patience_s: float) -> Iterator[do.Seen]:
        """What has come, after a moment: steps that all have fed, and whether none of them has more. Raises:
        CollectiveAborted, ProtocolError."""
        lines = self.taking.fed
        for place, line in enumerate(lines):
            if not line.readable(patience_s / len(lines)):
                continue
            item = heal.next_item(line, numel)
            if not isinstance(item, heal.FollowedStep):
                self._idle.add(place)
                continue
            self._idle.discard(place)
            self._coming.setdefault(item.step, {})[place] = item
            if len(self._coming[item.step]) == len(lines):
                of = self._coming.pop(item.step)
                self.steps.append(heal.joined([of[k] for k in sorted(of)]))
                yield do.Seen(0, item.step, item.records)
        if lines and len(self._idle) == len(lines) and not self._coming:
            self._idle.clear()
            yield do.Seen(0)


@dataclass
class Transfers:
    """One worker's part in moving state. past: the step of a checkpoint whose loop was done with it already."""

    _view: WorkerView
    _updates: Updates
    _donor: Donor
    _keeper: SnapshotKeeper
    _restorer: Restorer
    _loop: LoopState
    past: int = 0
    _feeds: list[FollowedDonor] = field(default_factory=list)
    _offers: list[ReceivedOffer] = field(default_factory=list)

    @property
    def copier(self) -> Copier:
        return Copier(self._view, self._own)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            do.Fetch: self.fetch,
            do.Restore: self.restore,
            do.OpenFeeds: self.open_feeds,
            do.Watch: self.watch,
            do.Adopt: self.adopt,
            do.Replay: self.replay,
            do.Shelve: self.shelve,
            do.Unshelve: lambda effect: self._donor.unshelve("settle"),
            do.OfferFeeds: self.offer_feeds,
            do.CutFeeds: lambda effect: self._donor.cut(),
            do.CloseFeeds: self.close_feeds,
        }

    # ---- giving

    def shelve(self, effect: do.Shelve) -> None:
        """Offer the state held at this position, live or kept, to members of this generation."""
        position = effect.position
        offer = Offer(position=position, records=effect.records, held={})
        if effect.live:
            live = {} if self._astray(effect) else effect.live
            offer = self._live(effect, live, _shelved if effect.stands else _snapshot)
        held: dict[int, list[Held]] = {k: list(of) for k, of in offer.held.items()}
        for stage, kept in self._keeper.held(position.step).items():
            held.setdefault(stage, []).append(kept)
        whole = {k: [one for one in of if one[1].whole][:1] for k, of in held.items()}
        given = {k: whole[k] or of for k, of in held.items()}
        self._donor.shelve(("settle", effect.generation), msgspec.structs.replace(offer, held=given))
        if not effect.stands:
            self._donor.busy_snapshot(stays=True)

    def _astray(self, effect: do.Shelve) -> bool:
        """Whether a kept snapshot has to stand in for the live state, which the loop has changed since the update, and
        may put back (it evaluates other weights). Raises: Evicted if there is none: the job goes back a few steps."""
        name, number = self._loop.moves.astray, effect.position.step
        if not name or self._view.config.zero.stage:  # that refuses such a loop
            return False
        kept = self._keeper.held(number)
        if all(stage in kept and kept[stage][1].whole for stage in effect.live):
            return True
        text = (
            f"another worker needs the state of step {number}, and no copy was kept of it: the loop may have changed "
            f"{name} since the update, so this worker restarts, and the job goes back to a checkpoint"
        )
        raise Evicted(text, returns=True)

    def offer_feeds(self, effect: do.OfferFeeds) -> None:
        """Give a snapshot of now to workers that have asked to follow."""
        held = {stage: effect.held.get(stage, WHOLE) for stage in effect.stages}

        def make(asked: Sequence[AskerCame]) -> Offer:
            there = {k: of & self._asked_of(k, asked) for k, of in held.items()}
            return self._live(effect, there, _snapshot)

        self._donor.offer(make, effect.tickets)

    def _asked_of(self, stage: int, asked: Iterable[AskerCame]) -> Extents:
        """Blocks of a stage that these ask for: of one that several donors feed, each gives the parts that it feeds."""
        sizes = self._view.stages[stage].state.shape.sizes
        asks = [one.joint for one in asked if stage in one.stages]
        return union(WHOLE if ask is None else fed_blocks(ask.segments, ask.rest, sizes) for ask in asks)

    def _live(
        self,
        effect: do.Shelve | do.OfferFeeds,
        there: Mapping[int, Extents],
        readable: Callable[[StageReplica, Extents], Snapshot | StateInPlace],
    ) -> Offer:
        """Offer of the state as it is, but for the loop's: its taker enters the loop's body right after the update.
        there: blocks that are here, by stage."""
        position, view, loop = effect.position, self._view, self._loop
        past = loop.moves.past(position.step)
        return Offer(
            position=position,
            records=effect.records,
            gathers=dict(effect.gathers),
            held={k: [(readable(view.stages[k], blocks), blocks)] for k, blocks in there.items()},
            application=loop.going_on(position.step + 1) if past else loop.told(position.step),
            past=past,
            untold=view.publisher.untold.packed(),
            changed=loop.changed(),
            names={k: names_of(view.stages[k].parts.model, view.stages[k].state) for k in there if view.stages.split},
        )

    # ---- taking, when a generation settles

    def fetch(self, operation: do.Fetch) -> do.Copied:
        """Raises: CollectiveAborted if the generation ends, or no donor gives the state."""
        view, position = self._view, operation.position
        view.phase("heal", position.step, operation.plan)
        received = self.copier.settle(operation.plan, position, operation.sources, operation.pieces)
        self._updates.stand_still(stays=position.step == view.step)
        sizes = _sizes(received)
        if position != view.driver.machine.position:
            self._updates.forget()
        with _loop_goes_on(view, position):
            for offer in received:
                self._load(offer)
        self._loop.moves.loaded()
        if not received:
            return do.Copied()
        if position != view.driver.machine.position:
            self._arrive(received[0])
        return do.Copied(received[0].records, received[0].gathers, sizes=sizes)

    def _own(self, stage: int, step: int) -> list[Held]:
        """Blocks of a stage at a step on this worker, live or kept, damaged or not."""
        view = self._view
        found: list[Held] = []
        if view.step == step and stage in view.stages:
            there = view.driver.machine.held.get(stage, WHOLE)
            found.append((_in_place(view.stages[stage], there, shared=False), there))
        kept = self._keeper.held(step)
        return [*found, kept[stage]] if stage in kept else found

    def _kept(self, plan: Plan, stage: int, step: int) -> StageState:
        """A snapshot that was stated to be in this worker's memory, checked. Raises: Unusable if it lacks blocks of
        this worker's share."""
        kept = self._keeper.held(step).get(stage)
        own = [kept] if kept is not None and kept[1].whole else self._own(stage, step)
        check(bool(own), f"stage {stage} of step {step} was stated as kept")
        manifest = own[-1][0].manifest()
        sources, of = own_sources(manifest, own), sizes_of(manifest)
        there = Extents.numbered(of, (n for n, source in enumerate(sources) if source is not None))
        if there.covers(share(plan.shard(self._view.me, stage), of)):
            return StageState(manifest, sources)
        self._keeper.check(stage, step)
        why = Why(Cause.CORRUPT, f"the snapshot of stage {stage} at step {step} is not what it was")
        raise Unusable(why, torn=False)

    def _load(self, offer: ReceivedOffer) -> None:
        for stage, state in offer.states.items():
            try:
                _load_stage(self._view.stages[stage], state)
            except CheckpointCorrupt as error:
                raise Unusable(Why(error.cause, f"the state of step {offer.position.step}: {error}"), True) from error
        if offer.past:
            self.past = offer.position.step
            self._loop.take_entered(offer.application)
        elif offer.application:
            self._loop.take(offer.application, offer.position.step)

    def _arrive(self, offer: ReceivedOffer) -> None:
        number, outcome = offer.position.step, None
        self._view.publisher.learn(offer.untold, number)
        agreed = offer.gathers.get(Key(number, 0)) or (offer.records if not offer.position.seq else None)
        if agreed:
            outcome = self._view.driver.config.outcome(number, agreed)
            strange, generation = self._updates.strange(outcome), self._view.driver.machine.generation
            self._view.publisher.hold(outcome, generation, strange)  # who gave it may be gone then
        self._updates.arrive(outcome, number)

    # ---- going back

    def restore(self, operation: do.Restore) -> do.Copied:
        """Take the state of a step for all own stages, from memory (own or others'), from disk, or built.

        Raises: CollectiveAborted if the generation ends, or a donor does not give what it stated. Unusable. ConfigError
        if the job would start over, while checkpoints cannot be read.
        """
        view, number, me = self._view, operation.step, self._view.me
        sources = operation.sources
        view.phase("heal", number, operation.plan)
        received = self.copier.settle(operation.plan, operation.position, sources, operation.pieces)
        mine = [k for k, ids in sources.items() if ids and ids[0] == me and k not in operation.stands]
        own = {k: self._kept(operation.plan, k, number) for k in mine}
        sizes = _sizes(received, own)
        records = operation.own or next((r.records for r in received if r.records), {})
        self._updates.stand_still(stays=number == view.step)
        restored = None
        lacking = [k for k, ids in sources.items() if not ids]
        if lacking and not number:
            self._restorer.refuse_to_start_over()
        elif lacking:
            restored = self._restorer.restore(number, lacking)
            records = records or self._restorer.records_of(restored)
        self.past = 0
        self._updates.forget()
        outcome = view.driver.config.outcome(number, records) if records else None
        with _loop_goes_on(view, Key(number, 0)) as goes_on:
            built = self._put(operation, own)
            for offer in received:
                self._load(offer)
            if not goes_on:
                self._loop.went_back(number)
            if restored is not None:
                self._take_loop(restored)
        self._loop.moves.loaded()
        if restored is not None and outcome is not None:  # they may have died before they could tell of it
            self._view.publisher.hold(outcome, operation.generation, self._updates.strange(outcome))
        self._updates.arrive(outcome, number)
        return do.Copied(records, built=built, sizes=sizes)

    def _put(self, operation: do.Restore, own: Mapping[int, StageState]) -> dict[int, str]:
        """Put the stages in place that come from this worker's memory, or are built; drop other stages of the step.
        Returns digests of the built states. Raises: Unusable."""
        machine = self._view.driver.machine
        stays = machine.held if operation.step == machine.position.step else {}
        # At step 0 a later plan would take a stage that is left of another step for an initial state.
        self._view.stages.keep({*operation.sources, *stays})
        built: dict[int, str] = {}
        for stage, ids in operation.sources.items():
            if not ids:
                if not operation.step:
                    self._view.stages.rebuild(stage)
                    built[stage] = self._view.stages.first(stage)
            elif ids[0] == self._view.me and stage not in operation.stands:
                try:
                    _load_stage(self._view.stages[stage], own[stage])
                except CheckpointCorrupt as error:
                    raise Unusable(Why(error.cause, f"the snapshot of step {operation.step}: {error}"), True) from error
            else:
                self._view.stages[stage].abandon()
        return built

    def _take_loop(self, restored: Manifest) -> None:
        """Let the user's loop go on right after the update, or after what follows it."""
        changed = recorded(restored.application.get(CHANGED))
        self._loop.refuse(changed, f"the job cannot go on from the checkpoint of step {restored.step}")
        if restored.application.get(LOOP):
            self._loop.take(restored.application[LOOP], restored.step)
        if PAST in restored.application and not self._view.driver.in_memory(restored.step):  # all do the same
            self.past = restored.step
            self._loop.take_entered(restored.application[PAST])

    # ---- following

    def open_feeds(self, operation: do.OpenFeeds) -> tuple[Key, ...]:
        """Copy, in memory, what each donor offers. Raises: CollectiveAborted."""
        view = self._view
        view.phase("heal", view.step, None)
        stages = [stage for _, wanted in operation.groups for stage in wanted]
        view.stages.want(stages)
        view.stages.keep(stages)
        self.copier.reach(donor for donors, _ in operation.groups for donor in donors)
        joint = operation.joint or ({},) * len(operation.groups)
        for (donors, wanted), asks in zip(operation.groups, joint, strict=True):
            taking = self.copier.follow(operation.generation, donors, wanted, operation.plan, asks)
            self._feeds.append(FollowedDonor(taking))
        try:
            self._offers = [feed.taking.offer() for feed in self._feeds]
        except (EverstepError, OSError) as error:
            raise CollectiveAborted(str(error)) from error
        for offer in self._offers:
            self._loop.refuse(offer.changed, f"worker {view.me} cannot be healed at step {offer.position.step}")
        return tuple(offer.position for offer in self._offers)

    def watch(self, operation: do.Watch) -> list[do.Seen]:
        """Items that have come from the feeds, after a moment. Raises: CollectiveAborted."""
        view, seen = self._view, []
        view.tick()
        for index, feed in enumerate(self._feeds):
            numel = {k: view.stages[k].layout.numel for k in feed.taking.order.stages}
            try:
                came = list(feed.look(numel, _SLICE_S / len(self._feeds)))
            except (EverstepError, OSError) as error:
                raise CollectiveAborted(str(error)) from error
            seen += [msgspec.structs.replace(one, feed=index) for one in came]
        return seen

    def adopt(self, operation: do.Adopt) -> do.Copied:
        """Load the offered state; a donor that offered an older state than the others feeds the steps up to theirs."""
        newest = next(offer for offer in self._offers if offer.position == operation.position)
        self._offers.sort(key=lambda offer: offer.position)
        sizes = _sizes(self._offers)
        self._updates.forget()
        while self._offers:
            self._load(self._offers.pop(0))
        self._arrive(newest)
        for feed, outcomes in zip(self._feeds, operation.passed, strict=True):
            for outcome in outcomes:
                item = feed.steps.pop(0)
                for stage in feed.taking.order.stages:
                    found = item.gradients[stage]
                    self._view.stages[stage].apply(outcome, found.reduced, 0, found.received)
        return do.Copied(newest.records, newest.gathers, sizes=sizes)

    def replay(self, operation: do.Replay) -> dict[int, Extents]:
        """Apply the step that all feeds have. Returns the blocks of stages of which this worker has a part."""
        items = [feed.steps.pop(0) for feed in self._feeds]
        self._view.phase("heal", operation.step, operation.plan)
        self._loop.take(items[0].application, operation.step)
        gradients = {k: g for item in items for k, g in item.gradients.items()}
        plan = operation.plan
        return self._updates.apply(operation.outcome, operation.records, gradients, plan.generation, plan)

    def close_feeds(self, effect: do.CloseFeeds | None = None) -> None:
        for feed in self._feeds:
            feed.taking.close()
        self._feeds, self._offers = [], []


@contextlib.contextmanager
def _loop_goes_on(view: WorkerView, position: Key) -> Iterator[bool]:
    """While a state is loaded: a worker already at its position keeps its own loop state, because it does not repeat
    its work since the update; initial states are the donor's completely. Yields whether the loop keeps its state."""
    application = view.stages.any.application
    goes_on = position.step > 0 and position == view.driver.machine.position
    own = heal.pack_state(application) if goes_on else b""
    yield goes_on
    if own:
        heal.unpack_state(application, own)


def _sizes(received: Iterable[ReceivedOffer], own: Mapping[int, StageState] = {}) -> dict[int, Sizes]:
    """Sizes of the states that came in parts, or in parts from this worker's own memory: by stage."""
    there = chain(own.items(), *(offer.states.items() for offer in received))
    return {stage: sizes_of(state.manifest()) for stage, state in there if None in state.blocks}


def _snapshot(replica: StageReplica, there: Extents) -> Snapshot:
    replica.lanes.settle_buffers()
    snapshot = replica.state.clone_snapshot(there)
    snapshot.start()
    return snapshot


def _shelved(replica: StageReplica, there: Extents) -> Snapshot | StateInPlace:
    """Nothing changes the state before all members have copied what they lack, so they need no copy of it where other
    threads can read it."""
    near = replica.state.memory.others is None and all(p.device.type == "cpu" for p in replica.everything)
    return _in_place(replica, there) if near else _snapshot(replica, there)


def _in_place(replica: StageReplica, there: Extents, *, shared: bool = True) -> StateInPlace:
    replica.lanes.settle_buffers()
    return replica.state.in_place(shared=shared)


def _load_stage(replica: StageReplica, state: StageState) -> None:
    replica.abandon()
    state.load_into(replica.state)
    replica.prove_update()
