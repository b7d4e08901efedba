"""The worker's step machine: lanes, reduce, agree, update, gather; and settle after each change of the plan. Pure.

It decides when a step is committed and who has to catch up how; whoever drives it moves the bytes. Why no committed
step is ever lost:

- A decision is taken at a worker when the records of *all* members for its key have come in one generation. A member
  contributes to (s, 0) only while it holds the reduced gradient of s, and to any key only after the decision before.
  So, among the members of one generation, positions differ by at most one decision, and whoever is one step behind
  another holds the gradient that takes it there.
- After every change of the plan all members state what they hold, and each computes from these same holdings who is at
  the top, who rolls forward with the records handed over, and who must copy the state. No decision is taken in a
  generation before its last member has settled, so all this may be interrupted and done again at any time.
- Whoever is left out of a later generation never comes back with the same incarnation but by healing; the others redo
  what it alone had decided, with the same bits. Only effects of steps that every member had decided have left it.

What the driver must keep to:

- Effects are carried out in their order. `Update` is not interrupted, and `Updated` is reported before anything else.
- Copying the state is all or nothing, and so is replaying a step: the former state stands until the new one does, and
  `StateCopied` or `Followed` is reported at once then, before any other event (if the machine still is in that phase
  and generation; otherwise the copy is thrown away). One that comes when it is not expected is a bug, and raises.
- `Compute` replaces the lanes asked for before. A lane under way may still be reported, at any time.
- Lane results and the reduced gradient of a step are kept, across generations, until `Discard` names it.
- What is asked (`StepAsked`, `GatherAsked`) is answered by `Update` or `Gathered`, be it several generations later.
  When `StateCopied` or `Followed` moves the position, what was asked before is forgotten: ask anew, from there.
- A joiner reports `Followed` after each step that it replays. If its feed breaks after the members have switched, it
  may report the prepared plan as `PlanArrived`, and copies the state in settling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from everstep.base.errors import InvariantViolation, check
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.step_types import (
    Compute,
    Discard,
    Entered,
    FetchState,
    Followed,
    GatherAsked,
    Gathered,
    GradientReduced,
    Holding,
    HoldingArrived,
    Key,
    LaneDone,
    Leave,
    LeftPlan,
    Open,
    PlanArrived,
    PreparedArrived,
    Record,
    RecordArrived,
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


class Phase(StrEnum):
    """What the worker is doing."""

    WAITING = "waiting"  # no plan: not started, or healing
    SETTLING = "settling"  # has stated what it holds, waits for the others' holdings
    FETCHING = "fetching"  # copies the state from a member at the top
    IDLE = "idle"  # the application has the turn
    COMPUTING = "computing"
    REDUCING = "reducing"
    AGREEING = "agreeing"
    UPDATING = "updating"
    GATHERING = "gathering"
    LEFT = "left"  # the members switched to a plan without this worker


_ALL = frozenset(Phase)
_RESUMED = frozenset({Phase.IDLE, Phase.COMPUTING, Phase.REDUCING, Phase.GATHERING})
_SETTLED = _RESUMED | {Phase.SETTLING, Phase.FETCHING, Phase.UPDATING}
_OUTSIDE = frozenset({Phase.WAITING, Phase.LEFT})
_MUST_FIT = (StepAsked, GatherAsked, Updated, StateCopied, Followed)
_TURN = frozenset({Phase.WAITING, Phase.LEFT, Phase.SETTLING, Phase.FETCHING, Phase.IDLE})

# Every transition: event, phases in which it may come, what handles it, phases it may lead to (besides staying).
# In other phases an event is an echo of something superseded and is dropped, or, if in _MUST_FIT, the driver's mistake.
TRANSITIONS: tuple[tuple[type, frozenset[Phase], str, frozenset[Phase]], ...] = (
    (PlanArrived, _ALL, "_plan_arrived", frozenset({Phase.SETTLING})),
    (PreparedArrived, _ALL, "_prepared_arrived", frozenset({Phase.SETTLING})),
    (HoldingArrived, _ALL, "_holding_arrived", _SETTLED),
    (StepAsked, _TURN, "_asked_for", frozenset({Phase.COMPUTING, Phase.REDUCING})),
    (GatherAsked, _TURN, "_asked_for", frozenset({Phase.GATHERING})),
    (LaneDone, _ALL, "_lane_done", frozenset({Phase.REDUCING})),
    (GradientReduced, _ALL, "_gradient_reduced", frozenset({Phase.AGREEING})),
    (RecordArrived, _ALL, "_record_arrived", frozenset({Phase.UPDATING, Phase.IDLE})),
    (Updated, frozenset({Phase.UPDATING}), "_updated", _SETTLED | {Phase.LEFT}),
    (StateCopied, frozenset({Phase.FETCHING}), "_state_copied", _RESUMED),
    (Followed, _OUTSIDE, "_followed", frozenset({Phase.SETTLING})),
)
_BY_EVENT = {event: (phases, handler, reach) for event, phases, handler, reach in TRANSITIONS}


def must_fetch(holdings: Mapping[int, Holding]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(donors, fetchers) of a settle, worker ids ascending: who is at the top, and who can only copy from them.

    A member one decision behind the top rolls forward instead; a member at the top needs nothing. At step 0 the state
    is whatever each process built, so there those who differ from the lowest id at the top copy as well.
    """
    top = max(h.position for h in holdings.values())
    donors = [i for i in sorted(holdings) if holdings[i].position == top]
    digest = holdings[donors[0]].digest
    if top.step == 0:
        donors = [i for i in donors if holdings[i].digest == digest]
    fetchers = []
    for i in sorted(holdings):
        h = holdings[i]
        by_gather = h.position.step == top.step and h.position.seq + 1 == top.seq
        by_update = top.seq == 0 and h.position.step + 1 == top.step and h.gradient_step == top.step
        differs = top.step == 0 and h.digest != digest
        if differs or not (h.position == top or by_gather or by_update):
            fetchers.append(i)
    return tuple(donors), tuple(fetchers)


