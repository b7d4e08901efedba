"""The worker's step machine: lanes, reduce, agree, update, gather; and settle after each change of the plan. Pure.

It decides when a step is committed, which workers have to catch up, and how. Its driver moves the bytes.

Why no committed step is ever lost:

- A worker takes a decision when the records of *all* members for its key have come in one generation. A member
  contributes to (s, 0) only while it holds the reduced gradient of s, and to any key only after the decision before
  it. So the positions of the members of one generation differ by at most one decision, and a member that is one step
  behind holds the gradient that takes it there.
- After every change of the plan all members state what they hold, and each computes from the same holdings where all
  go on (`settling`): who rolls forward with the records handed over, who copies which stages, or to which step all
  go back. No decision is taken in a generation before its last member has settled, so all this may be interrupted
  and repeated at any time.
- A worker that a later generation leaves out never comes back with the same incarnation, except by healing. The
  others redo what it alone had decided, with the same bits. Only effects of steps that every member had decided have
  left it.

Why stages are never a step apart: there is one membership over all stages, one agree per step by all members, and
one target per settle, the same for every stage. A decision of (s, 0) proves that every member of every stage holds
the reduced gradient of s for its seats. So a stage can be at s only if all stages can follow, and a settled member
enters with every stage of its seats at the target. If no member holds a stage at the newest position, all go back to
the newest step that every stage has (in the memory of some member, or on disk).

Why going back cannot be observed: the state after a step is a function of the step alone, so repeated steps give the
same bits on any worker. Effects leave with `Release`, which names each step once per worker, in order, after every
member has decided it: a later decision proves that, or the step's complete checkpoint. Effects that had not been
released are released when the step is repeated; the others are not released again.

Rules for the driver:

- It carries effects out in their order. `StepDecided` is not interrupted, and `Updated` is reported before anything
  else; or `UpdateRefused`, if the records show that nothing must be applied. Then nothing happens until the next
  plan.
- Copying the state is all or nothing, and so is replaying a step: the old state stays until the new one is complete,
  and then `StateCopied` or `Followed` is reported at once, before any other event (if the machine is still in that
  phase and generation; otherwise the copy is thrown away). An unexpected one is a bug, and raises.
- `LanesNeeded` replaces the lanes asked for before. In an unsplit job a lane under way may still be reported at any
  time. In a split job it is abandoned at `Leave`, with the transfers that it needs.
- Lane results and the reduced gradient of a step are kept, across generations, until `Discard` names the step.
  `Discard` is no watermark: after `GoBack` older steps come again.
- A stage without a seat, and the state that `ServeState` gives away, are kept until the next decision (`StepDecided`
  drops the stage, and so does `GoBack` to another step).
- At step 0 a worker holds the stages of its seats in every plan that it opens, because it can build them. It keeps
  what it held besides, and may hold the gradient of step 1 for it.
- A copy of live state includes the effects that have not been released yet, as `records` do. A snapshot or a
  checkpoint is stated (`SnapshotsKept`) only after its step was released, so going to it skips no effect.
- `StepWanted` and `GatherWanted` are answered by `StepDecided` or `Gathered`, perhaps several generations later.
  When `StateCopied` or `Followed` moves the position, they are forgotten and must be asked again from there.
- A joiner reports `Followed` after each step that it replays. If its feed breaks after the members have switched, it
  may report the prepared plan as `PlanArrived`, and copies the state in settling. A feed breaks when its donor's
  state jumps (`StateCopied`); the joiner then starts over, perhaps at an older step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from everstep.base.errors import InvariantViolation
from everstep.base.extents import Extents
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.step_phases import BY_EVENT, MUST_FIT, Phase
from everstep.protocol.step_types import Discard, Holding, Key, Record, StepEffect, StepEvent
from everstep.protocol.stepping.contributing import Contributing
from everstep.protocol.stepping.deciding import Deciding
from everstep.protocol.stepping.entering import Entering
from everstep.protocol.stepping.known import Known
from everstep.protocol.stepping.switching import Switching


class StepMachine:
    """One worker's view of the protocol: takes events, returns effects, and shows what it knows.

    Its parts do the work, by the table of `step_phases`. digest: of the initial state, stated when settling at step
    0.
    """

    def __init__(self, me: WorkerKey, digest: str = "") -> None:
        self.me = me
        self._known = known = Known(me, digest)
        self._held = known.held
        self._contributing = contributing = Contributing(known)
        self._entering = entering = Entering(known, contributing)
        self._switching = switching = Switching(known, contributing, entering)
        self._deciding = Deciding(known, contributing, entering, switching)

    def handle(self, event: StepEvent) -> list[StepEffect]:
        """Take one event. Returns the effects, to be carried out in order."""
        phases, handler_of, name, reach = BY_EVENT[type(event)]
        before = self.phase
        if before not in phases:
            if isinstance(event, MUST_FIT):
                raise InvariantViolation(f"expected no {name.rpartition('.')[2]} while {before}, got {event}")
            return []
        handler: Callable[[Any], list[StepEffect]] = handler_of(self)
        effects = handler(event)
        if self.phase != before and self.phase not in reach:
            raise InvariantViolation(f"{before} -> {self.phase} on {event}")
        return effects

    def void(self) -> Discard:
        return self._known.void()

    def holding(self) -> Holding:
        """What this worker holds now, as it is stated in the present plan. Raises: InvariantViolation without a
        plan."""
        return self._known.holding()

    def current_plan(self) -> Plan:
        """The present plan. Raises: InvariantViolation if there is none."""
        return self._known.plans.current

    # ---- state

    @property
    def phase(self) -> Phase:
        return self._known.phase

    @property
    def plan(self) -> Plan | None:
        return self._known.plans.plan

    @property
    def generation(self) -> int:
        """Generation of the plan, or of the newest plan that left this worker out. Messages of older ones have no
        effect."""
        return self._known.plans.generation

    @property
    def prepared(self) -> int:
        """Generation of the newest prepared plan that this worker holds, 0 if none."""
        return self._known.plans.prepared

    @property
    def settled(self) -> bool:
        """Whether this worker is a member, and its settle is done."""
        return self.plan is not None and self._entering.entered

    @property
    def switch(self) -> Plan | None:
        """The plan that all members follow as soon as this worker has updated, with or without this worker; None if
        none."""
        return self._known.plans.switch

    @property
    def position(self) -> Key:
        return self._known.decisions.position

    @property
    def step(self) -> int:
        return self.position.step

    @property
    def records(self) -> Mapping[int, Record]:
        return self._known.decisions.records

    @property
    def undone(self) -> int:
        """The newest step that was decided and then repeated from the same state."""
        return self._known.next.undone

    @property
    def rerun(self) -> frozenset[int] | None:
        """Lanes that all members compute again in the present step; None: all."""
        return self._known.next.rerun

    @property
    def sound(self) -> int:
        """States after this step are tainted; -1: none is."""
        return self._held.sound

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages of whose state at `position` this worker has its whole share; ascending."""
        return self._known.stages

    @property
    def updating(self) -> tuple[int, ...]:
        """Stages that the decided step is applied to, even if this worker has no block of them to update; ascending."""
        return tuple(sorted(self._held.blocks))

    @property
    def held(self) -> Mapping[int, Extents]:
        """Blocks of each stage's state that this worker has and members may copy; ascending by stage."""
        return self._held.present
