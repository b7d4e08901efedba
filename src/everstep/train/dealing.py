"""A worker's part in a state whose optimizer's part the members of a pool have divided: who takes which blocks of a
step's gradient, what they take to its step here, which parts are updated, and the exchange of the parameters after
that."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from everstep.base.extents import NONE, WHOLE, Extents, Runs
from everstep.base.plan import Plan
from everstep.exact.dealt import Dealt
from everstep.exact.divisible import keeps_any
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Holds, StepEvent, Takes
from everstep.train.view import WorkerView


class Dealing:
    """One worker's."""

    def __init__(self, view: WorkerView, say: Callable[[StepEvent], None], came: Callable[[], None]) -> None:
        """say: tells the driver something during an operation. came: called when the parameters of an update have come
        from all."""
        self._view, self._say, self._came = view, say, came
        self._plan: tuple[int, Plan] | None = None  # the step that was reduced last, and in which plan
        self._making: set[int] = set()  # stages for which the optimizer kept nothing before that step
        self._fresh: dict[
            int, frozenset[nn.Parameter]
        ] = {}  # by stage: without state, and with a gradient in that step
        self._stateless: set[nn.Parameter] = set()  # have been updated, and had no state after that
        self._moved: set[int] = set()  # stages of which a joiner has other segments than it follows
        self._found: dict[int, tuple[tuple[int, int], Dealt]] = {}  # by stage: of generation and step

    def _mine(self, plan: Plan) -> list[int]:
        """Own stages that are divided."""
        return sorted(plan.divided_stages.intersection(plan.stages_of(self._view.me)))

    def _known(self, stage: int) -> bool:
        """Whether the optimizer keeps anything yet."""
        optimizer = self._view.stages[stage].state.optimizer
        return optimizer is not None and keeps_any(optimizer)

    def _dealt(
        self, plan: Plan, number: int, stage: int, gradients: frozenset[nn.Parameter] = frozenset()
    ) -> Dealt | None:
        """A stage as it is divided in an update; None if all members update all of it. All say the same: the first
        update makes state, of which the gradients tell, unless the optimizer keeps different things for different
        parameters, or nothing at all; what has none then is updated by all from there on."""
        replica, at = self._view.stages[stage], (plan.generation, number)
        if not self._known(stage):
            kind = replica.update.kind
            makes = kind is not None and kind.uniform and kind.state_bytes > 0
            return Dealt(replica.state, plan, stage, self._view.me, gradients) if makes else None
        if stage not in self._found or self._found[stage][0] != at:
            self._found[stage] = at, Dealt(replica.state, plan, stage, self._view.me)
        return self._found[stage][1]

    def _tied(self, stage: int) -> set[int]:
        """Numbers of the gradient's entries that other stages use, too."""
        return {place.entry for tied in self._view.stages[stage].spec.ties for place in tied.own}

    def divide(self, plan: Plan, number: int, stage: int) -> None:
        """Say who takes which blocks of a step's gradient, as soon as the state is that of the step before. Who has the
        optimizer's state of a segment takes its blocks; while there is none yet, all take all."""
        if stage not in self._mine(plan):
            return
        replica, takes = self._view.stages[stage], None
        dealt = self._dealt(plan, number, stage) if self._known(stage) else None
        if dealt is not None:
            takes = dealt.takers(replica.layout, self._tied(stage))
        self._view.transport.divide(stage, number, takes, frees=self._view.config.zero.stage > 1)

    def reduced(self, plan: Plan, number: int, present: Mapping[int, frozenset[nn.Parameter]] = {}) -> None:
        """The gradient of a step is there. Of one that makes state nobody can say yet what it takes forward. present:
        parameters that have a gradient, by stage."""
        self.follow(plan, number)
        self._moved, self._fresh = set(), {k: self._without_state(k, found) for k, found in present.items()}
        dealt = {stage: self._dealt(plan, number, stage) for stage in self._mine(plan)}
        makes = self._making | {k for k, fresh in self._fresh.items() if fresh - self._stateless}
        takes = {k: NONE if k in makes else one.made() for k, one in dealt.items() if one is not None}
        if takes:
            self._say(Takes(number, takes))

    def _without_state(self, stage: int, parameters: frozenset[nn.Parameter]) -> frozenset[nn.Parameter]:
        """Those of these parameters for which the optimizer keeps nothing."""
        optimizer = self._view.stages[stage].state.optimizer
        groups = optimizer.param_groups if optimizer is not None else ()
        updated = parameters.intersection(p for group in groups for p in group["params"])
        return frozenset(p for p in updated if optimizer is not None and not optimizer.state.get(p))

    def of(self, number: int, stage: int, gradients: frozenset[nn.Parameter] = frozenset()) -> Dealt | None:
        """The parts of a stage that this worker updates, in the plan in which the step was reduced; None if these are
        all. gradients: parameters that have one."""
        plan = self._plan[1] if self._plan is not None and self._plan[0] == number else None
        return self._dealt(plan, number, stage, gradients) if plan is not None and stage in self._mine(plan) else None

    def updated(self, number: int) -> None:
        """The step's update has been made, or was left out."""
        plan = self._plan[1] if self._plan is not None and self._plan[0] == number else None
        held: dict[int, Extents] = {}
        for stage, replica in self._view.stages.items() if plan is not None else ():
            made, there = replica.update.dealt, self.of(number, stage)
            if made is not None:
                held[stage] = made.made()
                self._stateless |= self._without_state(stage, self._fresh.get(stage, frozenset()))
            elif there is not None:
                held[stage] = WHOLE if stage in self._making else there.spread()
        if held:
            self._say(Holds(number, {**self._view.driver.machine.held, **held}))

    def spread(self, operation: do.Spread) -> Holds:
        """Give the parameters that were updated here to those who have not, and take those of others, which are nobody
        else's word before all have come. Raises: CollectiveAborted."""
        view, plan, number = self._view, operation.plan, operation.step
        held, moved = dict(view.driver.machine.held), False
        view.phase("update", number, plan)
        for stage in self._mine(plan):
            one = view.stages[stage].update.dealt
            if one is not None:
                view.transport.channel.spread(number, stage, one.portions())
                held[stage], moved = one.spread(), moved or one.moved
                one.release()
        self._came()
        return Holds(number, held, moved)

    # ---- for joiners, and as one

    def segments(self, number: int) -> dict[int, Runs]:
        """Segments of the optimizer's state whose gradients of a step are here, by stage, where not all."""
        plan = self._plan[1] if self._plan is not None and self._plan[0] == number else None
        mine = self._mine(plan) if plan is not None else []
        there = (
            {k: plan.shard(self._view.me, k).segments for k in mine if self.of(number, k)} if plan is not None else {}
        )
        return {k: segments for k, segments in there.items() if segments is not None}

    def fed(self, stage: int, segments: Runs, rest: bool) -> Runs:
        """Blocks of the step's gradient that a joiner is fed for these segments; rest: and for all that is not dealt
        out, which is everything while the optimizer keeps nothing."""
        replica = self._view.stages[stage]
        if not self._known(stage):
            return ((0, replica.layout.n_blocks),) if rest else ()
        plan = Plan(0, "", (), (), 0)
        return Dealt(replica.state, plan, stage, self._view.me).fed(replica.layout, self._tied(stage), segments, rest)

    def follow(self, plan: Plan, number: int) -> None:
        """A step will be applied in this plan; called before that, and by a joiner for the plan with its parts."""
        self._plan = number, plan
        self._making = {stage for stage in self._mine(plan) if not self._known(stage)}

    def followed(self, plan: Plan, number: int) -> dict[int, Extents]:
        """Blocks of the stages of which this joiner has a part, once it has applied the step: of parameters that others
        update, it has none; and nothing from a step on that moves segments, since it is fed the gradients of others."""
        dealt = {k: self._view.stages[k].update.dealt or self.of(number, k) for k in self._mine(plan)}
        self._moved |= {k for k, one in dealt.items() if one is not None and k not in self._making and one.moved}
        return {k: WHOLE if one is None else NONE if k in self._moved else one.made() for k, one in dealt.items()}

    def forget(self) -> None:
        """The state has jumped: a joiner has copied its parts, anew perhaps."""
        self._moved = set()
