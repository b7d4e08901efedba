"""What the application asks for, and this worker's part in it: lanes, reduced gradient, record. Pure."""

from __future__ import annotations

from everstep.base.errors import InvariantViolation, check
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import (
    GatherWanted,
    GradientReduced,
    Key,
    LaneDone,
    LanesLost,
    LanesNeeded,
    Record,
    ReductionDue,
    SendRecord,
    StepEffect,
    StepLeft,
    StepWanted,
    Takes,
)
from everstep.protocol.stepping.known import Known


class Contributing:
    """Takes a worker from an ask to its record for the decision. asked: what has not been answered yet."""

    def __init__(self, known: Known) -> None:
        self.asked: StepWanted | GatherWanted | None = None
        self._known = known

    def answered(self) -> None:
        """The ask was answered, or is void: the application asks again from the new position."""
        self.asked = None

    def asks_again(self) -> None:
        """The step that was asked for was decided, but not applied."""
        self.asked = StepWanted()

    # ---- the application

    def asked_for(self, event: StepWanted | GatherWanted) -> list[StepEffect]:
        """The application asks for a step or a gather."""
        if self.asked is not None:
            raise InvariantViolation(f"{event} before {self.asked} was answered")
        early = self._known.decisions.answer_early() if isinstance(event, GatherWanted) else None
        if early is not None:
            return [early]
        self.asked = event
        return self.resume() if self._known.phase is Phase.IDLE else []

    def step_left(self, event: StepLeft) -> list[StepEffect]:
        """The application no longer wants its step. It has no gradient yet, so it has contributed nothing."""
        known = self._known
        if isinstance(self.asked, StepWanted):
            self.asked = None
            known.next.lose_lanes(known.next.lanes)
            if known.phase in (Phase.COMPUTING, Phase.REDUCING):
                known.goes(Phase.IDLE)
        return []

    def resume(self) -> list[StepEffect]:
        known, asked = self._known, self.asked
        if isinstance(asked, StepWanted):
            return self._begin_step()
        if isinstance(asked, GatherWanted):
            known.goes(Phase.GATHERING)
            return [self._contribute(known.decisions.next_gather, asked.payload)]
        return []

    def _contribute(self, key: Key, payload: bytes) -> SendRecord:
        plans = self._known.plans
        return SendRecord(plans.generation, key, Record(plans.prepared, payload))

    # ---- a step

    def _begin_step(self) -> list[StepEffect]:
        known, coming, number = self._known, self._known.next, self._known.step + 1
        seats = known.plans.seats()
        awaited = seats - coming.lanes
        if known.plans.current.stages > 1:
            # What a member lacks has to pass through every seat on its way again.
            rerun = {lane for _, lane in seats} if coming.rerun is None else coming.rerun
            strays = {lane for _, lane in awaited} - rerun
            check(not strays, f"lanes {sorted(strays)} of step {number} are lacking, but nobody said so")
            awaited = {(stage, lane) for stage, lane in seats if lane in rerun}
        coming.awaits(awaited)
        if awaited:
            known.goes(Phase.COMPUTING)
            return [LanesNeeded(number, tuple(sorted({lane for _, lane in awaited})))]
        known.goes(Phase.REDUCING)
        return [ReductionDue(known.plans.generation, number)]

    def lane_done(self, event: LaneDone) -> list[StepEffect]:
        known, coming = self._known, self._known.next
        if event.step != known.step + 1:
            return []
        coming.has(event.stage, event.lane)
        if known.phase is not Phase.COMPUTING:
            return []
        coming.awaits(coming.awaited - {(event.stage, event.lane)})
        if coming.awaited:
            return []
        known.goes(Phase.REDUCING)
        return [ReductionDue(known.plans.generation, event.step)]

    def lanes_lost(self, event: LanesLost) -> list[StepEffect]:
        """Results of lanes are lost: the sums that they were part of have been torn apart."""
        if event.step == self._known.step + 1:
            self._known.next.lose_lanes(event.lanes)
        return []

    def takes(self, event: Takes) -> list[StepEffect]:
        """Announces the blocks that the gradient under reduction takes to its step."""
        if event.step == self._known.step + 1:
            self._known.next.will_take(event.blocks)
        return []

    def gradient_reduced(self, event: GradientReduced) -> list[StepEffect]:
        known, plans, coming = self._known, self._known.plans, self._known.next
        takes = coming.said_to_take()
        if event.step != known.step + 1:
            return []
        gradients = coming.gradients
        if event.generation == plans.generation and plans.plan is not None:
            gradients = {**plans.shares(), **takes}
        elif plans.plan is not None and plans.plan.stages > 1:
            return []  # one of a superseded reduction says nothing of the stages that it was of
        elif takes:
            gradients = {**gradients, **takes}
        coming.reduced(event.step, gradients)
        if known.phase is not Phase.REDUCING or event.generation != plans.generation:
            return []
        known.goes(Phase.AGREEING)
        return [self._contribute(Key(event.step, 0), event.payload)]
