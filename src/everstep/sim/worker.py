"""One worker's process in the simulation: carries out what the very driver of production says, on an abstract state.

Nothing is decided here. What arrives is treated as in production: a message of the coordinator is asked at once whether
it interrupts the operation under way, and handed in; the driver takes it in when it may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import Member, WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver, interrupts
from everstep.protocol.driver.saves import AbandonSave, Save, SaveEnded
from everstep.protocol.step_types import Key
from everstep.sim.application import Application
from everstep.sim.control import ControlClient
from everstep.sim.copying import Donor, Fetcher, Follower
from everstep.sim.keep import Memory
from everstep.sim.lanes import Lanes
from everstep.sim.mesh import Mesh
from everstep.sim.model import Job
from everstep.sim.state import State
from everstep.sim.world import MS, Connection, Process, World

if TYPE_CHECKING:
    from everstep.sim.control import AgentProcess, Site

MakeDriver = Callable[[WorkerKey], Driver]
_HOLD_NS = 1000 * MS
_NOTHING = (Key(0, 0), 0)
_UNINTERRUPTED = do.Update | do.Adopt | do.Replay
_PHASES: dict[type[do.Operation], str] = {
    do.Open: "settling",
    do.Fetch: "fetching",
    do.Restore: "fetching",
    do.OpenFeeds: "heal",
    do.Compute: "computing",
    do.Reduce: "reducing",
    do.Update: "updating",
}
_GRACE_NS = 500 * MS


class SimWorker(Process):
    """One life of one slot: a driver, an application, and what they need of the world."""

    def __init__(self, world: World, site: Site, agent: AgentProcess, job: Job, driver: Driver) -> None:
        self.me = driver.me
        super().__init__(world, f"worker-{self.me}", agent.host)
        self.site = site
        self.agent = agent
        self.job = job
        self.driver = driver
        self.pid = 1000 + 100 * self.me.worker_id + self.me.incarnation
        self.slowness = world.rng.choice((1, 1, 1, 2, 4))
        self.app = Application(self.me, job)
        self.state = State(self.me, job, site.checks)
        self.mesh, self.lanes, self.memory = Mesh(self), Lanes(self), Memory(self)
        self.donor, self.fetcher, self.follower = Donor(self), Fetcher(self), Follower(self)
        self.operation: do.Operation | None = None
        self.cut_to = -1  # operations of this generation and older ones are over
        self.raised = ""  # by the application
        self._phase = ""
        self._exchanged = _NOTHING  # key and generation of the exchange that has just been completed
        self._events: deque[object] = deque()
        self._handling = False
        self.client: ControlClient | None = None
        world.log(self.name, "STARTED", f"pid {self.pid} on {self.host}")
        self.later(world.between(5 * MS, 40 * MS), self._connect)

    @property
    def can_flip(self) -> bool:
        """Whether it is a member between two updates."""
        return self.driver.machine.settled and not isinstance(self.operation, _UNINTERRUPTED)

    # ---- ties to the coordinator and the agent

    def _connect(self) -> None:
        self.client = ControlClient(self, self.site, "worker", self._hello, self.deliver)
        self.handle(self.app.next(None))

    def _hello(self) -> list[wire.AnyMessage]:
        """Everything that the coordinator may have missed, anew."""
        standing = self.driver.standing
        member = Member(self.me.worker_id, self.me.incarnation, self.host, self.pid, self.name)
        size = self.job.state_bytes
        hello = wire.WorkerHello(member=member, step=standing.step, plan=standing.plan, state_bytes=size)
        return [hello, *standing.messages]

    def tell(self, message: wire.AnyMessage) -> None:
        if self.client is not None:
            self.client.send(message)

    def pulse(self) -> wire.WorkerPulse:
        """What the agent reads of it from shared memory."""
        still = 0 if self.frozen_ns is None else (self.world.now_ns - self.frozen_ns) // MS
        return wire.WorkerPulse(
            worker_id=self.me.worker_id,
            incarnation=self.me.incarnation,
            step=self.driver.machine.step,
            phase=str(self.driver.machine.phase),
            still_ms=still,
            samples_per_s=100.0 / self.slowness,
            compute_ms_per_lane=2.0 * self.slowness,
        )

    def deliver(self, message: wire.AnyMessage) -> None:
        """A message of the coordinator."""
        if isinstance(message, wire.PlanNow | wire.PlanPrepared):
            self.site.checks.plan(message.plan)
        self.world.seen["messages", type(message).__name__] += 1
        newest = interrupts(message)
        if newest is not None:
            self._interrupt(newest)
        self.handle(do.Heard(message, self.world.now_ns))
        if isinstance(self.operation, do.Watch):
            self.later(self.world.between(0, MS), self.done, self.operation, ())

    def _interrupt(self, generation: int) -> None:
        """The transfers of this generation and older ones are over."""
        self.cut_to = max(self.cut_to, generation)
        if self.world.rng.random() < 0.5:
            self.mesh.leave(generation)
        operation = self.operation
        if operation is not None and operation.generation <= generation:
            self.later(self.world.between(0, 2 * MS), self.abort, operation)

    # ---- the end of this life

    def fail(self, reason: str, cause: Cause = Cause.EXCEPTION, sound: int = -1) -> None:
        """End by an exception, with last words."""
        self.tell(
            wire.WorkerFailed(
                worker_id=self.me.worker_id,
                incarnation=self.me.incarnation,
                cause=cause,
                step=self.driver.machine.step,
                reason=reason,
                signature=reason,
                fatal=False,
                generation=self.driver.generation,
                sound=sound,
            )
        )
        self._ending(cause, reason, restart=True)

    def uses(self, connection: Connection) -> bool:
        """Whether something may still be sent or expected here."""
        if self.client is not None and self.client.connection is connection:
            return True
        mesh, donor = self.mesh, self.donor
        if connection in mesh.out.values() or any(connection is c for _, c in mesh.incoming):
            return True
        if any(connection is one[0] for one in [*donor.feeds, *donor.wanted, *donor.fetchers]):
            return True
        return connection is self.fetcher.connection or any(connection is f.connection for f in self.follower.feeds)

    def die(self, reason: str) -> None:
        """End by SIGKILL."""
        self._ending(Cause.KILLED, reason, restart=True)

    def _ending(self, cause: Cause, reason: str, restart: bool, in_order: bool = False) -> None:
        if self.alive:
            super().die(reason)
            self.agent.later(
                self.world.between(MS // 2, 4 * MS), self.agent.exited, self, cause, reason, restart, in_order
            )

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
                self._exchanged = _NOTHING
        self._handling = False

    def done(self, operation: do.Operation, result: object = None) -> None:
        """The operation was carried out, unless it has been answered."""
        if self.operation is operation:
            self._answered(operation, "done")
            if isinstance(operation, do.Exchange):
                self._exchanged = (Key(operation.tag.step, operation.tag.seq), operation.generation)
            self.handle(do.Done(operation.op, result))

    def abort(self, operation: do.Operation, accused: tuple[int, ...] = (), reason: str = "interrupted") -> None:
        """End the operation, unless it has been answered."""
        if self.operation is not operation or isinstance(operation, _UNINTERRUPTED):
            return
        if isinstance(operation, do.Compute):
            self.lanes.leave(operation, accused, reason)
        else:
            self.aborted(operation, accused, reason)

    def aborted(self, operation: do.Operation, accused: tuple[int, ...], reason: str) -> None:
        """The operation was left."""
        self._answered(operation, "aborted")
        self.fetcher.stop()
        self.handle(do.Aborted(operation.op, accused, Why(Cause.LINK, reason)))
        if self.raised and isinstance(operation, do.Compute):
            self._hold()

    def tainted(self, operation: do.Operation, reason: str) -> None:
        """The operation came upon something that must not be used, now and then when it had loaded a part of it."""
        if self.operation is operation:
            self._answered(operation, "tainted")
            self.fetcher.stop()
            self.handle(do.Tainted(operation.op, Why(Cause.CORRUPT, reason), self.world.rng.random() < 0.3))

    def _answered(self, operation: do.Operation, how: str) -> None:
        self.operation = None
        self.world.seen["operations", f"{type(operation).__name__} {how}"] += 1

    def raises(self, reason: str) -> None:
        """The application raises: where it computes, or as soon as it has the turn."""
        self.raised = self.raised or reason
        if isinstance(self.operation, do.Compute):
            self.abort(self.operation, (), reason)

    def _hold(self) -> None:
        """What it holds may be needed: stay for a while."""
        words = wire.WorkerFailed(
            worker_id=self.me.worker_id,
            incarnation=self.me.incarnation,
            step=self.driver.position.step,
            cause=Cause.EXCEPTION,
            reason=self.raised,
            signature=self.raised,
            fatal=False,
            generation=self.driver.generation,
            holds=True,
        )
        until_ns = self.world.now_ns + _HOLD_NS
        self.later(_HOLD_NS, self.handle, do.Tick())
        self.handle(do.HoldAsked(words, until_ns))

    def _perform(self, effect: do.Effect) -> None:
        if isinstance(effect, do.Operation):
            self._begin(effect)
        else:
            self.world.seen["effects", type(effect).__name__] += 1
            _PERFORM[type(effect)](self, effect)

    def _begin(self, operation: do.Operation) -> None:
        self.operation = operation
        self._note_phase(operation)
        if 0 < operation.generation <= self.cut_to and not isinstance(operation, _UNINTERRUPTED):
            self.later(self.world.between(0, MS // 4), self.abort, operation)
        else:
            _BEGIN[type(operation)](self, operation)
            self.mesh.look()

    def _note_phase(self, operation: do.Operation) -> None:
        phase = _PHASES.get(type(operation), "")
        if isinstance(operation, do.Exchange):
            phase = "settling" if operation.tag.kind == "settle" else "gathering" if operation.tag.seq else "agreeing"
        if phase and (phase != self._phase or phase == "gathering"):
            for hook in self.site.phase_hooks[:]:
                hook(self, phase)
        self._phase = phase

    # ---- operations

    def _open(self, operation: do.Open) -> None:
        self.state.build()
        self.mesh.open(operation)

    def opened(self, operation: do.Open) -> None:
        """All members have been reached."""
        if self.operation is operation:
            lost = self.lanes.open(operation.plan, operation.step)
            disk = self.site.disk.newest(self.host, operation.limit) if operation.disk else ()
            self.done(operation, do.Opened(lost, disk))

    def _exchange(self, operation: do.Exchange) -> None:
        if operation.tag.kind == "settle":
            self.site.checks.stated(operation.generation, self.me.worker_id, operation.payload)
        self.mesh.exchange(operation)

    def _update(self, operation: do.Update) -> None:
        self.site.checks.applies(self.me, operation.step, operation.records)
        gradients = self.state.gradient(operation.step)
        gradients = {k: gradients[k] for k in operation.stages}
        self.donor.feed(operation.step, operation.records, gradients)
        slow = self.world.rng.random() < 0.15  # long enough for plans to come in the middle
        took = self.world.between(MS // 2, 25 * MS if slow else 3 * MS)
        self.later(took, self._updated, operation, gradients)

    def _updated(self, operation: do.Update, gradients: dict[int, Any]) -> None:
        self.state.apply(operation.step, operation.records, gradients)
        self.done(operation, self.world.now_ns)

    def _restore(self, operation: do.Restore) -> None:
        self.site.went_back.append(operation.step)
        self.fetcher.fetch(operation)

    def _adopt(self, operation: do.Adopt) -> None:
        self.later(self.world.between(MS // 2, 10 * MS), self.follower.adopt, operation)

    def _replay(self, operation: do.Replay) -> None:
        self.site.checks.applies(self.me, operation.step, operation.records)
        self.later(self.world.between(MS // 2, 3 * MS), self.follower.replay, operation)

    def _evaluate(self, operation: do.Evaluate) -> None:
        self.later(self.world.between(0, 5 * MS), self.done, operation)

    def _save_last(self, operation: do.SaveLast) -> None:
        """The main waits until all parts are there, for as long as it may."""
        if operation.save is not None:
            self._save(operation.save)
        if operation.plan.leader(0) == self.me.worker_id:
            self.later(_GRACE_NS, self.done, operation, "")
            self._saved(operation)
        else:
            self.later(self.world.between(MS, 60 * MS), self.done, operation, "")

    def _saved(self, operation: do.SaveLast) -> None:
        if self.operation is not operation:
            return
        if len(self.site.disk.parts.get(operation.step, ())) < self.job.stages:
            self.later(5 * MS, self._saved, operation)
            return
        self.site.checks.saved(operation.step, self.site.disk.parts[operation.step])
        self.done(operation, "disk")

    def _linger(self, operation: do.Linger) -> None:
        self.later(self.world.between(10 * MS, 2000 * MS), self.done, operation)

    def _finish(self, operation: do.Finish) -> None:
        if operation.save is not None and self.job.write_every:
            self._save(operation.save)
        self.later(self.world.between(0, 3 * MS), self._finished, operation)

    def _finished(self, operation: do.Finish) -> None:
        if self.operation is operation:
            leads = operation.plan.leader(0) == self.me.worker_id
            if leads:
                self.site.checks.final(self.me, self.state.at, self.state.stages)
            self.done(operation, leads)

    def digest(self, step: int, stage: int) -> str:
        """Of the state before the step, if a comparison is due."""
        every = self.driver.config.verify_every
        return format(self.state.stages[stage], "x") if every and step % every == 0 else ""

    # ---- effects

    def _cut(self, effect: do.Cut) -> None:
        self.cut_to = max(self.cut_to, effect.generation)
        self.mesh.leave(effect.generation)
        self.donor.cut(effect.generation)

    def _tell(self, effect: do.Tell) -> None:
        if isinstance(effect.message, wire.PeerFault):
            self.world.log(self.name, "accuses", effect.message.accused)
        self.tell(effect.message)

    def _decided(self, effect: do.Decided) -> None:
        """With records of this generation's exchange, or with some that were handed over."""
        key, made_in = self._exchanged
        handed = key != effect.key
        machine = self.driver.machine
        if machine.position != effect.key:
            raise AssertionError(f"{self.me} decided {effect.key} and is at {machine.position}")
        self.site.checks.freed(self.me, "its shelf, beyond a decision", self.donor.shelf)
        generation = effect.generation if handed else made_in
        self.site.checks.decision(generation, effect.key, machine.records, handed)

    def _release(self, effect: step.Release) -> None:
        position, machine = self.driver.position, self.driver.machine
        if machine.sound >= 0 and effect.step == position.step:  # the decision that shows it was not carried out
            position = Key(effect.step + 1, 0)
        self.state.release(effect.step, position)
        plan = self.driver.plan
        if plan is None:
            return
        if plan.leader(0) == self.me.worker_id:
            self.tell(self.driver.progress(effect.step, 10.0))

    def _discard(self, effect: step.Discard) -> None:
        self.lanes.discard(effect.step)

    def _entered(self, effect: do.EnteredPlan) -> None:
        held = self.state.stages if self.state.at == effect.step else {}
        self.site.checks.entered(self.me, effect.plan.generation, effect.step, held)
        self.site.checks.freed(self.me, "feeds, as a member", self.follower.feeds)

    def _save(self, effect: Save) -> None:
        """Each stage's leader writes its part; the main hears when the last one is there."""
        me, disk, number = self.me.worker_id, self.site.disk, effect.step
        if effect.plan.leader(0) == me:
            disk.ask(number, lambda: self.later(0, self.handle, SaveEnded(number, True, "", "disk")))
        for stage in effect.plan.stages_of(me):
            if effect.plan.leader(stage) == me:
                took = self.world.between(MS, 60 * MS)
                self.later(took, self._written, effect.plan.generation, stage, number, self.state.stages[stage])

    def _written(self, generation: int, stage: int, number: int, state: int) -> None:
        """What is not complete when its generation ends, or when it is condemned, is abandoned."""
        sound = self.driver.machine.sound
        if self.driver.generation == generation and (sound < 0 or number <= sound):
            self.site.disk.write(stage, number, state)

    def _condemn(self, effect: do.Condemn) -> None:
        self.site.checks.condemned(self.me, effect.sound)
        self.site.disk.condemn(effect.sound)

    def _stepped(self, effect: do.Stepped) -> None:
        checks, at = self.site.checks, self.state.at
        checks.stands(self.me, effect.step, at)
        checks.freed(self.me, f"lanes, at step {at}", [s for s in self.lanes.held if s != at + 1])
        checks.freed(self.me, f"gathers, at step {at}", [k for k in self.driver.gathered if k.step != at])
        self._go_on(effect)

    def _go_on(self, effect: do.Answer) -> None:
        self._phase = ""
        pause = self.world.between(0, MS) if self.world.rng.random() < 0.3 else 0
        if self.raised:
            self.later(pause, self._hold)
        else:
            self.later(pause, self.handle, self.app.next(effect))

    def _exit(self, effect: do.Exit) -> None:
        restart = not (effect.drained or effect.failed)
        self._ending(Cause.EXITED, effect.reason, restart, in_order=effect.drained)

    def _released(self, effect: do.Released) -> None:
        self._ending(Cause.EXCEPTION, self.raised, restart=True)

    def _over(self, effect: do.JobOver) -> None:
        self._ending(Cause.EXITED, "the job is over", restart=False)

    def _outvoted(self, effect: do.Outvoted) -> None:
        self.fail(effect.reason, Cause.CORRUPT, effect.sound)