class StepMachine:
    """One worker's view of the protocol. `digest`: of the initial state, stated when settling at step 0."""

    def __init__(self, me: WorkerKey, digest: str = "") -> None:
        self.me = me
        self._phase = Phase.WAITING
        self._plan: Plan | None = None
        self._generation = 0  # of the plan, or the newest that has left this worker out
        self._position = Key(0, 0)
        self._records: Mapping[int, Record] = {}  # of the decision at `position`
        self._digest = digest
        self._gradient_step = 0
        self._held: set[int] = set()  # lanes of step position.step + 1
        self._asked: StepAsked | GatherAsked | None = None
        self._unasked: Gathered | None = None  # decided before this application asked
        self._prepared: dict[int, Plan] = {}
        self._switch: Plan | None = None  # decided; done after the update
        self._holdings: dict[int, dict[int, Holding]] = {}  # by generation, this one and later
        self._arrived: dict[Key, dict[int, Record]] = {}  # of this generation, beyond position
        self._entered = False
        self._copied = False
        self._released = 0

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def generation(self) -> int:
        """Messages of older generations have no effect; 0 before the first plan."""
        return self._generation

    @property
    def position(self) -> Key:
        """Of the last decision."""
        return self._position

    @property
    def records(self) -> Mapping[int, Record]:
        """Of the last decision, by worker id."""
        return self._records

    @property
    def step(self) -> int:
        """Updates applied or being applied."""
        return self._position.step

    @property
    def settled(self) -> bool:
        """Whether this worker is a member of a generation and its settle is done here."""
        return self._plan is not None and self._entered

    @property
    def next_gather(self) -> Key:
        """Key of the decision that answers the application's next `GatherAsked`."""
        if self._unasked is not None:
            return self._unasked.key
        return Key(self._position.step, self._position.seq + 1)

    @property
    def prepared(self) -> int:
        """Generation of the newest prepared plan that is held, 0 if none."""
        return max(self._prepared, default=0)

    @property
    def held(self) -> frozenset[int]:
        """Lanes of the next step that have been computed here."""
        return frozenset(self._held)

    @property
    def gradient_step(self) -> int:
        """The next step, if its whole reduced gradient is held here; else 0."""
        return self._gradient_step

    def handle(self, now_ns: int, event: StepEvent) -> list[StepEffect]:
        """Take in one event; the effects are to be carried out in order. `now_ns` is not used: no step has a timer."""
        phases, name, reach = _BY_EVENT[type(event)]
        if self._phase not in phases:
            if isinstance(event, _MUST_FIT):
                raise InvariantViolation(f"expected no {name[1:]} while {self._phase}, got {event}")
            return []
        before = self._phase
        handler: Callable[[Any], list[StepEffect]] = getattr(self, name)
        effects = handler(event)
        if self._phase != before and self._phase not in reach:
            raise InvariantViolation(f"{before} -> {self._phase} on {event}")
        return effects

    # ---- plans

    def _plan_arrived(self, event: PlanArrived) -> list[StepEffect]:
        if event.plan.generation <= self._generation or not event.plan.has(self.me):
            return []
        return self._take(event.plan)

    def _prepared_arrived(self, event: PreparedArrived) -> list[StepEffect]:
        if event.plan.generation <= self._generation:
            return []
        self._prepared[event.plan.generation] = event.plan
        if self._phase in _OUTSIDE:
            return self._follow_switch()
        return []

    def _take(self, plan: Plan) -> list[StepEffect]:
        """Leave the old generation and state what is held in the new one."""
        effects: list[StepEffect] = []
        if self._plan is not None:
            effects.append(Leave(self._plan.generation, plan.reason))
        self._plan, self._generation = plan, plan.generation
        self._forget_older()
        self._arrived = {}
        self._entered = self._copied = False
        if self._phase is not Phase.UPDATING:
            self._phase = Phase.SETTLING
        digest = self._digest if self._position.step == 0 else ""
        holding = Holding(self._position, self._records, self._gradient_step, digest)
        return [*effects, Open(plan), SendHolding(plan.generation, holding)]

    def _forget_older(self) -> None:
        self._prepared = {g: p for g, p in self._prepared.items() if g > self._generation}
        self._holdings = {g: h for g, h in self._holdings.items() if g >= self._generation}
        if self._switch is not None and self._switch.generation <= self._generation:
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
        effects: list[StepEffect] = [] if self._plan is None else [Leave(self._plan.generation, plan.reason)]
        self._plan, self._generation = None, plan.generation
        self._forget_older()
        self._phase = Phase.LEFT
        return [*effects, LeftPlan(plan.generation)]

    # ---- healing: following the members without being one

    def _followed(self, event: Followed) -> list[StepEffect]:
        effects = self._move(event.position, event.records)
        self._asked = None
        return effects + self._follow_switch()

    def _follow_switch(self) -> list[StepEffect]:
        plan = self._agreed_switch(self._records) if self._position.seq == 0 else None
        return self._take(plan) if plan is not None and plan.has(self.me) else []

    # ---- settle

    def _holding_arrived(self, event: HoldingArrived) -> list[StepEffect]:
        if event.generation < self._generation:
            return []
        self._holdings.setdefault(event.generation, {}).setdefault(event.worker_id, event.holding)
        # One of a prepared generation waits, though it proves the switch: this worker may be a joiner's donor, and the
        # joiner gets nothing from one that has not decided the step itself.
        settling = event.generation == self._generation and self._phase is Phase.SETTLING
        return self._settle() if settling else []

    def _settle(self) -> list[StepEffect]:
        holdings = self._stated()
        if len(holdings) < len(self._members()):
            return []
        donors, fetchers = must_fetch(holdings)
        top, records = holdings[donors[0]].position, holdings[donors[0]].records
        mine = self.me.worker_id
        if mine in fetchers and not self._copied:
            self._phase = Phase.FETCHING
            return [FetchState(self._generation, top, donors)]
        if self._position != top:
            return self._roll_forward(top, records)
        serve = mine in donors and fetchers
        effects: list[StepEffect] = [ServeState(self._generation, top, fetchers)] if serve else []
        return effects + self._enter()

    def _members(self) -> tuple[int, ...]:
        if self._plan is None:
            raise InvariantViolation(f"no plan while {self._phase}")
        return self._plan.worker_ids

    def _stated(self) -> dict[int, Holding]:
        """The members' holdings of this generation that have come so far."""
        stated = self._holdings.get(self._generation, {})
        return {i: stated[i] for i in self._members() if i in stated}

    def _roll_forward(self, top: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Take the one decision that is missing here with the records that were handed over."""
        effects = self._move(top, records)
        if top.seq == 0:
            self._asked = None
            self._phase = Phase.UPDATING
            return [*effects, Update(top.step, dict(records))]
        gathered = Gathered(top, dict(records))
        if isinstance(self._asked, GatherAsked):
            self._asked = None
            effects.append(gathered)
        else:
            self._unasked = gathered
        return effects + self._enter()

    def _state_copied(self, event: StateCopied) -> list[StepEffect]:
        stated = self._stated()
        top = max(h.position for h in stated.values())
        fits = (event.generation, event.position) == (self._generation, top)
        check(fits, f"expected the state of {top} in generation {self._generation}, got {event}")
        moved = event.position != self._position
        effects = self._move(event.position, event.records)
        if moved:
            self._asked = None
            effects.append(Discard(event.position.step))
        else:
            # Another initial state: what was computed from one's own counts for nothing.
            self._held, self._gradient_step = set(), 0
            effects.append(Discard(event.position.step + 1))
        if event.position.step == 0:
            self._digest = stated[must_fetch(stated)[0][0]].digest
        self._copied = True
        return effects + self._settle()

    def _enter(self) -> list[StepEffect]:
        self._entered = True
        self._phase = Phase.IDLE
        return [Entered(self._generation, self._position.step), *self._resume()]

    def _resume(self) -> list[StepEffect]:
        """Do what the application waits for."""
        asked = self._asked
        if isinstance(asked, StepAsked):
            return self._begin_step()
        if isinstance(asked, GatherAsked):
            self._phase = Phase.GATHERING
            return [SendRecord(self._generation, self.next_gather, Record(self.prepared, asked.payload))]
        return []

    # ---- a step

    def _asked_for(self, event: StepAsked | GatherAsked) -> list[StepEffect]:
        check(self._asked is None, f"{event} before {self._asked} was answered")
        if isinstance(event, GatherAsked) and self._unasked is not None:
            gathered, self._unasked = self._unasked, None
            return [gathered]
        self._asked = event
        return self._resume() if self._phase is Phase.IDLE else []

    def _my_lanes(self) -> tuple[int, ...]:
        if self._plan is None:
            raise InvariantViolation(f"no plan while {self._phase}")
        return tuple(sorted(lane for s in self._plan.seats if s.worker_id == self.me.worker_id for lane in s.lanes))

    def _begin_step(self) -> list[StepEffect]:
        missing = tuple(lane for lane in self._my_lanes() if lane not in self._held)
        step = self._position.step + 1
        if missing:
            self._phase = Phase.COMPUTING
            return [Compute(step, missing)]
        self._phase = Phase.REDUCING
        return [Reduce(self._generation, step)]

    def _lane_done(self, event: LaneDone) -> list[StepEffect]:
        if event.step != self._position.step + 1:
            return []
        self._held.add(event.lane)
        if self._phase is Phase.COMPUTING and self._held.issuperset(self._my_lanes()):
            return self._begin_step()
        return []

    def _gradient_reduced(self, event: GradientReduced) -> list[StepEffect]:
        if event.step != self._position.step + 1:
            return []
        self._gradient_step = event.step
        if self._phase is not Phase.REDUCING or event.generation != self._generation:
            return []
        self._phase = Phase.AGREEING
        return [SendRecord(self._generation, Key(event.step, 0), Record(self.prepared, event.payload))]

    def _record_arrived(self, event: RecordArrived) -> list[StepEffect]:
        if self._plan is None or event.generation != self._generation or event.key <= self._position:
            return []
        if event.worker_id not in self._plan.worker_ids:
            return []
        self._arrived.setdefault(event.key, {}).setdefault(event.worker_id, event.record)
        if self._phase is Phase.AGREEING:
            key = Key(self._position.step + 1, 0)
        elif self._phase is Phase.GATHERING:
            key = self.next_gather
        else:
            return []
        records = self._arrived.get(key, {})
        return self._decide(key, dict(records)) if self._complete(records) else []

    def _complete(self, records: Mapping[int, Record]) -> bool:
        """Whether all members have contributed. Apart, so that a test can break it and the simulator must notice."""
        return len(records) == len(self._members())

    def _decide(self, key: Key, records: dict[int, Record]) -> list[StepEffect]:
        effects = self._move(key, records)
        self._asked = None
        if key.seq == 0:
            self._switch = self._agreed_switch(records)
            self._phase = Phase.UPDATING
            return [*effects, Update(key.step, records)]
        self._phase = Phase.IDLE
        return [*effects, Gathered(key, records)]

    def _move(self, position: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Set the position; a decision beyond (s, 0) proves that every member had decided (s, 0)."""
        if position.step != self._position.step:
            self._held, self._gradient_step = set(), 0
        self._unasked = None
        self._position, self._records = position, records
        self._arrived = {k: r for k, r in self._arrived.items() if k > position}
        proven = position.step if position.seq else position.step - 1
        if proven <= self._released:
            return []
        self._released = proven
        return [Release(proven)]

    def _updated(self, event: Updated) -> list[StepEffect]:
        check(event.step == self._position.step, f"updated to {event.step}, decided {self._position.step}")
        effects: list[StepEffect] = [Discard(event.step)]
        if self._switch is not None:
            plan, self._switch = self._switch, None
            self._phase = Phase.SETTLING
            return effects + self._change_over(plan)
        if self._entered:
            self._phase = Phase.IDLE
            return effects
        self._phase = Phase.SETTLING
        return effects + self._settle()
