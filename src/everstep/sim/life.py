"""One life of a slot: its process, the driver of production, and who carries out what that says.

Nothing is decided here, and nothing is carried out: each part says by its `handlers` what it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.sim.checks import Checks
from everstep.sim.disk import Disk
from everstep.sim.model import SimJob
from everstep.sim.phases import Phases
from everstep.sim.state import SimState
from everstep.sim.world import MS, Process, SimConnection, World

SimHandlers = Mapping[type, Callable[[Any], None]]
Exited = Callable[[WorkerKey, Cause, str, bool, bool], None]
UNINTERRUPTED = do.Update | do.Adopt | do.Replay


def nothing(effect: object) -> None:
    """What has no counterpart on an abstract state."""


class SimSite:
    """What the workers of a simulation share."""

    def __init__(self, world: World, checks: Checks, disk: Disk, donors: int = 1) -> None:
        """donors: how many are asked for a state at once."""
        self.donors = donors
        self.world = world
        self.checks = checks
        self.disk = disk
        self.lives: dict[WorkerKey, Life] = {}
        self.phases = Phases()
        self.went_back: list[int] = []  # to which steps

    def copies(self, life: Life, stage: int) -> int:
        """How many members of a worker's generation hold a stage."""
        plan = life.driver.plan
        pool = [] if plan is None else [self.lives.get(plan.member(seat.worker_id).key) for seat in plan.pool(stage)]
        return sum(w is not None and w.alive and stage in w.state.stages for w in pool)


class Life(Process):
    """Gives the driver what happens, and to the parts what it says.

    `exited`: what its agent does at the end: who, cause, reason, whether to restart, whether it left in order.
    """

    def __init__(self, site: SimSite, host: str, driver: Driver, exited: Exited) -> None:
        self.me = driver.me
        super().__init__(site.world, f"worker-{self.me}", host)
        self.site = site
        self.driver = driver
        self.slowness = site.world.rng.choice((1, 1, 1, 2, 4))
        self.state = SimState(self.me, self.job, site.checks)
        self.operation: do.Operation | None = None
        self.finished: do.Operation | None = None  # the exchange whose end the driver is being told of
        self.cut_to = -1  # operations of this generation and older ones are over
        self._exited = exited
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._doors: dict[str, Callable[..., None]] = {}
        self._leave: dict[type, Callable[[Any, tuple[int, ...], str], None]] = {}
        self._look: Callable[[], None] | None = None
        self._events: deque[object] = deque()
        self._handling = False

    @property
    def job(self) -> SimJob:
        """What is trained."""
        return self.site.checks.job

    @property
    def pid(self) -> int:
        return 1000 + 100 * self.me.worker_id + self.me.incarnation

    # ---- parts

    def install(self, handlers: SimHandlers) -> None:
        """Who carries out what."""
        self._handlers.update(handlers)

    def install_leaving(self, kind: type[do.Operation], leave: Callable[[Any, tuple[int, ...], str], None]) -> None:
        """Who ends operations of a kind that are to be aborted; by default it is done at once."""
        self._leave[kind] = leave

    def install_look(self, look: Callable[[], None]) -> None:
        """Who looks, when an operation has begun, whether it can end at all."""
        self._look = look

    def install_door(self, name: str, accept: Callable[..., None]) -> None:
        """Who takes connections of peers that ask for this."""
        self._doors[name] = accept

    def accept(self, door: str, connection: SimConnection, *args: Any) -> None:
        """A peer has connected."""
        self._doors[door](connection, *args)

    # ---- the driver

    def handle(self, event: object) -> None:
        """Give the driver an event; what it says is carried out in order, before anything else is handed in."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events and self.alive:
            taken = self._events.popleft()
            effects = self.driver.handle(self.world.now_ns, taken)
            if self.world.tracing:
                self.world.log(self.name, f"[{self.driver.machine.phase}]", taken, "=>", effects)
            for effect in effects:
                if self.alive:
                    self._perform(effect)
            if isinstance(taken, do.Done):
                self.finished = None
        self._handling = False

    def done(self, operation: do.Operation, result: object = None) -> None:
        """The operation was carried out, unless it has been answered."""
        if self.operation is operation:
            self._answered(operation, "done")
            if isinstance(operation, do.Exchange):
                self.finished = operation
            self.handle(do.Done(operation.op, result))

    def cut(self, generation: int) -> None:
        """The transfers of this generation and older ones are over."""
        self.cut_to = max(self.cut_to, generation)

    def abort(self, operation: do.Operation, accused: tuple[int, ...] = (), reason: str = "interrupted") -> None:
        """End the operation, unless it has been answered."""
        if self.operation is operation and not isinstance(operation, UNINTERRUPTED):
            self._leave.get(type(operation), self.aborted)(operation, accused, reason)

    def aborted(self, operation: do.Operation, accused: tuple[int, ...], reason: str) -> None:
        """The operation was left."""
        self._answered(operation, "aborted")
        self.handle(do.Aborted(operation.op, accused, Why(Cause.LINK, reason)))

    def tainted(self, operation: do.Operation, reason: str, torn: bool | None = None) -> None:
        """The operation came upon something that must not be used, now and then when it had loaded a part of it."""
        self._answered(operation, "tainted")
        torn = self.world.rng.random() < 0.3 if torn is None else torn
        self.handle(do.Tainted(operation.op, Why(Cause.CORRUPT, reason), torn))

    def _answered(self, operation: do.Operation, how: str) -> None:
        self.operation = None
        self.world.seen["operations", f"{type(operation).__name__} {how}"] += 1

    def _perform(self, effect: do.Effect) -> None:
        if isinstance(effect, do.Operation):
            self._begin(effect)
        else:
            self.world.seen["effects", type(effect).__name__] += 1
            self._handlers[type(effect)](effect)

    def _begin(self, operation: do.Operation) -> None:
        self.operation = operation
        self.site.phases.note(self.me, operation)
        if 0 < operation.generation <= self.cut_to and not isinstance(operation, UNINTERRUPTED):
            self.later(self.world.between(0, MS // 4), self.abort, operation)
        else:
            self._handlers[type(operation)](operation)
            if self._look is not None:
                self._look()

    # ---- the end

    def die(self, reason: str) -> None:
        """End by SIGKILL."""
        self.end(Cause.KILLED, reason)

    def end(self, cause: Cause, reason: str, restart: bool = True, in_order: bool = False) -> None:
        """The process ends, and its agent sees it."""
        if self.alive:
            super().die(reason)
            self._exited(self.me, cause, reason, restart, in_order)
