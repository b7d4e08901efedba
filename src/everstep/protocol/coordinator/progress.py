"""How far the job is, how fast, what has thrown it back, and how it ended. Pure.

States can be lost (all who held a stage are gone) or be in doubt (they differ among workers). How far the members then
go back is known when the first of them has settled; only then it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan
from everstep.protocol.coordinator.agreement import Agreement
from everstep.protocol.coordinator.desk import Desk
from everstep.protocol.coordinator.words import listed
from everstep.protocol.messages import JobEnded


class JobProgress:
    """step: the newest that is known to be committed. lost_stages: whose whole pool was gone, until it is told what
    they were restored from. sound: states after this step are tainted, and no generation was entered yet whose plan
    says so; -1 if there is no doubt. ended: how the job has, if it has.
    """

    def __init__(self, desk: Desk, agreement: Agreement) -> None:
        self.step = 0
        self.lost_stages: tuple[int, ...] = ()
        self.sound = -1
        self.ended: JobEnded | None = None
        self._desk, self._agreement = desk, agreement
        self._step_times_ms: deque[float] = deque(maxlen=100)
        self._fell_from = 0  # the step that had been reached when all state was lost
        self._doubt: Why | None = None  # why all go back
        self._tainted: dict[int, int] = {}  # step before which states differed -> generation in which that was found

    @property
    def step_times_ms(self) -> Sequence[float]:
        """How long the last steps took."""
        return self._step_times_ms

    def reached(self, step: int) -> None:
        """Somebody has committed this step."""
        self.step = max(self.step, step)

    def took(self, step_ms: float) -> None:
        """A step has taken so long; 0: that is not known."""
        if step_ms > 0:
            self._step_times_ms.append(step_ms)

    # ---- set-backs

    def lose(self, stages: Sequence[int]) -> None:
        """The whole pools of these stages are gone (none: they are not)."""
        self.lost_stages = tuple(stages)

    def fall_back(self, step: int) -> bool:
        """All state is lost but what is known to be of `step`, 0 if none is. Returns whether it is told only when it is
        known how many steps are done again."""
        self._fell_from = 0 if step else max(self._fell_from, self.step)
        self.step, self.lost_stages = step, ()
        return self._fell_from > 0

    def in_doubt(self, why: Why, sound: int) -> None:
        """Some worker has found states to be tainted. It may be the only one, and gone before all have heard of it."""
        self._doubt = why
        self.sound = sound if self.sound < 0 else min(self.sound, sound)

    def known_to_all(self, plan: Plan) -> None:
        """Somebody has settled in a plan, so all members know which states it says are sound."""
        if plan.sound == self.sound:
            self.sound = -1

    def differed_before(self, step: int, generation: int) -> bool:
        """States differed before this step, as was found in this generation. Returns whether they had before, in
        another one: then that is no chance."""
        return self._tainted.setdefault(step, generation) != generation

    def settled(self, plan: Plan, step: int, cause: Cause) -> None:
        """A member has settled at this step; the first one of a generation knows whether there was a way back.

        cause: of what the members recover from.
        """
        first = not self._agreement.entered
        if first and (self._fell_from or self.lost_stages):
            self._tell_fallback(plan, step, cause)
        if not first or plan.prepared or step >= self.step:
            self.reached(step)
            self._doubt = None if not first else self._doubt
            return
        if self._doubt:
            self._tell_fallback(plan, step, cause)
        self.step, self._doubt = step, None

    def _tell_fallback(self, plan: Plan, step: int, cause: Cause) -> None:
        """State was lost, or is in doubt: what the members go on from, and how many steps are done again."""
        reached, lost = self._fell_from or self.step, self.lost_stages
        source = f"a copy of step {step}" if step else "step 0, for there is no copy"
        if self._fell_from:
            source = f"the checkpoint of step {step}" if step else "step 0, for there is no checkpoint"
            what = f"every worker that held the training state was gone: all go on from {source}"
        elif self._doubt:
            what = f"{self._doubt.reason}; all go back to {source}"
        else:
            who = "; ".join(f"worker {listed({s.worker_id for s in plan.pool(k)})} takes stage {k}" for k in lost)
            what = f"stage {listed(set(lost))} had lost its whole pool: {who}, and every stage goes on from {source}"
        redone = max(0, reached - step)
        text = f"{what}: {redone} step{'s are' if redone != 1 else ' is'} done again, to the same bits"
        self._desk.report(
            "fallback",
            Why(self._doubt.cause if self._doubt and not self._fell_from else cause, text),
            step=step,
            generation=plan.generation,
            steps_redone=redone,
            source="start" if not step else "checkpoint" if self._fell_from else "copy",
        )
        self._fell_from, self.lost_stages, self._doubt = 0, (), None

    # ---- the end

    def end(self, state: str, why: Why, exit_code: int) -> None:
        """The job is over: journal it, tell all workers and agents."""
        if self.ended is not None:
            return
        self.ended = JobEnded(state=state, cause=why.cause, reason=why.reason, exit_code=exit_code)
        self._desk.persist("ended", state=state, cause=why.cause, reason=why.reason, exit_code=exit_code)
        self._desk.send_all(self.ended)
        self._desk.report(
            "job_completed" if state == "completed" else "job_failed",
            why,
            state=state,
            exit_code=exit_code,
            step=self.step,
            generation=self._agreement.in_force,
        )

    def replay_ended(self, ended: JobEnded) -> None:
        """A former life of the coordinator had ended the job."""
        self.ended = ended

    def replay_plan(self, plan: Plan) -> None:
        """The newest plan of the journal: nobody may have entered it yet."""
        self.sound = plan.sound
