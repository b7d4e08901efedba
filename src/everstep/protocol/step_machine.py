"""The worker's step machine: lanes, reduce, agree, update, gather; and settle after each change of the plan. Pure.

It decides when a step is committed and who has to catch up how; whoever drives it moves the bytes. Why no committed
step is ever lost:

- A decision is taken at a worker when the records of *all* members for its key have come in one generation. A member
  contributes to (s, 0) only while it holds the reduced gradient of s, and to any key only after the decision before.
  So, among the members of one generation, positions differ by at most one decision, and whoever is one step behind
  another holds the gradient that takes it there.
- After every change of the plan all members state what they hold, and each computes from these same holdings where
  everybody goes on (`settling`): who rolls forward with the records handed over, who must copy which stages, or to
  which step all go back. No decision is taken in a generation before its last member has settled, so all this may be
  interrupted and done again at any time.
- Whoever is left out of a later generation never comes back with the same incarnation but by healing; the others redo
  what it alone had decided, with the same bits. Only effects of steps that every member had decided have left it.

Why no stage is ever a step apart from another: there is one membership over all stages, one agree per step by all of
them, and one target per settle, the same for every stage. A decision of (s, 0) proves that every member of every stage
holds the reduced gradient of s for its seats; so a stage can be at s only if all can follow, and a member that has
settled enters with every stage of its seats at the target. If a stage is held by nobody at the top, all go back to the
newest step that every stage has (its state in somebody's memory, or on disk).

Why going back cannot be observed: the state after a step is a function of the step alone, so steps done again give the
same bits, whoever does them; and effects leave with `Release`, which names each step once at a worker, in order, after
every member had decided it: a later decision proves that, or the step's complete checkpoint. What had not been released
is released when it is done again; what had, is not.

What the driver must keep to:

- Effects are carried out in their order. `StepDecided` is not interrupted, and `Updated` is reported before anything
  else; or `UpdateRefused`, if the records show that nothing must be applied. Then nothing happens until the next plan.
- Copying the state is all or nothing, and so is replaying a step: the former state stands until the new one does, and
  `StateCopied` or `Followed` is reported at once then, before any other event (if the machine still is in that phase
  and generation; otherwise the copy is thrown away). One that comes when it is not expected is a bug, and raises.
- `LanesNeeded` replaces the lanes asked for before. In an unsplit job a lane under way may still be reported, at any
  time; in a split one it is abandoned at `Leave`, with the transfers that it needs.
- Lane results and the reduced gradient of a step are kept, across generations, until `Discard` names it. `Discard` is
  no watermark: after `GoBack` older steps come again.
- A stage without a seat, and what `ServeState` gives away, is kept until the next decision (`StepDecided` drops the
  stage, and so does `GoBack` to another step).
- At step 0 a worker holds the stages of its seats in whatever plan it opens: it can build them. What it held besides
  it still has, and may have the gradient of step 1 for.
- A copy of live state carries with it what has not been released yet, as `records` do. A snapshot or a checkpoint is
  stated (`SnapshotsKept`) only once its step has been released, so going to it skips no effect.
- `BlocksLost` is reported before anything is computed, reduced from or given away of what is there instead. No update,
  copy or replay is under way then, and a settle is asked for.
- What is asked (`StepWanted`, `GatherWanted`) is answered by `StepDecided` or `Gathered`, be it several generations
  later.
  When `StateCopied` or `Followed` moves the position, what was asked before is forgotten: ask anew, from there.
- A joiner reports `Followed` after each step that it replays. If its feed breaks after the members have switched, it
  may report the prepared plan as `PlanArrived`, and copies the state in settling. A feed breaks when its donor's state
  jumps (`StateCopied`); the joiner begins anew, be it at an older step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
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
    """One worker's view of the protocol: takes in events, and says what it knows. What happens is in its parts, by the
    table of `step_phases`. `digest`: of the initial state, stated when settling at step 0."""

    def __init__(self, me: WorkerKey, digest: str = "") -> None:
        self.me = me
        self._known = known = Known(me, digest)
        self._held = known.held
        self._contributing = contributing = Contributing(known)
        self._entering = entering = Entering(known, contributing)
        self._switching = switching = Switching(known, contributing, entering)
        self._deciding = Deciding(known, contributing, entering, switching)

    def handle(self, event: StepEvent) -> list[StepEffect]:
        """Take in one event; the effects are to be carried out in order."""
        phases, name, reach = BY_EVENT[type(event)]
        before = self.phase
        if before not in phases:
            if isinstance(event, MUST_FIT):
                raise InvariantViolation(f"expected no {name.rpartition('.')[2]} while {before}, got {event}")
            return []
        handler: Callable[[Any], list[StepEffect]] = attrgetter(name)(self)
        effects = handler(event)
        if self.phase != before and self.phase not in reach:
            raise InvariantViolation(f"{before} -> {self.phase} on {event}")
        return effects

    def void(self) -> Discard:
        """Nothing that has been computed of the next step counts: what is to be dropped."""
        return self._known.void()

    def holding(self) -> Holding:
        """What is held as of now, to be stated in the present plan. Raises: InvariantViolation without one."""
        return self._known.holding()

    def current_plan(self) -> Plan:
        """Raises: InvariantViolation if there is none."""
        return self._known.plans.current

    # ---- what it knows

    @property
    def phase(self) -> Phase:
        """What the worker is doing."""
        return self._known.phase

    @property
    def plan(self) -> Plan | None:
        """The present one."""
        return self._known.plans.plan

    @property
    def generation(self) -> int:
        """Of the plan, or the newest that has left this worker out; what is of older ones is over."""
        return self._known.plans.generation

    @property
    def prepared(self) -> int:
        """Generation of the newest prepared plan that is held, 0 if none."""
        return self._known.plans.prepared

    @property
    def settled(self) -> bool:
        """Whether this worker is a member of a generation and its settle is done here."""
        return self.plan is not None and self._entering.entered

    @property
    def switch(self) -> Plan | None:
        """The plan that it was decided to follow as soon as this worker has updated, be it with it or not."""
        return self._known.plans.switch

    @property
    def position(self) -> Key:
        """Of the last decision."""
        return self._known.decisions.position

    @property
    def step(self) -> int:
        """Updates applied or being applied."""
        return self.position.step

    @property
    def records(self) -> Mapping[int, Record]:
        """Of the last decision, by worker id."""
        return self._known.decisions.records

    @property
    def undone(self) -> int:
        """The newest step that was decided, and is done again from the same state."""
        return self._known.next.undone

    @property
    def rerun(self) -> frozenset[int] | None:
        """Lanes that all compute anew in the present step; None: all."""
        return self._known.next.rerun

    @property
    def sound(self) -> int:
        """Later states than that of this step are tainted; -1: no doubt."""
        return self._held.sound

    @property
    def stages(self) -> tuple[int, ...]:
        """Those of whose state at `position` it has its whole share; ascending."""
        return self._known.stages

    @property
    def updating(self) -> tuple[int, ...]:
        """Those that the decided step is applied to, be it that this worker has no block to update; ascending."""
        return tuple(sorted(self._held.blocks))

    @property
    def held(self) -> Mapping[int, Extents]:
        """What it has of the stages of which it has anything, which members may copy; ascending."""
        return self._held.present
