"""Moving states between simulated workers: settling members fetch or go back, joiners copy a snapshot and follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep.base.plan import Member
from everstep.protocol import messages as wire
from everstep.protocol.step_machine import Phase
from everstep.protocol.step_types import Followed, Key, Record, ServeState, StateCopied
from everstep.sim.model import Gradient, initial, update
from everstep.sim.world import MS, Connection, connect

if TYPE_CHECKING:
    from everstep.sim.worker import SimWorker

_CONNECT_NS = 500 * MS


@dataclass(frozen=True)
class Copy:
    """State of some stages: everything a worker needs to be at `position`, effects not yet released included."""

    position: Key
    records: Mapping[int, Record]
    states: dict[int, int]
    effects: tuple[tuple[int, int], ...]


class Donor:
    """Gives states away: to settling members once told to, to joiners at a step boundary and then step by step."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.feeds: list[tuple[Connection, int]] = []  # with the stage
        self._wanted: list[tuple[Connection, int]] = []
        self._fetchers: list[tuple[Connection, int, int, int]] = []  # generation, worker id, stage
        self._serving: ServeState | None = None

    def accept(self, connection: Connection) -> None:
        connection.listen(self.worker, lambda m: self._asked(connection, m), lambda: self._gone(connection))

    def _gone(self, connection: Connection) -> None:
        self.feeds = [f for f in self.feeds if f[0] is not connection]
        self._wanted = [w for w in self._wanted if w[0] is not connection]
        self._fetchers = [f for f in self._fetchers if f[0] is not connection]

    def _asked(self, connection: Connection, message: tuple[Any, ...]) -> None:
        if message[0] == "follow":
            self._wanted.append((connection, message[1]))
            self.worker.later(0, self.boundary)
        else:
            self._fetchers.append((connection, *message[1:]))
            self._serve()

    def serve(self, effect: ServeState) -> None:
        """From now on these members may have the state."""
        self._serving = effect
        self._serve()

    def _serve(self) -> None:
        serving = self._serving
        if serving is None:
            return
        for connection, generation, worker_id, stage in self._fetchers[:]:
            if generation == serving.generation == self.worker.machine.generation and worker_id in serving.to:
                self._fetchers.remove((connection, generation, worker_id, stage))
                delay = self.worker.world.between(MS, 15 * MS)
                self.worker.later(delay, self._give, connection, serving, stage)

    def _give(self, connection: Connection, serving: ServeState, stage: int) -> None:
        """The last block has been read. Nothing may have changed meanwhile, or the copy would be torn."""
        worker = self.worker
        if worker.machine.generation != serving.generation:
            connection.close(worker)
            return
        if worker.at == serving.position.step and stage in worker.states:
            copy = worker.copy(stage)
        elif (stage, serving.position.step) in worker.keeper.kept:
            state, records = worker.keeper.kept[stage, serving.position.step]
            copy = Copy(serving.position, records, {stage: state}, ())
        else:
            raise AssertionError(f"{worker.me} moved to {worker.machine.position} while it served {serving}")
        connection.send(worker, ("state", serving.generation, stage, copy))

    def left(self, generation: int) -> None:
        """Who waits for a state of an older generation need not."""
        for connection, wanted, _, _ in self._fetchers[:]:
            if wanted < generation:
                connection.close(self.worker)
        self._fetchers = [f for f in self._fetchers if f[1] >= generation]

    def boundary(self) -> None:
        """A moment at which the state stands still: start the joiners that asked."""
        if not self._wanted or not self.worker.stands():
            return
        wanted, self._wanted = self._wanted, []
        for connection, stage in wanted:
            if stage not in self.worker.states:
                connection.close(self.worker)
                continue
            connection.send(self.worker, ("snapshot", self.worker.copy(stage)))
            self.feeds.append((connection, stage))

    def feed(self, step: int, records: Mapping[int, Record], gradients: Mapping[int, Gradient]) -> None:
        """A step was applied here: pass it on."""
        for connection, stage in self.feeds:
            if stage in gradients:
                connection.send(self.worker, ("step", step, dict(records), gradients[stage]))
            else:
                connection.close(self.worker)
        self.feeds = [f for f in self.feeds if f[1] in gradients]

    def jumped(self) -> None:
        """The state was copied from elsewhere; the followers have missed something."""
        for connection, _ in self.feeds + self._wanted:
            connection.close(self.worker)
        self.feeds, self._wanted = [], []


