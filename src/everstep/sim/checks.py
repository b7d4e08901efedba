"""What must be true whatever happens: the promises, checked at every step of a simulation.

They look at what the workers do from outside and share no code with the machines under test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from everstep.base.plan import WorkerKey
from everstep.protocol.settling import sound_limit
from everstep.protocol.step_types import Holding, Key, Record
from everstep.sim.effects import Effects
from everstep.sim.exact import Corruption, Exact
from everstep.sim.model import PLANES, Blocks, SimJob
from everstep.sim.promise import require
from everstep.sim.records import SimRecords
from everstep.sim.taint import Taint


@dataclass(frozen=True)
class Views:
    """What is to be seen of the workers. `holders`: (step, stage) that live, reachable workers which follow some plan
    have, or would have with one more decision; `positions`: of all live workers that do; `settled`: of the live ones
    that have entered a generation.
    """

    holders: Callable[[], Mapping[WorkerKey, Collection[tuple[int, int]]]]
    positions: Callable[[], Mapping[WorkerKey, Key]]
    settled: Callable[[int], Mapping[WorkerKey, Key]]


class Checks:
    """The promises, over one simulation: each by itself, and here what concerns several of them."""

    def __init__(self, job: SimJob, views: Views, corruption: Corruption) -> None:
        self.job = job
        self.views = views
        self.corruption = corruption
        self.exact = Exact(job, corruption)
        self.records = SimRecords()
        self.taint = Taint(self.records, corruption)
        self.effects = Effects()
        self.lost_everything = 0
        self.given_up: set[WorkerKey] = set()
        self.newest = 0  # generation that anybody has entered

    def decision(self, generation: int, key: Key, records: Mapping[int, Record], handed: bool) -> None:
        """A worker took a decision; `handed`: with records of an older generation that a peer gave it."""
        made_in = self.records.made_in(generation, key, records)
        fits = made_in <= generation if handed else made_in == generation
        require(fits, "P3", f"{key} decided in generation {generation} with records of {made_in}")
        self.together(generation)
        plan = self.records.plans[made_in]
        needed = key.step if key.seq else key.step - 1
        positions = self.views.positions()
        stale = made_in < self.newest  # members may have gone back since: their records show where they were
        behind = [m.key for m in plan.members if not stale and positions.get(m.key, key).step < needed]
        require(not behind, "P2", f"{key} was decided while members {behind} had not decided step {needed}")
        if key.seq == 0:
            votes = [self.records.vote(r.payload) for r in records.values()]
            stale_votes = [v for v in votes if v.generation != made_in]
            require(not stale_votes, "P3", f"{key}, made in {made_in}, bears {stale_votes}")
            who = tuple(sorted(v.worker_id for v in votes))
            require(who == plan.worker_ids, "P3", f"{key} decided by {who}, the plan says {plan.worker_ids}")
            lanes = sorted(lane for v in votes for lane in v.lanes)
            needed_lanes = list(range(self.job.lanes * self.job.stages))
            require(lanes == needed_lanes, "P2", f"step {key.step} committed with lanes {lanes}")
            sums = {one for v in votes for one in v.sums}
            require(len(sums) == self.job.stages, "P1", f"step {key.step}: gradients differ or are missing")
            self.effects.commit(key.step)

    def entered(self, who: WorkerKey, generation: int, step: int, held: Mapping[int, Blocks]) -> None:
        """A worker goes on in a generation from the state of `step`, which it holds of these stages."""
        self.newest = max(self.newest, generation)
        whole = {stage for stage, state in held.items() if None not in state}
        missing = set(self.records.plans[generation].stages_of(who.worker_id)) - whole
        require(not missing, "P1", f"{who} enters {generation} at step {step} without stages {sorted(missing)}")
        self.together(generation)
        if self.job.stages > 1:
            self._newest_possible(who, generation, step)
        floor = self.effects.floor
        if self.taint.went_back(who, generation, step, held):
            self.effects.back(step)
            return
        if step >= floor or generation < self.newest:  # one that slept through a change gets nowhere in an old one
            return
        gone_on = self.views.settled(generation)  # who entered earlier may have come to later steps since
        holders = {k: held for k, held in self.views.holders().items() if k not in self.given_up and k not in gone_on}
        there = {one for held in holders.values() for one in held if one[0] >= floor}
        kept = sorted({at for at, _ in there if all((at, stage) in there for stage in range(self.job.stages))})
        require(
            not kept,
            "P2",
            f"{who} enters {generation} at step {step}, {floor} was released and {kept} are held: {holders}",
        )
        self.lost_everything += 1

    def _newest_possible(self, who: WorkerKey, generation: int, step: int) -> None:
        """Nobody goes back further than the members' holdings make it necessary, and nobody to what is not there."""
        plan, said = self.records.plans[generation], self.records.holdings[generation]
        limit = sound_limit(said)

        def there(at: int, stage: int) -> bool:
            top = limit is None and any(h.position == Key(at, 0) and h.records for h in said.values())
            live = any(
                stage in h.stages
                and (h.position.step == at or (top and stage in h.gradient_stages and h.gradient_step == at))
                for h in said.values()
            )
            pool = [s.worker_id for s in plan.pool(stage)]
            kept = any((stage, at) in h.snapshots for h in said.values())
            return live or kept or all(at in said[i].disk for i in pool) or self._in_parts(said, at, stage)

        steps = range(1 + (self.job.steps if limit is None else limit))
        newest = max(at for at in steps if at == 0 or all(there(at, k) for k in range(plan.stages)))
        require(step == newest, "P2", f"{who} enters {generation} at step {step}; the newest in all is {newest}")

    def _in_parts(self, said: Mapping[int, Holding], at: int, stage: int) -> bool:
        """Whether what the members have of a stage at a step is together all of it."""
        live = [h.parts[stage] for h in said.values() if h.position.step == at and stage in h.parts]
        kept = [h.kept_parts[stage, at] for h in said.values() if (stage, at) in h.kept_parts]
        blocks = {k for part in live + kept for lo, hi in part.spans(PLANES) for k in range(lo, hi)}
        return len(blocks) == sum(n for _, n in PLANES)

    def together(self, generation: int) -> None:
        """Those who have entered a generation are at most one decision apart, whatever their stages."""
        positions = self.views.settled(generation)
        if not positions:
            return
        low, high = min(positions.values()), max(positions.values())
        by_gather = low.step == high.step and high.seq - low.seq <= 1
        by_update = low.step + 1 == high.step and high.seq == 0
        require(by_gather or by_update, "P1", f"members of generation {generation} are apart: {positions}")

    def evicted(self, who: WorkerKey, excused: bool) -> None:
        """A worker was given up; `excused`: members are left, as far as the coordinator can know, or its host alone has
        been silent for so long that it must be taken for gone. Then it is no loss."""
        if excused:
            self.given_up.add(who)

    def finish(self) -> None:
        """The job is said to be completed."""
        require(bool(self.exact.finals), "P1", "completed without a result")
        missing = [s for s in range(1, self.job.steps + 1) if s not in self.effects.effects]
        require(not missing, "P2", f"completed, but the effects of steps {missing} never left")
