"""One life of a slot: its process, the driver of production, its state, and the parts that carry out operations.

Nothing is decided here, and nothing is carried out: each part registers its acts in its `handlers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.operations import GatheredRecords, Save
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.step_types import Key, Record
from everstep.sim.checks import Checks
from everstep.sim.model import (
    Blocks,
    SimJob,
    SimReduced,
    cut_anew,
    digest,
    flipped,
    initial,
    merged,
    present,
    without,
    wrong,
)
from everstep.sim.world import MS, Process, SimConnection, World, connect

_PHASES: dict[type[do.Operation], str] = {
    do.Open: "settling",
    do.Fetch: "fetching",
    do.Restore: "fetching",
    do.OpenFeeds: "heal",
    do.Compute: "computing",
    do.Reduce: "reducing",
    do.Update: "updating",
    do.Spread: "spreading",
    do.SaveLast: "ending",
    do.Finish: "ending",
}


class Phases:
    """The phase of every worker. `hooks`: called when one enters a phase."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[WorkerKey, str], None]] = []
        self._of: dict[WorkerKey, str] = {}

    def note(self, who: WorkerKey, operation: do.Operation) -> None:
        phase = _PHASES.get(type(operation), "")
        if isinstance(operation, do.Exchange):
            phase = "settling" if operation.tag.kind == "settle" else "gathering" if operation.tag.seq else "agreeing"
        if phase and (phase != self._of.get(who, "") or phase == "gathering"):
            for hook in self.hooks[:]:
                hook(who, phase)
        self._of[who] = phase

    def forget(self, who: WorkerKey) -> None:
        """Forget the phase of a worker: the next one is new."""
        self._of[who] = ""


class Disk:
    """Checkpoints, by step and stage. `hosts`: hosts that see the directory; all if None."""

    def __init__(self, hosts: frozenset[str] | None) -> None:
        self.hosts = hosts
        self.parts: dict[int, dict[int, Blocks]] = {}
        self.damaged: set[int] = set()
        self.saving: dict[int, set[int]] = {}
        """Workers that have begun the last checkpoint, which has a part of each, by step."""
        self.staying: set[WorkerKey] = set()
        """Workers whose loops go no further: they have raised, or were told to end."""
        self.came_at: dict[WorkerKey, int] = {}
        """Steps after which workers joined; of those that have not gone back since."""
        self.past: dict[tuple[int, int], bool] = {}
        """Whether the loops of those that save are done with the step, by step and generation."""
        self.records: dict[int, Mapping[int, Record]] = {}
        """By step, of its decision."""
        self._asking: dict[int, Callable[[str], None]] = {}
        self._asks: WorkerKey | None = None
        self._said: dict[tuple[int, int], dict[tuple[int, int], Blocks]] = {}
        """Copies of each seat's worker, by stage and worker; by step and generation."""
        self._full = 0

    def ask(self, step: int, who: WorkerKey, ended: Callable[[str], None]) -> None:
        """Call `ended` when all parts are there, or will never be: with the trouble, "" if there is none."""
        self._asking, self._asks = {step: ended}, who

    def abandon(self, who: WorkerKey) -> None:
        """A worker gives up the checkpoint that is incomplete: no further part of it comes from there."""
        for ended in self._asking.values() if self._asks == who else ():
            ended("it was given up")
        self._asking = {} if self._asks == who else self._asking

    def fill(self) -> None:
        self._full += 1

    def empty(self) -> None:
        """Make room again, unless another fault has filled the disk, too."""
        self._full = max(0, self._full - 1)

    def empty_all(self) -> None:
        self._full = 0

    def write(self, stage: int, save: Save, who: int, state: Blocks) -> None:
        """Write one seat's part, if there is room; the last part completes the checkpoint, if all are alike."""
        plan, step = save.plan, save.step
        said = self._said.setdefault((step, plan.generation), {})
        said[stage, who] = state
        complete = said.keys() >= {(k, seat.worker_id) for k in range(plan.stages) for seat in plan.pool(k)}
        if self._full or complete:
            whole = {k: reduce(merged, (one for (at, _), one in said.items() if at == k)) for k, _ in said}
            alike = all(merged(one, whole[k]) == whole[k] for (k, _), one in said.items()) if complete else True
            wrong = "no space left on the disk" if self._full else "" if alike else "parts differ"
            if not wrong:
                self.parts[step] = {k: whole[k] for k in range(plan.stages)}
                self.records[step] = save.records
                self.damaged.discard(step)
            if step in self._asking:
                self._asking.pop(step)(wrong)

    def newest(self, host: str, limit: int | None) -> tuple[int, ...]:
        """Steps of the newest two checkpoints that a host can read, up to the limit."""
        if self.hosts is not None and host not in self.hosts:
            return ()
        return tuple(sorted(step for step in self.parts if limit is None or step <= limit)[-2:])

    def cut_anew(self, job: SimJob) -> None:
        """Read complete checkpoints as stages of another cut from now on; incomplete ones are dropped."""
        self.parts = {step: cut_anew(parts, job) for step, parts in self.parts.items()}
        self._asking, self._said, self.saving, self.past = {}, {}, {}, {}

    def damage(self) -> None:
        self.damaged.update(sorted(self.parts)[-1:])

    def read(self, stage: int, step: int) -> Blocks | None:
        """A stage's state, or None if the checkpoint turns out to be damaged: then it is set aside."""
        if step in self.damaged or step not in self.parts:
            self.parts.pop(step, None)
            return None
        return self.parts[step][stage]

    def invalidate(self, sound: int) -> None:
        """Set later checkpoints aside."""
        self.parts = {step: parts for step, parts in self.parts.items() if step <= sound}
        self._said = {key: said for key, said in self._said.items() if key[0] <= sound}


