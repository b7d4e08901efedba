"""How a simulated worker gets the state of a settling generation, and how a joiner follows the members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import Member
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Pieces, Record
from everstep.sim.copying import Memory, Taking
from everstep.sim.life import Life, SimCopy
from everstep.sim.model import NOTHING, PLANES, Blocks, SimGradient, merged, present, update, without
from everstep.sim.world import MS, SimConnection

_ALL = sum(n for _, n in PLANES)


class Fetcher:
    """Gets it stage by stage: own copies, peers, disk, or anew. What this worker has a part of, it gets the rest of."""

    def __init__(self, life: Life, memory: Memory) -> None:
        self.life = life
        self.memory = memory
        self._taking: Taking | None = None
        self._donors: list[int] = []
        self._got: dict[int, SimCopy] = {}
        self._left: list[tuple[int, tuple[int, ...]]] = []
        life.install({do.Fetch: self._fetch, do.Restore: self._restore})
        life.install({("abort", do.Fetch): self._leave, ("abort", do.Restore): self._leave})

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still be sent or expected here."""
        return self._taking is not None and connection in self._taking.asked

    def _restore(self, operation: do.Restore) -> None:
        self.life.site.went_back.append(operation.step)
        self._fetch(operation)

    def _leave(self, operation: do.Operation, accused: tuple[int, ...], reason: str) -> None:
        self._stop()
        self.life.aborted(operation, accused, reason)

    def _damaged(self, operation: do.Restore, reason: str) -> None:
        self._stop()
        self.life.tainted(operation, reason)

    def _fetch(self, operation: do.Fetch | do.Restore) -> None:
        """Get these stages, then take them on, all or nothing."""
        self._got, self._left = {}, sorted(operation.sources.items())
        self._next(operation)

    def _stop(self) -> None:
        """Whatever is on its way is not wanted."""
        if self._taking is not None:
            self._taking.close()
            self._taking = None

    def _next(self, operation: do.Fetch | do.Restore) -> None:
        life = self.life
        if not self._left:
            life.during(operation, life.world.between(0, MS), self._install)
            return
        stage, donors = self._left.pop(0)
        if isinstance(operation, do.Restore) and (not donors or donors[0] == life.me.worker_id):
            self._own(operation, stage, bool(donors))
        else:
            self._take(operation, stage, donors)

    # ---- of this worker's own

    def _held(self, operation: do.Fetch | do.Restore, stage: int) -> Blocks:
        """What is live or kept here of the state that is wanted."""
        step, state = operation.position.step, self.life.state
        live = state.stages.get(stage, NOTHING) if state.at == step else NOTHING
        kept = self.memory.kept.get((stage, step), NOTHING) if isinstance(operation, do.Restore) else NOTHING
        return merged(live, kept)

    def _claimed(self, operation: do.Fetch | do.Restore, stage: int) -> Extents:
        """What this worker says that it has of that, live; where it is gathers behind, it copies what they led to."""
        machine, wanted = self.life.driver.machine, operation.position
        if machine.step != wanted.step or (isinstance(operation, do.Fetch) and machine.position != wanted):
            return NONE
        return WHOLE if stage in machine.stages else machine.parts.get(stage, NONE)

    def _own(self, operation: do.Restore, stage: int, memory: bool) -> None:
        """From this worker's memory, from disk, or anew."""
        life, at = self.life, operation.position
        if memory and stage in operation.stands:
            copy = life.state.copy(at, operation.own, {}, (stage,))
        elif memory:
            copy = SimCopy(at, operation.own, {stage: self._held(operation, stage)})
            if None in copy.states[stage]:  # lost since they were stated
                said = f"stage {stage} of step {at.step} is not whole any more"
                life.during(operation, 0, self._refuse, said)
                return
        else:
            found = life.site.disk.read(stage, at.step) if at.step else life.state.built_anew(stage)
            if found is None:
                said = f"checkpoint {at.step} is damaged"
                life.during(operation, life.world.between(0, 5 * MS), self._damaged, said)
                return
            effects = ((at.step, life.site.checks.exact.effect(at.step)),) if at.step else ()  # perhaps untold yet
            copy = SimCopy(at, {}, {stage: found}, effects)
        took = life.world.between(0, MS) if memory else life.world.between(MS, 20 * MS)
        life.during(operation, took, self._have, stage, copy)

    def _have(self, operation: do.Fetch | do.Restore, stage: int, copy: SimCopy) -> None:
        self._got[stage] = copy
        self._next(operation)

    # ---- from peers

    def _take(self, operation: do.Fetch | do.Restore, stage: int, donors: tuple[int, ...]) -> None:
        """From as many at once as are asked at once; from all of them where none has all."""
        pieces, at_once = operation.pieces.get(stage, Pieces(WHOLE)), self.life.site.donors
        self._donors = list(donors)
        taking = self._taking = Taking(
            self.life,
            _ALL if at_once == 1 else 1,
            lambda k, extents: ("fetch", operation.generation, k, extents),
            lambda: self._look(operation, stage, taking),
        )
        own = without(self._held(operation, stage), pieces.missing)  # perhaps more has been lost since it was stated
        taking.want(stage, own, WHOLE - present(own))
        for _ in range(len(donors) if pieces.given else at_once):
            self._try(operation, stage, taking)

    def _try(self, operation: do.Fetch | do.Restore, stage: int, taking: Taking) -> None:
        """Reach one more donor."""
        life = self.life
        if life.operation is not operation or self._taking is not taking:
            return
        if not self._donors:
            self._look(operation, stage, taking)
            return

        def lost(connection: SimConnection) -> None:
            taking.lost(connection)
            self._try(operation, stage, taking)

        worker_id, pieces = self._donors.pop(0), operation.pieces.get(stage)
        key = operation.plan.member(worker_id).key
        connection = life.reach(key, "donor", lambda donor, message: taking.came(donor, message[1]), lost)
        if connection is None:
            life.later(life.world.latency_ns(), self._try, operation, stage, taking)
        else:
            taking.join(connection, {stage: WHOLE if pieces is None else pieces.given.get(worker_id, WHOLE)})

    def _look(self, operation: do.Fetch | do.Restore, stage: int, taking: Taking) -> None:
        """Whether the stage is there, or cannot be had."""
        life = self.life
        if life.operation is not operation or self._taking is not taking:
            return
        if taking.queue.finished and taking.meta is not None:
            own = self._claimed(operation, stage) & taking.taken.get(stage, NONE)
            if own:
                raise AssertionError(f"{life.me} has copied what it had of stage {stage}: {own}")
            self._stop()
            self._have(operation, stage, replace(taking.meta, states={stage: taking.states[stage]}))
        elif taking.queue.out_of_reach and not self._donors:
            if taking.refused:
                self._refuse(operation, f"blocks of stage {stage} are not there any more")
            else:
                life.abort(operation, tuple(operation.sources[stage]), "the state could not be copied")
        elif taking.queue.out_of_reach:
            self._try(operation, stage, taking)

    def _refuse(self, operation: do.Fetch | do.Restore, reason: str) -> None:
        self._stop()
        self.life.tainted(operation, reason, torn=False)

    # ---- the end

    def _install(self, operation: do.Fetch | do.Restore) -> None:
        life, position = self.life, operation.position
        wrong = [c.position for c in self._got.values() if c.position != position]
        if wrong:
            raise AssertionError(f"{life.me} wants the state at {position} and got {wrong}")
        copies = [self._got[k] for k in sorted(self._got)]
        records = next((c.records for c in copies if c.records), {})
        gathers = next((c.gathers for c in copies if c.gathers), {})
        states = {k: state for c in copies for k, state in c.states.items()}
        lacking = [k for k, state in states.items() if None in state]
        if lacking:
            raise AssertionError(f"{life.me} takes on stages {lacking} without all of their blocks")
        effects = tuple(sorted({effect for c in copies for effect in c.effects}))
        life.state.install(SimCopy(position, records, states, effects, gathers))
        anew = (
            []
            if position.step or isinstance(operation, do.Fetch)
            else [k for k, of in operation.sources.items() if not of]
        )
        life.done(operation, do.Copied(records, gathers, {k: life.state.first(k) for k in anew}))


