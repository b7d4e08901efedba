"""Moving states between simulated workers: the shelf for members that settle, feeds for joiners, and who takes them.

The donor's half is what its handler threads do: they read a shelf, and never ask the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.base.plan import Member
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Key, Record
from everstep.sim.keep import Memory
from everstep.sim.life import Handlers, Life
from everstep.sim.model import Gradient, flipped, initial, update
from everstep.sim.state import Copy
from everstep.sim.world import MS, Connection, connect

CONNECT_NS = 500 * MS


class Donor:
    """Gives states away: to settling members from the shelf, to joiners at a step boundary and then step by step."""

    def __init__(self, life: Life, memory: Memory) -> None:
        self.life = life
        self.memory = memory
        self.shelf: tuple[int, dict[int, Copy]] | None = None  # of a generation, by stage
        self.feeds: list[tuple[Connection, tuple[int, ...]]] = []  # with the stages
        self.wanted: list[tuple[Connection, tuple[int, ...]]] = []
        self.fetchers: list[tuple[Connection, int, int]] = []  # generation, stage
        life.install_door("donor", self._accept)

    def handlers(self) -> Handlers:
        """What it carries out."""
        return {
            do.Shelve: self._shelve,
            do.Unshelve: self._unshelve,
            do.OfferFeeds: self._offer,
            do.CutFeeds: self._jumped,
        }

    def uses(self, connection: Connection) -> bool:
        """Whether something may still be sent or expected here."""
        return any(connection is one[0] for one in [*self.feeds, *self.wanted, *self.fetchers])

    def _accept(self, connection: Connection) -> None:
        connection.listen(self.life, lambda m: self._asked(connection, m), lambda: self._gone(connection))

    def _gone(self, connection: Connection) -> None:
        self.feeds = [f for f in self.feeds if f[0] is not connection]
        self.wanted = [w for w in self.wanted if w[0] is not connection]
        self.fetchers = [f for f in self.fetchers if f[0] is not connection]

    def _asked(self, connection: Connection, message: tuple[Any, ...]) -> None:
        if message[0] == "follow":
            self.wanted.append((connection, message[1]))
            self.life.handle(do.FollowerAsked())
        else:
            self.fetchers.append((connection, *message[1:]))
            self._serve()

    # ---- the shelf

    def _shelve(self, effect: do.Shelve) -> None:
        """Members of this generation may have what is held at the position, live or kept."""
        state, kept = self.life.state, self.memory.kept
        step = effect.position.step
        copies = {
            stage: Copy(effect.position, effect.records, {stage: value})
            for (stage, at), value in kept.items()
            if at == step
        }
        if effect.live:
            for stage in effect.stages:
                copies[stage] = state.copy(effect.position, effect.records, effect.gathers, (stage,))
        self.shelf = (effect.generation, copies)
        self._serve()

    def _unshelve(self, effect: do.Unshelve) -> None:
        """Nobody asks for it any more."""
        self.shelf = None

    def _serve(self) -> None:
        if self.shelf is None:
            return
        for one in self.fetchers[:]:
            if one[1] == self.shelf[0]:
                self.fetchers.remove(one)
                self.life.later(self.life.world.between(MS, 15 * MS), self._give, self.shelf, *one)

    def _give(self, shelf: tuple[int, dict[int, Copy]], connection: Connection, generation: int, stage: int) -> None:
        """The last block has been read. Nothing may have changed meanwhile, or the copy would be torn."""
        life, copy = self.life, shelf[1].get(stage)
        if self.shelf is not shelf or copy is None:
            if connection.open and life.driver.generation == generation and life.cut_to < generation:
                raise AssertionError(f"{life.me} at {life.driver.position} served {shelf}, and does no more")
            connection.close(life)
            return
        live = copy.effects or not copy.position.step
        now = life.state.stages.get(stage, 0)
        if live and (life.state.at, flipped(now)) != (copy.position.step, flipped(copy.states[stage])):
            raise AssertionError(f"{life.me} moved to {life.driver.position} while it served {shelf}")
        connection.send(life, ("state", copy))

    def cut(self, generation: int) -> None:
        """Who waits for a state of this generation, or an older one, need not."""
        for connection, wanted, _ in self.fetchers[:]:
            if wanted <= generation:
                connection.close(self.life)
        self.fetchers = [f for f in self.fetchers if f[1] > generation]

    # ---- feeds

    def _offer(self, effect: do.OfferFeeds) -> None:
        """The state stands still: start the joiners that asked."""
        wanted, self.wanted = self.wanted, []
        for connection, stages in wanted:
            if not set(stages) <= set(effect.stages):
                connection.close(self.life)
                continue
            copy = self.life.state.copy(effect.position, effect.records, effect.gathers, stages)
            connection.send(self.life, ("offer", copy))
            self.feeds.append((connection, stages))
            self._caught_up(connection)

    def feed(self, step: int, records: Mapping[int, Record], gradients: Mapping[int, Gradient]) -> None:
        """A step is decided: pass it on."""
        for connection, stages in self.feeds:
            if set(stages) <= set(gradients):
                connection.send(self.life, ("step", step, records, {k: gradients[k] for k in stages}))
                self._caught_up(connection)
            else:
                connection.close(self.life)
        self.feeds = [f for f in self.feeds if set(f[1]) <= set(gradients)]

    def _caught_up(self, connection: Connection) -> None:
        life = self.life
        life.later(life.world.between(0, 2 * MS), connection.send, life, ("caught_up",))

    def _jumped(self, effect: do.CutFeeds) -> None:
        """The followers have missed something."""
        for connection, _ in self.feeds:
            connection.close(self.life)
        self.feeds = []


class Fetcher:
    """Gets the state of a settling generation, stage by stage: own copies, one peer after the other, disk, or anew."""

    def __init__(self, life: Life, memory: Memory) -> None:
        self.life = life
        self.memory = memory
        self.connection: Connection | None = None
        self._got: dict[int, Copy] = {}
        self._left: list[tuple[int, tuple[int, ...]]] = []
        for kind in (do.Fetch, do.Restore):
            life.install_leaving(kind, self._leave)

    def handlers(self) -> Handlers:
        """What it carries out."""
        return {do.Fetch: self._fetch, do.Restore: self._restore}

    def uses(self, connection: Connection) -> bool:
        """Whether something may still be sent or expected here."""
        return connection is self.connection

    def _restore(self, operation: do.Restore) -> None:
        self.life.site.went_back.append(operation.step)
        self._fetch(operation)

    def _leave(self, operation: do.Operation, accused: tuple[int, ...], reason: str) -> None:
        self._stop()
        self.life.aborted(operation, accused, reason)

    def _damaged(self, operation: do.Restore, reason: str) -> None:
        if self.life.operation is operation:
            self._stop()
            self.life.tainted(operation, reason)

    def _fetch(self, operation: do.Fetch | do.Restore) -> None:
        """Get these stages, then take them on, all or nothing."""
        self._got, self._left = {}, sorted(operation.sources.items())
        self._next(operation)

    def _stop(self) -> None:
        """Whatever is on its way is not wanted."""
        if self.connection is not None:
            self.connection.close(self.life)
            self.connection = None

    def _next(self, operation: do.Fetch | do.Restore) -> None:
        life = self.life
        if not self._left:
            life.later(life.world.between(0, MS), self._install, operation)
            return
        stage, donors = self._left.pop(0)
        if isinstance(operation, do.Restore) and (not donors or donors[0] == life.me.worker_id):
            self._own(operation, stage, bool(donors))
        else:
            self._try(operation, stage, list(donors))

    def _own(self, operation: do.Restore, stage: int, memory: bool) -> None:
        """From this worker's memory, from disk, or anew."""
        life, step = self.life, operation.step
        if memory and stage in operation.stands:
            copy = life.state.copy(Key(step, 0), operation.own, {}, (stage,))
        elif memory:
            copy = Copy(Key(step, 0), operation.own, {stage: self.memory.kept[stage, step]})
        else:
            found = life.site.disk.read(stage, step) if step else initial(stage)
            if found is None:
                life.later(life.world.between(0, 5 * MS), self._damaged, operation, f"checkpoint {step} is damaged")
                return
            effects = ((step, life.site.checks.exact.effect(step)),) if step else ()  # perhaps nobody has told them
            copy = Copy(Key(step, 0), {}, {stage: found}, effects)
        life.later(
            life.world.between(0, MS) if memory else life.world.between(MS, 20 * MS),
            self._have,
            operation,
            stage,
            copy,
        )

    def _have(self, operation: do.Fetch | do.Restore, stage: int, copy: Copy) -> None:
        if self.life.operation is operation:
            self._got[stage] = copy
            self._next(operation)

    def _try(self, operation: do.Fetch | do.Restore, stage: int, donors: list[int]) -> None:
        life = self.life
        if life.operation is not operation:
            return
        if not donors:
            life.abort(operation, tuple(operation.sources[stage]), "the state could not be copied")
            return
        donor = life.site.lives.get(operation.plan.member(donors[0]).key)
        connection = connect(life.world, life, donor, timeout_ns=CONNECT_NS)
        again = (operation, stage, donors[1:])
        if connection is None or donor is None:
            life.later(life.world.latency_ns(), self._try, *again)
            return
        self.connection = connection
        donor.accept("donor", connection)
        connection.listen(life, lambda m: self._received(operation, stage, m[1]), lambda: self._try(*again))
        connection.send(life, ("fetch", operation.generation, stage))

    def _received(self, operation: do.Fetch | do.Restore, stage: int, copy: Copy) -> None:
        if self.life.operation is operation and stage not in self._got:
            self._stop()
            self._have(operation, stage, copy)

    def _install(self, operation: do.Fetch | do.Restore) -> None:
        life = self.life
        if life.operation is not operation:
            return
        position = Key(operation.step, 0) if isinstance(operation, do.Restore) else operation.position
        wrong = [c.position for c in self._got.values() if c.position != position]
        if wrong:
            raise AssertionError(f"{life.me} wants the state at {position} and got {wrong}")
        copies = [self._got[k] for k in sorted(self._got)]
        records = next((c.records for c in copies if c.records), {})
        gathers = next((c.gathers for c in copies if c.gathers), {})
        states = {k: state for c in copies for k, state in c.states.items()}
        effects = tuple(sorted({effect for c in copies for effect in c.effects}))
        life.state.install(Copy(position, records, states, effects, gathers))
        life.done(operation, do.Copied(records, gathers))


