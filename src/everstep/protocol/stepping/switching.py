"""How a worker changes plans: by order of the coordinator, by agreement of all members, or as a joiner. Pure."""

from __future__ import annotations

from everstep.base.extents import WHOLE
from everstep.base.plan import Plan
from everstep.protocol.step_phases import OUTSIDE, Phase
from everstep.protocol.step_types import (
    Followed,
    Leave,
    LeftPlan,
    PlanArrived,
    PreparedArrived,
    Regroup,
    SendHolding,
    StepEffect,
)
from everstep.protocol.stepping.contributing import Contributing
from everstep.protocol.stepping.entering import Entering
from everstep.protocol.stepping.known import Known


class Switching:
    """Leaves one generation and begins the next."""

    def __init__(self, known: Known, contributing: Contributing, entering: Entering) -> None:
        self._known = known
        self._contributing = contributing
        self._entering = entering
        self._untouched = True  # at step 0 the state is what this worker has built: no plan came, nothing was copied

    def plan_arrived(self, event: PlanArrived) -> list[StepEffect]:
        """The coordinator sends a plan that takes effect at once."""
        plans = self._known.plans
        if event.plan.generation <= plans.generation or not event.plan.has(plans.me):
            return []
        return self._take(event.plan)

    def prepared_arrived(self, event: PreparedArrived) -> list[StepEffect]:
        """The coordinator sends a plan that all members may switch to."""
        if event.plan.generation <= self._known.plans.generation:
            return []
        self._known.plans.prepare(event.plan)
        return self._follow_switch() if self._known.phase in OUTSIDE else []

    def followed(self, event: Followed) -> list[StepEffect]:
        """A joiner has replayed a step; perhaps the members have switched after it to a plan that includes the
        joiner."""
        effects = self._known.move(event.position, event.records)
        self._known.held.becomes({k: event.held.get(k, WHOLE) for k in event.stages})
        self._known.held.counts_in(event.generation)
        self._contributing.answered()
        self._untouched = False
        return effects + self._follow_switch()

    def _follow_switch(self) -> list[StepEffect]:
        plans, decisions = self._known.plans, self._known.decisions
        plan = plans.agreed(decisions.records) if decisions.position.seq == 0 else None
        return self._take(plan) if plan is not None and plan.has(plans.me) else []

    def change_over(self, plan: Plan) -> list[StepEffect]:
        """Switch to a prepared plan, as was decided."""
        known, plans = self._known, self._known.plans
        if plan.has(plans.me):
            return self._take(plan)
        effects = self._leave(plan)
        plans.follow(plan.generation, None)
        known.goes(Phase.LEFT)
        return [*effects, LeftPlan(plan.generation)]

    def _leave(self, plan: Plan) -> list[StepEffect]:
        """Leave the present generation for this plan."""
        before = self._known.plans.plan
        return [] if before is None else [Leave(before.generation, plan.reason)]

    def _take(self, plan: Plan) -> list[StepEffect]:
        """Leave the old generation, and state what is held in the new one."""
        known, held = self._known, self._known.held
        fresh, self._untouched = self._untouched, False
        effects = self._leave(plan)
        known.plans.follow(plan.generation, plan)
        self._entering.regroup()
        known.decisions.regroup()
        if plan.sound >= 0 and not 0 <= held.sound <= plan.sound:
            known.doubt(plan.sound)
        stale = not fresh and held.since < plan.voided
        held.counts_in(plan.generation)
        if stale:
            known.lose_all()
        elif known.step == 0 and (held.sound < 0 or fresh):
            built = dict.fromkeys(plan.stages_of(known.me.worker_id), WHOLE)
            held.becomes({**built, **({} if fresh else held.blocks)})
        if known.phase is not Phase.UPDATING:
            known.goes(Phase.SETTLING)
        return [*effects, Regroup(plan), SendHolding(plan.generation, known.holding())]
