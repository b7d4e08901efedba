"""One worker in the simulation, put together: it carries out the operations of production's driver on an abstract
state.

Each part registers the operations that it carries out.
"""

from __future__ import annotations

from everstep.base.cause import Cause
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.records import StageSection
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import Discard, Holds, Key, Release
from everstep.sim.block_taking import KNOWN as COPIES
from everstep.sim.computing import Reduction, SimLanes, Spreading
from everstep.sim.copying import SimDonor, SimSaver
from everstep.sim.fetching import Fetcher, Follower
from everstep.sim.life import UNINTERRUPTED, Exited, Life, SimSite, nothing
from everstep.sim.mesh import Dial, Mesh, Ties
from everstep.sim.model import SimReduced, digest, evaluates, present
from everstep.sim.promises import freed, require
from everstep.sim.spanning import SpanningPart
from everstep.sim.world import MS, SimConnection

METRIC = "score"
"""Subject of every other gather: the quality of the state."""
_HOLD_NS = 1000 * MS


class Loop:
    """The user's loop: a step, the gathers that belong after it, the next step, and the end.

    It asks on after each answer, and holds its state after it has raised.
    """

    def __init__(self, life: Life, lanes: SimLanes) -> None:
        self.life = life
        self.lanes = lanes
        self.raised = ""
        self.leaves = self._ends = self._fatal = False
        self._step = self._gathers = 0
        self._evaluated = False
        lanes.when_left(self._left)
        life.install(
            {
                do.Arrived: self._stepped,
                do.Stepped: self._stepped,
                do.WentBack: self._stepped,
                do.GatherDone: self._gathered,
                do.Evaluated: self._judged,
                do.Evaluate: lambda operation: life.soon(0, 5 * MS, life.done, operation),
                do.Exit: self._exit,
                do.Released: lambda effect: life.end(Cause.EXCEPTION, self.raised),
                do.EndsJob: self._ends_job,
                do.JobOver: lambda effect: life.end(Cause.EXITED, "the job is over", restart=False),
                do.Skipped: nothing,
            }
        )

    def raises(self, reason: str) -> None:
        """The application raises: where it computes, or as soon as it has the turn."""
        self.raised = self.raised or reason
        if isinstance(self.life.operation, do.Compute):
            self.life.abort(self.life.operation, (), reason)

    def leave(self) -> None:
        """The application leaves its loop: where it computes, or as soon as it has the turn."""
        self.leaves = True
        self.life.site.disk.staying.add(self.life.me)
        if isinstance(self.life.operation, do.Compute):
            self.life.abort(self.life.operation, (), "its loop was left")

    def _left(self) -> None:
        if self.raised:
            self._hold()
        elif (
            self.leaves
            and not self._ends
            and (self.life.operation is not None or self.life.driver.machine.phase is Phase.AGREEING)
        ):
            self.life.later(MS, self._left)  # its present work is left in the middle, and a step that ends, ends first
        elif self.leaves and not self._ends:
            self._ends = True
            self.life.handle(self._next())

    def _ends_job(self, effect: do.EndsJob) -> None:
        self.life.site.checks.exact.ends(self.life.me, self.life.state.at)
        self.raised, self._fatal = effect.reason, True
        self._hold()

    def _hold(self) -> None:
        """Stay for a while: the state that it holds may be needed."""
        life, until_ns = self.life, self.life.world.now_ns + _HOLD_NS
        life.site.disk.staying.add(life.me)
        cause = Cause.NONFINITE if self._fatal else Cause.EXCEPTION
        life.later(_HOLD_NS, life.handle, do.TimePassed())
        life.handle(do.HoldAsked(life.last_words(cause, self.raised, holds=True, fatal=self._fatal), until_ns))

    def _stepped(self, effect: do.Arrived | do.Stepped | do.WentBack) -> None:
        life, at = self.life, self.life.state.at
        life.site.checks.exact.stands(life.me, effect.step, at)
        life.site.checks.answers.stands(life.me, effect.step)
        freed(life.me, f"lanes, at step {at}", [s for s in self.lanes.held if s != at + 1])
        freed(life.me, f"gathers, at step {at}", [k for k in life.driver.gathered if k.step != at])
        life.site.disk.came_at.pop(life.me, None)
        if isinstance(effect, do.Arrived) and effect.step:
            life.site.disk.came_at[life.me] = effect.step
        self._step, self._gathers, self._evaluated, self._ends = effect.step, 0, False, False
        self._go_on()

    def _gathered(self, effect: do.GatherDone) -> None:
        step, number, site = self._step, self._gathers, self.life.site
        if effect.records:
            plan, me = self.life.driver.machine.plan, self.life.me  # whoever was given up may be told otherwise
            members = () if plan is None or me in site.checks.given_up else plan.members
            with_it = [m.key for m in members if m.key in site.lives]
            question = "" if number % 2 else f" {step} {number}"
            there = [key for key in with_it if site.lives[key].alive]
            site.checks.answers.told(me, Key(step, number + 1), effect.records, question, there)
        self._gathers += 1
        self._go_on()

    def _judged(self, effect: do.Evaluated) -> None:
        self._evaluated = True
        self._go_on()

    def _go_on(self) -> None:
        life = self.life
        life.site.phases.forget(life.me)
        pause = life.world.between(0, MS) if life.world.rng.random() < 0.3 else 0
        if self.raised:
            life.later(pause, self._hold)
        else:
            self._ends = self.leaves
            life.later(pause, life.handle, self._next())

    def _next(self) -> do.Ask:
        job, step, gathers = self.life.job, self._step, self._gathers
        if self.leaves:
            self.life.site.checks.exact.left.setdefault(self.life.me, []).append(self.life.state.at)
            return do.EndAsked(True, _said(self.life), step)
        if evaluates(job, step) and not self._evaluated:
            return do.EvaluateAsked()
        if gathers < job.gathers(step):
            if gathers % 2:
                return do.SaveAsked({METRIC: float(step % 5)})
            return do.GatherAsked(f"{self.life.me} {step} {gathers}".encode())
        return do.StepAsked(step + 1) if step < job.last else self._over(step)

    def _over(self, step: int) -> do.Ask:
        return do.EndAsked(step < self.life.job.steps, _said(self.life), step)

    def _exit(self, effect: do.Exit) -> None:
        self.life.end(Cause.EXITED, effect.reason, not (effect.drained or effect.failed), effect.drained)


