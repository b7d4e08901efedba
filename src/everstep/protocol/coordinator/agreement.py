"""The agreed plans, the job's progress and setbacks, recoveries and their duration, and the end. Pure.

States can be lost (all workers that held a stage are gone) or be in doubt (they differ among workers). How far the
members then go back is known when the first of them has settled; it is reported only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.errors import InvariantViolation, check
from everstep.base.plan import Plan, WorkerKey
from everstep.placement.shards import lost_stages, shards_held
from everstep.protocol.coordinator.claims import Claims
from everstep.protocol.coordinator.environment import Environment, listed
from everstep.protocol.coordinator.membership import Membership, Worker
from everstep.protocol.following import PlanName, name_of
from everstep.protocol.messages import JobEnded, SettleAgain, WorkerFailed
from everstep.protocol.step_types import BY_SCRIPT

NO_PLAN = Plan(generation=0, reason="", cause=Cause.UNKNOWN, members=(), seats=(), lanes=0)


class Agreement:
    """The plans that the workers follow.

    plan: in force; `NO_PLAN` before the first. before: in force before that. prepared: the plan that the members will
    switch to. generation: the highest number given out or heard of. switched: the prepared generation whose start this
    life of the coordinator has reported. entered: worker ids of the members that have settled in the plan in force.
    broken: why it cannot go on; empty if it can. claims: plans that workers follow and this coordinator lacks.
    """

    def __init__(self, env: Environment, membership: Membership) -> None:
        self.plan = self.before = NO_PLAN
        self.prepared: Plan | None = None
        self.generation = 0
        self.switched = 0
        self.entered: set[int] = set()
        self.broken: list[Why] = []
        self.claims = Claims(env)
        self._names: dict[int, tuple[Plan, PlanName | None]] = {}
        self._env, self._membership = env, membership

    # ---- lookups

    @property
    def newest(self) -> Plan:
        """The prepared plan if there is one, else the plan in force."""
        return self.prepared or self.plan

    @property
    def running(self) -> bool:
        """Whether members train by the plan, as far as this coordinator knows."""
        return bool(self.entered) and not self.broken

    def in_any_plan(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the plan in force, or of the prepared one."""
        return self.plan.has(key) or self.is_prepared(key)

    def is_prepared(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the prepared plan, if there is one."""
        return self.prepared is not None and self.prepared.has(key)

    def known_as(self, said: PlanName) -> Plan | None:
        """The plan of this name, if it is in force or prepared."""
        for plan in (self.plan, self.prepared):
            if plan is not None and (plan.term, plan.generation) == said.rank:
                if self._names.get(plan.generation, (None,))[0] is not plan:  # once, not for a thousand hellos each
                    newest = [g for g in self._names if g + 1 >= self.plan.generation]
                    self._names = {g: self._names[g] for g in newest} | {plan.generation: (plan, name_of(plan))}
                if self._names[plan.generation][1] == said:
                    return plan
        return None

    def owes(self, key: WorkerKey) -> bool:
        """Whether this life is a member of the plan in force and has not settled yet."""
        return self.plan.has(key) and key.worker_id not in self.entered

    def awaits(self, key: WorkerKey) -> bool:
        """Whether a decision may depend on this life's presence: not if it is a member, unless the plan is to
        change."""
        return bool(self.broken) or not self.plan.has(key)

    def survivors(self) -> list[Worker]:
        """The members of the plan in force that live, in id order."""
        return self._membership.living(m.key for m in self.plan.members)

    def empty_handed(self) -> set[int]:
        """Members that joined in this plan and have not settled: they hold no state yet."""
        return set(self.plan.joining) - self.entered

    # ---- plans

    def issue(self, plan: Plan) -> None:
        """Check and journal a new plan; it is then in force, or prepared."""
        check(plan.generation > self.generation, f"generation {plan.generation} was given out before")
        agents = {}
        for member in plan.members:
            if self._membership.is_fenced(member.key):
                raise InvariantViolation(f"evicted worker {member.key} in the plan")
            worker = self._membership.alive(member.key)
            if worker is None:
                raise InvariantViolation(f"worker {member.key} is not known to live")
            if worker.agent_id is not None:
                agents[str(member.worker_id)] = worker.agent_id
        check_seats(plan)
        self._env.persist("plan", plan=msgspec.to_builtins(plan), agents=agents)
        self._take(plan, prepared=plan.prepared)

    def adopt(self, plan: Plan) -> None:
        """Take a plan that workers follow and the journal lacks."""
        self._env.persist("plan", plan=msgspec.to_builtins(plan), agents={}, adopted=True)
        self._take(plan, prepared=False)

    def _take(self, plan: Plan, *, prepared: bool) -> None:
        self._env.change()
        self.generation = max(plan.generation, self.generation)
        if prepared:
            self.prepared = plan
        else:
            self.before, self.plan, self.prepared, self.entered, self.broken = self.plan, plan, None, set(), []

    def hear_of(self, generation: int) -> None:
        """A worker follows this generation: no other plan will get its number."""
        if generation > self.generation:
            self._env.change()
            self.generation = generation

    def switch(self, plan: Plan) -> Plan:
        """The members now follow the prepared plan. Returns the plan before it."""
        self._env.change()
        self._env.persist("entered", generation=plan.generation)
        self.before, self.plan, self.prepared, self.entered = self.plan, plan, None, set()
        self.switched = plan.generation
        return self.before

    # ---- what becomes of the plan

    def enter(self, worker_id: int) -> bool:
        """A worker has settled in the plan in force. Returns whether that is news."""
        if worker_id in self.entered:
            return False
        self.entered.add(worker_id)
        if len(self.entered) in (1, len(self.plan.members)):  # decisions ask whether anybody has, or all have
            self._env.change()
        return True

    def break_off(self, why: Why, *, alone: bool = False) -> None:
        """The plan in force cannot go on: another one is due. alone: drop the other reasons."""
        self._env.change()
        self.broken = [why] if alone else [*self.broken, why]

    def forget(self, worker_id: int) -> None:
        """A worker is gone, so it no longer counts as settled."""
        self.entered.discard(worker_id)

    # ---- from the journal

    def replay_plan(self, plan: Plan, *, adopted: bool) -> bool:
        """Take a plan of an earlier life of the coordinator. Returns whether it is the newest so far."""
        news = plan.generation > self.generation
        if news:
            self._take(plan, prepared=plan.prepared and self.plan is not NO_PLAN and not adopted)
        return news

    def replay_entered(self, generation: int) -> Plan:
        """The journal says that the members switched to the prepared plan. Returns the plan before it, or none."""
        found = self.prepared
        if found is None or found.generation != generation:
            return NO_PLAN
        self.before, self.plan, self.prepared = self.plan, found, None
        return self.before


def _found_in(said: SettleAgain | WorkerFailed) -> int:
    """Generation in which states were found to differ."""
    return said.decided_in if isinstance(said, SettleAgain) else said.generation


def check_seats(plan: Plan) -> None:
    """Raises: InvariantViolation unless every member has a seat, and the seats cover all lanes."""
    check(bool(plan.members), "a plan needs members")
    check({s.worker_id for s in plan.seats} == set(plan.worker_ids), "every member has a seat, and nobody else")
    for stage in range(plan.stages):
        lanes = sorted(lane for seat in plan.pool(stage) for lane in seat.lanes)
        check(lanes == list(range(plan.lanes)), f"seats must cover each lane of stage {stage} once, got {lanes}")


def stages_lost(agreement: Agreement, worker_ids: Collection[int]) -> list[int]:
    """Stages of the plan in force of which these members together lack blocks. Members that have switched to it and not
    settled yet hold what they held before."""
    plan, before, holding = agreement.plan, agreement.before, {*worker_ids} - agreement.empty_handed()
    late = (holding - agreement.entered).intersection(before.worker_ids if plan.prepared else ())
    return lost_stages(plan, holding - late, shards_held(before, late))


_ALIKE, _MOST_DIGEST = 4, 4096
PHASES = ("notice", "decide", "unblock", "regroup", "settle", "redo", "heal")


class JobProgress:
    """step: the newest step known to be committed. step_times_ms: durations of the last steps. lost_stages: stages
    that lost their whole pool, until their source is reported. sound: states after this step are tainted, and no
    generation whose plan says so was entered yet; -1 if none is. voided: the newest generation that was entered with
    such a plan. told: the newest generation whose start any life of the coordinator has reported. ended: how the job
    has ended, None if it has not."""

    def __init__(self, env: Environment, agreement: Agreement) -> None:
        self.step = self.told = 0
        self.step_times_ms: deque[float] = deque(maxlen=100)
        self.lost_stages: tuple[int, ...] = ()
        self.sound = -1
        self.voided = 0
        self._behind: int | None = None  # step behind which members settled in that generation, if known
        self.ended: JobEnded | None = None
        self._env, self._agreement = env, agreement
        self._fell_from = 0  # the step that had been reached when all state was lost
        self._doubt: Why | None = None  # why all go back
        self._tainted = (0, 0)  # step before which states differed, and generation in which that was found
        self._alike: dict[int, dict[int, str]] = {}  # digests by step and stage
        self._hung: dict[tuple[int, str], int] = {}  # the generation in which a worker hung, by step and phase

    def reached(self, step: int, step_ms: float = 0) -> None:
        """A worker has committed this step; step_ms: its duration, 0 if unknown."""
        self.step = max(self.step, step)
        if step_ms > 0:
            self.step_times_ms.append(step_ms)

    def tell(self, generation: int) -> None:
        self.told = generation

    # ---- set-backs

    def lose(self, stages: Sequence[int]) -> None:
        """These stages have lost their whole pools (none: no stage has)."""
        self.lost_stages = tuple(stages)

    def fall_back(self, step: int) -> bool:
        """All state is lost, except state known to be of `step`; 0 if none is. Returns whether the report waits
        until the number of repeated steps is known."""
        self._fell_from = 0 if step else max(self._fell_from, self.step)
        self.step, self.lost_stages = step, ()
        return self._fell_from > 0

    def in_doubt(self, why: Why, said: SettleAgain | WorkerFailed) -> None:
        """A worker has found tainted states. It may be the only one, and gone before all others have heard of it. Or it
        was found before members settled behind these states, and comes late: then it is over."""
        if _found_in(said) < self.voided and self._behind is not None and self._behind <= said.sound:
            return
        self._doubt = why
        self.sound = said.sound if self.sound < 0 else min(self.sound, said.sound)

    def differ(self, why: Why, said: SettleAgain | WorkerFailed) -> bool:
        """A member has found that states differ. Returns whether that ends the job: it is drift, or was found in an
        earlier generation, too, and states have not been alike since at this step or a later one."""
        drift = isinstance(said, SettleAgain) and said.drift
        generation = _found_in(said)
        (step, found_in), at = self._tainted, said.tainted
        self._tainted = (max(at, step), generation)
        if drift or (step and found_in != generation):
            since = "" if drift else f"; it is the second time since they were alike, so {BY_SCRIPT}"
            left = f"the newest checkpoint up to step {said.sound}" if said.sound > 0 else "no checkpoint"
            text = f"{why.reason}{since} Correct that; {left} counts"
            self.end("failed", Why(Cause.NONDETERMINISTIC, text), 1)
            return True
        return False

    def alike(self, step: int, digests: Mapping[int, str]) -> None:
        """All members had states with these digests after this step: a repeated step has to give the same."""
        told = {k: digest[:_MOST_DIGEST] for k, digest in digests.items() if 0 <= k < self._env.config.stages}
        self._alike[step] = {**self._alike.get(step, {}), **told}
        self._alike = {at: self._alike[at] for at in sorted(self._alike)[-_ALIKE:]}
        if step + 1 >= self._tainted[0]:
            self._tainted = (0, 0)

    @property
    def known_alike(self) -> tuple[tuple[int, int, str], ...]:
        """Digests of states that were alike, as (step, stage, digest) for plans."""
        return tuple((at, k, digest) for at, of in sorted(self._alike.items()) for k, digest in sorted(of.items()))

    def hung_before(self, step: int, phase: str, generation: int) -> bool:
        """A worker hung in this phase of this step, in this generation. Returns whether one had hung there in
        another generation: then it is no chance."""
        return self._hung.setdefault((step, phase), generation) != generation

    def settled(self, plan: Plan, step: int, cause: Cause) -> None:
        """A member has settled at this step; the first one of a generation shows how far the members went back.

        All members then know which states the plan calls sound. cause: of the fault that the members recover from.
        """
        first = not self._agreement.entered
        if first and (self._fell_from or self.lost_stages):
            self._tell_fallback(plan, step, cause)
        if first and not plan.prepared and step < self.step:
            if self._doubt:
                self._tell_fallback(plan, step, cause)
            self.step, self._doubt = step, None
        else:
            self.reached(step)
            self._doubt = self._doubt if first else None
        self.closed(plan)

    def closed(self, plan: Plan, *, journaled: bool = False) -> None:
        """Members have settled in this plan, and so know which states it calls sound: the doubt is over for good. One
        that opens after that is another one, which a later plan ends."""
        if plan.sound == self.sound >= 0 and self.voided < plan.generation:
            self.sound, self.voided, self._behind = -1, plan.generation, plan.sound
            if not journaled:
                self._env.persist("settled", generation=plan.generation)

    def _tell_fallback(self, plan: Plan, step: int, cause: Cause) -> None:
        """Report lost or doubtful state: where the members go on from, and how many steps are repeated."""
        reached, lost = self._fell_from or self.step, self.lost_stages
        source = f"a copy of step {step}" if step else "step 0, as there is no copy"
        all_gone = self._fell_from > 0 or (bool(lost) and plan.stages == 1)
        if all_gone:
            source = f"the checkpoint of step {step}" if step else "step 0, as there is no checkpoint"
            what = f"all workers with the training state were lost: the job goes on from {source}"
        elif self._doubt:
            cause = self._doubt.cause
            what = f"{self._doubt.reason}; all go back to {source}"
        else:
            who = "; ".join(f"worker {listed(s.worker_id for s in plan.pool(k))} takes stage {k}" for k in lost)
            what = f"stage {listed(lost)} lost its whole pool: {who}, and every stage goes on from {source}"
        redone = max(0, reached - step)
        text = f"{what}: {redone} step{'s are' if redone != 1 else ' is'} repeated"
        known = [at for at in self._alike if step < at <= reached]
        text += f", and compared with the first state of step {listed(known)}" if known else ""
        from_what = "start" if not step else "checkpoint" if all_gone else "copy"
        fields = {"step": step, "generation": plan.generation, "steps_redone": redone, "source": from_what}
        self._env.report("fallback", Why(cause, text), **fields)
        self._fell_from, self.lost_stages, self._doubt = 0, (), None

    # ---- the end

    def end(self, state: str, why: Why, exit_code: int) -> None:
        """The job is over: journal it, and tell all workers and agents."""
        if self.ended is not None:
            return
        self.ended = JobEnded(state=state, cause=why.cause, reason=why.reason, exit_code=exit_code)
        self._env.persist("ended", state=state, cause=why.cause, reason=why.reason, exit_code=exit_code)
        self._env.send_all(self.ended)
        kind = "job_completed" if state == "completed" else "job_failed"
        where = {"step": self.step, "generation": self._agreement.plan.generation}
        self._env.report(kind, why, state=state, exit_code=exit_code, **where)

    def tell_end(self, connection: str) -> bool:
        """Tell a new connection that the job is over, if it is. Returns whether it is."""
        if self.ended is not None:
            self._env.send(connection, self.ended)
        return self.ended is not None

    # ---- from the journal

    def replay_ended(self, ended: JobEnded) -> None:
        """An earlier life of the coordinator had ended the job."""
        self.ended = ended

    def replay_settled(self, generation: int) -> None:
        """The journal says that members had settled in this generation, whose plan called states in doubt. The plan
        may have left the journal since."""
        check(generation <= self._agreement.generation, f"members settled in generation {generation}, which never was")
        if generation == self._agreement.plan.generation:
            self.closed(self._agreement.plan, journaled=True)
        if generation > self.voided:
            self.voided, self._behind = generation, None

    def take_up(self, plan: Plan) -> None:
        """Take the newest plan of the journal, or one that workers follow; it may not have been entered yet. One that
        is prepared leaves open what the plan before it calls in doubt."""
        if plan is not self._agreement.prepared:
            self.sound, self.voided, self._behind = plan.sound, plan.voided, None
        for step, stage, digest in plan.alike:
            self.alike(step, {stage: digest})


@dataclass(frozen=True)
class _Fault:
    """noticed_ns: on the coordinator's clock; notice_s: time from the fault until then."""

    noticed_ns: int
    notice_s: float
    why: Why
    key: WorkerKey | None
    died_unix_ns: int | None


@dataclass(frozen=True)
class _Answer:
    """The plan that answers a fault. phases_ms: of the slowest member."""

    generation: int
    decided_ns: int
    settled_ns: int | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)


