"""One worker's process in the simulation: drives the very step machine of production, with an abstract state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from everstep.base.cause import Cause
from everstep.base.plan import Member, Plan, WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.step_machine import Phase, StepMachine
from everstep.protocol.step_types import (
    Compute,
    Discard,
    Entered,
    FetchState,
    GatherAsked,
    Gathered,
    GoBack,
    HoldingArrived,
    Key,
    Leave,
    LeftPlan,
    Open,
    PlanArrived,
    PreparedArrived,
    Record,
    Reduce,
    Release,
    SendHolding,
    SendRecord,
    ServeState,
    StateCopied,
    StepAsked,
    StepEffect,
    StepEvent,
    Update,
    Updated,
)
from everstep.sim.checks import Vote
from everstep.sim.control import ControlClient
from everstep.sim.heal import Copy, Donor, Fetcher, Joiner
from everstep.sim.keep import Keeper
from everstep.sim.lanes import Lanes
from everstep.sim.mesh import Mesh
from everstep.sim.model import Gradient, Job, initial, update
from everstep.sim.world import MS, Process, World

if TYPE_CHECKING:
    from everstep.sim.control import AgentProcess, Site

MakeMachine = Callable[[WorkerKey], StepMachine]
_DECIDED = (Update, Gathered, Release, Discard)


class SimWorker(Process):
    """One life of one slot: driver, application, lanes, and its ties to coordinator and peers."""

    def __init__(
        self, world: World, site: Site, key: WorkerKey, agent: AgentProcess, job: Job, machine: StepMachine
    ) -> None:
        super().__init__(world, f"worker-{key}", agent.host)
        self.site = site
        self.me = key
        self.agent = agent
        self.job = job
        self.machine = machine
        self.pid = 1000 + 100 * key.worker_id + key.incarnation
        self.at = 0
        self.states = {stage: initial(stage) for stage in range(job.stages)}
        self.gradient: tuple[int, dict[int, Gradient]] | None = None
        self.effects_held: dict[int, int] = {}
        self.records: Mapping[int, Record] = {}
        self.slowness = world.rng.choice((1, 1, 1, 2, 4))
        self.mesh, self.donor, self.fetcher, self.joiner = Mesh(self), Donor(self), Fetcher(self), Joiner(self)
        self.lanes, self.keeper = Lanes(self), Keeper(self)
        self.faults: dict[int, list[int]] = {}
        self._queue: deque[StepEffect] = deque()
        self._performing = False
        self._updating = False
        self._asked = False
        self._phase = ""
        self._settling = False
        self.done = False
        self.client: ControlClient | None = None
        world.log(self.name, "STARTED", f"pid {self.pid} on {self.host}")
        self.later(world.between(5 * MS, 40 * MS), self._connect)

    # ---- ties to the coordinator and the agent

    def _connect(self) -> None:
        self.client = ControlClient(self, self.site, "worker", self._hello, self.deliver)

    def _hello(self) -> list[wire.AnyMessage]:
        """Everything that the coordinator may have missed, anew."""
        member = Member(self.me.worker_id, self.me.incarnation, self.host, self.pid, self.name)
        said: list[wire.AnyMessage] = [wire.WorkerHello(member=member, step=self.machine.step, plan=self.machine.plan)]
        if self.machine.settled:
            said.append(self._entered_message())
        for generation, accused in sorted(self.faults.items()):
            said.append(self._fault_message(generation, accused))
        if self.joiner.ticket is not None and (self.joiner.healed or self.joiner.failed):
            said.append(self._heal_message())
        if self.done:
            said.append(self._done_message())
        return said

    def tell(self, message: wire.AnyMessage) -> None:
        if self.client is not None:
            self.client.send(message)

    def _entered_message(self) -> wire.AnyMessage:
        return wire.GenerationEntered(
            worker_id=self.me.worker_id,
            incarnation=self.me.incarnation,
            generation=self.machine.generation,
            step=self.machine.step,
            phases_ms={},
        )

    def _fault_message(self, generation: int, accused: list[int]) -> wire.AnyMessage:
        return wire.PeerFault(
            worker_id=self.me.worker_id,
            incarnation=self.me.incarnation,
            generation=generation,
            accused=sorted(accused),
            cause=Cause.LINK,
            reason="a transfer failed",
        )

    def _heal_message(self) -> wire.AnyMessage:
        ticket = self.joiner.ticket or 0
        who = {"worker_id": self.me.worker_id, "incarnation": self.me.incarnation, "ticket": ticket}
        if self.joiner.failed:
            return wire.HealFailed(**who, cause=Cause.LINK, reason=self.joiner.failed)
        return wire.WorkerHealed(**who, step=self.at)

    def _done_message(self) -> wire.AnyMessage:
        plan = self.machine.plan
        leads = plan is not None and plan.leader(0) == self.me.worker_id
        return wire.WorkerDone(
            worker_id=self.me.worker_id,
            incarnation=self.me.incarnation,
            generation=self.machine.generation,
            step=self.at,
            final_written=leads,
        )

    def report_fault(self, generation: int, accused: list[int]) -> None:
        """Transfers with these members failed."""
        self.world.log(self.name, "accuses", accused, f"in generation {generation}")
        self.faults.setdefault(generation, []).extend(accused)
        self.tell(self._fault_message(generation, accused))

    def tell_heal(self) -> None:
        self.tell(self._heal_message())

    def pulse(self) -> wire.WorkerPulse:
        """What the agent reads of it from shared memory."""
        still = 0 if self.frozen_ns is None else (self.world.now_ns - self.frozen_ns) // MS
        return wire.WorkerPulse(
            worker_id=self.me.worker_id,
            incarnation=self.me.incarnation,
            step=self.machine.step,
            phase=str(self.machine.phase),
            still_ms=still,
            samples_per_s=100.0 / self.slowness,
            compute_ms_per_lane=2.0 * self.slowness,
        )

    def deliver(self, message: wire.AnyMessage) -> None:
        """A message of the coordinator."""
        self.keeper.say()
        match message:
            case wire.PlanNow(plan=plan):
                self.site.checks.plan(plan)
                self.feed(PlanArrived(plan))
            case wire.PlanPrepared(plan=plan):
                self.site.checks.plan(plan)
                self.feed(PreparedArrived(plan))
            case wire.Heal():
                self.joiner.begin(message)
            case wire.Dismissed(reason=reason, drained=drained):
                self.exit(f"dismissed: {reason}", restart=not drained)
            case wire.JobEnded(state=state):
                self.exit(f"job {state}", restart=False)

    def exit(self, reason: str, restart: bool) -> None:
        """End by oneself."""
        self._ending(Cause.EXITED, reason, restart)

    def fail(self, reason: str) -> None:
        """End by an exception, with last words."""
        self.tell(
            wire.WorkerFailed(
                worker_id=self.me.worker_id,
                incarnation=self.me.incarnation,
                step=self.machine.step,
                cause=Cause.EXCEPTION,
                reason=reason,
                signature=reason,
                fatal=False,
            )
        )
        self._ending(Cause.EXCEPTION, reason, restart=True)

    def die(self, reason: str) -> None:
        """End by SIGKILL."""
        self._ending(Cause.KILLED, reason, restart=True)

    def _ending(self, cause: Cause, reason: str, restart: bool) -> None:
        if not self.alive:
            return
        super().die(reason)
        self.agent.later(self.world.between(MS // 2, 4 * MS), self.agent.exited, self, cause, reason, restart)

    # ---- the machine

    def feed(self, event: StepEvent) -> None:
        """One event for the step machine; its effects queue up behind those not yet carried out."""
        self._settling = isinstance(event, HoldingArrived | StateCopied | Updated)
        effects = self.machine.handle(self.world.now_ns, event)
        if self.world.tracing:
            self.world.log(self.name, f"[{self.machine.phase}]", event, "=>", effects)
        if any(isinstance(e, Leave | Open) for e in effects):
            self._queue = deque(e for e in self._queue if isinstance(e, _DECIDED))
            self.lanes.stop()
        self._queue.extend(effects)
        if not self._performing and not self._updating:
            self._perform()

    def _perform(self) -> None:
        self._performing = True
        while self._queue and self.alive and not self._updating:
            self._act(self._queue.popleft())
        self._performing = False
        if self.alive and not self._updating:
            self._pump()

    def _pump(self) -> None:
        """The turn is the application's."""
        if not self.alive:
            return
        self._note_phase()
        self.mesh.look()
        self.donor.boundary()
        phase = self.machine.phase
        early = phase is Phase.SETTLING and self.world.rng.random() < 0.3
        if self._asked or not (phase is Phase.IDLE or early):
            return
        position = self.machine.position
        if position.seq < self.job.gathers(position.step):
            self._asked = True
            self.feed(GatherAsked(b""))
        elif position.step < self.job.steps:
            self._asked = True
            self.feed(StepAsked())
        elif not early and not self.done:
            self._finish()

    def _finish(self) -> None:
        self.done = True
        plan = self.machine.plan
        if plan is not None and plan.leader(0) == self.me.worker_id:
            self.site.checks.final(self.me, self.at, self.states)
        self.tell(self._done_message())

    def _note_phase(self) -> None:
        phase = str(self.machine.phase)
        if phase != self._phase:
            self._phase = phase
            self.phase_changed(phase)

    def phase_changed(self, phase: str) -> None:
        """Faults may be aimed at it."""
        for hook in self.site.phase_hooks[:]:
            hook(self, phase)

    # ---- effects

    def _act(self, effect: StepEffect) -> None:
        match effect:
            case Leave():
                self.mesh.leave()
                self.fetcher.stop()
                self.donor.left(self.machine.generation)
            case Open(plan=plan):
                self.joiner.stop()
                self.done = False
                if self.at == 0:  # what nobody has trained can be built
                    self.states = {k: self.states.get(k, initial(k)) for k in range(self.job.stages)}
                self.lanes.stop()
                self.mesh.open(plan)
            case SendHolding(holding=holding):
                self.site.checks.holding(self.machine.generation, self.me.worker_id, holding)
                self.mesh.send_holding(holding)
            case Compute(step=step, lanes=lanes):
                self.lanes.compute(self.plan(), step, lanes)
            case Reduce(step=step):
                self._reduce(step)
            case SendRecord(key=key, record=record):
                self._send_record(key, record)
            case Update(step=step, records=records):
                self._begin_update(step, records)
            case Gathered(key=key, records=records):
                self.site.checks.decision(self.machine.generation, key, records, self._settling)
                self.records, self._asked = records, False
            case Release(step=step):
                self._release(step)
            case Discard(step=step):
                self.lanes.discard(step)
            case ServeState():
                self.donor.serve(effect)
            case FetchState(generation=generation, position=position, donors=donors):
                self.fetcher.fetch(generation, position, donors)
            case GoBack(generation=generation, step=step, sources=sources):
                self.site.went_back.append(step)
                self.fetcher.fetch(generation, Key(step, 0), sources)
            case Entered(generation=generation, step=step):
                self.faults = {g: a for g, a in self.faults.items() if g >= generation}
                held = self.states.keys() if self.at == step else ()
                self.site.checks.entered(self.me, generation, step, held)
                self.tell(self._entered_message())
            case LeftPlan():
                self.exit("drained: the plan goes on without it", restart=False)

    def _send_record(self, key: Key, record: Record) -> None:
        if not record.payload:
            vote = Vote(self.machine.generation, self.me.worker_id, (), ())
            record = Record(record.prepared, vote.encode())
        self.mesh.send_record(key, record)

    # ---- a step

    def plan(self) -> Plan:
        """Of the present generation."""
        if self.machine.plan is None:
            raise AssertionError(f"{self.me} has no plan")
        return self.machine.plan

    def _reduce(self, step: int) -> None:
        plan = self.plan()
        for stage in plan.stages_of(self.me.worker_id):
            lanes = plan.lanes_of(self.me.worker_id, stage)
            self.mesh.reduce(step, stage, lanes, self.lanes.of(step, stage, lanes))

    def hold(self, step: int, gradients: dict[int, Gradient]) -> None:
        """The reduced gradient of a step is complete here, for all own stages."""
        if step == self.at + 1:
            for stage, gradient in gradients.items():
                self.site.checks.reduced(self.me, step, stage, self.states[stage], gradient)
            self.gradient = (step, gradients)

    # ---- the state

    def stands(self) -> bool:
        """Whether the state is that of the position, with nothing under way."""
        return self.machine.settled and not self._updating and self.at == self.machine.position.step

    def _begin_update(self, step: int, records: Mapping[int, Record]) -> None:
        self.site.checks.decision(self.machine.generation, Key(step, 0), records, self._settling)
        if self.gradient is None or self.gradient[0] != step or self.at != step - 1:
            raise AssertionError(f"{self.me} at {self.at} is to apply step {step} with {self.gradient}")
        self._updating = True
        self._note_phase()
        slow = self.world.rng.random() < 0.15  # long enough for plans to come in the middle
        took = self.world.between(MS // 2, 25 * MS if slow else 3 * MS)
        self.later(took, self._apply, step, records, self.gradient[1])

    def _apply(self, step: int, records: Mapping[int, Record], gradients: Mapping[int, Gradient]) -> None:
        self._updating = False
        self.replay(step, {k: update(self.states[k], step, gradient) for k, gradient in gradients.items()})
        self.records, self._asked = records, False
        self.donor.feed(step, records, gradients)
        self.feed(Updated(step))

    def replay(self, step: int, states: dict[int, int]) -> None:
        """The states are now those of `step`, one further; stages that are not named are dropped."""
        self.at, self.states = step, states
        self._check_states()
        self.effects_held[step] = self.site.checks.effect(step)

    def _check_states(self) -> None:
        for stage, state in self.states.items():
            self.site.checks.state(self.me, self.at, stage, state)

    def copy(self, stage: int) -> Copy:
        """What a peer needs to be where this worker is."""
        kept = ((self.at, self.site.checks.effect(self.at)),) if self.at else ()
        return Copy(self.machine.position, self.records, {stage: self.states[stage]}, kept)

    def install(self, copy: Copy) -> None:
        """Become a copy, or get more stages at the same position. The caller reports it to the machine at once."""
        if copy.position != self.machine.position:
            self._asked = False
            self.gradient = None
        self.donor.jumped()
        kept = self.states if copy.position.step == self.at else {}
        self.at, self.states = copy.position.step, {**kept, **copy.states}
        if copy.records or copy.position != self.machine.position:
            self.records = copy.records
        self.effects_held.update(copy.effects)
        self._check_states()

    def _release(self, step: int) -> None:
        released = self.site.checks.released.get(self.me, 0)
        for held in sorted(s for s in self.effects_held if s <= step):
            effect = self.effects_held.pop(held)
            if held > released:
                self.site.checks.release(self.me, self.machine.position, held, effect)
        plan = self.machine.plan
        if plan is None:
            return
        self.keeper.released(step, plan)
        if plan.leader(0) == self.me.worker_id:
            self.tell(
                wire.Progress(
                    worker_id=self.me.worker_id,
                    incarnation=self.me.incarnation,
                    generation=self.machine.generation,
                    step=step,
                    step_ms=10.0,
                )
            )
