"""One worker in the simulation, put together: on an abstract state it carries out what the driver of production says.

Who carries out what is said by each part's `handlers`.
"""

from __future__ import annotations

from typing import Any

from everstep.base.cause import Cause
from everstep.base.extents import Extents
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.operations import SaveAsked
from everstep.protocol.step_types import BlocksLost, Discard, Key, Release
from everstep.sim.checks import freed
from everstep.sim.copying import KNOWN as COPIES
from everstep.sim.copying import SimDonor
from everstep.sim.fetching import Fetcher, Follower
from everstep.sim.lanes import Reduction, SimLanes
from everstep.sim.life import UNINTERRUPTED, Exited, Life, SimHandlers, SimSite, nothing
from everstep.sim.mesh import Mesh
from everstep.sim.model import SimJob, evaluates
from everstep.sim.saving import Memory, SimSaver
from everstep.sim.ties import FindServer, Ties
from everstep.sim.world import MS, SimConnection

METRIC = "score"
"""What every other gather is about: how good the state is."""


class SimApplication:
    """What is asked after each answer."""

    def __init__(self, me: WorkerKey, job: SimJob) -> None:
        self.me = me
        self.job = job
        self.step = 0
        self.gathers = 0
        self.evaluated = False

    def next(self, answer: do.Answer | None) -> do.Ask:
        """None: before the first ask."""
        match answer:
            case None:
                return do.JoinAsked()
            case do.Arrived(step) | do.Stepped(step) | do.WentBack(step):
                self.step, self.gathers, self.evaluated = step, 0, False
            case do.GatherDone():
                self.gathers += 1
            case do.Evaluated():
                self.evaluated = True
        if evaluates(self.job, self.step) and not self.evaluated:
            return do.EvaluateAsked()
        if self.gathers < self.job.gathers(self.step):
            if self.gathers % 2:
                return SaveAsked({METRIC: float(self.step % 5)})
            return do.GatherAsked(f"{self.me} {self.step} {self.gathers}".encode())
        return do.StepAsked(self.step + 1) if self.step < self.job.steps else do.EndAsked()


_HOLD_NS = 1000 * MS


class Loop:
    """The application, and what it has raised."""

    def __init__(self, life: Life, lanes: SimLanes) -> None:
        self.life = life
        self.lanes = lanes
        self.app = SimApplication(life.me, life.job)
        self.raised = ""
        lanes.when_left(self._left)

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {
            do.Evaluate: self._evaluate,
            do.Arrived: self._stepped,
            do.Stepped: self._stepped,
            do.WentBack: self._stepped,
            do.GatherDone: self._go_on,
            do.Evaluated: self._go_on,
            do.Exit: self._exit,
            do.Released: self._released,
            do.JobOver: self._over,
            do.Skipped: nothing,
        }

    def begin(self) -> None:
        """The first ask."""
        self.life.handle(self.app.next(None))

    def raises(self, reason: str) -> None:
        """The application raises: where it computes, or as soon as it has the turn."""
        self.raised = self.raised or reason
        if isinstance(self.life.operation, do.Compute):
            self.life.abort(self.life.operation, (), reason)

    def _left(self) -> None:
        if self.raised:
            self._hold()

    def _hold(self) -> None:
        """What it holds may be needed: stay for a while."""
        life = self.life
        words = wire.WorkerFailed(
            worker_id=life.me.worker_id,
            incarnation=life.me.incarnation,
            step=life.driver.position.step,
            cause=Cause.EXCEPTION,
            reason=self.raised,
            signature=self.raised,
            fatal=False,
            generation=life.driver.generation,
            holds=True,
        )
        until_ns = life.world.now_ns + _HOLD_NS
        life.later(_HOLD_NS, life.handle, do.TimePassed())
        life.handle(do.HoldAsked(words, until_ns))

    def _evaluate(self, operation: do.Evaluate) -> None:
        self.life.later(self.life.world.between(0, 5 * MS), self.life.done, operation)

    def _stepped(self, effect: do.Stepped) -> None:
        life, checks, at = self.life, self.life.site.checks, self.life.state.at
        checks.exact.stands(life.me, effect.step, at)
        freed(life.me, f"lanes, at step {at}", [s for s in self.lanes.held if s != at + 1])
        freed(life.me, f"gathers, at step {at}", [k for k in life.driver.gathered if k.step != at])
        self._go_on(effect)

    def _go_on(self, effect: do.Answer) -> None:
        life = self.life
        life.site.phases.forget(life.me)
        pause = life.world.between(0, MS) if life.world.rng.random() < 0.3 else 0
        if self.raised:
            life.later(pause, self._hold)
        else:
            life.later(pause, life.handle, self.app.next(effect))

    def _exit(self, effect: do.Exit) -> None:
        self.life.end(Cause.EXITED, effect.reason, not (effect.drained or effect.failed), effect.drained)

    def _over(self, effect: do.JobOver) -> None:
        self.life.end(Cause.EXITED, "the job is over", restart=False)

    def _released(self, effect: do.Released) -> None:
        self.life.end(Cause.EXCEPTION, self.raised)


class SimMembership:
    """What concerns several parts."""

    def __init__(self, life: Life, mesh: Mesh, lanes: SimLanes, reduction: Reduction) -> None:
        self.life = life
        self.mesh = mesh
        self.lanes = lanes
        self.reduction = reduction

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {do.Open: self._open}

    def _open(self, operation: do.Open) -> None:
        self.life.state.build()
        self.reduction.clear()
        self.mesh.open(operation, self._opened)

    def _opened(self, operation: do.Open) -> None:
        """All members have been reached."""
        if self.life.operation is operation:
            lost = self.lanes.open(operation.plan, operation.step)
            disk = self.life.site.disk.newest(self.life.host, operation.limit) if operation.disk else ()
            self.life.done(operation, do.Opened(lost, disk))


