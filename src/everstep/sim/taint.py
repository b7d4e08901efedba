"""P1, with flipped bits: what a comparison can show is never built upon, and all go back behind it."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.plan import WorkerKey
from everstep.protocol.settling import sound_limit
from everstep.protocol.step_types import Record
from everstep.sim.exact import Corruption
from everstep.sim.model import Blocks, wrong
from everstep.sim.promise import require
from everstep.sim.records import SimRecords


class Taint:
    """What comparisons have shown, by the records."""

    def __init__(self, records: SimRecords, corruption: Corruption) -> None:
        self.records = records
        self.corruption = corruption

    def applies(self, who: WorkerKey, step: int, records: Mapping[int, Record]) -> None:
        """A worker is about to apply a step, decided by these records."""
        corruption = self.corruption
        if not corruption.due(step):
            return
        copies = self.records.copies(records)
        differing = sorted(stage for stage, states in copies.items() if len(states) > 1)
        require(not differing, "P1", f"{who} applies step {step}, before which stages {differing} differ: {copies}")
        if any(map(wrong, set().union(*copies.values()))):
            corruption.escaped()

    def invalidated(self, who: WorkerKey, sound: int) -> None:
        """A worker has found that states after this step count for nothing."""
        shown = any(
            key.step > sound
            and not key.seq
            and self.corruption.due(key.step)
            and tuple(sorted(given)) == self.records.plans[generation].worker_ids
            and any(len(states) > 1 for states in self.records.copies(given).values())
            for key, made in self.records.exchanged.items()
            for generation, given in made.items()
        )
        require(shown, "P1", f"{who} finds states after step {sound} tainted, but all copies are alike")
        self.corruption.found_by.add(who)

    def went_back(self, who: WorkerKey, generation: int, step: int, held: Mapping[int, Blocks]) -> bool:
        """Whether a member of the generation knew of taint: then it is behind it. Once a plan has told of taint, or a
        member has, nobody goes on from anything that is wrong."""
        sound = sound_limit(self.records.holdings.get(generation, {}))
        told = any(plan.sound >= 0 for number, plan in self.records.plans.items() if number <= generation)
        if sound is not None or told:
            seats = self.records.plans[generation].stages_of(who.worker_id)  # other stages will be dropped
            spoilt = sorted(stage for stage in seats if stage in held and wrong(held[stage]))
            right = not spoilt or self.corruption.unnoticed
            require(right, "P1", f"{who} enters {generation} at step {step} with wrong states of stages {spoilt}")
        if sound is None:
            return False
        require(step <= sound, "P1", f"{who} enters {generation} at step {step}, tainted after {sound}")
        return True
