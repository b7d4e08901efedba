"""What was agreed: the plan in force, the prepared one, who has settled, and why the plan cannot go on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from everstep.base.cause import Why
from everstep.base.errors import InvariantViolation, ProtocolError, check
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.coordinator.desk import Desk
from everstep.protocol.coordinator.membership import Membership, Worker


def plan_to_entry(plan: Plan) -> dict[str, Any]:
    """A plan as JSON-able data."""
    entry: dict[str, Any] = msgspec.to_builtins(plan)
    return entry


def plan_from_entry(entry: dict[str, Any]) -> Plan:
    """Raises: ProtocolError if it is not a plan."""
    try:
        return msgspec.convert(entry, Plan)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"expected a plan in the coordinator's journal: {error}") from None


class Agreement:
    """Whom the workers follow.

    generation: the highest that was ever given out or heard of. switched: the prepared generation whose beginning this
    life of the coordinator has told.
    """

    def __init__(self, desk: Desk, membership: Membership) -> None:
        self.version = 0
        self.plan: Plan | None = None
        self.prepared: Plan | None = None
        self.generation = 0
        self.switched = 0
        self._desk, self._membership = desk, membership
        self._entered: set[int] = set()
        self._broken: list[Why] = []

    # ---- lookups

    @property
    def in_force(self) -> int:
        """Generation of the plan in force, 0 before the first."""
        return self.plan.generation if self.plan is not None else 0

    @property
    def newest(self) -> Plan | None:
        """The prepared plan if there is one, else the plan in force."""
        return self.prepared or self.plan

    @property
    def entered(self) -> AbstractSet[int]:
        """Worker ids of the members that have settled in the plan in force."""
        return self._entered

    @property
    def broken(self) -> Sequence[Why]:
        """Why the plan in force cannot go on; empty if it can."""
        return self._broken

    @property
    def running(self) -> bool:
        """Whether members train by the plan, as far as is known."""
        return self.plan is not None and bool(self._entered) and not self._broken

    def has(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the plan in force."""
        return self.plan is not None and self.plan.has(key)

    def in_any_plan(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the plan in force, or of the prepared one."""
        return self.has(key) or (self.prepared is not None and self.prepared.has(key))

    def owes(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the plan in force that has yet to settle."""
        return self.has(key) and key.worker_id not in self._entered

    def awaits(self, key: WorkerKey) -> bool:
        """Whether a decision may depend on this life's being there: not of a member, unless the plan is to change."""
        return bool(self._broken) or not self.has(key)

    def survivors(self) -> list[Worker]:
        """The members of the plan in force that live, in id order."""
        members = self.plan.members if self.plan is not None else ()
        return [w for w in (self._membership.alive(m.key) for m in members) if w is not None]

    def empty_handed(self) -> set[int]:
        """Who joined in this plan and has not settled: they hold no state yet."""
        return set(self.plan.joining) - self._entered if self.plan is not None else set()

    # ---- plans

    def issue(self, plan: Plan) -> None:
        """Check and journal a new plan; it is in force from here, or prepared."""
        check(plan.generation > self.generation, f"generation {plan.generation} was given out before")
        agents = {}
        for member in plan.members:
            check(not self._membership.is_fenced(member.key), f"evicted worker {member.key} in the plan")
            worker = self._membership.alive(member.key)
            check(worker is not None, f"worker {member.key} is not known to live")
            if worker is not None and worker.agent_id is not None:
                agents[str(member.worker_id)] = worker.agent_id
        check(bool(plan.members), "a plan needs members")
        check({s.worker_id for s in plan.seats} == set(plan.worker_ids), "every member has a seat, and nobody else")
        for stage in range(plan.stages):
            lanes = sorted(lane for seat in plan.pool(stage) for lane in seat.lanes)
            check(lanes == list(range(plan.lanes)), f"seats must cover each lane of stage {stage} once, got {lanes}")
        self._desk.persist("plan", plan=plan_to_entry(plan), agents=agents)
        self.version += 1
        self.generation = plan.generation
        if plan.prepared:
            self.prepared = plan
            return
        self.plan, self.prepared = plan, None
        self._entered, self._broken = set(), []

    def switch(self) -> Plan:
        """The members follow the prepared plan. Returns the plan before."""
        old, plan = self.plan, self.prepared
        if old is None or plan is None:
            raise InvariantViolation("a switch needs a prepared plan")
        self.version += 1
        self._desk.persist("entered", generation=plan.generation)
        self.plan, self.prepared, self._entered = plan, None, set()
        self.switched = plan.generation
        return old

    def adopt(self, plan: Plan) -> None:
        """Workers follow a plan that the journal does not know."""
        self.version += 1
        self.generation = plan.generation
        self._desk.persist("plan", plan=plan_to_entry(plan), agents={}, adopted=True)
        self.plan, self.prepared = plan, None
        self._entered, self._broken = set(), []

    # ---- what becomes of the plan

    def enter(self, worker_id: int) -> bool:
        """A worker has settled in the plan in force. Returns whether that is new."""
        if worker_id in self._entered:
            return False
        if not self._entered:  # decisions ask only whether anybody has: a thousand members need not decide each
            self.version += 1
        self._entered.add(worker_id)
        return True

    def break_off(self, why: Why) -> None:
        """The plan in force cannot go on: another one is due."""
        self.version += 1
        self._broken.append(why)

    def forget(self, worker_id: int) -> None:
        """A worker is gone, so it has not settled either."""
        self._entered.discard(worker_id)

    # ---- from the journal

    def replay_plan(self, plan: Plan, *, adopted: bool) -> bool:
        """A plan of a former life of the coordinator. Returns whether it was news."""
        if plan.generation <= self.generation:
            return False
        self.generation = plan.generation
        if plan.prepared and self.plan is not None and not adopted:
            self.prepared = plan
        else:
            self.plan, self.prepared = plan, None
        return True

    def replay_entered(self, generation: int) -> None:
        """The members had switched to the prepared plan."""
        if self.prepared is not None and self.prepared.generation == generation:
            self.plan, self.prepared = self.prepared, None
