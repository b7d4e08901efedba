"""Moving states between simulated workers: settling members fetch, joiners copy a snapshot and follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everstep.base.plan import Member
from everstep.protocol.step_machine import Phase
from everstep.protocol.step_types import FetchState, Followed, Key, Record, ServeState, StateCopied
from everstep.sim.model import Gradient, update
from everstep.sim.world import MS, Connection, connect

if TYPE_CHECKING:
    from everstep.sim.worker import SimWorker

_CONNECT_NS = 500 * MS


@dataclass(frozen=True)
class Copy:
    """A whole state: everything a worker needs to be at `position`, effects not yet released included."""

    position: Key
    records: Mapping[int, Record]
    state: int
    effects: tuple[tuple[int, int], ...]


class Donor:
    """Gives states away: to settling members once told to, to joiners at a step boundary and then step by step."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.feeds: list[Connection] = []
        self._wanted: list[Connection] = []
        self._fetchers: list[tuple[Connection, int, int]] = []
        self._serving: ServeState | None = None

    def accept(self, connection: Connection) -> None:
        connection.listen(self.worker, lambda m: self._asked(connection, m), lambda: self._gone(connection))

    def _gone(self, connection: Connection) -> None:
        self.feeds = [c for c in self.feeds if c is not connection]
        self._wanted = [c for c in self._wanted if c is not connection]
        self._fetchers = [f for f in self._fetchers if f[0] is not connection]

    def _asked(self, connection: Connection, message: tuple[Any, ...]) -> None:
        if message[0] == "follow":
            self._wanted.append(connection)
            self.worker.later(0, self.boundary)
        else:
            self._fetchers.append((connection, message[1], message[2]))
            self._serve()

    def serve(self, effect: ServeState) -> None:
        """From now on these members may have the state."""
        self._serving = effect
        self._serve()

    def _serve(self) -> None:
        serving = self._serving
        if serving is None:
            return
        for connection, generation, worker_id in self._fetchers[:]:
            if generation == serving.generation == self.worker.machine.generation and worker_id in serving.to:
                self._fetchers.remove((connection, generation, worker_id))
                delay = self.worker.world.between(MS, 15 * MS)
                self.worker.later(delay, self._give, connection, serving)

    def _give(self, connection: Connection, serving: ServeState) -> None:
        """The last block has been read. Nothing may have changed meanwhile, or the copy would be torn."""
        worker = self.worker
        if worker.machine.generation != serving.generation:
            connection.close(worker)
            return
        copy = worker.copy()
        if copy.position.step != serving.position.step:
            raise AssertionError(f"{worker.me} moved to {copy.position} while it served {serving}")
        connection.send(worker, ("state", serving.generation, Copy(serving.position, *worker.serve_parts())))

    def left(self, generation: int) -> None:
        """Who waits for a state of an older generation need not."""
        for connection, wanted, _ in self._fetchers[:]:
            if wanted < generation:
                connection.close(self.worker)
        self._fetchers = [f for f in self._fetchers if f[1] >= generation]

    def boundary(self) -> None:
        """A moment at which the state stands still: start the joiners that asked."""
        if not self._wanted or not self.worker.stands():
            return
        wanted, self._wanted = self._wanted, []
        for connection in wanted:
            connection.send(self.worker, ("snapshot", self.worker.copy()))
            self.feeds.append(connection)

    def feed(self, step: int, records: Mapping[int, Record], gradient: Gradient) -> None:
        """A step was applied here: pass it on."""
        for connection in self.feeds:
            connection.send(self.worker, ("step", step, dict(records), gradient))

    def jumped(self) -> None:
        """The state was copied from elsewhere; the followers have missed something."""
        for connection in self.feeds + self._wanted:
            connection.close(self.worker)
        self.feeds, self._wanted = [], []


