"""Checkpoints that the coordinator orders: on request, and before a job or a worker ends. Pure.

Before a job ends that could go on later, a plan with the same members tells them to take a checkpoint as soon as
they have settled. That interrupts a step at any point, and all members are at the same step.

A worker whose loop has raised still holds the state of the newest step, and stays until it is dismissed. If no other
worker that could go on holds that state (for example because all have raised), the members take a checkpoint first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.agreement import Agreement, JobProgress, stages_lost
from everstep.protocol.coordinator.arrivals import Quorum
from everstep.protocol.coordinator.environment import Alarm, Environment, describe
from everstep.protocol.coordinator.loops_left import Leaving
from everstep.protocol.coordinator.membership import Membership, Worker
from everstep.protocol.messages import Command, CommandReply, Saved, SaveNow, WorkerFailed


@dataclass(frozen=True)
class Ending:
    """How the job ends once a checkpoint is complete, or at `until_ns`."""

    state: str
    why: Why
    exit_code: int
    until_ns: int


@dataclass(frozen=True)
class Stop:
    """A user's request to end the job, after a checkpoint if one can be complete within `grace_ns`."""

    why: Why
    exit_code: int
    grace_ns: int


class Saving:
    """ending: how the job is about to end, None if it is not. leaving: loops that were left before the last step."""

    def __init__(
        self, env: Environment, membership: Membership, agreement: Agreement, progress: JobProgress, quorum: Quorum
    ) -> None:
        self.ending: Ending | None = None
        self._env, self._membership, self._agreement = env, membership, agreement
        self._progress, self._quorum = progress, quorum
        self._requests: list[tuple[str, int]] = []  # (connection, request) that wait for a checkpoint
        self._asked_for = SaveNow(cause=Cause.REQUESTED, reason="requested")  # the newest of them
        # By step and signature: who failed like this first, and in which generation.
        self._first: dict[tuple[int, str], tuple[WorkerKey, int]] = {}
        self._staying: dict[WorkerKey, Why] = {}
        self._stay_until_ns = 0
        self._stop: Stop | None = None  # the newest that the journal has
        self._saved: Saved | None = None  # the last checkpoint that was complete
        self.leaving = Leaving(env, agreement, self._end_disagreed, lambda: self.ending is not None)

    # ---- before the end

    def stop(self, stop: Stop, *, lasting: bool) -> None:
        """End the job at a user's request. lasting: nobody will repeat it to a coordinator that follows."""
        before = self.ending
        self.end_after_saving("interrupted", stop.why, stop.exit_code, stop.grace_ns)
        if lasting and before is None and self.ending is not None:
            fields = {"exit_code": stop.exit_code, "grace_ns": stop.grace_ns}
            self._env.persist("stop", cause=stop.why.cause, reason=stop.why.reason, **fields)

    def replay_stop(self, stop: Stop | None) -> None:
        """An earlier life of the coordinator was asked for this. None: what was asked before counts no more."""
        self._stop = stop

    def stop_again(self) -> None:
        """After a restart: what an earlier life was asked for is done now, with all of its time."""
        if self._stop is not None and self._progress.ended is None:
            self.stop(self._stop, lasting=False)

    def end_after_saving(self, state: str, why: Why, exit_code: int, grace_ns: int) -> None:
        """End the job, with a checkpoint first if possible, else at once. A second call changes nothing: the first
        checkpoint is under way."""
        if self.ending is not None:
            return
        agreement, quorum = self._agreement, self._quorum
        trained = (
            agreement.plan.previous and self._progress.step
        )  # members that have not settled hold the state of before
        there = (
            agreement.entered or trained or self._membership.in_grace
        )  # after a restart members are yet to come back
        able = there and not quorum.starting_over and agreement.survivors()
        if not able or grace_ns <= 0 or not self._env.config.save_ns:
            self._progress.end(state, why, exit_code)
        else:
            self.ending = Ending(state, why, exit_code, self._env.now + grace_ns)
            self._env.alarms.set(Alarm.END, self.ending.until_ns)
            agreement.break_off(Why(why.cause, f"{why.reason}: a checkpoint is taken first"))

    def _end_disagreed(self, why: Why) -> None:
        self.end_after_saving("failed", why, 1, self._env.config.save_ns)

    def end_due(self) -> None:
        """There may be no more time for the last checkpoint."""
        if self.ending is not None and self._env.now < self.ending.until_ns:
            self._env.alarms.set(Alarm.END, self.ending.until_ns)
        else:
            self.end_with("no checkpoint was completed in time")

    def pardon(self, gap_ns: int) -> None:
        """The coordinator was away for this long: nobody could tell it of a checkpoint, or of a loop that was left."""
        if self.ending is not None:
            self.ending = replace(self.ending, until_ns=self.ending.until_ns + gap_ns)
        self._stay_until_ns += gap_ns
        self.leaving.pardon(gap_ns)

    def end_without_workers(self) -> None:
        """No worker is left, perhaps because the workers of a host have ended the job by themselves."""
        saved = self._saved
        known = saved is not None and saved.step >= self._progress.step
        self.end_with(_where(saved) if known and saved is not None else "no checkpoint is known, and no worker is left")

    def end_with(self, outcome: str) -> None:
        """End the job as planned. outcome: of the checkpoint before it."""
        ending = self.ending
        if ending is not None:
            why = Why(ending.why.cause, f"{ending.why.reason}; {outcome}")
            self._progress.end(ending.state, why, ending.exit_code)

    # ---- on request

    def ask(self, connection: str, message: Command) -> None:
        """A command requests a checkpoint; the reply follows when it is complete."""
        self._requests.append((connection, message.request))
        cause = Cause.read(message.args.get("cause") or Cause.REQUESTED)
        self._asked_for = SaveNow(cause=cause, reason=str(message.args.get("reason") or "requested"))
        self.remind()

    def remind(self) -> None:
        """Tell the leader about requested checkpoints; an earlier leader may have died."""
        if self._requests and self._agreement.entered:
            leader = self._membership.workers.get(self._agreement.plan.leader(0))
            if leader is not None:
                self._env.send(leader.connection, self._asked_for)

    def saved(self, message: Saved, *, last: bool) -> None:
        """A checkpoint has ended. last: the plan in force asked for it."""
        self._saved = message if message.ok else self._saved
        if self.ending is None:
            error = "" if message.ok else f"no checkpoint of step {message.step}: {message.reason}"
            self._reply(error, {"step": message.step, "path": message.where} if message.ok else {})
        elif last:
            self.end_with(_where(message) if message.ok else f"no checkpoint: {message.reason}")

    def give_up(self) -> None:
        """The job has ended: tell clients that wait for a checkpoint that there will be none."""
        ended = self._progress.ended
        if ended is not None:
            self._reply(f"the job ended before a checkpoint was complete ({ended.reason})", {})

    def _reply(self, error: str, result: dict[str, object]) -> None:
        waiting, self._requests = self._requests, []
        for connection, request in waiting:
            reply = CommandReply(request=request, ok=not error, error=error, result=result)
            self._env.send(connection, reply)

    # ---- workers that end by an exception

    @property
    def staying(self) -> dict[WorkerKey, Why]:
        """Living workers whose loop has raised, and which stay until a checkpoint is taken."""
        return {worker.key: self._staying[worker.key] for worker in self._membership.living(self._staying)}

    def last_words(self, worker: Worker, message: WorkerFailed) -> bool:
        """A worker ends by an exception. Returns whether it may go at once.

        The same error at the same step in a later generation is the user's code, not chance: it came in another
        life, or in the worker that took over the first one's work. Several at once prove nothing.
        """
        who, cause = describe(worker.key), message.cause
        members = self._progress.step and self._agreement.survivors()  # they hold the state
        apart = members and not self._agreement.plan.has(worker.key)
        disk = members and cause is Cause.DISK and message.fatal  # of one host, perhaps: the others go on
        if disk and apart:
            return True
        if message.fatal and not disk:
            why = Why(cause, f"{who}: {message.reason}")
            if not message.holds and not apart:
                self._progress.end("failed", why, message.exit_code)
            elif self.ending is None:
                self.end_after_saving("failed", why, message.exit_code, self._env.config.save_ns)
            return False
        if message.sound >= 0:  # it is outvoted
            if not self._progress.differ(Why(cause, message.reason), message) and self._agreement.plan.has(worker.key):
                self._progress.in_doubt(Why(cause, message.reason), message)
            return True
        now = (worker.key, message.generation)
        first, generation = self._first.setdefault((message.step, message.signature), now)
        needed = message.holds and self._is_needed(worker)
        again = first != worker.key and not 0 < message.generation <= generation
        if again and not (disk and first.worker_id == worker.key.worker_id):
            reason = f"{who} failed after step {message.step}, as {describe(first)} did: {message.reason}"
            if self.ending is None:
                code = message.exit_code if disk else 1
                self.end_after_saving("failed", Why(cause, reason), code, self._env.config.save_ns)
            others = len(self._agreement.survivors()) > 1  # they hold the state
            return self.ending is not None and not needed and others
        if needed:
            self._staying[worker.key] = Why(cause, message.reason)
            self._stay_until_ns = self._env.now + self._env.config.save_ns
            self._env.alarms.set(Alarm.FAILED, self._stay_until_ns)
            text = f"{who}: {message.reason}; nobody else holds its state, so a checkpoint is taken first"
            self._agreement.break_off(Why(cause, text))
        return not needed

    def _is_needed(self, worker: Worker) -> bool:
        """Whether the worker, with those that stay, holds a stage that the members that could go on lack."""
        agreement, staying = self._agreement, {key.worker_id for key in self.staying}
        left_out = not agreement.plan.has(worker.key) or worker.key.worker_id in agreement.empty_handed()
        if left_out or not self._env.config.save_ns:
            return False
        able = {w.key.worker_id for w in agreement.survivors()} - staying - {worker.key.worker_id}
        lacking = stages_lost(agreement, able | staying | {worker.key.worker_id})
        return not set(lacking).issuperset(stages_lost(agreement, able))

    def waits(self) -> bool:
        """Whether workers that have raised still have time for a checkpoint; if so, ring when it is over."""
        if self._staying and self._env.now < self._stay_until_ns:
            self._env.alarms.set(Alarm.FAILED, self._stay_until_ns)
            return True
        return False

    def let_go(self) -> list[tuple[Worker, Why]]:
        """The checkpoint is complete, or its time is over. Returns the workers that may go now, each with the
        reason."""
        staying, self._staying = self._staying, {}
        return [(worker, staying[worker.key]) for worker in self._membership.living(sorted(staying))]


def _where(saved: Saved) -> str:
    return f"checkpoint of step {saved.step} in {saved.where}"
