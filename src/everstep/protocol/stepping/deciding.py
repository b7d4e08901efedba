"""How decisions are taken, and how the step after one ends: applied, refused or saved. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.errors import check
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import (
    Discard,
    Gathered,
    Holds,
    Key,
    Record,
    RecordArrived,
    StepDecided,
    StepEffect,
    StepSaved,
    Updated,
    UpdateRefused,
)
from everstep.protocol.stepping.contributing import Contributing
from everstep.protocol.stepping.entering import Entering
from everstep.protocol.stepping.known import Known
from everstep.protocol.stepping.switching import Switching


class Deciding:
    """Takes a decision when the records of all members have come, and ends a step when it has been applied."""

    def __init__(self, known: Known, contributing: Contributing, entering: Entering, switching: Switching) -> None:
        self._known = known
        self._contributing = contributing
        self._entering = entering
        self._switching = switching

    def record_arrived(self, event: RecordArrived) -> list[StepEffect]:
        known, plans, decisions = self._known, self._known.plans, self._known.decisions
        if plans.plan is None or event.generation != plans.generation:
            return []
        if self._entering.entered and event.key <= decisions.position:  # before, this worker may yet go back behind it
            return []
        if event.worker_id not in plans.plan.worker_ids:
            return []
        decisions.arrived(event)
        if known.phase is Phase.AGREEING:
            key = Key(known.step + 1, 0)
        elif known.phase is Phase.GATHERING:
            key = decisions.next_gather
        else:
            return []
        records = decisions.given(key)
        return self._decide(key, records) if self._complete(records) else []

    def _complete(self, records: Mapping[int, Record]) -> bool:
        return len(records) == len(self._known.plans.current.members)

    def _decide(self, key: Key, records: dict[int, Record]) -> list[StepEffect]:
        known = self._known
        effects = known.take(key, records)
        self._contributing.answered()
        if key.seq == 0:
            known.held.becomes(known.next.gradients)
            known.plans.decide(known.plans.agreed(records))
            known.goes(Phase.UPDATING)
            return [*effects, StepDecided(key.step, records)]
        known.goes(Phase.IDLE)
        return [*effects, Gathered(key, records)]

    def holds(self, event: Holds) -> list[StepEffect]:
        """This worker has updated its blocks, or has got those of others."""
        if event.step == self._known.step:
            self._known.held.becomes(event.blocks)
        return []

    def updated(self, event: Updated) -> list[StepEffect]:
        """The step has been applied. If a switch was decided, follow the prepared plan."""
        known, switch = self._known, self._known.plans.switch
        check(event.step == known.step, f"updated to {event.step}, decided {known.step}")
        done = Discard(event.step)
        if switch is None and self._entering.entered:
            mine = known.plans.current.stages_of(known.me.worker_id)
            known.goes(Phase.LACKING if any(map(known.lacks, mine)) else Phase.IDLE)
            return [done]
        known.goes(Phase.SETTLING)
        if switch is None:
            return [done, *self._entering.settle()]
        return [done, *self._switching.change_over(switch)]

    def refused(self, event: UpdateRefused) -> list[StepEffect]:
        """The records of a decision show that states differ: stop until all members have settled at an older step."""
        known = self._known
        if known.phase is Phase.UPDATING:
            known.take_back(intact=event.intact)
            self._contributing.asks_again()
        known.plans.decide(None)
        self._entering.again()
        known.goes(Phase.SETTLING)
        if event.intact:  # sums of lanes may have taken in those of others by now
            known.next.is_done_again(known.step + 1)
            return [known.void()]
        known.doubt(event.sound)
        return []

    def saved(self, event: StepSaved) -> list[StepEffect]:
        """All members have written their parts of the step's checkpoint."""
        return self._known.decisions.prove(event.step) if event.step == self._known.step else []