def _said(life: Life) -> tuple[StageSection, ...]:
    """Digests of the last state for comparison; empty if this worker is alone."""
    plan, stages = life.driver.machine.plan, life.state.stages
    held = () if plan is None or len(plan.members) == 1 else plan.stages_of(life.me.worker_id)
    trained = {k: life.job.trained(stages[k]) for k in held}
    whole = [(k, state) for k, state in trained.items() if None not in state]
    ties = [{"embedding": "last"} if life.job.stages > 1 and k in (0, life.job.stages - 1) else {} for k, _ in whole]
    said = ((k, format(digest(state), "x"), tied) for (k, state), tied in zip(whole, ties, strict=True))
    return tuple(StageSection(k, [], (), b"", [], [], of, tied) for k, of, tied in said)


_EFFECTS: tuple[type, ...] = (*do.AtOnce.__subclasses__(), *do.Answer.__subclasses__(), Release, Discard)
KNOWN = (
    *(("operations", f"{kind.__name__} done") for kind in do.Operation.__subclasses__()),
    *(("effects", kind.__name__) for kind in _EFFECTS),
    *COPIES,
)
"""Effects of a driver, as `World.seen` counts them."""


class SimWorker(Life):
    """One life of one slot with all of its parts, and handlers that concern several of them: generations and
    decisions."""

    def __init__(
        self, site: SimSite, host: str, dial: Dial, driver: Driver, exited: Exited, *, spans: bool = False
    ) -> None:
        """spans: it looks for parts on other hosts first."""
        super().__init__(site, host, driver, exited)
        self.mesh = Mesh(self)
        self.lanes = SimLanes(self, self.mesh)
        self.donor, self.follower = SimDonor(self), Follower(self)
        self.memory = self.donor.memory
        self.reduction = Reduction(self, self.mesh, self.lanes)
        self.spreading = Spreading(self, self.mesh)
        self.ties = Ties(self, dial, self.mesh)
        self.part = SpanningPart(self, dial, self._join)
        self.loop = Loop(self, self.lanes)
        fetcher = Fetcher(self, self.memory, SimSaver(self))
        self._users = (self.ties, self.part, self.mesh, self.donor, self.memory, fetcher, self.follower)
        self.install({do.Open: self._open, do.Cut: self._cut, do.Decided: self._decided, do.EnteredPlan: self._entered})
        self.install({do.Update: self._update, Release: self._release})
        self.world.log(self.name, "STARTED", f"pid {self.pid} on {self.host}")
        self.soon(5 * MS, 40 * MS, self.part.client.begin if spans else self._join)

    def _join(self) -> None:
        self.ties.client.begin()
        self.handle(do.JoinAsked())

    @property
    def can_flip(self) -> bool:
        """Whether it is a member between two updates."""
        return self.driver.machine.settled and not isinstance(self.operation, UNINTERRUPTED)

    @property
    def holdings(self) -> list[tuple[int, int]]:
        """(stage, step) of the whole snapshots in its memory."""
        return sorted(key for key, value in self.memory.kept.items() if None not in value)

    def uses(self, connection: SimConnection) -> bool:
        """Whether the connection may still carry something for this."""
        return any(part.uses(connection) for part in self._users)

    def look(self) -> None:
        """Check whether the remaining members suffice for the present operation."""
        self.mesh.look()

    # ---- generations

    def _open(self, operation: do.Open) -> None:
        self.state.build()
        self.reduction.clear()
        self.spreading.clear()
        self.mesh.open(operation, self._opened)

    def _opened(self, operation: do.Open) -> None:
        """All members have been reached."""
        lost = self.lanes.open(operation.plan, operation.step)
        disk = self.site.disk.newest(self.host, operation.limit) if operation.disk else ()
        state, machine = self.state, self.driver.machine
        self.done(operation, do.Opened(lost, disk, {} if state.at else {k: state.first(k) for k in machine.held}))

    def _cut(self, effect: do.Cut) -> None:
        self.cut(effect.generation)
        self.mesh.leave(effect.generation)

    def _entered(self, effect: do.EnteredPlan) -> None:
        held, generation = self.state.stages if self.state.at == effect.step else {}, effect.plan.generation
        self.donor.began()
        self.site.checks.entered(self.me, generation, effect.step, held)
        for number in (effect.step - 1, effect.step):
            self.site.checks.remembered(self.me, generation, number, self.driver.in_memory(number))
        proven, site = self.driver.proven(effect.step), self.site
        site.checks.proven(self.me, proven, effect.step, site.disk.parts, site.all_wrong)
        freed(self.me, "feeds, as a member", self.follower.feeds)

    # ---- decisions

    def _decided(self, effect: do.Decided) -> None:
        """A decision was taken, with records of this generation's exchange, or with records that were handed over."""
        made, machine = self.finished, self.driver.machine
        own = isinstance(made, do.Exchange) and Key(made.tag.step, made.tag.seq) == effect.key
        if machine.position != effect.key:
            raise AssertionError(f"{self.me} decided {effect.key} and is at {machine.position}")
        if own:
            freed(self.me, "its shelf, beyond a decision", self.donor.shelf)
        generation = made.generation if own and made is not None else effect.generation
        self.site.checks.decision(generation, effect.key, machine.records, not own, self.world.now_ns)

    def _update(self, operation: do.Update) -> None:
        self.site.checks.taint.applies(self.me, operation.step, operation.records)
        samples, lanes, logged = operation.outcome.samples, self.job.lanes, operation.outcome.logged()
        require(logged == {"seen": 2.0}, "P2", f"step {operation.step} logs {logged}")
        require(samples == lanes, "P2", f"step {operation.step} counts {samples} samples of {lanes} lanes")
        gradients = self.state.gradient(operation.step)
        gradients = {k: gradients[k] for k in operation.stages}
        self.donor.feed(operation.step, operation.records, gradients)
        slow = self.world.rng.random() < 0.15  # long enough for plans to come in the middle
        self.soon(MS // 2, 25 * MS if slow else 3 * MS, self._updated, operation, gradients)

    def _updated(self, operation: do.Update, gradients: dict[int, SimReduced]) -> None:
        self.state.apply(operation.outcome, operation.records, gradients, self.state.takes)
        if self.state.takes:
            self.handle(Holds(operation.step, {k: present(state) for k, state in self.state.stages.items()}))
        self._drift()
        self.done(operation, self.world.now_ns)

    def _drift(self) -> None:
        """The script changes the state, here alone."""
        plan, drifts = self.driver.machine.plan, self.site.drifts
        leads = drifts == "leader" and plan is not None and plan.leader(0) == self.me.worker_id
        if leads or (drifts == "healed" and self.me.incarnation):
            self.site.checks.taint.flip()
            for stage in self.state.stages:
                self.state.flip(stage)

    def _release(self, effect: Release) -> None:
        driver = self.driver
        position = driver.machine.position
        undone = driver.machine.sound >= 0 or driver.machine.undone == effect.step + 1
        if undone and effect.step == position.step:  # the decision was not carried out
            position = Key(effect.step + 1, 0)
        elif effect.step in self.site.disk.parts:  # all have written theirs
            position = max(position, Key(effect.step, 1))
        self.state.release(effect.step, position)
        if driver.machine.plan is not None and driver.machine.plan.leader(0) == self.me.worker_id:
            generation, lanes = driver.machine.generation, self.job.lanes
            self.site.tell("step_committed", step=effect.step, generation=generation, samples=lanes, loss=1.0)
            self.ties.client.send(driver.progress(effect.step, 10.0))