@dataclass(frozen=True)
class SimCopy:
    """State of some stages: everything that a worker needs to be at `position`, effects not yet released included."""

    position: Key
    records: Mapping[int, Record]
    states: Mapping[int, Blocks]
    effects: tuple[tuple[int, int], ...] = ()
    gathers: GatheredRecords = field(default_factory=dict)


class SimState:
    """State of the stages that a worker holds, all of one step. `records`: of that step's agree, as far as known."""

    def __init__(self, me: WorkerKey, job: SimJob, checks: Checks, *, other: bool) -> None:
        """other: the initial state that it builds differs from all others'."""
        self.me = me
        self.job = job
        self.checks = checks
        self.at = 0
        first = {stage: initial(job, stage) for stage in range(job.stages)}
        self._first = {stage: flipped(state) if other else state for stage, state in first.items()}
        self.stages = dict(self._first)
        self.records: Mapping[int, Record] = {}
        self.gradients: tuple[int, dict[int, SimReduced]] | None = None
        self.takes: dict[int, Extents] = {}
        self.grew: set[int] = set()  # stages whose state the last update has made larger
        self.effects: dict[int, int] = {}

    def built_anew(self, stage: int) -> Blocks:
        return self._first[stage]

    def first(self, stage: int) -> str:
        """Digest of the initial state that it builds of a stage."""
        return format(digest(self._first[stage]), "x")

    def build(self) -> None:
        """Build initial states of missing stages, if no step was done."""
        if self.at == 0:
            self.stages = {**self._first, **self.stages}

    def flip(self, stage: int) -> None:
        self.stages[stage] = flipped(self.stages[stage])

    def reduced(self, step: int, gradients: dict[int, SimReduced]) -> None:
        """The gradient of a step is complete, for all own stages."""
        for stage, gradient in gradients.items():
            self.checks.exact.reduced(self.me, step, stage, self.stages[stage], gradient)
        self.gradients = (step, gradients)

    def will_take(self, blocks: Mapping[int, Extents]) -> None:
        """From now on the gradient updates only these blocks here, by stage; in other stages all."""
        self.takes = dict(blocks)

    def receive(self, stage: int, blocks: Blocks) -> None:
        """Others have updated these blocks."""
        self.stages[stage] = merged(self.stages[stage], blocks)
        self._check()

    def gradient(self, step: int) -> dict[int, SimReduced]:
        """Gradient of the step, which must be the next one."""
        if self.gradients is None or self.gradients[0] != step or self.at != step - 1:
            raise AssertionError(f"{self.me} at {self.at} is to apply step {step} with {self.gradients}")
        return self.gradients[1]

    def apply(
        self,
        outcome: StepOutcome,
        records: Mapping[int, Record],
        gradients: Mapping[int, SimReduced],
        takes: Mapping[int, Extents] = {},
    ) -> None:
        """Apply one step; stages that are not named are dropped. takes: blocks that are updated here, where not all
        are."""
        step, self.at, self.records = outcome.step, outcome.step, records
        self.checks.exact.does(self.me, step)
        stages = {k: updated(self.job, self.stages[k], outcome, gradient) for k, gradient in gradients.items()}
        if not outcome.nonfinite.left_out:
            stages = {k: without(state, WHOLE - takes.get(k, WHOLE)) for k, state in stages.items()}
            lacking = [k for k, blocks in takes.items() if k in stages and not present(stages[k]).covers(blocks)]
            if lacking:
                raise AssertionError(f"{self.me} lacks gradients of what it is to update of {lacking}: {gradients}")
        self.grew = {k for k, state in stages.items() if len(state) > len(self.stages[k])}
        self.stages = stages
        self._check()
        self.effects[step] = self.checks.exact.effect(step)

    def copy(
        self, position: Key, records: Mapping[int, Record], gathers: GatheredRecords, stages: Iterable[int]
    ) -> SimCopy:
        """Copy for a peer that wants to be where this worker is."""
        effects = ((self.at, self.checks.exact.effect(self.at)),) if self.at else ()
        return SimCopy(position, records, {k: self.stages[k] for k in stages}, effects, gathers)

    def install(self, copy: SimCopy, only: bool = False) -> None:
        """Become a copy; stages of the same step that are not part of it stay, unless `only`."""
        step = copy.position.step
        kept = self.stages if step == self.at and not only else {}
        if step != self.at:
            self.gradients = None
        self.at, self.stages = step, {**kept, **copy.states}
        agreed = copy.gathers.get(Key(step, 0)) or ({} if copy.position.seq else copy.records)
        self.records = agreed or (self.records if kept else {})
        self.effects.update(copy.effects)
        self._check()

    def release(self, step: int, position: Key) -> None:
        """The effects of a step, and of older ones, leave the process."""
        released = self.checks.effects.released.get(self.me, 0)
        for held in sorted(s for s in self.effects if s <= step):
            effect = self.effects.pop(held)
            if held > released:
                self.checks.effects.release(self.me, position, held, effect)

    def _check(self) -> None:
        for stage, state in self.stages.items():
            self.checks.exact.state(self.me, self.at, stage, state)