class Recovery:
    """From a fault until training goes on; further faults until then belong to it.

    Times are durations on the coordinator's clock; the phases in between are measured by the members, and the
    slowest counts. A recovery ends with the first step that is committed after all have settled. The wall-clock
    times of a death and of that commit are passed through: `timed` is for the runtime, which knows the time of day.
    """

    def __init__(self, env: Environment, agreement: Agreement) -> None:
        self._env, self._agreement = env, agreement
        self._fault: _Fault | None = None
        self._answer: _Answer | None = None

    def begin(
        self, why: Why, *, key: WorkerKey | None = None, notice_ns: int = 0, died_unix_ns: int | None = None
    ) -> None:
        """A fault has been noticed, `notice_ns` after it happened.

        The first fault names the recovery. But a failed link may only be a sign that the peer is dead; if the report
        of its death comes later, that names the recovery.
        """
        known, now = self._fault, self._env.now
        if known is None:
            self._fault = _Fault(now, notice_ns / 1e9, why, key, died_unix_ns)
        elif known.key is None and known.why.cause is Cause.LINK and key is not None:
            notice_s = max(0, notice_ns - (now - known.noticed_ns)) / 1e9
            self._fault = _Fault(known.noticed_ns, notice_s, why, key, died_unix_ns)

    def cause(self, otherwise: Cause) -> Cause:
        """Cause of the fault that the job recovers from, `otherwise` if it does not recover."""
        return self._fault.why.cause if self._fault is not None else otherwise

    def decided(self, generation: int) -> None:
        """The plan that answers the fault was sent; after a further fault it is the newer plan."""
        if self._fault is not None:
            self._answer = _Answer(generation, self._env.now)

    def entered(self, generation: int, phases_ms: dict[str, float]) -> None:
        """A member has settled. When all have, the lost work is repeated."""
        answer = self._answer
        if answer is None or generation < answer.generation:
            return
        for phase, duration in phases_ms.items():
            answer.phases_ms[phase] = max(duration, answer.phases_ms.get(phase, 0.0))
        entered, plan = self._agreement.entered, self._agreement.plan
        if len(entered) >= len(plan.members) and entered >= set(plan.worker_ids):
            self._answer = replace(answer, settled_ns=self._env.now)

    def complete(self, step: int, committed_unix_ns: int = 0) -> None:
        """A step was committed in the new generation, so training goes on: report the recovery. committed_unix_ns:
        time of the commit, 0 if unknown."""
        fault, answer, now = self._fault, self._answer, self._env.now
        if fault is None or answer is None or self._agreement.broken:
            return
        phases = {phase: answer.phases_ms.get(phase, 0.0) / 1e3 for phase in PHASES}
        phases["notice"] = fault.notice_s
        phases["decide"] = (answer.decided_ns - fault.noticed_ns) / 1e9
        phases["redo"] = (now - answer.settled_ns) / 1e9 if answer.settled_ns is not None else 0.0
        self._env.report(
            "recovery_completed",
            fault.why,
            generation=self._agreement.plan.generation,
            step=step,
            **(asdict(fault.key) if fault.key is not None else {"worker_id": None, "incarnation": None}),
            duration_s=fault.notice_s + (now - fault.noticed_ns) / 1e9,
            phases_s=phases,
            died_unix_ns=fault.died_unix_ns,
            committed_unix_ns=committed_unix_ns,
        )
        self._fault = self._answer = None


def timed(fields: dict[str, Any], now_unix_ns: int) -> dict[str, Any]:
    """The report of a recovery, corrected by the time of day of the death and of the commit that ended it, which may
    have been a while ago. now_unix_ns: of the report."""
    said = {key: value for key, value in fields.items() if key != "committed_unix_ns"}
    died_ns, committed_ns, phases = fields.get("died_unix_ns"), fields.get("committed_unix_ns"), {**fields["phases_s"]}
    known_s, notice_s = fields["duration_s"] - phases["notice"], phases["notice"]
    if died_ns is not None:
        notice_s = max(0.0, (now_unix_ns - died_ns) / 1e9 - known_s)
    most_s = known_s - sum(spent_s for phase, spent_s in phases.items() if phase not in ("notice", "redo"))
    late_s = max(0.0, min(most_s, (now_unix_ns - committed_ns) / 1e9)) if committed_ns else 0.0
    phases |= {"notice": notice_s, "redo": max(0.0, phases["redo"] - late_s)}
    end_ns = now_unix_ns - round(late_s * 1e9)
    return {**said, "time_unix_ns": end_ns, "duration_s": known_s + notice_s - late_s, "phases_s": phases}