class Decisions:
    """What is decided, and what leaves the worker for it."""

    def __init__(self, life: Life, ties: Ties, mesh: Mesh, donor: SimDonor, follower: Follower) -> None:
        self.life = life
        self.ties = ties
        self.mesh = mesh
        self.donor = donor
        self.follower = follower

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {
            do.Cut: self._cut,
            do.Decided: self._decided,
            do.EnteredPlan: self._entered,
            do.Update: self._update,
            Release: self._release,
        }

    def _cut(self, effect: do.Cut) -> None:
        self.life.cut(effect.generation)
        self.mesh.leave(effect.generation)
        self.donor.cut(effect.generation)

    def _decided(self, effect: do.Decided) -> None:
        """With records of this generation's exchange, or with some that were handed over."""
        life, made = self.life, self.life.finished
        own = isinstance(made, do.Exchange) and Key(made.tag.step, made.tag.seq) == effect.key
        machine = life.driver.machine
        if machine.position != effect.key:
            raise AssertionError(f"{life.me} decided {effect.key} and is at {machine.position}")
        freed(life.me, "its shelf, beyond a decision", self.donor.shelf)
        generation = made.generation if own and made is not None else effect.generation
        life.site.checks.decision(generation, effect.key, machine.records, not own)

    def _entered(self, effect: do.EnteredPlan) -> None:
        life = self.life
        held = life.state.stages if life.state.at == effect.step else {}
        life.site.checks.entered(life.me, effect.plan.generation, effect.step, held)
        freed(life.me, "feeds, as a member", self.follower.feeds)

    def _update(self, operation: do.Update) -> None:
        life = self.life
        life.site.checks.taint.applies(life.me, operation.step, operation.records)
        gradients = life.state.gradient(operation.step)
        gradients = {k: gradients[k] for k in operation.stages}
        self.donor.feed(operation.step, operation.records, gradients)
        slow = life.world.rng.random() < 0.15  # long enough for plans to come in the middle
        took = life.world.between(MS // 2, 25 * MS if slow else 3 * MS)
        life.later(took, self._updated, operation, gradients)

    def _updated(self, operation: do.Update, gradients: dict[int, Any]) -> None:
        self.life.state.apply(operation.step, operation.records, gradients)
        self.life.done(operation, self.life.world.now_ns)

    def _release(self, effect: Release) -> None:
        driver = self.life.driver
        position, machine = driver.position, driver.machine
        if machine.sound >= 0 and effect.step == position.step:  # the decision that shows it was not carried out
            position = Key(effect.step + 1, 0)
        self.life.state.release(effect.step, position)
        if driver.plan is not None and driver.plan.leader(0) == self.life.me.worker_id:
            self.ties.tell(driver.progress(effect.step, 10.0))


_EFFECTS: tuple[type, ...] = (*do.AtOnce.__subclasses__(), *do.Answer.__subclasses__(), Release, Discard)
KNOWN = (
    *(("operations", f"{kind.__name__} done") for kind in do.Operation.__subclasses__()),
    *(("effects", kind.__name__) for kind in _EFFECTS),
    *COPIES,
)
"""What a driver may say, as `World.seen` counts it."""


class SimWorker:
    """One life of one slot, and what it needs of the world."""

    def __init__(self, site: SimSite, host: str, server: FindServer, driver: Driver, exited: Exited) -> None:
        life = self.life = Life(site, host, driver, exited)
        mesh = Mesh(life)
        lanes, memory = SimLanes(life, mesh), Memory(life, mesh)
        donor, fetcher, follower = SimDonor(life, memory), Fetcher(life, memory), Follower(life)
        reduction = Reduction(life, mesh, lanes)
        self.ties = Ties(life, server, mesh)
        self.loop = Loop(life, lanes)
        both = SimMembership(life, mesh, lanes, reduction), Decisions(life, self.ties, mesh, donor, follower)
        parts = (mesh, lanes, memory, donor, fetcher, follower, reduction, SimSaver(life), self.ties, self.loop, *both)
        for part in parts:
            life.install(part.handlers())
        self._memory, self._donor = memory, donor
        self._users = (self.ties, mesh, donor, fetcher, follower)
        life.world.log(life.name, "STARTED", f"pid {life.pid} on {life.host}")
        life.later(life.world.between(5 * MS, 40 * MS), self.ties.connect, self.loop.begin)

    @property
    def can_flip(self) -> bool:
        """Whether it is a member between two updates."""
        return self.life.driver.machine.settled and not isinstance(self.life.operation, UNINTERRUPTED)

    @property
    def holdings(self) -> list[tuple[int, int]]:
        """(stage, step) of the whole snapshots in its memory."""
        return sorted(key for key, value in self._memory.kept.items() if None not in value)

    def lose(self, stage: int, lost: Extents) -> None:
        """Blocks of a stage's state are gone, and it has noticed."""
        life = self.life
        life.state.lose(stage, lost)
        self._donor.lose(stage, lost)
        life.handle(BlocksLost(stage, lost))

    def lose_kept(self, stage: int, step: int, lost: Extents) -> None:
        """Blocks of a snapshot are gone, and it has noticed."""
        self._memory.lose(stage, step, lost)

    def uses(self, connection: SimConnection) -> bool:
        """Whether something may still be sent or expected here."""
        return any(part.uses(connection) for part in self._users)