class Fetcher:
    """Copies the state of a settling generation from one donor after the other."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self._connection: Connection | None = None

    def fetch(self, effect: FetchState) -> None:
        self._try(effect, list(effect.donors[0]))

    def _wants(self, effect: FetchState) -> bool:
        machine = self.worker.machine
        return machine.phase is Phase.FETCHING and machine.generation == effect.generation

    def _try(self, effect: FetchState, donors: list[int]) -> None:
        worker = self.worker
        plan = worker.machine.plan
        if not self._wants(effect) or plan is None:
            return
        if not donors:
            worker.report_fault(effect.generation, list(effect.donors[0]))
            return
        donor = worker.site.lives.get(plan.member(donors[0]).key)
        connection = connect(worker.world, worker, donor, timeout_ns=_CONNECT_NS)
        if connection is None or donor is None:
            worker.later(worker.world.latency_ns(), self._try, effect, donors[1:])
            return
        self._connection = connection
        donor.donor.accept(connection)
        connection.listen(worker, lambda m: self._received(effect, m), lambda: self._try(effect, donors[1:]))
        connection.send(worker, ("fetch", effect.generation, worker.me.worker_id))

    def _received(self, effect: FetchState, message: tuple[Any, ...]) -> None:
        _, generation, copy = message
        if not self._wants(effect) or generation != effect.generation:
            return
        self.worker.install(copy)
        self.worker.feed(StateCopied(generation, copy.position, copy.records))
        self.stop()

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close(self.worker)
            self._connection = None


class Joiner:
    """Follows the members: a snapshot, then their steps, until the switch makes it a member."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.ticket: int | None = None
        self.healed = False
        self.failed = ""
        self._connection: Connection | None = None

    def begin(self, ticket: int, donors: list[Member]) -> None:
        """A ticket came from the coordinator; it replaces an older one."""
        self.stop()
        if self.worker.machine.plan is not None:
            return
        self.ticket, self.healed, self.failed = ticket, False, ""
        self._try(ticket, donors)

    def _try(self, ticket: int, donors: list[Member]) -> None:
        worker = self.worker
        if self.ticket != ticket:
            return
        if not donors:
            self._fail("no donor could be reached")
            return
        donor = worker.site.lives.get(donors[0].key)
        connection = connect(worker.world, worker, donor, timeout_ns=_CONNECT_NS)
        if connection is None or donor is None:
            worker.later(worker.world.latency_ns(), self._try, ticket, donors[1:])
            return
        self._connection = connection
        donor.donor.accept(connection)
        connection.listen(worker, lambda m: self._received(ticket, m), lambda: self._lost(ticket))
        connection.send(worker, ("follow",))
        worker.phase_changed("heal")

    def _outside(self) -> bool:
        return self.worker.machine.phase in (Phase.WAITING, Phase.LEFT)

    def _lost(self, ticket: int) -> None:
        if self.ticket == ticket and self._outside():
            self._connection = None
            self._fail("the donor went away")

    def _fail(self, reason: str) -> None:
        self.healed, self.failed = False, reason
        self.worker.tell_heal()

    def _received(self, ticket: int, message: tuple[Any, ...]) -> None:
        if self.ticket != ticket or not self._outside():
            return
        worker = self.worker
        if message[0] == "snapshot":
            copy: Copy = message[1]
            worker.install(copy)
            worker.feed(Followed(copy.position, copy.records))
        else:
            _, step, records, gradient = message
            if step <= worker.at:
                return
            if step != worker.at + 1:
                raise AssertionError(f"{worker.me} is at {worker.at} and was fed step {step}")
            worker.replay(step, update(worker.state, step, gradient))
            worker.feed(Followed(Key(step, 0), records))
        if not self.healed and self._outside():
            self.healed = True
            worker.tell_heal()

    def stop(self) -> None:
        """A member now, or on its way to be one through a plan."""
        self.ticket = None
        if self._connection is not None:
            self._connection.close(self.worker)
            self._connection = None
