"""The plan that a worker follows, and the one that it may switch to. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.errors import InvariantViolation
from everstep.base.extents import WHOLE, Extents, Sizes
from everstep.base.plan import Plan, WorkerKey
from everstep.placement.shards import share
from everstep.protocol.step_types import Record


class Plans:
    """plan: the present one, None if none. generation: of the plan, or of the newest that left this worker out;
    older ones are over. switch: the prepared plan that all switch to after the update."""

    def __init__(self, me: WorkerKey) -> None:
        self.me = me
        self.plan: Plan | None = None
        self.generation = 0
        self.switch: Plan | None = None
        self._prepared: dict[int, Plan] = {}

    @property
    def prepared(self) -> int:
        """Generation of the newest prepared plan that is held, 0 if none."""
        return max(self._prepared, default=0)

    @property
    def current(self) -> Plan:
        """The present plan. Raises: InvariantViolation if there is none."""
        if self.plan is None:
            raise InvariantViolation(f"worker {self.me} has no plan")
        return self.plan

    def share(self, stage: int, of: Sizes = ()) -> Extents:
        """This worker's share of a stage's state. of: the state's sizes, as far as they are known."""
        return WHOLE if self.plan is None else share(self.plan.shard(self.me.worker_id, stage), of)

    def shares(self, sizes: Mapping[int, Sizes] = {}) -> dict[int, Extents]:
        """This worker's share of each stage of its seats. sizes: of their states, as far as they are known."""
        stages = self.current.stages_of(self.me.worker_id)
        return {stage: self.share(stage, sizes.get(stage, ())) for stage in stages}

    def seats(self) -> set[tuple[int, int]]:
        """(stage, lane) of this worker's seats."""
        plan, mine = self.current, self.me.worker_id
        return {(stage, lane) for stage in plan.stages_of(mine) for lane in plan.lanes_of(mine, stage)}

    def prepare(self, plan: Plan) -> None:
        """Hold a plan that all may switch to once every member holds it."""
        self._prepared[plan.generation] = plan

    def agreed(self, records: Mapping[int, Record]) -> Plan | None:
        """The held plan that all of these records name, if it is newer than the present one."""
        generations = {r.prepared for r in records.values()}
        if len(generations) != 1:
            return None
        return self._prepared.get(generations.pop())

    def decide(self, switch: Plan | None) -> None:
        """Set the plan to switch to after the update."""
        self.switch = switch

    def follow(self, generation: int, plan: Plan | None) -> None:
        """A generation begins, with this worker (plan) or without it (None)."""
        self.plan, self.generation = plan, generation
        self._prepared = {g: p for g, p in self._prepared.items() if g > generation}
        if self.switch is not None and self.switch.generation <= generation:
            self.switch = None