@dataclass(eq=False)
class _Feed:
    """One donor of a joiner: what it has offered, and the steps that have come since."""

    stages: tuple[int, ...]
    donors: list[Member]
    connection: Connection | None = None
    offer: Copy | None = None
    steps: dict[int, tuple[Mapping[int, Record], Mapping[int, Gradient]]] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)  # 0: caught up

    def connect(self, connection: Connection) -> None:
        """A donor has been reached."""
        self.connection = connection

    def offered(self, copy: Copy) -> None:
        """What the donor starts from."""
        self.offer = copy


class Follower:
    """A joiner's feeds, and what they bring."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.feeds: list[_Feed] = []
        self.broken = ""

    def handlers(self) -> Handlers:
        """What it carries out."""
        return {
            do.OpenFeeds: self._open,
            do.Watch: lambda operation: self._look(),
            do.Adopt: self._adopt,
            do.Replay: self._replay,
            do.CloseFeeds: lambda effect: self._stop(),
        }

    def uses(self, connection: Connection) -> bool:
        """Whether something may still be sent or expected here."""
        return any(connection is feed.connection for feed in self.feeds)

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
        self.feeds, self.broken = [], ""

    def _try(self, feed: _Feed) -> None:
        life = self.life
        if feed not in self.feeds:
            return
        if not feed.donors:
            self._lost(feed, "no donor could be reached")
            return
        donor = life.site.lives.get(feed.donors.pop(0).key)
        connection = connect(life.world, life, donor, timeout_ns=CONNECT_NS)
        if connection is None or donor is None:
            life.later(life.world.latency_ns(), self._try, feed)
            return
        feed.connect(connection)
        donor.accept("donor", connection)
        connection.listen(life, lambda m: self._received(feed, m), lambda: self._lost(feed, "the donor went away"))
        connection.send(life, ("follow", feed.stages))

    def _lost(self, feed: _Feed, reason: str) -> None:
        if feed in self.feeds:
            self.broken = self.broken or reason
            self._look()

    def _received(self, feed: _Feed, message: tuple[Any, ...]) -> None:
        match message:
            case ("offer", copy):
                feed.offered(copy)
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
            offers = [f.offer.position for f in self.feeds if f.offer is not None]
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
        life = self.life
        life.later(life.world.between(MS // 2, 10 * MS), self._load, operation)

    def _replay(self, operation: do.Replay) -> None:
        life = self.life
        life.site.checks.taint.applies(life.me, operation.step, operation.records)
        life.later(life.world.between(MS // 2, 3 * MS), self._apply, operation)

    def _load(self, operation: do.Adopt) -> None:
        """Load what was offered, brought to one position by the steps that have come."""
        states: dict[int, int] = {}
        effects: dict[int, int] = {}
        newest: Copy | None = None
        for feed, passed in zip(self.feeds, operation.passed, strict=True):
            offer = feed.offer
            if offer is None:
                raise AssertionError(f"{self.life.me} adopts what was not offered")
            copies, effects = dict(offer.states), {**effects, **dict(offer.effects)}
            for outcome in passed:
                _, gradients = feed.steps.pop(outcome.step)
                copies = {k: update(state, outcome.step, gradients[k]) for k, state in copies.items()}
                effects[outcome.step] = self.life.site.checks.exact.effect(outcome.step)
            if offer.position == operation.position:
                newest = offer
            states |= copies
        if newest is None:
            raise AssertionError(f"{self.life.me}: nobody has offered {operation.position}")
        copy = Copy(operation.position, newest.records, states, tuple(sorted(effects.items())), newest.gathers)
        self.life.state.install(copy, only=True)
        self.life.done(operation, do.Copied(newest.records, newest.gathers))

    def _apply(self, operation: do.Replay) -> None:
        """Apply the next step of all feeds."""
        gradients: dict[int, Gradient] = {}
        for feed in self.feeds:
            gradients |= feed.steps.pop(operation.step)[1]
        if self.life.state.at != operation.step - 1:
            raise AssertionError(f"{self.life.me} at {self.life.state.at} is to replay {operation.step}")
        self.life.state.apply(operation.step, operation.records, gradients)
        self.life.done(operation)
