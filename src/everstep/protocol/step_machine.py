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
  stage).
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
from typing import Any

from everstep.base.errors import InvariantViolation, check
from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol import step_types
from everstep.protocol.settling import Settlement, less, settle, sound_limit
from everstep.protocol.step_phases import BY_EVENT, MUST_FIT, OUTSIDE, Phase
from everstep.protocol.step_types import Holding, Key, Record, StepEffect, StepEvent


class StepMachine:
    """One worker's view of the protocol. `digest`: of the initial state, stated when settling at step 0."""

    def __init__(self, me: WorkerKey, digest: str = "") -> None:
        self.me = me
        self.phase = Phase.WAITING
        self.plan: Plan | None = None
        self.generation = 0  # of the plan, or the newest that has left this worker out; what is of older ones is over
        self.position = Key(0, 0)  # of the last decision
        self.records: Mapping[int, Record] = {}  # of that decision, by worker id
        self._before: tuple[Key, Mapping[int, Record]] = self.position, self.records  # the decision before
        self._digest = digest
        self._gradient_step = 0
        self.undone = 0  # the newest step that was decided, and is done again from the same state
        self._gradients: dict[int, Extents] = {0: WHOLE}  # by stage, what the gradient of that step takes there
        self._blocks: dict[int, Extents] = {0: WHOLE}  # by stage, what is held of its state at `position`
        self._kept = step_types.SnapshotsKept()
        self.sound = -1  # later states than that of this step are tainted; -1: no doubt
        self._held: set[tuple[int, int]] = set()  # (stage, lane) of step position.step + 1
        self._awaited: set[tuple[int, int]] = set()  # of the present `LanesNeeded`, not reported yet
        self.rerun: frozenset[int] | None = None  # lanes that all compute anew in the present step; None: all
        self._asked: step_types.StepWanted | step_types.GatherWanted | None = None
        self._unasked: step_types.Gathered | None = None  # decided before this application asked
        self._prepared: dict[int, Plan] = {}
        self._switch: Plan | None = None  # decided; done after the update
        self._holdings: dict[int, dict[int, Holding]] = {}  # by generation, this one and later
        self._arrived: dict[Key, dict[int, Record]] = {}  # of this generation, beyond position
        self._entered = False
        self._copied = self._served = False
        self._untouched = True  # at step 0 the state is what this worker has built: no plan came, nothing was copied
        self._released = 0

    @property
    def step(self) -> int:
        """Updates applied or being applied."""
        return self.position.step

    @property
    def settled(self) -> bool:
        """Whether this worker is a member of a generation and its settle is done here."""
        return self.plan is not None and self._entered

    @property
    def leaving(self) -> bool:
        """Whether it was decided that all go on without it, as soon as it has updated."""
        return self._switch is not None and not self._switch.has(self.me)

    @property
    def next_gather(self) -> Key:
        """Key of the decision that answers the application's next `GatherWanted`."""
        if self._unasked is not None:
            return self._unasked.key
        return Key(self.position.step, self.position.seq + 1)

    @property
    def prepared(self) -> int:
        """Generation of the newest prepared plan that is held, 0 if none."""
        return max(self._prepared, default=0)

    @property
    def stages(self) -> tuple[int, ...]:
        """Those of whose state at `position` it has all blocks; ascending."""
        return tuple(sorted(k for k, blocks in self._blocks.items() if blocks.whole))

    @property
    def held(self) -> Mapping[int, Extents]:
        """What it has of the stages of which it has anything, which members may copy; ascending."""
        return {k: blocks for k, blocks in sorted(self._blocks.items()) if blocks}

    def _lacks(self, stage: int) -> bool:
        """Whether it has less of a stage than the present plan's share."""
        return bool(less(self._blocks.get(stage, NONE), self._share(stage)))

    def _share(self, stage: int) -> Extents:
        return WHOLE if self.plan is None else self.plan.shard(self.me.worker_id, stage).state

    def handle(self, event: StepEvent) -> list[StepEffect]:
        """Take in one event; the effects are to be carried out in order."""
        phases, name, reach = BY_EVENT[type(event)]
        if self.phase not in phases:
            if isinstance(event, MUST_FIT):
                raise InvariantViolation(f"expected no {name[1:]} while {self.phase}, got {event}")
            return []
        before = self.phase
        handler: Callable[[Any], list[StepEffect]] = getattr(self, name)
        effects = handler(event)
        if self.phase != before and self.phase not in reach:
            raise InvariantViolation(f"{before} -> {self.phase} on {event}")
        return effects

    # ---- plans

    def _plan_arrived(self, event: step_types.PlanArrived) -> list[StepEffect]:
        if event.plan.generation <= self.generation or not event.plan.has(self.me):
            return []
        return self._take(event.plan)

    def _prepared_arrived(self, event: step_types.PreparedArrived) -> list[StepEffect]:
        if event.plan.generation <= self.generation:
            return []
        self._prepared[event.plan.generation] = event.plan
        if self.phase in OUTSIDE:
            return self._follow_switch()
        return []

    def _take(self, plan: Plan) -> list[StepEffect]:
        """Leave the old generation and state what is held in the new one."""
        effects: list[StepEffect] = []
        fresh, self._untouched = self._untouched, False
        if self.plan is not None:
            effects.append(step_types.Leave(self.plan.generation, plan.reason))
        self.plan, self.generation = plan, plan.generation
        self._forget_older()
        self._arrived = {}
        self._entered = self._copied = self._served = False
        self._awaited = set()
        parts = {k: blocks for k, blocks in self._blocks.items() if not blocks.whole}
        if plan.sound >= 0 and not 0 <= self.sound <= plan.sound:
            self._doubt(plan.sound)
        if self.position.step == 0 and (self.sound < 0 or fresh):
            built = dict.fromkeys(plan.stages_of(self.me.worker_id), WHOLE)
            self._blocks = {**built, **({} if fresh else self._blocks), **parts}
        if self.phase is not Phase.UPDATING:
            self.phase = Phase.SETTLING
        return [*effects, step_types.Regroup(plan), step_types.SendHolding(plan.generation, self.holding())]

    def holding(self) -> Holding:
        """What is held as of now, to be stated in the present plan. Raises: InvariantViolation without one."""
        plan = self.current_plan()
        held = {(stage, lane) for stage, lane in self._held if not self._lacks(stage)}
        return Holding(
            position=self.position,
            records=self.records,
            gradient_step=self._gradient_step,
            digest=self._digest if self.position.step == 0 else "",
            stages=self.held,
            lacking=tuple(sorted({lane for _, lane in self._seats(plan) - held})),
            snapshots=dict(self._kept.snapshots),
            disk=tuple(sorted(self._kept.disk)),
            gradients=dict(self._gradients),
            sound=self.sound,
        )

    def _blocks_lost(self, event: step_types.BlocksLost) -> list[StepEffect]:
        """What is left counts; the gradient of a step cannot be applied to it if it lacks blocks that this is for."""
        stage = event.stage
        self._blocks[stage] = left = self._blocks.get(stage, NONE) - event.extents
        self._gradients = {k: part for k, part in self._gradients.items() if k != stage or not less(left, part)}
        if not self._gradients:
            self._gradient_step = 0
        if self.phase not in OUTSIDE and self._lacks(stage):
            self._entered, self.phase = False, Phase.LACKING
        return []

    def _snapshots_kept(self, event: step_types.SnapshotsKept) -> list[StepEffect]:
        self._kept = event
        return []

    def _forget_older(self) -> None:
        self._prepared = {g: p for g, p in self._prepared.items() if g > self.generation}
        self._holdings = {g: h for g, h in self._holdings.items() if g >= self.generation}
        if self._switch is not None and self._switch.generation <= self.generation:
            self._switch = None

    def _agreed_switch(self, records: Mapping[int, Record]) -> Plan | None:
        """The held plan that all of these records bear, if there is one newer than the present."""
        generations = {r.prepared for r in records.values()}
        if len(generations) != 1:
            return None
        return self._prepared.get(generations.pop())

    def _change_over(self, plan: Plan) -> list[StepEffect]:
        """Do the switch to a prepared plan that was decided."""
        if plan.has(self.me):
            return self._take(plan)
        effects: list[StepEffect] = [] if self.plan is None else [step_types.Leave(self.plan.generation, plan.reason)]
        self.plan, self.generation = None, plan.generation
        self._forget_older()
        self.phase = Phase.LEFT
        return [*effects, step_types.LeftPlan(plan.generation)]

    # ---- healing: following the members without being one

    def _followed(self, event: step_types.Followed) -> list[StepEffect]:
        effects = self._move(event.position, event.records)
        self._blocks = dict.fromkeys(event.stages, WHOLE)
        self._asked, self._untouched = None, False
        return effects + self._follow_switch()

    def _follow_switch(self) -> list[StepEffect]:
        plan = self._agreed_switch(self.records) if self.position.seq == 0 else None
        return self._take(plan) if plan is not None and plan.has(self.me) else []

    # ---- settle

    def _holding_arrived(self, event: step_types.HoldingArrived) -> list[StepEffect]:
        if event.generation < self.generation:
            return []
        self._holdings.setdefault(event.generation, {}).setdefault(event.worker_id, event.holding)
        # One of a prepared generation waits, though it proves the switch: this worker may be a joiner's donor, and the
        # joiner gets nothing from one that has not decided the step itself.
        settling = event.generation == self.generation and self.phase is Phase.SETTLING
        return self._settle() if settling else []

    def _settle(self) -> list[StepEffect]:
        holdings = self._stated()
        if len(holdings) < len(self._members()):
            return []
        limit = sound_limit(holdings)
        if limit is not None and any(h.sound != limit for h in holdings.values()):
            if self.sound != limit:
                self._doubt(limit)  # whoever did not know has stated too little: what there is up to that step
            return [step_types.SettleAnew(self.generation, f"states later than that of step {limit} are tainted")]
        settled = settle(self.current_plan(), holdings)
        mine = self.me.worker_id
        effects: list[StepEffect] = []
        if mine in settled.rolls and self.position != settled.target:
            effects = self._roll_forward(settled.target, settled.records)
            if self.phase is Phase.UPDATING:
                return effects
        if mine in settled.serves and not self._served:
            self._served = True
            effects.append(step_types.ServeState(self.generation, settled.target, settled.serves[mine]))
        if mine in settled.wants and not self._copied:
            self.phase = Phase.FETCHING
            return [*effects, self._get(settled)]
        check(self.position == settled.target, f"settled at {settled.target}, but at {self.position}")
        self.rerun = settled.rerun
        return effects + self._enter()

    def _get(self, settled: Settlement) -> StepEffect:
        wanted, pieces = settled.wants[self.me.worker_id], settled.pieces.get(self.me.worker_id, {})
        if settled.back:
            return step_types.GoBack(self.generation, settled.target.step, wanted, pieces)
        return step_types.FetchState(self.generation, settled.target, wanted, pieces)

    def current_plan(self) -> Plan:
        """Raises: InvariantViolation if there is none."""
        if self.plan is None:
            raise InvariantViolation(f"no plan while {self.phase}")
        return self.plan

    def _members(self) -> tuple[int, ...]:
        return self.current_plan().worker_ids

    def _stated(self) -> dict[int, Holding]:
        """The members' holdings of this generation that have come so far."""
        stated = self._holdings.get(self.generation, {})
        return {i: stated[i] for i in self._members() if i in stated}

    def _roll_forward(self, top: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Take the one decision that is missing here with the records that were handed over."""
        rolled = {k: part for k, part in self._gradients.items() if not less(self._blocks.get(k, NONE), part)}
        effects = self._move(top, records)
        if top.seq == 0:
            self._asked, self._blocks = None, rolled
            self.phase = Phase.UPDATING
            return [*effects, step_types.StepDecided(top.step, dict(records))]
        gathered = step_types.Gathered(top, dict(records), here=False)
        if isinstance(self._asked, step_types.GatherWanted):
            self._asked = None
            effects.append(gathered)
        else:
            self._unasked = gathered
        return effects

    def _state_copied(self, event: step_types.StateCopied) -> list[StepEffect]:
        stated, mine = self._stated(), self.me.worker_id
        settled = settle(self.current_plan(), stated)
        fits = (event.generation, event.position) == (self.generation, settled.target)
        check(fits, f"expected the state of {settled.target} in generation {self.generation}, got {event}")
        wanted, before = settled.wants[mine], self.position
        effects = self._move(event.position, event.records)
        if event.position != before:
            self._asked = None
            effects.append(
                step_types.Discard(before.step + 1 if event.position.step < before.step else event.position.step)
            )
        elif self.sound >= 0 or any(
            stage in self._blocks and (self._lacks(stage) or donors[:1] != (mine,)) for stage, donors in wanted.items()
        ):
            # Another state of the same step, or a repaired one: what was computed from one's own counts for nothing.
            self._held, self._gradient_step = set(), 0
            effects.append(step_types.Discard(event.position.step + 1))
        if event.position.step == 0:
            self._digest = next((stated[donors[0]].digest for donors in wanted.values() if donors), self._digest)
        stays = event.position.step == before.step  # what is without a seat: until the next decision
        kept = {k: blocks for k, blocks in self._blocks.items() if stays and (before.step or not blocks.whole)}
        seats = self.current_plan().stages_of(mine)
        self._blocks = kept | {k: kept.get(k, NONE) | self._share(k) for k in seats}
        self._copied = True
        return effects + self._settle()

    def _enter(self) -> list[StepEffect]:
        self._entered = True
        self.phase = Phase.IDLE
        return [step_types.Entered(self.generation, self.position.step), *self._resume()]

    def _resume(self) -> list[StepEffect]:
        """Do what the application waits for."""
        asked = self._asked
        if isinstance(asked, step_types.StepWanted):
            return self._begin_step()
        if isinstance(asked, step_types.GatherWanted):
            self.phase = Phase.GATHERING
            return [step_types.SendRecord(self.generation, self.next_gather, Record(self.prepared, asked.payload))]
        return []

    # ---- a step

    def _asked_for(self, event: step_types.StepWanted | step_types.GatherWanted) -> list[StepEffect]:
        check(self._asked is None, f"{event} before {self._asked} was answered")
        if isinstance(event, step_types.GatherWanted) and self._unasked is not None:
            gathered, self._unasked = self._unasked, None
            return [gathered]
        self._asked = event
        return self._resume() if self.phase is Phase.IDLE else []

    def _step_left(self, event: step_types.StepLeft) -> list[StepEffect]:
        """Nothing was contributed to it: who has not computed its lanes has no gradient."""
        if isinstance(self._asked, step_types.StepWanted):
            self._asked, self._held, self._awaited = None, set(), set()
            if self.phase in (Phase.COMPUTING, Phase.REDUCING):
                self.phase = Phase.IDLE
        return []

    def _seats(self, plan: Plan) -> set[tuple[int, int]]:
        """(stage, lane) of this worker's seats."""
        mine = self.me.worker_id
        return {(stage, lane) for stage in plan.stages_of(mine) for lane in plan.lanes_of(mine, stage)}

    def _begin_step(self) -> list[StepEffect]:
        plan, number = self.current_plan(), self.position.step + 1
        seats = self._seats(plan)
        self._awaited = seats - self._held
        if plan.stages > 1:
            # What a member lacks has to pass through every seat on its way again.
            rerun = {lane for _, lane in seats} if self.rerun is None else self.rerun
            strays = {lane for _, lane in self._awaited} - rerun
            check(not strays, f"lanes {sorted(strays)} of step {number} are lacking, but nobody said so")
            self._awaited = {(stage, lane) for stage, lane in seats if lane in rerun}
        if self._awaited:
            self.phase = Phase.COMPUTING
            return [step_types.LanesNeeded(number, tuple(sorted({lane for _, lane in self._awaited})))]
        self.phase = Phase.REDUCING
        return [step_types.ReductionDue(self.generation, number)]

    def _lane_done(self, event: step_types.LaneDone) -> list[StepEffect]:
        if event.step != self.position.step + 1:
            return []
        self._held.add((event.stage, event.lane))
        if self.phase is not Phase.COMPUTING:
            return []
        self._awaited.discard((event.stage, event.lane))
        if not self._lanes_complete():
            return []
        self.phase = Phase.REDUCING
        return [step_types.ReductionDue(self.generation, event.step)]

    def _lanes_lost(self, event: step_types.LanesLost) -> list[StepEffect]:
        if event.step == self.position.step + 1:
            self._held -= set(event.lanes)
        return []

    def _lanes_complete(self) -> bool:
        """Whether all own seats have what they need. Apart, so that a test can break it."""
        return not self._awaited and self._held >= self._seats(self.current_plan())

    def _gradient_reduced(self, event: step_types.GradientReduced) -> list[StepEffect]:
        if event.step != self.position.step + 1:
            return []
        plan = self.plan
        if event.generation == self.generation and plan is not None:
            self._gradients = {k: self._share(k) for k in plan.stages_of(self.me.worker_id)}
        elif plan is not None and plan.stages > 1:
            return []  # one of a superseded reduction says nothing of the stages that it was of
        self._gradient_step = event.step
        if self.phase is not Phase.REDUCING or event.generation != self.generation:
            return []
        self.phase = Phase.AGREEING
        return [step_types.SendRecord(self.generation, Key(event.step, 0), Record(self.prepared, event.payload))]

    def _record_arrived(self, event: step_types.RecordArrived) -> list[StepEffect]:
        if self.plan is None or event.generation != self.generation:
            return []
        if self._entered and event.key <= self.position:  # before, this worker may yet go back behind it
            return []
        if event.worker_id not in self.plan.worker_ids:
            return []
        self._arrived.setdefault(event.key, {}).setdefault(event.worker_id, event.record)
        if self.phase is Phase.AGREEING:
            key = Key(self.position.step + 1, 0)
        elif self.phase is Phase.GATHERING:
            key = self.next_gather
        else:
            return []
        records = self._arrived.get(key, {})
        return self._decide(key, dict(records)) if self._complete(records) else []

    def _complete(self, records: Mapping[int, Record]) -> bool:
        """Whether all members have contributed. Apart, so that a test can break it and the simulator must notice."""
        return len(records) == len(self._members())

    def _decide(self, key: Key, records: dict[int, Record]) -> list[StepEffect]:
        self._before = self.position, self.records
        effects = self._move(key, records)
        self._asked = None
        self.sound = -1
        if key.seq == 0:
            self._blocks = dict(self._gradients)
            self._switch = self._agreed_switch(records)
            self.phase = Phase.UPDATING
            return [*effects, step_types.StepDecided(key.step, records)]
        self.phase = Phase.IDLE
        return [*effects, step_types.Gathered(key, records)]

    def _move(self, position: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Set the position; a decision beyond (s, 0) proves that every member had decided (s, 0)."""
        if position.step != self.position.step:
            self._held, self._gradient_step, self.rerun = set(), 0, None
            self._blocks = {k: blocks for k, blocks in self._blocks.items() if blocks.whole}
        if position != self.position:  # else what was decided before the application asked still answers it
            self._unasked = None
        self.position, self.records = position, records
        self._arrived = {k: r for k, r in self._arrived.items() if k > position}
        return self._prove(position.step if position.seq else position.step - 1)

    def _step_saved(self, event: step_types.StepSaved) -> list[StepEffect]:
        return self._prove(event.step) if event.step == self.position.step else []

    def _prove(self, proven: int) -> list[StepEffect]:
        """Every member has decided this step."""
        if proven <= self._released:
            return []
        self._released = proven
        return [step_types.Release(proven)]

    def _tainted(self, event: step_types.UpdateRefused) -> list[StepEffect]:
        """Nothing goes on here before all have settled anew, further back."""
        self._asked = None
        if self.phase is Phase.UPDATING:
            if not event.intact:
                self._before = Key(self.position.step - 1, 0), {}
            self.position, self.records = self._before
            self._asked = step_types.StepWanted()
        self._switch, self._entered = None, False
        self._holdings.pop(self.generation, None)
        self.phase = Phase.SETTLING
        if event.intact:  # sums of lanes may have taken in those of others by now
            self.undone = self.position.step + 1
            return [self.void()]
        self._doubt(event.sound)
        return []

    def void(self) -> step_types.Discard:
        """Nothing that has been computed of the next step counts: what is to be dropped."""
        self._held, self._gradient_step = set(), 0
        return step_types.Discard(self.position.step + 1, undone=True)

    def _doubt(self, sound: int) -> None:
        """States after this step count for nothing; nor does the live one of it, in which copies have just differed."""
        self.sound = sound
        if self.position.step >= sound and self.phase is not Phase.UPDATING:  # that leads beyond it
            self._blocks, self._held, self._gradient_step = {}, set(), 0

    def _updated(self, event: step_types.Updated) -> list[StepEffect]:
        check(event.step == self.position.step, f"updated to {event.step}, decided {self.position.step}")
        effects: list[StepEffect] = [step_types.Discard(event.step)]
        if self._switch is not None:
            plan, self._switch = self._switch, None
            self.phase = Phase.SETTLING
            return effects + self._change_over(plan)
        if self._entered:
            self.phase = Phase.IDLE
            return effects
        self.phase = Phase.SETTLING
        return effects + self._settle()