def updated(job: SimJob, state: Blocks, outcome: StepOutcome, gradient: SimReduced) -> Blocks:
    """A stage's state after a step, whose update may be left out."""
    return state if outcome.nonfinite.left_out else job.updated(state, outcome.step, gradient)


SimHandlers = Mapping[Hashable, Callable[..., Any]]
"""Handlers by kind of effect or operation. By ("abort", kind): ends such an operation before its time; by ("owes",
kind): whether a peer still owes it something; by ("message", kind): takes messages of members; by ("door", name): takes
connections of peers that ask for this."""
Exited = Callable[[WorkerKey, Cause, str, bool, bool], None]
UNINTERRUPTED = do.Update | do.Adopt | do.Replay


def nothing(*what: object) -> None:
    """Handler of effects that have no counterpart on an abstract state."""


class SimSite:
    """Facts that the workers of a simulation share."""

    def __init__(
        self,
        world: World,
        checks: Checks,
        disk: Disk,
        donors: int = 1,
        differs: WorkerKey | None = None,
        foreign: str = "",
        drifts: str = "",
        odd: WorkerKey | None = None,
    ) -> None:
        """donors: number of sources asked for a state at once. differs: worker that builds another initial state than
        all others. foreign: the host with other kernels than all others; facts: entries that the coordinator has had
        put into job.json. drifts: worker whose script changes its state after each update ("leader", "healed"; "":
        none). odd: the first of the lives that compute lanes otherwise."""
        self.odd = odd
        self.differs, self.foreign, self.drifts = differs, foreign, drifts
        self.facts: dict[str, Any] = {}
        self.donors = donors
        self.damaged = 0.0  # share of answers in which a block comes damaged
        self.world = world
        self.checks = checks
        self.disk = disk
        self.lives: dict[WorkerKey, Life] = {}
        self.phases = Phases()
        self.strays: set[WorkerKey] = set()  # lives that run another script
        self.went_back: list[int] = []  # steps that workers went back to
        self.told: list[dict[str, Any]] = []  # events of the job, as its log would have them

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append({"kind": kind, "time_unix_ns": self.world.now_ns, **fields})

    @property
    def last_generation(self) -> int:
        """Generation of the last plan whose start this run of the job has told, 0 if none."""
        starts = (one for one in reversed(self.told) if one["kind"] in ("job_started", "generation_started"))
        return int(next((one.get("generation", 0) for one in starts), 0))

    def edit(self) -> None:
        """People edit the code before the job goes on, and all its workers run it: a stray may be the only one."""
        self.strays.clear()
        self.facts["edition"] = self.facts.get("edition", 0) + 1
        self.facts["code_before"] = self.facts.pop("code", None)

    def another_script(self, after: WorkerKey) -> None:
        """The next two lives of the slot run a script that says another number of lanes."""
        self.strays |= {WorkerKey(after.worker_id, after.incarnation + n) for n in (1, 2)}

    def damages(self, share: float) -> None:
        """Damage a block in this share of answers from now on."""
        self.damaged = share

    def is_odd(self, life: Life) -> bool:
        """Whether the life computes lanes otherwise than all others."""
        return self.odd is not None and self.odd.worker_id == life.me.worker_id and life.me >= self.odd

    def all_wrong(self, stage: int) -> bool:
        """Whether all copies of a stage that workers have trained have wrong bits."""
        trained = [life.state.stages for life in self.lives.values() if life.alive and life.state.at]
        held = [stages[stage] for stages in trained if stage in stages]
        return bool(held) and all(map(wrong, held))

    def copies(self, life: Life, stage: int) -> int:
        """Number of members of a worker's generation that hold all blocks of a stage."""
        plan = life.driver.machine.plan
        pool = [] if plan is None else [self.lives.get(plan.member(seat.worker_id).key) for seat in plan.pool(stage)]
        return sum(w is not None and w.alive and None not in w.state.stages.get(stage, (None,)) for w in pool)