class Fetcher:
    """Gets the state of a settling generation, stage by stage: own copies, one peer after the other, disk, or anew."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self._connection: Connection | None = None
        self._got: dict[int, Copy] = {}
        self._left: list[tuple[int, tuple[int, ...]]] = []

    def fetch(self, generation: int, position: Key, sources: Mapping[int, tuple[int, ...]]) -> None:
        """Get these stages; then report that they have been copied."""
        self._got, self._left = {}, sorted(sources.items())
        self._next(generation, position)

    def _wants(self, generation: int) -> bool:
        machine = self.worker.machine
        return machine.phase is Phase.FETCHING and machine.generation == generation

    def _next(self, generation: int, position: Key) -> None:
        if not self._wants(generation):
            return
        worker = self.worker
        if not self._left:
            records = next((c.records for c in self._got.values() if c.records), {})
            states = {k: state for c in self._got.values() for k, state in c.states.items()}
            effects = tuple(sorted({effect for c in self._got.values() for effect in c.effects}))
            worker.install(Copy(position, records, states, effects))
            worker.feed(StateCopied(generation, position, records))
            return
        stage, donors = self._left.pop(0)
        step = position.step
        if donors and donors[0] == worker.me.worker_id:
            if worker.at == step and stage in worker.states:
                self._have(generation, position, stage, worker.copy(stage))
            else:
                state, records = worker.keeper.kept[stage, step]
                self._have(generation, position, stage, Copy(position, records, {stage: state}, ()))
        elif not donors:
            state = worker.site.disk.parts[step][stage] if step else initial(stage)
            copy = Copy(position, {}, {stage: state}, ())
            worker.later(worker.world.between(MS, 20 * MS), self._have, generation, position, stage, copy)
        else:
            self._try(generation, position, stage, donors, list(donors))

    def _have(self, generation: int, position: Key, stage: int, copy: Copy) -> None:
        if self._wants(generation):
            self._got[stage] = copy
            self._next(generation, position)

    def _try(self, generation: int, position: Key, stage: int, all_donors: tuple[int, ...], donors: list[int]) -> None:
        worker = self.worker
        plan = worker.machine.plan
        if not self._wants(generation) or plan is None:
            return
        if not donors:
            worker.report_fault(generation, list(all_donors))
            return
        donor = worker.site.lives.get(plan.member(donors[0]).key)
        connection = connect(worker.world, worker, donor, timeout_ns=_CONNECT_NS)
        again = (generation, position, stage, all_donors, donors[1:])
        if connection is None or donor is None:
            worker.later(worker.world.latency_ns(), self._try, *again)
            return
        self._connection = connection
        donor.donor.accept(connection)
        connection.listen(worker, lambda m: self._received(position, m), lambda: self._try(*again))
        connection.send(worker, ("fetch", generation, worker.me.worker_id, stage))

    def _received(self, position: Key, message: tuple[Any, ...]) -> None:
        _, generation, stage, copy = message
        if not self._wants(generation) or stage in self._got:
            return
        self.stop()
        self._have(generation, position, stage, copy)

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close(self.worker)
            self._connection = None


@dataclass
class _Feed:
    """One stage of a joiner: its state at a step, and the steps that have come since."""

    connection: Connection | None = None
    copy: Copy | None = None
    steps: deque[tuple[int, Mapping[int, Record], Gradient]] = field(default_factory=deque)


class Joiner:
    """Follows the members, one feed per stage: a snapshot, then their steps, until the switch makes it a member."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.ticket: int | None = None
        self.healed = False
        self.failed = ""
        self._feeds: dict[int, _Feed] = {}
        self._levelled = False

    def begin(self, heal: wire.Heal) -> None:
        """A ticket came from the coordinator; it replaces an older one."""
        self.stop()
        if self.worker.machine.plan is not None:
            return
        self.ticket, self.healed, self.failed = heal.ticket, False, ""
        self._feeds, self._levelled = {stage: _Feed() for stage in heal.stages}, False
        members = {m.worker_id: m for m in heal.donors}
        for n, stage in enumerate(heal.stages):
            donors = [members[i] for i in heal.holders[n] if i in members] if heal.holders else heal.donors
            self._try(heal.ticket, stage, donors)

    def _try(self, ticket: int, stage: int, donors: list[Member]) -> None:
        worker = self.worker
        if self.ticket != ticket or self.failed:
            return
        if not donors:
            self._fail("no donor could be reached")
            return
        donor = worker.site.lives.get(donors[0].key)
        connection = connect(worker.world, worker, donor, timeout_ns=_CONNECT_NS)
        if connection is None or donor is None:
            worker.later(worker.world.latency_ns(), self._try, ticket, stage, donors[1:])
            return
        self._feeds[stage].connection = connection
        donor.donor.accept(connection)
        connection.listen(worker, lambda m: self._received(ticket, stage, m), lambda: self._lost(ticket))
        connection.send(worker, ("follow", stage))
        worker.phase_changed("heal")

    def _outside(self) -> bool:
        return self.worker.machine.phase in (Phase.WAITING, Phase.LEFT)

    def _lost(self, ticket: int) -> None:
        if self.ticket == ticket and self._outside() and not self.failed:
            self._fail("the donor went away")

    def _fail(self, reason: str) -> None:
        self.healed, self.failed = False, reason
        self._hang_up()
        self.worker.tell_heal()

    def _received(self, ticket: int, stage: int, message: tuple[Any, ...]) -> None:
        if self.ticket != ticket or not self._outside() or self.failed:
            return
        feed = self._feeds[stage]
        if message[0] == "snapshot":
            feed.copy = message[1]
        else:
            feed.steps.append(message[1:])
        copies = [f.copy for f in self._feeds.values() if f.copy is not None]
        if len(copies) < len(self._feeds):
            return
        self._levelled = self._levelled or self._level(max(c.position for c in copies))
        if self._levelled:
            self._advance()
            if not self.healed and self._outside():
                self.healed = True
                self.worker.tell_heal()

    def _level(self, newest: Key) -> bool:
        """Bring all stages to the newest of the snapshots. Returns whether they are there."""
        for stage, feed in self._feeds.items():
            while feed.copy is not None and feed.copy.position.step < newest.step:
                if not feed.steps:
                    return False
                step, records, gradient = feed.steps.popleft()
                state = update(feed.copy.states[stage], step, gradient)
                effect = ((step, self.worker.site.checks.effect(step)),)
                feed.copy = Copy(Key(step, 0), records, {stage: state}, effect)
        worker = self.worker
        copies = [f.copy for f in self._feeds.values() if f.copy is not None]
        best = max(copies, key=lambda c: c.position)
        states = {k: state for c in copies for k, state in c.states.items()}
        worker.states = {}
        worker.install(Copy(best.position, best.records, states, best.effects))
        worker.feed(Followed(best.position, best.records, tuple(sorted(self._feeds))))
        return True

    def _advance(self) -> None:
        """All stages forward together, as far as every feed has come."""
        worker, stages = self.worker, tuple(sorted(self._feeds))
        while self._outside() and self._feeds and all(f.steps for f in self._feeds.values()):
            items = {stage: feed.steps.popleft() for stage, feed in self._feeds.items()}
            step, records, _ = items[stages[0]]
            if {item[0] for item in items.values()} != {worker.at + 1}:
                raise AssertionError(f"{worker.me} is at {worker.at} and was fed {items}")
            worker.replay(step, {k: update(worker.states[k], step, item[2]) for k, item in items.items()})
            worker.records = records
            worker.feed(Followed(Key(step, 0), records, stages))

    def _hang_up(self) -> None:
        for feed in self._feeds.values():
            if feed.connection is not None:
                feed.connection.close(self.worker)
        self._feeds = {}

    def stop(self) -> None:
        """A member now, or on its way to be one through a plan."""
        self.ticket = None
        self._hang_up()