_BEGIN: dict[type[do.Operation], Callable[[SimWorker, Any], None]] = {
    do.Open: SimWorker._open,
    do.Exchange: SimWorker._exchange,
    do.Compute: lambda worker, operation: worker.lanes.compute(operation),
    do.Reduce: lambda worker, operation: worker.mesh.reduce(operation),
    do.Update: SimWorker._update,
    do.Fetch: lambda worker, operation: worker.fetcher.fetch(operation),
    do.Restore: SimWorker._restore,
    do.OpenFeeds: lambda worker, operation: worker.follower.open(operation),
    do.Watch: lambda worker, operation: worker.follower.look(),
    do.Adopt: SimWorker._adopt,
    do.Replay: SimWorker._replay,
    do.Evaluate: SimWorker._evaluate,
    do.SaveLast: SimWorker._save_last,
    do.Linger: SimWorker._linger,
    do.Finish: SimWorker._finish,
}
_PERFORM: dict[type, Callable[[SimWorker, Any], None]] = {
    do.Cut: SimWorker._cut,
    do.Tell: SimWorker._tell,
    do.Decided: SimWorker._decided,
    step.Release: SimWorker._release,
    step.Discard: SimWorker._discard,
    do.Shelve: lambda worker, effect: worker.donor.shelve(effect),
    do.Unshelve: lambda worker, effect: worker.donor.unshelve(),
    do.OfferFeeds: lambda worker, effect: worker.donor.offer(effect),
    do.CutFeeds: lambda worker, effect: worker.donor.jumped(),
    do.CloseFeeds: lambda worker, effect: worker.follower.stop(),
    do.EnteredPlan: SimWorker._entered,
    do.RememberLoop: lambda worker, effect: None,
    do.Condemn: SimWorker._condemn,
    Save: SimWorker._save,
    AbandonSave: lambda worker, effect: None,
    do.DropLanes: lambda worker, effect: None,
    do.Keep: lambda worker, effect: worker.memory.keep(effect),
    do.RetireKept: lambda worker, effect: worker.memory.retire(effect),
    do.ForgetKept: lambda worker, effect: worker.memory.forget(effect),
    do.Skipped: lambda worker, effect: None,
    do.Arrived: SimWorker._stepped,
    do.Stepped: SimWorker._stepped,
    do.WentBack: SimWorker._stepped,
    do.GatherDone: SimWorker._go_on,
    do.Evaluated: SimWorker._go_on,
    do.Exit: SimWorker._exit,
    do.Released: SimWorker._released,
    do.JobOver: SimWorker._over,
    do.Outvoted: SimWorker._outvoted,
}
KNOWN = (
    *(("operations", f"{kind.__name__} done") for kind in _BEGIN),
    *(("effects", kind.__name__) for kind in _PERFORM),
)
"""What a driver may say, as `World.seen` counts it."""