class Life(Process):
    """Gives the driver events, and its effects to the parts.

    `exited`: called at the end with key, cause, reason, whether to restart, whether it left in order.
    """

    def __init__(self, site: SimSite, host: str, driver: Driver, exited: Exited) -> None:
        self.me = driver.machine.me
        super().__init__(site.world, f"worker-{self.me}", host)
        self.site = site
        self.driver = driver
        self.slowness = site.world.rng.choice((1, 1, 1, 2, 4))
        self.state = SimState(self.me, self.job, site.checks, other=self.me == site.differs)
        self.operation: do.Operation | None = None
        self.finished: do.Operation | None = None  # the exchange whose end is being reported to the driver
        self.cut_to = -1  # operations of this generation and older ones are over
        self._exited = exited
        self.handlers: dict[Hashable, Callable[..., Any]] = {}
        self._events: deque[object] = deque()
        self._handling = False

    @property
    def job(self) -> SimJob:
        return self.site.checks.job

    @property
    def pid(self) -> int:
        return 1000 + 100 * self.me.worker_id + self.me.incarnation

    # ---- parts

    def install(self, handlers: SimHandlers) -> None:
        self.handlers.update(handlers)

    def look(self) -> None:
        """Check whether the present operation can end at all."""

    def reach(
        self,
        key: WorkerKey,
        door: str,
        receive: Callable[[SimConnection, Any], None],
        lost: Callable[[SimConnection], None],
        *said: Any,
        timeout_ns: int = 500 * MS,
    ) -> SimConnection | None:
        """Connect to another life; None if it cannot be reached."""
        peer = self.site.lives.get(key)
        connection = connect(self.world, self, peer, timeout_ns)
        if connection is not None and peer is not None:
            connection.listen(self, partial(receive, connection), partial(lost, connection))
            peer.handlers["door", door](connection, *said)
        return connection

    # ---- the driver

    def handle(self, event: object) -> None:
        """Give the driver an event; its effects are carried out in order, before the next event is handed in."""
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

    def during(self, operation: do.Operation, delay_ns: int, act: Callable[..., None], *args: Any) -> None:
        """Call `act(operation, *args)` after the delay, unless the operation has been answered by then."""
        self.later(delay_ns, self._during, operation, act, args)

    def _during(self, operation: do.Operation, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.operation is operation:
            act(operation, *args)

    def done(self, operation: do.Operation, result: object = None) -> None:
        """Report that the operation was carried out, unless it has been answered."""
        if self.operation is operation:
            self._answered(operation, "done")
            if isinstance(operation, do.Exchange):
                self.finished = operation
            self.handle(do.Done(operation.op, result))

    def cut(self, generation: int) -> None:
        self.cut_to = max(self.cut_to, generation)

    def abort(self, operation: do.Operation, accused: tuple[int, ...] = (), reason: str = "interrupted") -> None:
        if self.operation is operation and not isinstance(operation, UNINTERRUPTED):
            self.handlers.get(("abort", type(operation)), self.aborted)(operation, accused, reason)

    def aborted(self, operation: do.Operation, accused: tuple[int, ...], reason: str) -> None:
        """Report that the operation was left."""
        self._answered(operation, "aborted")
        self.handle(do.Aborted(operation.op, accused, Why(Cause.LINK, reason)))

    def tainted(
        self, operation: do.Operation, reason: str, torn: bool | None = None, odd: tuple[int, ...] = ()
    ) -> None:
        """Report an operation that met something that must not be used, sometimes after it had loaded a part of it."""
        self._answered(operation, "tainted")
        torn = self.world.rng.random() < 0.3 if torn is None else torn
        self.handle(do.Tainted(operation.op, Why(Cause.CORRUPT, reason), torn, odd))

    def _answered(self, operation: do.Operation, how: str) -> None:
        self.operation = None
        self.world.seen["operations", f"{type(operation).__name__} {how}"] += 1

    def _perform(self, effect: do.Effect) -> None:
        if isinstance(effect, do.Operation):
            self._begin(effect)
        else:
            self.world.seen["effects", type(effect).__name__] += 1
            self.handlers[type(effect)](effect)

    def _begin(self, operation: do.Operation) -> None:
        self.operation = operation
        self.site.phases.note(self.me, operation)
        if 0 < operation.generation <= self.cut_to and not isinstance(operation, UNINTERRUPTED):
            self.soon(0, MS // 4, self.abort, operation)
        else:
            self.handlers[type(operation)](operation)
            self.look()

    # ---- the end

    def last_words(self, cause: Cause, reason: str, **more: Any) -> wire.WorkerFailed:
        """Message to the coordinator when an exception was raised."""
        return wire.WorkerFailed(
            worker_id=self.me.worker_id,
            incarnation=self.me.incarnation,
            cause=cause,
            step=self.driver.machine.step,
            reason=reason,
            signature=reason,
            **{"fatal": False, "generation": self.driver.machine.generation, **more},
        )

    def die(self, reason: str) -> None:
        self.end(Cause.KILLED, reason)

    def end(self, cause: Cause, reason: str, restart: bool = True, in_order: bool = False) -> None:
        """The process ends, and its agent sees it."""
        if self.alive:
            super().die(reason)
            self._exited(self.me, cause, reason, restart, in_order)