@dataclass(eq=False)
class _Feed:
    """One donor of a joiner: what it has offered, and the steps that have come since."""

    stages: tuple[int, ...]
    donors: list[Member]
    taking: Taking | None = None
    connection: SimConnection | None = None
    offer: SimCopy | None = None
    steps: dict[int, tuple[Mapping[int, Record], Mapping[int, SimGradient]]] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)  # 0: caught up

    def connect(self, connection: SimConnection) -> None:
        """A donor has been reached."""
        self.connection = connection

    def offered(self, copy: SimCopy) -> None:
        """What the donor starts from."""
        self.offer = copy

    def takes(self, taking: Taking) -> None:
        """Its blocks come one by one, from several."""
        self.taking = taking

    @property
    def whole(self) -> bool:
        """Whether all that was offered is here."""
        return self.offer is not None and (self.taking is None or self.taking.queue.finished)

    @property
    def states(self) -> Mapping[int, Blocks]:
        """What was offered."""
        if self.taking is not None:
            return self.taking.states
        return self.offer.states if self.offer is not None else {}


class Follower:
    """A joiner's feeds, and what they bring."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.feeds: list[_Feed] = []
        self.broken = ""
        self._helpers: dict[SimConnection, SimCopy | None] = {}  # asked for blocks, and what they have offered
        life.install({do.OpenFeeds: self._open, do.CloseFeeds: lambda effect: self._stop()})
        life.install({do.Watch: lambda operation: self._look(), do.Adopt: self._adopt, do.Replay: self._replay})

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still be sent or expected here."""
        taking = [feed.taking for feed in self.feeds if feed.taking is not None]
        own = any(connection is feed.connection for feed in self.feeds)
        return own or connection in self._helpers or any(connection in one.asked for one in taking)

    def _open(self, operation: do.OpenFeeds) -> None:
        """Ask the first donor of each group that can be reached."""
        self._stop()
        self.feeds = [_Feed(stages, list(donors)) for donors, stages in operation.groups]
        for feed in self.feeds:
            self._try(feed)

    def _stop(self) -> None:
        """Follow nobody any more."""
        for feed in self.feeds:
            if feed.connection is not None:
                feed.connection.close(self.life)
        for connection in self._helpers:
            connection.close(self.life)
        self.feeds, self.broken, self._helpers = [], "", {}

    def _try(self, feed: _Feed) -> None:
        life = self.life
        if feed not in self.feeds:
            return
        if not feed.donors:
            self._lost(feed, "no donor could be reached")
            return
        connection = life.reach(
            feed.donors.pop(0).key,
            "donor",
            lambda donor, message: self._received(feed, message),
            lambda donor: self._lost(feed, "the donor went away"),
        )
        if connection is None:
            life.later(life.world.latency_ns(), self._try, feed)
            return
        feed.connect(connection)
        several = life.site.donors > 1
        connection.send(life, ("follow", feed.stages, "feed" if several else "all"))
        for member in feed.donors[: life.site.donors - 1]:
            self._help(feed, member)

    # ---- others who give blocks too

    def _help(self, feed: _Feed, member: Member) -> None:
        """One more who may be where the donor is that is followed: then it gives blocks."""
        helped, lost = partial(self._helped, feed), partial(self._helper_lost, feed)
        connection = self.life.reach(member.key, "donor", helped, lost)
        if connection is not None:
            self._helpers[connection] = None
            connection.send(self.life, ("follow", feed.stages, "blocks"))

    def _helped(self, feed: _Feed, connection: SimConnection, message: tuple[Any, ...]) -> None:
        match message:
            case ("offer", copy):
                self._helpers[connection] = copy
                self._match(feed)
            case ("blocks", copy) if feed.taking is not None:
                feed.taking.came(connection, copy)

    def _helper_lost(self, feed: _Feed, connection: SimConnection) -> None:
        self._helpers.pop(connection, None)
        if feed.taking is not None:
            feed.taking.lost(connection)

    def _match(self, feed: _Feed) -> None:
        """Who has offered the same position gives blocks; the others are let go."""
        if feed not in self.feeds or feed.offer is None or feed.taking is None:
            return
        for connection, copy in list(self._helpers.items()):
            if copy is None or connection in feed.taking.asked or set(copy.states) != set(feed.stages):
                continue
            if copy.position == feed.offer.position and not feed.taking.queue.finished:
                feed.taking.join(connection, dict.fromkeys(feed.stages, WHOLE))
            else:
                connection.close(self.life)
                del self._helpers[connection]

    def _take(self, feed: _Feed) -> None:
        """All blocks of what was offered: of the donor that is followed, and of the others."""
        connection = feed.connection
        taking = Taking(self.life, 1, lambda k, extents: ("blocks", k, extents), self._look)
        for stage in feed.stages:
            taking.want(stage, NOTHING, WHOLE)
        feed.takes(taking)
        if connection is not None:
            taking.join(connection, dict.fromkeys(feed.stages, WHOLE))
        self._match(feed)

    def _lost(self, feed: _Feed, reason: str) -> None:
        if feed in self.feeds:
            if feed.taking is not None and feed.connection is not None:
                feed.taking.lost(feed.connection)
            self.broken = self.broken or reason
            self._look()

    def _received(self, feed: _Feed, message: tuple[Any, ...]) -> None:
        match message:
            case ("offer", copy):
                feed.offered(copy)
                if self.life.site.donors > 1:
                    self._take(feed)
            case ("blocks", copy) if feed.taking is not None and feed.connection is not None:
                feed.taking.came(feed.connection, copy)
            case ("step", step, records, gradients):
                feed.steps[step] = (records, gradients)
                feed.seen.append(step)
            case _:
                feed.seen.append(0)
        self._look()

    def _look(self) -> None:
        """Answer the operation that waits for the feeds, if there is something."""
        life = self.life
        operation = life.operation
        if isinstance(operation, do.OpenFeeds):
            offers = [f.offer.position for f in self.feeds if f.offer is not None and f.whole]
            if len(offers) == len(self.feeds):
                life.done(operation, tuple(offers))
            elif self.broken:
                life.abort(operation, (), self.broken)
        elif isinstance(operation, do.Watch):
            seen = [
                do.Seen(n, s, feed.steps[s][0] if s else {}) for n, feed in enumerate(self.feeds) for s in feed.seen
            ]
            for feed in self.feeds:
                feed.seen.clear()
            if seen:
                life.done(operation, tuple(seen))
            elif self.broken:
                life.abort(operation, (), self.broken)

    def _adopt(self, operation: do.Adopt) -> None:
        self.life.soon(MS // 2, 10 * MS, self._load, operation)

    def _replay(self, operation: do.Replay) -> None:
        life = self.life
        life.site.checks.taint.applies(life.me, operation.step, operation.records)
        life.soon(MS // 2, 3 * MS, self._apply, operation)

    def _load(self, operation: do.Adopt) -> None:
        """Load what was offered, brought to one position by the steps that have come."""
        states: dict[int, Blocks] = {}
        effects: dict[int, int] = {}
        newest: SimCopy | None = None
        for feed, passed in zip(self.feeds, operation.passed, strict=True):
            offer = feed.offer
            if offer is None:
                raise AssertionError(f"{self.life.me} adopts what was not offered")
            copies, effects = dict(feed.states), {**effects, **dict(offer.effects)}
            for outcome in passed:
                _, gradients = feed.steps.pop(outcome.step)
                copies = {k: update(state, outcome.step, gradients[k]) for k, state in copies.items()}
                effects[outcome.step] = self.life.site.checks.exact.effect(outcome.step)
            if offer.position == operation.position:
                newest = offer
            states |= copies
        if newest is None:
            raise AssertionError(f"{self.life.me}: nobody has offered {operation.position}")
        copy = SimCopy(operation.position, newest.records, states, tuple(sorted(effects.items())), newest.gathers)
        self.life.state.install(copy, only=True)
        self.life.done(operation, do.Copied(newest.records, newest.gathers))

    def _apply(self, operation: do.Replay) -> None:
        """Apply the next step of all feeds."""
        gradients: dict[int, SimGradient] = {}
        for feed in self.feeds:
            gradients |= feed.steps.pop(operation.step)[1]
        if self.life.state.at != operation.step - 1:
            raise AssertionError(f"{self.life.me} at {self.life.state.at} is to replay {operation.step}")
        self.life.state.apply(operation.step, operation.records, gradients)
        self.life.done(operation)
