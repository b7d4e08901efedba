"""Checkpoints as far as the coordinator goes: on request, and before a job ends that could go on later. Pure.

Before the end it makes a plan for at once with the same members, which says that they take a checkpoint as soon as they
have settled: that interrupts a step wherever it is, and all of them stand at the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator.agreement import Agreement
from everstep.protocol.coordinator.alarms import EndDue
from everstep.protocol.coordinator.desk import Desk
from everstep.protocol.coordinator.membership import Membership
from everstep.protocol.coordinator.progress import JobProgress
from everstep.protocol.coordinator.quorum import Quorum
from everstep.protocol.messages import Command, CommandReply, Saved, SaveNow


@dataclass(frozen=True)
class Ending:
    """How the job ends once a checkpoint is complete, or at `until_ns`."""

    state: str
    why: Why
    exit_code: int
    until_ns: int


class Saving:
    """ending: how the job is about to end, if it is."""

    def __init__(
        self, desk: Desk, membership: Membership, agreement: Agreement, progress: JobProgress, quorum: Quorum
    ) -> None:
        self.ending: Ending | None = None
        self._desk, self._membership, self._agreement = desk, membership, agreement
        self._progress, self._quorum = progress, quorum
        self._requests: list[tuple[str, int]] = []  # (connection, request) that wait for a checkpoint
        self._asked_for = Why(Cause.REQUESTED, "requested")  # the newest of them

    # ---- before the end

    def end_after_saving(self, state: str, why: Why, exit_code: int, grace_ns: int) -> None:
        """End the job, with a checkpoint first where that is possible; at once if not."""
        agreement, quorum = self._agreement, self._quorum
        able = agreement.entered and not quorum.starting_over and not quorum.waiting and agreement.survivors()
        if not able or grace_ns <= 0:
            self._progress.end(state, why, exit_code)
            return
        if self.ending is not None:
            return
        self.ending = Ending(state, why, exit_code, self._desk.now + grace_ns)
        self._desk.alarms.set(EndDue(), self.ending.until_ns)
        agreement.break_off(Why(why.cause, f"{why.reason}: a checkpoint is taken first"))

    def time_is_up(self) -> None:
        """The time for a checkpoint before the end is over."""
        ending = self.ending
        if ending is None or self._progress.ended is not None:
            return
        if self._desk.now < ending.until_ns:
            self._desk.alarms.set(EndDue(), ending.until_ns)
            return
        self.end_with("no checkpoint was completed in time")

    def end_with(self, outcome: str) -> None:
        """The end that was about to come is there; `outcome`: of the checkpoint before it."""
        ending = self.ending
        if ending is not None:
            why = Why(ending.why.cause, f"{ending.why.reason}; {outcome}")
            self._progress.end(ending.state, why, ending.exit_code)

    # ---- on request

    def ask(self, connection: str, message: Command) -> None:
        """Somebody wants a checkpoint; the reply comes when it is there."""
        self._requests.append((connection, message.request))
        cause = Cause.read(message.args.get("cause") or Cause.REQUESTED)
        self._asked_for = Why(cause, str(message.args.get("reason") or "requested"))
        self.remind()

    def remind(self) -> None:
        """Tell the leader what is wanted of it; the one before may have died."""
        plan = self._agreement.plan
        leader = plan.leader(0) if plan is not None and self._agreement.entered else None
        if leader is None or not self._requests:
            return
        worker = self._membership.workers.get(leader)
        if worker is not None:
            self._desk.send(worker.connection, SaveNow(cause=self._asked_for.cause, reason=self._asked_for.reason))

    def saved(self, message: Saved) -> None:
        """A checkpoint that was asked for has ended, one way or the other."""
        if self.ending is not None:
            plan = self._agreement.plan
            if plan is not None and plan.save:
                where = f"checkpoint of step {message.step} in {message.where}"
                self.end_with(where if message.ok else f"no checkpoint: {message.reason}")
            return
        error = "" if message.ok else f"no checkpoint of step {message.step}: {message.reason}"
        self._reply(error, {"step": message.step, "path": message.where} if message.ok else {})

    def give_up(self) -> None:
        """Once the job has ended, tell those who wait for a checkpoint that there will be none."""
        ended = self._progress.ended
        if ended is not None:
            self._reply(f"the job ended before a checkpoint was complete ({ended.reason})", {})

    def _reply(self, error: str, result: dict[str, object]) -> None:
        waiting, self._requests = self._requests, []
        for connection, request in waiting:
            reply = CommandReply(request=request, ok=not error, error=error, result=result)
            self._desk.send(connection, reply)
