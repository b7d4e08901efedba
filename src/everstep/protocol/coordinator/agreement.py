"""What was agreed: the plan in force, the prepared one, who has settled, and why the plan cannot go on. Pure."""

from __future__ import annotations

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.errors import InvariantViolation, check
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.coordinator.desk import Desk
from everstep.protocol.coordinator.membership import Membership, Worker

NO_PLAN = Plan(generation=0, reason="", cause=Cause.UNKNOWN, members=(), seats=(), lanes=0)


class Agreement:
    """Whom the workers follow.

    plan: in force; `NO_PLAN` before the first. prepared: to which the members are to switch. generation: the highest
    that was ever given out or heard of. switched: the prepared generation whose beginning this life of the coordinator
    has told. entered: worker ids of the members that have settled in the plan in force. broken: why it cannot go on;
    empty if it can.
    """

    def __init__(self, desk: Desk, membership: Membership) -> None:
        self.version = 0
        self.plan = NO_PLAN
        self.prepared: Plan | None = None
        self.generation = 0
        self.switched = 0
        self.entered: set[int] = set()
        self.broken: list[Why] = []
        self._desk, self._membership = desk, membership

    # ---- lookups

    @property
    def newest(self) -> Plan:
        """The prepared plan if there is one, else the plan in force."""
        return self.prepared or self.plan

    @property
    def running(self) -> bool:
        """Whether members train by the plan, as far as is known."""
        return bool(self.entered) and not self.broken

    def in_any_plan(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the plan in force, or of the prepared one."""
        return self.plan.has(key) or self.is_prepared(key)

    def is_prepared(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the prepared plan, if there is one."""
        return self.prepared is not None and self.prepared.has(key)

    def owes(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the plan in force that has yet to settle."""
        return self.plan.has(key) and key.worker_id not in self.entered

    def awaits(self, key: WorkerKey) -> bool:
        """Whether a decision may depend on this life's being there: not of a member, unless the plan is to change."""
        return bool(self.broken) or not self.plan.has(key)

    def survivors(self) -> list[Worker]:
        """The members of the plan in force that live, in id order."""
        return [w for w in (self._membership.alive(m.key) for m in self.plan.members) if w is not None]

    def empty_handed(self) -> set[int]:
        """Who joined in this plan and has not settled: they hold no state yet."""
        return set(self.plan.joining) - self.entered

    # ---- plans

    def issue(self, plan: Plan) -> None:
        """Check and journal a new plan; it is in force from here, or prepared."""
        check(plan.generation > self.generation, f"generation {plan.generation} was given out before")
        agents = {}
        for member in plan.members:
            check(not self._membership.is_fenced(member.key), f"evicted worker {member.key} in the plan")
            worker = self._membership.alive(member.key)
            if worker is None:
                raise InvariantViolation(f"worker {member.key} is not known to live")
            if worker.agent_id is not None:
                agents[str(member.worker_id)] = worker.agent_id
        check(bool(plan.members), "a plan needs members")
        check({s.worker_id for s in plan.seats} == set(plan.worker_ids), "every member has a seat, and nobody else")
        for stage in range(plan.stages):
            lanes = sorted(lane for seat in plan.pool(stage) for lane in seat.lanes)
            check(lanes == list(range(plan.lanes)), f"seats must cover each lane of stage {stage} once, got {lanes}")
        self._desk.persist("plan", plan=msgspec.to_builtins(plan), agents=agents)
        self._take(plan, prepared=plan.prepared)

    def adopt(self, plan: Plan) -> None:
        """Workers follow a plan that the journal does not know."""
        self._desk.persist("plan", plan=msgspec.to_builtins(plan), agents={}, adopted=True)
        self._take(plan, prepared=False)

    def _take(self, plan: Plan, *, prepared: bool) -> None:
        self.version += 1
        self.generation = plan.generation
        if prepared:
            self.prepared = plan
        else:
            self.plan, self.prepared, self.entered, self.broken = plan, None, set(), []

    def switch(self, plan: Plan) -> Plan:
        """The members follow the prepared plan. Returns the plan before."""
        self.version += 1
        self._desk.persist("entered", generation=plan.generation)
        old, self.plan, self.prepared, self.entered = self.plan, plan, None, set()
        self.switched = plan.generation
        return old

    # ---- what becomes of the plan

    def enter(self, worker_id: int) -> bool:
        """A worker has settled in the plan in force. Returns whether that is new."""
        if worker_id in self.entered:
            return False
        if not self.entered:  # decisions ask only whether anybody has: a thousand members need not decide each
            self.version += 1
        self.entered.add(worker_id)
        return True

    def break_off(self, why: Why) -> None:
        """The plan in force cannot go on: another one is due."""
        self.version += 1
        self.broken.append(why)

    def forget(self, worker_id: int) -> None:
        """A worker is gone, so it has not settled either."""
        self.entered.discard(worker_id)

    # ---- from the journal

    def replay_plan(self, plan: Plan, *, adopted: bool) -> bool:
        """A plan of a former life of the coordinator. Returns whether it was news."""
        news = plan.generation > self.generation
        if news:
            self._take(plan, prepared=plan.prepared and self.plan is not NO_PLAN and not adopted)
        return news

    def replay_entered(self, generation: int) -> None:
        """The members had switched to the prepared plan."""
        if self.prepared is not None and self.prepared.generation == generation:
            self.plan, self.prepared = self.prepared, None
